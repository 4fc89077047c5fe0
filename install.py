"""Run by ComfyUI Manager after the pack is installed, or by hand: brings the kernels for the cards of this machine.

    python install.py                   install them; one line says the cards, what was done, and what runs
    python install.py --from PLACE      take the wheels from a folder, a file or an address (without a network, too)
    python install.py --dry-run         say what would be done, and do nothing
    python install.py --list            the families of cards, and whether their kernels are released and installed
    python install.py --remove          remove the installed kernels

Standard library only. It starts no other program, writes nowhere but in `kernels/prebuilt`, and always ends with
status 0: a failed install step must not keep the pack from loading, and without kernels ComfyUI's own attention runs.
The work is in `kernels/install`.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType

PACK = Path(__file__).resolve().parent
#: The folder `kernels` under a name of its own: its `__init__.py` needs torch, its submodules used here do not.
KERNELS = "_vc_attention_kernels"


def main(arguments: list[str] | None = None) -> int:
    """Install, and say what became of it. Always 0."""
    try:
        if sys.version_info < (3, 10):  # noqa: UP036 - ComfyUI's Python may be older than the pack allows
            sys.stdout.write("VC-Attention: this Python is too old; it needs 3.10 or newer, as ComfyUI does.\n")
            return 0
        sys.dont_write_bytecode = True  # not even a cache of compiled files
        if KERNELS not in sys.modules:
            package = ModuleType(KERNELS)
            package.__path__ = [str(PACK / "kernels")]
            sys.modules[KERNELS] = package
        from _vc_attention_kernels.install import command

        command.main(PACK, arguments)
    except SystemExit:
        pass  # argparse ends the program after --help or a misused option
    except KeyboardInterrupt:
        say("VC-Attention: stopped. What was installed before stays; run install.py again to go on.")
    except Exception as error:
        say(
            f"VC-Attention: install.py could not finish ({type(error).__name__}: {error}); the pack loads all the "
            "same, and its node says what runs. Reinstall or update the pack."
        )
    return 0


def say(text: str) -> None:
    """Print, whatever characters the console lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    with contextlib.suppress(OSError, ValueError):  # nobody listens
        print(text.encode(encoding, "replace").decode(encoding), flush=True)


if __name__ == "__main__":
    sys.exit(main())
