"""Causal attention over what slots keep per token, for TorchOps: one function per phase.

A cache is (keys, values), each [slots + 1, max_positions, kv_heads, head_dim] (ModelState.kv_storage), or one tensor of
that form whose first ``value_dim`` channels are the values as well (latent attention). The last row takes the writes of
pad rows. Softmax is torch's scaled_dot_product_attention, which computes it in fp32. Entries of the cache beyond a
row's last position may hold anything, NaN included: they are replaced, not weighted by zero.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

Cache = tuple[torch.Tensor, ...]


def step(
    q: torch.Tensor,
    new: Cache,
    cache: Cache,
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_bound: int,
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    """T tokens per row. Reads no device value on the host.

    Args:
        q: [rows, T, heads, head_dim]. new: per tensor of the cache [rows, T, kv_heads, head_dim], written to it first.
        slots: int [rows], negative is padding. positions: int64 [rows, T].
        kv_bound: exclusive upper bound of positions. value_dim: channels of a value.

    Returns:
        [rows, T, heads, value_dim]; zeros in pad rows.
    """
    pad = slots < 0
    rows = torch.where(pad, cache[0].shape[0] - 1, slots).long()
    for stored, tokens in zip(cache, new, strict=True):
        stored[rows[:, None], positions] = tokens
    key_positions = torch.arange(kv_bound, device=q.device)
    seen = key_positions <= positions[..., None]  # [rows, T, kv_bound]
    written = seen[:, -1, :, None, None]
    kept = [torch.where(written, t[rows, :kv_bound], 0).transpose(1, 2) for t in cache]
    out = scaled_dot_product_attention(
        q.transpose(1, 2), kept[0], kept[-1][..., :value_dim], attn_mask=seen[:, None], scale=scale, enable_gqa=True
    )
    return torch.where(pad[:, None, None, None], 0, out.transpose(1, 2))


def scan(
    q: torch.Tensor,
    new: Cache,
    cache: Cache,
    slots: list[int],
    starts: list[int],
    cu_seqlens: list[int],
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    """Packed prompts, one sequence after another.

    Args:
        q: [tokens, heads, head_dim]. new: per tensor of the cache [tokens, kv_heads, head_dim], written to it first.
        slots, starts: per sequence, its slot and the position of its first token.
        cu_seqlens: tokens of sequence i are cu_seqlens[i] .. cu_seqlens[i + 1]. value_dim: channels of a value.

    Returns:
        [tokens, heads, value_dim].
    """
    out = q.new_empty(*q.shape[:2], value_dim)
    for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        span = slice(cu_seqlens[i], cu_seqlens[i + 1])
        length = span.stop - span.start
        end = start + length
        for stored, tokens in zip(cache, new, strict=True):
            stored[slot, start:end] = tokens[span]
        kept = [t[slot, :end].transpose(0, 1)[None] for t in cache]
        mask = None
        if start > 0:
            mask = torch.arange(end, device=q.device) <= torch.arange(start, end, device=q.device)[:, None]
        result = scaled_dot_product_attention(
            q[span].transpose(0, 1)[None],
            kept[0],
            kept[-1][..., :value_dim],
            attn_mask=mask,
            is_causal=start == 0,
            scale=scale,
            enable_gqa=True,
        )
        out[span] = result[0].transpose(0, 1)
    return out
