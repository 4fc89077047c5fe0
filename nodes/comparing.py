"""The nodes that compare: VC-Attention Compare (two clips) and VC-Attention Benchmark (attention backends)."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from . import benchmark, benchmark_report, compare, compare_report, host
from .hook import session_of
from .options import PatchOptions
from .schema import node_input, node_output, node_schema, unique_id
from .strip import Strip

STRIPS = ("all frames", "lowest frame")


class VCAttentionCompare(io.ComfyNode):
    """How close two clips are."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node as ComfyUI shows it. Widget order is part of every saved workflow: additions go last."""
        node = "VCAttentionCompare"
        return node_schema(
            node,
            search_aliases=["psnr", "ssim", "lpips", "compare videos", "side by side"],
            is_output_node=True,
            inputs=[
                node_input(io.Image, node, "images_a"),
                node_input(io.Image, node, "images_b"),
                node_input(io.String, node, "label_a", default="A"),
                node_input(io.String, node, "label_b", default="B"),
                node_input(io.Combo, node, "strip", options=list(STRIPS), default=STRIPS[0]),
                node_input(io.Boolean, node, "lpips", default=False),
            ],
            outputs=[
                node_output(io.Image, node, "strip"),
                node_output(io.Image, node, "plot"),
                node_output(io.String, node, "json"),
            ],
        )

    @classmethod
    def validate_inputs(cls, strip: str | None = None) -> bool | str:
        """Older cores do not check the choices of a V3 node. None: the value comes from another node."""
        return strip is None or strip in STRIPS or f"strip is {strip!r}; choose one of {', '.join(STRIPS)}."

    @classmethod
    def execute(
        cls,
        images_a: Any,
        images_b: Any,
        label_a: str = "A",
        label_b: str = "B",
        strip: str = STRIPS[0],
        lpips: bool = False,
    ) -> Any:
        """Measure frame by frame. Clips that cannot be compared give a sentence and a strip, never an error."""
        labels = (label_a.strip() or "A", label_b.strip() or "B")
        found, frames = compare.start(images_a, images_b, labels, lpips)
        count = min(len(images_a), len(images_b))
        every = strip == STRIPS[0]
        (_, *size_a), (_, *size_b) = found.sizes
        made = Strip(count if every and count else 1, ((size_a[0], size_a[1]), (size_b[0], size_b[1])), labels)
        advance = host.progress_bar(max(count, 1))
        for i, frame in enumerate(frames()):
            host.stop_if_cancelled()
            found.frames.append(frame)
            if every:
                made.put(i, images_a[i], images_b[i], compare_report.words(frame))
            advance(i + 1)
        if not every or found.problem:
            first = found.lowest or 0
            for i in range(min(count, len(made.tensor))):
                words = compare_report.words(found.frames[first + i]) if found.frames else ""
                made.put(i, images_a[first + i], images_b[first + i], words)
        text = compare_report.table(found)
        image = compare_report.plot(found).tensor()
        return io.NodeOutput(made.tensor, image, compare_report.to_json(found), ui=ui.PreviewText(text))


class VCAttentionBenchmark(io.ComfyNode):
    """How fast attention of a model's size is on this card, on every backend."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node as ComfyUI shows it. Widget order is part of every saved workflow: additions go last."""
        node = "VCAttentionBenchmark"
        return node_schema(
            node,
            search_aliases=["attention speed", "sage attention", "flash attention", "benchmark"],
            is_output_node=True,
            inputs=[
                node_input(io.Model, node, "model"),
                node_input(io.Latent, node, "latent", optional=True),
                node_input(io.Int, node, "width", default=832, min=16, max=8192, step=16),
                node_input(io.Int, node, "height", default=480, min=16, max=8192, step=16),
                node_input(io.Int, node, "frames", default=81, min=1, max=4096, step=4),
                node_input(io.Float, node, "seconds", default=0.5, min=0.1, max=10.0, step=0.1),
            ],
            outputs=[node_output(io.Image, node, "plot"), node_output(io.String, node, "json")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        width: int = 832,
        height: int = 480,
        frames: int = 81,
        seconds: float = 0.5,
        latent: Any = None,
    ) -> Any:
        """Time every backend in turns. What cannot be timed is a sentence, never an error; Cancel passes through."""
        node_id = unique_id(cls)
        found = benchmark.prepare(model, latent, (width, height, frames))
        if not found.problem:
            session = session_of(model)
            options = PatchOptions() if session is None else session.options
            benchmark.measure(found, model, options, seconds, _shower(node_id), host.progress(node_id))
        text = benchmark_report.table(found)
        host.show_text(text, node_id)
        image = benchmark_report.plot(found).tensor()
        return io.NodeOutput(image, benchmark_report.to_json(found), ui=ui.PreviewText(text))


def _shower(node_id: str | None) -> benchmark.Show:
    """Shows on the node what is at work, moves its bar, and lets Cancel through."""
    advance = None
    known = 0

    def show(done: int, total: int, text: str) -> None:
        nonlocal advance, known
        host.stop_if_cancelled()
        host.show_text(text[0].upper() + text[1:], node_id)
        if advance is None or known != total:
            advance, known = host.progress_bar(total), total
        advance(done)

    return show
