"""Engine: a loaded TensorRT engine that scans prompts and decodes rows, on slots that are known to be right.

Python 3.9 with numpy alone. EngineRunner (engine_runner.py) keeps the books over it for numpy arrays, EngineSession
(engine_session.py) for torch tensors. Contract of the two operations: Session._prefill and Session._launch.

A decode step is captured in a CUDA graph the second time its shape (rows, tokens, length of the cache that is read)
comes up, and replayed from then on. For that rows are padded to a power of two and the length to a power of two, so
that few shapes come up. Each graph has its own execution context; all contexts share one block of scratch memory, since
one stream runs them one after another. Where TensorRT cannot be captured (some of its kernels wait for the stream),
steps run without graphs, at the same padded shapes. A capture comes before the step that it is made for, so a refusal
that is raised has moved no state.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..build.backend import BuildLog
from ..build.directory import (
    EngineConfig,
    check_compute_capability,
    check_library,
    check_tensorrt,
    read_decay,
    read_engine,
    read_engine_config,
)
from ..errors import ReplayError, require
from ..ops.tensorrt_io import CONTEXT, GENERATION
from .books import ALL
from .cuda import Cuda, DeviceBuffer, Graph, Stream
from .engine_memory import SLOT_MAPPING, EngineMemory, LibraryCall

MAX_GRAPHS = 16
#: Value of ``graphs``: a step that cannot be captured is an error.
REQUIRE = "require"
_SMALLEST_BOUND = 64

#: (rows, logits per row) -> logits [rows, logits, vocab] of the call that ran last.
Fetch = Callable[[int, int], Any]
Key = tuple[int, int, int]


class Engine:
    """A deserialised engine with its memory.

    Args:
        config: of the engine directory. trt: the tensorrt module. engine: its ICudaEngine.
        api: CUDA. call: the native library. decay: see EngineMemory.
        graphs: True: capture decode steps in CUDA graphs; where TensorRT refuses, say so once in a RuntimeWarning and
            go on without. False: do not. REQUIRE: a refused capture raises RuntimeError, as does every later step that
            has no graph. device: index of the GPU.
        log: what the logger of ``engine`` writes into.

    Attributes:
        config, memory, stream, device.
        refusal: why steps are not captured, in TensorRT's words; empty where nothing was refused. One refusal counts
            for every shape, since each try would take another execution context.

    Raises:
        ReplayError: the engine's tensors are not those of ``config``; another value of ``graphs``.
    """

    def __init__(
        self,
        config: EngineConfig,
        trt: Any,
        engine: Any,
        *,
        api: Cuda,
        call: LibraryCall,
        decay: Mapping[int, np.ndarray],
        graphs: bool | str = True,
        device: int = 0,
        log: BuildLog | None = None,
    ) -> None:
        require(graphs is True or graphs is False or graphs == REQUIRE,
                f"graphs is {graphs!r}; it must be True, False or {REQUIRE!r}")  # fmt: skip
        api.set_device(device)
        self.config = config
        self.device = device
        self.stream = Stream(api)
        self._cuda, self._trt, self._engine = api, trt, engine
        _check_tensors(config, engine)
        self.memory = EngineMemory(config, api, self.stream, call, decay)
        self._scratch = DeviceBuffer(api, scratch_bytes(engine))
        self._profiles = {name: i for i, name in enumerate(config.profiles)}
        self._log = BuildLog() if log is None else log
        self._eager = {name: self._context(name) for name in (CONTEXT, GENERATION)}
        self._graphs_on, self._required = bool(graphs), graphs == REQUIRE
        self.refusal = ""
        self._graphs: OrderedDict[Key, tuple[Any, Graph]] = OrderedDict()
        self._seen: dict[Key, int] = {}
        #: What TensorRT holds by address and must live as long as the engine.
        self.keep: tuple[Any, ...] = ()

    def scan(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], fetch: Fetch) -> list[Any]:
        """Scan ``prompts`` into ``slots``, whatever those held, in pieces of max_input_len tokens.

        Returns:
            logits [vocab] after the last token of each prompt, as ``fetch`` makes them.

        Raises:
            ReplayError: more prompts than the engine has rows.
        """
        self._cuda.set_device(self.device)  # another user of the thread may have chosen another one
        self._check_rows(len(slots))
        most = self.config.limits.max_input_len
        logits: dict[int, Any] = {}
        for start in range(0, max(len(p) for p in prompts), most):
            rows = [i for i, p in enumerate(prompts) if len(p) > start]
            pieces = [list(prompts[i][start : start + most]) for i in rows]
            self._run_context([slots[i] for i in rows], pieces, start)
            out = fetch(len(rows), 1)
            for at, i in enumerate(rows):
                logits[i] = out[at, 0]  # the last piece's stay
        return [logits[i] for i in range(len(prompts))]

    def step(self, slots: Sequence[int], tokens: np.ndarray, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        """Put one step into the stream: tokens [n, T] behind ``lengths`` tokens of each row; see Session._launch.

        The logits [n, T, vocab] are in the memory's output when the stream got there. Raises ReplayError for more rows
        than the engine has.
        """
        self._cuda.set_device(self.device)
        rows, steps = tokens.shape
        self._check_rows(rows)
        bound = max(1, *lengths)
        if self._graphs_on:
            rows = min(_power_of_two(rows), self.config.limits.max_batch)
            bound = min(max(_power_of_two(bound), _SMALLEST_BOUND), self.config.limits.max_positions)
        self._stage_step(slots, tokens, lengths, accepted, rows, bound)
        key = (rows, steps, bound)
        graph = self._graph_of(key)
        if graph is None:
            self._execute(self._eager[GENERATION], key)
        else:
            graph.launch(self.stream.handle)

    def recurrent_state(self, slot: int, accepted: int) -> dict[int, np.ndarray]:
        """See EngineMemory.recurrent_state."""
        self._cuda.set_device(self.device)
        return self.memory.recurrent_state(slot, accepted)

    def _check_rows(self, rows: int) -> None:
        most = self.config.limits.max_batch
        require(rows <= most, f"{rows} sequences in one call; the engine takes {most} (max_batch)")

    def _graph_of(self, key: Key) -> Graph | None:
        """The graph of the steps of these sizes, captured now where that is due; None: the step runs without."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key][1]
        if self.refusal and self._required:
            raise RuntimeError(f"{_not_captured(key)}: {self.refusal}")
        if not self._graphs_on or self.refusal or not self._worth_capturing(key):
            return None
        return self._capture(key)

    def _capture(self, key: Key) -> Graph | None:
        """Capture the staged step in a context of its own, without running it; None where TensorRT refuses."""
        rows, steps, _ = key
        context = self._context(GENERATION)
        slots = self.memory.staged(SLOT_MAPPING)
        # TensorRT settles the shapes of a context, and loads kernels, in its first runs: of padding alone, which moves
        # no state.
        self.memory.stage(SLOT_MAPPING, np.full(rows, -1))
        self._execute(context, key)
        self._enqueue(context, rows, steps)
        self.stream.synchronize()  # nothing is under way when the capture begins; staged inputs may be written again
        self.memory.stage(SLOT_MAPPING, slots)
        self._log.clear()
        try:
            graph = self.stream.capture(lambda: self._enqueue(context, rows, steps))
        except (RuntimeError, ReplayError) as error:  # CudaError is a RuntimeError
            self._refuse(key, error)
            return None
        self._graphs[key] = (context, graph)
        while len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1][1].close()
        return graph

    def _refuse(self, key: Key, error: Exception) -> None:
        """Remember and say why a step, which has not run yet, is not captured. Raises where graphs are required."""
        self._cuda.forget_error()
        self.stream.synchronize()
        self.refusal = str(error)
        if self._required:
            raise RuntimeError(f"{_not_captured(key)}: {error}") from error
        message = f"{_not_captured(key)}; steps run without graphs: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=5)

    @property
    def graphs(self) -> list[Key]:
        """(rows, tokens, cache length) of the steps that are captured."""
        return list(self._graphs)

    def _worth_capturing(self, key: Key) -> bool:
        """True from the second time on."""
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] >= 2

    def _run_context(self, slots: Sequence[int], pieces: Sequence[Sequence[int]], start: int) -> None:
        rows, longest = len(pieces), max(len(p) for p in pieces)
        ids, positions = np.zeros((rows, longest), np.int32), np.zeros((rows, longest), np.int32)
        lengths = np.array([len(p) for p in pieces], np.int32)
        for i, piece in enumerate(pieces):
            ids[i, : len(piece)] = piece
            positions[i, : len(piece)] = start + np.arange(len(piece))
        self.stream.synchronize()  # an earlier call may still read the staged inputs
        stage, bound = self.memory.stage, max(1, start)
        stage("input_ids", ids)
        stage("positions", positions)
        stage(SLOT_MAPPING, np.asarray(slots))
        stage("last_token_ids", lengths)
        stage("host_request_types", np.zeros(rows))
        stage("accepted", np.full(rows, ALL))
        stage("has_initial", np.full(rows, int(start > 0)))
        stage("kv_index", np.arange(bound))
        stage("token_index", np.arange(longest))
        stage("logit_index", lengths - 1)
        context = self._eager[CONTEXT]
        self._set_shapes(context, rows, longest, bound, 1)
        self._enqueue(context, rows, longest)

    def _stage_step(
        self,
        slots: Sequence[int],
        tokens: np.ndarray,
        lengths: Sequence[int],
        accepted: Sequence[int],
        rows: int,
        bound: int,
    ) -> None:
        """Inputs of a step of ``rows`` rows; those behind the given ones are padding."""
        given, steps = tokens.shape
        self.stream.synchronize()  # an earlier call may still read the staged inputs

        def padded(values: Any, fill: int) -> np.ndarray:
            out = np.full((rows, *np.shape(values)[1:]), fill, np.int32)
            out[:given] = values
            return out

        stage = self.memory.stage
        stage("input_ids", padded(tokens, 0))
        stage("positions", padded(np.asarray(lengths)[:, None], 0) + np.arange(steps))
        stage(SLOT_MAPPING, padded(slots, -1))
        stage("last_token_ids", np.full(rows, steps))
        stage("host_request_types", np.ones(rows))
        stage("accepted", padded(accepted, ALL))
        stage("has_initial", np.zeros(rows))
        stage("kv_index", np.arange(bound))
        stage("token_index", np.arange(steps))
        stage("logit_index", np.tile(np.arange(steps), (rows, 1)))

    def _execute(self, context: Any, key: Key) -> None:
        rows, steps, bound = key
        self._set_shapes(context, rows, steps, bound, steps)
        self._enqueue(context, rows, steps)

    def _enqueue(self, context: Any, rows: int, tokens: int) -> None:
        """Inputs to the device, the network, keys and values into the caches."""
        self.memory.upload()
        done = context.execute_async_v3(self.stream.handle)
        if not done:
            raise RuntimeError(f"TensorRT refused to run the engine: {self._log.said()}")
        self.memory.append_kv(rows, tokens)

    def _set_shapes(self, context: Any, rows: int, tokens: int, bound: int, logits: int) -> None:
        sizes = {
            "rows": rows,
            "tokens": tokens,
            "slots": self.config.limits.slots,
            "bound": bound,
            "logits": logits,
        }
        for tensor in self.config.io.inputs:
            shape = tuple(sizes[axis] if isinstance(axis, str) else int(axis) for axis in tensor.shape)
            if not context.set_input_shape(tensor.name, shape):
                raise RuntimeError(f"TensorRT refused shape {list(shape)} for input {tensor.name}: {self._log.said()}")

    def _context(self, profile: str) -> Any:
        """A context of a profile with every address bound, on the shared scratch memory."""
        context = new_context(self._trt, self._engine, self._scratch)
        if context is None or not context.set_optimization_profile_async(self._profiles[profile], self.stream.handle):
            raise RuntimeError(f"TensorRT gave no execution context for profile {profile}: {self._log.said()}")
        self.stream.synchronize()
        for name, address in self.memory.addresses().items():
            if not context.set_tensor_address(name, address):
                raise RuntimeError(f"TensorRT refused the address of {name}")
        return context

    def close(self) -> None:
        """Free contexts, graphs and memory."""
        for _, graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._eager.clear()
        self.memory.close()
        self._scratch.close()
        self.stream.close()


def scratch_bytes(engine: Any) -> int:
    """Scratch memory that a context of any profile needs."""
    size = getattr(engine, "device_memory_size_v2", None)
    return int(engine.device_memory_size if size is None else size)


def new_context(trt: Any, engine: Any, scratch: DeviceBuffer) -> Any:
    """An execution context that works in ``scratch``."""
    strategy = getattr(trt, "ExecutionContextAllocationStrategy", None)
    if strategy is None:
        context = engine.create_execution_context_without_device_memory()
    else:
        context = engine.create_execution_context(strategy.USER_MANAGED)
    if context is None:
        return None
    if hasattr(context, "set_device_memory"):
        context.set_device_memory(scratch.address, scratch.nbytes)
    else:
        context.device_memory = scratch.address
    return context


def open_engine(directory: str | Path, *, device: int = 0, graphs: bool | str = True) -> Engine:
    """Load an engine directory onto a GPU.

    Args:
        directory: made by ``build``. device: index of the GPU. graphs: see Engine.

    Raises:
        ReplayError: no engine directory, a damaged one, another TensorRT, GPU or plugin library than it was built with,
            or no GPU.
    """
    from .. import plugins
    from ..build.backend import find_tensorrt, make_logger
    from ..kernels import library
    from .cuda import cuda

    path = Path(directory)
    config = read_engine_config(path)
    require(config.network.replay == "plugin", f"engine {path} has network io: it cannot generate text")
    trt = find_tensorrt(config.tensorrt[0])
    check_tensorrt(config, trt.__name__, str(trt.__version__))
    check_library(config, plugins.library_path(), library.load().replayssm_version().decode())
    data = read_engine(path, config)
    decay = read_decay(path, config)
    api = cuda()
    count = api.device_count()
    require(0 <= device < count, f"device is {device}; this machine has {count} usable GPUs")
    check_compute_capability(config, api.compute_capability(device))
    api.set_device(device)
    log = BuildLog()
    logger = make_logger(trt, log)
    plugins.register()
    runtime = trt.Runtime(logger)
    loaded = runtime.deserialize_cuda_engine(data)
    if loaded is None:
        raise ReplayError(f"engine {path} does not load: {log.reason()}")
    engine = Engine(config, trt, loaded, api=api, call=library.call, decay=decay, graphs=graphs, device=device, log=log)
    engine.keep = (logger, runtime)
    return engine


def _check_tensors(config: EngineConfig, engine: Any) -> None:
    names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    expected = {tensor.name for tensor in config.io.tensors}
    extra, missing = sorted(names - expected), sorted(expected - names)
    require(
        not extra and not missing,
        f"the engine has tensors that config.json does not name ({', '.join(extra[:5]) or 'none'}) "
        f"or lacks some ({', '.join(missing[:5]) or 'none'}); build it again",
    )
    for tensor in config.io.tensors:
        shape = tuple(engine.get_tensor_shape(tensor.name))  # -1: chosen at run time, or not known to TensorRT
        same = len(shape) == len(tensor.dims) and all(a == b or -1 in (a, b) for a, b in zip(shape, tensor.dims))
        require(same, f"the engine's tensor {tensor.name} is {list(shape)}; config.json says {list(tensor.dims)}: "
                "build it again")  # fmt: skip
    profiles = int(engine.num_optimization_profiles)
    require(profiles == len(config.profiles), f"the engine has {profiles} profiles; config.json names "
            f"{len(config.profiles)}: build it again")  # fmt: skip


def _not_captured(key: Key) -> str:
    rows, steps, bound = key
    return f"a step of {rows} rows x {steps} tokens behind {bound} cached ones was not captured in a CUDA graph"


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
