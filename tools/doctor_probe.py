"""The part of `run.py doctor` that needs torch: what torch and the pack's own registry say about this machine.

    python tools/pack.py doctor_probe [--self-test] [--user FOLDER]        prints one JSON object

--self-test: load and test the kernels of each card now. --user: ComfyUI's user folder, where earlier tests are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Packages whose versions a bug report needs: what this pack stands on, and other attention beside it.
PACKAGES = (
    "numpy",
    "safetensors",
    "triton",
    "triton-windows",
    "nvidia-cutlass-dsl",
    "comfyui-frontend-package",
    "comfy-kitchen",
    "flash-attn",
    "flash-attn-4",
    "sageattention",
    "xformers",
)


def main(arguments: Sequence[str] = ()) -> int:
    """Print what is found; `error` instead of the rest when torch or the pack does not import."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--user", type=Path)
    options = parser.parse_args(arguments)
    try:
        found = probe(options.user, options.self_test)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    print(json.dumps(found))
    return 0


def probe(user: Path | None = None, self_test: bool = False) -> dict[str, Any]:
    """torch's version and devices, and the state of every backend, card by card where there are several kinds."""
    import torch

    from .. import kernels
    from ..kernels.launch import driver, verdicts

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    # A test that is asked for here leaves nothing behind: doctor changes nothing.
    kernels.set_folder(None if self_test or user is None else user / "vc_attention")
    backends: list[dict[str, Any]] = []
    runs: list[str] = []
    for name in dict.fromkeys(names or [""]):
        device = torch.device("cuda", names.index(name)) if name else None
        card = name if len(set(names)) > 1 else ""
        rows = kernels.backends(device, self_test)
        backends += [{**vars(status), "card": card} for status in rows]
        if any(status.available and status.name != "spec" for status in rows):
            runs.append(name)
    return {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda or torch.version.hip,
        "devices": names,
        "backends": backends,
        "runs": runs,
        "driver": driver.driver_release(),
        "self_tests": verdicts.kept(user / "vc_attention") if user is not None else [],
        "packages": versions(PACKAGES),
    }


def versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed here."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
