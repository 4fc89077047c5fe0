"""Why a path can or cannot run, as values: a refusal is data that the node, the logs and `doctor` all show alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ok:
    """The request can run. `backend` is the name of the path that will run it; `note` says why better ones do not."""

    backend: str
    note: str = ""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Reason:
    """The request cannot run.

    `code` is a stable identifier (counted, and linked to the help page); `text` is a sentence for a creator:
    what happened, what runs instead, what to do.
    """

    code: str
    text: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.text


class UnsupportedError(RuntimeError):
    """Raised by `kernels.attention` when no backend can serve the call; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason
