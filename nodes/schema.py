"""The one place that talks to ComfyUI's node API across its versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from comfy_api.latest import io

from .texts import NODES

CATEGORY = "advanced/attention"

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


def node_schema(node: str, **keywords: Any) -> Any:
    """The schema of the node with this id; names and descriptions are those of `texts.NODES`."""
    texts = NODES[node]
    return known(
        io.Schema,
        node_id=node,
        display_name=texts.display_name,
        category=CATEGORY,
        description=texts.description,
        hidden=[io.Hidden.unique_id],
        not_idempotent=True,  # as in VC-Attention Patch: the output knows its node
        **keywords,
    )


def node_input(kind: Any, node: str, name: str, **keywords: Any) -> Any:
    """An input or widget of the node; kind: a type of `comfy_api.latest.io`."""
    return known(kind.Input, name, tooltip=NODES[node].inputs[name], **keywords)


def node_output(kind: Any, node: str, name: str) -> Any:
    """An output of the node."""
    return known(kind.Output, display_name=name, tooltip=NODES[node].outputs[name])


def unique_id(cls: Any) -> str | None:
    """The id, in the workflow, of the node that is being executed."""
    unique = getattr(cls.hidden, "unique_id", None)
    return None if unique is None else str(unique)
