"""What `install.py` does, by its options."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from .. import cards, detect
from ..families import FAMILIES
from . import store
from .console import say, size_text
from .lock import Lock
from .outcome import BROUGHT, FAILED, THERE, WOULD, Outcome, line
from .pins import Pins, Wheel, read_pins
from .places import Place, places_of
from .trouble import Trouble


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, read. Unknown words are passed over: whoever calls this may know of options to come."""
    parser = argparse.ArgumentParser(
        prog="install.py",
        description="Installs the VC-Attention kernels of this machine's cards. Ends with status 0, whatever happens.",
    )
    parser.add_argument(
        "--from",
        dest="given",
        metavar="PLACE",
        help="look here first: a folder or an address that holds the wheels, or a wheel; works without a network",
    )
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        choices=list(FAMILIES),
        help="install for these cards too, although none is seen here (as when an image is built)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=15.0, metavar="SECONDS", help="how long a server may be silent (15)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--list", action="store_true", help="list the families of cards and their kernels")
    parser.add_argument("--remove", action="store_true", help="remove the installed kernels")
    return parser.parse_known_args(arguments)[0]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def main(pack: Path, arguments: Sequence[str] | None = None) -> None:
    """Do it, and end with one line. pack: the folder of the pack."""
    chosen = options(arguments)
    prefix = "VC-Attention (dry run)" if chosen.dry_run else "VC-Attention"
    try:
        pins = read_pins(pack / "kernels")
        if chosen.list:
            say("\n".join(families(pack, pins)))
        elif chosen.remove:
            say(f"{prefix}: {remove(pack, chosen.dry_run)}")
        else:
            say(f"{prefix}: {install(pack, pins, chosen)}")
    except Trouble as trouble:
        say(f"{prefix}: {trouble.text} {trouble.advice}".rstrip())


def install(pack: Path, pins: Pins, chosen: argparse.Namespace) -> str:
    """Bring the kernels of the cards that are here; the sentences about it."""
    driver = detect.nvidia()
    found = detect.cards_here(driver)
    wheels = [pins.wheel_for(card.capability) for card in found if card.vendor == "nvidia"]
    missing = []
    for family in chosen.family:
        wheels.append(pins.of_family(family))
        if wheels[-1] is None:
            missing.append(f"There are no released kernels for {family} yet.")
    outcomes = {}
    for wheel in dict.fromkeys(wheels):
        if wheel is not None:
            outcomes[wheel.family] = bring(pack, pins, wheel, chosen)
    return " | ".join([line(found, outcomes, pins.archs, driver.cuda), *missing])


def bring(pack: Path, pins: Pins, wheel: Wheel, chosen: argparse.Namespace) -> Outcome:
    """Install one wheel unless it is here. What fails is part of the outcome, and the build before stays."""
    prebuilt = pack / "kernels" / "prebuilt"
    there = _there(prebuilt, pins, wheel)
    if there:
        if not chosen.dry_run:
            _tidy(prebuilt, wheel)
        return Outcome(THERE, there)
    places = places_of(pack, pins, wheel, chosen.given)
    if chosen.dry_run:
        return _would(places, wheel)
    troubles: list[Trouble] = []
    try:
        with Lock(prebuilt / ".lock", _waiting) as lock:
            there = _there(prebuilt, pins, wheel)
            if there:
                return Outcome(THERE, there)  # the other one brought it
            for place in places:
                if isinstance(place, Trouble):
                    troubles.append(place)
                    continue
                try:
                    data = place.get(wheel, store.part_of(prebuilt, wheel), chosen.timeout)
                except Trouble as trouble:
                    troubles.append(trouble)
                    continue
                store.put(prebuilt, wheel, pins.version, data)
                if lock.held:
                    store.tidy(prebuilt, wheel)
                return Outcome(BROUGHT, f"version {pins.version}, from {place}")
    except Trouble as trouble:
        troubles.append(trouble)
    if not places:
        troubles.append(Trouble("The pack names no place to get them from.", "Reinstall or update the pack."))
    before = store.installed(prebuilt, wheel.family)
    kept = before.version if before is not None and before.good else ""
    return Outcome(FAILED, kept=kept, troubles=tuple(troubles))


def _there(prebuilt: Path, pins: Pins, wheel: Wheel) -> str:
    """Which build of the pinned wheel is here already, in words; empty when none is."""
    build = store.installed(prebuilt, wheel.family)
    if build is not None and build.good and build.sha256 == wheel.sha256 and set(build.archs) >= set(wheel.archs):
        return f"version {build.version}"
    build = store.as_package(wheel.family)
    if build is not None and build.good and build.version == pins.version and set(build.archs) >= set(wheel.archs):
        return f"version {build.version}, as a Python package"
    return ""


def _tidy(prebuilt: Path, wheel: Wheel) -> None:
    """Remove what an install that was ended, or files that were held, left behind."""
    build = store.installed(prebuilt, wheel.family)
    if build is None or build.sha256 != wheel.sha256 or not store.leftovers(prebuilt, wheel):
        return
    with contextlib.suppress(Trouble), Lock(prebuilt / ".lock", _waiting) as lock:
        if lock.held:
            store.tidy(prebuilt, wheel)


def _waiting() -> None:
    say("VC-Attention: waiting for another install.py.")


def _would(places: Sequence[Place | Trouble], wheel: Wheel) -> Outcome:
    troubles = tuple(place for place in places if isinstance(place, Trouble))
    first = next((place for place in places if isinstance(place, Place)), None)
    if first is None:
        return Outcome(FAILED, troubles=troubles or (Trouble("The pack names no place to get them from."),))
    return Outcome(WOULD, f"{wheel.file}, {size_text(wheel.size)}, from {first}")


def remove(pack: Path, dry_run: bool) -> str:
    """Take the installed kernels away; the sentence about it."""
    prebuilt = pack / "kernels" / "prebuilt"
    here = [family for family in FAMILIES if (prebuilt / f"{family}.json").exists() or (prebuilt / family).exists()]
    if not here:
        return "no kernels are installed in the pack, so there is nothing to remove."
    back = f"{cards.OWN_ATTENTION} then; install.py brings them back."
    if dry_run:
        return f"the kernels for {' and '.join(here)} would be removed. {back}"
    with Lock(prebuilt / ".lock", _waiting):
        removed, left = store.remove(prebuilt)
    text = f"the kernels for {' and '.join(removed or here)} are removed. Restart ComfyUI; {back}"
    if left:
        text += f" Some files stay until ComfyUI is closed and install.py --remove runs again: {left[0]}."
    return text


def families(pack: Path, pins: Pins) -> list[str]:
    """One line for each family of cards: its kernels, and whether they are released and here."""
    here = {build.family: build for build in reversed(store.everything(pack / "kernels" / "prebuilt"))}
    rows = []
    for family in cards.FAMILIES:
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in family.capabilities)
        if not family.modes:
            state = "no kernels: it " + family.why_not
        else:
            released = pins.of_family(family.key) is not None
            state = f"{family.modes} kernels {'released' if released else 'planned, not released yet'}"
            if family.key in here:
                state += f", {here[family.key].state}"
        rows.append((f"{family.title}, compute capability {capabilities}", state))
    width = max(len(title) for title, _ in rows)
    return [f"{title:<{width}}  {state}" for title, state in rows]
