"""Mamba-2 step and scan on CUDA pools; the reference on CPU pools (and float64 ones). Contract: docs/contracts.md."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .. import reference
from ..errors import ReplayError, require
from ..pool import StatePool, torch_dtype
from ..spec import MAMBA2, RecurrenceSpec
from . import abi, tensors
from .library import call


class StepTuning(NamedTuple):
    """How a step is cut into thread blocks; results do not depend on it.

    heads_per_block: heads that a block takes in turn, a divisor of the heads per group. flags: REPLAYSSM_STEP_* of
    replayssm.h. 0 leaves the choice to the library's table.
    """

    heads_per_block: int = 0
    flags: int = 0


DEFAULT_TUNING = StepTuning()


def on_gpu(pool: StatePool) -> bool:
    """Whether the library takes this pool: CUDA memory, and not the float64 that only the reference has."""
    tensors.require_pool(pool)
    return pool.memory.is_cuda and pool.layout.spec.act_dtype != "float64"


def mamba2_spec(pool: StatePool) -> RecurrenceSpec:
    """The pool's spec. Raises ReplayError for another kind."""
    spec = pool.layout.spec
    kind = spec.kind if isinstance(spec, RecurrenceSpec) else "a convolution"
    if not isinstance(spec, RecurrenceSpec) or kind != MAMBA2:
        raise ReplayError(f"pool holds {kind}; this operation needs {MAMBA2}")
    return spec


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
    out: torch.Tensor | None = None,
    tuning: StepTuning = DEFAULT_TUNING,
) -> torch.Tensor:
    """One decoding or verification step of T tokens per row; the slots change in place.

    On CUDA: one launch on the current stream, no synchronisation, allocates the result alone (nothing with ``out``),
    may be captured in a CUDA graph. Slot numbers are read on the device: those outside the pool are padding rows.

    Args:
        pool: slots of a mamba2 spec. slots: int32 or int64 [rows], no slot twice.
        x, z: act_dtype [rows, T, H, P], 1 <= T <= spec_len. B, C: act_dtype [rows, T, G, N]. Rows that are not dense
            or do not begin on 16 bytes are copied first.
        dt: fp32, bf16 or fp16 [rows, T, H], before bias and softplus. dt_bias: [H]. D: [H] or [H, P].
        A: [H], 0 or negative and finite; other dtypes than fp32 are converted first. Values are looked at for CPU pools
            alone, a GPU's would have to be waited for (kernels compute what the formula says for any A).
        accepted: int32 or int64 [rows]: how many of the previous step's tokens stay; -1 (None: all rows) means all.
        out: act_dtype [rows, T, H, P] for the result.

    Returns:
        y, act_dtype [rows, T, H, P]; zeros in padding rows.

    Raises:
        ReplayError: a shape, dtype, device or size that is not allowed, or no library. RuntimeError: CUDA refused.
    """
    if not on_gpu(pool):
        y = reference.mamba2_step(pool, slots, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, accepted=accepted)
        return _into(out, y)
    spec, device = mamba2_spec(pool), tensors.device_of(pool)
    require(x.dim() == 4, f"x has shape {tensors.shape_text(x.shape)}; it must be [rows, T, H, P]")
    rows, tokens = x.shape[:2]
    params = abi.Mamba2StepParams(struct_size=ctypes.sizeof(abi.Mamba2StepParams), rows=rows, tokens=tokens)
    params.tuning = abi.CStepTuning(*tuning)
    params.spec = abi.c_recurrence_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, rows, device)
    params.accepted = tensors.index_struct("accepted", accepted, rows, device)
    keep = _set_inputs(params, spec, device, (rows, tokens), x, dt, A, B, C, D, z, dt_bias, out)
    if rows:
        with torch.cuda.device(device):
            call("replayssm_mamba2_step", params, tensors.stream_of(device))
    return keep[0]


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
    out: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Run packed prompts; leaves each final state in its slot with an empty ring.

    Args:
        As mamba2_step with [tokens, ...] in place of [rows, T, ...]; slots: int32 or int64 [rows].
        cu_seqlens: int32 or int64 [rows + 1], from 0 to tokens; sequence i has cu_seqlens[i] .. cu_seqlens[i+1]-1.
        has_initial: bool [rows] or None: start from what the slot holds (its ring is folded first), not from zero.
        exact: token by token, so that the state has the bits that steps over the same tokens leave, as the reference
            does. Otherwise bf16 activations go through tensor cores in chunks; the state is that within fp32 rounding.

    Returns:
        y, act_dtype [tokens, H, P]; zeros for sequences whose slot is padding.

    Raises:
        ReplayError, RuntimeError: as mamba2_step.
    """
    if not on_gpu(pool):
        y = reference.mamba2_scan(
            pool, slots, x, dt, A, B, C, cu_seqlens=cu_seqlens, D=D, z=z, dt_bias=dt_bias, has_initial=has_initial
        )
        return _into(out, y)
    spec, device = mamba2_spec(pool), tensors.device_of(pool)
    require(x.dim() == 3, f"x has shape {tensors.shape_text(x.shape)}; it must be [tokens, H, P]")
    tokens, rows = x.shape[0], slots.shape[0]
    params = abi.Mamba2ScanParams(struct_size=ctypes.sizeof(abi.Mamba2ScanParams), sequences=rows, tokens=tokens)
    params.spec = abi.c_recurrence_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, rows, device)
    params.cu_seqlens = tensors.index_struct("cu_seqlens", cu_seqlens, rows + 1, device)
    params.has_initial = tensors.flags_pointer("has_initial", has_initial, rows, device)
    params.exact = int(exact)
    keep = _set_inputs(params, spec, device, (tokens,), x, dt, A, B, C, D, z, dt_bias, out)
    if rows:
        with torch.cuda.device(device):
            call("replayssm_mamba2_scan", params, tensors.stream_of(device))
    return keep[0]


def _into(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return y if out is None else out.copy_(y)


def decay_rates(A: torch.Tensor, spec: RecurrenceSpec, device: torch.device) -> torch.Tensor:
    """A as fp32 [H] on the device."""
    tensors.check_tensor("A", A, (spec.nheads,), device)
    require(A.is_floating_point(), f"A is {A.dtype}; it must be a floating dtype")
    return A if A.dtype == torch.float32 else A.float()


def _set_inputs(
    params: abi.Mamba2StepParams | abi.Mamba2ScanParams,
    spec: RecurrenceSpec,
    device: torch.device,
    lead: tuple[int, ...],
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Check the formula's tensors and point params at them. Returns y, then what must live until the launch is made."""
    act = torch_dtype(spec.act_dtype)
    heads, groups = (*lead, spec.nheads, spec.headdim), (*lead, spec.ngroups, spec.dstate)
    x = tensors.vectors("x", x, heads, act, device)
    B = tensors.vectors("B", B, groups, act, device)
    C = tensors.vectors("C", C, groups, act, device)
    y = tensors.output(out, heads, act, device)
    tensors.check_tensor("dt", dt, heads[:-1], device)
    keep = [y, x, B, C, decay_rates(A, spec, device)]
    params.x, params.B, params.C, params.y = (tensors.tensor_struct(tensors.fixed_strides(v)) for v in (x, B, C, y))
    params.dt = tensors.tensor_struct(dt)
    params.A = tensors.tensor_struct(keep[-1])
    if z is not None:
        keep.append(tensors.vectors("z", z, heads, act, device))
        params.z = tensors.tensor_struct(tensors.fixed_strides(keep[-1]))
    if dt_bias is not None:
        tensors.check_tensor("dt_bias", dt_bias, (spec.nheads,), device)
        params.dt_bias = tensors.tensor_struct(dt_bias)
    if D is not None:
        if D.dim() == 1:
            tensors.check_tensor("D", D, (spec.nheads,), device)
            D = D[:, None].expand(spec.nheads, spec.headdim)
        tensors.check_tensor("D", D, (spec.nheads, spec.headdim), device)
        params.D = tensors.tensor_struct(D)
    return keep
