"""Print the backend that the demo should ask for on this machine's GPU: "auto" when a kernel is there, else "spec"."""

from __future__ import annotations

from ..pack import load_pack

if __name__ == "__main__":
    load_pack()
    import torch
    from vc_attention.kernels import preset, supports

    found = supports(torch.device("cuda"), preset("fast", "cuda")) if torch.cuda.is_available() else None
    print("auto" if found else "spec")
