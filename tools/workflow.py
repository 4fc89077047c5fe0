"""From a workflow file as ComfyUI's editor saves it to the prompt that its HTTP API takes. Standard library only.

    prompt = to_prompt(json.loads(path.read_text()), server.object_info())

The editor does this in the browser when someone presses Run. The rules that matter: widget values are positional, in
the order of the node's definition; a seed has one more value behind it (what to do after a run); notes, reroutes and
muted nodes do not exist for the server; a bypassed node hands its input on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .messages import ToolError

#: Inputs of these types are widgets, with a value in `widgets_values`, unless `forceInput` makes them sockets.
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC)
#: Inputs that the editor multiplies as they are connected.
UNKNOWN_TYPES = ("COMFY_AUTOGROW_V3", "COMFY_DYNAMICSLOT_V3")
#: Nodes that exist in the editor only.
NOTES = ("Note", "MarkdownNote")
REROUTE = "Reroute"
PRIMITIVE = "PrimitiveNode"
MUTED, BYPASSED = 2, 4
#: Widgets behind which the editor keeps one more value: "fixed", "increment", "decrement" or "randomize".
SEEDS = ("seed", "noise_seed")
AFTER_GENERATE = ("fixed", "increment", "decrement", "increment-wrap", "randomize")
#: Widgets with an upload button, which some editor versions save as one more value.
UPLOADS = ("image_upload", "video_upload", "audio_upload", "animated_image_upload", "file_upload")

Prompt = dict[str, dict[str, Any]]


class WorkflowError(ToolError):
    """A workflow that cannot be turned into a prompt: which node, and why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, 2)


def to_prompt(workflow: Mapping[str, Any], object_info: Mapping[str, Any]) -> Prompt:
    """The API prompt `{node id: {"class_type", "inputs", "_meta"}}` of a UI-format workflow.

    object_info: ComfyUI's answer to /object_info, which names every input of every node in order.
    Raises WorkflowError, in a sentence, for anything that the server would not understand.
    """
    graph = _Graph(workflow)
    prompt: Prompt = {}
    for node in graph.nodes.values():
        kind = node["type"]
        if kind in (*NOTES, REROUTE, PRIMITIVE) or node.get("mode") in (MUTED, BYPASSED):
            continue
        definition = object_info.get(kind)
        if definition is None:
            raise WorkflowError(
                f"{label(node)}: this ComfyUI has no node of that type. Install the node pack it belongs to, or check "
                "ComfyUI's log for why the pack did not load."
            )
        inputs = _widget_values(node, definition)
        for slot in node.get("inputs") or ():
            if slot.get("link") is None:
                continue
            source = graph.source(slot["link"])
            if source is None:
                inputs.pop(slot["name"], None)
            elif isinstance(source, _Value):
                inputs[slot["name"]] = source.value
            else:
                inputs[slot["name"]] = [str(source[0]), source[1]]
        _require(node, definition, inputs)
        prompt[str(node["id"])] = {
            "class_type": kind,
            "inputs": inputs,
            "_meta": {"title": node.get("title") or definition.get("display_name") or kind},
        }
    return prompt


def label(node: Mapping[str, Any]) -> str:
    """How a message names a node."""
    title = node.get("title")
    return f"Node {node['id']} ({node['type']}" + (f', "{title}")' if title and title != node["type"] else ")")


def widget_inputs(definition: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(name, type, options) of every input of a node definition that is a widget, in the editor's order."""
    for section in ("required", "optional"):
        for name, spec in (definition.get("input", {}).get(section) or {}).items():
            kind = spec[0] if isinstance(spec, list | tuple) else spec
            options = spec[1] if isinstance(spec, list | tuple) and len(spec) > 1 and spec[1] else {}
            if isinstance(kind, list):
                kind, options = "COMBO", {"options": kind, **options}
            if kind in UNKNOWN_TYPES:
                raise WorkflowError(
                    f"{definition.get('name', 'A node')} has the input {name!r} of the type {kind}, which adds inputs "
                    "in the editor; such workflows have to be exported from the editor (File, Export (API))."
                )
            if kind in WIDGET_TYPES and not options.get("forceInput"):
                yield name, str(kind), options


class _Value:
    """The value of a primitive node, where a link would be."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Graph:
    """Nodes and links of a workflow, and where each link really comes from."""

    def __init__(self, workflow: Mapping[str, Any]) -> None:
        if "nodes" not in workflow:
            hint = " It looks like a prompt in API format, which needs no conversion." if _is_prompt(workflow) else ""
            raise WorkflowError(f"This is not a workflow of ComfyUI's editor: it has no list of nodes.{hint}")
        if (workflow.get("definitions") or {}).get("subgraphs"):
            raise WorkflowError("The workflow contains subgraphs. Unpack them in the editor and save it again.")
        self.nodes: dict[int, dict[str, Any]] = {node["id"]: node for node in workflow["nodes"]}
        self.links: dict[int, tuple[int, int, str]] = {}
        for link in workflow.get("links") or ():
            if isinstance(link, Mapping):
                self.links[link["id"]] = (link["origin_id"], link["origin_slot"], str(link.get("type", "*")))
            else:
                self.links[link[0]] = (link[1], link[2], str(link[5]))

    def source(self, link_id: int) -> tuple[int, int] | _Value | None:
        """(node, output) that feeds a link, through reroutes and bypassed nodes; None when nothing does."""
        seen: set[int] = set()
        current: int | None = link_id
        while current is not None:
            if current in seen:
                raise WorkflowError(f"Link {link_id} goes round in a circle of reroutes or bypassed nodes.")
            seen.add(current)
            if current not in self.links:
                raise WorkflowError(f"Link {current} is used by a node but is not in the list of links.")
            origin, slot, kind = self.links[current]
            node = self.nodes.get(origin)
            if node is None:
                raise WorkflowError(f"Link {current} comes from node {origin}, which is not in the workflow.")
            if node.get("mode") == MUTED:
                return None
            if node["type"] == PRIMITIVE:
                return _Value((node.get("widgets_values") or [None])[0])
            if node["type"] == REROUTE:
                current = next((item.get("link") for item in node.get("inputs") or ()), None)
            elif node.get("mode") == BYPASSED:
                current = _through(node, slot, kind)
            else:
                return origin, slot
        return None


def _through(node: Mapping[str, Any], slot: int, kind: str) -> int | None:
    """The link that a bypassed node hands on at output `slot`: the input at the same place when the type fits, else
    the first that fits."""
    inputs = list(node.get("inputs") or ())
    for item in [*inputs[slot : slot + 1], *inputs]:
        if item.get("type") in (kind, "*") or kind == "*":
            return item.get("link")
    return None


def _widget_values(node: Mapping[str, Any], definition: Mapping[str, Any]) -> dict[str, Any]:
    widgets = list(widget_inputs(definition))
    saved = node.get("widgets_values")
    if isinstance(saved, Mapping):  # some packs save by name
        return {name: saved[name] for name, _, _ in widgets if name in saved}
    values = _Values(saved or ())
    inputs: dict[str, Any] = {}
    _read(definition, "", values, inputs)
    if values.left():
        raise WorkflowError(
            f"{label(node)} has {len(values.all)} widget values, and this version of the node takes {values.at}: "
            f"{', '.join(inputs) or 'none'}. The workflow was made with another version of the node; open it in "
            "ComfyUI, check that node's values and save it again."
        )
    return inputs


class _Values:
    """The saved widget values of one node, read from left to right."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.all = list(values)
        self.at = 0

    def left(self) -> int:
        return len(self.all) - self.at

    def take(self) -> Any:
        self.at += 1
        return self.all[self.at - 1]

    def skip(self, one_of: Sequence[Any]) -> None:
        if self.left() and self.all[self.at] in one_of:
            self.at += 1


def _read(definition: Mapping[str, Any], prefix: str, values: _Values, inputs: dict[str, Any]) -> None:
    """Fill `inputs` with the values of a definition's widgets. Those that a choice brings along are named behind it:
    `format`, then `format.codec`."""
    for name, kind, options in widget_inputs(definition):
        name = prefix + name
        choices = list(options.get("options") or ())
        if values.left():
            inputs[name] = values.take()
        elif "default" in options:  # a widget that was added after the workflow was saved
            inputs[name] = options["default"]
        elif choices:
            inputs[name] = choices[0]["key"] if kind == DYNAMIC else choices[0]
        if options.get("control_after_generate") or (kind == "INT" and name in SEEDS):
            values.skip(AFTER_GENERATE)
        if any(options.get(upload) for upload in UPLOADS):
            values.skip(("image", "video", "audio", ""))
        if kind == DYNAMIC:
            chosen = next((choice for choice in choices if choice["key"] == inputs.get(name)), None)
            if chosen is None:
                known = ", ".join(str(choice["key"]) for choice in choices)
                raise WorkflowError(f"{name} is {inputs.get(name)!r}; this ComfyUI knows {known}.")
            _read({"name": name, "input": chosen.get("inputs")}, f"{name}.", values, inputs)


def _require(node: Mapping[str, Any], definition: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    missing = [name for name in (definition.get("input", {}).get("required") or {}) if name not in inputs]
    if missing:
        raise WorkflowError(f"{label(node)} lacks {', '.join(missing)}: connect it, or set a value.")


def _is_prompt(workflow: Mapping[str, Any]) -> bool:
    return bool(workflow) and all(isinstance(item, Mapping) and "class_type" in item for item in workflow.values())
