"""Weights as numpy arrays, for engine builds: no torch, and Python 3.9 as well.

numpy has no bfloat16, so an array of it holds the 16 bits as uint16 and the dtype's name says so.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from ..errors import ReplayError, require
from ..spec import require_choice
from .checkpoint import WEIGHTS_FILE, read_checkpoint_config, require_same_names, stored_dtypes
from .config import MODEL_DTYPES, HybridConfig
from .decoder import weight_shapes

if TYPE_CHECKING:
    import torch

_NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_FORMAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, eq=False)
class HostWeight:
    """One weight: ``array`` of any shape and the name of its dtype (bfloat16: uint16 bits).

    Raises:
        ReplayError: an unknown dtype, or an array of another one.
    """

    array: np.ndarray
    dtype: str

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, MODEL_DTYPES)
        want = np.dtype(_NUMPY[self.dtype])
        require(self.array.dtype == want, f"array is {self.array.dtype}; a {self.dtype} weight is held as {want}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    def to_float32(self) -> np.ndarray:
        """The values in fp32, exactly."""
        if self.dtype == "bfloat16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32, copy=False)

    def cast(self, dtype: str) -> HostWeight:
        """The weight in another dtype, rounded to nearest even.

        Raises:
            ReplayError: an unknown dtype, or values that are finite here and too large for float16.
        """
        require_choice("dtype", dtype, MODEL_DTYPES)
        if dtype == self.dtype:
            return self
        wide = self.to_float32()
        if dtype == "bfloat16":
            return HostWeight(_bfloat16_bits(wide), dtype)
        with np.errstate(over="ignore"):
            array = wide.astype(_NUMPY[dtype])
        if dtype == "float16":
            lost = np.isinf(array) & np.isfinite(wide)
            if lost.any():
                top = float(np.abs(wide[lost]).max())
                raise ReplayError(f"dtype is float16; it holds numbers up to 65504, and a weight has {top:.6g}")
        return HostWeight(array, dtype)


WeightLike = Union[HostWeight, np.ndarray]


def as_host_weight(name: str, value: WeightLike) -> HostWeight:
    """``value`` itself, or a fp32 or fp16 numpy array with its dtype's name. Raises ReplayError for other arrays."""
    if isinstance(value, HostWeight):
        return value
    array = np.asarray(value)
    known = {np.dtype(code): dtype for dtype, code in _NUMPY.items() if dtype != "bfloat16"}
    if array.dtype not in known:
        raise ReplayError(f"weight {name} is {array.dtype}; give float32, float16 or a HostWeight (bfloat16)")
    return HostWeight(array, known[array.dtype])


def host_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, HostWeight]:
    """Torch tensors of fp32, fp16 or bf16 as HostWeights; CPU tensors share their memory."""
    import torch

    out = {}
    for name, tensor in weights.items():
        dtype = str(tensor.dtype).split(".")[-1]
        require_choice(f"dtype of {name}", dtype, MODEL_DTYPES)
        flat = tensor.detach().cpu().contiguous()
        array = flat.view(torch.int16).numpy().view("<u2") if dtype == "bfloat16" else flat.numpy()
        out[name] = HostWeight(array, dtype)
    return out


def load_host_checkpoint(directory: str | Path) -> tuple[HybridConfig, dict[str, HostWeight]]:
    """Read a checkpoint directory without torch; arrays are views of the mapped file.

    Returns:
        the config, as read_checkpoint_config returns it, and the weights by name, as stored.

    Raises:
        ReplayError: see read_checkpoint_config; the weight file missing or damaged; a weight missing, unexpected, or of
            another shape or dtype than the config implies.
    """
    path = Path(directory)
    config = read_checkpoint_config(path)
    file = path / WEIGHTS_FILE
    require(os.path.isfile(file), f"{path} has no {WEIGHTS_FILE}")
    entries, data = _read_safetensors(file)
    shapes, dtypes = weight_shapes(config), stored_dtypes(config)
    require_same_names(file, shapes, entries)
    weights = {}
    for name, shape in shapes.items():
        weight = _tensor(file, name, entries[name], data)
        got = weight.shape
        require(got == shape, f"{file}: weight {name} has shape {list(got)}; the config implies {list(shape)}")
        want = dtypes[name]
        require(weight.dtype == want, f"{file}: weight {name} is {weight.dtype}; the config implies {want}")
        weights[name] = weight
    return config, weights


def _read_safetensors(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Header entries by tensor name, and the bytes behind the header as a mapped array."""
    broken = f"{path} is not a whole safetensors file"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            require(length <= min(size - 8, _MAX_HEADER_BYTES), f"{broken}: its header is cut off")
            header = json.loads(file.read(length))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length) if size > 8 + length else np.zeros(0, "u1")
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror or error}") from None
    except ReplayError:
        raise
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{broken}: {error}") from None
    require(isinstance(header, dict), f"{broken}: its header is no object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, data


def _tensor(path: Path, name: str, entry: Any, data: np.ndarray) -> HostWeight:
    """One tensor of the mapped ``data``."""
    try:
        dtype, shape = _FORMAT_NAMES.get(entry["dtype"], str(entry["dtype"])), tuple(int(n) for n in entry["shape"])
        first, last = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise ReplayError(f"{path} is not a whole safetensors file: tensor {name}: {error!r}") from None
    require(dtype in _NUMPY, f"{path}: weight {name} is {dtype}; it must be one of {', '.join(_FORMAT_NAMES)}")
    item = np.dtype(_NUMPY[dtype])
    size = item.itemsize * int(np.prod(shape, dtype=np.int64))
    whole = 0 <= first <= last <= len(data) and last - first == size and min(shape, default=0) >= 0
    require(whole, f"{path} is not a whole safetensors file: tensor {name} needs {size} bytes at {first}..{last}")
    return HostWeight(data[first:last].view(item).reshape(shape), dtype)


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 as bf16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
