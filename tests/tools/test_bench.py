"""run.py bench: options and the interpreter, one sentence where there is no GPU, and what is made of the numbers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_cases as cases
import pytest
from vc_attention.benchmarks.bench import command, plot, report
from vc_attention.benchmarks.bench.results import CUDNN, FLASH_2, FLASH_4, from_json, to_json, write
from vc_attention.benchmarks.bench.shapes import QUICK, SHAPES
from vc_attention.tools import bench
from vc_attention.tools.messages import ToolError

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def options(**changed) -> argparse.Namespace:
    names = ("shapes", "seconds", "rounds", "kernels", "json", "plot", "earlier", "python")
    return argparse.Namespace(**{**dict.fromkeys(names), "quick": False, **changed})


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bench, "OUTPUT", tmp_path / "output" / "bench")
    return tmp_path / "output" / "bench"


def test_the_shapes_are_restated_as_they_are() -> None:
    assert tuple(SHAPES) == bench.SHAPES and ",".join(SHAPES) == command.DEFAULT_SHAPES
    assert SHAPES == {
        "wan720": (75_600, 40),
        "wan720x8": (75_600, 8),
        "wan480": (32_760, 40),
        "hv15": (111_600, 16),
        "h3": (37_710, 56),
    }
    assert not QUICK.keys() & SHAPES.keys()


def test_results_go_to_the_output_folder_by_default(output: Path) -> None:
    made = bench.check(options())
    assert made == ["--json", str(output / "bench.json"), "--plot", str(output / "bench.png")] and output.is_dir()


def test_good_options_are_passed_on(tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sm_90a").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"shapes": "wan480, h3", "seconds": ".25", "rounds": "4", "kernels": "sm_90a", "json": "a.json"}
    made = bench.check(options(**given, plot="b.png"))
    parsed = command.arguments_of("x", made)
    assert (parsed.shapes, parsed.seconds, parsed.rounds, parsed.quick) == ("wan480,h3", 0.25, 4, False)
    assert parsed.kernels == tmp_path / "sm_90a"
    assert (parsed.json, parsed.plot) == (tmp_path / "a.json", tmp_path / "b.png")
    assert not output.exists()
    assert command.arguments_of("x", bench.check(options(quick=True))).quick


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shapes": "wan720,wan"}, "--shapes wan720,wan: choose from wan720, "),
        ({"shapes": ""}, "choose from"),
        ({"shapes": "wan480", "quick": True}, "leave out --shapes"),
        ({"seconds": "0"}, "--seconds 0: give a number above 0"),
        ({"seconds": "soon"}, "--seconds soon"),
        ({"seconds": "nan"}, "--seconds nan"),
        ({"rounds": "2.5"}, "--rounds 2.5: give a number above 0 without decimals"),
        ({"rounds": "-1"}, "--rounds -1"),
        ({"kernels": "no/such"}, "--kernels no/such: there is no such folder"),
        ({"json": "no/such/a.json"}, "--json no/such/a.json: no file can be written there"),
        ({"plot": "."}, "--plot .: no file can be written there"),
        ({"earlier": "no.json"}, "--from no.json: there is no such file"),
        ({"earlier": __file__, "json": "a.json"}, "no numbers for --json"),
    ],
)
def test_bad_options_are_one_line_and_status_2(changed: dict, words: str, output: Path) -> None:
    with pytest.raises(ToolError) as refused:
        bench.check(options(**changed))
    assert words in str(refused.value) and refused.value.status == 2 and "\n" not in str(refused.value)


def test_the_python_that_runs_this_is_taken_when_it_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.interpreter(None) == Path(sys.executable)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match="has no torch") as refused:
        bench.interpreter(None)
    assert "--python PATH" in str(refused.value) and refused.value.status == 2


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for a Python")
def test_the_given_python_runs_it_with_the_users_own_settings(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ "$1" = -c ]; then echo 3 12; exit; fi\n'
        f"echo \"$PYTHONPATH\" > '{tmp_path}/seen'; printf '%s\\n' \"$@\" >> '{tmp_path}/seen'; exit 7\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/somewhere/peers")
    assert bench.main(options(python=str(python), quick=True)) == 7
    path, program, part, *rest = (tmp_path / "seen").read_text().splitlines()
    assert (path, program, part) == ("/somewhere/peers", str(ROOT / "tools" / "pack.py"), "bench_main")
    assert rest[0] == "--quick" and rest[1::2] == ["--json", "--plot"]


@pytest.mark.parametrize(
    "program",
    [["run.py", "bench", "--quick", "--json", "{}/a.json", "--plot", "{}/a.png"], ["benchmarks/whole_call.py"]],
)
def test_without_a_gpu_it_is_one_sentence_and_status_2(program: list[str], tmp_path: Path) -> None:
    script, *rest = program
    command_line = [sys.executable, str(ROOT / script), *(word.format(tmp_path) for word in rest)]
    done = subprocess.run(command_line, cwd=tmp_path, env=NO_GPU, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "There is no GPU that torch " in done.stderr and "--python PATH" in done.stderr
    assert done.stderr.startswith("run.py bench: " if "bench" in rest else "whole_call.py: ")
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_torch_is_one_sentence_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main(["--quick"], "run.py bench") == 2
    error = capsys.readouterr().err
    assert error.startswith("run.py bench: ") and "cannot import torch" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("peers", "reference"),
    [
        ((FLASH_2, CUDNN, FLASH_4), FLASH_4),
        (("comfy-kitchen INT8", FLASH_2, CUDNN), CUDNN),
        ((FLASH_2, "comfy-kitchen INT8"), FLASH_2),
        (("comfy-kitchen INT8",), None),
        ((), None),
    ],
)
def test_ratios_are_to_the_first_reference_that_ran(peers: tuple[str, ...], reference: str | None) -> None:
    shape = cases.shape(*peers)
    assert (shape.reference.name if shape.reference else None) == reference
    text = "\n".join(report.shape_text(shape))
    if reference is None:
        assert "no reference ran" in text and all(shape.ratio(row) is None for row in shape.rows)
        return
    at = 20.0 + 10 * peers.index(reference)
    assert f"| x {reference} |" in text
    assert [shape.ratio(row) for row in shape.rows[:2]] == pytest.approx([at / 10, at / 12])
    line = next(line for line in text.splitlines() if "fast, reuse step" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    quartiles = "11.880 to 12.240"
    assert cells == ["fast, reuse step", "12.000", quartiles, "15", "417", f"{at / 12:.2f}", "0.0050", "1512"]


def test_the_report_says_what_ran_and_what_did_not() -> None:
    run = cases.run()
    run.shapes[0].failed["cuDNN BF16"] = "RuntimeError: no engine"
    text = report.text(run)
    for words in (
        "NVIDIA Imaginary, driver 1.2.3, torch 2.11.0", "40 kernels for sm_90a, version 0.1.0, sources abababababab",
        "FlashAttention-4 BF16: flash-attn-4 4.0.0", "SageAttention (auto): not there, sageattention cannot be used",
        "cuDNN BF16 did not run: RuntimeError: no engine", "3 rounds of 0.25 s a row",
        "5 MB: 3.0 % more than q, k, v in 8 bit (3 MB) and the output (2 MB)",
        "SM clock 1510 to 1540 MHz, power 660 to 690 W",
    ):  # fmt: skip
        assert words in text
    run.ours_absent = "No prebuilt kernels are installed for this card."
    assert "No row of ours: No prebuilt kernels are installed for this card." in report.text(run)


def test_an_unknown_clock_is_said() -> None:
    shape = cases.shape(FLASH_4)
    rows = [cases.row(row.name, row.ms, row.ours, mhz=None, watts=None) for row in shape.rows]
    assert "nvidia-ml-py" in report.clock_note(SimpleNamespace(rows=rows))


def test_bandwidth_is_bytes_over_time_and_its_share_is_that_of_the_copy() -> None:
    lines = {line.split("|")[1].strip(): line for line in report.pass_text(cases.shape(FLASH_4)) if "|" in line}

    def cells(name: str) -> list[str]:
        return [cell.strip() for cell in lines[name].strip("|").split("|")][1:]

    # 1 GB in 0.5 ms is 2000 GB/s, half of the copy's 4000; 0.5 ms is 2.5 % of the reference's 20 ms.
    assert cells("preparation, reuse step") == ["0.5000", "1000.0", "2000", "50 %", "2.50"]
    assert cells("- q_bf16") == ["0.2000", "600.0", "3000", "75 %", ""]
    assert cells("- group_update_bf16 (2 times)") == ["0.0100", "30.0", "3000", "75 %", ""]
    assert report.pass_text(cases.shape())[0] == "Copy from device to device: 500 MB in 0.250 ms, 4000 GB/s."


def test_a_table_is_aligned() -> None:
    lines = report.table(["", "ms"], [["a long name", "1"], ["b", "10.25"]])
    assert lines[1] == "|-------------|------:|" and {len(line) for line in lines} == {len(lines[0])}


def test_json_is_read_back_as_it_was_and_carries_what_follows_from_it() -> None:
    run = cases.run(cases.shape(FLASH_4, CUDNN), cases.shape(name="bare"))
    data = json.loads(to_json(run))
    assert from_json(to_json(run)) == run
    first, bare = data["shapes"]
    assert (first["reference"], bare["reference"]) == (FLASH_4, None)
    assert [row["ratio"] for row in first["rows"]] == pytest.approx([2.0, 20 / 12, 1.0, 20 / 30])
    assert [one["gb_per_s"] for one in first["passes"]] == pytest.approx([2000, 3000, 900, 3000])
    assert first["passes"][0]["share_of_copy"] == pytest.approx(0.5)
    assert first["memory"]["over_8bit_and_output"] == pytest.approx(0.03)
    assert data["command"] == ["run.py bench", "--quick"] and data["device"]["driver"] == "1.2.3"
    assert data["peers"][FLASH_4] == "flash-attn-4 4.0.0" and data["date"].startswith("2026-11-29")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "shapes": []}', "[1, 2"])
def test_json_that_is_no_run_is_refused(text: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(ValueError):
        from_json(text)
    file = tmp_path / "x.json"
    file.write_text(text)
    assert command.main(["--from", str(file)], "run.py bench") == 2
    assert capsys.readouterr().err.startswith(f"run.py bench: --from {file}: it cannot be read (")


def test_results_are_replaced_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "one")
    write(tmp_path / "a.json", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "two")]


def pixels(path: Path):
    """The plot as an array of bytes [height, width, 3]."""
    image = pytest.importorskip("matplotlib.image")
    return (image.imread(path)[..., :3] * 255).round().astype(int)


def test_the_plot_has_a_bar_of_the_right_length_for_each_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = (FLASH_4, CUDNN, FLASH_2)
    path = tmp_path / "bench.png"
    run = cases.run(cases.shape(*names))
    assert plot.draw(run, path) == f"Plot: {path}"
    image = pixels(path)

    def bars(colour: str) -> list[int]:
        """Widths in pixels of the bars of a colour, from above."""
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        widths = (image == wanted).all(-1).sum(1)
        starts = [i for i in range(1, len(widths)) if widths[i] > 40 and widths[i - 1] <= 40]
        return [int(widths[i + 3]) for i in starts]

    (alone,), (whole,), others = bars(plot.ALONE), bars(plot.WHOLE), bars(plot.PEER)
    # 10 ms against 12 ms, and 20, 30 and 40 ms; the dashed reference line takes a few pixels off the longer bars.
    assert whole / alone == pytest.approx(10 / 12, abs=0.02)
    assert [width / alone for width in others] == pytest.approx([10 / 20, 10 / 30, 10 / 40], abs=0.02)


def test_the_labels_are_the_ratios() -> None:
    shape = cases.shape(FLASH_4, CUDNN)
    assert [plot.label(shape, row) for row in shape.rows] == ["2.00x", "1.67x", "1.00x", "0.67x"]
    assert [plot.label(cases.shape(), row) for row in cases.shape().rows] == ["500", "417"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_number_of_shapes_is_drawn(count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = cases.run(*[cases.shape(FLASH_4, name=f"shape{n}") for n in range(count)])
    plot.draw(run, tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").shape[0] > 200


def test_no_plot_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cases.run(cases.shape())
    run.shapes[0].rows.clear()
    pytest.importorskip("matplotlib")
    assert plot.draw(run, tmp_path / "a.png") == "No plot was made: no row was timed."
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sentence = plot.draw(cases.run(), tmp_path / "a.png")
    assert sentence.startswith("No plot was made") and "pip install matplotlib" in sentence and "\n" not in sentence
    assert not (tmp_path / "a.png").exists()


def test_an_earlier_run_is_shown_and_drawn_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "old.json").write_text(to_json(cases.run()))
    command_line = [sys.executable, str(ROOT / "run.py"), "bench", "--from", "old.json", "--plot", "new.png"]
    done = subprocess.run(command_line, cwd=tmp_path, env=NO_GPU, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == report.text(cases.run()) and f"Plot: {tmp_path / 'new.png'}" in done.stderr
    assert pixels(tmp_path / "new.png").size


def test_reading_an_earlier_run_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'tools'); import pack; pack.load_pack(); "
        "from vc_attention.benchmarks.bench import command, plot, report, results"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for nvidia-smi")
def test_the_driver_version_is_asked_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.driver_version() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    program.chmod(0o755)
    assert command.driver_version() == "580.159.04"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert command.driver_version() is None
