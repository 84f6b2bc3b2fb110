"""GDN and KDA step and scan on CUDA pools; the reference on CPU pools (and float64 ones).

Contract: docs/contracts.md.
"""

from __future__ import annotations

import ctypes
import math

import torch

from .. import reference
from ..errors import ReplayError, require
from ..pool import StatePool, torch_dtype
from ..spec import GATED_DELTA, KIMI_DELTA, RecurrenceSpec
from . import abi, tensors
from .library import call
from .mamba2 import DEFAULT_TUNING, StepTuning, on_gpu


def gated_delta_spec(pool: StatePool) -> RecurrenceSpec:
    """The pool's spec. Raises ReplayError for another kind."""
    spec = pool.layout.spec
    kind = spec.kind if isinstance(spec, RecurrenceSpec) else "a convolution"
    if not isinstance(spec, RecurrenceSpec) or kind not in (GATED_DELTA, KIMI_DELTA):
        raise ReplayError(f"pool holds {kind}; this operation needs {GATED_DELTA} or {KIMI_DELTA}")
    return spec


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
    out: torch.Tensor | None = None,
    tuning: StepTuning = DEFAULT_TUNING,
) -> torch.Tensor:
    """One decoding or verification step of T tokens per row; the slots change in place.

    On CUDA: one launch on the current stream, no synchronisation, allocates the result alone (nothing with ``out``),
    may be captured in a CUDA graph. Slot numbers are read on the device: those outside the pool are padding rows.

    Args:
        pool: slots of a gated_delta or kimi_delta spec. slots: int32 or int64 [rows], no slot twice.
        q, k: act_dtype [rows, T, HK, K], 1 <= T <= spec_len, before normalisation. v: act_dtype [rows, T, HV, V].
            Rows that are not dense or do not begin on 16 bytes are copied first.
        a: fp32, bf16 or fp16 [rows, T, HV], KDA [rows, T, HV, K], before the gate. b: likewise [rows, T, HV], before
            the sigmoid.
        A_log: [HV]. dt_bias: [HV], KDA [HV, K]. Other dtypes than fp32 are converted first.
        scale: of the normalised q, not 0; K^-0.5 by default.
        accepted: int32 or int64 [rows]: how many of the previous step's tokens stay; -1 (None: all rows) means all.
        out: act_dtype [rows, T, HV, V] for the result.

    Returns:
        o, act_dtype [rows, T, HV, V]; zeros in padding rows.

    Raises:
        ReplayError: a shape, dtype, device or size that is not allowed, or no library. RuntimeError: CUDA refused.
    """
    if not on_gpu(pool):
        o = reference.gated_delta_step(pool, slots, q, k, v, a, b, A_log, dt_bias, scale=scale, accepted=accepted)
        return o if out is None else out.copy_(o)
    spec, device = gated_delta_spec(pool), tensors.device_of(pool)
    require(q.dim() == 4, f"q has shape {tensors.shape_text(q.shape)}; it must be [rows, T, HK, K]")
    rows, tokens = q.shape[:2]
    params = abi.GatedDeltaStepParams(struct_size=ctypes.sizeof(abi.GatedDeltaStepParams), rows=rows, tokens=tokens)
    params.tuning = abi.CStepTuning(*tuning)
    params.spec = abi.c_recurrence_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, rows, device)
    params.accepted = tensors.index_struct("accepted", accepted, rows, device)
    params.scale = scale_value(scale)
    keep = _set_inputs(params, spec, device, (rows, tokens), q, k, v, a, b, A_log, dt_bias, out)
    if rows:
        with torch.cuda.device(device):
            call("replayssm_gated_delta_step", params, tensors.stream_of(device))
    return keep[0]


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
    out: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Run packed prompts; leaves each final state in its slot with an empty ring.

    Args:
        As gated_delta_step with [tokens, ...] in place of [rows, T, ...]; slots: int32 or int64 [rows].
        cu_seqlens: int32 or int64 [rows + 1], from 0 to tokens; sequence i has cu_seqlens[i] .. cu_seqlens[i+1]-1.
        has_initial: bool [rows] or None: start from what the slot holds (its ring is folded first), not from zero.
        exact: token by token, so that the state has the bits that steps over the same tokens leave, as the reference
            does. Otherwise in chunks on tensor cores where the library has a kernel; the state is that within fp32
            rounding.

    Returns:
        o, act_dtype [tokens, HV, V]; zeros for sequences whose slot is padding.

    Raises:
        ReplayError, RuntimeError: as gated_delta_step.
    """
    if not on_gpu(pool):
        o = reference.gated_delta_scan(
            pool, slots, q, k, v, a, b, A_log, dt_bias, cu_seqlens=cu_seqlens, scale=scale, has_initial=has_initial
        )
        return o if out is None else out.copy_(o)
    spec, device = gated_delta_spec(pool), tensors.device_of(pool)
    require(q.dim() == 3, f"q has shape {tensors.shape_text(q.shape)}; it must be [tokens, HK, K]")
    tokens, rows = q.shape[0], slots.shape[0]
    params = abi.GatedDeltaScanParams(
        struct_size=ctypes.sizeof(abi.GatedDeltaScanParams), sequences=rows, tokens=tokens, exact=int(exact)
    )
    params.spec = abi.c_recurrence_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, rows, device)
    params.cu_seqlens = tensors.index_struct("cu_seqlens", cu_seqlens, rows + 1, device)
    params.has_initial = tensors.flags_pointer("has_initial", has_initial, rows, device)
    params.scale = scale_value(scale)
    keep = _set_inputs(params, spec, device, (tokens,), q, k, v, a, b, A_log, dt_bias, out)
    if rows:
        with torch.cuda.device(device):
            call("replayssm_gated_delta_scan", params, tensors.stream_of(device))
    return keep[0]


def scale_value(scale: float | None) -> float:
    """``scale`` as the C interface takes it: 0 for the default. Raises ReplayError unless it is finite and not 0."""
    if scale is None:
        return 0.0
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and math.isfinite(scale)
    require(
        number and scale != 0, f"scale is {scale!r}; it must be a finite number other than 0, or None for dstate**-0.5"
    )
    return float(scale)


def _parameter(name: str, value: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    tensors.check_tensor(name, value, shape, device)
    require(value.is_floating_point(), f"{name} is {value.dtype}; it must be a floating dtype")
    return value if value.dtype == torch.float32 else value.float()


def _set_inputs(
    params: abi.GatedDeltaStepParams | abi.GatedDeltaScanParams,
    spec: RecurrenceSpec,
    device: torch.device,
    lead: tuple[int, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Check the formula's tensors and point params at them. Returns o, then what must live until the launch is made."""
    act = torch_dtype(spec.act_dtype)
    keys, heads = (*lead, spec.ngroups, spec.dstate), (*lead, spec.nheads, spec.headdim)
    channels = (spec.dstate,) if spec.kind == KIMI_DELTA else ()
    q = tensors.vectors("q", q, keys, act, device)
    k = tensors.vectors("k", k, keys, act, device)
    v = tensors.vectors("v", v, heads, act, device)
    o = tensors.output(out, heads, act, device)
    tensors.check_tensor("a", a, (*heads[:-1], *channels), device)
    tensors.check_tensor("b", b, heads[:-1], device)
    A_log = _parameter("A_log", A_log, (spec.nheads,), device)
    dt_bias = _parameter("dt_bias", dt_bias, (spec.nheads, *channels), device)
    params.q, params.k, params.v, params.o = (tensors.tensor_struct(tensors.fixed_strides(u)) for u in (q, k, v, o))
    params.a, params.b = tensors.tensor_struct(a), tensors.tensor_struct(b)
    params.A_log, params.dt_bias = tensors.tensor_struct(A_log), tensors.tensor_struct(dt_bias)
    return [o, q, k, v, A_log, dt_bias]
