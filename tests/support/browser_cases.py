"""Workflows for the browser tests, and what they ask of the page."""

from __future__ import annotations

from typing import Any

PATCH = 2
SAMPLER = 5
#: Values of VC-Attention Patch's widgets in the order of its schema: tiny models, any machine.
VALUES = ("auto", "fast", "first steps", 0.25, 4, 0, 64, "", 0, 1, 1, "fall back", "spec")
#: Settings with which nothing lies over the canvas.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Workflow.ShowMissingNodesWarning": True,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.ColorPalette": "dark",
    "Comfy.VueNodes.Enabled": False,
    "Comfy.Workflow.Persist": False,
}


class Workflow:
    """A workflow as the editor saves it, put together node by node."""

    def __init__(self) -> None:
        self.nodes: dict[int, dict[str, Any]] = {}
        self.links: list[list[Any]] = []

    def add(self, node_id: int, kind: str, values: list[Any], inputs: str = "", outputs: str = "", **more: Any) -> int:
        """Add a node. inputs, outputs: "name:TYPE name:TYPE"."""
        self.nodes[node_id] = {
            "id": node_id,
            "type": kind,
            "pos": [380 * ((node_id - 1) // 3), 360 * ((node_id - 1) % 3)],
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
            "id": "11111111-2222-4333-8444-555555555555",
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
        [1, "fixed", steps, 4.0, "euler", "simple", 1.0],
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
