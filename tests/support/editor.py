"""ComfyUI's editor in a headless Chromium, as the browser tests use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

READY = "window.app?.extensionManager?.setting && window.app.graph && document.querySelector('canvas')"
#: Messages of the console that are about this pack: its files, its extension, its event.
OURS = ("vc_attention", "vc-attention", "vcattention")
LETTERS = {"group": "g", "reuse": "r", "plain": "p", "dense": "d"}

_CELLS = """id => {
    const element = __timeline(id);
    return element && [...element.querySelectorAll('.vca-row')].map(
        row => [...row.children].map(cell => [cell.dataset.phase, cell.dataset.state]));
}"""
_HELPERS = """
window.__node = id => window.app.graph.getNodeById(id);
window.__timeline = id => __node(id)?.widgets?.find(w => w.name === 'vc_attention_timeline')?.element;
"""


class Editor:
    """One page with ComfyUI's editor. messages: (type, text, address) of its console and of uncaught errors."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.messages: list[tuple[str, str, str]] = []
        page.on("console", lambda m: self.messages.append((m.type, m.text, (m.location or {}).get("url", ""))))
        page.on("pageerror", lambda e: self.messages.append(("pageerror", f"{e} {getattr(e, 'stack', '')}", "")))

    def open(self) -> Editor:
        """Load the editor."""
        self.page.goto(self.url)
        self.page.wait_for_function(READY, timeout=60_000)
        self.page.evaluate(_HELPERS)
        return self

    def run(self, code: str, argument: Any = None) -> Any:
        """Evaluate JavaScript in the page."""
        return self.page.evaluate(code, argument)

    def setting(self, name: str, value: Any) -> None:
        """Change one of the frontend's settings."""
        self.run("([name, value]) => window.app.extensionManager.setting.set(name, value)", [name, value])

    def load(self, workflow: dict[str, Any]) -> None:
        """Open a workflow in the place of the current one, with VC-Attention Patch in view."""
        self.run("flow => app.loadGraphData(flow, true, true, app.extensionManager.workflow.activeWorkflow)", workflow)
        self.run("() => new Promise(done => setTimeout(done, 100))")
        self.show()

    def show(self, node: int = 2, scale: float = 1.0) -> None:
        """Move the canvas so that `node` is near the upper left corner."""
        self.run(
            """([id, scale]) => {
                const ds = app.canvas.ds, node = __node(id);
                if (!node) return;
                ds.scale = scale;
                ds.offset[0] = 120 / scale - node.pos[0];
                ds.offset[1] = 120 / scale - node.pos[1];
                app.canvas.setDirty(true, true);
                return new Promise(done => setTimeout(done, 350));
            }""",
            [node, scale],
        )

    def widget(self, node: int, name: str, value: Any) -> None:
        """Set a widget as the frontend does when someone changes it."""
        self.run(
            """([id, name, value]) => {
                const node = __node(id), widget = node.widgets.find(w => w.name === name);
                const old = widget.value;
                widget.value = value;
                widget.callback?.(value, app.canvas, node);
                node.onWidgetChanged?.(name, value, old, widget);
            }""",
            [node, name, value],
        )

    def cells(self, node: int = 2) -> list[list[list[str]]] | None:
        """[phase, state] of every cell of every row, or None where there is no timeline."""
        return self.run(_CELLS, node)

    def rows(self, node: int = 2) -> list[str]:
        """The phases of each row, one letter a cell: g, r, p, d."""
        return ["".join(LETTERS[phase] for phase, _ in row) for row in self.cells(node) or ()]

    def wait_rows(self, rows: list[str], node: int = 2, timeout: float = 5000) -> None:
        """Until the rows are these; the assertion shows what they are instead."""
        deadline = timeout
        while self.rows(node) != rows and deadline > 0:
            self.page.wait_for_timeout(50)
            deadline -= 50
        assert self.rows(node) == rows

    def text(self, part: str, node: int = 2) -> str:
        """The text of a part of the timeline, by its class."""
        return self.run("([id, part]) => __timeline(id).querySelector('.' + part)?.textContent ?? ''", [node, part])

    def wait_text(self, part: str, words: str, node: int = 2, timeout: float = 60_000) -> None:
        """Until a part of the timeline contains these words."""
        self.page.wait_for_function(
            "([id, part, words]) => __timeline(id)?.querySelector('.' + part)?.textContent.includes(words)",
            arg=[node, part, words],
            timeout=timeout,
            polling=50,
        )

    def trouble(self) -> list[tuple[str, str, str]]:
        """Warnings and errors that are about this pack."""
        return [
            message
            for message in self.messages
            if message[0] in ("error", "warning", "pageerror")
            and any(word in (message[1] + message[2]).lower() for word in OURS)
            and "api.comfy.org" not in message[1]  # the frontend asks the registry about every node, ours too
        ]

    def picture(self, file: Path, **more: Any) -> None:
        """Save a screenshot to look at."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(file), **more)
