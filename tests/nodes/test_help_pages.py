"""The help pages in every language: complete, the same facts in the same places, and anchors that resolve."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from vc_attention.kernels import cards
from vc_attention.nodes.families import FAMILIES, HUNYUAN_VIDEO_15
from vc_attention.nodes.messages import REASONS, SHORT
from vc_attention.nodes.texts import NODES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "web" / "docs"
WIDGETS = [name for name in NODES["VCAttentionWanVideoWrapper"].inputs if name != "model"]
NODE_IDS = sorted(("VCAttentionPatch", *NODES))
#: Languages with a page for every node; in others, ComfyUI shows the English one.
LANGUAGES = ("de", "es", "fr", "ja", "ko", "zh", "zh-TW")
PAGES = ("", *LANGUAGES)


def page_of(node: str, language: str = "") -> str:
    """A help page. language: empty for English."""
    path = DOCS / node / f"{language}.md" if language else DOCS / f"{node}.md"
    return path.read_text(encoding="utf-8")


def patch_page(language: str = "") -> str:
    return page_of("VCAttentionPatch", language)


def section(page: str, number: int) -> str:
    """The text below the given second-level heading, from 1: translated pages have the same sections in order."""
    return re.split(r"^## .*$", page, flags=re.MULTILINE)[number]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row of a text, without the heads."""
    lines = text.splitlines()
    found = [
        line for line, before in zip(lines[1:], lines, strict=False) if line.startswith("|") and before.startswith("|")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found if not set(line) <= set("|- ")]


def sections() -> dict[str, int]:
    titles = re.findall(r"^## (.*)$", patch_page(), re.MULTILINE)
    return {title: number for number, title in enumerate(titles, 1)}


def numbers(text: str, language: str = "") -> list[str]:
    """Every different number of a text, sorted: German, French and Spanish write 16,0 and 75.600 or 75 600."""
    if language in ("de", "fr", "es"):
        text = re.sub(r"(?<=\d)[. ](?=\d{3}(?!\d))", "", text)
        text = re.sub(r"(?<=\d),(?=\d)", ".", text)
    else:
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return sorted(set(re.findall(r"\d+(?:\.\d+)?", text)))


def reason_words(language: str) -> dict[str, str]:
    """The timeline's words for each reason."""
    texts = json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))
    return texts["vcAttention"]["reasons"]


def kernel_codes() -> set[str]:
    """The codes of every Reason and Verdict that `kernels` makes."""
    found = set()
    for file in sorted((ROOT / "kernels").rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(call, "func", None)
            if isinstance(call, ast.Call) and getattr(name, "id", getattr(name, "attr", "")) in ("Reason", "Verdict"):
                first = call.args[0] if call.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value)
    return found - {"ok"}


@pytest.mark.parametrize("language", PAGES)
def test_every_reason_has_its_row_in_the_help_page(language):
    """A row that begins with the code alone is its anchor: the timeline on the node links to it.

    The node's text is English; the timeline's words are those of the language.
    """
    declined = rows(section(patch_page(language), sections()["Why was a call declined?"]))
    assert len(declined) == len(REASONS)
    assert {row[0].strip("`"): len(row) for row in declined} == dict.fromkeys(REASONS, 3)
    assert set(SHORT) == set(REASONS)
    for code, words, meaning in declined:
        code = code.strip("`")
        assert words == (f"{SHORT[code]} ({reason_words(language)[code]})" if language else SHORT[code]) and meaning


@pytest.mark.parametrize("language", PAGES)
def test_every_reason_of_the_kernels_has_a_row(language):
    absent = rows(section(patch_page(language), sections()["Why does no kernel run here?"]))
    codes = [row[0].strip("`") for row in absent]
    assert len(codes) == len(set(codes)) and all(len(row) == 3 and all(row) for row in absent)
    assert not set(codes) & set(REASONS), "a code has one row, so that a link to it is clear"
    assert set(codes) == kernel_codes() - set(REASONS)


def test_kernel_codes_are_found():
    assert {"self_test", "kernels_damaged", "card_unknown", "compile_failed", "no_kernel"} <= kernel_codes()


@pytest.mark.parametrize("language", PAGES)
def test_help_page_has_every_widget_card_and_model(language):
    page = patch_page(language)
    widgets = " ".join(row[0] for row in rows(section(page, sections()["Widgets"])))
    assert re.findall(r"`(\w+)`", widgets) == WIDGETS
    named = " ".join(row[0] for row in rows(section(page, sections()["Which cards"])))
    for family in cards.FAMILIES:
        nicknames = re.findall(r"[A-Z][\w ]*\d\w*|Jetson Thor", family.title)
        assert any(name in named for name in nicknames), f"{family.title} is not in the table of cards"
        assert not family.modes or nicknames[0] in named
    models = " ".join(row[0] for row in rows(section(page, sections()["Which models"])))
    assert [name for name in (*FAMILIES.values(), HUNYUAN_VIDEO_15) if name not in models] == []


@pytest.mark.parametrize("language", PAGES)
def test_seconds_on_the_help_page_are_the_measured_ones(language):
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = results.partition("## Wan2.2 14B in ComfyUI on NVIDIA H200")[2].partition("\n## ")[0]
    measured = {row[0]: (float(row[1]), float(row[4])) for row in rows(table) if re.fullmatch(r"[\d.]+", row[1])}
    names = ("ComfyUI, its default", "ComfyUI, its backend", "FlashAttention-4", "Patch, fast", "faithful", "left out")
    expected = [next(pair for name, pair in measured.items() if part in name) for part in names]
    shown = rows(section(patch_page(language), sections()["How fast, how close"]))
    assert [tuple(float(cell.replace(",", ".")) for cell in row[1:]) for row in shown] == [
        tuple(round(n, 2) for n in pair) for pair in expected
    ]
    default, int8, *_ = expected
    fast = expected[3]
    for ratio in (f"{default[1] / fast[1]:.1f}", f"{int8[1] / fast[1]:.2f}", f"{default[0] / fast[0]:.2f}"):
        assert ratio in numbers(section(patch_page(language), sections()["How fast, how close"]), language)


@pytest.mark.parametrize("language", PAGES)
def test_help_page_keeps_to_the_markdown_that_both_readers_know(language):
    """ComfyUI's panel and our own page (web/help.html) show it; the latter knows no links, pictures, HTML, fences."""
    page = patch_page(language)
    assert not re.search(r"\]\(|<\w|^```|^\d+\. |^ +- ", page, re.MULTILINE)
    assert len(re.findall(r"^## ", page, re.MULTILINE)) == len(sections())
    for part in re.split(r"\n{2,}", page.strip()):
        lines = part.splitlines()
        assert not lines[0].startswith("#") or len(lines) == 1, f"no empty line below {lines[0]}"
        if lines[0].startswith("|"):
            assert {line.strip("|").count("|") for line in lines} == {lines[0].strip("|").count("|")}, lines[0]
        else:
            assert not any(line.startswith(("|", "#")) for line in lines[1:]), lines[0]


def outline(page: str) -> list[str]:
    """The page's parts in order: headings by level, tables and lists by their number of rows, paragraphs, code."""
    found = []
    for part in re.split(r"\n{2,}", page.strip()):
        lines = part.splitlines()
        if heading := re.match(r"#+ ", part):
            found.append(heading[0].strip())
        elif lines[0].startswith("|"):
            found.append(f"table {len(lines)} x {lines[0].count('|')}")
        elif lines[0].startswith("- "):
            found.append(f"list {len(re.findall(r'^- ', part, re.MULTILINE))}")
        else:
            found.append("code" if lines[0].startswith("```") else "text")
    return found


def test_every_node_has_a_page_in_every_language():
    for node in NODE_IDS:
        assert (DOCS / f"{node}.md").is_file(), node
        there = sorted(path.stem for path in (DOCS / node).glob("*.md"))
        assert [language for language in LANGUAGES if language not in there] == [], node
    assert sorted(path.name for path in DOCS.iterdir() if path.is_dir()) == NODE_IDS
    assert {path.stem for path in DOCS.glob("*.md")} == set(NODE_IDS)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", NODE_IDS)
class TestTranslated:
    """Each page beside the English one."""

    def test_it_has_the_same_parts_in_the_same_order(self, node, language):
        assert outline(page_of(node, language)) == outline(page_of(node))

    def test_the_title_is_the_nodes_name(self, node, language):
        assert page_of(node, language).splitlines()[0] == page_of(node).splitlines()[0]

    def test_each_row_has_the_same_numbers_and_code(self, node, language):
        """Row by row: what stands in code, in order of the alphabet, and every number outside of it."""
        english, own = rows(page_of(node)), rows(page_of(node, language))
        assert len(own) == len(english) > 0
        for before, after in zip(english, own, strict=True):
            assert len(after) == len(before)
            assert numbers(" ".join(after), language) == numbers(" ".join(before)), f"{before[0]} differs in {language}"
            assert sorted(set(CODE.findall(" ".join(after)))) == sorted(set(CODE.findall(" ".join(before)))), before[0]
            for a, b in zip(before, after, strict=True):
                assert bool(a) == bool(b), before[0]

    def test_each_point_of_a_list_has_the_same_code_and_quotes(self, node, language):
        """A quote is what the node says, which is English everywhere."""
        english, own = points(page_of(node)), points(page_of(node, language))
        assert len(own) == len(english)
        for before, after in zip(english, own, strict=True):
            assert sorted(set(CODE.findall(after))) == sorted(set(CODE.findall(before))), before
            assert re.findall(r'\*\*"(.+?)"', after) == re.findall(r'\*\*"(.+?)"', before), before

    def test_the_code_of_its_text_is_the_same(self, node, language):
        assert set(CODE.findall(unfenced(page_of(node, language)))) == set(CODE.findall(unfenced(page_of(node))))

    def test_it_is_in_its_language(self, node, language):
        """No English is left outside of code, quotes and names in italics, and there is something of the language."""
        page = page_of(node, language)
        cells = [cell for row in rows(page) for cell in row if not cell.startswith(tuple(SHORT.values()))]
        for part in [*points(page), *paragraphs(page), *cells]:
            own = re.sub(r'"[^"]+"|`[^`]+`|\*[^*]+\*', "", part)
            assert not re.search(ENGLISH, own), part
            assert len(own) < 80 or re.search(LETTERS.get(language, "[a-z]"), own), part


#: Words that no other language of the pages has.
ENGLISH = r"\b(the|and|which|with|from|this|where|what|not|is|are|of)\b"
#: Letters that a text of the language cannot do without.
LETTERS = {
    "ja": "[\u3040-\u30ff]",
    "ko": "[\uac00-\ud7af]",
    "zh": "[\u4e00-\u9fff]",
    "zh-TW": "[\u4e00-\u9fff]",
}
#: Characters of one Chinese writing that the other does not have, among those that such texts are full of.
SIMPLIFIED = "[\u4e2a\u8fd9\u6765\u65f6\u5bf9\u8bf4\u6863\u70b9\u8bb0\u5fc6\u4f53\u8f93\u8282\u8f7d\u9879\u4e0e]"
TRADITIONAL = "[\u500b\u9019\u4f86\u6642\u5c0d\u8aaa\u6a94\u9ede\u8a18\u61b6\u9ad4\u8f38\u7bc0\u8f09\u9805\u8207]"
CODE = re.compile(r"`([^`]+)`")


def unfenced(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def points(page: str) -> list[str]:
    """The points of the page's lists, each on one line."""
    found = []
    for part in re.split(r"\n{2,}", page.strip()):
        if part.startswith("- "):
            found += [re.sub(r"\s+", " ", point) for point in re.split(r"^- ", part, flags=re.MULTILINE) if point]
    return found


def paragraphs(page: str) -> list[str]:
    """The page's paragraphs."""
    return [part for part in re.split(r"\n{2,}", page.strip()) if not re.match(r"#|\||- |```", part)]


@pytest.mark.parametrize("node", NODE_IDS)
def test_each_chinese_page_keeps_to_its_writing(node):
    assert re.search(SIMPLIFIED, page_of(node, "zh")) and not re.search(TRADITIONAL, page_of(node, "zh"))
    assert re.search(TRADITIONAL, page_of(node, "zh-TW")) and not re.search(SIMPLIFIED, page_of(node, "zh-TW"))


def test_numbers_of_several_languages_are_the_same():
    assert numbers("16.0 s, 75,600 tokens, 0.26 %, 1e-5") == ["0.26", "1", "16.0", "5", "75600"]
    assert numbers("16,0 s, 75.600 Tokens, 0,26 %, 1e-5", "de") == numbers("16.0 s, 75,600 tokens, 0.26 %, 1e-5")
    assert numbers("75 600", "fr") == ["75600"] and numbers("0.33.0, Wan2.2", "de") == ["0", "0.33", "2.2"]
