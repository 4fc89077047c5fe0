"""The measuring half of the benchmark without a GPU: turns, counts, peers, errors, and the command as a whole."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from vc_attention.benchmarks.bench import command, measure, ours, peers, report, shapes
from vc_attention.benchmarks.bench.results import CUDNN, FLASH_2, FLASH_4, Run, from_json
from vc_attention.benchmarks.bench.shapes import tensors
from vc_attention.kernels import FAST, Ok, Reason, UnsupportedError, timing
from vc_attention.kernels.families import arch_of
from vc_attention.kernels.launch import attend
from vc_attention.kernels.timing import LEAST, MOST, Series, take_turns


class Clockwork:
    """A device whose calls take as long as `takes` says, times what `drift` makes of the time that has passed."""

    def __init__(self, takes: dict[str, float], drift: float = 0.0, first: float = 1.0) -> None:
        self.takes, self.drift, self.first = takes, drift, first
        self.now, self.turns, self.compiled = 0.0, [], set()

    def calls(self) -> dict:
        return {name: (lambda name=name: name) for name in self.takes}

    def series(self, call, count: int) -> Series:
        name = call()
        self.turns.append((name, count))
        values = []
        for _ in range(count):
            slow = self.first if name not in self.compiled else 1.0
            self.compiled.add(name)
            values.append(self.takes[name] * (1 + self.drift * self.now) * slow)
            self.now += values[-1]
        return Series(values, 1400.0, 650.0)


def test_every_row_is_timed_in_every_round_for_its_seconds_or_the_least_number() -> None:
    card = Clockwork({"slow": 300.0, "middle": 20.0, "quick": 0.5})
    found, failed = take_turns(card.calls(), card, 0.25, 3)
    assert not failed and list(found) == ["slow", "middle", "quick"]
    sizes = {name: [len(one) for one in row.rounds] for name, row in found.items()}
    assert sizes == {"slow": [LEAST] * 3, "middle": [13] * 3, "quick": [MOST] * 3}
    assert found["middle"].ms == 20.0 and found["middle"].mhz == [1400.0] * 3 and found["middle"].watts == [650.0] * 3


def test_rows_take_turns_and_do_not_always_follow_the_same_neighbour() -> None:
    card = Clockwork(dict.fromkeys("abcdefgh", 10.0))
    take_turns(card.calls(), card, 0.05, 4)
    rounds = [[name for name, _ in card.turns[i : i + 8]] for i in range(0, 40, 8)]
    assert len(rounds) == 5 and all(sorted(one) == list("abcdefgh") for one in rounds)
    assert len({tuple(one) for one in rounds}) == 5


def test_the_first_series_warms_up_and_is_not_counted() -> None:
    card = Clockwork({"a": 2.0, "b": 4.0}, first=1000.0)
    found, _ = take_turns(card.calls(), card, 0.05, 2)
    assert found["a"].values == [2.0] * (2 * LEAST) and found["b"].ms == 4.0


def test_a_card_that_slows_down_slows_every_row_alike() -> None:
    """With rows one after another the last would look 80 % slower than it is; in turns the ratio stays."""
    names = [f"row {n}" for n in range(10)]
    card = Clockwork(dict.fromkeys(names, 10.0), drift=1e-4)
    found, _ = take_turns(card.calls(), card, 0.08, 8)
    medians = [row.ms for row in found.values()]
    assert card.drift * card.now > 0.7
    assert max(medians) / min(medians) < 1.1
    assert max(max(row.values) for row in found.values()) / min(min(row.values) for row in found.values()) > 1.6


def test_a_call_that_fails_later_is_named_and_the_others_go_on() -> None:
    card = Clockwork({"good": 10.0, "bad": 10.0})
    calls = card.calls()

    def fails():
        if len(card.turns) > 3:
            raise RuntimeError("CUDA out of memory\nand more")
        return "bad"

    found, failed = take_turns({**calls, "bad": fails}, card, 0.05, 3)
    assert list(found) == ["good"] and len(found["good"].rounds) == 3
    assert failed == {"bad": "RuntimeError: CUDA out of memory"}


def test_median_and_quartiles_are_over_all_rounds() -> None:
    one = timing.Timing()
    one.add(Series([1.0, 2.0, 3.0]))
    one.add(Series([4.0, 5.0]))
    assert one.ms == 3.0 and one.quartiles == (2.0, 4.0) and one.mhz == []


def test_a_series_on_the_device_waits_warms_up_and_then_times_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(log)
            log.append("event")

        def query(self) -> bool:
            return len(log) > self.at

        def synchronize(self) -> None:
            assert "event" in log

        def elapsed_time(self, end: Event) -> float:
            return float(log[self.at : end.at].count("call"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1410)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 655_000)
    series = timing.Cuda().series(lambda: log.append("call"), 4)
    assert log == ["wait", "call", "event", *["call", "event"] * 4]
    assert series == Series([1.0] * 4, 1410.0, 655.0)

    def absent():
        raise ModuleNotFoundError("nvidia-ml-py")

    monkeypatch.setattr(torch.cuda, "clock_rate", absent)
    assert timing.Cuda().series(lambda: None, 1).mhz is None


PACKAGES = ("flash_attn", "comfy_kitchen", "sageattention")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No peer is importable, whatever this machine has."""
    for name in (*PACKAGES, "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


def test_missing_peers_are_named(bare: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(64, 2, "cpu")
    found = peers.find(q, k, v, (9, 0))
    assert list(found.calls) == list(found.versions) == [CUDNN, FLASH_2]
    assert list(found.missing) == [
        FLASH_4, "comfy-kitchen INT8", "SageAttention (auto)", "SageAttention INT8/FP8 sm_90",
    ]  # fmt: skip
    assert found.missing[FLASH_4].startswith("flash-attn-4 cannot be used (ModuleNotFoundError")
    assert "SageAttention INT8/FP8 sm_90" not in peers.find(q, k, v, (12, 0)).missing


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **content) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def tokens_first(q, k, v):
    """Attention on [B, L, H, D], the output in the same order."""
    assert q.shape == (1, 64, 2, 128) and q.is_contiguous()
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def test_peers_get_the_layout_that_they_want_and_give_back_ours(bare: pytest.MonkeyPatch) -> None:
    asked = []

    def sage(q, k, v, tensor_layout="HND", is_causal=False, **options):
        asked.append((tensor_layout, is_causal, options))
        return tokens_first(q, k, v)

    fake(bare, "flash_attn")
    fake(bare, "flash_attn.cute")
    fake(bare, "flash_attn.cute.interface", flash_attn_func=lambda q, k, v: (tokens_first(q, k, v), None))
    fake(bare, "comfy_kitchen", int8_attention=torch.nn.functional.scaled_dot_product_attention)
    fake(bare, "sageattention", sageattn=sage, sageattn_qk_int8_pv_fp8_cuda_sm90=sage)
    q, k, v = tensors(64, 2, "cpu")
    found = peers.find(q, k, v, (9, 0))
    assert not found.missing and len(found.calls) == 6
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for name, call in found.calls.items():
        if name not in (CUDNN, FLASH_2):  # those two need their own card
            assert torch.equal(call(), exact), name
    assert asked == [("NHD", False, {}), ("NHD", False, {"pv_accum_dtype": "fp32+fp32"})]
    assert found.versions[FLASH_4] == "flash-attn-4, version unknown" or "flash-attn-4 " in found.versions[FLASH_4]


def test_an_old_sageattention_costs_only_its_newer_row(bare: pytest.MonkeyPatch) -> None:
    fake(bare, "sageattention", sageattn=lambda *a, **k: None)
    found = peers.find(*tensors(64, 2, "cpu"), (9, 0))
    assert "SageAttention (auto)" in found.calls
    assert "AttributeError" in found.missing["SageAttention INT8/FP8 sm_90"]


def test_errors_are_relative_and_a_failing_call_is_named() -> None:
    q, k, v = tensors(300, 3, "cpu")
    exact = torch.softmax(q.double() @ k.double().mT / 128**0.5, -1) @ v.double()

    def broken():
        raise TypeError("got an unexpected keyword")

    calls = {
        "exact": lambda: exact,
        "ten percent": lambda: 1.1 * exact,
        "middle head": lambda: exact * torch.tensor([1.0, 5.0, 1.0], dtype=torch.float64)[None, :, None, None],
        "broken": broken,
        "wrong layout": lambda: exact.transpose(1, 2),
    }
    found, failed = measure.errors(calls, q, k, v)
    assert found["exact"] < 1e-6 and found["ten percent"] == pytest.approx(0.1, abs=1e-6)
    assert found["middle head"] < 1e-6  # the first and the last head are looked at
    assert failed["broken"] == "TypeError: got an unexpected keyword" and "shape" in failed["wrong layout"]


def test_rows_carry_the_work_of_the_shape() -> None:
    one = timing.Timing()
    one.add(Series([2.0, 2.0, 4.0], 1400.0, 600.0))
    one.add(Series([2.0, 3.0], 1500.0))
    (row,) = measure.rows_of(
        {"fast, kernel alone": one}, {"fast, kernel alone": 0.01}, {"fast, kernel alone": one}, 1000, 8
    )
    assert row.ours and not row.whole_call and row.ms == 2.0 and row.timings == 5 and row.rounds == [2.0, 2.5]
    assert row.tflops == pytest.approx(4 * 8 * 1000**2 * 128 / 2e-3 / 1e12)
    assert (row.low, row.high, row.mhz, row.watts) == (2.0, 3.0, 1450.0, 600.0)


def test_a_folder_without_kernels_of_this_card_says_why(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "RTX 5090")
    monkeypatch.setattr(ours.attend, "PREBUILT", ours.attend.PREBUILT)
    other = tmp_path / "sm_90a"
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    for folder in (other, tmp_path):
        why = ours.use(folder)
        assert why.startswith(f"{folder} holds no kernels for RTX 5090") and "sm_120a" in why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    assert "sm_103a" in ours.use(other)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    mine = tmp_path / "sm_120a"
    mine.mkdir()
    (mine / "manifest.json").write_text("{}")
    for folder in (mine, tmp_path):
        ours.attend.library.cache_clear()
        assert "cannot be read" in ours.use(folder)  # the manifest was found and is no manifest
        assert tmp_path == ours.attend.PREBUILT
    ours.attend.library.cache_clear()


class Counter:
    """A device that runs each call for real and says 2 ms for every one."""

    def series(self, call, count: int) -> Series:
        call()
        return Series([2.0] * count, 1500.0, 600.0)


@pytest.fixture
def card(bare: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the command asks of a card, on the CPU, with one peer that runs there."""
    fake(bare, "comfy_kitchen", int8_attention=torch.nn.functional.scaled_dot_product_attention)
    bare.setattr(measure, "tensors", lambda length, heads: tensors(length, heads, "cpu"))
    bare.setattr(measure, "Cuda", Counter)
    bare.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    bare.setattr(torch.cuda, "empty_cache", lambda: None)
    bare.setattr(command, "require_gpu", lambda: None)
    bare.setattr(command, "device_facts", lambda: {"name": "RTX 4090", "driver": "1.2"})
    bare.setattr(ours, "use", lambda folder: "the kernels for this card are not released yet.")
    bare.setitem(shapes.QUICK, "quick", (200, 2))
    return bare


def test_a_card_without_our_kernels_still_times_the_peers(card: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    assert command.main(["--quick", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]) == 0
    run = from_json((tmp_path / "a.json").read_text())
    (shape,) = run.shapes
    assert [row.name for row in shape.rows if row.ms == 2.0] == [row.name for row in shape.rows]
    assert "comfy-kitchen INT8" in {row.name for row in shape.rows} and not any(row.ours for row in shape.rows)
    assert shape.rows[-1].error < 0.01 and not shape.passes and shape.memory is None
    assert run.settings == {"seconds": command.QUICK_SECONDS, "rounds": command.QUICK_ROUNDS}
    assert run.command == ["whole_call.py", "--quick", "--json", str(tmp_path / "a.json"), "--plot", *run.command[5:]]
    out = capsys.readouterr().out
    assert "No row of ours: the kernels for this card are not released yet." in out
    assert "FlashAttention-4 BF16: not there, flash-attn-4 cannot be used" in out and "quick: 200 tokens" in out
    assert out.rstrip("\n") == report.text(run)


def test_a_shape_that_does_not_fit_is_left_out_and_said(card: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    def full(*arguments, **keywords):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    card.setattr(measure, "measure", full)
    assert command.main(["--quick", "--json", str(tmp_path / "a.json")]) == 1
    captured = capsys.readouterr()
    assert "quick was left out: it does not fit into the memory of this card." in captured.err
    assert not (tmp_path / "a.json").exists() and captured.out == ""


@pytest.mark.parametrize(
    ("options", "words"), [(["--shapes", "wan"], "no shape wan"), (["--seconds", "0"], "positive")]
)
def test_a_wrong_option_of_the_script_is_one_line(card: pytest.MonkeyPatch, options, words, capsys) -> None:
    assert command.main(options) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_kernels_that_refuse_cost_only_our_rows(card: pytest.MonkeyPatch) -> None:
    def refuse(*arguments):
        raise UnsupportedError(Reason("no_kernel", "The installed kernels have no q_bf16."))

    card.setattr(ours, "rows", refuse)
    shape = measure.measure(Run("", [], {}, {}, {}), ("small", 200, 2), 0.01, 2)
    assert shape.failed["every row of ours"] == "UnsupportedError: The installed kernels have no q_bf16."
    assert "comfy-kitchen INT8" in {row.name for row in shape.rows}


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_the_rows_are_the_presets_of_the_card(capability, keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key means have a row where there are kernels for them (a folder may be built in part) and fast lacks them."""
    arch = arch_of(capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def supports(device, plan, dtype):
        refusal = attend.supports(plan, dtype, 128, 1, arch)
        if plan.key_means and not keyed:
            refusal = Reason("no_kernel", "The kernels were built in part.")
        return Ok("cubin") if refusal is None else refusal

    monkeypatch.setattr(ours.kernels, "supports", supports)
    found = ours.plans(torch.device("cuda", 0), torch.bfloat16)
    assert list(found) == ["fast", *(["fast + key means"] if keyed and arch != "sm_103a" else []), "faithful"]
    assert found["fast"] == (replace(FAST, scores="fp8", key_means=True) if arch == "sm_103a" else FAST)
    assert len(set(found.values())) == len(found)
    assert all(attend.kernel_name(plan, torch.bfloat16, arch) for plan in found.values())


@pytest.mark.gpu
def test_one_small_shape_on_the_card(cubins, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of ours runs and is as exact as low-bit attention is; every pass has a time and a bandwidth."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("gpu: the card is not of compute capability 9.0")
    (tmp_path / "sm_90a").symlink_to(cubins)
    monkeypatch.setattr(ours.attend, "PREBUILT", ours.attend.PREBUILT)
    ours.attend.library.cache_clear()
    assert ours.use(tmp_path) == "" and ours.provenance()["arch"] == "sm_90a"
    run = Run("", [], {}, {}, {})
    shape = measure.measure(run, ("small", 1025, 2), 0.01, 2)
    ours.attend.library.cache_clear()
    mine = [row for row in shape.rows if row.ours]
    plans = ours.plans(torch.device("cuda"), torch.bfloat16)
    assert len(plans) == 3 and len(mine) == 5 * len(plans) and "every row of ours" not in shape.failed
    assert all(row.error < 0.05 and row.ms > 0 and row.timings >= 2 * LEAST for row in mine)
    assert shape.copy and shape.memory and all(one.ms > 0 and one.bytes > 0 for one in shape.passes)
    assert "kernel alone" in "\n".join(report.shape_text(shape))
    assert FAST in plans.values()
