"""Profiles: what was saved is what is loaded, and any other file is one sentence."""

from __future__ import annotations

import math

import pytest
import torch
from hook_cases import SIGMAS
from node_fakes import FakePatcher, options, run
from safetensors.torch import load_file, save_file
from vc_attention.kernels import FAST, FOUR_BIT
from vc_attention.nodes import engine, files, host, profile
from vc_attention.nodes.hook import attach, session_of
from vc_attention.nodes.profile import FORMAT, Profile, ProfileError, ProfileLayer, check_name, load, path_of, save
from vc_attention.nodes.quality import Quality, QualityOptions
from vc_attention.nodes.quality_report import table
from vc_attention.nodes.state import Layer
from vc_attention.nodes.watch import watch

LAYERS = (
    ProfileLayer(Layer("double", 0, 0), False, 47.25, 0.015625),
    ProfileLayer(Layer("double", 1, 0), True, 31.5, 0.125),
    ProfileLayer(Layer("single", 1, 1), True, -math.inf, math.inf),
    ProfileLayer(Layer(None, None, 7), False, math.inf, 0.0),
    ProfileLayer(Layer(None, 3, 0), True),
)
PROFILE = Profile("unknown family (SimpleNamespace)", 2, LAYERS, FAST.encode(), 35.0, {"steps": [1, 2]}, "9.9")


@pytest.fixture(autouse=True)
def output(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "output_folder", lambda: tmp_path)
    return tmp_path


def test_round_trip():
    save(PROFILE, path_of("a b+c"))
    found = load(" a b+c.safetensors ")
    assert found.layers[:4] == LAYERS[:4]
    assert found.layers[4].layer == LAYERS[4].layer and math.isnan(found.layers[4].psnr_db)
    assert found.dense == {Layer("double", 1, 0), Layer("single", 1, 1), Layer(None, 3, 0)}
    assert (found.family, found.heads, found.plan, found.budget_db) == (PROFILE.family, 2, FAST.encode(), 35.0)
    assert found.measured == {"steps": [1, 2]} and found.version == "9.9"


def test_an_empty_profile_and_a_replaced_one():
    save(Profile("Wan", 0, ()), path_of("p"))
    assert load("p").layers == () and load("p").version == host.pack_version()
    save(PROFILE, path_of("p"))
    assert len(load("p").layers) == 5
    assert [path.name for path in path_of("p").parent.iterdir()] == ["p.safetensors"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\\b", ".hidden", "a.", "x" * 90, "a\nb", "/etc/passwd"])
def test_names_that_are_no_file_in_one_folder(name):
    with pytest.raises(ProfileError, match="cannot be called"):
        check_name(name)


def damaged(**changed):
    """A profile's file with some tensors or metadata replaced (None: left out)."""
    save(PROFILE, path_of("d"))
    from safetensors import safe_open

    with safe_open(path_of("d"), framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path_of("d"))
    for name, value in changed.items():
        target = tensors if name in tensors else metadata
        if value is None:
            del target[name]
        else:
            target[name] = value
    save_file(tensors, path_of("d"), metadata)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": "something"}, "another kind of safetensors file"),
        ({"format": None}, "another kind of safetensors file"),
        ({"schema": "2"}, r"another version of VC-Attention \(9.9\)"),
        ({"dense": None}, "is damaged"),
        ({"dense": torch.full((5,), 3, dtype=torch.uint8)}, "is damaged"),
        ({"dense": torch.zeros(4, dtype=torch.uint8)}, "is damaged"),
        ({"ordinal": torch.full((5,), -1, dtype=torch.int32)}, "is damaged"),
        ({"block_type": torch.full((5,), 9, dtype=torch.int32)}, "is damaged"),
        ({"block_index": torch.zeros(5)}, "is damaged"),
        ({"psnr_db": torch.zeros(5, 1)}, "is damaged"),
        ({"block_types": "{"}, "is damaged"),
        ({"block_types": "[1]"}, "is damaged"),
        ({"measured": "[]"}, "is damaged"),
        ({"heads": "two"}, "is damaged"),
        ({"budget_db": "nan"}, "is damaged"),
        ({"family": None}, "is damaged"),
    ],
)
def test_what_is_not_a_profile_is_a_sentence(changed, words):
    damaged(**changed)
    with pytest.raises(ProfileError, match=words + ".*the run goes on without it"):
        load("d")


@pytest.mark.parametrize("content", [b"", b"no safetensors", bytes(64), b"x" * (5 << 20)])
def test_a_file_of_something_else(content):
    path_of("d").parent.mkdir(parents=True)
    path_of("d").write_bytes(content)
    with pytest.raises(ProfileError, match="is damaged"):
        load("d")
    with pytest.raises(ProfileError, match="is not in vc_attention/profiles"):
        load("missing")


@pytest.mark.parametrize("limit", ["LARGEST_BYTES", "MOST_LAYERS"])
def test_a_file_that_is_larger_than_any_profile(monkeypatch, limit):
    """Whole and well-formed, and still not read: it came with a workflow from somewhere."""
    save(PROFILE, path_of("d"))
    assert len(load("d").layers) == 5
    monkeypatch.setattr(profile, limit, 4)
    with pytest.raises(ProfileError, match="is damaged"):
        load("d")


def test_a_profile_that_cannot_be_written(output, monkeypatch):
    (output / "vc_attention").write_text("a file where the folder should be")
    with pytest.raises(ProfileError, match="was not saved: ") as refused:
        save(PROFILE, path_of("p"))
    assert str(output) not in str(refused.value)
    (output / "vc_attention").unlink()
    save(PROFILE, path_of("p"))

    def full(_, path, __):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(ProfileError, match="no space left on device"):
        save(Profile("Wan", 0, ()), path_of("p"))
    assert len(load("p").layers) == 5, "the older one is untouched"


def test_no_personal_path_in_the_file(output):
    save(PROFILE, path_of("p"))
    assert str(output).encode() not in path_of("p").read_bytes()


# -- in a run -------------------------------------------------------------------------------------------------------


def with_profile(profile, plan=FAST):
    watcher = Quality(QualityOptions(), profile=profile)
    return watch(attach(FakePatcher(), options(plan=plan)), watcher), watcher


def test_its_layers_stay_in_16_bit_from_the_first_step(layers):
    model, watcher = with_profile(PROFILE)
    run(model, layers, SIGMAS)
    (found,) = watcher.results()
    assert set(found.layers) == {Layer("double", 0, 0)}
    assert dict(session_of(model).stats.declined) == {"budget": 8}
    assert "block double:1 from the start (profile)" in table([found])
    kept = watcher.to_profile()
    assert kept.dense == PROFILE.dense and kept.heads == 2 and kept.plan == FAST.encode()
    assert {entry.layer: entry for entry in kept.layers}[Layer("double", 0, 0)].psnr_db != 47.25


def test_a_profile_for_another_number_of_heads_is_let_go(layers):
    foreign = Profile(PROFILE.family, 40, PROFILE.layers)
    model, watcher = with_profile(foreign)
    run(model, layers, SIGMAS)
    (found,) = watcher.results()
    assert found.dense == {} and session_of(model).stats.accelerated == 16
    assert "a model with 40 attention heads, and this one has 2" in table([found])
    assert watcher.to_profile().dense == frozenset()


def test_a_profile_measured_with_other_arithmetic_says_so(layers):
    other = Profile(PROFILE.family, 2, PROFILE.layers, FOUR_BIT.encode())
    model, watcher = with_profile(other)
    run(model, layers, SIGMAS)
    (found,) = watcher.results()
    assert "another precision or quality" in table([found]) and Layer("double", 1, 0) in found.dense


def test_what_the_first_of_two_samplers_decided_is_saved(layers, monkeypatch):
    """In the second one the same layer is good again, and a budget begins anew in each."""
    real, calls = engine.attention, []

    def attention(q, k, v, *rest):
        calls.append(q)
        return real(q, k, v, *rest) * (0.9 if len(calls) == 2 else 1.0)

    monkeypatch.setattr(engine, "attention", attention)
    monkeypatch.setattr(host, "prompt_id", lambda: "a prompt")
    watcher = Quality(QualityOptions(budget_db=38.0))
    model = watch(attach(FakePatcher(), options(plan=FAST)), watcher)
    run(model, layers, SIGMAS)
    run(model, layers, SIGMAS)
    first, second = watcher.results()
    assert list(first.dense) == [Layer("double", 1, 0)] and second.dense == {}
    assert watcher.to_profile().dense == {Layer("double", 1, 0)}


def test_the_format_is_named_in_the_file():
    save(PROFILE, path_of("p"))
    assert FORMAT.encode() in path_of("p").read_bytes()
