"""A small decode with drafts, rejections and folds, compared with the plain recurrence: does ReplaySSM work here?

Every recurrent kind and the convolution, on real slot memory: 9 steps of 3 tokens, window 5, another number of
accepted tokens (0 included) in every row and step. Outputs of all tokens, also rejected ones, and the final states
must agree with reference/recurrence.py, which knows neither slots nor rings. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..layout import ConvLayout, SlotLayout
from ..pool import StatePool, torch_dtype
from ..spec import GATED_DELTA, KIMI_DELTA, MAMBA2, ConvSpec, RecurrenceSpec

#: Largest accepted difference, absolute, for values of size 1.
TOLERANCE = {"float64": 1e-11, "float32": 2e-4}
_ROWS, _TOKENS, _STEPS, _WINDOW = 3, 3, 9, 5
_HEADS, _GROUPS, _HEADDIM, _DSTATE = 4, 2, 16, 32


def run(operations: Any, device: str = "cpu", dtype: str = "float64") -> dict[str, float]:
    """Largest error of each kind. ``operations``: module with the functions of reference/ (or kernels/).

    Raises whatever the operations raise.
    """
    import torch

    draw = torch.Generator().manual_seed(2026)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(torch_dtype(dtype)).to(device)

    errors = {kind: _recurrent(operations, kind, normal, device, dtype) for kind in (MAMBA2, GATED_DELTA, KIMI_DELTA)}
    errors["causal_conv"] = _conv(operations, normal, device, dtype)
    return errors


def passed(errors: dict[str, float], dtype: str = "float64") -> bool:
    """Whether every error is finite and within the tolerance."""
    return bool(errors) and all(error <= TOLERANCE[dtype] for error in errors.values())


def _kept(step: int) -> list[int]:
    """Tokens that each row keeps of a step; all of the last one."""
    if step == _STEPS - 1:
        return [_TOKENS] * _ROWS
    return [(step * (row + 1) + row) % (_TOKENS + 1) for row in range(_ROWS)]


def _recurrent(operations: Any, kind: str, normal: Callable[..., Any], device: str, dtype: str) -> float:
    import torch

    spec = RecurrenceSpec(kind, _HEADS, _GROUPS, _HEADDIM, _DSTATE, state_dtype=dtype, act_dtype=dtype, window=_WINDOW,
                          spec_len=_TOKENS)  # fmt: skip
    pool = StatePool.allocate(SlotLayout(spec), 2 * _ROWS, device)
    slots = torch.arange(_ROWS, device=device)
    state = torch.zeros(_ROWS, _HEADS, _HEADDIM, _DSTATE, dtype=torch_dtype(dtype), device=device)
    step_of, draw, oracle, fold_with = (_mamba2 if kind == MAMBA2 else _delta)(operations, kind, normal)
    worst, accepted = 0.0, None
    for step in range(_STEPS):
        tokens = draw()
        y = step_of(pool, slots, tokens, accepted)
        worst = _worse(worst, y, oracle(state, tokens)[0])
        kept = _kept(step)
        state = torch.cat([oracle(state[i : i + 1], [v[i : i + 1, :n] for v in tokens])[1] for i, n in enumerate(kept)])
        accepted = torch.tensor(kept, dtype=torch.int32, device=device)
    everything = torch.full((_ROWS,), -1, dtype=torch.int32, device=device)
    operations.materialize(pool, slots, everything, slots + _ROWS, **fold_with)
    return _worse(worst, pool.checkpoint()[_ROWS:], state)


def _mamba2(operations: Any, kind: str, normal: Callable[..., Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(step, draw of a step's tokens, oracle, further arguments of materialize) of Mamba-2."""
    from ..reference import mamba2_recurrence

    A, D, bias = -normal(_HEADS).exp(), normal(_HEADS), normal(_HEADS)

    def draw() -> list[Any]:
        lead = (_ROWS, _TOKENS)
        return [normal(*lead, _HEADS, _HEADDIM), normal(*lead, _HEADS), normal(*lead, _GROUPS, _DSTATE),
                normal(*lead, _GROUPS, _DSTATE), normal(*lead, _HEADS, _HEADDIM)]  # fmt: skip

    def step(pool: Any, slots: Any, tokens: list[Any], accepted: Any) -> Any:
        x, dt, B, C, z = tokens
        return operations.mamba2_step(pool, slots, x, dt, A, B, C, D=D, z=z, dt_bias=bias, accepted=accepted)

    def oracle(state: Any, tokens: list[Any]) -> Any:
        x, dt, B, C, z = tokens
        return mamba2_recurrence(state, x, dt, A, B, C, D=D, z=z, dt_bias=bias)

    return step, draw, oracle, {"A": A}


def _delta(operations: Any, kind: str, normal: Callable[..., Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """As _mamba2, of Gated DeltaNet or KDA."""
    from ..reference import delta_gates, gated_delta_recurrence

    gate = (_HEADS, _DSTATE) if kind == KIMI_DELTA else (_HEADS,)
    a_log, bias = normal(_HEADS), normal(*gate)

    def draw() -> list[Any]:
        lead = (_ROWS, _TOKENS)
        return [normal(*lead, _GROUPS, _DSTATE), normal(*lead, _GROUPS, _DSTATE), normal(*lead, _HEADS, _HEADDIM),
                normal(*lead, *gate), normal(*lead, _HEADS)]  # fmt: skip

    def step(pool: Any, slots: Any, tokens: list[Any], accepted: Any) -> Any:
        return operations.gated_delta_step(pool, slots, *tokens, a_log, bias, accepted=accepted)

    def oracle(state: Any, tokens: list[Any]) -> Any:
        q, k, v, a, b = tokens
        return gated_delta_recurrence(state, q, k, v, *delta_gates(a, b, a_log, bias))

    return step, draw, oracle, {}


def _conv(operations: Any, normal: Callable[..., Any], device: str, dtype: str) -> float:
    import torch

    from ..reference import causal_conv

    spec = ConvSpec(64, kernel=4, act_dtype=dtype, spec_len=_TOKENS)
    pool = StatePool.allocate(ConvLayout(spec), _ROWS, device)
    slots = torch.arange(_ROWS, device=device)
    weight, bias = normal(64, 4), normal(64)
    history = torch.zeros(_ROWS, 3, 64, dtype=torch_dtype(dtype), device=device)
    worst, accepted = 0.0, None
    for step in range(_STEPS):
        x = normal(_ROWS, _TOKENS, 64)
        y = operations.conv_step(pool, slots, x, weight, bias, accepted=accepted)
        worst = _worse(worst, y, causal_conv(history, x, weight, bias)[0])
        kept, inputs = _kept(step), torch.cat([history, x], dim=1)
        history = torch.stack([inputs[i, n : n + 3] for i, n in enumerate(kept)])
        accepted = torch.tensor(kept, dtype=torch.int32, device=device)
    return worst


def _worse(worst: float, got: Any, want: Any) -> float:
    """The larger of ``worst`` and the largest difference; infinite where ``got`` is not finite."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return max(worst, float((got - want).abs().max()))
