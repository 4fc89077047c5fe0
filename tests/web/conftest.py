"""A real ComfyUI server with this pack and a tiny model in it, and its editor in a headless Chromium."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from browser_cases import SETTINGS
from editor import Editor
from javascript import browser_program, call_with_node, node_program
from vc_attention.tools import comfyui, tiny_models
from vc_attention.tools.server import Server

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "output" / "web"


@pytest.fixture(scope="session")
def site(request, tmp_path_factory):
    """The running server."""
    given = request.config.getoption("--comfyui")
    directory = Path(given or ROOT / ".cache" / f"comfyui-{comfyui.VERSION}")
    folder = tmp_path_factory.mktemp("site")
    models = folder / "models" / "diffusion_models"
    models.mkdir(parents=True)
    tiny_models.build("wan22_t2v", models)
    settings = folder / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(SETTINGS), encoding="utf-8")
    packs = (ROOT, ROOT / "tools" / "demo" / "vc_demo_nodes")
    with Server(directory, Path(sys.executable), user_dir=folder, custom_nodes=packs, device="cpu") as server:
        yield server


@pytest.fixture(scope="module")
def chromium():
    """The browser, for one file of tests.

    Playwright keeps an event loop in this thread, and `asyncio.run` of other tests must not find it.
    """
    program = browser_program()
    if program is None:
        pytest.skip("browser: no Chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="browser: Playwright is not installed")
    with api.sync_playwright() as playwright:
        # Without a sandbox: containers have none, and the pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_editor(chromium, site):
    """`open_editor(device_scale_factor=2)`: a new page with the editor.

    blocked: a part of the addresses to refuse. definitions: what the page gets in place of the server's /object_info.
    """

    def make(blocked: str = "", definitions: str = "", **options) -> Editor:
        page = chromium.new_page(**{"viewport": {"width": 1100, "height": 1000}, **options})
        if blocked:
            page.route(f"**{blocked}**", lambda route: route.abort())
        if definitions:
            answer = {"body": definitions, "content_type": "application/json"}
            page.route("**/object_info", lambda route: route.fulfill(**answer))
        return Editor(page, site.url).open()

    return make


@pytest.fixture(scope="module")
def one_editor(open_editor):
    return open_editor()


@pytest.fixture
def editor(one_editor):
    """The editor, shared by the tests: dark, with the canvas renderer. Nothing of ours may be in its console."""
    one_editor.messages.clear()
    yield one_editor
    one_editor.setting("Comfy.ColorPalette", "dark")
    one_editor.setting("Comfy.VueNodes.Enabled", False)
    assert one_editor.trouble() == []


@pytest.fixture(scope="module")
def javascript(request):
    """`javascript(module, code, data)`: the value of a function body of `m` and `data`."""
    program = node_program()
    if program is not None:
        return lambda module, code, data: call_with_node(program, module, code, data)
    page = request.getfixturevalue("chromium").new_page()
    page.goto(request.getfixturevalue("site").url + "/system_stats")
    base = "/extensions/ComfyUI-VC-Attention/vc_attention/"
    return lambda module, code, data: page.evaluate(
        f"async data => {{ const m = await import('{base}{module}'); return ((m, data) => {{ {code} }})(m, data); }}",
        data,
    )


@pytest.fixture(scope="session")
def pictures():
    """Where screenshots go."""
    return PICTURES
