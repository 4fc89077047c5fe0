"""What an H200 computed with the emulated NVFP4 kernel, computed again by the interpreter from the same images.

    python tests/ptx/replay_nvfp4.py FILE [--most 12]        FILE: `benchmarks/nvfp4_on_sm90.py --save FILE`

Prints how many outputs have the same bits: of the emulated kernel's PTX, which the card ran, and of the PTX for
sm_120a, which it could not. Not part of the suite.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--most", type=int, default=12, help="cases, the first of the file")
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("vc_pack", TESTS.parent / "tools" / "pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_pack()
    sys.path.insert(0, str(TESTS / "support"))
    package = types.ModuleType("ptx")
    package.__path__ = [str(Path(__file__).resolve().parent)]
    sys.modules["ptx"] = package
    import torch

    torch.set_num_threads(1)
    import nvfp4_kernels
    from vc_attention.benchmarks.nvfp4_on_sm90 import PLANS
    from vc_attention.kernels.launch.images import Images

    print("| plan | B, H, Lq, Lkv | outputs | equal, emulated for sm_90a | equal, sm_120a |\n|---|---|---|---|---|")
    for case in torch.load(arguments.file)[: arguments.most]:
        images, plan, card = Images(**case["images"]), PLANS[case["plan"]], case["out"]
        same = [
            int((nvfp4_kernels.execute(images, plan, case["output"], emulated=emulated) == card).sum())
            for emulated in (True, False)
        ]
        shape = ", ".join(map(str, case["shape"]))
        print(f"| {case['plan']} | {shape} | {card.numel()} | {same[0]} | {same[1]} |", flush=True)


if __name__ == "__main__":
    main()
