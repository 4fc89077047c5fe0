"""What became of the kernels of each family of cards, and the one line that says it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .. import cards, detect, families
from .trouble import Trouble

#: How a family's kernels stand after an install: brought now; there before; to be brought (a dry run); not brought.
BROUGHT, THERE, WOULD, FAILED = "brought", "there", "would", "failed"


@dataclass(frozen=True)
class Outcome:
    """state: one of the four above. where: what the kernels come from, in words. kept: version of the build that stays
    in use although this one could not be brought, empty when there is none. troubles: why, one for each place tried.
    """

    state: str
    where: str = ""
    kept: str = ""
    troubles: tuple[Trouble, ...] = ()


def line(
    found: Collection[detect.Card],
    outcomes: Mapping[str, Outcome],
    available: Collection[str],
    cuda: tuple[int, int] | None = None,
) -> str:
    """One sentence or two for each kind of card: its name, what runs on it, and why or what to do.

    found: the cards. outcomes: by family. available: architectures whose kernels are released. cuda: newest CUDA that
    the driver serves, None without a driver.
    """
    sentences = [_card(card, outcomes, available, cuda) for card in found]
    asked = [key for key in outcomes if not any(_family(card, available) == key for card in found)]
    sentences += [f"T{_kernels(key)[1:]} {_result(outcomes[key])}" for key in asked]
    return " | ".join(dict.fromkeys(sentences))


def _card(
    card: detect.Card, outcomes: Mapping[str, Outcome], available: Collection[str], cuda: tuple[int, int] | None
) -> str:
    outcome = outcomes.get(_family(card, available))
    if outcome is None:
        return cards.describe(card.name, card.capability, card.vendor, available).text
    text = f"{cards.title(card.name, card.capability)}: {_kernels(_family(card, available))} {_result(outcome)}"
    if cuda is not None and cuda < detect.OLDEST_CUDA:
        text += (
            f" The NVIDIA driver serves CUDA {_dotted(cuda)}, and the kernels are made for "
            f"{_dotted(detect.OLDEST_CUDA)} or newer: update the driver."
        )
    return text


def _family(card: detect.Card, available: Collection[str]) -> str:
    """The family whose released kernels are for a card; empty when there is none."""
    arch = families.arch_of(card.capability) if card.capability and card.vendor == "nvidia" else None
    return families.family_of(arch) if arch in available and arch else ""


def _kernels(key: str) -> str:
    family = next(family for family in cards.FAMILIES if family.key == key)
    return f"the {family.modes} kernels for {family.title}"


def _result(outcome: Outcome) -> str:
    if outcome.state == BROUGHT:
        return f"are installed now ({outcome.where}). Restart ComfyUI to use them."
    if outcome.state == THERE:
        return f"are installed ({outcome.where}); there is nothing to do."
    if outcome.state == WOULD:
        return f"would be installed ({outcome.where})."
    why = " ".join(dict.fromkeys(trouble.text for trouble in outcome.troubles))
    advice = list(dict.fromkeys(trouble.advice for trouble in outcome.troubles if trouble.advice))[-1:]
    if outcome.kept:
        result = f"could not be brought up to date. {why} Version {outcome.kept}, installed before, stays in use."
    else:
        result = f"could not be installed. {why} Until then {cards.OWN_ATTENTION}."
    return " ".join([result, *advice])


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
