"""VC-Attention Compare and VC-Attention Benchmark through ComfyUI's own executor: results, progress and Cancel."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy
FAMILIES = ("wan22_t2v", "wan22_5b", "wan_vace", "hunyuan_video", "hunyuan_video_15", "minimax_h3")


class Client:
    """PromptServer, as far as the executor sends to it."""

    client_id, last_node_id, last_prompt_id = "test", None, None

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        self.sent.append((event, data))

    def send_progress_text(self, text: str, node_id: str, sid: str | None = None) -> None:
        self.sent.append(("text", text))

    def queue_updated(self) -> None:
        pass


@pytest.fixture
def execute(monkeypatch):
    """Runs a prompt of our nodes: (outputs on the nodes, results behind them, the executor's messages, the client)."""
    import comfy.utils
    import execution
    from vc_attention.nodes.comparing import VCAttentionBenchmark, VCAttentionCompare

    import nodes

    given: dict[str, Any] = {}

    class Given:
        """A value of the test as an output."""

        @classmethod
        def INPUT_TYPES(cls):  # noqa: N802
            return {"required": {"name": ("STRING", {})}}

        RETURN_TYPES, FUNCTION, CATEGORY = ("*",), "get", "test"

        def get(self, name):
            return (given[name],)

    kept: dict[str, Any] = {}

    class Keep:
        """Takes an output for the test."""

        @classmethod
        def INPUT_TYPES(cls):  # noqa: N802
            return {"required": {"name": ("STRING", {}), "value": ("*", {})}}

        RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "keep", "test", True

        def keep(self, name, value):
            kept[name] = value
            return {}

    for name, kind in (
        ("VCAttentionCompare", VCAttentionCompare),
        ("VCAttentionBenchmark", VCAttentionBenchmark),
        ("Given", Given),
        ("Keep", Keep),
    ):
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, kind)

    def run(node: str, outputs: tuple[str, ...], widgets: dict[str, Any], **values: Any):
        given.clear()
        kept.clear()
        given.update(values)
        prompt = {name: {"class_type": "Given", "inputs": {"name": name}} for name in values}
        prompt["node"] = {"class_type": node, "inputs": {**widgets, **{name: [name, 0] for name in values}}}
        for place, name in enumerate(outputs):
            prompt[f"keep {name}"] = {"class_type": "Keep", "inputs": {"name": name, "value": ["node", place]}}
        client = Client()
        # as main.py does
        comfy.utils.set_progress_bar_global_hook(
            lambda value, total, preview, **_: client.sent.append(("bar", (value, total)))
        )
        # what the texts on the nodes go through; the real module starts a frontend
        server = SimpleNamespace(PromptServer=SimpleNamespace(instance=client))
        monkeypatch.setitem(sys.modules, "server", server)
        executor = execution.PromptExecutor(client, cache_args={"lru": 0, "ram": 0, "ram_inactive": 0})
        targets = ["node", *(f"keep {name}" for name in outputs)]
        try:
            asyncio.run(executor.execute_async(prompt, "prompt", {"client_id": "test"}, targets))
        finally:
            comfy.utils.set_progress_bar_global_hook(None)
        return executor, dict(kept), client

    return run


def messages(executor) -> dict[str, Any]:
    return dict(executor.status_messages)


def text_of(executor) -> str:
    return executor.history_result["outputs"]["node"]["text"][0]


def sample_clips(frames: int = 4):
    g = torch.Generator().manual_seed(1)
    a = torch.rand(frames, 48, 64, 3, generator=g)
    return a, (a + 0.02 * torch.randn(a.shape, generator=g)).clamp(0, 1)


COMPARE = {"label_a": "16 bit", "label_b": "8-bit", "strip": "all frames", "lpips": False}
OUTPUTS = ("strip", "plot", "json")


def test_compare_in_the_executor(execute):
    a, b = sample_clips()
    executor, kept, client = execute("VCAttentionCompare", OUTPUTS, COMPARE, images_a=a, images_b=b)
    assert executor.success, messages(executor)
    told = json.loads(kept["json"])
    exact = -10 * torch.log10((a.double() - b.double()).square().mean())
    assert told["psnr_db"] == pytest.approx(float(exact), abs=1e-3) and len(told["frames"]) == 4
    assert kept["strip"].shape[0] == 4 and torch.equal(kept["strip"][:, -48:, :64], a)
    assert kept["plot"].shape == (1, 900, 1200, 3)
    assert text_of(executor).startswith("4 frames compared: PSNR 34.")
    bars = [data for event, data in client.sent if event == "bar"]  # newer cores leave some out
    assert bars[0] == (1, 4) and bars[-1] == (4, 4) and bars == sorted(bars)


def test_compare_can_give_the_lowest_frame_alone(execute):
    a, b = sample_clips()
    b[2] = 1 - a[2]
    _, kept, _ = execute("VCAttentionCompare", OUTPUTS, {**COMPARE, "strip": "lowest frame"}, images_a=a, images_b=b)
    assert json.loads(kept["json"])["lowest_frame"] == 3
    assert kept["strip"].shape[0] == 1 and torch.equal(kept["strip"][0, -48:, :64], a[2])


def test_clips_of_other_sizes_do_not_end_the_prompt(execute):
    a, b = sample_clips()
    executor, kept, _ = execute("VCAttentionCompare", OUTPUTS, COMPARE, images_a=a, images_b=b[:, :, :32])
    assert executor.success and "cannot be compared pixel by pixel" in text_of(executor)
    assert torch.equal(kept["strip"][:, -48:, -32:], b[:, :, :32])


def test_the_core_accepts_a_prompt_of_compare_and_refuses_a_strip_that_there_is_not(execute):
    import execution

    def empty(colour: int):
        values = {"width": 64, "height": 48, "batch_size": 2, "color": colour}
        return {"class_type": "EmptyImage", "inputs": values}

    inputs = {"images_a": ["a", 0], "images_b": ["b", 0], **COMPARE}
    prompt = {"a": empty(0), "b": empty(0x808080), "node": {"class_type": "VCAttentionCompare", "inputs": inputs}}
    valid, error, outputs, _ = asyncio.run(execution.validate_prompt("prompt", prompt, None))
    assert valid and outputs == ["node"], error
    inputs["strip"] = "every second frame"
    assert not asyncio.run(execution.validate_prompt("prompt", prompt, None))[0]


def test_cancel_stops_compare_between_two_frames(execute, monkeypatch):
    import comfy.model_management as management
    from vc_attention.nodes import compare

    seen = []

    def frames_of(*arguments):
        for frame in original(*arguments):
            seen.append(frame)
            if len(seen) == 2:
                management.interrupt_current_processing()
            yield frame

    original = compare.frames_of
    monkeypatch.setattr(compare, "frames_of", frames_of)
    a, b = sample_clips()
    executor, kept, _ = execute("VCAttentionCompare", OUTPUTS, COMPARE, images_a=a, images_b=b)
    assert "execution_interrupted" in messages(executor) and not kept and len(seen) == 2


BENCHMARK = {"width": 128, "height": 128, "frames": 9, "seconds": 0.1}


def test_benchmark_in_the_executor(execute, tiny):
    executor, kept, client = execute("VCAttentionBenchmark", ("plot", "json"), BENCHMARK, model=tiny("wan22_t2v"))
    assert executor.success, messages(executor)
    told = json.loads(kept["json"])
    assert (told["tokens"], told["heads"], told["head_dim"], told["latent"]) == (3 * 8 * 8, 2, 128, [3, 16, 16])
    rows = {row["name"]: row for row in told["rows"]}
    # without a card ComfyUI uses its sub-quadratic attention; split is never timed
    assert rows["sub-quadratic"]["in_use"] and not rows["PyTorch SDPA"]["in_use"] and "split" not in rows
    assert all(row["ms"] > 0 and row["error"] < 1e-4 for row in rows.values())
    assert "VC-Attention" in told["missing"] and "192 tokens" in text_of(executor)
    assert kept["plot"].shape == (1, 900, 1200, 3)
    bars = [data for event, data in client.sent if event == "bar"]
    assert bars and bars == sorted(bars, key=lambda bar: bar[0] / bar[1])
    assert any(event == "text" and "Round 2 of 3" in text for event, text in client.sent)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_size_is_the_one_that_the_model_calls_attention_with(tiny, name):
    """Against a real pass: its longest call, less the text and audio tokens that the joint families add."""
    import comfy_cases
    from vc_attention.nodes import benchmark

    heads = set()

    def note(call, func, q, k, v, count, *rest, **keywords):
        heads.add((call[3], count))
        return func(q, k, v, count, *rest, **keywords)

    watched, passes = comfy_cases.watch(tiny(name), note)
    tiny_models.sample(watched, name, 1)
    found = benchmark.prepare(tiny(name), {"samples": tiny_models.empty_latent(name)}, (1, 1, 1))
    assert not found.problem and (found.heads, found.head_dim) == (2, 128)
    longest = max(call[3] for call in passes[0].calls)
    assert (longest, found.heads) in heads
    if name == "minimax_h3":
        assert found.tokens == 7 * 4 * 6 < longest
    else:
        assert found.tokens == tiny_models.FAMILIES[name].tokens
        assert found.tokens < longest if name.startswith("hunyuan") else found.tokens == longest


@pytest.mark.parametrize(
    ("name", "latent"), [("wan22_t2v", (3, 16, 16)), ("wan22_5b", (3, 8, 8)), ("hunyuan_video_15", (3, 8, 8))]
)
def test_pixels_become_latent_cells_as_in_the_core(tiny, name, latent):
    from vc_attention.nodes import benchmark

    assert benchmark.latent_size(None, tiny(name).model, (128, 128, 9)) == latent


def test_behind_the_patch_its_plan_is_timed(tiny, monkeypatch):
    from vc_attention.kernels import FAITHFUL, Reason
    from vc_attention.nodes import benchmark
    from vc_attention.nodes.comparing import VCAttentionBenchmark
    from vc_attention.nodes.patch import VCAttentionPatch

    asked = []
    monkeypatch.setattr(
        benchmark, "supports", lambda device, plan, *_, **__: asked.append(plan) or Reason("no_kernel", "Not here.")
    )
    (model,) = VCAttentionPatch.execute(tiny("wan22_t2v"), quality="faithful").result
    _, text = VCAttentionBenchmark.execute(model, **BENCHMARK).result
    assert set(asked) == {FAITHFUL} and json.loads(text)["missing"] == {"VC-Attention": "Not here."}


def test_backends_that_fall_back_and_replaced_attention_are_told(tiny, monkeypatch):
    from comfy.ldm.modules import attention as module
    from vc_attention.nodes.comparing import VCAttentionBenchmark

    def sage(q, k, v, heads, **keywords):
        """What core's own does when the package refuses the call."""
        return module.attention_pytorch(q, k, v, heads, **keywords)

    def attention_mine(q, k, v, heads, **keywords):
        return module.attention_pytorch(q, k, v, heads, **keywords)

    monkeypatch.setitem(module.REGISTERED_ATTENTION_FUNCTIONS, "sage", sage)
    monkeypatch.setattr(module, "optimized_attention", attention_mine)
    told = json.loads(VCAttentionBenchmark.execute(tiny("wan22_t2v"), **BENCHMARK).result[1])
    assert "gave the call on to PyTorch's attention" in told["missing"]["SageAttention"]
    assert [(row["name"], row["in_use"]) for row in told["rows"]] == [
        ("PyTorch SDPA", False),
        ("mine (replaced)", True),
    ]


@pytest.mark.parametrize("when", [1, 3, 8])
def test_cancel_stops_the_benchmark_and_leaves_nothing_behind(execute, tiny, monkeypatch, when):
    import comfy.model_management as management
    from vc_attention.nodes import host

    shown = []

    def show_text(text, node_id):
        shown.append(text)
        if len(shown) == when:
            management.interrupt_current_processing()

    monkeypatch.setattr(host, "show_text", show_text)
    executor, kept, _ = execute("VCAttentionBenchmark", ("json",), BENCHMARK, model=tiny("wan22_t2v"))
    assert "execution_interrupted" in messages(executor) and not kept and len(shown) == when
    assert not management.processing_interrupted()


def test_the_definitions_are_the_same_on_every_machine():
    from vc_attention.nodes.comparing import VCAttentionBenchmark, VCAttentionCompare

    for node, widgets in (
        (VCAttentionCompare, {"label_a": "A", "label_b": "B", "strip": "all frames", "lpips": False}),
        (VCAttentionBenchmark, {"width": 832, "height": 480, "frames": 81, "seconds": 0.5}),
    ):
        info = node.GET_NODE_INFO_V1()
        values = {name: spec[1]["default"] for name, spec in info["input"]["required"].items() if "default" in spec[1]}
        assert values == widgets and list(values) == list(widgets) and info["output_node"], node.__name__
    assert list(VCAttentionBenchmark.GET_NODE_INFO_V1()["input"]["optional"]) == ["latent"]
