"""kv_append: the keys and values of a step's tokens into the KV cache of an engine. CUDA memory alone."""

from __future__ import annotations

import ctypes

import torch

from ..errors import require
from . import abi, tensors
from .library import call


def kv_append(
    cache: torch.Tensor,
    new_kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """cache[slots[i], :, :, positions[i, t]] = new_kv[i, t] for the first counts[i] tokens t of every row i.

    One launch on the current stream, no synchronisation, no allocation. Rows whose slot, and tokens whose position, is
    outside the cache are passed over.

    Args:
        cache: fp32, bf16 or fp16 [slots, parts, kv_heads, max_positions, head_dim] on CUDA, dense; changed in place.
            parts is 2 (keys, values), or 1 where one vector is both.
        new_kv: same dtype [rows, T, parts, kv_heads, head_dim], dense. slots: int32 or int64 [rows], no slot twice.
        positions: int32 or int64 [rows, T]. counts: int32 or int64 [rows], or None: all T tokens of every row.

    Raises:
        ReplayError: a shape, dtype, device or stride that is not allowed, or no library. RuntimeError: CUDA refused.
    """
    require(cache.dim() == 5, f"cache has shape {tensors.shape_text(cache.shape)}; it must be "
            "[slots, parts, kv_heads, max_positions, head_dim]")  # fmt: skip
    require(cache.device.type == "cuda", f"cache is on {cache.device}; it must be on a CUDA device")
    require(new_kv.dim() == 5, f"new_kv has shape {tensors.shape_text(new_kv.shape)}; it must be "
            "[rows, T, parts, kv_heads, head_dim]")  # fmt: skip
    device = cache.device
    count, parts, heads, places, size = cache.shape
    rows, steps = new_kv.shape[:2]
    tensors.check_tensor("new_kv", new_kv, (rows, steps, parts, heads, size), device)
    require(new_kv.dtype == cache.dtype, f"new_kv is {new_kv.dtype}; it must be {cache.dtype}, as the cache is")
    for name, tensor in (("cache", cache), ("new_kv", new_kv)):
        require(tensor.is_contiguous(), f"{name} has strides {tensors.shape_text(tensor.stride())}; it must be dense")
    tensors.check_tensor("positions", positions, (rows, steps), device)
    require(positions.is_contiguous(), "positions must be dense")
    params = abi.KvAppendParams(
        struct_size=ctypes.sizeof(abi.KvAppendParams),
        rows=rows,
        tokens=steps,
        kv_heads=heads,
        head_dim=size,
        dtype=tensors.tensor_struct(cache, axes=0).dtype,
        parts=parts,
        slots=count,
        max_positions=places,
        new_kv=new_kv.data_ptr(),
        cache=cache.data_ptr(),
        slot_mapping=tensors.index_struct("slots", slots, rows, device),
        positions=tensors.index_struct("positions", positions.view(-1), rows * steps, device),
        counts=tensors.index_struct("counts", counts, rows, device),
    )
    if rows and steps:
        with torch.cuda.device(device):
            call("replayssm_kv_append", params, tensors.stream_of(device))
