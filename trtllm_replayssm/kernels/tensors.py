"""torch tensors -> C structs: shapes, dtypes and devices are checked here, alignment and limits by the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ReplayError, require
from ..pool import StatePool
from . import abi

TORCH_DTYPE_CODES = {
    torch.float64: abi.DTYPE_CODES["float64"],
    torch.float32: abi.DTYPE_CODES["float32"],
    torch.bfloat16: abi.DTYPE_CODES["bfloat16"],
    torch.float16: abi.DTYPE_CODES["float16"],
}
ALIGNMENT = 16


def shape_text(shape: Sequence[int]) -> str:
    """[2, 3] for messages."""
    return "[" + ", ".join(str(n) for n in shape) + "]"


def check_tensor(name: str, tensor: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raise ReplayError unless ``tensor`` has this shape and lives on ``device``."""
    require(isinstance(tensor, torch.Tensor), f"{name} is {type(tensor).__name__}; it must be a torch tensor")
    require(
        tuple(tensor.shape) == tuple(shape),
        f"{name} has shape {shape_text(tensor.shape)}; it must be {shape_text(shape)}",
    )
    require(tensor.device == device, f"{name} is on {tensor.device}; it must be on {device}, as the pool is")


def tensor_struct(tensor: torch.Tensor | None, *, axes: int | None = None) -> abi.CTensor:
    """C view of a tensor (absent for None); strides of the first ``axes`` axes, all by default."""
    if tensor is None:
        return abi.CTensor()
    code = TORCH_DTYPE_CODES.get(tensor.dtype)
    if code is None:
        names = ", ".join(str(t).removeprefix("torch.") for t in TORCH_DTYPE_CODES)
        raise ReplayError(f"a tensor has dtype {tensor.dtype}; it must be one of {names}")
    strides = tensor.stride()[:axes]
    return abi.CTensor(tensor.data_ptr(), (ctypes.c_int64 * 4)(*strides), code, 0)


def vectors(
    name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Check an activation tensor. A view whose rows are not dense or not on 16 bytes is copied once."""
    check_tensor(name, tensor, shape, device)
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}; it must be {dtype}, the spec's act_dtype")
    size = tensor.element_size()
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    aligned = tensor.data_ptr() % ALIGNMENT == 0
    for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        aligned = aligned and (extent == 1 or stride * size % ALIGNMENT == 0)
    return tensor if dense and aligned else tensor.contiguous()


def output(out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``out`` after its checks, or a new tensor."""
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    checked = vectors("out", out, shape, dtype, device)
    strides = shape_text(out.stride())
    require(checked is out, f"out has strides {strides}; its last axis must be dense, its rows on 16 bytes")
    return out


def fixed_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with stride 0 on axes of extent 1, whose stride torch leaves free."""
    strides = [0 if n == 1 else s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return tensor.as_strided(tensor.shape, (*strides, tensor.stride(-1)))


def index_struct(name: str, values: torch.Tensor | None, count: int, device: torch.device) -> abi.CIndex:
    """C view of an int32 or int64 vector (absent for None)."""
    if values is None:
        return abi.CIndex()
    check_tensor(name, values, (count,), device)
    require(values.dtype in (torch.int32, torch.int64), f"{name} is {values.dtype}; it must be int32 or int64")
    require(values.stride(0) == 1 or count <= 1, f"{name} has stride {values.stride(0)}; it must be dense")
    return abi.CIndex(values.data_ptr(), values.element_size() * 8, 0)


def flags_pointer(name: str, flags: torch.Tensor | None, count: int, device: torch.device) -> Any:
    """Pointer to bool or uint8 flags, or a null pointer."""
    if flags is None:
        return None
    check_tensor(name, flags, (count,), device)
    require(flags.dtype in (torch.bool, torch.uint8), f"{name} is {flags.dtype}; it must be bool or uint8")
    require(flags.stride(0) == 1 or count <= 1, f"{name} has stride {flags.stride(0)}; it must be dense")
    return ctypes.cast(flags.data_ptr(), ctypes.POINTER(ctypes.c_uint8))


def require_pool(pool: object) -> None:
    """Raise ReplayError unless ``pool`` is a StatePool."""
    require(isinstance(pool, StatePool), f"pool is {type(pool).__name__}; it must be a StatePool")


def pool_struct(pool: StatePool) -> abi.CPool:
    """C view of a pool."""
    return abi.CPool(pool.memory.data_ptr(), pool.memory.stride(0), pool.slots)


def device_of(pool: StatePool) -> torch.device:
    """The pool's device."""
    return pool.memory.device


def stream_of(device: torch.device) -> int:
    """Handle of torch's current stream on ``device``."""
    return int(torch.cuda.current_stream(device).cuda_stream)
