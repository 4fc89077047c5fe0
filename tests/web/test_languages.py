"""The timeline in the language that ComfyUI's frontend is set to, with the words of locales/*/main.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser_cases import PATCH, VALUES, tiny_run
from editor import Editor
from vc_attention.nodes.messages import SHORT

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(180), pytest.mark.xdist_group("browser")]
LOCALES = Path(__file__).resolve().parents[2] / "locales"
LANGUAGES = sorted(path.name for path in LOCALES.iterdir())


def words(language: str) -> dict:
    return json.loads((LOCALES / language / "main.json").read_text(encoding="utf-8"))["vcAttention"]


@pytest.fixture
def speaking(editor):
    """`speaking("de")`: the editor in that language; English again afterwards."""

    def choose(language: str):
        editor.setting("Comfy.Locale", language)
        editor.run("() => new Promise(done => setTimeout(done, 500))")  # the frontend loads the workflow again
        return editor

    yield choose
    choose("en")


@pytest.mark.parametrize("language", ["zh", "fr"])
def test_a_run_in_another_language(speaking, language, pictures):
    """Before, during and after a run: everything that the browser says; sentences of the server stay as they came."""
    own, editor = words(language), speaking(language)
    flow = tiny_run(8, 96)
    editor.load(flow.json())
    editor.wait_rows(["grpppppp"])
    steps = own["steps"]["other"].format(count=8)
    assert editor.text("vca-state") == own["head"].format(steps=steps, state=own["states"]["expected"])
    assert editor.run("__timeline(2).getAttribute('aria-label')") == own["label"]
    first = own["step"].format(number=1, phase=own["phases"]["group"], does=own["does"]["group"])
    assert editor.run("__timeline(2).querySelector('.vca-cell').title") == first
    row = editor.run("__timeline(2).querySelector('.vca-row').getAttribute('aria-label')")
    assert (
        all(own["phases"][phase] in row for phase in ("group", "reuse", "plain")) and own["phases"]["dense"] not in row
    )
    editor.run("app.queuePrompt(0, 1)")
    editor.wait_text("vca-state", own["head"].format(steps=steps, state=own["states"]["done"]))
    declined = own["declined"]["other"].format(count=32, words=own["reasons"]["short"])
    assert editor.text("vca-declined") == declined
    href = editor.run("__timeline(2).querySelector('.vca-declined a').href")
    assert href.endswith(f"/help.html?locale={language}#short")
    editor.picture(pictures / f"language_{language}.png")
    editor.widget(PATCH, "reuse_steps", 1)
    editor.wait_text("vca-detail", own["notes"]["changed"], timeout=2000)


def test_the_language_can_change_while_the_node_is_there(speaking):
    editor = speaking("en")
    editor.load(tiny_run(4).json())
    editor.wait_text("vca-state", "4 steps, expected")
    for language in ("ja", "es", "en"):
        speaking(language)
        editor.wait_text("vca-state", words(language)["states"]["expected"], timeout=20_000)
    assert editor.text("vca-state") == "4 steps, expected"


@pytest.mark.parametrize("locale", ["de", "ar"])
def test_the_frontends_own_choice_counts(speaking, locale):
    """A frontend without German says English instead, and so do the node's own texts there; we have no Arabic."""
    editor = speaking(locale)
    editor.load(tiny_run(4).json())
    chosen = editor.run("app.extensionManager.setting.get('Comfy.Locale')")
    wanted = words("de" if chosen == "de" else "en")["states"]["expected"]
    editor.wait_text("vca-state", wanted, timeout=20_000)


def test_without_the_servers_words_it_is_english(chromium, site):
    """An older server, or one whose answer holds nothing of this pack."""
    page = chromium.new_page()
    try:
        page.route("**/i18n", lambda route: route.fulfill(body="{}", content_type="application/json"))
        editor = Editor(page, site.url).open()
        editor.setting("Comfy.Locale", "fr")
        editor.load(tiny_run(4).json())
        editor.wait_text("vca-state", "4 steps, expected", timeout=20_000)
        assert editor.trouble() == []
        editor.setting("Comfy.Locale", "en")
    finally:
        page.close()


def test_a_region_has_the_words_of_its_language(javascript):
    code = """
    m.setTranslations(data);
    return ["de-AT", "zh-TW", "zh-HK", "it", "en-GB", "not a locale"].map(locale => {
        m.setLanguage(locale);
        return m.text("states.running");
    });
    """
    served = {language: {"vcAttention": words(language)} for language in LANGUAGES}
    running = {language: words(language)["states"]["running"] for language in LANGUAGES}
    wanted = [running[language] for language in ("de", "zh-TW", "zh", "en", "en", "en")]
    assert javascript("texts.js", code, served) == wanted


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_help_page_of_a_reason_comes_in_that_language(chromium, site, language):
    """With the row of the reason marked, as the link from a declined call asks for it."""
    page = chromium.new_page()
    try:
        page.goto(f"{site.url}/extensions/ComfyUI-VC-Attention/help.html?locale={language}#mask")
        page.wait_for_selector("tr#mask:target")
        assert page.evaluate("document.documentElement.lang") == language
        cells = page.locator("tr#mask td").all_inner_texts()
        assert (
            cells[0] == "mask" and cells[1].startswith(SHORT["mask"]) and words(language)["reasons"]["mask"] in cells[1]
        )
        assert page.evaluate("document.querySelector(':target').getBoundingClientRect().top < innerHeight")
    finally:
        page.close()


def test_a_locale_that_is_no_language_gets_the_english_page(chromium, site):
    """What stands in the address comes from anywhere; it must not lead out of the pack's pages."""
    page = chromium.new_page()
    try:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{site.url}/extensions/ComfyUI-VC-Attention/help.html?locale=..%2F..%2Fx#mask")
        page.wait_for_selector("tr#mask:target")
        assert page.evaluate("document.documentElement.lang") == "en"
        assert [url for url in asked if url.endswith(".md")] == [
            f"{site.url}/extensions/ComfyUI-VC-Attention/docs/VCAttentionPatch.md"
        ]
    finally:
        page.close()


def test_the_browsers_english_is_that_of_the_locale(javascript):
    assert javascript("english.js", "return m.ENGLISH;", None) == words("en")
    assert words("en")["reasons"] == SHORT


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_filled(javascript, language):
    """No placeholder is left over, for any phase, state and count."""
    code = """
    m.setTranslations(data.served);
    m.setLanguage(data.language);
    const phases = ["group", "reuse", "reuse", "plain", "dense"];
    const around = [0, 1, 2, 5].map(count => m.declinedAround(count));
    const texts = [
        m.rowText("T", phases), m.rowText("T", phases.slice(0, 1)),
        ...phases.flatMap((phase, i) => [m.stepText(i, phase), m.stepText(i, phase, "now"), m.phaseName(phase)]),
        m.text("upToStep", { step: "S", number: 7 }), m.text("run", { number: 2 }), m.text("link", { words: "W" }),
        m.text("notes.replaced", { title: "T" }), m.text("head", { steps: m.steps(1), state: "S" }),
        m.text("legend", { phase: "P", count: 3 }), ...around.map(parts => parts.join("W")),
        m.reasonWords("short", "other"), m.reasonWords("of a newer server", "other"),
    ];
    return { texts, around };
    """
    found = javascript("texts.js", code, {"served": {language: {"vcAttention": words(language)}}, "language": language})
    assert all(text and "{" not in text and "undefined" not in text and "\0" not in text for text in found["texts"])
    assert found["texts"][-2] == words(language)["reasons"]["short"] and found["texts"][-1] == "other"
    assert all(
        str(count) in before + behind for count, (before, behind) in zip((0, 1, 2, 5), found["around"], strict=True)
    )


@pytest.mark.parametrize(("language", "one"), [("en", "1 step"), ("fr", "0 \u00e9tape"), ("de", "1 Schritt")])
def test_one_and_many(javascript, language, one):
    """French counts nothing as one; the languages decide it, and not this pack."""
    data = {"served": {language: {"vcAttention": words(language)}}, "language": language}
    code = "m.setTranslations(data.served); m.setLanguage(data.language); return [0, 1, 2].map(m.steps);"
    assert one in javascript("texts.js", code, data)


def test_precision_off_is_said_in_the_language(speaking):
    editor = speaking("ko")
    editor.load(tiny_run(4, values=("off", *VALUES[1:])).json())
    editor.wait_text("vca-detail", words("ko")["notes"]["off"], timeout=20_000)
