"""Safetensors files: reading a published checkpoint's tensors one at a time, writing ours one at a time.

Neither direction ever holds more than one tensor (and the sources that it is made of) in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ReplayError, require
from ..pool import torch_dtype
from .fields import read_json

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Names of the format for the dtypes that a model's weights may have.
_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_READABLE = (*_FORMAT_NAMES.values(), "F64")


def require_readable(names: Mapping[str, str]) -> None:
    """Raise ReplayError unless every dtype in ``{tensor: format dtype}`` is a floating point one that models use."""
    for name, dtype in names.items():
        require(dtype in _READABLE, f"tensor {name} is {dtype}; weights must be {', '.join(_READABLE)} (not quantized)")


class WeightFiles:
    """The tensors of one or more safetensors files, read when asked for.

    Args:
        files: path of the file that holds each tensor, by tensor name. None: all tensors of the file do.

    Raises:
        ReplayError: a file is missing, truncated or not safetensors, or lacks a tensor that it should hold.
    """

    def __init__(self, paths: Iterable[Path], files: Mapping[str, Path] | None = None) -> None:
        self._handles = {path: _open(path) for path in paths}
        held = {path: set(handle.keys()) for path, handle in self._handles.items()}
        if files is None:
            files = {name: path for path, names in held.items() for name in sorted(names)}
        for name, path in files.items():
            require(name in held[path], f"tensor {name} is not in {path}, where the index puts it")
        self._files = dict(files)

    @classmethod
    def in_directory(cls, directory: Path) -> WeightFiles:
        """The checkpoint in ``directory``: one ``model.safetensors``, or shards named by its index file.

        Raises:
            ReplayError: neither is there, or the index is malformed or names a file that is not there.
        """
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if os.path.isfile(single):
            return cls([single])
        require(os.path.isfile(index), f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        mapping = read_json(index).get("weight_map")
        ok = isinstance(mapping, dict) and mapping and all(isinstance(v, str) for v in mapping.values())
        require(bool(ok), f"{index}: weight_map must be an object of tensor names and file names")
        assert isinstance(mapping, dict)
        for shard in sorted(set(mapping.values())):
            require(Path(shard).name == shard, f"{index}: {shard!r} is not a plain file name")
            require(os.path.isfile(directory / shard), f"{index} names {shard}, which is not in {directory}")
        files = {name: directory / shard for name, shard in mapping.items()}
        return cls(sorted(set(files.values())), files)

    @property
    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The format's name of a tensor's dtype (``BF16`` ...), without reading it."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        import torch

        tensor = self._handles[self._files[name]].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _slice(self, name: str) -> Any:
        return self._handles[self._files[name]].get_slice(name)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ReplayError(f"{path} is not a whole safetensors file: {error}") from None


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> int:
    """Write a safetensors file from tensors that come one at a time.

    Args:
        path: the file, replaced if there. shapes, dtypes: of every tensor, in the order of the file.
        tensors: (name, tensor) in that order, each with its declared shape and dtype.

    Returns:
        bytes written.

    Raises:
        OSError: the file cannot be written. ValueError: tensors that differ from what was declared.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * torch_dtype(dtypes[name]).itemsize
        header[name] = {
            "dtype": _FORMAT_NAMES[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            if given != name or tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(dtypes[name]):
                raise ValueError(f"{given} {tuple(tensor.shape)} {tensor.dtype} came where {name} was declared")
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return 8 + len(text) + offset
