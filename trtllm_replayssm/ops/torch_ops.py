"""TorchOps: runs a model on torch tensors, CPU or CUDA, over a ModelState."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from ..errors import ReplayError, require
from ..pool import torch_dtype
from ..runtime.state import SCAN, Batch, ModelState
from ..spec import KIMI_DELTA, require_choice
from . import torch_attention
from .base import Ops


class TorchOps(Ops[torch.Tensor]):
    """One forward pass: weights, the state that it advances, and the batch.

    Args:
        weights: tensors by name (models/decoder.py weight_shapes), on the state's device; those that take part in
            matrix products have the state's dtype.
        state: memory of the sequences. batch: the rows of this pass.
        impl: module with mamba2_scan, mamba2_step, gated_delta_scan, gated_delta_step, conv_scan and conv_step
            (default: the state's).

    Raises:
        ReplayError: the batch does not fit the state; later, a weight that is missing or has another dtype.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], state: ModelState, batch: Batch, *, impl: Any = None
    ) -> None:
        batch.check(state)
        self.weights = weights
        self.state = state
        self.batch = batch
        self.impl = state.impl if impl is None else impl
        self._act = torch_dtype(state.dtype)
        self._compute = torch.float64 if state.dtype == "float64" else torch.float32
        self._rotations: dict[tuple[int, float], tuple[torch.Tensor, torch.Tensor]] = {}
        self._host_rows: tuple[list[int], list[int], list[int]] | None = None

    def weight(self, name: str) -> torch.Tensor:
        """The weight ``name``. Raises ReplayError where there is none."""
        if name not in self.weights:
            raise ReplayError(f"weight {name} is missing")
        return self.weights[name]

    def embedding(self, ids: torch.Tensor, weight: str) -> torch.Tensor:
        table = self.weight(weight)
        require(table.dtype == self._act, f"weight {weight} is {table.dtype}; the state was made for {self._act}")
        return functional.embedding(ids.long(), table)

    def linear(self, x: torch.Tensor, weight: str, bias: str | None = None) -> torch.Tensor:
        return functional.linear(x, self.weight(weight), None if bias is None else self.weight(bias))

    def rms_norm(self, x: torch.Tensor, weight: str, eps: float, *, group_size: int | None = None) -> torch.Tensor:
        return self._normalised(x, weight, eps, group_size or x.shape[-1]).to(self._act)

    def rms_norm_gated(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: str,
        eps: float,
        *,
        group_size: int,
        activation: str = "silu",
    ) -> torch.Tensor:
        require_choice("activation", activation, ("silu", "sigmoid"))
        normalised, gate = self._normalised(x, weight, eps, group_size), gate.to(self._compute)
        return (normalised * (functional.silu(gate) if activation == "silu" else gate.sigmoid())).to(self._act)

    def _normalised(self, x: torch.Tensor, weight: str, eps: float, group_size: int) -> torch.Tensor:
        """rms_norm before rounding."""
        groups = x.to(self._compute).reshape(x.shape[0], -1, group_size)
        scale = self.weight(weight).to(self._compute).reshape(-1, group_size)
        inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        return (groups * inverse * scale).reshape(x.shape)

    def split(self, x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return list(x.split(list(sizes), dim=-1))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def silu_mul(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (functional.silu(gate.to(self._compute)) * x).to(self._act)

    def sigmoid_mul(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (gate.to(self._compute).sigmoid() * x).to(self._act)

    def relu2(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x).square()

    def rope(self, x: torch.Tensor, *, head_dim: int, rotary_dim: int, theta: float) -> torch.Tensor:
        cos, sin = self._rotation(rotary_dim, theta)
        heads = x.reshape(x.shape[0], -1, head_dim)
        first, second, rest = heads.split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([*(t.to(self._act) for t in turned), rest], dim=-1).reshape(x.shape)

    def _rotation(self, rotary_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [tokens, 1, rotary_dim / 2] of the batch's positions."""
        key = (rotary_dim, theta)
        if key not in self._rotations:
            exponents = torch.arange(0, rotary_dim, 2, dtype=self._compute, device=self.state.device) / rotary_dim
            angles = self.batch.positions.to(self._compute)[:, None] * theta**-exponents
            self._rotations[key] = (angles.cos()[:, None], angles.sin()[:, None])
        return self._rotations[key]

    def causal_conv(self, layer: int, x: torch.Tensor, weight: str, bias: str | None = None) -> torch.Tensor:
        pool, slots, batch = self.state.conv[layer], self.batch.slots, self.batch
        w, b = self.weight(weight), None if bias is None else self.weight(bias)
        if batch.phase == SCAN:
            y = self.impl.conv_scan(pool, slots, x, w, b, cu_seqlens=batch.cu_seqlens, has_initial=batch.has_initial)
        else:
            y = self.impl.conv_step(pool, slots, self._heads(x), w, b, accepted=batch.accepted)
        return self._flat(y)

    def replay_mamba2(
        self,
        layer: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        z: torch.Tensor | None,
        *,
        a_log: str,
        d: str,
        dt_bias: str,
    ) -> torch.Tensor:
        spec = self.state.spec
        head, group = (spec.nheads, spec.headdim), (spec.ngroups, spec.dstate)
        a = self.state.decay_of(layer, self.weight(a_log))
        args = (self._heads(x, *head), self._heads(dt), a, self._heads(b, *group), self._heads(c, *group))
        skip, gate = self.weight(d), None if z is None else self._heads(z, *head)
        return self._replay("mamba2", layer, args, D=skip, z=gate, dt_bias=self.weight(dt_bias))

    def replay_gated_delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        a_log: str,
        dt_bias: str,
    ) -> torch.Tensor:
        spec = self.state.spec
        key, value = (spec.ngroups, spec.dstate), (spec.nheads, spec.headdim)
        gates = self._heads(a, spec.nheads, spec.dstate) if spec.kind == KIMI_DELTA else self._heads(a)
        args = (self._heads(q, *key), self._heads(k, *key), self._heads(v, *value), gates, self._heads(b))
        return self._replay("gated_delta", layer, (*args, self.weight(a_log), self.weight(dt_bias)))

    def _replay(self, name: str, layer: int, args: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
        """Call impl.{name}_scan or impl.{name}_step on the layer's pool."""
        pool, batch = self.state.recurrent[layer], self.batch
        if batch.phase == SCAN:
            options |= {"cu_seqlens": batch.cu_seqlens, "has_initial": batch.has_initial}
        else:
            options["accepted"] = batch.accepted
        run = getattr(self.impl, f"{name}_{batch.phase}")
        return self._flat(run(pool, batch.slots, *args, **options))

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        config = self.state.config
        q = self._heads(q, config.num_attention_heads, config.head_dim)
        k, v = (self._heads(t, config.num_key_value_heads, config.head_dim) for t in (k, v))
        return self._flat(self._attend(layer, q, (k, v), config.head_dim, scale))

    def latent_attention(
        self, layer: int, q: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, *, kv_up: str, scale: float
    ) -> torch.Tensor:
        # q . [U c | s] = [U^T q_1 | q_2] . [c | s] and sum p W c = W sum p c: one kept vector serves all heads.
        config = self.state.config
        heads, value_dim = config.num_attention_heads, config.latent_value_dim
        own = config.head_dim - config.latent_shared_dim
        key_up, value_up = self.weight(kv_up).view(heads, own + value_dim, -1).split([own, value_dim], dim=1)
        q_own, q_shared = q.view(-1, heads, config.head_dim).split([own, config.latent_shared_dim], dim=-1)
        q = torch.cat([torch.einsum("nhd,hdr->nhr", q_own, key_up), q_shared], dim=-1)
        kept = torch.cat([latent, shared], dim=-1)
        mixed = self._attend(layer, self._heads(q, *q.shape[1:]), (self._heads(kept, 1, kept.shape[-1]),),
                             latent.shape[-1], scale)  # fmt: skip
        return torch.einsum("nhr,hvr->nhv", mixed.reshape(q.shape[0], heads, -1), value_up).flatten(1)

    def _attend(
        self, layer: int, q: torch.Tensor, new: tuple[torch.Tensor, ...], value_dim: int, scale: float
    ) -> torch.Tensor:
        """Attention of q over what the layer keeps once ``new`` is in it, in the shape of q (value_dim per head)."""
        batch, cache = self.batch, self.state.kv_storage[layer]
        if batch.phase == SCAN:
            return torch_attention.scan(q, new, cache, *self._scan_rows(), value_dim, scale)
        positions = batch.positions.view(batch.rows, batch.tokens_per_row)
        assert batch.kv_bound is not None
        return torch_attention.step(q, new, cache, batch.slots, positions, batch.kv_bound, value_dim, scale)

    def _scan_rows(self) -> tuple[list[int], list[int], list[int]]:
        """slots, first positions and cu_seqlens on the host, read once per pass."""
        if self._host_rows is None:
            batch = self.batch
            assert batch.cu_seqlens is not None
            starts = batch.positions[batch.cu_seqlens[:-1].long()]
            self._host_rows = (batch.slots.tolist(), starts.tolist(), batch.cu_seqlens.tolist())
        return self._host_rows

    def select_last(self, x: torch.Tensor) -> torch.Tensor:
        if self.batch.phase != SCAN:
            return x
        assert self.batch.cu_seqlens is not None
        return x[self.batch.cu_seqlens[1:].long() - 1]

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._compute)

    def _heads(self, x: torch.Tensor, *features: int) -> torch.Tensor:
        """[tokens, F] as [tokens, *features] in a scan, [rows, T, *features] in a step (features default to F)."""
        shape = features or (x.shape[-1],)
        if self.batch.phase == SCAN:
            return x.reshape(x.shape[0], *shape)
        return x.reshape(self.batch.rows, self.batch.tokens_per_row, *shape)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`_heads`."""
        return x.reshape(self.batch.positions.shape[0], -1)
