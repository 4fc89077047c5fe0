"""The part of `run.py doctor` that needs torch: what torch and the pack's own registry say about this machine.

    python tools/pack.py doctor_probe        prints one JSON object
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] = ()) -> int:
    """Print what is found; `error` instead of the rest when torch or the pack does not import."""
    try:
        found = probe()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    print(json.dumps(found))
    return 0


def probe() -> dict[str, Any]:
    """torch's version and devices, and the state of every backend."""
    import torch

    from .. import kernels

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda or torch.version.hip,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "backends": [vars(status) for status in kernels.backends()],
    }
