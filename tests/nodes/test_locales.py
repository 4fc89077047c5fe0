"""The translations of `locales/`: complete, well-formed for ComfyUI's frontend, and about the same things as English.

A text that a language lacks is shown in English, so a node that no language has is listed in a warning only; one that
some language has, and those of `TRANSLATED`, have to be complete in all.
"""

from __future__ import annotations

import json
import re
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCALES = ROOT / "locales"
LANGUAGES = ("de", "es", "fr", "ja", "ko", "zh", "zh-TW")
FILES = ("nodeDefs.json", "main.json", "commands.json", "settings.json")
#: Nodes that are never without a translation.
TRANSLATED = (
    "VCAttentionPatch",
    "VCAttentionQuality",
    "VCAttentionQualityReport",
    "VCAttentionCapture",
    "VCAttentionCompare",
    "VCAttentionBenchmark",
)
#: Letters that a text of this language cannot do without, and letters that do not belong into it.
LETTERS = {
    "ja": ("[\u3040-\u30ff]", "[\uac00-\ud7af]"),
    "ko": ("[\uac00-\ud7af]", "[\u3040-\u30ff]"),
    # characters that only traditional (then: only simplified) writing has, of those that such texts are full of
    "zh": (
        "[\u4e00-\u9fff]",
        "[\u500b\u5011\u9019\u4f86\u6642\u5c0d\u8aaa\u6a94\u9ede\u8a18\u61b6\u9ad4\u8f38\u9806]",
    ),
    "zh-TW": (
        "[\u4e00-\u9fff]",
        "[\u4e2a\u4eec\u8fd9\u6765\u65f6\u5bf9\u8bf4\u6863\u70b9\u8bb0\u5fc6\u4f53\u8f93\u8282\u8f7d\u9879]",
    ),
}
LATIN = ("[A-Za-z]", "[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
#: What no translation may change: placeholders, what is quoted, lists of blocks, folders, names and measures.
FIXED = re.compile(
    r"\{\w+\}|(?<!\w)'[^']+'(?!\w)|\b\w+/\w+\b|\bsingle:\d+|\b\d+-\d+\b"
    r"|VC-Attention(?: (?:Patch|Quality(?: Report)?|Capture|Compare|Benchmark))?"
    r"|\b(?:ComfyUI|ExpCast|PSNR|SSIM|LPIPS|AlexNet|JSON|torch|Wan|HunyuanVideo|MiniMax-H3|Transformer|softmax|latent)\b"
)
#: Words of FIXED that some languages write in their own letters or with another ending.
OWN_WORDS = {
    "de": {"softmax", "latent", "Transformer"},
    "es": {"Transformer", "latent"},
    "fr": {"Transformer"},
    "ja": {"softmax"},
    "ko": {"softmax", "Transformer"},
}
CHOICES = re.compile(
    r"(?:^|[.] |: )(auto|4-bit|off|fast|faithful|first steps|all steps|all frames|lowest frame|fall back|stop|spec): "
)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), f"a key stands twice: {names}"
    return dict(pairs)


def load(language: str, file: str) -> dict[str, Any]:
    path = LOCALES / language / file
    if not path.is_file():
        return {}
    raw = path.read_bytes()
    assert not raw.startswith(b"\xef\xbb\xbf"), f"{path} begins with a byte order mark"
    return json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)


def texts(tree: dict[str, Any], place: str = "") -> dict[str, str]:
    """Every text of a locale file by its place, such as "VCAttentionPatch.inputs.model.tooltip"."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        where = f"{place}.{name}" if place else name
        if isinstance(value, dict):
            found |= texts(value, where)
        else:
            assert isinstance(value, str), f"{where} is not a text"
            found[where] = value
    return found


def everything(language: str) -> dict[str, str]:
    """The texts of all files of a language; nodes by their names, other files with the file's name before them."""
    found = texts(load(language, "nodeDefs.json"))
    for file in FILES[1:]:
        found |= texts(load(language, file), file)
    return found


def pairs(language: str) -> list[tuple[str, str, str]]:
    """(place, English, translation) of every text that this language has."""
    own = everything(language)
    return [(place, english, own[place]) for place, english in everything("en").items() if place in own]


def begun() -> set[str]:
    """Nodes that some language has, and files beside nodeDefs.json."""
    return {place.split(".")[0] for language in LANGUAGES for place in everything(language)} | set(TRANSLATED)


def is_name(place: str) -> bool:
    return place.endswith((".name", ".display_name"))


def own_letters(text: str) -> bool:
    """Whether a text has letters beside its placeholders, and so a language."""
    return any(map(str.isalpha, re.sub(r"\{\w+\}", "", text)))


def listed(entries: list[str]) -> str:
    return "\n  ".join(["", *entries])


def test_these_languages_are_there() -> None:
    assert sorted(path.name for path in LOCALES.iterdir()) == sorted(["en", *LANGUAGES])
    for language in ("en", *LANGUAGES):
        strangers = {path.name for path in (LOCALES / language).iterdir()} - set(FILES)
        assert not strangers, f"ComfyUI does not read {strangers}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_of_a_translated_node_is_missing(language: str) -> None:
    missing = [place for place in everything("en") if place not in everything(language)]
    ours = [place for place in missing if place.split(".")[0] in begun()]
    assert not ours, f"not in {language}:{listed(ours)}"
    if missing:
        warnings.warn(f"shown in English in {language}:{listed(missing)}", stacklevel=1)


def test_a_translated_node_exists() -> None:
    assert set(TRANSLATED) <= set(load("en", "nodeDefs.json"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_there_is_no_text_that_english_does_not_have(language: str) -> None:
    english = everything("en")
    nodes = {place.split(".")[0] for place in english}
    surplus = [place for place in everything(language) if place not in english]
    early = {place.split(".")[0] for place in surplus} - nodes
    if early:
        warnings.warn(f"{language} has nodes that English does not have (yet): {sorted(early)}", stacklevel=1)
    surplus = [place for place in surplus if place.split(".")[0] in nodes]
    assert not surplus, f"only in {language}:{listed(surplus)}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_names_of_nodes_and_widgets_stay(language: str) -> None:
    """The sentences on the nodes, the log and the help pages call widgets and nodes by these names."""
    changed = [place for place, english, own in pairs(language) if is_name(place) and own != english]
    assert not changed, listed(changed)


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_are_translated(language: str) -> None:
    same = [
        place
        for place, english, own in pairs(language)
        if english == own and " " in english and own_letters(english) and not is_name(place)
    ]
    assert not same, f"still English in {language}:{listed(same)}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_its_own_letters(language: str) -> None:
    needed, foreign = LETTERS.get(language, LATIN)
    for place, _, own in pairs(language):
        if not is_name(place) and own_letters(own):
            # a Japanese label of a few characters may do without kana, a sentence may not
            label = language == "ja" and len(own) <= 8 and re.search(LETTERS["zh"][0], own)
            assert label or re.search(needed, own), f"{place} in {language}: {own}"
            assert not re.search(foreign, own), f"{place} in {language}: {re.findall(foreign, own)}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_fixed_stays_and_numbers_agree(language: str) -> None:
    for place, english, own in pairs(language):
        kept = set(FIXED.findall(english)) - OWN_WORDS.get(language, set())
        lost = {word for word in kept if word not in own}
        assert not lost, f"{place} in {language} lacks {lost}"
        assert set(re.findall(r"\d+", english)) == set(re.findall(r"\d+", own)), f"{place} in {language}"
        choices = CHOICES.findall(english)
        named = [choice for choice in choices if re.search(rf"(?<![\w-]){re.escape(choice)}\s?[:\uff1a]", own)]
        assert named == choices, f"{place} in {language} explains {named} of {choices}"


@pytest.mark.parametrize("language", ("en", *LANGUAGES))
def test_texts_are_clean(language: str) -> None:
    for place, text in everything(language).items():
        assert text and text == text.strip() and "  " not in text, place
        assert unicodedata.normalize("NFC", text) == text, f"{place} is not composed (NFC)"
        strange = [f"U+{ord(c):04X}" for c in text if unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Cs")]
        assert not strange and "\ufffd" not in text, f"{place}: {strange}"
        if place.endswith((".tooltip", ".description")):
            assert text.endswith((".", "\u3002")), f"{place} in {language} does not end its sentence"


@pytest.mark.parametrize("language", ("en", *LANGUAGES))
def test_the_frontend_can_compile_every_text(language: str) -> None:
    """vue-i18n takes `{name}` for a value, `|` for plural forms and `@` for a link; a stray one breaks the text."""
    for place, text in everything(language).items():
        rest = re.sub(r"\{\w+\}", "", text)
        assert not set("{}@|") & set(rest), f"{place} in {language}: {text}"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (test_sentences_are_translated, None),
        (test_each_language_has_its_own_letters, "The step, from 1."),
        (test_what_is_fixed_stays_and_numbers_agree, "\u30b9\u30c6\u30c3\u30d7\u306e\u756a\u53f7\u3002"),
        (test_texts_are_clean, "\u30b9\u30c6\u30c3\u30d7 1"),
        (test_texts_are_clean, "\u30b9\u30c6\u30c3\u30d7\u200b 1\u3002"),
        (test_the_frontend_can_compile_every_text, "\u30b9\u30c6\u30c3\u30d7 {1\u3002"),
        (test_no_text_of_a_translated_node_is_missing, ""),
        (test_there_is_no_text_that_english_does_not_have, "surplus"),
    ],
)
def test_each_of_these_checks_can_fail(check: Any, text: str | None, tmp_path: Path, monkeypatch) -> None:
    """One text of the Japanese file is spoilt: None for the English one, "" for none at all."""
    files = {language: load(language, "nodeDefs.json") for language in ("en", "ja")}
    inputs = files["ja"]["VCAttentionCapture"]["inputs"]
    if text is None:
        inputs["step"]["tooltip"] = files["en"]["VCAttentionCapture"]["inputs"]["step"]["tooltip"]
    elif text == "surplus":
        inputs["steps"] = dict(inputs["step"])
    elif text:
        inputs["step"]["tooltip"] = text
    else:
        del inputs["step"]["tooltip"]
    for language, tree in files.items():
        (tmp_path / language).mkdir()
        (tmp_path / language / "nodeDefs.json").write_text(json.dumps(tree), encoding="utf-8")
    monkeypatch.setitem(globals(), "LOCALES", tmp_path)
    with pytest.raises(AssertionError):
        check("ja")
