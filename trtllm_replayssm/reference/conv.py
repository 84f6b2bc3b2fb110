"""The depthwise causal convolution in front of a recurrence, with rollback of rejected tokens.

    y_t[c] = act(bias[c] + sum_i w[c, i] u_{t-(kernel-1)+i}[c])          u raw inputs, w[:, kernel-1] meets the newest
A slot keeps kernel-1 columns of history and the last step's raw inputs behind them: after ``accepted`` = a of those,
the history is columns a .. a+kernel-2. The kept columns are the inputs themselves, so a restart sees the same numbers.
"""

from __future__ import annotations

import torch

from ..pool import StatePool
from ..spec import ConvSpec
from .arith import silu
from .checks import compute_dtype, conv_spec, expect, integers, live_rows, step_tokens
from .lifecycle import copy_slots
from .packed import packed_sequences
from .slots import accepted_tokens

PENDING = 2  # index of pending_len in layout.CURSOR_WORDS


@torch.no_grad()
def conv_step(
    pool: StatePool,
    slots: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """T tokens per row; the slots change in place.

    Args:
        pool: slots of a ConvSpec. slots: int [rows]; negative is padding, no slot twice.
        x: act_dtype [rows, T, C], 1 <= T <= spec_len. weight: [C, kernel]. bias: [C] or None.
        accepted: int [rows]: how many of the previous step's tokens stay; -1, and None for all rows, means all.

    Returns:
        y, act_dtype [rows, T, C]; zeros in padding rows.

    Raises:
        ReplayError: a shape, dtype, device or slot that is not allowed.
    """
    spec = conv_spec(pool)
    rows = live_rows(pool, slots)
    tokens = step_tokens(spec, "x", x, 3)
    expect(pool, "x", x, spec.act_dtype, rows=rows.total, T=tokens, C=spec.channels)
    _check_weights(pool, spec, weight, bias)
    if accepted is not None:
        accepted = rows.take(integers(pool, "accepted", accepted, rows.total))
    # 1. Slide the window over the accepted tokens; the step's inputs follow it.
    history = _history(pool, rows.slots, accepted)
    window = torch.cat([history, rows.take(x)], dim=1)  # [n, kernel-1+T, C]
    # 2. Outputs.
    y = _convolve(spec, [window[:, i : i + tokens] for i in range(spec.kernel)], weight, bias)
    # 3. Keep the window; the step's inputs become the pending ones.
    _store(pool, rows.slots, window, tokens)
    return rows.spread(y)


@torch.no_grad()
def conv_scan(
    pool: StatePool,
    slots: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor,
    has_initial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed prompts; leaves the last kernel-1 inputs of each (zeros in front of a short one) in its slot.

    Args:
        As conv_step with x [tokens, C]. cu_seqlens: int [rows + 1]; has_initial: bool [rows] or None: continue from the
        slot's history (all pending tokens accepted) where true, from zeros elsewhere.

    Returns:
        y, act_dtype [tokens, C]; zeros for sequences whose slot is negative.

    Raises:
        ReplayError: as conv_step.
    """
    spec = conv_spec(pool)
    tokens = len(x) if isinstance(x, torch.Tensor) and x.dim() else 0
    packed = packed_sequences(pool, slots, tokens, cu_seqlens, has_initial)
    expect(pool, "x", x, spec.act_dtype, tokens=tokens, C=spec.channels)
    _check_weights(pool, spec, weight, bias)
    taps, n = spec.kernel - 1, len(packed.lengths)
    # 1. Each sequence behind kernel-1 columns of its own history, all in one list of columns.
    lengths = torch.tensor(packed.lengths, dtype=torch.int64, device=x.device)
    ends = (lengths + taps).cumsum(0)
    first = ends - lengths  # column of each sequence's first token
    owner = torch.arange(n, device=x.device).repeat_interleave(lengths)
    offset = torch.arange(len(owner), device=x.device) - (lengths.cumsum(0) - lengths)[owner]
    source, place = packed.starts[owner] + offset, first[owner] + offset
    back = torch.arange(taps, device=x.device)
    columns = x.new_zeros(len(owner) + taps * n, spec.channels)
    columns[place] = x[source]
    resumes = packed.resumes.nonzero().squeeze(1)
    columns[(first[resumes, None] - taps + back)] = _history(pool, packed.slots[resumes], None)
    # 2. Outputs.
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out[source] = _convolve(spec, [columns[place - taps + i] for i in range(spec.kernel)], weight, bias)
    # 3. The last kernel-1 columns stay.
    _store(pool, packed.slots, columns[ends[:, None] - taps + back], 0)
    return out


def conv_materialize(pool: StatePool, src: torch.Tensor, count: torch.Tensor, dst: torch.Tensor) -> None:
    """Slot dst[i] := the window of slot src[i] after count[i] of its pending tokens, none pending.

    src, count, dst: int [n], with the rules of materialize (count -1: all; others clamped to what there is).

    Raises:
        ReplayError: a shape, dtype or slot that is not allowed.
    """
    conv_spec(pool)
    source, target = copy_slots(pool, src, dst)
    wanted = source.take(integers(pool, "count", count, source.total))
    _store(pool, target, _history(pool, source.slots, wanted), 0)


def conv_reset(pool: StatePool, slots: torch.Tensor) -> None:
    """A window of zeros and nothing pending. slots: int [n]; negative entries are skipped.

    Raises:
        ReplayError: not a convolution pool, or slots of a wrong dtype or shape, past the pool, or named twice.
    """
    spec = conv_spec(pool)
    chosen = live_rows(pool, slots).slots
    columns = pool["columns"]
    _store(pool, chosen, columns.new_zeros(len(chosen), spec.kernel - 1, spec.channels), 0)


def _history(pool: StatePool, slots: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
    """The kernel-1 inputs before the next token, act_dtype [n, kernel-1, C], oldest first."""
    pending = pool["cursor"][slots, 0, PENDING].long()
    start = accepted_tokens(accepted, pending)
    rows = start[:, None] + torch.arange(conv_spec(pool).kernel - 1, device=start.device)
    return pool["columns"][slots[:, None], rows]


def _store(pool: StatePool, slots: torch.Tensor, columns: torch.Tensor, pending: int) -> None:
    pool["columns"][slots, : columns.shape[1]] = columns
    cursor = torch.zeros(pool["cursor"].shape[-1], dtype=torch.int16, device=slots.device)
    cursor[PENDING] = pending
    pool["cursor"][slots] = cursor


def _convolve(
    spec: ConvSpec, taps: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Sum of tap i times weight[:, i], oldest first, bias, activation, one rounding. taps: kernel tensors [..., C]."""
    compute = compute_dtype(spec)
    w = weight.to(compute)
    y = taps[0].to(compute) * w[:, 0]
    for i in range(1, spec.kernel):
        y = y + taps[i].to(compute) * w[:, i]
    if bias is not None:
        y = y + bias.to(compute)
    return (silu(y) if spec.activation == "silu" else y).to(taps[0].dtype)


def _check_weights(pool: StatePool, spec: ConvSpec, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expect(pool, "weight", weight, None, C=spec.channels, kernel=spec.kernel)
    if bias is not None:
        expect(pool, "bias", bias, None, C=spec.channels)
