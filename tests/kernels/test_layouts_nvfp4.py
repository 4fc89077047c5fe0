"""NVFP4 images: bijections, agreement with CuTe's layouts of the MMAs, and the right numbers in the right place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kernel_backends
import nvfp4_model
import pytest
import torch
from vc_attention.kernels import FAST, FOUR_BIT
from vc_attention.kernels.cute import layouts_nvfp4 as lo
from vc_attention.kernels.cute.config_nvfp4 import Nvfp4Config, config_of, configs
from vc_attention.kernels.cute.reference_nvfp4 import prepare
from vc_attention.kernels.spec.attention import attention as spec_attention
from vc_attention.kernels.spec.formats import nvfp4, nvfp4_second_level
from vc_attention.kernels.spec.grouping import permutation
from vc_attention.kernels.spec.scores import hadamard, smooth_keys

pytestmark = pytest.mark.xdist_group("nvfp4")

KEY_MEANS = replace(FOUR_BIT, key_means=True)
PLANS = (FOUR_BIT, FOUR_BIT.without_smoothing(), KEY_MEANS)


@pytest.mark.parametrize(
    ("offset", "rows", "columns", "first"),
    [
        (lo.q_code, 128, 128, 0),
        (lo.k_code, 128, 128, 0),
        (lo.v_code, 136, 128, 0),
        (lo.mu_offset, 128, 8, 0),
        (lo.qb_offset, 128, 128, 0),
        (lo.km_offset, 8, 128, 0),
        (lo.q_scale, 128, 8, lo.CODE_BYTES),
        (lo.k_scale, 128, 8, lo.CODE_BYTES),
        (lo.v_scale, 128, 8, lo.V_CODE_BYTES),
    ],
)
def test_offsets_are_bijections(offset, rows, columns, first):
    places = {offset(row, column) - first for row in range(rows) for column in range(columns)}
    assert places == set(range(rows * columns))


def test_columns_and_keys_are_inverse():
    assert [lo.key_column(lo.column_key(c)) for c in range(128)] == list(range(128))
    assert [lo.column_key(c) for c in range(10)] == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


@pytest.fixture(scope="module")
def cute_layouts():
    """What `cute_layouts.py` finds in the compiler's package."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    script = Path(__file__).resolve().parents[1] / "support" / "cute_layouts.py"
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_120a"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _matrix_index(layout, lane, value, rows):
    """(row, column) of a value; rows is M or N of the MMA."""
    index = layout[lane][value]
    return index % rows, index // rows


def test_query_fragments(cute_layouts):
    for lane in range(32):
        for value in range(32):
            row, channel = _matrix_index(cute_layouts["nvfp4"]["a"], lane, value, 16)
            for warp in (0, 7):
                for k in range(2):
                    # The kernel's load of MMA k: 16 bytes a lane, 512 bytes a warp.
                    code = ((warp * 2 + k) * 32 + lane) * 32 + value
                    assert lo.q_code(16 * warp + row, 64 * k + channel) == code


def test_key_and_value_fragments(cute_layouts):
    for lane in range(32):
        for value in range(16):
            column, k = _matrix_index(cute_layouts["nvfp4"]["b"], lane, value, 8)
            for n in range(17):
                for step in range(2):
                    code = (n * 32 + lane) * 32 + 16 * step + value
                    assert lo.v_code(8 * n + column, 64 * step + k) == code
                    if n < 16:
                        assert lo.k_code(lo.column_key(8 * n + column), 64 * step + k) == code


def test_scores_are_the_fragments_of_p(cute_layouts):
    """Accumulator (tile n, value c) holds a score of the key whose slot in P the same lane feeds to the second MMA."""
    for lane in range(32):
        for value in range(32):
            row, slot = _matrix_index(cute_layouts["nvfp4"]["a"], lane, value, 16)
            for step in range(2):
                # `softmax_nvfp4`: register value // 8 = row half + 2 (32-key half), element value % 8 of it.
                half, r, element = value // 16, value // 8 % 2, value % 8
                n, c = 4 * (2 * step + half) + element // 2, 2 * r + element % 2
                score_row, column = _matrix_index(cute_layouts["nvfp4"]["c"], lane, c, 16)
                assert score_row == row
                assert lo.column_key(8 * n + column) == 64 * step + slot


def test_scale_words(cute_layouts):
    for lane in range(32):
        row, column = cute_layouts["nvfp4"]["a_scales"][lane], cute_layouts["nvfp4"]["b_scales"][lane]
        for group in range(8):
            # The kernel's loads: 8 bytes for each row; 16 bytes for a column of two n8 tiles.
            assert lo.q_scale(row, group) - lo.CODE_BYTES == (lane // 4 + 8 * (lane % 2)) * 8 + group
            for n in range(16):
                place = (n // 2 * 8 + lane // 4) * 16 + n % 2 * 8 + group
                assert lo.k_scale(lo.column_key(8 * n + column), group) - lo.CODE_BYTES == place
                assert lo.v_scale(8 * n + column, group) - lo.V_CODE_BYTES == place


def test_mean_fragments(cute_layouts):
    for lane in range(32):
        for value in range(2):
            column, block = _matrix_index(cute_layouts["bf16_k8"]["b"], lane, value, 8)
            for n in range(16):
                assert lo.mu_offset(8 * n + column, block) == ((n // 4 * 32 + lane) * 4 + n % 4) * 2 + value
        for value in range(4):
            block, channel = _matrix_index(cute_layouts["bf16_k16"]["b"], lane, value, 8)
            for step in range(8):
                place = ((step // 2 * 32 + lane) * 4 + step % 2 * 2) * 2 + value
                assert lo.km_offset(block, 16 * step + channel) == place
        for value in range(8):
            row, channel = _matrix_index(cute_layouts["bf16_k16"]["a"], lane, value, 16)
            for warp in (0, 5):
                for step in range(8):
                    place = ((warp * 8 + step) * 32 + lane) * 8 + value
                    assert lo.qb_offset(16 * warp + row, 16 * step + channel) == place
    # The row sums are accumulators of one MMA and, packed in pairs, the A fragment of the other.
    assert cute_layouts["bf16_k8"]["a"] == cute_layouts["nvfp4"]["c"]


def _call(lq, lkv, seed=0):
    torch.manual_seed(seed + lq + lkv)
    q, k, v = (torch.randn(1, 2, n, 128) for n in (lq, lkv, lkv))
    return q, k, v + 2 * torch.randn(1, 2, 1, 128)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: config_of(p, "bf16").name)
@pytest.mark.parametrize(("lq", "lkv"), [(5, 1), (130, 300), (128, 128), (64, 1100)])
def test_images_hold_the_specifications_codes(plan, lq, lkv):
    q, k, v = _call(lq, lkv)
    labels = torch.randint(0, 16, (1, 2, lkv), dtype=torch.uint8)
    images = prepare(q, k, v, plan, labels)
    order = permutation(labels)[..., None].expand_as(k)
    k, v = k.gather(-2, order), v.gather(-2, order)
    smooth = smooth_keys(k)
    for head in range(2):
        x = nvfp4_model.operands(images, head)
        rotated = hadamard(q[0, head])
        codes, scale = nvfp4(rotated, nvfp4_second_level(rotated[None])[0], True)
        torch.testing.assert_close(x.q[:lq].float(), codes * scale, rtol=1e-6, atol=0)
        assert torch.all(x.q[lq:] == 0)
        if plan.key_means:
            blocks = torch.arange(lkv) // 128
            means = torch.stack([smooth[0, head, blocks == b].mean(0) for b in range(int(blocks[-1]) + 1)])
            stored = means.bfloat16().float()
            assert torch.equal(x.km[: len(means)].float(), stored)
            assert torch.equal(x.qb[:lq].float(), q[0, head].bfloat16().float())
            rotated = hadamard(smooth[0, head] - stored[blocks])
        else:
            rotated = hadamard(smooth[0, head])
        codes, scale = nvfp4(rotated, nvfp4_second_level(rotated[None])[0], True)
        torch.testing.assert_close(x.k[:lkv].float(), codes * scale, rtol=1e-6, atol=0)
        assert torch.equal(x.k[lkv:], x.k[lkv - 1 : lkv].expand(len(x.k) - lkv, -1))
        second = images.sv[head]
        residual = v[0, head]
        if plan.demean:
            residual = residual - x.mu.float()[torch.arange(lkv) // 128] * second
        codes, scale = nvfp4(residual.T, second, True)
        torch.testing.assert_close(x.v[:lkv].float() * second, (codes * scale).T, rtol=1e-6, atol=0)
        assert torch.all(x.v[lkv:] == 0)
        valid = torch.arange(len(x.ones)) < lkv
        expected = torch.nn.functional.one_hot(torch.arange(len(x.ones)) // 128 % 8, 8) * valid[:, None]
        assert torch.equal(x.ones, expected.double())


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: config_of(p, "bf16").name)
@pytest.mark.parametrize(("lq", "lkv"), [(5, 1), (33, 300), (16, 1100)])
def test_the_kernels_arithmetic_is_within_the_specifications_error(plan, lq, lkv):
    q, k, v = _call(lq, lkv, 1)
    exact = torch.softmax(q.double() @ k.double().transpose(2, 3) * 128**-0.5, -1) @ v.double()
    out = nvfp4_model.attention(prepare(q, k, v, plan), 128**-0.5)
    error, spec_error = ((x - exact).norm() / exact.norm() for x in (out, spec_attention(q, k, v, plan)))
    assert error < 1.1 * spec_error + 2e-3


def test_other_plans_have_no_images():
    assert config_of(FAST, "bf16") is None
    assert config_of(FOUR_BIT, "") is None
    assert config_of(FOUR_BIT, "fp16") == Nvfp4Config(True, False, "fp16")
    assert len({config.name for config in configs()}) == 6
    with pytest.raises(ValueError, match="NVFP4 images"):
        prepare(*_call(1, 1), FAST)
