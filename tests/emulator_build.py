"""Compiles programs of tests/emulator: a scan's own CUDA source for the CPU, its PTX functions replaced."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
EMULATOR = ROOT / "tests" / "emulator"
FLAGS = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]


def cuda_include() -> Path:
    """Folder of the CUDA headers: of the toolkit that nvcc belongs to, of CUDA_HOME, or of the PyPI wheels."""
    candidates = []
    nvcc = shutil.which(os.environ.get("NVCC") or "nvcc")
    if nvcc:
        candidates.append(Path(nvcc).resolve().parents[1] / "include")
    if os.environ.get("CUDA_HOME"):
        candidates.append(Path(os.environ["CUDA_HOME"]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    candidates += [Path(root) / "nvidia/cu13/include" for root in (*site.getsitepackages(), site.getusersitepackages())]
    needed = ("cuda_runtime.h", "cuda_bf16.h", "crt/host_defines.h")
    for folder in candidates:
        if all((folder / name).is_file() for name in needed):
            return folder
    pytest.fail("the CUDA headers are not there: run `make lib` first, which installs them where there is no toolkit")


def replace_once(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times: the kernel's source has changed"
    return text.replace(old, new)


def without_ptx(source: str, host: str) -> str:
    """tensor_core.cuh less the functions that are PTX, which `host` defines; all others stay the kernel's own."""
    kept, dropped = [], set()
    for part in source.split("\n\n"):
        if "asm" in part:
            dropped |= set(re.findall(r"__forceinline__ [^()]*?(\w+)\(", part.split("asm")[0]))
            dropped |= set(re.findall(r"^class (\w+)", part, re.MULTILINE))
        else:
            kept.append(part)
    dropped.discard("init")  # a method of SplitBarrier
    assert {"ldmatrix", "mma", "warpgroup_mma", "copy16", "SplitBarrier"} <= dropped, sorted(dropped)
    missing = [name for name in dropped if not re.search(rf"\b{name}\b", host)]
    assert not missing, f"the emulator lacks {missing}"
    text = "\n\n".join(kept)
    for name in ("split(", "pack_bf16(", "silu_fast(", "low_bf16(", "struct SharedMatrix", "REPLAYSSM_WGMMA 1"):
        assert name in text, f"{name} is no longer the kernel's own"
    return replace_once(text, '#include "async_copy.cuh"', '#include "tensor_core_host.cuh"')


def build(
    folder: Path,
    name: str,
    kernels: str,
    corruption: tuple[str, str, str] | None = None,
    copies: str = "async_copy_host.cuh",
    flags: tuple[str, ...] = (),
) -> Path:
    """The program tests/emulator/``name``.cpp, compiled, for the kernels of the folder plugins/``kernels``.

    corruption: (header of ``kernels`` or of common, text, other text) to change in the kernel first. copies: what
    stands in for common/async_copy.cuh. flags: further ones of the compiler.
    """
    for part in sorted({"common", "mamba2_replay", "c_api", kernels}):
        (folder / part).mkdir(parents=True)
        for header in (*(PLUGINS / part).glob("*.h"), *(PLUGINS / part).glob("*.cuh")):
            shutil.copy(header, folder / part)
    ptx = folder / "common" / "tensor_core.cuh"
    ptx.write_text(without_ptx(ptx.read_text(), (EMULATOR / "tensor_core_host.cuh").read_text()))
    shutil.copy(EMULATOR / "tensor_core_host.cuh", folder / "common")
    cluster = folder / "common" / "cluster.cuh"
    assert all(f" {name}(" in cluster.read_text() for name in ("meet_cluster", "arrive_in_block", "send_to_block"))
    shutil.copy(EMULATOR / "cluster_host.cuh", cluster)
    kernel = folder / "gated_delta_replay" / "scan_chunk_kernel.cuh"
    if kernel.is_file():  # blocks of a cluster have shared memory each
        declared, ours = (
            "extern __shared__ __align__(1024) char smem[];",
            "char* const smem = shared_of(emulator::rank);",
        )
        kernel.write_text(replace_once(kernel.read_text(), declared, ours))
    place = folder / "common" / "async_copy.cuh"
    assert "shared_address(" in place.read_text()
    shutil.copy(EMULATOR / copies, place)
    if copies != "async_copy_host.cuh":
        shutil.copy(EMULATOR / "async_copy_host.cuh", place.parent)
    for source in (folder / "common" / "chunk_tile.cuh", *(folder / kernels).glob("scan*.cuh")):
        assert "asm" not in re.findall(r"\w+", source.read_text()), f"{source.name} has PTX"
    if corruption:
        name_of_header, old, new = corruption
        changed = folder / (kernels if (folder / kernels / name_of_header).is_file() else "common") / name_of_header
        changed.write_text(replace_once(changed.read_text(), old, new))
    program = folder / name
    include = cuda_include()
    folders = [f"-I{EMULATOR}", f"-I{folder}", f"-I{include}", f"-I{include / 'cccl'}"]
    command = ["c++", *FLAGS, *flags, *folders, str(EMULATOR / f"{name}.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return program
