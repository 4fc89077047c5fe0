"""The timeline on the node, in ComfyUI's real editor: what it shows before, during and after a run."""

from __future__ import annotations

import json

import pytest
from browser_cases import BORDERED, PATCH, SAMPLER, SETTINGS, VALUES, subgraph, tiny_run, ways
from rule_letters import letters

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(180), pytest.mark.xdist_group("browser")]
WAYS = ways()


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_cells_are_those_of_the_rule(editor, renderer):
    """One cell a step, redrawn as soon as a widget of the node, or of the sampler, has another value."""
    editor.setting("Comfy.VueNodes.Enabled", renderer == "vue")
    editor.load(tiny_run(20).json())
    editor.wait_rows([letters(20)])
    assert editor.text("vca-state") == "20 steps, expected"
    changes = [
        ("group_fraction", 0.5),
        ("reuse_steps", 3),
        ("start_percent", 0.1),
        ("end_percent", 0.6),
        ("grouping", "all steps"),
        ("grouping", "off"),
    ]
    chosen = {}
    for name, value in changes:
        editor.widget(PATCH, name, value)
        chosen[name] = value
        editor.wait_rows([letters(20, **chosen)], timeout=1000)
    assert set(editor.rows()[0]) == {"d", "p"}
    editor.widget(SAMPLER, "steps", 7)
    editor.wait_rows([letters(7, **chosen)], timeout=1000)
    editor.widget(PATCH, "precision", "off")
    editor.wait_rows(["d" * 7], timeout=1000)
    assert editor.text("vca-detail") == "precision is off: the model passes through unchanged."


@pytest.mark.parametrize("way", WAYS)
def test_the_sampler_is_found(editor, way):
    flow, rows = WAYS[way]
    editor.load(flow.json())
    editor.wait_rows(rows)
    if not rows:
        words = {"another patch behind": '"The second" further on takes'}.get(way, "Connect the model output")
        assert editor.text("vca-detail").startswith(words)


def test_inside_a_subgraph(editor):
    """The sampler is found over the subgraph's border, and the run's messages find their node."""
    editor.load(subgraph())
    editor.run(
        """([outer, inner]) => {
            const graph = app.graph.getNodeById(outer).subgraph;
            app.canvas.setGraph(graph);
            window.__inner = () => {
                const element = graph.getNodeById(inner).widgets
                    .find(w => w.name === 'vc_attention_timeline').element;
                const cells = [...element.querySelectorAll('.vca-cell')].map(cell => cell.dataset.phase);
                return [element.querySelector('.vca-state').textContent, cells.join(' ')];
            };
        }""",
        [BORDERED, PATCH],
    )
    try:
        wanted = ["4 steps, expected", "group plain plain plain"]
        editor.page.wait_for_function("wanted => __inner().join() === wanted.join()", arg=wanted, timeout=5000)
        editor.run("app.queuePrompt(0, 1)")
        wanted[0] = "4 steps, as it ran"
        editor.page.wait_for_function("wanted => __inner().join() === wanted.join()", arg=wanted, timeout=60_000)
    finally:
        editor.run("app.canvas.setGraph(app.graph.rootGraph ?? app.graph)")


def test_a_bypassed_and_a_muted_patch(editor):
    flow = tiny_run(4)
    flow.nodes[PATCH]["mode"] = 4
    editor.load(flow.json())
    editor.wait_rows(["dddd"])
    assert "bypassed" in editor.text("vca-detail")
    editor.run("__node(2).mode = 2")
    editor.wait_text("vca-detail", "muted", timeout=2000)
    assert editor.rows() == []


def test_a_long_schedule_shares_cells(editor):
    editor.load(tiny_run(1000, values=(*VALUES[:4], 64, *VALUES[5:])).json())
    editor.wait_text("vca-state", "1000 steps", timeout=2000)
    widths = editor.run("[...__timeline(2).querySelectorAll('.vca-cell')].map(cell => +cell.style.flexGrow)")
    assert sum(widths) == 1000 and len(widths) < 20


def test_a_run_fills_it_live_and_says_what_was_declined(editor, pictures):
    """Queued from the editor: cells fill while it runs, then the counts, the card and the reasons stand there."""
    editor.load(tiny_run(8, 96).json())
    editor.wait_rows(["grpppppp"])
    editor.run(
        """() => {
            window.__seen = [];
            const note = () => {
                const cells = [...__timeline(2).querySelectorAll('.vca-cell')];
                const now = cells.map(cell => cell.dataset.state[0]).join('');
                if (now !== __seen.at(-1)) __seen.push(now);
            };
            window.__observer = new MutationObserver(note);
            __observer.observe(__timeline(2), { subtree: true, childList: true });
        }"""
    )
    editor.run("app.queuePrompt(0, 1)")
    editor.wait_text("vca-state", "running", timeout=60_000)
    editor.wait_text("vca-state", "as it ran", timeout=60_000)
    seen = editor.run("__observer.disconnect(), __seen")
    running = [states for states in seen if "n" in states]
    assert len(running) >= 2, seen  # throttled, so not every step is seen
    assert all(states == states.replace("p", "") + "p" * states.count("p") for states in seen), seen
    assert seen[-1] == "r" * 8
    assert editor.rows() == ["grpppppp"]
    assert editor.text("vca-state") == "8 steps, as it ran"
    assert editor.text("vca-card") == "CPU"
    assert editor.text("vca-path") == "8-bit fast on spec"
    # 2 layers, 2 branches, 8 steps; as many calls to the text
    assert editor.text("vca-declined") == "32 calls declined: text or image cross-attention"
    link = editor.run("(e => [e.href, e.title])(__timeline(2).querySelector('.vca-declined a'))")
    assert link[0].endswith("/extensions/ComfyUI-VC-Attention/help.html?locale=en#short") and "help page" in link[1]
    editor.picture(pictures / "after_a_run.png")

    # other settings: what to expect of them; the old ones: what they gave
    editor.widget(PATCH, "reuse_steps", 1)
    editor.wait_rows(["ggpppppp"], timeout=1000)
    assert editor.text("vca-state") == "8 steps, expected"
    assert editor.text("vca-detail") == "The settings changed after the last run."
    editor.widget(PATCH, "reuse_steps", 4)
    editor.wait_text("vca-state", "as it ran", timeout=1000)

    # a node that is made anew, as undo does, still knows
    editor.run("async () => { await app.loadGraphData(app.graph.serialize(), true, true); }")
    editor.wait_text("vca-state", "as it ran", timeout=2000)


def test_two_equal_patches_show_their_own_runs(editor):
    """ComfyUI's cache gives equal nodes one output; each of ours knows the node that shows its runs."""
    flow = tiny_run(3, 96)
    other = flow.add(8, "VCAttentionPatch", list(VALUES), "model:MODEL", "model:MODEL")
    flow.nodes[9] = {**flow.nodes[SAMPLER], "id": 9, "inputs": [dict(i) for i in flow.nodes[SAMPLER]["inputs"]]}
    flow.nodes[9] |= {"outputs": [{"name": "LATENT", "type": "LATENT", "links": []}], "pos": [760, 1600]}
    flow.nodes[9]["widgets_values"] = [*flow.nodes[SAMPLER]["widgets_values"][:2], 2, 4.0, "euler", "simple", 1.0]
    flow.add(10, "SaveLatent", ["latents/t"], "samples:LATENT")
    for source, name, target, to in (
        (1, "MODEL", 8, "model"),
        (8, "model", 9, "model"),
        (3, "CONDITIONING", 9, "positive"),
        (4, "CONDITIONING", 9, "negative"),
        (6, "LATENT", 9, "latent_image"),
        (9, "LATENT", 10, "samples"),
    ):
        flow.link(source, name, target, to)
    editor.load(flow.json())
    editor.wait_rows(["gpp"])
    editor.wait_rows(["gp"], other)
    editor.run("app.queuePrompt(0, 1)")
    editor.wait_text("vca-state", "3 steps, as it ran")
    editor.wait_text("vca-state", "2 steps, as it ran", other)


def test_what_really_ran_replaces_what_was_expected(editor):
    """The timeline expects groups and reuse; dense_blocks takes all layers out, and too many min_tokens all calls."""
    values = list(VALUES)
    values[6] = 4096
    editor.load(tiny_run(4, 96, tuple(values)).json())
    editor.wait_rows(["gppp"])
    editor.run("app.queuePrompt(0, 1)")
    editor.wait_text("vca-state", "as it ran")
    assert editor.rows() == ["dddd"]
    assert editor.text("vca-legend") == "16 bit 4"


def test_no_kernel_for_this_machine_is_said_with_a_way_to_help(editor):
    values = (*VALUES[:-1], "auto")
    editor.load(tiny_run(2, 96, values).json())
    editor.wait_rows(["gp"])
    editor.run("app.queuePrompt(0, 1)")
    editor.wait_text("vca-state", "as it ran")
    assert editor.rows() == ["dd"]
    assert "NVIDIA" in editor.text("vca-reason")
    links = editor.run("[...__timeline(2).querySelectorAll('a')].map(e => e.hash)")
    assert set(links) == {"#no_kernel", "#short"}
    whole = editor.run("__timeline(2).textContent")
    assert whole.count("NVIDIA") == 1, whole  # said once
    editor.widget(PATCH, "backend", "spec")
    editor.wait_text("vca-state", "expected")
    assert editor.text("vca-reason") == ""  # it was about the other backend


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_save_reload_and_export_keep_values(editor, renderer):
    """The timeline is in neither file: values keep their number and order, and the API prompt its inputs."""
    editor.setting("Comfy.VueNodes.Enabled", renderer == "vue")
    values = ["8-bit", "faithful", "all steps", 0.5, 2, 16, 128, "0-1", 0.1, 0.9, 2.0, "stop", "auto"]
    editor.load(tiny_run(values=tuple(values)).json())
    saved = editor.run("JSON.parse(JSON.stringify(app.graph.serialize()))")
    for _ in range(2):
        node = next(node for node in saved["nodes"] if node["id"] == PATCH)
        assert node["widgets_values"] == values
        assert "vc_attention_timeline" not in json.dumps(saved)
        editor.load(saved)
        saved = editor.run("JSON.parse(JSON.stringify(app.graph.serialize()))")
    prompt = editor.run("app.graphToPrompt()")["output"][str(PATCH)]
    names = list(editor.run("Object.keys(__node(2).constructor.nodeData.input.required)"))
    assert set(prompt["inputs"]) == set(names)
    assert [prompt["inputs"][name] for name in names[1:]] == values


def test_scaled_pages_and_zoom(open_editor, pictures):
    """200 % scaling, and the canvas from far to near: the timeline stays inside its node, nothing is cut off."""
    editor = open_editor(device_scale_factor=2)
    editor.load(tiny_run(20).json())
    editor.wait_rows([letters(20)])
    for scale in (0.3, 1.0, 2.0):
        editor.show(scale=scale)
        inside = editor.run(
            """() => {
                const node = __node(2), element = __timeline(2), box = element.getBoundingClientRect();
                const canvas = app.canvas.canvas.getBoundingClientRect(), ds = app.canvas.ds;
                const left = canvas.left + (node.pos[0] + ds.offset[0]) * ds.scale;
                const top = canvas.top + (node.pos[1] + ds.offset[1]) * ds.scale;
                return box.left >= left - 1 && box.right <= left + node.size[0] * ds.scale + 1
                    && box.top >= top - 1 && box.bottom <= top + node.size[1] * ds.scale + 1
                    && box.width > 0 && element.scrollWidth <= element.clientWidth
                    && element.scrollHeight <= element.clientHeight;
            }"""
        )
        assert inside, scale
        if scale == 1.0:
            editor.picture(pictures / "scaled_200.png")
    assert editor.trouble() == []
    editor.page.close()


def test_settings_of_the_tests_are_known(editor):
    """A setting that the frontend renamed would leave dialogs over what the tests look at."""
    for name, value in SETTINGS.items():
        assert editor.run("name => app.extensionManager.setting.get(name)", name) == value, name
