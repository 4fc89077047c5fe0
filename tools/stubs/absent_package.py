"""Names that can be imported but not used, for packages that ComfyUI imports and headless video sampling never calls.

ComfyUI imports torchvision and torchaudio when it starts. Their wheels must match torch to the build, so on many
machines they are missing or do not import. The stand-ins beside this file let ComfyUI start there; whatever really
needs one of them fails at that point with a sentence that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _message(module: str, name: str) -> str:
    return (
        f"{module}.{name} was called, but the real {module.partition('.')[0]} is not installed here (or does not "
        "match torch); VC-Attention's tools put an import-only stand-in in its place. Install the real package."
    )


def functions_of(module: str) -> Callable[[str], Any]:
    """A module `__getattr__` under which every name is a function that raises NotImplementedError when called."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(_message(module, name))

        absent.__name__ = name
        return absent

    return lookup


def classes_of(module: str, base: Callable[[], type] = lambda: object) -> Callable[[str], Any]:
    """A module `__getattr__` under which every name is a class: it can be built and subclassed, calling it raises."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        parent = base()

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            parent.__init__(self)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(_message(module, name))

        return type(name, (parent,), {"__init__": init, "__call__": call, "__module__": module})

    return lookup
