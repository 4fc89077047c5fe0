"""ComfyUI-WanVideoWrapper as far as the bridge sees it, without its requirements and without checkpoints.

Imitates kijai/ComfyUI-WanVideoWrapper at commit 0cf30c63cc6fad79436e631809ab55b3876c40eb (wanvideo/modules/model.py)
and 1972d87de447743fbecc1baeb819926e73f28033 (nodes_sampler.py); names and argument lists are the wrapper's, the code
is not. Imitated facts:

- `attention` is a global name of the model's module; q, k, v are [B, L, H, D], the result too. Self-attention calls it
  in `forward` (with k_lens, attention_mode, heads, frame_tokens, transformer_options), in `forward_ip` (Stand-In) and
  in `forward_split` (several prompts, once for each part of the clip). A block calls these methods, never the module,
  so torch's hooks on the module do not fire.
- LongCat with conditioning frames (the sampler counts them in Avatar workflows): the noise tokens' queries attend to
  the keys of all tokens, then the conditioning tokens' queries to their own keys. With two or more frames the first
  one, the reference, and the others are apart.
- Cross-attention is a subclass of the self-attention's class and calls the same `attention`.
- VACE blocks are a second list, run before the main ones.
- The sampler deep-copies transformer_options once a run and calls the transformer directly: no ModelPatcher hook or
  callback ever runs. Each call has t (step noise level times 1000; one for each frame with conditioning frames, which
  have 0), current_step, current_step_percentage = step / steps, last_step and is_uncond; a positive and a negative call
  make a step. FreeInit and looping samplers begin again at step 0 within a run.
- TeaCache and its kin keep a block stack's result between steps and reuse it.
- WANVIDEOMODEL is a ModelPatcher around an object with `diffusion_model` and `pipeline`; clones share both.

The bridge was also run by hand, on the CPU with random weights, against a fork's copy of the wrapper's real modules
(model and sampler, synchronised in May 2026); the fakes keep CI free of their requirements.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from node_fakes import FakePatcher
from torch import Tensor, nn

HEADS, HEAD_DIM = 2, 64
DIM = HEADS * HEAD_DIM
TEXT = 12
#: What `attention` was called with, in order: (Lq, Lkv, keywords).
CALLS: list[tuple[int, int, dict[str, Any]]] = []


def attention(q, k, v, q_lens=None, k_lens=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
              softmax_scale=None, q_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
              dtype=torch.bfloat16, attention_mode="sdpa", attn_mask=None, transformer_options=None, frame_tokens=1536,
              heads=128):  # fmt: skip
    """The wrapper's "sdpa" mode."""
    given = {"k_lens": k_lens, "attn_mask": attn_mask, "causal": causal, "attention_mode": attention_mode}
    CALLS.append((q.shape[1], k.shape[1], given))
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=attn_mask, is_causal=causal)
    return out.transpose(1, 2).contiguous()


class WanSelfAttention(nn.Module):
    """Projections and attention of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attention_mode = HEADS, HEAD_DIM, "sdpa"
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.mask: Tensor | None = None

    def qkv_fn(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, L, H, D] each."""
        return tuple(layer(x).unflatten(2, (HEADS, HEAD_DIM)) for layer in (self.q, self.k, self.v))

    def forward(self, q, k, v, seq_lens, transformer_options=None, attention_mode_override=None, lynx_ref_feature=None,
                lynx_ref_scale=1.0, onetoall_ref=None, onetoall_ref_scale=1.0, frame_tokens=1536):  # fmt: skip
        mode = attention_mode_override or self.attention_mode
        more = {} if self.mask is None else {"attn_mask": self.mask}
        x = attention(q, k, v, k_lens=seq_lens, attention_mode=mode, heads=self.num_heads,
                      frame_tokens=frame_tokens, transformer_options=transformer_options, **more)  # fmt: skip
        if onetoall_ref is not None:
            x = x.add(onetoall_ref, alpha=onetoall_ref_scale)
        return self.o(x.flatten(2))

    def forward_ip(self, q, k, v, q_ip, k_ip, v_ip, seq_lens, attention_mode_override=None):
        main = attention(q, torch.cat([k, k_ip], 1), torch.cat([v, v_ip], 1), k_lens=seq_lens, heads=self.num_heads)
        own = attention(q_ip, k_ip, v_ip, k_lens=seq_lens, heads=self.num_heads)
        return self.o(torch.cat([main, own], dim=1).flatten(2))

    def forward_split(self, q, k, v, seq_lens, grid_sizes, seq_chunks):
        parts = zip(*(t.chunk(seq_chunks, dim=1) for t in (q, k, v)), strict=True)
        outs = [attention(*part, k_lens=seq_lens, attention_mode="sdpa", heads=self.num_heads) for part in parts]
        return self.o(torch.cat(outs, dim=1).flatten(2))


class WanT2VCrossAttention(WanSelfAttention):
    """Text cross-attention."""

    def forward(self, x, context):
        q = self.q(x).unflatten(2, (HEADS, HEAD_DIM))
        k, v = (layer(context).unflatten(2, (HEADS, HEAD_DIM)) for layer in (self.k, self.v))
        return self.o(attention(q, k, v, attention_mode=self.attention_mode, heads=self.num_heads).flatten(2))


class WanAttentionBlock(nn.Module):
    """Self-attention as the model's kind and inputs ask for it, cross-attention, a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = WanSelfAttention(), WanT2VCrossAttention()
        self.norm, self.ffn = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.kv_cache: Any = None

    def forward(self, x, context, seq_lens, frames, is_longcat, num_cond, seq_chunks, ref_frames, transformer_options):
        attn = self.self_attn
        q, k, v = attn.qkv_fn(self.norm(x))
        tokens = x.shape[1] // frames
        options = {"transformer_options": transformer_options}
        if seq_chunks > 1:
            y = attn.forward_split(q, k, v, seq_lens, None, seq_chunks)
        elif ref_frames:
            at = x.shape[1] - ref_frames * tokens
            y = attn.forward_ip(*(t[:, :at] for t in (q, k, v)), *(t[:, at:] for t in (q, k, v)), seq_lens)
        elif is_longcat and num_cond > 0:
            cond = num_cond * tokens
            noise = attn.forward(q[:, cond:].contiguous(), k, v, seq_lens, **options)
            cuts = [0, cond] if num_cond == 1 else [0, tokens, cond]
            own = [
                attn.forward(*(t[:, a:b].contiguous() for t in (q, k, v)), seq_lens, **options)
                for a, b in pairwise(cuts)
            ]
            y = torch.cat([*own, noise], dim=1)
        else:
            y = attn.forward(q, k, v, seq_lens, frame_tokens=tokens, **options)
        x = x + y
        x = x + self.cross_attn(self.norm(x), context)
        return x + self.ffn(self.norm(x))


class WanModel(nn.Module):
    """The transformer. x: a list of latents [DIM, F, T] (frames of T tokens each)."""

    def __init__(self, layers: int = 2, is_longcat: bool = False, vace_layers: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(WanAttentionBlock() for _ in range(layers))
            if vace_layers:
                self.vace_blocks = nn.ModuleList(WanAttentionBlock() for _ in range(vace_layers))
        self.is_longcat = is_longcat
        self.enable_teacache = self.enable_magcache = self.enable_easycache = False
        self.teacache_state: dict[bool, tuple[int, Tensor]] = {}
        self.runs = 0
        self.interrupt: BaseException | None = None
        self.eval().requires_grad_(False)

    def forward(self, x, t, context, seq_len, device=None, current_step=0, current_step_percentage=0.0, last_step=0,
                is_uncond=False, pred_id=None, longcat_num_cond_latents=0, seq_chunks=1, ref_frames=0,
                transformer_options=None):  # fmt: skip
        frames = x[0].shape[1]
        x = torch.stack([latent.flatten(1).T for latent in x])
        x = x * (1 + t.max() / 1000)
        kept = self.teacache_state.get(is_uncond)
        if self.enable_teacache and kept is not None and kept[0] >= current_step - 1:
            x = x + kept[1]
        else:
            self.runs += 1
            before = x
            given = (torch.stack(context), torch.tensor([seq_len]), frames, self.is_longcat, longcat_num_cond_latents)
            for block in [*getattr(self, "vace_blocks", ()), *self.blocks]:
                if self.interrupt is not None:
                    raise self.interrupt
                x = block(x, *given, seq_chunks, ref_frames, transformer_options)
            if self.enable_teacache:
                self.teacache_state[is_uncond] = (current_step, x - before)
        return [x[i].T.unflatten(1, (frames, -1)) for i in range(x.shape[0])], None, pred_id


def wan_model(layers: int = 2, compile_args: Any = None, **more: Any) -> FakePatcher:
    """A WANVIDEOMODEL, as WanVideoModelLoader gives it."""
    patcher = FakePatcher()
    pipeline = {"compile_args": compile_args}
    patcher.model = SimpleNamespace(diffusion_model=WanModel(layers, **more), pipeline=pipeline)
    patcher.model_options["transformer_options"] |= {"merge_loras": False, "block_swap_args": None}
    return patcher


def sample(
    model: FakePatcher,
    steps: int = 4,
    cfg: bool = True,
    frames: int = 4,
    tokens: int = 24,
    num_cond: int = 0,
    top: float = 1.0,
    windows: int = 1,
    rounds: int = 1,
    **more: Any,
) -> list[Tensor]:
    """WanVideoSampler: the latent after each step. top: the first noise level. windows: context windows in each step.

    rounds: FreeInit's. more: keywords of the transformer's call.
    """
    return list(sampling(model, steps, cfg, frames, tokens, num_cond, top, windows, rounds, **more))


def sampling(
    model: FakePatcher,
    steps: int,
    cfg: bool = True,
    frames: int = 4,
    tokens: int = 24,
    num_cond: int = 0,
    top: float = 1.0,
    windows: int = 1,
    rounds: int = 1,
    **more: Any,
) -> Iterator[Tensor]:
    """`sample`, step by step."""
    transformer = model.model.diffusion_model
    transformer_options = copy.deepcopy(model.model_options["transformer_options"])
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(DIM, frames, tokens, generator=generator)
    prompts = [torch.randn(TEXT, DIM, generator=generator) for _ in range(2)]
    levels = [top * (1 - i / steps) for i in range(steps)]
    for _ in range(rounds):
        transformer.teacache_state.clear()
        for i, level in enumerate(levels):
            t = torch.tensor([level * 1000])
            if num_cond:
                t = t.unsqueeze(1).repeat(1, frames)
                t[:, :num_cond] = 0
            for _window in range(windows):
                base = {
                    "x": [latent],
                    "t": t,
                    "seq_len": frames * tokens,
                    "device": torch.device("cpu"),
                    "current_step": i,
                    "current_step_percentage": i / steps,
                    "last_step": i == steps - 1,
                    "longcat_num_cond_latents": num_cond,
                    "transformer_options": transformer_options,
                    **more,
                }
                found = transformer(context=prompts[:1], is_uncond=False, **base)[0][0]
                if cfg:
                    negative = transformer(context=prompts[1:], is_uncond=True, **base)[0][0]
                    found = negative + 2.0 * (found - negative)
            latent = latent - 0.1 * found
            yield latent
