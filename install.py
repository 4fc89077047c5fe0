"""Run by ComfyUI Manager after the pack is installed, or by hand: says what VC-Attention will run on this machine.

    python install.py              one line: the cards and what runs on them
    python install.py --list       the families of cards and whether their kernels are released
    python install.py --dry-run    what would be done, doing nothing

Standard library only; it starts no other program, needs no network, changes nothing and always ends with status 0,
because a failed install step must not keep the pack from loading. In this version there is nothing to fetch yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACK = Path(__file__).resolve().parent


def load(name: str) -> ModuleType:
    """A module of `kernels`, by its file: importing the package would need torch."""
    full_name = f"_vc_attention_install_{name}"
    spec = importlib.util.spec_from_file_location(full_name, PACK / "kernels" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"kernels/{name}.py is missing")
    sys.dont_write_bytecode = True  # nothing is written, not even a cache of compiled files
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


def report() -> list[str]:
    """One sentence for each kind of card here: what runs on it and why."""
    cards, detect = load("cards"), load("detect")
    found = detect.cards_here()
    sentences = [cards.describe(card.name, card.capability, card.vendor).text for card in found]
    return list(dict.fromkeys(sentences))


def families() -> list[str]:
    """One line for each family of cards."""
    cards = load("cards")
    rows = []
    for family in cards.FAMILIES:
        released = "released" if family.key in cards.RELEASED else "planned, not released yet"
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in family.capabilities)
        state = f"{family.modes} kernels {released}" if family.modes else "no kernels: it " + family.why_not
        rows.append((f"{family.title}, compute capability {capabilities}", state))
    width = max(len(title) for title, _ in rows)
    return [f"{title:<{width}}  {state}" for title, state in rows]


def main(arguments: list[str] | None = None) -> int:
    """Say what runs. Always 0."""
    parser = argparse.ArgumentParser(prog="install.py", description="What VC-Attention runs on this machine.")
    parser.add_argument("--list", action="store_true", help="list the families of cards and their kernels")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    try:
        options, _ = parser.parse_known_args(arguments)
        if options.list:
            say("\n".join(families()))
        prefix = "VC-Attention (dry run; no kernels are released yet, so nothing would be fetched)"
        say(f"{prefix if options.dry_run else 'VC-Attention'}: {' | '.join(report())}")
    except SystemExit:
        pass  # argparse ends the program after --help or a misused option
    except Exception as error:
        say(
            f"VC-Attention: this machine could not be examined ({type(error).__name__}: {error}); the pack loads all "
            "the same, and its node says what runs."
        )
    return 0


def say(text: str) -> None:
    """Print, whatever characters the console lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


if __name__ == "__main__":
    sys.exit(main())
