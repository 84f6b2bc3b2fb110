"""The causal convolution on CUDA pools; the reference on CPU pools (and float64 ones). Contract: docs/contracts.md."""

from __future__ import annotations

import ctypes

import torch

from .. import reference
from ..errors import ReplayError, require
from ..pool import StatePool, torch_dtype
from ..spec import ConvSpec
from . import abi, tensors
from .library import call
from .mamba2 import on_gpu


def conv_spec(pool: StatePool) -> ConvSpec:
    """The pool's ConvSpec. Raises ReplayError for what is no pool, or a recurrent one."""
    tensors.require_pool(pool)
    spec = pool.layout.spec
    if not isinstance(spec, ConvSpec):
        raise ReplayError(f"pool holds {spec.kind}; this operation needs a pool with a ConvLayout")
    return spec


def conv_step(
    pool: StatePool,
    slots: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    accepted: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """T tokens per row; the slots change in place.

    On CUDA: one launch on the current stream, no synchronisation, allocates the result alone (nothing with ``out``).

    Args:
        pool: slots of a ConvSpec. slots: int32 or int64 [rows], no slot twice; entries outside the pool are padding.
        x: act_dtype [rows, T, C], 1 <= T <= spec_len; copied first unless rows are dense and begin on 16 bytes.
        weight: fp32, bf16 or fp16 [C, kernel]. bias: likewise [C], or None.
        accepted: int32 or int64 [rows]: how many of the previous step's tokens stay; -1 (None: all rows) means all.
        out: act_dtype [rows, T, C] for the result.

    Returns:
        y, act_dtype [rows, T, C]; zeros in padding rows.

    Raises:
        ReplayError: a shape, dtype, device or size that is not allowed, or no library. RuntimeError: CUDA refused.
    """
    if not on_gpu(pool):
        y = reference.conv_step(pool, slots, x, weight, bias, accepted=accepted)
        return y if out is None else out.copy_(y)
    spec, device = conv_spec(pool), tensors.device_of(pool)
    require(x.dim() == 3, f"x has shape {tensors.shape_text(x.shape)}; it must be [rows, T, C]")
    rows, tokens = x.shape[:2]
    params = abi.ConvStepParams(struct_size=ctypes.sizeof(abi.ConvStepParams), rows=rows, tokens=tokens)
    params.spec = abi.c_conv_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, rows, device)
    params.accepted = tensors.index_struct("accepted", accepted, rows, device)
    keep = _set_tensors(params, spec, device, (rows, tokens), x, weight, bias, out)
    if rows:
        with torch.cuda.device(device):
            call("replayssm_conv_step", params, tensors.stream_of(device))
    return keep[0]


def conv_scan(
    pool: StatePool,
    slots: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor,
    has_initial: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed prompts; leaves the last kernel-1 inputs of each (zeros in front of a short one) in its slot.

    Args:
        As conv_step with x [tokens, C]. cu_seqlens: int32 or int64 [rows + 1]. has_initial: bool [rows] or None:
        continue from the slot's history (all pending tokens accepted) where true, from zeros elsewhere.

    Returns:
        y, act_dtype [tokens, C]; zeros for sequences whose slot is padding.

    Raises:
        ReplayError, RuntimeError: as conv_step.
    """
    if not on_gpu(pool):
        y = reference.conv_scan(pool, slots, x, weight, bias, cu_seqlens=cu_seqlens, has_initial=has_initial)
        return y if out is None else out.copy_(y)
    spec, device = conv_spec(pool), tensors.device_of(pool)
    require(x.dim() == 2, f"x has shape {tensors.shape_text(x.shape)}; it must be [tokens, C]")
    tokens, rows = x.shape[0], slots.shape[0]
    params = abi.ConvScanParams(struct_size=ctypes.sizeof(abi.ConvScanParams), sequences=rows, tokens=tokens)
    params.spec = abi.c_conv_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, rows, device)
    params.cu_seqlens = tensors.index_struct("cu_seqlens", cu_seqlens, rows + 1, device)
    params.has_initial = tensors.flags_pointer("has_initial", has_initial, rows, device)
    keep = _set_tensors(params, spec, device, (tokens,), x, weight, bias, out)
    if rows:
        with torch.cuda.device(device):
            call("replayssm_conv_scan", params, tensors.stream_of(device))
    return keep[0]


def conv_materialize(pool: StatePool, src: torch.Tensor, count: torch.Tensor, dst: torch.Tensor) -> None:
    """Slot dst[i] := the window of slot src[i] after count[i] of its pending tokens, none pending.

    src, count, dst: int32 or int64 [n], with the rules of materialize. Raises as conv_step.
    """
    spec = conv_spec(pool)
    if not on_gpu(pool):
        reference.conv_materialize(pool, src, count, dst)
        return
    device, pairs = tensors.device_of(pool), src.shape[0]
    params = abi.ConvMaterializeParams(struct_size=ctypes.sizeof(abi.ConvMaterializeParams), pairs=pairs)
    params.spec = abi.c_conv_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.src = tensors.index_struct("src", src, pairs, device)
    params.count = tensors.index_struct("count", count, pairs, device)
    params.dst = tensors.index_struct("dst", dst, pairs, device)
    if pairs:
        with torch.cuda.device(device):
            call("replayssm_conv_materialize", params, tensors.stream_of(device))


def conv_reset(pool: StatePool, slots: torch.Tensor) -> None:
    """A window of zeros and nothing pending. slots: int32 or int64 [n]; entries outside the pool are skipped."""
    spec = conv_spec(pool)
    if not on_gpu(pool):
        reference.conv_reset(pool, slots)
        return
    device, count = tensors.device_of(pool), slots.shape[0]
    params = abi.ConvResetParams(struct_size=ctypes.sizeof(abi.ConvResetParams), count=count)
    params.spec = abi.c_conv_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, count, device)
    if count:
        with torch.cuda.device(device):
            call("replayssm_conv_reset", params, tensors.stream_of(device))


def _set_tensors(
    params: abi.ConvStepParams | abi.ConvScanParams,
    spec: ConvSpec,
    device: torch.device,
    lead: tuple[int, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Check the tensors and point params at them. Returns y, then what must live until the launch is made."""
    act, shape = torch_dtype(spec.act_dtype), (*lead, spec.channels)
    x = tensors.vectors("x", x, shape, act, device)
    y = tensors.output(out, shape, act, device)
    tensors.check_tensor("weight", weight, (spec.channels, spec.kernel), device)
    params.x, params.y = (tensors.tensor_struct(tensors.fixed_strides(v)) for v in (x, y))
    params.weight = tensors.tensor_struct(weight)
    if bias is not None:
        tensors.check_tensor("bias", bias, (spec.channels,), device)
        params.bias = tensors.tensor_struct(bias)
    return [y, x]
