"""B200 and B300, faked: which kernels are taken, what tests them, what a preset means there, and what a launch is."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import pytest
import torch
from fake_cards import B200, B300
from stub_driver import StubDriver, machine, write_kernels
from vc_attention import kernels
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, PRESETS, Ok, Plan, Reason, registry, supports
from vc_attention.kernels.cute import config_sm100
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.launch import attend, call, chain, compile, selftest
from vc_attention.kernels.launch.chain import Chosen
from vc_attention.kernels.launch.loader import load_library
from vc_attention.kernels.spec.attention import attention as spec
from vc_attention.nodes.options import PatchOptions

ARCHS = {"sm_100a": B200, "sm_103a": B300}
DEVICE = torch.device("cuda", 0)


def names(arch: str) -> tuple[str, ...]:
    return (*(config.name for config in config_sm100.configs(arch)), "k_mean")


class Card:
    """A faked machine with one card, and the attention that kernels compute on it: the specification, or `fault`."""

    def __init__(self, monkeypatch, tmp_path, arch: str) -> None:
        self.arch, self.root = arch, tmp_path / "prebuilt"
        self.name, self.capability, _ = ARCHS[arch]
        self.stub = machine(monkeypatch, self.root, StubDriver(arch=arch), self.name, self.capability)
        monkeypatch.setattr(compile, "compiler", lambda: Reason("no_compiler", "There is no compiler."))
        monkeypatch.setattr(call, "attention_on", self.attention_on)
        self.seen: set[tuple[Plan, torch.dtype]] = set()
        self.fault = None

    def attention_on(self, library, q, k, v, plan, labels, scale):
        self.seen.add((plan, q.dtype))
        return (self.fault or spec)(q, k, v, plan, labels, scale)

    def wheel(self, arch: str = "") -> None:
        """The wheel of the family, as install.py unpacks it, with kernels of `arch`."""
        family, folder = "blackwell-datacenter", "blackwell-datacenter/0123456789ab"
        pointer = {
            "schema": 1,
            "family": family,
            "folder": folder,
            "wheel": "a.whl",
            "version": "0",
            "sha256": "0" * 64,
        }
        write_kernels(self.root / folder / self.arch, arch or self.arch, names(arch or self.arch))
        (self.root / f"{family}.json").write_text(json.dumps(pointer), encoding="utf-8")


@pytest.fixture(params=ARCHS)
def card(request, monkeypatch, tmp_path) -> Card:
    return Card(monkeypatch, tmp_path, request.param)


def test_kernels_of_the_wheel_serve_after_their_self_test(card):
    assert supports("cuda", kernels.preset("fast", "cuda")).code == "no_kernel"
    chain.forget()
    card.wheel()
    chosen = call.choose(DEVICE)
    assert isinstance(chosen, Chosen) and chosen.kernels.manifest.arch == card.arch and chosen.skipped == ()
    assert len(card.stub.loaded) == len(names(card.arch))
    formats = {"sm_100a": ("fp8", "int8"), "sm_103a": ("fp8",)}[card.arch]
    means = [(True, False), (True, True), (False, False)]
    eight = [replace(plan, demean=demean, key_means=keyed) for plan in (FAST, FAITHFUL) for demean, keyed in means]
    plans = {replace(plan, scores=scores) for plan in eight for scores in formats}
    assert card.seen == {(plan, dtype) for plan in plans for dtype in selftest.DTYPES}
    assert {attend.kernel_name(plan, dtype, card.arch) for plan, dtype in card.seen} == {*names(card.arch)} - {"k_mean"}


@pytest.mark.parametrize("probability", ["expcast_wide", "exp2"])
def test_a_fault_of_fp8_scores_alone_is_found(card, probability):
    """Scores as if one key block had the scale of its neighbour: 3 % off."""

    def fault(q, k, v, plan, labels, scale):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        wrong = plan.scores == "fp8" and plan.probability == probability
        return spec(q, k, v, plan, labels, scale * (1.03 if wrong else 1))

    card.fault = fault
    card.wheel()
    refused = call.choose(DEVICE)
    assert isinstance(refused, Reason) and refused.code == "self_test"
    assert "FP8 scores" in refused.text and "probabilit" in refused.text
    row = registry.backends(DEVICE)[0]
    assert not row.available and "FP8 scores" in row.reason


def test_kernels_of_the_other_one_are_refused(card):
    other = next(arch for arch in ARCHS if arch != card.arch)
    card.wheel(other)
    refused = call.choose(DEVICE)
    assert isinstance(refused, Reason) and refused.code == "capability" and card.name in refused.text
    for capability in (ARCHS[other].capability, card.capability):
        assert "{}.{}".format(*capability) in refused.text
    assert not card.seen


def test_what_the_kernels_compute_and_what_they_do_not(card):
    card.wheel()
    fast, faithful = (kernels.preset(name, "cuda") for name in ("fast", "faithful"))
    if card.arch == "sm_100a":
        assert (fast, faithful) == (FAST, FAITHFUL)
    else:
        assert (fast, faithful) == tuple(replace(x, scores="fp8", key_means=True) for x in (FAST, FAITHFUL))
    keyed = replace(fast, key_means=True)
    plain = replace(fast, key_means=False)
    for plan in (fast, faithful, fast.without_smoothing(), replace(faithful, scores="fp8"), keyed, plain):
        assert supports("cuda", plan) == Ok("cubin") and supports("cuda", plan, dtype=torch.float16) == Ok("cubin")
    assert bool(supports("cuda", FAST)) == (card.arch == "sm_100a")
    for plan in (FOUR_BIT, replace(keyed, demean=False), replace(fast, score_groups="per_thread")):
        refused = supports("cuda", plan)
        assert refused.code == "no_kernel" and card.arch in refused.text and "Choose the preset fast" in refused.text


def test_what_the_node_tries(card):
    """In the order of preference; what there is a kernel for comes last, and always."""
    card.wheel()
    fast = kernels.preset("fast", "cuda")
    assert PatchOptions().plans(DEVICE) == (fast,)
    assert PatchOptions(precision="4-bit").plans("cuda") == (FOUR_BIT, fast)
    keyed, plain = replace(fast, key_means=True), replace(fast, key_means=False)
    assert PatchOptions(plan=keyed).plans(DEVICE) == (keyed, plain)
    for options in (PatchOptions(quality="faithful"), PatchOptions(precision="4-bit"), PatchOptions(plan=keyed)):
        assert [bool(supports("cuda", plan)) for plan in options.plans(DEVICE)][-1]


def test_presets_elsewhere_are_what_they_say(monkeypatch, tmp_path):
    for name, plan in PRESETS.items():
        for device in (None, "cpu", torch.device("meta")):
            assert kernels.preset(name, device) == plan
    machine(monkeypatch, tmp_path)
    assert {name: kernels.preset(name, DEVICE) for name in PRESETS} == PRESETS
    Card(monkeypatch, tmp_path, "sm_103a")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernels.preset("fast", DEVICE) == FAST


# -- launches of the compiled kernels -------------------------------------------------------------------------------

B, H, LKV = 2, 3, 391


@pytest.mark.xdist_group("cubins")
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("lq", [1, 129, 300])
@pytest.mark.parametrize(("arch", "scores"), [("sm_100a", "fp8"), ("sm_100a", "int8"), ("sm_103a", "fp8")])
def test_the_attention_launch_argument_by_argument(builds, monkeypatch, tmp_path, arch, scores, lq, keyed):
    name, capability, _ = ARCHS[arch]
    stub = machine(monkeypatch, tmp_path, StubDriver(arch=arch), name, capability)
    library = load_library(builds[arch], DEVICE)
    assert library.load_all() is None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # CPU tensors have no device number
    q, k, v = (torch.zeros(B, H, n, 128, dtype=torch.bfloat16) for n in (lq, LKV, LKV))
    plan = replace(FAST, scores=scores, key_means=keyed)
    out = call.attention_on(library, q, k, v, plan, torch.zeros(B, H, LKV, dtype=torch.uint8), 0.125)
    entries = {entry.sha256: (key, entry) for key, entry in library.manifest.kernels.items()}
    launches = {entries[launched.image][0]: launched for launched in stub.launched}
    form, means = "_fp8" * (scores == "fp8"), "_means" * keyed
    q_name, k_name, v_name = f"q{form}_bf16{means}", f"k{form}_bf16_gather{means}", "v_bf16_gather_means"
    assert {q_name, k_name, v_name, "sort_order"} <= set(launches)
    for launched in stub.launched:
        entry = entries[launched.image][1]
        assert (launched.block, launched.shared, launched.cluster) == (entry.block, entry.shared, entry.cluster)
        assert [len(data) for data in launched.arguments] == [size for _, size in entry.params]
    attention = launches[attend.kernel_name(plan, torch.bfloat16, arch)]
    # A block computes two query tiles.
    assert attention.grid == (-(-lo.query_tiles(lq) // 2), B * H, 1)
    values = dict(zip(library.kernel(attend.kernel_name(plan, torch.bfloat16, arch)).entry.arguments,
                      attention.arguments, strict=True))  # fmt: skip
    assert [struct.unpack("<I", values[name])[0] for name in ("lq", "lkv", "heads")] == [lq, LKV, H]
    assert struct.unpack("<f", values["scale"])[0] == pytest.approx(0.125 * math.log2(math.e), rel=1e-6)
    pointers = {name: struct.unpack("<Q", data)[0] for name, data in values.items() if len(data) == 8}
    assert set(pointers) == {"q", "k", "v", "qs", "ks", "sv", "mu", "qb", "km", "out"}
    # Without key means there is no bf16 Q and no key mean; all else is there, and each at its own place.
    absent = () if keyed else ("qb", "km")
    assert {name for name, at in pointers.items() if not at} == set(absent)
    assert len(set(pointers.values()) - {0}) == 10 - len(absent) and pointers["out"] == out.data_ptr()
    # The images that preparation wrote are the ones that attention reads.
    for kernel, image in ((q_name, "q"), (k_name, "k"), (v_name, "v")):
        index = library.manifest.kernels[kernel].arguments.index(f"{image}_image")
        assert struct.unpack("<Q", launches[kernel].arguments[index])[0] == pointers[image]
