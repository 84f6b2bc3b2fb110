"""The native library as `make lib` builds it, without a GPU: it loads, says what it is, exports its own names alone."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from trtllm_replayssm import RecurrenceSpec, __version__, kernels
from trtllm_replayssm.kernels import abi

LIBRARY = kernels.library_path()
INVALID_ARGUMENT = 1  # replayssm_status
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


CALLS = [
    ("mamba2_step", {"tokens": 0}, "tokens is 0; it must be from 1 to 4"),
    ("mamba2_step", {"tokens": 5}, "tokens is 5; it must be from 1 to 4"),
    ("mamba2_step", {"rows": -1}, "rows is -1"),
    ("mamba2_step", {"rows": 65536}, "rows is 65536"),
    ("mamba2_step", {}, "slots"),
    ("mamba2_scan", {"sequences": -1}, "sequences is -1"),
    ("mamba2_scan", {"exact": 2}, "exact is 2"),
    ("mamba2_scan", {"tokens": -1}, "tokens is -1"),
    ("mamba2_scan", {}, "slots"),
]
CALLS += [(name.replace("mamba2", "gated_delta"), change, message) for name, change, message in CALLS]


def call(name: str, change: dict[str, int]) -> int:
    """Status of an operation without a slot index, on one row or sequence of one token unless ``change`` says more."""
    kind = "mamba2" if name.startswith("mamba2") else "gated_delta"
    params = abi.OPERATIONS[f"replayssm_{name}"]()
    params.struct_size = ctypes.sizeof(params)
    params.spec = abi.c_recurrence_spec(
        RecurrenceSpec(kind, nheads=2, ngroups=1, headdim=64, dstate=64, window=4, spec_len=4)
    )
    defaults = {"rows": 1, "tokens": 1} if name.endswith("step") else {"sequences": 1, "tokens": 1, "exact": 0}
    for member, value in (defaults | change).items():
        setattr(params, member, value)
    return int(getattr(kernels.library.load(), f"replayssm_{name}")(ctypes.byref(params), None))


@pytest.mark.parametrize("name, change, message", CALLS)
def test_steps_and_scans_refuse_what_they_are_told_about_rows(name: str, change: dict[str, int], message: str) -> None:
    assert call(name, change) == INVALID_ARGUMENT
    assert message in kernels.library.load().replayssm_last_error().decode()


@pytest.mark.parametrize("name, count", [("step", "rows"), ("scan", "sequences")])
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta"])
def test_nothing_to_do_is_fine_and_needs_no_gpu(kind: str, name: str, count: str) -> None:
    assert call(f"{kind}_{name}", {count: 0}) == 0
