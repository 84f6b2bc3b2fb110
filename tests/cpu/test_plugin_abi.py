"""plugins/abi: sizes, offsets, codes and virtual-table slots, and the build with an SDK's headers in their place.

Checked against the numbers in tests/driver/layout_check.cpp always, and against a TensorRT SDK where the environment
variable TENSORRT_INCLUDE_DIR names its include folder. That the sources build with headers of another namespace is
checked with plugins/abi itself, written out as `namespace nvinfer1`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emulator_build import cuda_include

ROOT = Path(__file__).resolve().parents[2]
ABI = ROOT / "plugins/abi"
FLAGS = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror"]
#: Numbers that layout_check.cpp compares for TensorRT 8 and for 10, and those that it shares with an SDK of that major.
OWN_CHECKS = 143
SDK_CHECKS = {8: 53, 10: 90, 11: 64}


def compiler() -> str:
    found = shutil.which("c++") or shutil.which("g++")
    assert found, "these tests need a C++17 compiler"
    return found


def layout_checks(folder: Path, *flags: str) -> list[str]:
    out = folder / "layout_check"
    command = [compiler(), *FLAGS, *flags, str(ROOT / "tests/driver/layout_check.cpp"), "-o", str(out)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    done = subprocess.run([str(out)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == (0 if all(line.startswith("ok ") for line in lines) else 1)
    return lines


def written_out(header: str, namespace: str) -> str:
    """The declarations of a header of plugins/abi as ``namespace nvinfer1``."""
    text = (ABI / header).read_text()
    opening, closing = f"namespace {namespace} {{\n", f"}} // namespace {namespace}"
    text = text[text.index(opening) : text.index(closing)].replace(opening, "namespace nvinfer1 {\n") + "}\n"
    return text.replace('#include "plugin_v2.inc"', (ABI / "plugin_v2.inc").read_text())


def write_sdk(folder: Path, major: int, change: tuple[str, str] | None = None) -> Path:
    parts = {
        8: [("trt8.h", "replayssm::trt8")],
        10: [("trt10.h", "replayssm::trt10"), ("trt10_v2.h", "replayssm::trt10")],
        11: [("trt10.h", "replayssm::trt10")],
    }[major]
    text = f'#pragma once\n#include "{ABI}/common.h"\n#define NV_TENSORRT_MAJOR {major}\n'
    text += "namespace trt_common = replayssm::trt_common;\n" + "".join(written_out(*part) for part in parts)
    if change is not None:
        assert change[0] in text
        text = text.replace(*change)
    (folder / "NvInferRuntime.h").write_text(text)
    return folder


def test_the_layouts_are_tensorrts(tmp_path: Path) -> None:
    sdk = os.environ.get("TENSORRT_INCLUDE_DIR")
    flags = ["-DTENSORRT_SDK", "-isystem", sdk, "-isystem", str(cuda_include())] if sdk else []
    lines = layout_checks(tmp_path, *flags)
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len([line for line in lines if not line.startswith("ok SDK")]) == OWN_CHECKS
    assert bool(sdk) == any(line.startswith("ok SDK") for line in lines)


@pytest.mark.parametrize("major", [8, 10, 11])
def test_an_sdk_is_compared_with_the_declarations(tmp_path: Path, major: int) -> None:
    lines = layout_checks(tmp_path, "-DTENSORRT_SDK", "-isystem", str(write_sdk(tmp_path, major)))
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert sum(line.startswith("ok SDK") for line in lines) == SDK_CHECKS[major]


@pytest.mark.parametrize(
    ("major", "change", "found"),
    [
        (8, ("    DataType type;\n    TensorFormat format;", "    TensorFormat format;\n    DataType type;"), "format"),
        (10, ("    int64_t d[MAX_DIMS];", "    int32_t d[MAX_DIMS];"), "sizeof Dims"),
        (
            11,
            ("    virtual int32_t setTactic", "    virtual void more() {}\n    virtual int32_t setTactic"),
            "setTactic",
        ),
    ],
)
def test_a_difference_is_found(tmp_path: Path, major: int, change: tuple[str, str], found: str) -> None:
    lines = layout_checks(tmp_path, "-DTENSORRT_SDK", "-isystem", str(write_sdk(tmp_path, major, change)))
    assert any(re.match(rf"FAIL SDK .*{found}", line) for line in lines)


@pytest.mark.parametrize("major", [8, 10, 11])
def test_the_plugins_build_with_an_sdks_headers(tmp_path: Path, major: int) -> None:
    folders = ["-isystem", str(write_sdk(tmp_path, major)), "-isystem", str(cuda_include())]
    for source in ("creators.cpp", "registration.cpp"):
        command = [compiler(), *FLAGS, "-fsyntax-only", "-DREPLAYSSM_TENSORRT_SDK", *folders]
        done = subprocess.run([*command, str(ROOT / "plugins/tensorrt" / source)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
