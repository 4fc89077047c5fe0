"""One small wheel, its older version, and where the tests of the installer put them."""

from __future__ import annotations

from pathlib import Path

import small_wheels
from installing import Pack

OLD, NEW = small_wheels.wheel(version="0.0.9"), small_wheels.wheel()
NAME = "vc_attention_kernels_hopper-0.1.0-py3-none-any.whl"


def beside(pack: Pack, data: bytes = NEW, name: str = NAME) -> Path:
    """The wheel in the folder `wheels` of the pack."""
    folder = pack.folder / "wheels"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def with_old(pack: Pack) -> None:
    """Let the build of the version before be installed."""
    pack.pin({"hopper": OLD}, "0.0.9")
    file = beside(pack, OLD, NAME.replace("0.1.0", "0.0.9"))
    assert "are installed now" in pack.run()
    file.unlink()
    pack.pin({"hopper": NEW})
