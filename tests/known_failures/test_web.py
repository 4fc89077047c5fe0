"""Another pack's web hook once scrambled every node's widgets. This pack ships no script: there is nothing to hook."""

from __future__ import annotations

from pathlib import Path

WEB = Path(__file__).resolve().parents[2] / "web"


def test_no_script_runs_in_the_browser():
    """The first script must come with a test that a foreign node definition is deep-equal before and after it."""
    assert (WEB / "docs" / "VCAttentionPatch.md").is_file()
    assert [file.name for file in WEB.rglob("*") if file.suffix in (".js", ".mjs", ".ts", ".html")] == []
