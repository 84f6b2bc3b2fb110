"""Gated DeltaNet (GDN) and Kimi Delta Attention (KDA) in ReplaySSM form: step, scan and the exact fold.

    kn = k / sqrt(sum k^2 + 1e-6), qn likewise times scale;  beta = sigmoid(b)
    g = -exp(A_log) softplus(a + dt_bias)            KDA "bounded": g = bound * sigmoid(exp(A_log) (a + dt_bias))
    S <- exp(g) S;  d = beta (v - S kn);  S <- S + d kn^T;  o = S qn          one row of the fold; S is [V, K]
GDN has one g per head, KDA one per key channel (decay along K). Here g always has a last axis K' of 1 or K, so both are
one code. A step reads o_t without building S_t, from the checkpoint S and the rows j before t:
    read(u) = S (exp(g_1 + ... + g_t) o u) + sum_j d_j ((e_j o kn_j) . u),     e_j = exp(g_{j+1} + ... + g_t)
    d_t = beta_t (v_t - read(kn_t));   o_t = read(qn_t) + d_t (kn_t . qn_t)
Solving d_t token by token is the forward substitution of the unit-lower-triangular system of a chunk. Every exponent is
a plain sum of g <= 0, so nothing overflows at any decay. The fold recomputes d from raw k and v; stored d rows serve
reads only.
"""

from __future__ import annotations

import math

import torch

from ..errors import require
from ..pool import StatePool
from ..spec import GATED_DELTA, KIMI_DELTA, RecurrenceSpec
from .arith import decay_since, dot, heads_from_groups, sigmoid, softplus
from .checks import check_gated_delta_inputs, compute_dtype, integers, live_rows, recurrent_spec, step_tokens
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

NORM_EPS = 1e-6


@torch.no_grad()
def gated_delta_step(
    pool: StatePool,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    scale: float | None = None,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decoding step of T tokens per row; the slots change in place.

    Args:
        pool: slots of a gated_delta or kimi_delta spec. slots: int [rows]; negative is padding, no slot twice.
        q, k: act_dtype [rows, T, HK, K], 1 <= T <= spec_len, before normalisation. v: act_dtype [rows, T, HV, V].
        a: floating [rows, T, HV], KDA [rows, T, HV, K], before the gate. b: floating [rows, T, HV], before the sigmoid.
        A_log: [HV]. dt_bias: [HV], KDA [HV, K]. scale: of the normalised q, K^-0.5 by default.
        accepted: int [rows]: how many of the previous step's tokens stay; -1, and None for all rows, means all.

    Returns:
        o, act_dtype [rows, T, HV, V]; zeros in padding rows.

    Raises:
        ReplayError: a shape, dtype, device or slot that is not allowed.
    """
    # 0. Check; keep the live rows; convert to the compute type, gates applied.
    spec = recurrent_spec(pool, GATED_DELTA, KIMI_DELTA)
    rows = live_rows(pool, slots)
    tokens = step_tokens(spec, "q", q, 4)
    check_gated_delta_inputs(pool, spec, q, k, v, a, b, A_log, dt_bias, rows=rows.total, T=tokens)
    if accepted is not None:
        accepted = rows.take(integers(pool, "accepted", accepted, rows.total))
    compute = compute_dtype(spec)
    q, k, v, a, b = (rows.take(u).to(compute) for u in (q, k, v, a, b))
    g, beta = _gate(spec, a, A_log, dt_bias), sigmoid(b)
    q = q * _inverse_norm(spec, q)[..., None] * _scale(spec, scale)
    rnorm = _inverse_norm(spec, k)

    # 1, 2. Commit the previous step's accepted tokens; fold where the ring could not hold the next ones.
    cursor = begin_step(pool, rows.slots, tokens, accepted, lambda *ring: fold_gated_delta(pool, *ring))
    # 3. Outputs, and d of every token, from the state, the live rows and this step's tokens.
    o, d = _read(pool, spec, rows.slots, cursor, q, k * rnorm[..., None], v, g, beta)
    # 4. The step's tokens become the pending rows.
    ring_g = g if spec.kind == KIMI_DELTA else g[..., 0]
    # d past fp16's range becomes its largest number: outputs read it, and none of them may turn to inf.
    limit = torch.finfo(pool["ring_d"].dtype).max
    d = d.clamp(-limit, limit)
    append_rows(
        pool, rows.slots, cursor, ring_k=k, ring_k_rnorm=rnorm, ring_v=v, ring_d=d, ring_g=ring_g, ring_beta=beta
    )
    return rows.spread(o.to(pool["ring_v"].dtype))


@torch.no_grad()
def gated_delta_scan(
    pool: StatePool,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    scale: float | None = None,
    has_initial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed prompts, token by token; leaves each final state in its slot with an empty ring.

    Args:
        As gated_delta_step with [tokens, ...] in place of [rows, T, ...]; slots: int [rows].
        cu_seqlens: int [rows + 1]; sequence i is tokens cu_seqlens[i] .. cu_seqlens[i+1].
        has_initial: bool [rows] or None: start from what the slot holds (its ring is folded first), not from zero.

    Returns:
        o, act_dtype [tokens, HV, V]; zeros for sequences whose slot is negative.

    Raises:
        ReplayError: as gated_delta_step.
    """
    spec = recurrent_spec(pool, GATED_DELTA, KIMI_DELTA)
    tokens = len(q) if isinstance(q, torch.Tensor) and q.dim() else 0
    packed = packed_sequences(pool, slots, tokens, cu_seqlens, has_initial)
    check_gated_delta_inputs(pool, spec, q, k, v, a, b, A_log, dt_bias, tokens=tokens)
    compute = compute_dtype(spec)
    g, beta = _gate(spec, a.to(compute), A_log, dt_bias), sigmoid(b.to(compute))
    state = initial_state(pool, packed, lambda *ring: fold_gated_delta(pool, *ring))
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for active, place in packed.steps():
        q_t, k_t, v_t = (u[place].to(compute) for u in (q, k, v))  # [active, heads, ...]
        q_t = q_t * _inverse_norm(spec, q_t)[..., None] * _scale(spec, scale)
        k_t = k_t * _inverse_norm(spec, k_t)[..., None]
        q_t, k_t = (heads_from_groups(u[:, None], spec.heads_per_group)[:, 0] for u in (q_t, k_t))
        state[:active] = _fold_row(state[:active], g[place], k_t, v_t, beta[place])
        out[place] = dot(state[:active], q_t[:, :, None, :]).to(out.dtype)
    store_state(pool, packed.slots, state)
    store_cursor(pool, packed.slots, empty_cursor(spec, packed.slots))
    return out


def fold_gated_delta(
    pool: StatePool, slots: torch.Tensor, origin: torch.Tensor, count: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """``state`` [n, HV, V, K] with the first ``count`` [n] ring rows folded in, oldest first, in the compute type."""
    spec = recurrent_spec(pool, GATED_DELTA, KIMI_DELTA)
    rows = oldest_rows(pool, origin, count)
    names = ("ring_k", "ring_k_rnorm", "ring_v", "ring_g", "ring_beta")
    k, rnorm, v, g, beta = (load_rows(pool, name, slots, rows) for name in names)
    k = heads_from_groups(k * rnorm[..., None], spec.heads_per_group)
    g = g if spec.kind == KIMI_DELTA else g[..., None]
    return fold_ring(count, state, lambda j, S: _fold_row(S, g[:, j], k[:, j], v[:, j], beta[:, j]))


def _fold_row(
    state: torch.Tensor, g: torch.Tensor, kn: torch.Tensor, v: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token: state [n, HV, V, K], g [n, HV, K'], kn [n, HV, K], v [n, HV, V], beta [n, HV]."""
    state = torch.exp(g)[:, :, None, :] * state
    d = beta[..., None] * (v - dot(state, kn[:, :, None, :]))
    return state + d[..., None] * kn[:, :, None, :]


def _read(
    pool: StatePool,
    spec: RecurrenceSpec,
    slots: torch.Tensor,
    cursor: Cursor,
    q: torch.Tensor,
    kn: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and d of every token of the step, [n, T, HV, V] each; q, kn normalised, q scaled, g [n, T, HV, K']."""
    # 1. All rows that a token can see: J of history (zeros in dead ones), then the step's own. d is filled in below.
    rows, live = history_rows(pool, cursor, v.shape[1])
    J, per_group = rows.shape[1], spec.heads_per_group
    past = {name: load_live(pool, name, slots, rows, live) for name in ("ring_k", "ring_k_rnorm", "ring_d", "ring_g")}
    kn = torch.cat([past["ring_k"] * past["ring_k_rnorm"][..., None], kn], dim=1)
    q, kn = heads_from_groups(q, per_group), heads_from_groups(kn, per_group)
    g = torch.cat([past["ring_g"] if spec.kind == KIMI_DELTA else past["ring_g"][..., None], g], dim=1)
    d = torch.cat([past["ring_d"], torch.zeros_like(v)], dim=1).permute(0, 2, 3, 1).contiguous()  # [n, HV, V, rows]
    # 2. since[j]: log-decay from just after row j until now; total: from the checkpoint until now.
    since, total = decay_since(g, J)
    state = read_state(pool, slots)
    out = []
    for t in range(J, g.shape[1]):
        # 3. Token t decays everything before it.
        since[:, :t] += g[:, t, None]
        total = total + g[:, t]
        start = torch.exp(total)
        keys = torch.exp(since[:, :t]) * kn[:, :t]  # [n, rows, HV, K]
        q_t, k_t = q[:, t - J], kn[:, t]
        # 4. What the state holds for k_t and for q_t: the checkpoint's part and the rows' part.
        held, read = (
            dot(state, (start * u)[:, :, None, :])
            + dot(d[..., :t], dot(keys, u[:, None]).transpose(1, 2)[:, :, None, :])
            for u in (k_t, q_t)
        )
        # 5. The correction d of this token, and its output.
        d_t = beta[:, t - J, :, None] * (v[:, t - J] - held)
        d[..., t] = d_t
        out.append(read + d_t * dot(k_t, q_t)[..., None])
    return torch.stack(out, dim=1), d[..., J:].permute(0, 3, 1, 2)


def _gate(spec: RecurrenceSpec, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """g <= 0 in the compute type, [..., HV, K'] with K' = 1 (GDN) or K (KDA)."""
    rate = torch.exp(A_log.to(a.dtype))
    a = a + dt_bias.to(a.dtype)
    if spec.kind == GATED_DELTA:
        return (-rate * softplus(a))[..., None]
    if spec.gate == "bounded":
        return spec.gate_lower_bound * sigmoid(rate[:, None] * a)
    return -rate[:, None] * softplus(a)


def _inverse_norm(spec: RecurrenceSpec, u: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(sum u^2 + 1e-6) over the last axis; ones without qk_l2norm."""
    if not spec.qk_l2norm:
        return torch.ones_like(u[..., 0])
    return 1.0 / torch.sqrt(dot(u, u) + NORM_EPS)


def _scale(spec: RecurrenceSpec, scale: float | None) -> float:
    if scale is None:
        return 1.0 / math.sqrt(spec.dstate)
    number = isinstance(scale, (int, float)) and math.isfinite(scale)
    require(number, f"scale is {scale!r}; it must be a finite number, or None for dstate**-0.5")
    return float(scale)
