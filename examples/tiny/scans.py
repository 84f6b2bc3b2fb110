"""Chunked, differentiable forms of the recurrences, and the sequential forms they are checked against.

A chunk of C tokens is computed with matrix products; only the state is carried from chunk to chunk. Everything is
computed in the dtype of the inputs (fp32 in training, float64 in the tests); callers keep autocast off around it.
Formulas and symbols: docs/math.md. Shapes: b rows, t tokens, h heads, p headdim / v value dim, n dstate / k key dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64
BLOCK = 8


def pairwise_decay(log_decay: torch.Tensor) -> torch.Tensor:
    """Decay from token j to token i inside a chunk: exp(c_i - c_j) for j <= i, else 0, with c the cumulative sum.

    log_decay [..., C] holds values <= 0; returns [..., C, C]. Differences above the diagonal are masked before the
    exponential, so neither it nor its gradient overflows.
    """
    total = log_decay.cumsum(-1)
    difference = total.unsqueeze(-1) - total.unsqueeze(-2)
    size = log_decay.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    return difference.masked_fill(future, float("-inf")).exp()


def _chunks(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """[b, t, h, ...] -> [b, h, z, chunk, ...] with zero rows behind the last token."""
    tokens = tensor.shape[1]
    missing = -tokens % chunk
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
    return tensor.unflatten(1, (-1, chunk)).movedim(3, 1)


def mamba2_chunked(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Mamba-2 over whole sequences that start from a zero state.

    x [b, t, h, p], dt [b, t, h] after softplus, A [h] < 0, B and C [b, t, g, n] with g dividing h, D [h].
    Returns y [b, t, h, p].
    """
    tokens, heads = x.shape[1], x.shape[2]
    repeat = heads // B.shape[2]
    xs, dts = _chunks(x * dt.unsqueeze(-1), chunk), _chunks(dt * A, chunk)  # [b, h, z, c, p], [b, h, z, c]
    Bs, Cs = _chunks(B, chunk), _chunks(C, chunk)  # [b, g, z, c, n]
    scores = (Cs @ Bs.transpose(-1, -2)).repeat_interleave(repeat, dim=1)  # [b, h, z, c, c]
    inside = (scores * pairwise_decay(dts)) @ xs
    total = dts.cumsum(-1)
    to_end = (total[..., -1:] - total).exp()
    Bh, Ch = Bs.repeat_interleave(repeat, dim=1), Cs.repeat_interleave(repeat, dim=1)
    added = (xs * to_end.unsqueeze(-1)).transpose(-1, -2) @ Bh  # [b, h, z, p, n]: what each chunk adds
    between = pairwise_decay(total[..., -1])  # [b, h, z, z]: from the end of chunk j to the end of chunk i
    ends = torch.einsum("bhij,bhjpn->bhipn", between, added)
    starts = torch.cat([torch.zeros_like(ends[:, :, :1]), ends[:, :, :-1]], dim=2)
    carried = (Ch * total.exp().unsqueeze(-1)) @ starts.transpose(-1, -2)
    y = (inside + carried).movedim(1, 3).flatten(1, 2)[:, :tokens]
    return y + x * D.unsqueeze(-1)


def mamba2_sequential(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor
) -> torch.Tensor:
    """The same function as :func:`mamba2_chunked`, one token after the other."""
    repeat = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeat, dim=2), C.repeat_interleave(repeat, dim=2)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    out = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        out.append((state @ C[:, t].unsqueeze(-1)).squeeze(-1) + D.unsqueeze(-1) * x[:, t])
    return torch.stack(out, dim=1)


def gated_delta_chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Gated delta rule over whole sequences that start from a zero state.

    q (scaled) and k (length 1) [b, t, h, k], v [b, t, h, v], g [b, t, h] <= 0, beta [b, t, h]; key heads are already
    repeated to the h value heads. Returns o [b, t, h, v].

    Inside a chunk the corrected deltas d solve a unit lower triangular system:
    (I + M) d = beta (v - e^c S0' k), M_ij = beta_i (k_i . k_j) e^(c_i - c_j) for j < i, S0 the chunk's first state.
    """
    tokens = q.shape[1]
    qs, ks, vs = _chunks(q, chunk), _chunks(k, chunk), _chunks(v, chunk)  # [b, h, z, c, k or v]
    gs, betas = _chunks(g, chunk), _chunks(beta, chunk).unsqueeze(-1)
    total = gs.cumsum(-1)
    decay = pairwise_decay(gs)
    system = (betas * (ks @ ks.transpose(-1, -2)) * decay).tril(-1)
    right = torch.cat([betas * vs, betas * total.exp().unsqueeze(-1) * ks], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    to_end = ks * (total[..., -1:] - total).exp().unsqueeze(-1)
    to_end = to_end.transpose(-1, -2)  # [b, h, z, k, c]
    starts, deltas = _carry(own, from_state, to_end, total[..., -1].exp()[..., None, None])
    inside = ((qs @ ks.transpose(-1, -2)) * decay) @ deltas
    carried = (qs * total.exp().unsqueeze(-1)) @ starts
    return (inside + carried).movedim(1, 3).flatten(1, 2)[:, :tokens]


def channel_scores(left: list[torch.Tensor], keys: torch.Tensor, total: torch.Tensor, block: int) -> list[torch.Tensor]:
    """For each tensor of ``left``: left_i . (e^(c_i - c_j) o keys_j) for j <= i, else 0, c = ``total``.

    left, keys, total [..., C, k] -> [..., C, C] each; ``block`` divides C. Every exponent is <= 0: tokens of one block
    are paired channel by channel, tokens of different blocks meet at the later block's start.
    """
    size = total.shape[-2]
    count = size // block
    c, k = (x.unflatten(-2, (count, block)) for x in (total, keys))
    start = F.pad(c[..., :-1, -1, :], (0, 0, 1, 0))  # [..., n, k]: c just before each block
    earlier = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril(-1)[..., None, None]
    to_start = (start[..., :, None, None, :] - c[..., None, :, :, :]).masked_fill(~earlier, float("-inf")).exp()
    far = (to_start * k[..., None, :, :, :]).flatten(-3, -2)  # [..., n, C, k]
    future = torch.ones(block, block, dtype=torch.bool, device=keys.device).triu(1)[..., None]
    pairwise = (c.unsqueeze(-2) - c.unsqueeze(-3)).masked_fill(future, float("-inf")).exp()
    near = pairwise * k.unsqueeze(-3)  # [..., n, block, block, k]
    since_start = (c - start.unsqueeze(-2)).exp()
    diagonal = torch.eye(count, dtype=keys.dtype, device=keys.device)[:, None, :, None]
    out = []
    for rows in left:
        r = rows.unflatten(-2, (count, block))
        between = (r * since_start) @ far.transpose(-1, -2)  # [..., n, block, C]
        inside = (near @ r.unsqueeze(-1)).squeeze(-1)  # [..., n, block, block]
        out.append((between + (inside.unsqueeze(-2) * diagonal).flatten(-2)).flatten(-3, -2))
    return out


def kimi_delta_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int = CHUNK,
    block: int = BLOCK,
) -> torch.Tensor:
    """:func:`gated_delta_chunked` with a log-decay per key channel: g [b, t, h, k] <= 0, everything else the same."""
    tokens = q.shape[1]
    qs, ks, vs = _chunks(q, chunk), _chunks(k, chunk), _chunks(v, chunk)  # [b, h, z, c, k or v]
    gs, betas = _chunks(g, chunk), _chunks(beta, chunk).unsqueeze(-1)
    total = gs.cumsum(-2)
    key_scores, query_scores = channel_scores([betas * ks, qs], ks, total, block)
    right = torch.cat([betas * vs, betas * total.exp() * ks], dim=-1)
    solved = torch.linalg.solve_triangular(key_scores.tril(-1), right, upper=False, unitriangular=True)
    own, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    to_end = (ks * (total[..., -1:, :] - total).exp()).transpose(-1, -2)  # [b, h, z, k, c]
    starts, deltas = _carry(own, from_state, to_end, total[..., -1, :].exp().unsqueeze(-1))
    out = query_scores @ deltas + (qs * total.exp()) @ starts
    return out.movedim(1, 3).flatten(1, 2)[:, :tokens]


def _carry(
    own: torch.Tensor, from_state: torch.Tensor, to_end: torch.Tensor, chunk_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """State at each chunk's start [b, h, z, k, v] and deltas [b, h, z, c, v], from a zero state.

    A chunk's deltas are own [b, h, z, c, v] - from_state [b, h, z, c, k] S; then S <- chunk_decay S + to_end deltas.
    """
    state = own.new_zeros(*own.shape[:2], from_state.shape[-1], own.shape[-1])
    starts, deltas = [], []
    # unbind, not indexing: its gradient is one stack instead of one full-size tensor per chunk.
    parts = zip(own.unbind(2), from_state.unbind(2), to_end.unbind(2), chunk_decay.unbind(2), strict=True)
    for chunk_own, chunk_from_state, chunk_to_end, decay_z in parts:
        delta = chunk_own - chunk_from_state @ state
        starts.append(state)
        deltas.append(delta)
        state = decay_z * state + chunk_to_end @ delta
    return torch.stack(starts, dim=2), torch.stack(deltas, dim=2)


def gated_delta_sequential(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The same functions as the two above, one token after the other; g [b, t, h] or [b, t, h, k]."""
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    out = []
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        read = (state.transpose(-1, -2) @ k[:, t].unsqueeze(-1)).squeeze(-1)
        delta = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        state = state + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out.append((state.transpose(-1, -2) @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, dim=1)


def causal_conv_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Depthwise causal convolution and SiLU. x [b, t, c], weight [c, 1, taps] (last tap: newest), bias [c] or None."""
    tokens, taps = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    total = sum(padded[:, i : i + tokens] * weight[:, 0, i] for i in range(taps))
    assert isinstance(total, torch.Tensor)
    return F.silu(total if bias is None else total + bias)
