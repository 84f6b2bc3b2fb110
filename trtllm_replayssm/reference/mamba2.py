"""Mamba-2 in ReplaySSM form: step, scan and the exact fold.

    l_t = A dt_t                                        dt_t = clamp(softplus(dt_raw + dt_bias), dt_min, dt_max)
    S_t = exp(l_t) S_{t-1} + (dt_t x_t) B_t^T           one row of the fold
    y_t = S_t C_t + D x_t,  then * silu(z_t)
A step reads the same y_t without building S_t, from the checkpoint S and the rows j before and including t:
    y_t = exp(sum of all l) S C_t + sum_j dt_j exp(l_{j+1} + ... + l_t) (B_j . C_t) x_j
Every exponent is a plain sum of l <= 0, so nothing overflows and nothing cancels.
"""

from __future__ import annotations

import torch

from ..pool import StatePool
from ..spec import MAMBA2, RecurrenceSpec
from .arith import decay_since, dot, heads_from_groups, silu, softplus
from .checks import check_mamba2_inputs, compute_dtype, integers, live_rows, recurrent_spec, step_tokens
from .packed import initial_state, packed_sequences
from .slots import (
    Cursor,
    append_rows,
    begin_step,
    empty_cursor,
    fold_ring,
    history_rows,
    load_live,
    load_rows,
    oldest_rows,
    read_state,
    store_cursor,
    store_state,
)


@torch.no_grad()
def mamba2_step(
    pool: StatePool,
    slots: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decoding step of T tokens per row; the slots change in place.

    Args:
        pool: slots of a mamba2 spec. slots: int [rows]; negative is padding, no slot twice.
        x, z: act_dtype [rows, T, H, P], 1 <= T <= spec_len. B, C: act_dtype [rows, T, G, N].
        dt: floating [rows, T, H], before bias and softplus. dt_bias: [H]. D: [H] or [H, P].
        A: [H], 0 or negative and finite; values on a GPU are not looked at.
        accepted: int [rows]: how many of the previous step's tokens stay; -1, and None for all rows, means all.

    Returns:
        y, act_dtype [rows, T, H, P]; zeros in padding rows.

    Raises:
        ReplayError: a shape, dtype, device or slot that is not allowed, or a positive, infinite or NaN A on the CPU.
    """
    # 0. Check; keep the live rows; convert to the compute type.
    spec = recurrent_spec(pool, MAMBA2)
    rows = live_rows(pool, slots)
    tokens = step_tokens(spec, "x", x, 4)
    check_mamba2_inputs(pool, spec, x, dt, A, B, C, D, z, dt_bias, rows=rows.total, T=tokens)
    if accepted is not None:
        accepted = rows.take(integers(pool, "accepted", accepted, rows.total))
    compute = compute_dtype(spec)
    x, B, C = (rows.take(v).to(compute) for v in (x, B, C))
    dt = _time_step(spec, rows.take(dt).to(compute), dt_bias)
    A = A.to(compute)

    # 1, 2. Commit the previous step's accepted tokens; fold where the ring could not hold the next ones.
    cursor = begin_step(pool, rows.slots, tokens, accepted, lambda *ring: fold_mamba2(pool, A, *ring))
    # 3. Outputs from the state, the live rows and this step's tokens.
    y = _read(pool, spec, rows.slots, cursor, x, dt, A, B, C)
    y = _skip_and_gate(y, x, D, None if z is None else rows.take(z))
    # 4. The step's tokens become the pending rows.
    append_rows(pool, rows.slots, cursor, ring_x=x, ring_b=B, ring_dt=dt)
    return rows.spread(y.to(pool["ring_x"].dtype))


@torch.no_grad()
def mamba2_scan(
    pool: StatePool,
    slots: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    has_initial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed prompts, token by token; leaves each final state in its slot with an empty ring.

    Args:
        As mamba2_step with [tokens, ...] in place of [rows, T, ...]; slots: int [rows].
        cu_seqlens: int [rows + 1]; sequence i is tokens cu_seqlens[i] .. cu_seqlens[i+1].
        has_initial: bool [rows] or None: start from what the slot holds (its ring is folded first), not from zero.

    Returns:
        y, act_dtype [tokens, H, P]; zeros for sequences whose slot is negative.

    Raises:
        ReplayError: as mamba2_step.
    """
    spec = recurrent_spec(pool, MAMBA2)
    tokens = len(x) if isinstance(x, torch.Tensor) and x.dim() else 0
    packed = packed_sequences(pool, slots, tokens, cu_seqlens, has_initial)
    check_mamba2_inputs(pool, spec, x, dt, A, B, C, D, z, dt_bias, tokens=tokens)
    compute = compute_dtype(spec)
    A, dt = A.to(compute), _time_step(spec, dt.to(compute), dt_bias)
    state = initial_state(pool, packed, lambda *ring: fold_mamba2(pool, A, *ring))
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    per_group = spec.heads_per_group
    for active, place in packed.steps():
        x_t, dt_t, B_t, C_t = (v[place][:, None].to(compute) for v in (x, dt, B, C))  # [active, 1, heads, ...]
        B_t, C_t = (heads_from_groups(v, per_group) for v in (B_t, C_t))
        state[:active] = _fold_row(state[:active], dt_t[:, 0], A, x_t[:, 0], B_t[:, 0])
        y = dot(state[:active], C_t[:, 0, :, None, :])
        out[place] = _skip_and_gate(y, x_t[:, 0], D, None if z is None else z[place]).to(out.dtype)
    store_state(pool, packed.slots, state)
    store_cursor(pool, packed.slots, empty_cursor(spec, packed.slots))
    return out


def fold_mamba2(
    pool: StatePool,
    A: torch.Tensor,
    slots: torch.Tensor,
    origin: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """``state`` [n, H, P, N] with the first ``count`` [n] ring rows folded in, oldest first, in the compute type."""
    spec = recurrent_spec(pool, MAMBA2)
    rows = oldest_rows(pool, origin, count)
    x, B, dt = (load_rows(pool, name, slots, rows) for name in ("ring_x", "ring_b", "ring_dt"))
    B = heads_from_groups(B, spec.heads_per_group)
    return fold_ring(count, state, lambda j, S: _fold_row(S, dt[:, j], A, x[:, j], B[:, j]))


def _fold_row(state: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, x: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """exp(A dt) S + (dt x) B^T for one token: state [n, H, P, N], dt [n, H], x [n, H, P], B [n, H, N]."""
    decay = torch.exp(A * dt)
    return decay[..., None, None] * state + (dt[..., None] * x)[..., None] * B[..., None, :]


def _read(
    pool: StatePool,
    spec: RecurrenceSpec,
    slots: torch.Tensor,
    cursor: Cursor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> torch.Tensor:
    """S_t C_t of every token of the step, [n, T, H, P], without S_t."""
    # 1. All rows that a token can see: J of history (zeros in dead ones), then the step's own.
    rows, live = history_rows(pool, cursor, dt.shape[1])
    x, B, dt = (
        torch.cat([load_live(pool, name, slots, rows, live), step], dim=1)
        for name, step in (("ring_x", x), ("ring_b", B), ("ring_dt", dt))
    )
    J = rows.shape[1]
    x = x.permute(0, 2, 3, 1).contiguous()  # [n, H, P, rows]
    log_decay = (A * dt).transpose(1, 2)  # [n, H, rows]
    # 2. since[j]: log-decay from just after row j until now; total: from the checkpoint until now.
    since, total = decay_since(log_decay, J)
    state = read_state(pool, slots)
    out = []
    for t in range(J, dt.shape[1]):
        # 3. Token t decays everything before it.
        since[..., :t] += log_decay[..., t, None]
        total = total + log_decay[..., t]
        # 4. The checkpoint's part, and the rows' part.
        C_t = C[:, t - J]
        score = dot(B[:, : t + 1], C_t[:, None])  # [n, rows, G]
        score = heads_from_groups(score, spec.heads_per_group).transpose(1, 2)  # [n, H, rows]
        weight = dt[:, : t + 1].transpose(1, 2) * torch.exp(since[..., : t + 1]) * score
        C_t = heads_from_groups(C_t[:, None], spec.heads_per_group)[:, 0]
        y = torch.exp(total)[..., None] * dot(state, C_t[:, :, None, :])
        out.append(y + dot(weight[:, :, None, :], x[..., : t + 1]))
    return torch.stack(out, dim=1)


def _time_step(spec: RecurrenceSpec, dt: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if spec.dt_softplus:
        dt = softplus(dt)
    return dt.clamp(spec.dt_min, spec.dt_max)


def _skip_and_gate(y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    """y + D x, then * silu(z): y, x, z [..., H, P]."""
    if D is not None:
        y = y + (D[:, None] if D.dim() == 1 else D).to(y.dtype) * x
    return y if z is None else y * silu(z.to(y.dtype))
