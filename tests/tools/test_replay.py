"""replay: a good case equals a direct computation, and everything bad is one line with status 2."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vc_attention import kernels
from vc_attention.kernels.spec.smoothing import block_energy_removed
from vc_attention.tools import replay, replay_main
from vc_attention.tools.messages import ToolError

ROOT = Path(__file__).resolve().parents[2]


def tensors(lq: int = 150, lkv: int = 150, dim: int = 64) -> dict[str, torch.Tensor]:
    """One batch of two heads; V has groups, so that smoothing has something to remove."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(1, 2, lq, dim, generator=generator)
    k = torch.randn(1, 2, lkv, dim, generator=generator)
    v = torch.randn(1, 2, lkv, dim, generator=generator)
    v += 2 * torch.randn(1, 2, 4, dim, generator=generator)[:, :, torch.arange(lkv) % 4]
    return {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}


def save(folder: Path, **changed: torch.Tensor | None) -> Path:
    """A case with some tensors replaced (or left out, None)."""
    file = folder / "case.safetensors"
    case = {**tensors(), **changed}
    save_file({name: tensor.contiguous() for name, tensor in case.items() if tensor is not None}, file)
    return file


def request(case: Path, **options) -> str:
    return json.dumps(
        {"case": str(case), "plan": "fast", "backend": "spec", "groups": 0, "out": None, "json": True, **options}
    )


def numbers(case: Path, capsys, **options) -> dict:
    assert replay_main.main([request(case, **options)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("plan", ["fast", "faithful", "four_bit", "exact"])
def test_the_numbers_are_those_of_a_direct_computation(plan: str, tmp_path: Path, capsys) -> None:
    case = tensors()
    got = numbers(save(tmp_path), capsys, plan=plan, groups=16, out=str(tmp_path / "out.safetensors"))
    q, k, v = (case[name] for name in "qkv")
    labels = kernels.group(v, 16).labels
    preset = kernels.PRESETS[plan]
    direct = kernels.attention(q, k, v, preset, labels, backend="spec")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["out"], direct)
    q, k, v = (tensor.double() for tensor in (q, k, v))
    exact = torch.softmax(q @ k.mT / 8, -1) @ v
    error = (direct.double() - exact).norm()
    assert got["relative_l2"] == pytest.approx(float(error / exact.norm()), rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(direct.double().flatten(), exact.flatten(), 0)
    assert got["cosine"] == pytest.approx(float(cosine), abs=1e-7)
    psnr = 10 * torch.log10(exact.abs().max() ** 2 / (error**2 / exact.numel()))
    assert got["psnr_db"] == pytest.approx(float(psnr), abs=0.02)
    removed = block_energy_removed(v, labels) if preset.demean else 0.0
    assert got["block_energy_removed"] == pytest.approx(removed, abs=1e-9)
    assert got["seconds"] > 0 and got["groups"] == 16


def test_a_preset_is_what_it_means_on_this_card(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """On B300 fast has FP8 scores and key means: the specification computes those, too, and the report says so."""
    asked = []
    plan = replace(kernels.FAST, scores="fp8", key_means=True)
    monkeypatch.setattr(kernels, "preset", lambda name, device: asked.append((name, str(device))) or plan)
    case = tensors()
    got = numbers(save(tmp_path), capsys, groups=16, out=str(tmp_path / "out.safetensors"))
    labels = kernels.group(case["v"], 16).labels
    direct = kernels.attention(*(case[name] for name in "qkv"), plan, labels, backend="spec")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["out"], direct)
    assert asked == [("fast", "cuda" if torch.cuda.is_available() else "cpu")]
    assert "On this card fast has FP8 scores and key means." in got["notes"]


def test_scale_is_honoured(tmp_path: Path, capsys) -> None:
    case = tensors()
    out = tmp_path / "out.safetensors"
    got = numbers(save(tmp_path, scale=torch.tensor(0.03)), capsys, plan="exact", out=str(out))
    exact = torch.softmax(case["q"].double() @ case["k"].double().mT * 0.03, -1) @ case["v"].double()
    assert got["relative_l2"] < 0.004
    assert torch.allclose(load_file(out)["out"].double(), exact, atol=0.02)


def test_grouping_off_leaves_the_tokens_in_order(tmp_path: Path, capsys) -> None:
    case = tensors()
    out = tmp_path / "out.safetensors"
    got = numbers(save(tmp_path), capsys, groups=None, out=str(out))
    direct = kernels.attention(*case.values(), kernels.FAST, backend="spec")
    assert torch.equal(load_file(out)["out"], direct)
    assert got["groups"] is None
    assert got["block_energy_removed"] == pytest.approx(block_energy_removed(case["v"]))


def test_sampled_rows_are_those_of_the_quality_node(tmp_path: Path, capsys) -> None:
    case = tensors()
    out = tmp_path / "out.safetensors"
    got = numbers(save(tmp_path), capsys, groups=None, rows="sampled", out=str(out))
    whole = load_file(out)["out"]
    assert torch.equal(whole, kernels.attention(*case.values(), kernels.FAST, backend="spec"))
    rows = kernels.sample_rows(150, whole.device)
    exact = torch.softmax(case["q"][:, :, rows].double() @ case["k"].double().mT / 8, -1) @ case["v"].double()
    expected = (whole[:, :, rows].double() - exact).norm() / exact.norm()
    assert got["relative_l2"] == pytest.approx(float(expected), rel=1e-5)
    assert got["relative_l2"] != pytest.approx(numbers(save(tmp_path), capsys, groups=None)["relative_l2"], rel=1e-3)
    assert got["shape_q"] == [1, 2, 150, 64] and got["rows"] == "sampled"


def test_auto_uses_the_specification_where_no_kernel_is_and_says_so(tmp_path: Path, capsys) -> None:
    got = numbers(save(tmp_path), capsys, backend="auto")
    assert [note for note in got["notes"] if "stands in for a kernel" in note] or got["backend"] in ("cubin", "cute")


def test_short_queries_are_not_grouped_as_in_the_pack(tmp_path: Path, capsys) -> None:
    got = numbers(save(tmp_path, **tensors(lq=60)), capsys)
    assert got["groups"] is None and any(note.startswith("Not grouped") for note in got["notes"])


def test_mixed_floating_types_are_cast_to_that_of_q(tmp_path: Path, capsys) -> None:
    got = numbers(save(tmp_path, k=tensors()["k"].float()), capsys)
    assert got["dtype"] == "bfloat16" and got["relative_l2"] < 0.1


def test_a_zero_v_gives_no_error(tmp_path: Path, capsys) -> None:
    got = numbers(save(tmp_path, v=torch.zeros_like(tensors()["v"])), capsys)
    assert (got["relative_l2"], got["cosine"], got["psnr_db"], got["block_energy_removed"]) == (0.0, 1.0, None, 0.0)


def test_the_text_for_a_person_has_every_number(tmp_path: Path, capsys) -> None:
    assert replay_main.main([request(save(tmp_path), json=False)]) == 0
    text = capsys.readouterr().out
    for word in ("relative L2 error", "cosine", "PSNR", " dB", "block energy removed", " %", "time", "16 groups"):
        assert word in text


NAN = tensors()["v"].clone()
NAN[0, 1, 5, 3] = float("nan")
BAD_CASES = {
    "no q": ({"q": None}, "no tensor named q"),
    "no k and v": ({"k": None, "v": None}, "no tensor named k and none named v"),
    "rank 3": ({"q": tensors()["q"][0]}, "q has 3 axes"),
    "rank 5": ({"v": tensors()["v"][None]}, "v has 5 axes"),
    "batch": ({"q": tensors()["q"].expand(2, -1, -1, -1)}, "agree in the batch"),
    "heads": ({"q": tensors()["q"].repeat(1, 2, 1, 1)[:, :3]}, "agree in the heads"),
    "shared keys": ({"q": tensors()["q"].repeat(1, 2, 1, 1)}, "shares keys between heads"),
    "tokens": ({"v": tensors()["v"][:, :, :-1]}, "same number of tokens"),
    "dim": ({"q": tensors()["q"][..., :32]}, "head dimension"),
    "odd dim": (tensors(dim=48), "head dimensions"),
    "no tokens": ({"q": tensors()["q"][:, :, :0]}, "An axis is empty"),
    "int": ({"k": torch.ones(1, 2, 150, 64, dtype=torch.int32)}, "k is int32"),
    "fp64": ({"v": tensors()["v"].double()}, "v is float64"),
    "bool": ({"q": torch.ones(1, 2, 150, 64, dtype=torch.bool)}, "q is bool"),
    "nan": ({"v": NAN}, "v has 1 values that are NaN"),
    "infinite": ({"q": torch.full((1, 2, 150, 64), float("inf"))}, "q has 19200 values"),
    "mask": ({"mask": torch.zeros(1, 1, 150, 150)}, "carries a mask, which low-bit attention cannot honour"),
    "mask of true": ({"mask": torch.ones(150, 150, dtype=torch.bool)}, "carries a mask"),
    "scale of two": ({"scale": torch.ones(2)}, "scale must be one number"),
    "scale nan": ({"scale": torch.tensor(float("nan"))}, "must be a positive number"),
    "scale zero": ({"scale": torch.zeros(1)}, "must be a positive number"),
    "scale bool": ({"scale": torch.tensor(True)}, "scale must be one number"),
}


def declined(case: Path, capsys, **options) -> str:
    """The one line of a refused request."""
    assert replay_main.main([request(case, **options)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and output.err.startswith("run.py replay: ")
    return output.err


@pytest.mark.parametrize("name", BAD_CASES)
def test_a_bad_case_is_one_line_and_status_2(name: str, tmp_path: Path, capsys) -> None:
    changed, words = BAD_CASES[name]
    assert words in declined(save(tmp_path, **changed), capsys)


@pytest.mark.parametrize("content", [b"", b"hello, not safetensors", bytes(64)], ids=["empty", "text", "zeros"])
def test_a_file_that_is_not_safetensors(content: bytes, tmp_path: Path, capsys) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    assert "not a readable safetensors file" in declined(file, capsys)


def test_a_cut_off_file(tmp_path: Path, capsys) -> None:
    file = save(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a readable safetensors file" in declined(file, capsys)


def test_backends_that_cannot(tmp_path: Path, capsys) -> None:
    case = save(tmp_path)
    assert "choose auto, " in declined(case, capsys, backend="warp")
    if not next(status for status in kernels.backends() if status.name == "cubin").available:
        assert "ComfyUI's own attention runs" in declined(case, capsys, backend="cubin")


def options(**changed) -> argparse.Namespace:
    defaults = {"plan": "fast", "backend": "auto", "grouping": "auto", "rows": "all", "out": None, "json": False}
    return argparse.Namespace(**{**defaults, **changed})


def test_good_options_make_a_request(tmp_path: Path) -> None:
    case = save(tmp_path)
    made = replay.check(options(case=str(case), grouping="off", out=str(tmp_path / "o.safetensors")))
    assert made["groups"] is None and made["out"] == str(tmp_path / "o.safetensors") and made["case"] == str(case)
    assert replay.check(options(case=str(case), grouping="64"))["groups"] == 64
    assert replay.check(options(case=str(case)))["groups"] == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"case": "missing.safetensors"}, "does not exist"),
        ({"case": "."}, "is a folder"),
        ({"plan": "fastest"}, "--plan fastest: choose fast"),
        ({"rows": "some"}, "--rows some: choose all or sampled"),
        ({"grouping": "0"}, "from 1 to 256"),
        ({"grouping": "257"}, "from 1 to 256"),
        ({"grouping": "-3"}, "from 1 to 256"),
        ({"grouping": "many"}, "from 1 to 256"),
        ({"out": "no/such/folder/o.safetensors"}, "no result can be written there"),
    ],
)
def test_bad_options_are_one_line_and_status_2(changed: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=words) as refused:
        replay.check(options(**{"case": str(save(tmp_path)), **changed}))
    assert refused.value.status == 2 and "\n" not in str(refused.value)


def test_the_case_is_never_overwritten(tmp_path: Path) -> None:
    case = save(tmp_path)
    with pytest.raises(ToolError, match="names the case itself"):
        replay.check(options(case=str(case), out=str(case)))


def test_the_command_from_another_folder(tmp_path: Path) -> None:
    """The whole way, with a relative path and a folder name that needs care."""
    folder = tmp_path / "my \u00fc cases"
    folder.mkdir()
    save(folder)
    command = [sys.executable, str(ROOT / "run.py"), "replay", "case.safetensors", "--json", "--python", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"] == "fast"
