"""The native library as `make lib` builds it, without a GPU: it loads, says what it is, exports its own names alone."""

from __future__ import annotations

import subprocess

import pytest

from trtllm_replayssm import __version__, kernels
from trtllm_replayssm.kernels import abi

LIBRARY = kernels.library_path()
#: What TensorRT looks up in a plugin library, the explicit registration, and what a preloaded library interposes.
TENSORRT_ENTRIES = {
    "getCreators",
    "getPluginCreators",
    "setLoggerFinder",
    "initTrtllmReplaySsmPlugins",
    "createInferRuntime_INTERNAL",
    "createInferBuilder_INTERNAL",
}


@pytest.fixture(autouse=True)
def built() -> None:
    assert LIBRARY.is_file(), "run `make lib` first (`make test` does)"


def test_it_loads_without_a_gpu_and_says_what_it_is() -> None:
    info = kernels.info()
    assert info["version"] == __version__
    assert info["abi"] == str(abi.ABI_VERSION)
    assert set(info["architectures"].split()) <= {"80", "89", "90", "100", "120"}
    assert info["architectures"]


def test_every_operation_of_the_binding_is_exported() -> None:
    library = kernels.load()
    assert [name for name in abi.OPERATIONS if not hasattr(library, name)] == []


def test_it_exports_its_interfaces_alone() -> None:
    names = subprocess.run(["nm", "-D", "--defined-only", str(LIBRARY)], check=True, capture_output=True, text=True)
    symbols = [line.split()[-1] for line in names.stdout.splitlines()]
    assert {name for name in symbols if not name.startswith("replayssm_")} == TENSORRT_ENTRIES


def test_it_links_neither_tensorrt_nor_a_cuda_library() -> None:
    needs = subprocess.run(["objdump", "-p", str(LIBRARY)], check=True, capture_output=True, text=True).stdout
    libraries = [line.split()[1] for line in needs.splitlines() if "NEEDED" in line]
    assert libraries
    assert [name for name in libraries if "nvinfer" in name or "cuda" in name or "torch" in name] == []
