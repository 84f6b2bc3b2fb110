"""materialize and reset on CUDA pools; the reference on CPU pools (and float64 ones)."""

from __future__ import annotations

import ctypes

import torch

from .. import reference
from ..errors import ReplayError
from ..pool import StatePool
from ..spec import MAMBA2, RecurrenceSpec
from . import abi, tensors
from .library import call
from .mamba2 import decay_rates, on_gpu


def materialize(
    pool: StatePool, src: torch.Tensor, count: torch.Tensor, dst: torch.Tensor, *, A: torch.Tensor | None = None
) -> None:
    """Slot dst[i] := the state of slot src[i] after the first count[i] rows of its ring, with an empty ring.

    On CUDA: one launch on the current stream, no synchronisation, no allocation.

    Args:
        src, dst: int32 or int64 [n]. dst names no slot twice and no slot that another entry reads; src[i] = dst[i] is
            allowed. An entry with a slot outside the pool is skipped.
        count: int32 or int64 [n]; committed rows come first, then pending ones. -1: all rows; others are clamped.
        A: [H], needed for a mamba2 pool and refused for the others; its values as in mamba2_step.

    Raises:
        ReplayError: a shape, dtype or device that is not allowed, or no library. RuntimeError: CUDA refused.
    """
    spec = recurrent_spec(pool)
    if not on_gpu(pool):
        reference.materialize(pool, src, count, dst, A=A)
        return
    device, pairs = tensors.device_of(pool), src.shape[0]
    if spec.kind == MAMBA2 and A is None:
        raise ReplayError(f"A is None; materialize of a mamba2 pool needs A [{spec.nheads}]")
    if spec.kind != MAMBA2 and A is not None:
        raise ReplayError(f"A is given for a {spec.kind} pool; its ring holds the decay, only {MAMBA2} takes A")
    rates = None if A is None else decay_rates(A, spec, device)
    params = abi.MaterializeParams(struct_size=ctypes.sizeof(abi.MaterializeParams), pairs=pairs)
    params.spec = abi.c_recurrence_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.src = tensors.index_struct("src", src, pairs, device)
    params.count = tensors.index_struct("count", count, pairs, device)
    params.dst = tensors.index_struct("dst", dst, pairs, device)
    params.A = tensors.tensor_struct(rates)
    if pairs:
        with torch.cuda.device(device):
            call("replayssm_materialize", params, tensors.stream_of(device))


def reset(pool: StatePool, slots: torch.Tensor) -> None:
    """Zero state and an empty ring with the slot's own first window; every recurrent kind.

    Args:
        slots: int32 or int64 [n]; entries outside the pool are skipped.

    Raises:
        ReplayError, RuntimeError: as materialize.
    """
    spec = recurrent_spec(pool)
    if not on_gpu(pool):
        reference.reset(pool, slots)
        return
    device, count = tensors.device_of(pool), slots.shape[0]
    params = abi.ResetParams(struct_size=ctypes.sizeof(abi.ResetParams), count=count)
    params.spec = abi.c_recurrence_spec(spec)
    params.pool = tensors.pool_struct(pool)
    params.slots = tensors.index_struct("slots", slots, count, device)
    if count:
        with torch.cuda.device(device):
            call("replayssm_reset", params, tensors.stream_of(device))


def recurrent_spec(pool: StatePool) -> RecurrenceSpec:
    """The pool's RecurrenceSpec. Raises ReplayError for what is no pool, or one of a convolution."""
    tensors.require_pool(pool)
    spec = pool.layout.spec
    if not isinstance(spec, RecurrenceSpec):
        raise ReplayError("pool holds a convolution; this operation needs a recurrent pool")
    return spec
