"""Engines of one plugin each, and the library's operations on the same inputs through its C interface.

Python 3.9 with numpy and TensorRT 8.6 (or newer). A case knows its plugin's fields and inputs, makes random operands,
and runs a call either way: `PluginEngine.run` through TensorRT, `Direct.run` through the C interface, each on a pool of
its own. check_plugins.py compares what they leave.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trtllm_replayssm import ConvLayout, ConvSpec, RecurrenceSpec, SlotLayout, plugins
from trtllm_replayssm.build.backend import BuildLog, make_logger
from trtllm_replayssm.kernels import abi, library
from trtllm_replayssm.ops.tensorrt_api import TensorRTApi
from trtllm_replayssm.runtime.cuda import DeviceBuffer, HostBuffer, Stream, cuda

SLOTS, MOST_ROWS, MOST_TOKENS, MOST_PACKED = 6, 6, 12, 48
SPEC_LEN, WINDOW = 4, 4
NUMPY = {"float32": np.float32, "float16": np.float16}
PLUGINS = {"mamba2": "ReplayMamba2", "gated_delta": "ReplayGatedDelta", "kimi_delta": "ReplayGatedDelta"}
#: name, dtype, shape with -1 for chosen axes, "data" | "param" | "row" | "state"
Input = Any


@dataclass(frozen=True)
class Row:
    """A row of a call: its slot (-1: pad), its tokens, context or generation, accepted of the step before."""

    slot: int
    tokens: int
    context: bool = False
    accepted: int = -1
    has_initial: int = 0


class Case:
    """One plugin with one spec and one dtype.

    Attributes:
        data: features of every operand of tokens. params: arrays of the others. layout: of the pool's slots.
        output: features of the result.
    """

    def __init__(self, kind: str, dtype: str) -> None:
        self.kind, self.dtype = kind, dtype
        rng = np.random.default_rng(len(kind))
        code = plugins.TYPE_IDS[dtype]
        if kind == "conv":
            spec = ConvSpec(768, 4, dtype, SPEC_LEN)
            self.layout: Any = ConvLayout(spec)
            self.plugin, self.output = "ReplayCausalConv", 768
            self.data = {"x": 768}
            self.params = {"weight": rng.normal(size=(768, 4)) / 2, "bias": rng.normal(size=768)}
            self.params = {name: value.astype(np.float32) for name, value in self.params.items()}
            self.fields: dict[str, Any] = {"channels": 768, "kernel": 4, "type_id": code, "spec_len": SPEC_LEN}
            return
        h, g, p, n = 8, 2, 64, 64
        spec = RecurrenceSpec(kind, h, g, p, n, "float32", dtype, window=WINDOW, spec_len=SPEC_LEN)
        self.layout = SlotLayout(spec)
        self.plugin, self.output = PLUGINS[kind], h * p
        self.fields = {"nheads": h, "ngroups": g, "headdim": p, "dstate": n, "type_id": code, "state_type_id": 0}
        self.fields.update(window=WINDOW, spec_len=SPEC_LEN, stagger=1)
        if kind == "mamba2":
            self.data = {"x": h * p, "dt": h, "B": g * n, "C": g * n, "z": h * p}
            self.params = {"dt_bias": rng.normal(size=h), "A": -np.exp(rng.normal(size=h) / 2), "D": rng.normal(size=h)}
            self.fields["z_enabled"] = 1
        else:
            gate = h * n if kind == "kimi_delta" else h
            self.data = {"q": g * n, "k": g * n, "v": h * p, "a": gate, "b": h}
            self.params = {"A_log": rng.normal(size=h) / 2, "dt_bias": rng.normal(size=gate)}
            self.fields["kind"] = abi.KIND_CODES[kind]
        self.params = {name: value.astype(np.float32) for name, value in self.params.items()}

    def operands(self, tokens: int, rng: Any) -> dict[str, np.ndarray]:
        """Random operands [tokens, F]."""
        return {name: rng.normal(size=(tokens, f)).astype(NUMPY[self.dtype]) for name, f in self.data.items()}


class Memory:
    """Device and pinned buffers by name, grown when needed, and the stream everything runs in."""

    def __init__(self) -> None:
        self.api = cuda()
        self.stream = Stream(self.api)
        self.device: dict[str, DeviceBuffer] = {}
        self.host: dict[str, HostBuffer] = {}

    def put(self, name: str, array: np.ndarray) -> int:
        """Upload an array; its address."""
        data = np.ascontiguousarray(array)
        if name not in self.device or self.device[name].nbytes < data.nbytes:
            self.device[name] = DeviceBuffer(self.api, data.nbytes)
        self.device[name].upload(data, self.stream.handle)
        self.stream.synchronize()
        return self.device[name].address

    def pin(self, name: str, array: np.ndarray) -> int:
        """An int32 array in pinned host memory; its address."""
        if name not in self.host:
            self.host[name] = HostBuffer(self.api, (MOST_ROWS,), np.int32)
        self.host[name].array[: array.size] = array
        return self.host[name].address

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Download a buffer's beginning."""
        out = np.empty(shape, dtype)
        self.device[name].download(out, self.stream.handle)
        self.stream.synchronize()
        return out


class Direct:
    """The case through the C interface, on its own pool."""

    def __init__(self, case: Case) -> None:
        self.case, self.memory = case, Memory()
        self.pool = make_pool(case, self.memory)
        self.params = {name: self.memory.put(f"param {name}", value) for name, value in case.params.items()}

    def run(self, rows: list[Row], operands: dict[str, np.ndarray]) -> np.ndarray:
        """One call: a scan over the context rows, a step over the others. Returns y [tokens, F]."""
        put, tokens = self.memory.put, sum(row.tokens for row in rows)
        base = {name: put(name, value) for name, value in operands.items()}
        out = put("y", np.zeros((tokens, self.case.output), NUMPY[self.case.dtype]))
        context, steps = [r for r in rows if r.context], [r for r in rows if not r.context]
        done = sum(row.tokens for row in context)
        if context:
            ends = np.cumsum([0] + [row.tokens for row in context]).astype(np.int32)
            params = self._params("scan", {name: (address, 0) for name, address in base.items()}, (out, 0), (done,))
            params.sequences, params.tokens = len(context), done
            params.slots = abi.CIndex(put("scan slots", np.array([r.slot for r in context], np.int32)), 32, 0)
            params.cu_seqlens = abi.CIndex(put("cu_seqlens", ends), 32, 0)
            flags = put("has_initial", np.array([r.has_initial for r in context], np.uint8))
            params.has_initial = ctypes.cast(flags, ctypes.POINTER(ctypes.c_uint8))
            library.call(self._name("scan"), params, self.memory.stream.handle)
        if steps:
            each = steps[0].tokens
            starts = {name: (address, done) for name, address in base.items()}
            params = self._params("step", starts, (out, done), (len(steps), each))
            params.rows, params.tokens = len(steps), each
            params.slots = abi.CIndex(put("step slots", np.array([r.slot for r in steps], np.int32)), 32, 0)
            params.accepted = abi.CIndex(put("accepted", np.array([r.accepted for r in steps], np.int32)), 32, 0)
            library.call(self._name("step"), params, self.memory.stream.handle)
        return self.memory.take("y", (tokens, self.case.output), NUMPY[self.case.dtype])

    def _name(self, phase: str) -> str:
        family = "gated_delta" if self.case.kind == "kimi_delta" else self.case.kind
        return f"replayssm_{family}_{phase}"

    def _params(self, phase: str, data: Any, out: Any, lead: tuple[int, ...]) -> Any:
        """The params struct with spec, pool and tensors filled in. data, out: (address, first token)."""
        case, kind = self.case, abi.OPERATIONS[self._name(phase)]
        params = kind(struct_size=ctypes.sizeof(kind))
        spec, stride = case.layout.spec, case.layout.slot_bytes
        params.spec = abi.c_conv_spec(spec) if case.kind == "conv" else abi.c_recurrence_spec(spec)
        params.pool = abi.CPool(self.pool, stride, SLOTS)
        for name, (address, first) in data.items():
            width = case.data[name]
            setattr(params, name, self._tensor(address, first, lead, width, _inner(case, name)))
        result = "o" if case.plugin == "ReplayGatedDelta" else "y"
        setattr(params, result, self._tensor(*out, lead, case.output, _inner(case, result)))
        for name, address in self.params.items():
            shape = case.params[name].shape
            if name == "D":
                strides: tuple[int, ...] = (1, 0)
            elif case.kind == "kimi_delta" and name == "dt_bias":
                strides = (spec.dstate, 1)
            else:
                strides = (shape[1], 1) if len(shape) == 2 else (1,)
            setattr(params, name, _tensor(address, strides, "float32"))
        return params

    def _tensor(self, base: int, first: int, lead: tuple[int, ...], width: int, inner: int) -> Any:
        """[*lead, width / inner, inner] (inner 0: [*lead, width]) from token ``first`` on, dense."""
        size = np.dtype(NUMPY[self.case.dtype]).itemsize
        token = (width,) if len(lead) == 1 else (lead[1] * width, width)
        return _tensor(base + first * width * size, (*token, *((inner, 1) if inner else (1,))), self.case.dtype)


def _inner(case: Case, name: str) -> int:
    """Length of the last axis of a tensor in the C interface; 0 where heads (or channels) are the last axis."""
    if case.kind == "conv" or name in ("dt", "b") or (name == "a" and case.kind == "gated_delta"):
        return 0
    return int(case.layout.spec.headdim if name in ("x", "z", "v", "y", "o") else case.layout.spec.dstate)


def _tensor(address: int, strides: tuple[int, ...], dtype: str) -> Any:
    return abi.CTensor(address, (ctypes.c_int64 * 4)(*strides), abi.DTYPE_CODES[dtype], 0)


def make_pool(case: Case, memory: Memory) -> int:
    """A pool of SLOTS slots, every byte set, every slot reset; its address."""
    nbytes = SLOTS * case.layout.slot_bytes
    address = memory.put("pool", np.full(nbytes, 0xFF, np.uint8))
    index = abi.CIndex(memory.put("all slots", np.arange(SLOTS, dtype=np.int32)), 32, 0)
    pool = abi.CPool(address, case.layout.slot_bytes, SLOTS)
    if case.kind == "conv":
        conv = abi.c_conv_spec(case.layout.spec)
        conv_params = abi.ConvResetParams(ctypes.sizeof(abi.ConvResetParams), SLOTS, conv, pool, index)
        library.call("replayssm_conv_reset", conv_params, memory.stream.handle)
    else:
        spec = abi.c_recurrence_spec(case.layout.spec)
        params = abi.ResetParams(ctypes.sizeof(abi.ResetParams), SLOTS, spec, pool, index)
        library.call("replayssm_reset", params, memory.stream.handle)
    memory.stream.synchronize()
    return address


class PluginEngine:
    """The case as a TensorRT engine of one plugin layer, serialised and deserialised, on its own pool."""

    def __init__(self, case: Case, *, packed: bool) -> None:
        self.case, self.packed, self.memory = case, packed, Memory()
        self.log = BuildLog()
        self.logger = make_logger(trt, self.log)
        flags = {"remove_input_padding": int(packed), "paged_state": 0, "has_accepted": 1, "has_initial": 1}
        self.fields = {**case.fields, **flags}
        if case.kind == "conv":
            self.fields["has_bias"] = 1
        self.names = plugins.plugin_inputs(case.plugin, self.fields)
        data = self._build()
        self.runtime = trt.Runtime(self.logger)
        self.engine = self.runtime.deserialize_cuda_engine(data)
        assert self.engine is not None, self.log.reason()
        self.context = self.engine.create_execution_context()
        self.pool = make_pool(case, self.memory)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name == "state":
            return (SLOTS, self.case.layout.slot_bytes // 4)
        if name in self.case.params:
            return self.case.params[name].shape
        if name in self.case.data:
            return (-1, self.case.data[name]) if self.packed else (-1, -1, self.case.data[name])
        return (-1,)

    def _build(self) -> Any:
        api = TensorRTApi(trt)
        builder = trt.Builder(self.logger)
        network = api.create_network(builder)
        profile = builder.create_optimization_profile()
        tensors = {}
        for name in self.names:
            dtype = self.case.dtype if name in self.case.data else "float32" if name in self.case.params else "int32"
            shape = self._shape(name)
            tensors[name] = network.add_input(name, api.dtype(dtype), shape)
            tensors[name].allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
            if -1 in shape:
                most = (MOST_PACKED,) if self.packed and name in self.case.data else (MOST_ROWS, MOST_TOKENS)
                spans = [(n, n) if n > 0 else (1, most[i]) for i, n in enumerate(shape)]
                low, high = tuple(s[0] for s in spans), tuple(s[1] for s in spans)
                profile.set_shape(name, low, high, high)
        layer = api.add_plugin(network, self.case.plugin, "replay", tensors, self.fields)
        y = layer.get_output(0)
        y.name = "y"
        network.mark_output(y)
        y.dtype = api.dtype(self.case.dtype)
        y.allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
        config = builder.create_builder_config()
        api.configure(config, self.case.dtype, None)
        if trt.__version__.startswith("8"):
            config.set_tactic_sources(0)
        config.add_optimization_profile(profile)
        data = builder.build_serialized_network(network, config)
        assert data is not None, self.log.reason()
        return data

    def bind(self, rows: list[Row], operands: dict[str, np.ndarray]) -> tuple[int, ...]:
        """Upload the inputs, set shapes and addresses; shape of the output."""
        put, width = self.memory.put, max(row.tokens for row in rows)
        lengths = np.array([row.tokens for row in rows], np.int32)
        ints = {
            "slot_mapping": [row.slot for row in rows],
            "last_token_ids": np.cumsum(lengths) if self.packed else lengths,
            "accepted": [row.accepted for row in rows],
            "has_initial": [row.has_initial for row in rows],
        }
        types = np.array([0 if row.context else 1 for row in rows], np.int32)
        addresses = {name: put(name, np.asarray(value, np.int32)) for name, value in ints.items()}
        addresses["host_request_types"] = self.memory.pin("host_request_types", types)
        addresses["host_context_lengths"] = self.memory.pin("host_context_lengths", lengths)
        addresses["state"] = self.pool
        addresses.update({name: put(name, value) for name, value in self.case.params.items()})
        lead = (int(lengths.sum()),) if self.packed else (len(rows), width)
        for name, value in operands.items():
            addresses[name] = put(name, value if self.packed else padded(value, lengths))
        shape = (*lead, self.case.output)
        addresses["y"] = put("y", np.full(shape, np.nan, NUMPY[self.case.dtype]))
        for name in self.names:
            full = self._shape(name)
            if -1 in full:
                chosen = (*lead, full[-1]) if name in self.case.data else (len(rows),)
                assert self.context.set_input_shape(name, chosen), (name, chosen, self.log.reason())
        for name in (*self.names, "y"):
            assert self.context.set_tensor_address(name, addresses[name]), name
        return shape

    def enqueue(self) -> None:
        """Put the engine into the stream."""
        assert self.context.execute_async_v3(self.memory.stream.handle), self.log.reason()

    def run(self, rows: list[Row], operands: dict[str, np.ndarray]) -> np.ndarray:
        """One call. Returns y [tokens, F] of the rows' tokens; padding must be zero."""
        shape = self.bind(rows, operands)
        self.enqueue()
        y = self.memory.take("y", shape, NUMPY[self.case.dtype])
        if self.packed:
            return y
        for i, row in enumerate(rows):
            assert not y[i, row.tokens :].any(), "padding is not zero"
        return np.concatenate([y[i, : row.tokens] for i, row in enumerate(rows)])


def padded(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[tokens, F] as [rows, longest, F]; what must not be read is NaN."""
    out = np.full((len(lengths), int(lengths.max()), values.shape[-1]), np.nan, values.dtype)
    start = 0
    for i, n in enumerate(lengths):
        out[i, :n] = values[start : start + n]
        start += n
    return out
