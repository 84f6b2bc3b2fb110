"""runtime/cuda.py without a GPU: the two ways of calling CUDA, memory that is freed, errors that name the call.

The ctypes way is tested on a small C library with the functions' signatures; cuda-python's on an object with its form
of results (enumerations in, tuples out), which says so in its name. What CUDA itself does is tested in tests/engine.
"""

from __future__ import annotations

import ctypes
import enum
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_standin import HostCuda

from trtllm_replayssm import ReplayError
from trtllm_replayssm.runtime import cuda
from trtllm_replayssm.runtime.cuda import Cuda, CudaError, DeviceBuffer, Event, HostBuffer, Stream

FAKE_CUDART = r"""
#include <stdlib.h>
#include <string.h>
extern "C" {
int cudaGetDeviceCount(int* n) { *n = 2; return 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetLastError() { return 906; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 9 : device; return 0; }
int cudaMalloc(void** p, size_t n) { if (n > (1u << 30)) return 2; *p = malloc(n); return 0; }
int cudaFree(void* p) { free(p); return 0; }
int cudaHostAlloc(void** p, size_t n, unsigned) { *p = malloc(n); return 0; }
int cudaFreeHost(void* p) { free(p); return 0; }
int cudaMemcpyAsync(void* d, const void* s, size_t n, int kind, void*) {
  if (kind != 4) return 21;
  memcpy(d, s, n);
  return 0;
}
int cudaMemsetAsync(void* d, int v, size_t n, void*) { memset(d, v, n); return 0; }
int cudaStreamCreateWithFlags(void** s, unsigned flags) { *s = (void*)(size_t)(0x700000000000 + flags); return 0; }
int cudaStreamDestroy(void*) { return 0; }
int cudaStreamSynchronize(void* s) { return s == (void*)0x700000000001 ? 0 : 400; }
int cudaStreamBeginCapture(void*, int mode) { return mode == 2 ? 0 : 1; }
int cudaStreamEndCapture(void*, void** g) { *g = (void*)5; return 0; }
int cudaGraphInstantiateWithFlags(void** e, void* g, unsigned long long) { *e = (char*)g + 1; return 0; }
int cudaGraphLaunch(void* e, void*) { return e == (void*)6 ? 0 : 1; }
int cudaGraphExecDestroy(void*) { return 0; }
int cudaGraphDestroy(void* g) { return g == (void*)5 ? 0 : 1; }
int cudaEventCreateWithFlags(void** e, unsigned) { *e = (void*)9; return 0; }
int cudaEventRecord(void*, void*) { return 0; }
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float* ms, void*, void*) { *ms = 1.5f; return 0; }
int cudaEventDestroy(void*) { return 0; }
const char* cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "another error"; }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cudart")
    source, out = folder / "cudart.cpp", folder / "libcudart-for-tests.so"
    source.write_text(FAKE_CUDART)
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "these tests need a C++ compiler"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(out)], check=True)
    return out


class BindingsShape:
    """cuda.bindings.runtime in form: enumerations, (status, outputs...), text of an error in a tuple. Over HostCuda."""

    class cudaError_t(enum.IntEnum):
        cudaSuccess = 0
        cudaErrorMemoryAllocation = 2

    cudaMemcpyKind = enum.IntEnum("cudaMemcpyKind", {"cudaMemcpyDefault": 4})
    cudaStreamCaptureMode = enum.IntEnum("cudaStreamCaptureMode", {"cudaStreamCaptureModeRelaxed": 2})
    cudaDeviceAttr = enum.IntEnum("cudaDeviceAttr", {"major": 75, "minor": 76})

    def __init__(self) -> None:
        self.host = HostCuda()

    def cudaGetErrorString(self, status: Any) -> Any:
        return (self.cudaError_t(0), b"out of memory")

    def cudaMalloc(self, nbytes: int) -> Any:
        return (self.cudaError_t(2), None) if nbytes > 1 << 30 else (self.cudaError_t(0), self.host.cudaMalloc(nbytes))

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: Any, stream: int) -> Any:
        assert isinstance(kind, self.cudaMemcpyKind)
        self.host.cudaMemcpyAsync(target, source, nbytes, kind, stream)
        return (self.cudaError_t(0),)

    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        assert isinstance(attribute, self.cudaDeviceAttr)
        return (self.cudaError_t(0), 9 if attribute == 75 else 0)

    def cudaGetDeviceCount(self) -> Any:
        return (self.cudaError_t(0), 1)

    def cudaEventElapsedTime(self, start: int, end: int) -> Any:
        return (self.cudaError_t(0), 1.5)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        run = getattr(self.host, name, lambda *inputs: 9 if "Create" in name else None)

        def call(*inputs: Any) -> Any:
            value = run(*inputs)
            return (self.cudaError_t(0),) if value is None else (self.cudaError_t(0), value)

        return call


@pytest.fixture(params=["ctypes", "bindings"])
def api(request: pytest.FixtureRequest, library: Path) -> Cuda:
    if request.param == "ctypes":
        return Cuda(cuda.ctypes_caller(ctypes.CDLL(str(library))))
    return Cuda(cuda.bindings_caller(BindingsShape()))


def test_copies_go_there_and_back(api: Cuda) -> None:
    stream = Stream(api)
    device, host = DeviceBuffer(api, 64), HostBuffer(api, (2, 3), np.int32)
    assert not host.array.any() and host.array.shape == (2, 3) and host.nbytes == 24
    host.array[:] = [[1, 2, 3], [4, 5, 6]]
    api.copy(device.address + 8, host.address, host.nbytes, stream.handle)
    out = np.zeros(6, np.int32)
    device.download(out, stream.handle, offset=8)
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    device.upload(np.arange(4, dtype=np.int16)[::2], stream.handle, offset=60)
    device.download(out[:1], stream.handle, offset=60)
    assert out[0] == 2 << 16
    device.fill(0xFF, stream.handle)
    device.download(out, stream.handle)
    assert (out == -1).all()
    stream.synchronize()


def test_graphs_and_events(api: Cuda) -> None:
    stream = Stream(api)
    graph = stream.capture(lambda: None)
    assert graph.handle
    graph.launch(stream.handle)
    begin, end = Event(api), Event(api)
    begin.record(stream.handle)
    end.record(stream.handle)
    assert end.milliseconds_since(begin) == 1.5
    for thing in (graph, begin, end, stream):
        thing.close()
        assert thing.handle == 0
        thing.close()


def test_devices(api: Cuda) -> None:
    assert api.device_count() >= 1
    assert api.compute_capability(0) == "90"
    assert api.compute_capability(7) == ""


def test_errors_name_the_call(api: Cuda) -> None:
    with pytest.raises(CudaError, match="cudaMalloc failed with CUDA error 2: out of memory"):
        DeviceBuffer(api, 1 << 31)


@pytest.mark.parametrize("offset, count", [(-1, 4), (61, 4), (0, 65)])
def test_copies_outside_a_buffer_are_refused(api: Cuda, offset: int, count: int) -> None:
    buffer, data = DeviceBuffer(api, 64), np.zeros(count, np.uint8)
    for move in (buffer.upload, buffer.download):
        with pytest.raises(ReplayError, match="are outside a buffer of 64 bytes"):
            move(data, 0, offset)
    with pytest.raises(ReplayError, match="not dense"):
        buffer.download(np.zeros((4, 4))[:, 1], 0)
    with pytest.raises(ReplayError, match="nbytes is -1"):
        DeviceBuffer(api, -1)


def test_memory_is_freed_once() -> None:
    host = HostCuda()
    api = Cuda(host)
    buffer, pinned = DeviceBuffer(api, 16), HostBuffer(api, (4,), np.float32)
    assert len(host.blocks) == 2
    buffer.close()
    buffer.close()
    del pinned
    assert not host.blocks and host.calls.count("cudaFree") == 1


def test_no_driver_is_no_device() -> None:
    host = HostCuda()
    host.refuse = {"cudaGetDeviceCount"}
    assert Cuda(host).device_count() == 0 and Cuda(host).compute_capability(0) == ""


def test_the_environment_names_the_library(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT_VARIABLE, str(library))
    assert Cuda(cuda.find_caller()).device_count() == 2
    text = tmp_path / "text.so"
    text.write_text("no library")
    for path in (text, tmp_path / "none.so"):
        monkeypatch.setenv(cuda.ENVIRONMENT_VARIABLE, str(path))
        with pytest.raises(ReplayError, match=f"{cuda.ENVIRONMENT_VARIABLE} is .*cannot be used"):
            cuda.find_caller()


def test_where_it_looks(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-python first, then the files that there are; a message where there is nothing."""
    monkeypatch.delenv(cuda.ENVIRONMENT_VARIABLE, raising=False)
    absent = {"cuda": None, "cuda.bindings": None, "cuda.bindings.runtime": None}
    for name, module in absent.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    monkeypatch.setattr(cuda, "find_libraries", lambda: ["/nowhere/libcudart.so", str(library)])
    assert Cuda(cuda.find_caller()).device_count() == 2
    monkeypatch.setattr(cuda, "find_libraries", lambda: ["/nowhere/libcudart.so"])
    with pytest.raises(
        ReplayError, match="no CUDA runtime library is here; install one with `pip install cuda-python`"
    ):
        cuda.find_caller()
    package = SimpleNamespace(bindings=SimpleNamespace(runtime=BindingsShape()))
    monkeypatch.setitem(__import__("sys").modules, "cuda", package)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", package.bindings)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.runtime", package.bindings.runtime)
    assert Cuda(cuda.find_caller()).device_count() == 1


def test_places_of_libraries() -> None:
    found = cuda.find_libraries()
    assert found[0] == "libcudart.so.13" and len(set(found)) == len(found)
