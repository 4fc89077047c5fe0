"""Workflows for the browser tests, and what they ask of the page."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

PATCH = 2
_SEEDS = itertools.count(1)  # the server runs nothing that it has run already
SAMPLER = 5
#: Values of VC-Attention Patch's widgets in the order of its schema: tiny models, any machine.
VALUES = ("auto", "fast", "first steps", 0.25, 4, 0, 64, "", 0, 1, 1, "fall back", "spec")
#: Settings with which nothing lies over the canvas.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Workflow.ShowMissingModelsWarning": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.ColorPalette": "dark",
    "Comfy.VueNodes.Enabled": False,
    "Comfy.Workflow.Persist": False,
}


class Workflow:
    """A workflow as the editor saves it, put together node by node."""

    def __init__(self) -> None:
        self.id = str(uuid.uuid4())  # the results of a run belong to a workflow
        self.nodes: dict[int, dict[str, Any]] = {}
        self.links: list[list[Any]] = []

    def add(self, node_id: int, kind: str, values: list[Any], inputs: str = "", outputs: str = "", **more: Any) -> int:
        """Add a node. inputs, outputs: "name:TYPE name:TYPE"."""
        self.nodes[node_id] = {
            "id": node_id,
            "type": kind,
            "pos": [380 * ((node_id - 1) % 4), 800 * ((node_id - 1) // 4)],
            "size": [340, 120],
            "flags": {},
            "order": node_id,
            "mode": 0,
            "properties": {},
            "inputs": [{"name": n, "type": t, "link": None} for n, t in _slots(inputs)],
            "outputs": [{"name": n, "type": t, "links": []} for n, t in _slots(outputs)],
            "widgets_values": values,
            **more,
        }
        return node_id

    def link(self, source: int, name: str, target: int, to: str) -> None:
        """Connect output `name` of `source` with input `to` of `target`."""
        number = len(self.links) + 1
        outputs, inputs = self.nodes[source]["outputs"], self.nodes[target]["inputs"]
        slot = next(i for i, entry in enumerate(outputs) if entry["name"] == name)
        place = next(i for i, entry in enumerate(inputs) if entry["name"] == to)
        outputs[slot]["links"].append(number)
        inputs[place]["link"] = number
        self.links.append([number, source, slot, target, place, outputs[slot]["type"]])

    def json(self) -> dict[str, Any]:
        """The workflow as the editor would save it."""
        return {
            "id": self.id,
            "revision": 0,
            "last_node_id": max(self.nodes),
            "last_link_id": len(self.links),
            "nodes": list(self.nodes.values()),
            "links": self.links,
            "groups": [],
            "config": {},
            "extra": {},
            "version": 0.4,
        }


def _slots(text: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, _, kind in (entry.partition(":") for entry in text.split())]


def tiny_run(steps: int = 8, size: int = 128, values: tuple[Any, ...] = VALUES) -> Workflow:
    """Tiny Wan through VC-Attention Patch and KSampler to a saved latent."""
    flow = Workflow()
    flow.add(1, "UNETLoader", ["tiny_wan22_t2v.safetensors", "default"], outputs="MODEL:MODEL")
    flow.add(PATCH, "VCAttentionPatch", list(values), "model:MODEL", "model:MODEL")
    flow.add(3, "VCDemoConditioning", ["a boat"], outputs="CONDITIONING:CONDITIONING")
    flow.add(4, "VCDemoConditioning", ["a storm"], outputs="CONDITIONING:CONDITIONING")
    flow.add(
        SAMPLER,
        "KSampler",
        [next(_SEEDS), "fixed", steps, 4.0, "euler", "simple", 1.0],
        "model:MODEL positive:CONDITIONING negative:CONDITIONING latent_image:LATENT",
        "LATENT:LATENT",
    )
    flow.add(6, "EmptyHunyuanLatentVideo", [size, size, 9, 1], outputs="LATENT:LATENT")
    flow.add(7, "SaveLatent", ["latents/t"], "samples:LATENT")
    flow.link(1, "MODEL", PATCH, "model")
    flow.link(PATCH, "model", SAMPLER, "model")
    flow.link(3, "CONDITIONING", SAMPLER, "positive")
    flow.link(4, "CONDITIONING", SAMPLER, "negative")
    flow.link(6, "LATENT", SAMPLER, "latent_image")
    flow.link(SAMPLER, "LATENT", 7, "samples")
    return flow


def ways() -> dict[str, tuple[Workflow, list[str]]]:
    """Name -> (workflow, the rows that its timeline shows, one letter a step)."""
    return {
        "other model nodes": _through_models(),
        "a bypassed node": _bypassed(),
        "a muted sampler": _muted(),
        "a reroute": _rerouted(),
        "two samplers in a row": _two_samplers(),
        "denoise below 1": _denoise(),
        "custom sampler with guider": _guider(),
        "split sigmas": _split(),
        "steps from a primitive": _primitive(),
        "another patch behind": _replaced(),
        "no sampler": _alone(),
    }


def _patch_to(sampler: str, values: list[Any], inputs: str = "model:MODEL", node_id: int = SAMPLER) -> Workflow:
    flow = Workflow()
    flow.add(PATCH, "VCAttentionPatch", list(VALUES), "model:MODEL", "model:MODEL")
    flow.add(node_id, sampler, values, inputs, "LATENT:LATENT")
    return flow


def _ksampler(steps: int = 8, denoise: float = 1.0) -> Workflow:
    return _patch_to("KSampler", [1, "fixed", steps, 4.0, "euler", "simple", denoise])


def _through_models() -> tuple[Workflow, list[str]]:
    flow = _ksampler()
    flow.add(3, "ModelSamplingSD3", [8.0], "model:MODEL", "MODEL:MODEL")
    flow.add(4, "VCAttentionQuality", ["", "", 0.0, ""], "model:MODEL", "model:MODEL")
    flow.link(PATCH, "model", 3, "model")
    flow.link(3, "MODEL", 4, "model")
    flow.link(4, "model", SAMPLER, "model")
    return flow, ["grpppppp"]


def _bypassed() -> tuple[Workflow, list[str]]:
    flow = _ksampler()
    flow.add(3, "ModelSamplingSD3", [8.0], "model:MODEL", "MODEL:MODEL", mode=4)
    flow.link(PATCH, "model", 3, "model")
    flow.link(3, "MODEL", SAMPLER, "model")
    return flow, ["grpppppp"]


def _muted() -> tuple[Workflow, list[str]]:
    flow = _ksampler()
    flow.nodes[SAMPLER]["mode"] = 2
    flow.link(PATCH, "model", SAMPLER, "model")
    return flow, []


def _rerouted() -> tuple[Workflow, list[str]]:
    flow = _ksampler()
    flow.add(3, "Reroute", [], ":*", ":MODEL")
    flow.link(PATCH, "model", 3, "")
    flow.link(3, "", SAMPLER, "model")
    return flow, ["grpppppp"]


def _advanced(start: int, end: int, leftover: str) -> list[Any]:
    return ["enable", 1, "fixed", 20, 4.0, "euler", "simple", start, end, leftover]


def _two_samplers() -> tuple[Workflow, list[str]]:
    flow = _patch_to("KSamplerAdvanced", _advanced(0, 4, "enable"))
    flow.add(6, "KSamplerAdvanced", _advanced(4, 10000, "disable"), "model:MODEL", "LATENT:LATENT")
    flow.link(PATCH, "model", SAMPLER, "model")
    flow.link(PATCH, "model", 6, "model")
    return flow, ["grrr", "g" + 15 * "p"]


def _denoise() -> tuple[Workflow, list[str]]:
    flow = _ksampler(8, 0.8)  # the last 8 of 10: step 3 of the whole schedule is the first here
    flow.link(PATCH, "model", SAMPLER, "model")
    return flow, ["gppppppp"]


def _guider() -> tuple[Workflow, list[str]]:
    flow = _patch_to("SamplerCustomAdvanced", [], "noise:NOISE guider:GUIDER sigmas:SIGMAS", 6)
    flow.add(3, "CFGGuider", [4.0], "model:MODEL", "GUIDER:GUIDER")
    flow.add(4, "BasicScheduler", ["simple", 12, 1.0], "model:MODEL", "SIGMAS:SIGMAS")
    flow.link(PATCH, "model", 3, "model")
    flow.link(PATCH, "model", 4, "model")
    flow.link(3, "GUIDER", 6, "guider")
    flow.link(4, "SIGMAS", 6, "sigmas")
    return flow, ["grr" + 9 * "p"]


def _split() -> tuple[Workflow, list[str]]:
    flow = _patch_to("SamplerCustom", [True, 1, "fixed", 4.0], "model:MODEL sigmas:SIGMAS", 6)
    flow.add(4, "BasicScheduler", ["simple", 12, 1.0], "model:MODEL", "SIGMAS:SIGMAS")
    flow.add(5, "SplitSigmas", [2], "sigmas:SIGMAS", "high_sigmas:SIGMAS low_sigmas:SIGMAS")
    flow.link(PATCH, "model", 6, "model")
    flow.link(4, "SIGMAS", 5, "sigmas")
    flow.link(5, "low_sigmas", 6, "sigmas")
    return flow, ["g" + 9 * "p"]


def _primitive() -> tuple[Workflow, list[str]]:
    flow = _ksampler()
    flow.nodes[SAMPLER]["inputs"].append({"name": "steps", "type": "INT", "widget": {"name": "steps"}, "link": None})
    flow.add(3, "PrimitiveInt", [4, "fixed"], "", "INT:INT")
    flow.link(PATCH, "model", SAMPLER, "model")
    flow.link(3, "INT", SAMPLER, "steps")
    return flow, ["gppp"]


def _replaced() -> tuple[Workflow, list[str]]:
    flow = _ksampler()
    flow.add(3, "VCAttentionPatch", list(VALUES), "model:MODEL", "model:MODEL", title="The second")
    flow.link(PATCH, "model", 3, "model")
    flow.link(3, "model", SAMPLER, "model")
    return flow, []


def _alone() -> tuple[Workflow, list[str]]:
    return _ksampler(), []


BORDERED = 8  # the subgraph node


def subgraph(steps: int = 4) -> dict[str, Any]:
    """`tiny_run` with the patch inside a subgraph: the model comes in and leaves over the subgraph's border."""
    inner = Workflow()
    inner.add(PATCH, "VCAttentionPatch", list(VALUES), "model:MODEL", "model:MODEL")
    inner.nodes[PATCH]["inputs"][0]["link"] = 1
    inner.nodes[PATCH]["outputs"][0]["links"] = [2]
    name = "22222222-3333-4444-8555-666666666666"
    ends = {"origin_slot": 0, "target_slot": 0, "type": "MODEL"}
    outer = tiny_run(steps, 96)
    patch = outer.nodes.pop(PATCH)
    outer.nodes[BORDERED] = patch | {"id": BORDERED, "type": name, "widgets_values": []}
    outer.links = [[BORDERED if i in (1, 3) and v == PATCH else v for i, v in enumerate(link)] for link in outer.links]
    flow = outer.json()
    slots = {
        side: [
            {"id": f"33333333-3333-4444-8555-66666666666{i}", "name": "model", "type": "MODEL", "linkIds": [i + 1]}
            | {"pos": [0, 0]}
        ]
        for i, side in enumerate(("inputs", "outputs"))
    }
    flow["definitions"] = {
        "subgraphs": [
            {
                "id": name,
                "version": 1,
                "state": {"lastGroupId": 0, "lastNodeId": 9, "lastLinkId": 9, "lastRerouteId": 0},
                "revision": 0,
                "config": {},
                "name": "Patched",
                "inputNode": {"id": -10, "bounding": [-300, 0, 120, 60]},
                "outputNode": {"id": -20, "bounding": [600, 0, 120, 60]},
                **slots,
                "widgets": [],
                "nodes": list(inner.nodes.values()),
                "groups": [],
                "links": [
                    {"id": 1, "origin_id": -10, "target_id": PATCH, **ends},
                    {"id": 2, "origin_id": PATCH, "target_id": -20, **ends},
                ],
                "extra": {},
            }
        ]
    }
    return flow
