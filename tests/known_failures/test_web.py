"""Another pack's web hook once scrambled every node's widgets. Ours looks at its own node and leaves all others alone.

That a foreign node is deep-equal before and after is checked in the real editor, by tests/web/test_page.py; what can
be read from the scripts alone is checked here, on any machine.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parents[2] / "web"
SCRIPTS = sorted(file for file in WEB.rglob("*") if file.suffix in (".js", ".mjs", ".ts"))
#: Hooks of the frontend that see every node type, and ways to change what all nodes share.
WIDE = re.compile(
    r"beforeRegisterNodeDef|beforeRegisterVueAppNodeDefs|addCustomNodeDefs|getCustomWidgets|\.prototype\b"
)


def test_there_is_one_extension():
    extensions = [file.name for file in SCRIPTS if "registerExtension" in file.read_text(encoding="utf-8")]
    assert extensions == ["vc_attention.js"]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda path: path.name)
def test_no_script_has_a_hook_into_all_nodes(file):
    text = file.read_text(encoding="utf-8")
    assert WIDE.findall(text) == []
    hooks = re.findall(r"^    (?:async )?(\w+)\(.*\) \{$", text.partition("registerExtension(")[2], re.M)
    assert hooks == (["setup", "nodeCreated"] if file.name == "vc_attention.js" else [])


def test_the_one_hook_does_nothing_for_a_foreign_node():
    text = (WEB / "vc_attention.js").read_text(encoding="utf-8")
    body = text.partition("    nodeCreated(node) {\n")[2].partition("\n    },")[0]
    assert body.strip() == "if (node.comfyClass === OURS && node.addDOMWidget) addTimeline(node);"
