"""Builds the GDN and KDA kernels, their own CUDA source and C interface, as a library that runs on the CPU."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from emulator_build import EMULATOR, FLAGS, PLUGINS, cuda_include, replace_once, without_ptx

from trtllm_replayssm.kernels import gated_delta, library, mamba2, state, tensors

KERNELS = ("launch", "materialize", "step_bf16_fp32", "step_bf16_bf16")
GENERIC = ("step_generic_bf16", "step_generic_fp16", "step_generic_fp32")
SCANS = ("scan_launch", "scan_bf16", "scan_fp16", "scan_fp32", "scan_chunk", "scan_chunk_gdn", "scan_chunk_kda")
SHARED_MEMORY = {
    "step_kernel.cuh": 128,
    "step_single.cuh": 128,
    "materialize.cu": 128,
    "scan_kernel.cuh": 128,
    "scan_chunk_kernel.cuh": 1024,
}


class StepLibrary:
    """Sources in ``folder``/src, objects beside them. Compiled in parallel, on two cores in some 15 seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sources, self.corruptions = folder, folder / "src", 0
        for part in ("common", "mamba2_replay", "c_api", "gated_delta_replay"):
            shutil.copytree(PLUGINS / part, self.sources / part)
        for place, host in (("async_copy.cuh", "bulk_copy_host.cuh"), ("launch.h", "launch_host.h")):
            assert (self.sources / "common" / place).is_file()
            shutil.copy(EMULATOR / host, self.sources / "common" / place)
        ptx = self.sources / "common" / "tensor_core.cuh"
        ptx.write_text(without_ptx(ptx.read_text(), (EMULATOR / "tensor_core_host.cuh").read_text()))
        for host in ("async_copy_host.cuh", "tensor_core_host.cuh"):
            shutil.copy(EMULATOR / host, self.sources / "common")
        shutil.copy(EMULATOR / "delta_step_library.cpp", self.sources)
        for kernel, alignment in SHARED_MEMORY.items():
            path = self.sources / "gated_delta_replay" / kernel
            path.write_text(
                replace_once(path.read_text(), f"extern __shared__ __align__({alignment}) char smem[];", "")
            )

    def build(self) -> Path:
        """The library with everything in it."""
        names = [f"gated_delta_replay/{name}.cu" for name in (*KERNELS, *GENERIC, *SCANS)]
        names += ["common/reset.cu", "c_api/layout.cpp", "c_api/gated_delta.cpp", "c_api/mamba2.cpp"]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.compile, [*names, "delta_step_library.cpp"]))
        return self.link("step.so")

    def corrupted(self, header: str, old: str, new: str, kernel: str = "step_bf16_fp32") -> Path:
        """A library whose kernel (the tuned one for fp32 states) was compiled with other text in one of its headers.

        Every one has a name of its own: the loader takes a name that it has loaded before for the same library.
        """
        path = self.sources / "gated_delta_replay" / header
        text = path.read_text()
        path.write_text(replace_once(text, old, new))
        self.compile(f"gated_delta_replay/{kernel}.cu")
        path.write_text(text)
        self.corruptions += 1
        return self.link(f"corrupted-{self.corruptions}.so")

    def compile(self, source: str) -> None:
        """One source to an object."""
        include, target = cuda_include(), self.folder / (source.replace("/", "_") + ".o")
        flags = [*FLAGS, "-fPIC", "-include", str(EMULATOR / "cuda_on_host.h"), f"-I{EMULATOR}", f"-I{self.sources}"]
        flags += [f"-I{include}", f"-I{include / 'cccl'}"]
        flags += ['-DREPLAYSSM_VERSION_STRING="emulated"', '-DREPLAYSSM_ARCH_STRING="90"']
        command = ["c++", *flags, "-x", "c++", "-c", str(self.sources / source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    def link(self, name: str) -> Path:
        """All objects to a shared library."""
        out = self.folder / name
        objects = [str(path) for path in sorted(self.folder.glob("*.o"))]
        done = subprocess.run(["c++", "-shared", "-o", str(out), *objects], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-4000:]
        return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StepLibrary:
    """The library, built for a module's tests."""
    out = StepLibrary(tmp_path_factory.mktemp("step"))
    out.build()
    return out


@pytest.fixture
def emulated(built: StepLibrary, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """CPU pools go to the emulated library; call it with a path for another one."""

    def use(path: Path) -> None:
        bound = library.bind(path)
        monkeypatch.setattr(library, "load", lambda: bound)

    for module in (mamba2, gated_delta, state):
        monkeypatch.setattr(module, "on_gpu", lambda pool: True)
    monkeypatch.setattr(tensors, "stream_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    use(built.folder / "step.so")
    return use
