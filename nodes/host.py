"""The few things that are asked of ComfyUI itself. Each has a plain answer where ComfyUI is absent or older."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .messages import compiling

log = logging.getLogger("vc_attention")

#: Names of ComfyUI's wrapper and callback slots (`comfy.patcher_extension`), stable since they were introduced.
APPLY_MODEL = "apply_model"
ON_PRE_RUN = "on_pre_run"
ON_CLEANUP = "on_cleanup"
ON_DETACH = "on_detach_after"

#: Keys in `transformer_options`.
OVERRIDE = "optimized_attention_override"
RECORD = "vc_attention"
WATCHERS = "vc_attention_watchers"


def free_memory(device: torch.device) -> int | None:
    """Free memory on `device` in bytes as ComfyUI counts it, or None where it cannot say."""
    management = sys.modules.get("comfy.model_management")
    if management is None:
        return None
    try:
        return int(management.get_free_memory(device))
    except (AttributeError, RuntimeError, KeyError, TypeError):
        return None


def make_room(needed: int, device: torch.device) -> int | None:
    """Ask ComfyUI to unload models until `needed` bytes are free on `device`; returns what is free then, as
    `free_memory` does."""
    free = free_memory(device)
    management = sys.modules.get("comfy.model_management")
    if free is None or free >= needed or management is None:
        return free
    management.free_memory(needed, device)
    return free_memory(device)


def compute_device() -> torch.device:
    """The device that ComfyUI computes on; the CPU outside of ComfyUI."""
    management = sys.modules.get("comfy.model_management")
    return torch.device("cpu") if management is None else torch.device(management.get_torch_device())


def is_interrupt(error: BaseException) -> bool:
    """Whether this is ComfyUI's Cancel, which must always pass through."""
    kind = getattr(sys.modules.get("comfy.model_management"), "InterruptProcessingException", None)
    return isinstance(kind, type) and isinstance(error, kind)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is torch's out-of-memory error."""
    return isinstance(error, torch.OutOfMemoryError)


def outside_malloc_graph() -> contextlib.AbstractContextManager[Any]:
    """A context for tensors that outlive the block they are made in.

    From 0.38, ComfyUI records each block's allocations and expects them back at the block's end; what is kept longer
    is made while that recording is paused. A plain context where there is no such recording.
    """
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", None)
    return contextlib.nullcontext() if pause is None else pause()


def custom_node_folders() -> list[Path]:
    """The folders of custom nodes that ComfyUI loads at this start. Empty outside ComfyUI."""
    paths = sys.modules.get("folder_paths")
    chosen = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    only = getattr(chosen, "whitelist_custom_nodes", ()) if getattr(chosen, "disable_all_custom_nodes", False) else None
    try:
        parents = [] if paths is None else [Path(parent) for parent in paths.get_folder_paths("custom_nodes")]
        folders = [folder for parent in parents if parent.is_dir() for folder in sorted(parent.iterdir())]
    except (AttributeError, KeyError, OSError):
        return []
    folders = [folder for folder in folders if folder.is_dir() and folder.suffix != ".disabled"]
    return [folder for folder in folders if only is None or folder.name in only]


def default_attention() -> Callable[..., Any]:
    """ComfyUI's own attention function of this moment."""
    from comfy.ldm.modules.attention import optimized_attention

    return optimized_attention


def prompt_id() -> str | None:
    """The prompt that is being executed, or None outside of one."""
    ask = getattr(sys.modules.get("comfy_execution.utils"), "get_executing_context", None)
    context = None if ask is None else ask()
    return None if context is None else context.prompt_id


def output_folder() -> Path:
    """ComfyUI's output folder. It may not exist yet."""
    import folder_paths

    return Path(folder_paths.get_output_directory())


def numbered_file(prefix: str) -> tuple[Path, str, int]:
    """(folder, name, number) for the next file of `prefix` in the output folder, by ComfyUI's own rules.

    Makes the folder. Raises what ComfyUI raises: a prefix that leaves the output folder, a folder that is not allowed.
    """
    import folder_paths

    folder, name, number, _, _ = folder_paths.get_save_image_path(prefix, str(output_folder()))
    return Path(folder), name, number


@functools.cache
def pack_version() -> str:
    """The pack's version, as pyproject.toml states it."""
    try:
        text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r'^version = "([^"]+)"', text, re.M)
    return found[1] if found else "unknown"


def user_folder() -> Path | None:
    """The pack's own folder inside ComfyUI's user folder; None outside ComfyUI. Nothing is made here."""
    paths = sys.modules.get("folder_paths")
    try:
        return None if paths is None else Path(paths.get_user_directory()) / "vc_attention"
    except (AttributeError, TypeError):
        return None


def stop_if_cancelled() -> None:
    """Raise ComfyUI's own exception if Cancel was pressed."""
    interrupt = getattr(sys.modules.get("comfy.model_management"), "throw_exception_if_processing_interrupted", None)
    if interrupt is not None:
        interrupt()


def progress_bar(total: int) -> Callable[[int], None]:
    """The bar on the node that is being executed: called with how many of `total` are done."""
    kind = getattr(sys.modules.get("comfy.utils"), "ProgressBar", None)
    if kind is None:
        return lambda done: None
    bar = kind(total)
    return lambda done: bar.update_absolute(done, total)


def progress(node_id: str | None) -> Callable[[int, int, str], None]:
    """Shows how far the compiling of kernels is, on the node and its bar, and lets Cancel through.

    Called as (kernels done, kernels altogether, what is at work), several times a second.
    """
    bar: Callable[[int], None] | None = None
    shown = ""

    def report(done: int, total: int, name: str) -> None:
        nonlocal bar, shown
        stop_if_cancelled()
        text = compiling(done, total, name)
        if text == shown:
            return
        if not shown:
            log.info("VC-Attention: %s", text)
        shown = text
        show_text(text, node_id)
        if bar is None and total:
            bar = progress_bar(total)
        if bar is not None:
            bar(done)

    return report


def _server() -> Any:
    """ComfyUI's server, or None outside of one."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def tell(event: str, data: dict[str, Any]) -> None:
    """Send `data` to the browser that queued the prompt. Does nothing where there is no server or no browser."""
    server = _server()
    client = getattr(server, "client_id", None)
    if client is None:
        return
    try:
        server.send_sync(event, data, client)
    except Exception as error:  # as in show_text
        log.debug("VC-Attention: the browser could not be told of the run: %s", error)


def show_text(text: str, node_id: str | None) -> None:
    """Show `text` on the node. Does nothing where there is no server, no node, or no browser."""
    server = _server()
    if server is None or node_id is None:
        return
    try:
        server.send_progress_text(text, node_id)
    except Exception as error:  # the text is a courtesy: no failure of it may end a run
        log.debug("VC-Attention: the node's text could not be shown: %s", error)
