"""Builds the Mamba-2 kernels, their own CUDA source and C interface, as a library that runs on the CPU."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emulator_build import EMULATOR, PLUGINS, replace_once, without_ptx
from step_emulator import StepLibrary

SHARED_MEMORY = "extern __shared__ __align__({}) char smem[];"
FOLDER = "mamba2_replay"
KERNELS = ("launch", "materialize", "step_bf16_fp32", "step_bf16_bf16", "scan_bf16", "scan_fp32", "scan_mma")
GENERIC = ("step_generic_bf16", "step_generic_fp32")
ALIGNED = {"step_kernel.cuh": 128, "scan_kernel.cuh": 128, "materialize_kernel.cuh": 128, "scan_mma_kernel.cuh": 1024}


class Mamba2Library(StepLibrary):
    """As StepLibrary, with the step, scan and materialize of Mamba-2; fp16 activations end in an error."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sources, self.corruptions = folder, folder / "src", 0
        for part in ("common", FOLDER, "c_api", "gated_delta_replay"):
            shutil.copytree(PLUGINS / part, self.sources / part)
        common = self.sources / "common"
        for place, host in (("async_copy.cuh", "bulk_copy_host.cuh"), ("launch.h", "launch_host.h")):
            assert (common / place).is_file()
            shutil.copy(EMULATOR / host, common / place)
        for host in ("async_copy_host.cuh", "tensor_core_host.cuh"):
            shutil.copy(EMULATOR / host, common)
        ptx = common / "tensor_core.cuh"
        ptx.write_text(without_ptx(ptx.read_text(), (EMULATOR / "tensor_core_host.cuh").read_text()))
        shutil.copy(EMULATOR / "mamba2_library.cpp", self.sources)
        for kernel, bytes_ in ALIGNED.items():
            path = self.sources / FOLDER / kernel
            path.write_text(replace_once(path.read_text(), SHARED_MEMORY.format(bytes_), ""))

    def build(self) -> Path:
        """The library with everything in it."""
        names = [f"{FOLDER}/{name}.cu" for name in (*KERNELS, *GENERIC)]
        names += ["common/reset.cu", "c_api/layout.cpp", "c_api/gated_delta.cpp", "c_api/mamba2.cpp"]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.compile, [*names, "mamba2_library.cpp"]))
        return self.link("mamba2.so")

    def corrupted_scan(self, folder: str, header: str, old: str, new: str) -> Path:
        """A library whose exact scan for fp32 activations was compiled with other text in one of its headers."""
        path = self.sources / folder / header
        text = path.read_text()
        path.write_text(replace_once(text, old, new))
        self.compile(f"{FOLDER}/scan_fp32.cu")
        path.write_text(text)
        self.corruptions += 1
        return self.link(f"corrupted-{self.corruptions}.so")
