"""Layers that several hybrids use, and their initialisation. All norms and recurrences run in fp32 (or float64)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: Steps dt are drawn log-uniformly from this range, as Mamba-2 and Gated DeltaNet start.
DT_MIN, DT_MAX = 1e-3, 1e-1
A_MIN, A_MAX = 1.0, 16.0
L2_EPS = 1e-6


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32, or unchanged when it is float64 already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class RMSNorm(nn.Module):
    """x [..., c] / rms(x) * weight, or * (1 + weight) with ``offset`` (Qwen's form, whose weight starts at 0)."""

    def __init__(self, channels: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels) if offset else torch.ones(channels))
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = wide(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * (1.0 + self.weight if self.offset else self.weight)


class GatedGroupNorm(nn.Module):
    """Mamba-2's output norm: gate first, then RMS over each of ``groups`` equal parts. y, z [..., c]."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.groups = groups
        self.eps = eps

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gated = (wide(y) * F.silu(wide(z))).unflatten(-1, (self.groups, -1))
        gated = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return gated.flatten(-2) * self.weight


class NormThenGate(nn.Module):
    """The delta rules' output norm: RMS over each head's value channels, then the activated gate. o, z [..., v]."""

    def __init__(self, channels: int, eps: float, activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps
        self.activation = activation

    def forward(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        o = wide(o)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps)
        return o * self.weight * self.activation(wide(z))


class SwiGLU(nn.Module):
    """down(silu(gate u) * up u)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(u)) * self.up_proj(u))


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal softmax attention, scale 1/sqrt(d). q [b, t, hq, d], k and v [b, t, hkv, d] -> [b, t, hq, d]."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    dtype = v.dtype
    out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v, is_causal=True)
    return out.transpose(1, 2)


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x [..., c] over its length, with 1e-6 inside the root."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def rotary_tables(tokens: int, channels: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, channels] fp32 for positions 0..tokens-1; the two halves of the channels are equal."""
    inverse = theta ** (-torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels)
    angle = torch.arange(tokens, device=device, dtype=torch.float32).unsqueeze(-1) * inverse
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first channels of x [b, t, h, d] by cos, sin [t, r]; channels r.. stay as they are."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cos.unsqueeze(1) + swapped * sin.unsqueeze(1), rest], dim=-1)


def draw_dt_bias(heads: int) -> torch.Tensor:
    """[heads] biases whose softplus is log-uniform in [DT_MIN, DT_MAX]."""
    dt = torch.empty(heads).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
    return dt + torch.log(-torch.expm1(-dt))


def draw_a_log(heads: int) -> torch.Tensor:
    """[heads] logarithms of -A, with -A uniform in [A_MIN, A_MAX]."""
    return torch.empty(heads).uniform_(A_MIN, A_MAX).log()


def draw_weights(model: nn.Module, config: dict[str, Any], out_names: tuple[str, ...]) -> None:
    """Draw every matrix from N(0, 1/(4 fan_in)), those that write to the residual stream smaller by sqrt(2 layers).

    Convolutions keep torch's uniform start with zero bias; vectors (norms, D, dt_bias, A_log) are set where they are
    made. ``out_names`` are the last module names of the residual writers.
    """
    shrink = 1.0 / math.sqrt(2.0 * config["num_hidden_layers"])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = 0.5 / math.sqrt(module.in_features)
            nn.init.normal_(module.weight, std=std * (shrink if name.rsplit(".", 1)[-1] in out_names else 1.0))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5 / math.sqrt(module.embedding_dim))
        elif isinstance(module, nn.Conv1d) and module.bias is not None:
            nn.init.zeros_(module.bias)
