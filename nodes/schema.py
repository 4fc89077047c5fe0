"""The one place that talks to ComfyUI's node API across its versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def known(factory: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call `factory` with those keywords that this version of ComfyUI knows.

    A keyword that an older core does not know would keep the whole pack from loading; without it the node only looks
    plainer there ("advanced" widgets show with the others).
    """
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return factory(*args, **keywords)
    return factory(*args, **{name: value for name, value in keywords.items() if name in parameters})
