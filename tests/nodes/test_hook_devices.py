"""Several GPUs: copies of the schedule, clones in threads."""

from __future__ import annotations

import threading

from hook_cases import SIGMAS, close
from node_fakes import FakePatcher, forward, options
from vc_attention.nodes.hook import attach, session_of


def test_copies_of_the_schedule_on_extra_devices_do_not_restart_the_run(layers):
    """From 0.33, each extra GPU's pass gets its own copy of sample_sigmas."""
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=64))
    model.fire("on_pre_run")
    for sigma in SIGMAS[:3]:
        forward(model, layers, float(sigma), SIGMAS.clone(), multigpu_thread_device="cuda:1")
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (2, 4)


def test_clones_in_threads(layers):
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=2))
    model.fire("on_pre_run")
    wanted = forward(FakePatcher(), layers, 1.0, SIGMAS)
    problems = []

    def work(branch):
        try:
            clone = model.clone()
            for sigma in SIGMAS[:-1]:
                for out, want in zip(
                    forward(clone, layers, float(sigma), SIGMAS, uuids=(branch,)), wanted, strict=True
                ):
                    close(out, want)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(f"branch {i}",)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []
    assert session_of(model).stats.accelerated == 4 * 2 * 8 and session_of(model).stats.forwards == 32
