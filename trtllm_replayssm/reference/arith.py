"""Arithmetic whose result for one row does not depend on the other rows, on strides or on the place in memory.

torch's own sigmoid, softplus, silu, matmul and sums over outer axes take vector or scalar code paths by length, stride
and batch size, and these differ in the last bit. Here everything is built from exp, log1p, the four operations and
sums over a dense last axis, which do not. The fold must be exact to the bit, so the reference uses nothing else.
"""

from __future__ import annotations

import torch


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of a * b over the last axis; the other axes broadcast."""
    return (a * b).contiguous().sum(-1)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)); 0 where exp(-x) overflows."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), and x itself above 20."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def heads_from_groups(value: torch.Tensor, heads_per_group: int) -> torch.Tensor:
    """[n, tokens, G, ...] to [n, tokens, H, ...]: head h takes group h // heads_per_group."""
    return value if heads_per_group == 1 else value.repeat_interleave(heads_per_group, dim=2)


def decay_since(log_decay: torch.Tensor, history: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay that the history brings, before the step's first token.

    log_decay: [n, H, rows] (or [n, rows, H, K], then rows is axis 1), the first ``history`` rows being the ring's.
    Returns ``since``, same shape: the sum of the history rows after row j (0 from the newest history row on), and
    ``total``, the sum of all of them. Sums of terms <= 0 only, never a difference.
    """
    axis = 1 if log_decay.dim() == 4 else -1
    suffix = log_decay.narrow(axis, 0, history).flip(axis).cumsum(axis).flip(axis)
    since = torch.zeros_like(log_decay)
    if history > 1:
        since.narrow(axis, 0, history - 1).copy_(suffix.narrow(axis, 1, history - 1))
    total = suffix.select(axis, 0) if history else torch.zeros_like(log_decay.select(axis, 0))
    return since, total
