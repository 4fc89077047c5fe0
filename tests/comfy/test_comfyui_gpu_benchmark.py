"""The end-to-end benchmark in small, on the CPU: what it counts, what it measures, and that it notices a wrong run."""

from __future__ import annotations

import json

import pytest
import torch
from vc_attention.benchmarks import comfyui_gpu
from vc_attention.nodes.options import PatchOptions

pytestmark = pytest.mark.comfy


@pytest.fixture
def bench(request, tmp_path):
    """`bench(*arguments)` runs the command with --tiny and returns (exit status, the JSON file)."""
    import comfy.sd  # the checkout that this test session uses

    directory = comfy.sd.__file__.rsplit("comfy", 1)[0]

    def run(*arguments: str):
        file = tmp_path / "results.json"
        status = comfyui_gpu.main(
            ["--comfyui", directory, "--tiny", "--shapes", "480p", "--json", str(file), *arguments]
        )
        return status, json.loads(file.read_text()) if file.is_file() else None

    return run


def rows_of(results) -> dict[str, dict]:
    return {row["row"]: row for row in results["shapes"][0]["rows"]}


def test_calls_times_and_errors_of_every_row(bench):
    status, results = bench("--rounds", "2")
    rows = rows_of(results)
    assert status == 0
    assert {"comfyui", "vc:fast", "vc:keys", "vc:faithful", "none"} <= set(rows)
    for name in ("vc:fast", "vc:keys", "vc:faithful"):
        row = rows[name]
        # 5 steps, 3 layers, one branch: ceil(5 / 4) = 2 steps with groups; text cross-attention stays with ComfyUI
        assert row["counts"] == {"grouped": 3, "reused": 3, "plain": 9, "declined": 15}
        assert row["phases"] == ["group", "reuse", "plain", "plain", "plain"]
        assert [len(times) for times in row["seconds"]] == [5, 5]
        assert all(row["median"][phase] > 0 for phase in ("group", "reuse", "plain"))
        # low bits move the latent, and not far
        assert 1e-4 < row["error_final"] < 0.1
        assert len(row["error_denoised"]) == 5
        assert row["psnr_final"] > 30
    assert rows["vc:faithful"]["error_final"] < rows["vc:fast"]["error_final"]
    assert [len(times) for times in rows["none"]["seconds"]] == [3, 3]
    assert rows["none"]["error_final"] is None
    peers = [row for name, row in rows.items() if name.startswith("comfyui:")]
    assert all(row["error_denoised"][-1] < 1e-4 for row in peers)


def test_guidance_doubles_the_calls(bench):
    status, results = bench("--rows", "vc:fast", "--cfg", "4", "--steps", "8")
    assert status == 0
    assert set(rows_of(results)) == {"comfyui", "vc:fast"}
    assert rows_of(results)["vc:fast"]["counts"] == {"grouped": 6, "reused": 6, "plain": 36, "declined": 48}


def test_a_step_in_the_wrong_phase_fails(bench, monkeypatch, capsys):
    from vc_attention.nodes.schedule import Schedule

    real = Schedule.__init__

    def one_step_too_many(self, *arguments, **keywords):
        real(self, *arguments, **keywords)
        self.window += 1

    monkeypatch.setattr(Schedule, "__init__", one_step_too_many)
    status, results = bench("--rows", "vc:fast")
    assert status == 1
    assert rows_of(results)["vc:fast"]["counts"]["plain"] == 6
    assert "the schedule says" in capsys.readouterr().out


def test_a_run_that_fell_back_fails(bench, monkeypatch, capsys):
    from vc_attention.nodes import engine

    monkeypatch.setattr(engine, "attention", lambda q, *rest: torch.full_like(q, torch.nan))
    status, results = bench("--rows", "vc:fast")
    assert status == 1
    assert rows_of(results)["vc:fast"]["problems"]
    assert "FAILED" in capsys.readouterr().out


def test_a_latent_that_is_not_finite_fails(bench, monkeypatch, capsys):
    """ComfyUI's own row is watched as well: weights that overflow would make every comparison empty."""
    from vc_attention.benchmarks import comfyui_model

    real = comfyui_model.sample

    def spoiled(*arguments, **keywords):
        run = real(*arguments, **keywords)
        run.latent = torch.full_like(run.latent, torch.inf)
        return run

    monkeypatch.setattr(comfyui_model, "sample", spoiled)
    status, results = bench("--rows", "comfyui")
    assert status == 1
    assert "the latent is not finite" in rows_of(results)["comfyui"]["problems"]


def test_a_peer_that_breaks_is_left_out(bench, monkeypatch, capsys):
    from vc_attention.benchmarks import comfyui_rows

    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(comfyui_rows, "_nothing", broken)
    status, results = bench("--rows", "none")
    assert status == 0
    assert set(rows_of(results)) == {"comfyui"}
    assert "no such kernel" in capsys.readouterr().out


def test_rows_are_known_by_name(bench, capsys):
    status, results = bench("--rows", "vc:quick")
    assert status == 2 and results is None
    assert "vc:quick" in capsys.readouterr().out


def test_a_folder_without_comfyui_is_one_sentence(tmp_path, capsys):
    assert comfyui_gpu.main(["--comfyui", str(tmp_path), "--tiny"]) == 2
    assert "holds no ComfyUI" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--shapes", "8k"), ("--shapes", ""), ("--steps", "0")])
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        comfyui_gpu.main(["--comfyui", ".", "--tiny", *arguments])
    assert stopped.value.code == 2


def test_phases_follow_the_rule():
    assert comfyui_gpu.phases(20, PatchOptions(reuse_steps=2))[:6] == [*("group", "reuse") * 2, "group", "plain"]
    assert comfyui_gpu.phases(1, PatchOptions()) == ["group"]


def test_the_full_size_is_wan22_14b():
    """Counted on the meta device: 14.3 billion weights, 40 blocks, and the token counts of 81 frames."""
    import comfy.ldm.wan.model
    import comfy.ops
    from vc_attention.benchmarks.comfyui_model import FULL

    network = comfy.ldm.wan.model.WanModel(
        model_type="t2v", **FULL.network, device="meta", dtype=FULL.dtype, operations=comfy.ops.disable_weight_init
    )
    assert 14.2e9 < sum(parameter.numel() for parameter in network.parameters()) < 14.4e9
    assert len(network.blocks) == 40
    assert {name: FULL.tokens(latent) for name, latent in FULL.shapes.items()} == {"480p": 32_760, "720p": 75_600}
    assert FULL.tokens(FULL.warm_up) >= FULL.min_tokens > FULL.text_tokens
