"""Argument checks of the reference operations: shapes, dtypes, slots. Failures are ReplayErrors naming the argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import ReplayError, require
from ..pool import StatePool, torch_dtype
from ..spec import KIMI_DELTA, ConvSpec, RecurrenceSpec


def recurrent_spec(pool: StatePool, *kinds: str) -> RecurrenceSpec:
    """The pool's RecurrenceSpec, which must be of one of ``kinds``."""
    spec = getattr(getattr(pool, "layout", None), "spec", None)
    if not isinstance(spec, RecurrenceSpec) or spec.kind not in kinds:
        have = spec.kind if isinstance(spec, RecurrenceSpec) else type(spec).__name__
        raise ReplayError(f"pool holds {have}; this operation needs a pool of {' or '.join(kinds)}")
    return spec


def conv_spec(pool: StatePool) -> ConvSpec:
    """The pool's ConvSpec."""
    spec = getattr(getattr(pool, "layout", None), "spec", None)
    if not isinstance(spec, ConvSpec):
        raise ReplayError(f"pool holds {type(spec).__name__}; this operation needs a pool with a ConvLayout")
    return spec


def compute_dtype(spec: RecurrenceSpec | ConvSpec) -> torch.dtype:
    """fp32, or float64 where the activations are float64."""
    return torch.float64 if spec.act_dtype == "float64" else torch.float32


def expect(pool: StatePool, name: str, value: object, dtype: str | None, **axes: int) -> torch.Tensor:
    """``value`` as a tensor of exactly these axes on the pool's device; ``dtype`` None allows every floating dtype."""
    if not isinstance(value, torch.Tensor):
        raise ReplayError(f"{name} is {type(value).__name__}; it must be a tensor [{', '.join(axes)}]")
    wanted = ", ".join(f"{axis}={extent}" for axis, extent in axes.items())
    require(
        tuple(value.shape) == tuple(axes.values()),
        f"{name} has shape {list(value.shape)}; it must be [{wanted}]",
    )
    if dtype is None:
        require(value.is_floating_point(), f"{name} is {value.dtype}; it must be a floating dtype")
    else:
        require(value.dtype == torch_dtype(dtype), f"{name} is {value.dtype}; it must be {dtype}, the spec's act_dtype")
    _check_device(pool, name, value)
    return value


def _check_device(pool: StatePool, name: str, value: torch.Tensor) -> None:
    home = pool.memory.device
    require(value.device == home, f"{name} is on {value.device}; it must be on the pool's device, {home}")


def integers(pool: StatePool, name: str, value: object, count: int | None = None) -> torch.Tensor:
    """``value`` as a one-axis integer tensor (of ``count`` entries) on the pool's device."""
    size = "any number of" if count is None else str(count)
    if not isinstance(value, torch.Tensor):
        raise ReplayError(f"{name} is {type(value).__name__}; it must be an integer tensor with {size} entries")
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    require(whole, f"{name} is {value.dtype}; it must be an integer dtype")
    require(
        value.dim() == 1 and count in (None, value.shape[0]),
        f"{name} has shape {list(value.shape)}; it must have one axis with {size} entries",
    )
    _check_device(pool, name, value)
    return value


@dataclass(frozen=True)
class Rows:
    """The rows of a batch that name a slot; the others are padding.

    total: rows in the batch. slots: int64 [n], the live rows' slots. index: int64 [n], the live rows, None if all are.
    """

    total: int
    slots: torch.Tensor
    index: torch.Tensor | None

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """The live rows of ``value`` [total, ...]."""
        return value if self.index is None else value.index_select(0, self.index)

    def spread(self, value: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`take`: [n, ...] to [total, ...] with zeros in the padding rows."""
        if self.index is None:
            return value
        out = value.new_zeros(self.total, *value.shape[1:])
        return out.index_copy_(0, self.index, value)


def live_rows(pool: StatePool, slots: object, name: str = "slots") -> Rows:
    """Check ``slots`` (int [rows]; negative is padding; no slot twice, none past the pool) and pick the live rows."""
    given = integers(pool, name, slots)
    numbers = given.tolist()
    live = [row for row, slot in enumerate(numbers) if slot >= 0]
    named = [numbers[row] for row in live]
    for slot in named:
        require(slot < pool.slots, f"{name} names slot {slot}; the pool has slots 0 to {pool.slots - 1}")
    if len(set(named)) != len(named):
        twice = next(slot for slot in named if named.count(slot) > 1)
        raise ReplayError(f"{name} names slot {twice} twice; every row needs a slot of its own")
    if len(live) == len(numbers):
        return Rows(len(numbers), given.long(), None)
    index = torch.tensor(live, dtype=torch.int64, device=pool.memory.device)
    return Rows(len(numbers), given.long()[index], index)


def step_tokens(spec: RecurrenceSpec | ConvSpec, name: str, value: object, rank: int) -> int:
    """T of a step, from axis 1 of ``value`` [rows, T, ...]: 1 to spec_len."""
    if not isinstance(value, torch.Tensor) or value.dim() != rank:
        have = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ReplayError(f"{name} is {have}; it must be a tensor [rows, T, ...] with {rank} axes")
    tokens = int(value.shape[1])
    require(
        1 <= tokens <= spec.spec_len,
        f"{name} carries {tokens} tokens a row; a step takes 1 to {spec.spec_len}, the spec's spec_len",
    )
    return tokens


def decay_rates(pool: StatePool, spec: RecurrenceSpec, A: object) -> torch.Tensor:
    """``A`` after its checks: [H], no rate positive, infinite or NaN. Values on a GPU are not waited for."""
    rates = expect(pool, "A", A, None, H=spec.nheads)
    if rates.device.type == "cpu":
        low, high = (float(end) for end in torch.aminmax(rates.detach().double()))
        bad = high if not high <= 0 else low
        require(-math.inf < bad <= 0, f"A holds {bad:g}; every rate must be finite and 0 or negative: A = -exp(A_log)")
    return rates


def check_mamba2_inputs(
    pool: StatePool,
    spec: RecurrenceSpec,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    **lead: int,
) -> None:
    """Shapes and dtypes of Mamba-2 inputs; ``lead`` are the leading axes: rows and T, or tokens."""
    H, G, P, N = spec.nheads, spec.ngroups, spec.headdim, spec.dstate
    expect(pool, "x", x, spec.act_dtype, **lead, H=H, P=P)
    expect(pool, "dt", dt, None, **lead, H=H)
    decay_rates(pool, spec, A)
    for name, value in (("B", B), ("C", C)):
        expect(pool, name, value, spec.act_dtype, **lead, G=G, N=N)
    if z is not None:
        expect(pool, "z", z, spec.act_dtype, **lead, H=H, P=P)
    if dt_bias is not None:
        expect(pool, "dt_bias", dt_bias, None, H=H)
    if D is not None:
        per_channel = isinstance(D, torch.Tensor) and D.dim() == 2
        expect(pool, "D", D, None, **({"H": H, "P": P} if per_channel else {"H": H}))


def check_gated_delta_inputs(
    pool: StatePool,
    spec: RecurrenceSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    **lead: int,
) -> None:
    """Shapes and dtypes of GDN and KDA inputs; ``lead`` are the leading axes: rows and T, or tokens."""
    HV, HK, V, K = spec.nheads, spec.ngroups, spec.headdim, spec.dstate
    per_channel = {"K": K} if spec.kind == KIMI_DELTA else {}
    for name, value in (("q", q), ("k", k)):
        expect(pool, name, value, spec.act_dtype, **lead, HK=HK, K=K)
    expect(pool, "v", v, spec.act_dtype, **lead, HV=HV, V=V)
    expect(pool, "a", a, None, **lead, HV=HV, **per_channel)
    expect(pool, "b", b, None, **lead, HV=HV)
    expect(pool, "A_log", A_log, None, HV=HV)
    expect(pool, "dt_bias", dt_bias, None, HV=HV, **per_channel)
