"""The device memory of an engine: state pools, KV caches, staged inputs, outputs. Python 3.9, numpy alone.

Every buffer has its largest size from the start and never moves, so that addresses are bound once and captured graphs
stay valid. Inputs are staged in pinned memory and copied by the stream; inputs that plugins read on the
host stay there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..build.directory import EngineConfig, layouts
from ..errors import ReplayError, require
from ..kernels import abi
from ..spec import DTYPE_BYTES, MAMBA2
from .cuda import Cuda, DeviceBuffer, HostBuffer, Stream

#: Runs an operation of the native library: (name, params, stream).
LibraryCall = Callable[[str, ctypes.Structure, int], None]

#: numpy dtypes of a slot's regions and of outputs; bfloat16 comes as its 16 bits.
NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int32": np.int32}
LOGITS = "logits"
SLOT_MAPPING = "slot_mapping"
POOL_ROLES = ("replay_state", "conv_state", "kv_cache")


def from_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """bfloat16 bits (uint16) as float32; other arrays as they are."""
    if dtype != "bfloat16":
        return array
    wide: np.ndarray = (array.astype(np.uint32) << 16).view(np.float32)
    return wide


class EngineMemory:
    """Zeroed memory for an engine's tensors; every recurrent slot is reset.

    Args:
        config: of the engine. api, stream: where memory is made and filled. call: the native library.
        decay: per Mamba-2 layer A fp32 [H], which folding a ring needs; empty for other kinds.

    Attributes:
        pools: per state or cache tensor its memory. slots: rows of the pools.
    """

    def __init__(
        self, config: EngineConfig, api: Cuda, stream: Stream, call: LibraryCall, decay: Mapping[int, np.ndarray]
    ) -> None:
        self.config = config
        self.stream = stream
        self._cuda, self._call = api, call
        self.slots = config.limits.slots
        self.layout, self.conv_layout = layouts(config.model, config.network)
        limits = config.limits
        self._largest = {
            "rows": limits.max_batch,
            "tokens": max(limits.max_input_len, limits.spec_len),
            "slots": limits.slots,
            "bound": limits.max_positions,
            "logits": max(limits.context_logits, limits.spec_len),
        }
        self.pools: dict[str, DeviceBuffer] = {}
        self._host: dict[str, HostBuffer] = {}
        self._device: dict[str, DeviceBuffer] = {}
        self._staged: dict[str, int] = {}
        for tensor in config.io.tensors:
            self._allocate(tensor)
        logits = config.io.get(LOGITS)
        if logits is None:
            raise ReplayError("the network has no output logits; build the engine again")
        self.logits_host = HostBuffer(api, self._shape(logits), np.float32)
        self._scratch = DeviceBuffer(api, self.layout.slot_bytes)
        self._index = HostBuffer(api, (2,), np.int32)
        self._index_device = DeviceBuffer(api, self._index.nbytes)
        self._decay = {layer: self._uploaded(a.astype(np.float32)) for layer, a in decay.items()}
        self._reset()

    def _shape(self, tensor: Any) -> tuple[int, ...]:
        """Largest shape of a tensor."""
        return tuple(self._largest[axis] if isinstance(axis, str) else int(axis) for axis in tensor.shape)

    def _allocate(self, tensor: Any) -> None:
        shape = self._shape(tensor)
        nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPE_BYTES.get(tensor.dtype, 4)
        if tensor.role in POOL_ROLES:
            self.pools[tensor.name] = DeviceBuffer(self._cuda, nbytes)
            self.pools[tensor.name].fill(0, self.stream.handle)
            return
        if tensor.is_input:
            require(tensor.dtype == "int32", f"input {tensor.name} is {tensor.dtype}; a runner stages int32 inputs")
            self._host[tensor.name] = HostBuffer(self._cuda, (int(np.prod(shape, dtype=np.int64)),), np.int32)
            if tensor.location == "host":
                return
        self._device[tensor.name] = DeviceBuffer(self._cuda, nbytes)

    def _uploaded(self, array: np.ndarray) -> DeviceBuffer:
        buffer = DeviceBuffer(self._cuda, array.nbytes)
        buffer.upload(array, self.stream.handle)
        self.stream.synchronize()
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(b.nbytes for b in (*self.pools.values(), *self._device.values()))

    def addresses(self) -> dict[str, int]:
        """Address of every tensor of the network."""
        held: dict[str, Any] = {**self._host, **self._device, **self.pools}
        return {tensor.name: held[tensor.name].address for tensor in self.config.io.tensors}

    def device_address(self, name: str) -> int:
        """Address of an output or staged input on the device."""
        return self._device[name].address

    def stage(self, name: str, array: np.ndarray) -> None:
        """Put the values of an input into its pinned buffer, if the network has it; upload() sends them."""
        if name not in self._host:
            return
        flat = np.ascontiguousarray(array, dtype=np.int32).reshape(-1)
        self._host[name].array[: flat.size] = flat
        self._staged[name] = flat.nbytes

    def staged(self, name: str) -> np.ndarray:
        """A copy of the values of an input that stage() put there last, int32 [count]."""
        values: np.ndarray = self._host[name].array[: self._staged[name] // 4].copy()
        return values

    def upload(self) -> None:
        """Send what is staged; part of a captured step."""
        for name, buffer in self._device.items():
            if name in self._host:
                self._cuda.copy(buffer.address, self._host[name].address, self._staged[name], self.stream.handle)

    def append_kv(self, rows: int, tokens: int) -> None:
        """Put the keys and values of the call that ran last into the caches of its rows."""
        for cache in self.config.io.by_role("kv_cache"):
            _, parts, heads, places, size = cache.dims
            params = abi.KvAppendParams(
                struct_size=ctypes.sizeof(abi.KvAppendParams),
                rows=rows,
                tokens=tokens,
                kv_heads=heads,
                head_dim=size,
                dtype=abi.DTYPE_CODES[cache.dtype],
                parts=parts,
                slots=self.slots,
                max_positions=places,
                new_kv=self.device_address(f"new_kv_{cache.layer}"),
                cache=self.pools[cache.name].address,
                slot_mapping=abi.CIndex(self.device_address(SLOT_MAPPING), 32, 0),
                positions=abi.CIndex(self.device_address("positions"), 32, 0),
                counts=abi.CIndex(self.device_address("last_token_ids"), 32, 0),
            )
            self._call("replayssm_kv_append", params, self.stream.handle)

    def host_logits(self, rows: int, count: int) -> np.ndarray:
        """logits [rows, count, vocab] of the call that ran last, a copy. Waits for the stream."""
        shape = (rows, count, self.config.model.vocab_size)
        flat: np.ndarray = self.logits_host.array.reshape(-1)[: rows * count * self.config.model.vocab_size]
        self._device[LOGITS].download(flat, self.stream.handle)
        self.stream.synchronize()
        logits: np.ndarray = flat.reshape(shape).copy()
        return logits

    def recurrent_state(self, slot: int, accepted: int) -> dict[int, np.ndarray]:
        """Per recurrent layer the state of ``slot`` where ``accepted`` tokens of its last launch count (-1: all).

        The slot is not changed: a copy of it is folded. bfloat16 states come as float32.
        """
        layout, stream = self.layout, self.stream.handle
        words = np.zeros(layout.slot_bytes // 4, np.int32)
        region = layout["state"]
        states = {}
        for layer in self.config.model.recurrent_layers:
            source = self.pools[f"replay_state_{layer}"].address + slot * layout.slot_bytes
            self._cuda.copy(self._scratch.address, source, layout.slot_bytes, stream)
            self._scratch.download(words, stream)
            self.stream.synchronize()
            self._index.array[:] = (0, _ring_count(words.view(np.int16), layout["cursor"].offset, accepted))
            self._cuda.copy(self._index_device.address, self._index.address, self._index.nbytes, stream)
            self._call("replayssm_materialize", self._fold(layer), stream)
            self._scratch.download(words, stream)
            self.stream.synchronize()
            raw = words.view(np.uint8)[region.offset : region.end]
            state = raw.view(NUMPY_DTYPES[region.dtype]).reshape(-1, region.strides[1])[:, : region.shape[2]]
            states[layer] = from_bits(state.reshape(region.shape).copy(), region.dtype)
            if "state_scale" in layout:
                scale = layout["state_scale"]
                copies = words.view(np.uint8)[scale.offset : scale.end].view(np.float64).reshape(scale.shape)
                states[layer] *= copies[:, :1, None].astype(np.float32)
        return states

    def _fold(self, layer: int) -> ctypes.Structure:
        """Slot 0 of the scratch memory folded in place."""
        zero, count = abi.CIndex(self._index_device.address, 32, 0), abi.CIndex(self._index_device.address + 4, 32, 0)
        params = abi.MaterializeParams(
            struct_size=ctypes.sizeof(abi.MaterializeParams),
            pairs=1,
            spec=abi.c_recurrence_spec(self.layout.spec),
            pool=abi.CPool(self._scratch.address, self.layout.slot_bytes, 1),
            src=zero,
            count=count,
            dst=zero,
        )
        if self.layout.spec.kind == MAMBA2:
            params.A = abi.CTensor(
                self._decay[layer].address, (ctypes.c_int64 * 4)(1, 0, 0, 0), abi.DTYPE_CODES["float32"], 0
            )
        return params

    def _reset(self) -> None:
        """Reset every slot of every pool: zero states, empty rings, first windows by stagger."""
        slots = self._uploaded(np.arange(self.slots, dtype=np.int32))
        index = abi.CIndex(slots.address, 32, 0)
        stream = self.stream.handle
        for layer in self.config.model.recurrent_layers:
            pool = abi.CPool(self.pools[f"replay_state_{layer}"].address, self.layout.slot_bytes, self.slots)
            spec = abi.c_recurrence_spec(self.layout.spec)
            params = abi.ResetParams(ctypes.sizeof(abi.ResetParams), self.slots, spec, pool, index)
            self._call("replayssm_reset", params, stream)
            pool = abi.CPool(self.pools[f"conv_state_{layer}"].address, self.conv_layout.slot_bytes, self.slots)
            conv = abi.c_conv_spec(self.conv_layout.spec)
            conv_params = abi.ConvResetParams(ctypes.sizeof(abi.ConvResetParams), self.slots, conv, pool, index)
            self._call("replayssm_conv_reset", conv_params, stream)
        self.stream.synchronize()

    def close(self) -> None:
        """Free everything."""
        held: list[Any] = [*self.pools.values(), *self._host.values(), *self._device.values(), *self._decay.values()]
        for buffer in (*held, self.logits_host, self._scratch, self._index, self._index_device):
            buffer.close()


def _ring_count(words: np.ndarray, cursor_offset: int, accepted: int) -> int:
    """Ring rows that count: the committed ones and ``accepted`` (-1: all) of the pending ones."""
    first = cursor_offset // 2
    history_len, pending_len = int(words[first + 1]), int(words[first + 2])
    return history_len + (pending_len if accepted < 0 else min(accepted, pending_len))
