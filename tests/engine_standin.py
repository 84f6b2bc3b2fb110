"""Stand-ins for a GPU and for a TensorRT engine, so that the runner of engines can be tested without either.

`HostCuda` answers the runner's CUDA calls on host memory: copies happen at once, a capture records closures and a graph
runs them. `StandInEngine` hands out execution contexts that interpret the network which was emitted into the recorded
tensorrt module, plugins by the torch reference on the very memory that the runner has bound. `host_library` does what
the native library's operations do. Nothing here is TensorRT: what TensorRT does with the network is tested in
tests/engine on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from network_cases import Row, Twice
from recorded_tensorrt import recorded_tensorrt
from replay_cases import leave_scales

from trtllm_replayssm import ConvLayout, SlotLayout, reference
from trtllm_replayssm.build.backend import BuildLog
from trtllm_replayssm.build.directory import EngineConfig, decay_rates, layout_digest
from trtllm_replayssm.kernels import abi
from trtllm_replayssm.models.host_weights import host_weights
from trtllm_replayssm.ops import tensorrt_network as tn
from trtllm_replayssm.pool import StatePool, torch_dtype
from trtllm_replayssm.runtime.cuda import Cuda
from trtllm_replayssm.runtime.engine import Engine

_NUMPY = {"int32": np.int32, "float32": np.float32, "float16": np.float16, "bfloat16": np.int16}
POSITIONS = 32  # of network_cases.Twice


def memory_at(address: int, nbytes: int) -> np.ndarray:
    """uint8 view of memory."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)


def tensor_at(address: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Torch view of memory."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = memory_at(address, count * np.dtype(_NUMPY[dtype]).itemsize).view(_NUMPY[dtype]).reshape(shape)
    return torch.from_numpy(raw).view(torch_dtype("bfloat16")) if dtype == "bfloat16" else torch.from_numpy(raw)


class HostCuda:
    """A Caller (runtime/cuda.py) on host memory. ``refuse`` names functions that fail from now on; ``invalidated``: a
    capture ends with an error. ``late``: what is put into a stream is done when somebody waits for it, not before."""

    def __init__(self, *, late: bool = False) -> None:
        self.late = late
        self.queue: list[Callable[[], None]] = []
        self.blocks: dict[int, Any] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.refuse: set[str] = set()
        self.invalidated = False
        self.calls: list[str] = []
        self._next = 1

    def __call__(self, name: str, *inputs: Any) -> tuple[int, str, Any]:
        self.calls.append(name)
        if name in self.refuse:
            return 2, "refused by the test", None
        if name == "cudaStreamEndCapture" and self.invalidated:  # as CUDA does where a call was not allowed in it
            self.recording = None
            return 901, "operation failed due to a previous error during capture", None
        return 0, "", getattr(self, name)(*inputs)

    def do(self, work: Callable[[], None]) -> None:
        """Run ``work``, queue it, or record it in a capture."""
        if self.recording is not None:
            self.recording.append(work)
        elif self.late:
            self.queue.append(work)
        else:
            work()

    def handle(self) -> int:
        """A new number."""
        self._next += 1
        return self._next

    def cudaGetLastError(self) -> None:
        pass

    def cudaSetDevice(self, index: int) -> None:
        assert index == 0

    def cudaMalloc(self, nbytes: int) -> int:
        block = (ctypes.c_uint8 * (nbytes + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        memory_at(address, nbytes)[:] = 0xFF  # what was never written is NaN
        self.blocks[address] = block
        return address

    def cudaHostAlloc(self, nbytes: int, flags: int) -> int:
        return self.cudaMalloc(nbytes)

    def cudaFree(self, address: int) -> None:
        self.cudaStreamSynchronize(0)
        del self.blocks[address]

    cudaFreeHost = cudaFree

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.do(lambda: ctypes.memmove(target, source, nbytes))

    def cudaMemsetAsync(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self.do(lambda: ctypes.memset(target, value, nbytes))

    def cudaStreamCreateWithFlags(self, flags: int) -> int:
        return self.handle()

    def cudaStreamDestroy(self, stream: int) -> None:
        pass

    def cudaStreamSynchronize(self, stream: int) -> None:
        assert self.recording is None, "a capture must not wait"
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        assert self.recording is None
        self.recording = []

    def cudaStreamEndCapture(self, stream: int) -> int:
        graph, self.recording = self.recording, None
        assert graph is not None
        number = self.handle()
        self.graphs[number] = graph
        return number

    def cudaGraphInstantiateWithFlags(self, graph: int, flags: int) -> int:
        number = self.handle()
        self.graphs[number] = list(self.graphs[graph])
        return number

    def cudaGraphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    cudaGraphExecDestroy = cudaGraphDestroy

    def cudaGraphLaunch(self, graph: int, stream: int) -> None:
        for work in self.graphs[graph]:
            self.do(work)


class StandInContext:
    """An execution context that interprets the recorded network on the bound memory. Addresses count when it runs."""

    def __init__(self, engine: StandInEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile = -1
        self.device_memory = 0

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return index in (0, 1)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        limits, io = self.engine.limits, self.engine.model.io
        ranges = limits.ranges(tn.PHASES[self.profile])
        for axis, length in zip(io.get(name).shape, shape, strict=True):
            low, _, high = ranges[axis] if isinstance(axis, str) else (axis,) * 3
            if not low <= length <= high:
                return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 16 == 0
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        capturing = self.engine.cuda.recording is not None
        if self.engine.broken or (capturing and self.engine.uncapturable):
            self.engine.log.add(1, self.engine.uncapturable or "[executionContext.cpp] broken by the test")
            return False
        io = self.engine.model.io
        assert self.device_memory, "the context has no scratch memory"
        assert set(self.addresses) == {t.name for t in io.tensors} and set(self.shapes) == {t.name for t in io.inputs}
        # As the plugins do: what lies on the host is read when the call is made, or captured.
        rows = self.shapes["input_ids"][0]
        phase = tensor_at(self.addresses["host_request_types"], (rows,), "int32").clone()
        shapes = dict(self.shapes)
        self.engine.cuda.do(lambda: self._run(shapes, phase))
        self.engine.runs.append((tn.PHASES[self.profile], shapes["input_ids"], shapes.get("kv_index")))
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], phase: torch.Tensor) -> None:
        model = self.engine.model
        feeds = {t.name: tensor_at(self.addresses[t.name], shapes[t.name], t.dtype) for t in model.io.inputs}
        feeds["host_request_types"] = phase
        model.phase = tn.GENERATION if int(phase[0]) else tn.CONTEXT
        model.rows = [Row(0, 0, [0] * int(n)) for n in feeds["last_token_ids"]]
        values = model.interpreter.run(feeds, model._supply)
        for tensor in model.io.outputs:
            value = values[tensor.name]
            tensor_at(self.addresses[tensor.name], tuple(value.shape), tensor.dtype).copy_(value)


class StandInEngine:
    """An ICudaEngine of a recorded network. ``broken``: it refuses. ``uncapturable``: what it says to a capture that it
    refuses. ``runs``: (phase, shapes of ids, kv_index)."""

    def __init__(self, model: Twice, limits: tn.ProfileLimits, cuda: HostCuda) -> None:
        self.model, self.limits, self.cuda = model, limits, cuda
        self.num_io_tensors = len(model.io.tensors)
        self.num_optimization_profiles = 2
        self.device_memory_size = 1024
        self.broken = False
        self.uncapturable = ""
        self.log = BuildLog()
        self.runs: list[Any] = []
        self.contexts = 0

    def get_tensor_name(self, i: int) -> str:
        return self.model.io.tensors[i].name

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        tensor = self.model.io.get(name)
        assert tensor is not None
        return tensor.dims

    def create_execution_context_without_device_memory(self) -> StandInContext:
        self.contexts += 1
        return StandInContext(self)

    def create_execution_context(self, strategy: str) -> StandInContext:
        assert strategy == "user managed"
        context = self.create_execution_context_without_device_memory()
        context.set_device_memory = lambda address, size: setattr(context, "device_memory", address)  # type: ignore[attr-defined]
        return context


def host_library(cuda: HostCuda) -> Callable[[str, ctypes.Structure, int], None]:
    """kernels.library.call on host memory, by the torch reference."""

    def call(name: str, params: Any, stream: int) -> None:
        cuda.do(lambda: _OPERATIONS[name](params))

    return call


def _index(index: abi.CIndex, count: int) -> torch.Tensor:
    assert index.bits == 32
    return tensor_at(index.data, (count,), "int32")


def _kv_append(p: abi.KvAppendParams) -> None:
    dtype = {code: name for name, code in abi.DTYPE_CODES.items()}[p.dtype]
    new = tensor_at(p.new_kv, (p.rows, p.tokens, p.parts, p.kv_heads, p.head_dim), dtype)
    cache = tensor_at(p.cache, (p.slots, p.parts, p.kv_heads, p.max_positions, p.head_dim), dtype)
    counts, places = _index(p.counts, p.rows), _index(p.positions, p.rows * p.tokens).view(p.rows, p.tokens)
    for i, slot in enumerate(_index(p.slot_mapping, p.rows).tolist()):
        for t in range(int(counts[i])) if 0 <= slot < p.slots else ():
            cache[slot, :, :, int(places[i, t])] = new[i, t]


def _recurrent_pool(p: Any) -> StatePool:
    return _POOLS[p.spec.window, p.spec.kind, p.spec.act_dtype](p.pool)


def _conv_pool(p: Any) -> StatePool:
    return _POOLS["conv", p.spec.act_dtype](p.pool)


#: Layouts of the specs that a test has made known, by what tells them apart in C.
_POOLS: dict[Any, Callable[[abi.CPool], StatePool]] = {}


def _know(layout: SlotLayout | ConvLayout) -> None:
    def pool(p: abi.CPool) -> StatePool:
        assert p.stride_bytes == layout.slot_bytes
        return StatePool(layout, tensor_at(p.base, (p.slots, p.stride_bytes // 4), "int32").view(torch.uint8))

    if isinstance(layout, SlotLayout):
        c = abi.c_recurrence_spec(layout.spec)
        _POOLS[c.window, c.kind, c.act_dtype] = pool
    else:
        _POOLS["conv", abi.c_conv_spec(layout.spec).act_dtype] = pool


def _materialize(p: abi.MaterializeParams) -> None:
    pool = _recurrent_pool(p)
    rates = tensor_at(p.A.data, (p.spec.nheads,), "float32") if p.A.data else None
    src, count, dst = (_index(x, p.pairs).clone() for x in (p.src, p.count, p.dst))
    reference.materialize(pool, src, count, dst, A=rates)
    leave_scales(pool, dst[dst >= 0])


_OPERATIONS: dict[str, Callable[[Any], None]] = {
    "replayssm_kv_append": _kv_append,
    "replayssm_materialize": _materialize,
    "replayssm_reset": lambda p: reference.reset(_recurrent_pool(p), _index(p.slots, p.count)),
    "replayssm_conv_reset": lambda p: reference.conv_reset(_conv_pool(p), _index(p.slots, p.count)),
}


def engine_config(model: Twice, limits: tn.ProfileLimits, **changes: Any) -> EngineConfig:
    """What an engine directory of the model would say."""
    values: dict[str, Any] = {
        "model": model.config,
        "network": model.options,
        "limits": limits,
        "io": model.io,
        "profiles": tn.PHASES,
        "package_version": "0.1.0",
        "tensorrt": ("tensorrt", "8.6.0"),
        "compute_capability": "90",
        "engine_sha256": "0" * 64,
        "engine_bytes": 1,
        "weights_sha256": "1" * 64,
        "library_version": "0.1.0",
        "library_sha256": "2" * 64,
        "layout_sha256": layout_digest(model.config, model.options),
    }
    return EngineConfig(**{**values, **changes})


def standin_engine(
    config: Any, *, version: str = "8.6", dtype: str = "float32", slots: int = 4, max_input_len: int = 6,
    graphs: bool | str = True, max_batch: int | None = None, late: bool = False, spec_len: int = 4, **options: Any
) -> Engine:  # fmt: skip
    """An Engine over the stand-ins; ``engine._engine`` is the StandInEngine, its ``cuda`` the HostCuda."""
    model = Twice(recorded_tensorrt(version), config, dtype, "plugin", slots=slots, spec_len=spec_len, **options)
    limits = tn.ProfileLimits(max_batch or slots, max_input_len, POSITIONS, slots, spec_len=spec_len)
    cuda = HostCuda(late=late)
    written = engine_config(model, limits)
    _know(SlotLayout(model.options.recurrence_spec(config)))
    _know(ConvLayout(config.conv_spec(spec_len=spec_len, act_dtype=dtype)))
    trt = SimpleNamespace()
    if version == "10":
        trt.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
    inner = StandInEngine(model, limits, cuda)
    return Engine(
        written,
        trt,
        inner,
        api=Cuda(cuda),
        call=host_library(cuda),
        decay=decay_rates(config, host_weights(model.weights)),
        graphs=graphs,
        log=inner.log,
    )
