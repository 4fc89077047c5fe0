"""What the real ComfyUI hands to its frontend: the texts of every language, and help pages where the panel asks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfy
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def translations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The answer of ComfyUI's own loader for a `custom_nodes` folder that holds this pack alone."""
    import folder_paths

    # ComfyUI's package `utils` must win over a module of that name that another test's folder brought.
    monkeypatch.syspath_prepend(str(Path(folder_paths.__file__).parent))
    if not hasattr(sys.modules.get("utils"), "__path__"):
        monkeypatch.delitem(sys.modules, "utils", raising=False)
    from app.custom_node_manager import CustomNodeManager

    pack = tmp_path / "ComfyUI-VC-Attention"
    pack.mkdir()
    shutil.copytree(ROOT / "locales", pack / "locales")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(tmp_path)], set()))
    return CustomNodeManager().build_translations.__wrapped__(CustomNodeManager())


def test_every_language_arrives_with_every_node(translations: dict) -> None:
    languages = {path.name for path in (ROOT / "locales").iterdir()}
    assert set(translations) == languages >= {"en", "zh", "ja", "ko", "de", "fr", "es"}
    for language, texts in translations.items():
        tooltip = texts["nodeDefs"]["VCAttentionPatch"]["inputs"]["precision"]["tooltip"]
        assert "4-bit" in tooltip and (language == "en") == tooltip.startswith("Number format")


def test_pages_of_a_language_lie_where_the_frontend_asks_first() -> None:
    """It fetches docs/<node>/<language>.md, then docs/<node>.md, below the pack's web directory."""
    folder = ROOT / "web" / "docs"
    pages = sorted(folder.glob("*/*.md"))
    assert folder / "VCAttentionPatch" / "zh.md" in pages
    languages = {path.name for path in (ROOT / "locales").iterdir()}
    for page in pages:
        assert page.stem in languages and (folder / f"{page.parent.name}.md").is_file()
