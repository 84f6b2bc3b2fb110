"""Independent oracles: the plain recurrences, one token after another, without slots, rings or windows, in any dtype.

They share no code with the ReplaySSM form and are written with other primitives. Every function returns the outputs of
all tokens and the final state, computed in the dtype of the state that it is given.
"""

from __future__ import annotations

import math

import torch


def mamba2_recurrence(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2: state [rows, H, P, N], x and z [rows, T, H, P], dt [rows, T, H] raw, B and C [rows, T, G, N].

    A and dt_bias are [H], D is [H] or [H, P].
    Returns y [rows, T, H, P] and the state after the last token.
    """
    kind = state.dtype
    per_group = x.shape[2] // B.shape[2]
    x, dt, A, B, C = (u.to(kind) for u in (x, dt, A, B, C))
    B, C = (torch.repeat_interleave(u, per_group, dim=2) for u in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias.to(kind)
    dt = torch.logaddexp(dt, torch.zeros_like(dt)) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_min, max=dt_max)
    outputs = []
    for t in range(x.shape[1]):
        gain = torch.exp(dt[:, t] * A)
        state = torch.einsum("bh,bhpn->bhpn", gain, state) + torch.einsum(
            "bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t]
        )
        y = torch.einsum("bhpn,bhn->bhp", state, C[:, t])
        if D is not None:
            y = y + D.to(kind).reshape(D.shape[0], -1) * x[:, t]
        if z is not None:
            y = y * torch.nn.functional.silu(z[:, t].to(kind))
        outputs.append(y)
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x), state


def gated_delta_recurrence(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GDN and KDA: state [rows, HV, V, K], q and k [rows, T, HK, K], v [rows, T, HV, V], beta [rows, T, HV].

    g: log-decay [rows, T, HV] (GDN) or [rows, T, HV, K] (KDA). scale: of q, K^-0.5 by default.
    Returns o [rows, T, HV, V] and the state after the last token.
    """
    kind = state.dtype
    q, k, v, g, beta = (u.to(kind) for u in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (u * torch.rsqrt(u.pow(2).sum(-1, keepdim=True) + 1e-6) for u in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (torch.repeat_interleave(u, v.shape[2] // u.shape[2], dim=2) for u in (q, k))
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    outputs = []
    for t in range(v.shape[1]):
        state = state * torch.exp(g[:, t]).unsqueeze(-2)
        held = torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        correction = beta[:, t].unsqueeze(-1) * (v[:, t] - held)
        state = state + torch.einsum("bhv,bhk->bhvk", correction, k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), state


def delta_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    gate: str = "softplus",
    lower_bound: float = -5.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta of GDN (a [..., HV], dt_bias [HV]) or KDA (a [..., HV, K], dt_bias [HV, K]), in the dtype of ``a``."""
    rate = torch.exp(A_log.to(a.dtype))
    if dt_bias.dim() == 2:
        rate = rate.unsqueeze(-1)
    shifted = a + dt_bias.to(a.dtype)
    if gate == "bounded":
        g = lower_bound * torch.sigmoid(rate * shifted)
    else:
        g = -rate * torch.logaddexp(shifted, torch.zeros_like(shifted))
    return g, torch.sigmoid(b.to(a.dtype))


def causal_conv(
    history: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution of x [rows, T, C] behind the inputs history [rows, kernel-1, C]; weight [C, kernel].

    Returns y [rows, T, C] in the dtype of ``history`` and the last kernel-1 inputs.
    """
    kind, taps = history.dtype, weight.shape[1] - 1
    inputs = torch.cat([history, x.to(kind)], dim=1)
    y = torch.nn.functional.conv1d(
        inputs.transpose(1, 2),
        weight.to(kind).unsqueeze(1),
        None if bias is None else bias.to(kind),
        groups=weight.shape[0],
    ).transpose(1, 2)
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    return y, inputs[:, inputs.shape[1] - taps :]
