"""Small kernels for the tests of the interpreter: a few statements between loads and stores."""

from __future__ import annotations

import numpy as np

from .memory import Buffer
from .run import Loaded, Report


def kernel(body: str, names=(), block: int = 32, shared: str = "", target: str = "sm_90a") -> str:
    """PTX of a kernel `k` whose 64-bit parameters are in the registers `names`; %r, %f, %h, %d, %p are declared, and
    `tid` is the thread's index."""
    parameters = ", ".join(f".param .u64 k_{name}" for name in names)
    loads = "".join(f"ld.param.b64 {name}, [k_{name}];\n" for name in names)
    declared = f".reg .b64 {', '.join(names)};\n" if names else ""
    return f"""
.version 8.8
.target {target}
.address_size 64
{shared}
.visible .entry k({parameters})
.reqntid {block}, 1, 1
{{
.reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<512>, tid; .reg .f32 %f<64>; .reg .b64 %d<64>;
{declared}{loads}mov.u32 tid, %tid.x;
{body}
ret;
}}
"""


def run(body: str, arrays: dict[str, np.ndarray] | None = None, block: int = 32, shared: str = "", **options) -> Report:
    """Run a body on named arrays, which it may change. `out...` arrays start unwritten."""
    arrays = arrays or {}
    buffers = [Buffer(array, name, written=not name.startswith("out")) for name, array in arrays.items()]
    grid = options.pop("grid", (options.get("cluster", 1),))
    fmad = options.pop("fmad", True)
    target = options.pop("target", "sm_90a")
    loaded = Loaded(kernel(body, tuple(arrays), block, shared, target), fmad=fmad)
    return loaded.launch(grid, None, buffers, **options)


_LETTER = {1: "h", 2: "h", 4: "r", 8: "d"}


def apply(statement: str, result: np.dtype, *inputs: np.ndarray, **options) -> np.ndarray:
    """`statement` on 32 lanes: {0} is the destination register, {1} ... the inputs; returns the 32 results.

    Values travel in untyped registers of the size of their dtype; 8-bit ones in 16-bit registers.
    """
    body, names = "", []
    for n, array in enumerate(inputs):
        body += _address(f"in{n}", n, array.dtype.itemsize)
        name = f"%{_LETTER[array.dtype.itemsize]}{10 + n}"
        body += f"ld.global.b{8 * array.dtype.itemsize} {name}, [%d{n}];\n"
        names.append(name)
    out = np.zeros(32, result)
    target = f"%{_LETTER[out.dtype.itemsize]}20"
    body += statement.format(target, *names)
    body += "\n" if statement.startswith("{{") else ";\n"
    body += _address("out", 31, out.dtype.itemsize)
    body += f"st.global.b{8 * out.dtype.itemsize} [%d31], {target};\n"
    arrays = {f"in{n}": array.copy() for n, array in enumerate(inputs)} | {"out": out}
    run(body, arrays, **options)
    return out


def _address(name: str, register: int, size: int) -> str:
    return f"mul.wide.u32 %d{register}, tid, {size};\nadd.s64 %d{register}, %d{register}, {name};\n"
