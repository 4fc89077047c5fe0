"""What the demo exchanges in the shipped workflow, for each of its runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from vc_attention.tools.demo import FILES
from vc_attention.tools.demo.substitute import FOUR_BIT, NO_ATTENTION, PATCHED, PLAIN, Settings, shrink
from vc_attention.tools.messages import ToolError
from vc_attention.tools.workflow import to_prompt

HERE = Path(__file__).resolve().parent
INFO = json.loads((HERE / "data" / "object_info_0.3.75.json").read_text())
PROMPT = to_prompt(json.loads((HERE.parents[1] / "workflows" / "wan2.2_t2v.json").read_text()), INFO)
SETTINGS = Settings(width=96, height=64, length=9, steps=8, seed=5, min_tokens=32)


def kinds(prompt):
    return [entry["class_type"] for entry in prompt.values()]


def of(prompt, kind):
    return {key: entry["inputs"] for key, entry in prompt.items() if entry["class_type"] == kind}


def model_chain(prompt, sampler):
    """Types of the nodes that a sampler's model comes through, loader last."""
    chain, at = [], prompt[sampler]["inputs"]["model"][0]
    while True:
        chain.append(prompt[at]["class_type"])
        source = prompt[at]["inputs"].get("model")
        if source is None:
            return chain
        at = source[0]


@pytest.mark.parametrize("run", [PLAIN, PATCHED, FOUR_BIT, NO_ATTENTION])
def test_every_link_of_every_run_leads_to_a_node_that_is_there(run):
    prompt, _ = shrink(PROMPT, FILES, SETTINGS, run)
    for entry in prompt.values():
        for value in entry["inputs"].values():
            assert not isinstance(value, list) or value[0] in prompt
    assert not {"CLIPLoader", "CLIPTextEncode", "CreateVideo", "SaveVideo"} & set(kinds(prompt))


def test_the_original_prompt_is_left_alone():
    before = json.dumps(PROMPT)
    shrink(PROMPT, FILES, SETTINGS, PATCHED)
    assert json.dumps(PROMPT) == before


def test_the_two_models_stay_two():
    prompt, _ = shrink(PROMPT, FILES, SETTINGS, PLAIN)
    assert [inputs["unet_name"] for inputs in of(prompt, "UNETLoader").values()] == [FILES["high"], FILES["low"]]


def test_both_clips_have_one_seed_one_size_and_the_split_in_the_same_place():
    plain, patched = (shrink(PROMPT, FILES, SETTINGS, run)[0] for run in (PLAIN, PATCHED))
    for prompt in (plain, patched):
        first, second = of(prompt, "KSamplerAdvanced").values()
        assert first["noise_seed"] == second["noise_seed"] == 5
        assert (first["start_at_step"], first["end_at_step"], first["steps"]) == (0, 4, 8)
        assert (second["start_at_step"], second["end_at_step"], second["steps"]) == (4, 10000, 8)
        (size,) = of(prompt, "EmptyHunyuanLatentVideo").values()
        assert (size["width"], size["height"], size["length"]) == (96, 64, 9)


def test_the_plain_run_has_no_trace_of_the_pack():
    prompt, _ = shrink(PROMPT, FILES, SETTINGS, PLAIN)
    assert model_chain(prompt, "12") == ["ModelSamplingSD3", "UNETLoader"]
    assert not any("VCAttention" in kind or kind == "VCDemoRecord" for kind in kinds(prompt))


def test_the_patched_run_keeps_the_node_as_shipped_but_for_two_widgets():
    prompt, _ = shrink(PROMPT, FILES, SETTINGS, PATCHED)
    for sampler in ("12", "13"):
        assert model_chain(prompt, sampler) == ["ModelSamplingSD3", "VCDemoRecord", "VCAttentionPatch", "UNETLoader"]
    for number in ("5", "6"):
        changed = {name for name, value in prompt[number]["inputs"].items() if value != PROMPT[number]["inputs"][name]}
        assert changed == {"min_tokens", "backend"}
        assert prompt[number]["inputs"]["min_tokens"] == 32


def test_each_recorder_writes_when_its_own_sampler_is_done():
    prompt, _ = shrink(PROMPT, FILES, SETTINGS, PATCHED)
    first, second = of(prompt, "VCDemoWrite").items()
    assert first[1]["samples"] == ["12", 0] and second[1]["samples"] == ["13", 0]
    assert prompt["13"]["inputs"]["latent_image"] == [first[0], 0]
    assert of(prompt, "VAEDecode")["14"]["samples"] == [second[0], 0]
    assert {first[1]["file"], second[1]["file"]} == {"records_0.json", "records_1.json"}


def test_the_controls():
    # On a card too, where no kernel may have 4 bit.
    four, _ = shrink(PROMPT, FILES, replace(SETTINGS, backend="auto"), FOUR_BIT)
    patches = list(of(four, "VCAttentionPatch").values())
    assert patches and all((i["precision"], i["grouping"], i["backend"]) == ("4-bit", "off", "spec") for i in patches)
    none, _ = shrink(PROMPT, FILES, SETTINGS, NO_ATTENTION)
    for sampler in ("12", "13"):
        assert model_chain(none, sampler) == ["ModelSamplingSD3", "VCDemoNoAttention", "UNETLoader"]


def test_everything_that_differs_is_named():
    prompt, changes = shrink(PROMPT, FILES, SETTINGS, PATCHED)
    different = {
        key for key, entry in PROMPT.items() if key not in prompt or prompt[key]["class_type"] != entry["class_type"]
    }
    different |= {
        key
        for key in set(PROMPT) & set(prompt)
        if any(
            not isinstance(value, list) and prompt[key]["inputs"].get(name) != value
            for name, value in PROMPT[key]["inputs"].items()
        )
    }
    titles = {PROMPT[key]["_meta"]["title"] for key in different}
    titles.discard(PROMPT["15"]["_meta"]["title"])  # CreateVideo is told together with SaveVideo
    assert titles <= {change.node for change in changes}
    assert all(change.why and change.shipped != change.demo for change in changes)


def test_the_token_count_is_the_clips():
    assert Settings(width=256, height=160, length=25).tokens == 16 * 10 * 7
    assert Settings().tokens >= 1024
    assert Settings().min_tokens < Settings().tokens


def test_a_workflow_without_the_node_is_refused():
    prompt, _ = shrink(PROMPT, FILES, SETTINGS, PLAIN)
    with pytest.raises(ToolError, match="no VCAttentionPatch node"):
        shrink(prompt, FILES, SETTINGS, PATCHED)


def test_a_model_that_no_sampler_uses_is_refused():
    prompt = {key: entry for key, entry in PROMPT.items() if key not in ("12", "13", "14", "15", "16")}
    with pytest.raises(ToolError, match="No sampler uses the model"):
        shrink(prompt, FILES, SETTINGS, PATCHED)
