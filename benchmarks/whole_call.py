"""Attention calls as a model makes them, beside their peers, in one run on one GPU.

    python benchmarks/whole_call.py [--kernels FOLDER] [--shapes wan720,wan480,hv15,h3] [--json FILE] [--plot FILE.png]

Every row starts from bf16 q, k, v and ends with the bf16 output; "kernel alone" starts from prepared operands. Rows
take turns for `--rounds` rounds, so that heat and the power limit meet all of them alike; the number is the median of
all timings. Errors are relative L2 against fp32 attention on sampled rows of two heads. Peers that cannot be imported
are named and left out. `python3 run.py bench` is the same with a default place for the results; its parts are in
`bench/`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("vc_pack", Path(__file__).resolve().parents[1] / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()

from vc_attention.benchmarks.bench.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
