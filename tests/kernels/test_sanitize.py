"""What `benchmarks/sanitize_sm90.py` makes of the output of compute-sanitizer: a finding never reads as clean."""

from __future__ import annotations

from vc_attention.benchmarks.sanitize_sm90 import PASSED, STARTED, verdict

HEADER = ["========= COMPUTE-SANITIZER", f"{STARTED} grouping", f"{PASSED} grouping", f"{STARTED} fast"]


def test_a_quiet_run_is_clean():
    found = verdict([*HEADER, f"{PASSED} fast", "========= ERROR SUMMARY: 0 errors"], 0)
    assert (found["verdict"], found["passed"], found["findings"]) == ("clean", 2, [])
    racecheck = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert verdict([*HEADER, racecheck], 0)["verdict"] == "clean"


def test_findings_name_their_case_and_kernel():
    lines = [
        *HEADER,
        "========= Invalid __global__ write of size 2 bytes",
        "=========     at kernel_cutlass_kernel+0x70",
        "========= ERROR SUMMARY: 1 error",
    ]
    found = verdict(lines, 9)
    assert found["verdict"] == "FOUND" and found["reported"] == 1
    assert found["findings"] == ["fast: Invalid __global__ write of size 2 bytes at kernel_cutlass_kernel+0x70"]


def test_hazards_that_only_the_summary_counts_are_found():
    lines = [*HEADER, "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"]
    assert verdict(lines, 9)["verdict"] == "FOUND"


def test_hangs_and_crashes_name_the_case():
    assert verdict(HEADER, None)["verdict"] == "HUNG in fast"
    assert verdict(HEADER, 1)["verdict"] == "FAILED in fast (exit status 1)"
    assert verdict([], 0)["verdict"] == "FAILED in start (exit status 0)"
