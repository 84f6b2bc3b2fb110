"""The CUDA runtime functions that an engine's runner needs, and device memory, streams, graphs and events on them.

Calls go through cuda-python (``cuda.bindings.runtime``) where it is installed, else through ctypes and a libcudart that
is found on this machine. Needs numpy alone and runs on Python 3.9. Handles and addresses are plain ints.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib
import os
import sys
from collections.abc import Callable
from ctypes import c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

import numpy as np

from ..errors import ReplayError, require

#: Names the libcudart to take; cuda-python is then not used.
ENVIRONMENT_VARIABLE = "TRTLLM_REPLAYSSM_CUDART"
_SONAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say where the memory is
_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76

#: Function -> (types of its arguments in C, index of the one that is an output or None). The output is a pointer there.
_FUNCTIONS: dict[str, tuple[list[Any], int | None]] = {
    "cudaGetDeviceCount": ([c_int], 0),
    "cudaGetLastError": ([], None),
    "cudaSetDevice": ([c_int], None),
    "cudaDeviceGetAttribute": ([c_int, c_int, c_int], 0),
    "cudaMalloc": ([c_void_p, c_size_t], 0),
    "cudaFree": ([c_void_p], None),
    "cudaHostAlloc": ([c_void_p, c_size_t, c_uint], 0),
    "cudaFreeHost": ([c_void_p], None),
    "cudaMemcpyAsync": ([c_void_p, c_void_p, c_size_t, c_int, c_void_p], None),
    "cudaMemsetAsync": ([c_void_p, c_int, c_size_t, c_void_p], None),
    "cudaStreamCreateWithFlags": ([c_void_p, c_uint], 0),
    "cudaStreamDestroy": ([c_void_p], None),
    "cudaStreamSynchronize": ([c_void_p], None),
    "cudaStreamBeginCapture": ([c_void_p, c_int], None),
    "cudaStreamEndCapture": ([c_void_p, c_void_p], 1),
    "cudaGraphInstantiateWithFlags": ([c_void_p, c_void_p, c_ulonglong], 0),
    "cudaGraphLaunch": ([c_void_p, c_void_p], None),
    "cudaGraphExecDestroy": ([c_void_p], None),
    "cudaGraphDestroy": ([c_void_p], None),
    "cudaEventCreateWithFlags": ([c_void_p, c_uint], 0),
    "cudaEventRecord": ([c_void_p, c_void_p], None),
    "cudaEventSynchronize": ([c_void_p], None),
    "cudaEventElapsedTime": ([c_float, c_void_p, c_void_p], 0),
    "cudaEventDestroy": ([c_void_p], None),
}
#: Arguments that cuda-python wants as one of its enumerations: function -> (index among the inputs, enumeration).
_ENUMS = {
    "cudaMemcpyAsync": (3, "cudaMemcpyKind"),
    "cudaStreamBeginCapture": (1, "cudaStreamCaptureMode"),
    "cudaDeviceGetAttribute": (0, "cudaDeviceAttr"),
}

#: (function, inputs) -> (status, text of the error or "", output or None)
Caller = Callable[..., tuple[int, str, Any]]


class CudaError(RuntimeError):
    """The CUDA runtime refused a call: function, code and its text."""


def ctypes_caller(library: Any) -> Caller:
    """Calls into a libcudart loaded with ctypes. Raises AttributeError where it lacks one of the functions."""
    for name, (types, output) in _FUNCTIONS.items():
        pointers = [ctypes.POINTER(t) if i == output else t for i, t in enumerate(types)]
        getattr(library, name).argtypes = pointers
    library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(name: str, *inputs: Any) -> tuple[int, str, Any]:
        types, output = _FUNCTIONS[name]
        arguments: list[Any] = list(inputs)
        value = None
        if output is not None:
            value = types[output]()
            arguments.insert(output, ctypes.byref(value))
        status = int(getattr(library, name)(*arguments))
        text = library.cudaGetErrorString(status).decode() if status else ""
        return status, text, None if value is None else value.value or 0

    return call


def bindings_caller(runtime: Any) -> Caller:
    """Calls through cuda-python's module ``cuda.bindings.runtime``."""

    def call(name: str, *inputs: Any) -> tuple[int, str, Any]:
        arguments = list(inputs)
        if name in _ENUMS:
            index, enumeration = _ENUMS[name]
            arguments[index] = getattr(runtime, enumeration)(arguments[index])
        status, *outputs = getattr(runtime, name)(*arguments)
        text = "" if int(status) == 0 else runtime.cudaGetErrorString(status)[1].decode()
        if not outputs or outputs[0] is None:
            return int(status), text, None
        value = outputs[0]
        return int(status), text, value if isinstance(value, float) else int(value)

    return call


def find_libraries() -> list[str]:
    """libcudart files to try, best first: by name, of NVIDIA's wheels, of CUDA toolkits."""
    wheels = [p for root in sys.path if root for p in sorted(glob.glob(f"{root}/nvidia/*/lib/libcudart.so*"))]
    return [*_SONAMES, *wheels, *sorted(glob.glob("/usr/local/cuda*/lib64/libcudart.so*"))]


def find_caller() -> Caller:
    """How to call CUDA on this machine.

    Raises:
        ReplayError: neither cuda-python nor a libcudart is there, or the one that the environment names is unusable.
    """
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        try:
            return ctypes_caller(ctypes.CDLL(chosen))
        except (OSError, AttributeError) as error:
            raise ReplayError(f"{ENVIRONMENT_VARIABLE} is {chosen}; it cannot be used: {error}") from None
    try:
        return bindings_caller(importlib.import_module("cuda.bindings.runtime"))
    except ImportError:
        pass
    for path in find_libraries():
        try:
            return ctypes_caller(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
    raise ReplayError(
        "no CUDA runtime library is here; install one with `pip install cuda-python`, or let "
        f"{ENVIRONMENT_VARIABLE} name a libcudart.so"
    )


class Cuda:
    """The functions as methods; each raises CudaError where CUDA refuses. Copies and fills are asynchronous."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def call(self, name: str, *inputs: Any) -> Any:
        """Call a function of _FUNCTIONS with its inputs; returns its output, if it has one."""
        status, text, value = self._caller(name, *inputs)
        if status != 0:
            raise CudaError(f"{name} failed with CUDA error {status}: {text}")
        return value

    def device_count(self) -> int:
        """GPUs that this process can use; 0 also where there is no driver."""
        status, _, value = self._caller("cudaGetDeviceCount")
        return int(value) if status == 0 else 0

    def forget_error(self) -> None:
        """Clear the calling thread's last error, which a refused call leaves behind for whoever asks next."""
        self._caller("cudaGetLastError")

    def set_device(self, index: int) -> None:
        """Make ``index`` the calling thread's GPU."""
        self.call("cudaSetDevice", index)

    def compute_capability(self, index: int) -> str:
        """Of a GPU, such as ``90``; empty where there is no such GPU."""
        if index >= self.device_count():
            return ""
        major, minor = (self.call("cudaDeviceGetAttribute", a, index) for a in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
        return f"{major}{minor}"

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses, host or device."""
        if nbytes:
            self.call("cudaMemcpyAsync", target, source, nbytes, _COPY_DEFAULT, stream)

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """Set ``nbytes`` bytes of device memory to ``value``."""
        if nbytes:
            self.call("cudaMemsetAsync", target, value, nbytes, stream)


@functools.cache
def cuda() -> Cuda:
    """The CUDA of this process. Raises ReplayError as find_caller does."""
    return Cuda(find_caller())


class DeviceBuffer:
    """``nbytes`` of device memory at ``address``; freed by close() or with the object."""

    def __init__(self, api: Cuda, nbytes: int) -> None:
        require(nbytes >= 0, f"nbytes is {nbytes}; it must not be negative")
        self._cuda = api
        self.nbytes = nbytes
        self.address = 0
        self.address = int(api.call("cudaMalloc", max(nbytes, 1)))

    def upload(self, array: np.ndarray, stream: int, offset: int = 0) -> None:
        """Copy a dense array to byte ``offset``; ``array`` must live and stay as it is until the stream got there."""
        data = np.ascontiguousarray(array)
        self._check(offset, data.nbytes)
        self._cuda.copy(self.address + offset, data.ctypes.data, data.nbytes, stream)

    def download(self, target: np.ndarray, stream: int, offset: int = 0) -> None:
        """Copy from byte ``offset`` into the dense array ``target``; valid once the stream has got there."""
        require(target.flags.c_contiguous, "target is not dense")
        self._check(offset, target.nbytes)
        self._cuda.copy(target.ctypes.data, self.address + offset, target.nbytes, stream)

    def fill(self, value: int, stream: int) -> None:
        """Set every byte to ``value``."""
        self._cuda.fill(self.address, value, self.nbytes, stream)

    def _check(self, offset: int, nbytes: int) -> None:
        inside = offset >= 0 and offset + nbytes <= self.nbytes
        require(inside, f"bytes {offset}..{offset + nbytes} are outside a buffer of {self.nbytes} bytes")

    def close(self) -> None:
        """Free the memory."""
        address, self.address = self.address, 0
        if address:
            self._cuda.call("cudaFree", address)

    def __del__(self) -> None:
        _close_quietly(self)


class HostBuffer:
    """Pinned host memory: ``array`` of ``shape`` and numpy ``dtype``, zeros at first."""

    def __init__(self, api: Cuda, shape: tuple[int, ...], dtype: Any) -> None:
        self._cuda = api
        self.address = 0
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.nbytes = nbytes
        self.address = int(api.call("cudaHostAlloc", max(nbytes, 1), 0))
        raw = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.address)
        self.array = np.frombuffer(raw, dtype=np.uint8)[:nbytes].view(dtype).reshape(shape)
        self.array[...] = 0

    def close(self) -> None:
        """Free the memory; ``array`` must not be used afterwards."""
        address, self.address = self.address, 0
        if address:
            self.array = np.zeros(0, np.uint8)
            self._cuda.call("cudaFreeHost", address)

    def __del__(self) -> None:
        _close_quietly(self)


class Stream:
    """A stream that does not wait for the default one."""

    def __init__(self, api: Cuda) -> None:
        self._cuda = api
        self.handle = 0
        self.handle = int(api.call("cudaStreamCreateWithFlags", _NON_BLOCKING))

    def synchronize(self) -> None:
        """Wait until everything in the stream is done. Raises CudaError for what went wrong in it."""
        self._cuda.call("cudaStreamSynchronize", self.handle)

    def capture(self, work: Callable[[], None]) -> Graph:
        """A graph of what ``work`` puts into this stream; nothing runs meanwhile."""
        self._cuda.call("cudaStreamBeginCapture", self.handle, _CAPTURE_RELAXED)
        try:
            work()
        except BaseException:
            # Leave the stream usable; what went wrong inside counts, not how the capture ends.
            with contextlib.suppress(CudaError):
                self._cuda.call("cudaGraphDestroy", self._cuda.call("cudaStreamEndCapture", self.handle))
            raise
        return Graph(self._cuda, int(self._cuda.call("cudaStreamEndCapture", self.handle)))

    def close(self) -> None:
        """End the stream."""
        handle, self.handle = self.handle, 0
        if handle:
            self._cuda.call("cudaStreamDestroy", handle)

    def __del__(self) -> None:
        _close_quietly(self)


class Graph:
    """A captured graph, ready to be launched any number of times."""

    def __init__(self, api: Cuda, graph: int) -> None:
        self._cuda = api
        self.handle = 0
        try:
            self.handle = int(api.call("cudaGraphInstantiateWithFlags", graph, 0))
        finally:
            api.call("cudaGraphDestroy", graph)

    def launch(self, stream: int) -> None:
        """Put the graph into a stream."""
        self._cuda.call("cudaGraphLaunch", self.handle, stream)

    def close(self) -> None:
        """Free the graph."""
        handle, self.handle = self.handle, 0
        if handle:
            self._cuda.call("cudaGraphExecDestroy", handle)

    def __del__(self) -> None:
        _close_quietly(self)


class Event:
    """A point in a stream, with its time."""

    def __init__(self, api: Cuda) -> None:
        self._cuda = api
        self.handle = 0
        self.handle = int(api.call("cudaEventCreateWithFlags", 0))

    def record(self, stream: int) -> None:
        """Put the event into a stream."""
        self._cuda.call("cudaEventRecord", self.handle, stream)

    def milliseconds_since(self, earlier: Event) -> float:
        """Time between two events that were recorded, waiting for this one."""
        self._cuda.call("cudaEventSynchronize", self.handle)
        return float(self._cuda.call("cudaEventElapsedTime", earlier.handle, self.handle))

    def close(self) -> None:
        """Free the event."""
        handle, self.handle = self.handle, 0
        if handle:
            self._cuda.call("cudaEventDestroy", handle)

    def __del__(self) -> None:
        _close_quietly(self)


def _close_quietly(thing: Any) -> None:
    """For __del__, where the interpreter, or CUDA, may be half gone."""
    with contextlib.suppress(Exception):
        thing.close()
