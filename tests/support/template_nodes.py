"""Nodes that the ComfyUI of a test run may lack, by what their publishers say of their inputs; nothing of them runs.

tests/tools/data/object_info_0.33.0.json: the nodes of the MiniMax-H3 template, from `INPUT_TYPES` of ComfyUI 0.33.0 run
by us. tests/tools/data/object_info_wanvideowrapper.json: those of the LongCat template, from `INPUT_TYPES` in
kijai/ComfyUI-WanVideoWrapper as of 2026 (nodes.py, nodes_model_loading.py, nodes_sampler.py). In both, `folder` stands
for the files of a folder of ComfyUI/models, and texts for people are left out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "tools" / "data"
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"

Info = dict[str, dict[str, Any]]


def recorded(name: str, files: Callable[[str], Sequence[str]] | None = None) -> Info:
    """The nodes of object_info_`name`.json. files: names of the files in a folder of models, else none are known."""
    info: Info = json.loads((DATA / f"object_info_{name}.json").read_text(encoding="utf-8"))
    for entry in info.values():
        for spec in _specs(entry):
            if len(spec) > 1 and "folder" in spec[1]:
                spec[1]["options"] = list(files(spec[1].pop("folder"))) if files is not None else []
    return info


def _specs(entry: dict[str, Any]) -> Iterator[list[Any]]:
    for section in entry["input"].values():
        yield from section.values()


def stand_in(kind: str, entry: dict[str, Any]) -> type:
    """A node class that ComfyUI validates prompts against, and that does nothing."""
    inputs = copy.deepcopy(entry["input"])
    for section in inputs.values():
        for name, spec in section.items():
            options = spec[1] if len(spec) > 1 else {}
            if spec[0] == DYNAMIC:  # an older core knows a choice without what it brings along
                section[name] = ([choice["key"] for choice in options["options"]], {})
            elif spec[0] == "COMBO":
                section[name] = (options.get("options", []), {})
            else:
                section[name] = (spec[0], options)

    def input_types(cls: type) -> dict[str, Any]:
        return inputs

    return type(
        kind,
        (),
        {
            "INPUT_TYPES": classmethod(input_types),
            "RETURN_TYPES": tuple(entry["output"]),
            "RETURN_NAMES": tuple(entry["output_name"]),
            "OUTPUT_NODE": bool(entry.get("output_node")),
            "FUNCTION": "run",
            "CATEGORY": "stand-in",
        },
    )


def differences(definition: Any, info: dict[str, Any]) -> list[str]:
    """Where a line of `definitions` is not what a node says of itself: names, types, order, required or optional.

    A newer core may add inputs at the end, and outputs; it also let `format` of SaveVideo bring its own inputs along.
    """
    found = [
        (name, "COMBO" if isinstance(spec[0], list | tuple) or spec[0] == DYNAMIC else spec[0], section == "optional")
        for section in ("required", "optional")
        for name, spec in (info["input"].get(section) or {}).items()
    ]
    newer = any(spec[0] == DYNAMIC for section in info["input"].values() for spec in section.values())
    mine = [(item.name, item.kind, item.optional or (newer and item.name == "codec")) for item in definition.inputs]
    wrong = [f"{b} instead of {a}" for a, b in zip(found, mine, strict=False) if a != b]
    if len(mine) > len(found):
        wrong.append(f"{len(mine)} inputs instead of {len(found)}")
    if not all(optional for _, _, optional in found[len(mine) :]):
        wrong.append(f"lacks {found[len(mine) :]}")
    outputs = [kind for _, kind in definition.outputs]
    if list(info["output"])[: len(outputs)] != outputs:
        wrong.append(f"outputs {outputs} instead of {info['output']}")
    return wrong
