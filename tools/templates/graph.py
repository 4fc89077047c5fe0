"""A workflow as ComfyUI's editor saves it, from nodes that are added one by one. Standard library only.

    graph = Graph("name", "0.3.75")
    load = graph.area(0, "1  Load the models", width=400)
    model = load.add("UNETLoader", unet_name=files.WAN_5B, weight_dtype="default")
    ...
    text = graph.text()

Nodes keep the order in which they are added as their ids; links are numbered as they are made; places follow from the
areas. The same calls therefore give the same bytes.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from ..workflow import BYPASSED
from .definitions import Definition, Input, define
from .files import ModelFile, note

NAMESPACE = uuid.UUID("6f0f4f3e-54b2-4c1e-9a5d-0d7c3c5f2201")
MARKDOWN = "MarkdownNote"
#: In pixels of the editor: a node's title bar lies above its position; a group's title above its nodes.
TITLE_BAR, GROUP_TITLE = 30, 50
MARGIN, GAP = 20, 18
SLOT, WIDGET, FRAME = 20, 24, 14
#: Room for what a text box, a picture or a player shows.
HEIGHTS = {
    "CLIPTextEncode": 170,
    "WanVideoTextEncode": 400,
    "MiniMaxH3ImageToVideo": 420,
    "LoadImage": 314,
    "CreateVideo": 102,  # one row more than in 0.3.75
    "SaveVideo": 480,
    "PreviewImage": 300,
}
OWN_HEIGHT = 500  # our nodes tell under their widgets what they did
OWN, GREEN, RED, BROWN = ("#223", "#335"), ("#232", "#353"), ("#322", "#533"), ("#432", "#653")
BLUE, VIOLET = "#3f789e", "#7a5ea8"


@dataclass(frozen=True)
class Output:
    """An output of a node, to connect other nodes to. place: its number among the node's outputs."""

    node: Node
    place: int


@dataclass
class Node:
    """One node of the graph and what it is connected to. values: what the creator sees, by name of the widget."""

    number: int
    kind: str
    definition: Definition
    height: int
    title: str | None = None
    mode: int = 0
    colours: tuple[str, str] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    models: list[ModelFile] = field(default_factory=list)
    inputs: dict[str, Output] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Output:
        """The output of that name. Raises KeyError where the node has none."""
        names = [output for output, _ in self.definition.outputs]
        if name not in names:
            raise KeyError(f"{self.kind} has the outputs {', '.join(names)}, not {name}")
        return Output(self, names.index(name))


@dataclass
class Area:
    """A part of the picture: a group with a title, or without one just a place. Nodes stand below each other."""

    graph: Graph
    column: int
    title: str | None
    width: int
    colour: str = BLUE
    nodes: list[Node] = field(default_factory=list)

    def add(
        self,
        kind: str,
        title: str | None = None,
        tall: int | None = None,
        colours: tuple[str, str] | None = None,
        bypassed: bool = False,
        **values: Any,
    ) -> Node:
        """Add a node. tall: its height in pixels, where the usual one does not fit.

        values: for each widget its value, a ModelFile, or an output to connect; for a socket an output.

        Raises TypeError when a widget or a required socket is left out, or when there is no such input.
        """
        definition = define(kind)
        known = {item.name: item for item in definition.inputs}
        missing = [item.name for item in definition.inputs if item.name not in values and _needed(item)]
        if missing or not set(values) <= set(known):
            unknown = sorted(set(values) - set(known))
            raise TypeError(f"{kind} lacks {missing} and does not know {unknown}")
        node = self.graph.new(kind, definition, tall, title, BYPASSED if bypassed else 0, colours)
        for item in definition.slots:
            value = values.get(item.name)
            if isinstance(value, Output):
                self._connect(node, item, value)
            elif isinstance(value, ModelFile):
                node.models.append(value)
                node.values[item.name] = value.name
            elif item.widget:
                node.values[item.name] = value
        self.nodes.append(node)
        return node

    def note(self, title: str, text: str, height: int) -> Node:
        """Add a note in Markdown, which the server never sees."""
        node = self.graph.new(MARKDOWN, Definition("", (), ()), height, title, 0, BROWN)
        node.values["text"] = text
        self.nodes.append(node)
        return node

    def _connect(self, node: Node, item: Input, output: Output) -> None:
        kind = output.node.definition.outputs[output.place][1]
        if item.kind not in (kind, "*"):
            raise TypeError(f"{node.kind}.{item.name} takes {item.kind}, and {output.node.kind} gives {kind}")
        if item.widget:  # the editor keeps a value there too, for when the link is taken away
            node.values[item.name] = output.node.values.get("value")
        node.inputs[item.name] = output


def _needed(item: Input) -> bool:
    return item.widget or not item.optional


class Graph:
    """A workflow in the making. name: the file's, from which its identity follows; version: of ComfyUI's core."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version
        self.areas: list[Area] = []
        self.nodes: list[Node] = []

    def area(self, column: int, title: str | None, width: int, colour: str = BLUE) -> Area:
        """A new area at the foot of a column; columns are counted from the left."""
        made = Area(self, column, title, width, colour)
        self.areas.append(made)
        return made

    def new(self, kind: str, definition: Definition, height: int | None, *rest: Any) -> Node:
        """A node with the next id; `Area.add` calls this."""
        if height is None:
            rows = max(sum(not item.widget for item in definition.inputs), len(definition.outputs))
            widgets = sum(1 + (item.extra is not None) for item in definition.widgets)
            height = HEIGHTS.get(kind, FRAME + SLOT * rows + WIDGET * widgets)
            height = OWN_HEIGHT if definition.pack == "vc-attention" else height
        node = Node(len(self.nodes) + 1, kind, definition, height, *rest)
        self.nodes.append(node)
        return node

    def files(self) -> list[ModelFile]:
        """The model files that the loaders name, each once."""
        return list(dict.fromkeys(file for node in self.nodes for file in node.models))

    def files_note(self) -> str:
        """The text of the note that names them."""
        return note(self.files())

    def workflow(self) -> dict[str, Any]:
        """The workflow, as the editor would save it."""
        links = self._links()
        numbers = {(node.number, name): number for number, (node, name, _) in links.items()}
        leaving: dict[tuple[int, int], list[int]] = {}
        for number, (_, _, output) in links.items():
            leaving.setdefault((output.node.number, output.place), []).append(number)
        places, groups = self._layout()
        order = self._order()
        nodes = [
            _node(node, places[node.number], order[node.number], numbers, leaving, self.version) for node in self.nodes
        ]
        return {
            "id": str(uuid.uuid5(NAMESPACE, self.name)),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(links),
            "nodes": nodes,
            "links": [
                [number, output.node.number, output.place, node.number, _slot(node, name), _kind(output)]
                for number, (node, name, output) in links.items()
            ],
            "groups": groups,
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [60, 120]}},
            "version": 0.4,
        }

    def text(self) -> str:
        """The file."""
        return json.dumps(self.workflow(), indent=2) + "\n"

    def _links(self) -> dict[int, tuple[Node, str, Output]]:
        ends = [(node, name, output) for node in self.nodes for name, output in node.inputs.items()]
        return dict(enumerate(ends, 1))

    def _order(self) -> dict[int, int]:
        """Each node's place in a run: after all that it reads, else in the order of ids."""
        order: dict[int, int] = {}
        while len(order) < len(self.nodes):
            ready = [
                node.number
                for node in self.nodes
                if node.number not in order and all(out.node.number in order for out in node.inputs.values())
            ]
            order.update({number: len(order) + i for i, number in enumerate(ready)})
        return order

    def _layout(self) -> tuple[dict[int, list[int]], list[dict[str, Any]]]:
        """[x, y, width] of each node, and the groups."""
        places: dict[int, list[int]] = {}
        groups: list[dict[str, Any]] = []
        x = 0
        for column in sorted({area.column for area in self.areas}):
            areas = [area for area in self.areas if area.column == column]
            y = 0
            for area in areas:
                top = y
                y += GROUP_TITLE if area.title else 0
                for node in area.nodes:
                    places[node.number] = [x + MARGIN, y + TITLE_BAR, area.width]
                    y += TITLE_BAR + node.height + GAP
                if area.title:
                    groups.append(_group(len(groups) + 1, area, [x, top, area.width + 2 * MARGIN, y - top]))
                    y += MARGIN
            x += max(area.width for area in areas) + 3 * MARGIN
        return places, groups


def _kind(output: Output) -> str:
    return output.node.definition.outputs[output.place][1]


def _slot(node: Node, name: str) -> int:
    return [item.name for item in node.definition.slots].index(name)


def _group(number: int, area: Area, bounding: list[int]) -> dict[str, Any]:
    return {
        "id": number,
        "title": area.title,
        "bounding": bounding,
        "color": area.colour,
        "font_size": 24,
        "flags": {},
    }


def _node(
    node: Node,
    place: list[int],
    order: int,
    numbers: dict[tuple[int, str], int],
    leaving: dict[tuple[int, int], list[int]],
    version: str,
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": node.number,
        "type": node.kind,
        "pos": place[:2],
        "size": [place[2], node.height],
        "flags": {},
        "order": order,
        "mode": node.mode,
        "inputs": [_input(item, numbers.get((node.number, item.name))) for item in node.definition.slots],
        "outputs": [
            {"localized_name": name, "name": name, "type": kind, "links": leaving.get((node.number, place_))}
            for place_, (name, kind) in enumerate(node.definition.outputs)
        ],
    }
    if node.title is not None:
        made["title"] = node.title
    made["properties"] = _properties(node, version)
    made["widgets_values"] = _values(node)
    colours = OWN if node.definition.pack == "vc-attention" else node.colours
    if colours is not None:
        made["color"], made["bgcolor"] = colours
    return made


def _input(item: Input, link: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {"localized_name": item.name, "name": item.name}
    if item.optional:
        made["shape"] = 7  # a hollow socket
    made["type"] = item.kind
    if item.widget:
        made["widget"] = {"name": item.name}
    made["link"] = link
    return made


def _properties(node: Node, version: str) -> dict[str, Any]:
    if node.kind == MARKDOWN:
        return {}
    made: dict[str, Any] = {"Node name for S&R": node.kind, "cnr_id": node.definition.pack}
    if node.definition.pack == "comfy-core":
        made["ver"] = version
    if node.models:
        made["models"] = [{"name": m.name, "url": m.url, "directory": m.directory} for m in node.models]
    return made


def _values(node: Node) -> list[Any]:
    if node.kind == MARKDOWN:
        return [node.values["text"]]
    values: list[Any] = []
    for item in node.definition.widgets:
        values.append(node.values[item.name])
        if item.extra is not None:
            values.append(item.extra)
    return values
