"""Probes: one look at one thing each, run in a child process so that nothing that is broken can take the doctor down.

The child writes JSON lines: ``{"begin": NAME}`` before a probe, its result behind it. Whatever a package prints while
it is imported goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ReplayError

OK, MISSING, BROKEN, UNSUPPORTED = "ok", "missing", "broken", "unsupported"
#: Import name -> (distribution, lowest version, first version that is too new), empty where there is no limit.
PACKAGES = {
    "numpy": ("numpy", "1.24", ""),
    "torch": ("torch", "2.6", ""),
    "safetensors": ("safetensors", "0.4.3", ""),
    "tokenizers": ("tokenizers", "0.20", ""),
    "jinja2": ("jinja2", "3.1", ""),
    "matplotlib": ("matplotlib", "3.8", ""),
    "rich": ("rich", "13", ""),
    "transformers": ("transformers", "5.20", "6"),
    "tensorrt": ("tensorrt", "8.6", "12"),
    "tensorrt_rtx": ("tensorrt-rtx", "", ""),
    "tensorrt_llm": ("tensorrt-llm", "1.2.1", "1.2.2"),
}
#: What the child runs; the names of its probes are its arguments. The working directory, which Python puts in front of
#: sys.path as '', would replace the installed package by a checkout that the doctor is called in.
_CHILD = (
    "import sys; sys.path[:] = [part for part in sys.path if part]; "
    "from trtllm_replayssm.doctor.probes import child_main; child_main(sys.argv[1:])"
)
Result = dict[str, Any]


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def in_range(version: str, low: str, below: str) -> bool:
    """Whether low <= version < below; an empty limit does not limit."""
    number = version_tuple(version)
    return (not low or number >= version_tuple(low)) and (not below or number < version_tuple(below))


def probe_package(name: str) -> Result:
    """Import a package of PACKAGES and judge its version."""
    distribution, low, below = PACKAGES[name]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return {"status": MISSING, "detail": ""}
        return {"status": BROKEN, "detail": _one_line(error)}
    except BaseException as error:  # an import may raise anything, SystemExit included
        return {"status": BROKEN, "detail": _one_line(error)}
    version = getattr(module, "__version__", None) or _metadata_version(distribution)
    if not isinstance(version, str):
        return {"status": BROKEN, "detail": "imports, but has no version"}
    result: Result = {"status": OK, "version": version, "detail": ""}
    if not in_range(version, low, below):
        wanted = " and ".join(f"{sign} {limit}" for sign, limit in ((">=", low), ("<", below)) if limit)
        result.update(status=UNSUPPORTED, detail=f"needs {wanted}")
    return result


def probe_torch() -> Result:
    """probe_package plus CUDA and the GPUs that torch sees."""
    result = probe_package("torch")
    if result["status"] in (MISSING, BROKEN):
        return result
    import torch

    from ..plan.presets import device_class

    result["cuda"] = torch.version.cuda
    result["gpus"] = gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(index)
            gpus.append({"name": props.name, "arch": f"{props.major}{props.minor}", "memory": props.total_memory,
                         "class": device_class(props.name)})  # fmt: skip
    built = f"CUDA {result['cuda']}" if result["cuda"] else "CPU build"
    result["detail"] = "; ".join(part for part in (result["detail"], built, f"{len(gpus)} GPU(s)") if part)
    return result


def probe_driver() -> Result:
    """NVIDIA driver and the GPUs that it lists."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {"status": MISSING, "detail": "nvidia-smi is not on PATH"}
    fields = "driver_version,name,memory.total"
    done = _output([smi, f"--query-gpu={fields}", "--format=csv,noheader"])
    if done is None or not done.strip():
        return {"status": BROKEN, "detail": "nvidia-smi reports no GPU"}
    lines = [[cell.strip() for cell in line.split(",")] for line in done.strip().splitlines()]
    names = "; ".join(", ".join(line[1:]) for line in lines)
    return {"status": OK, "version": lines[0][0], "detail": names}


def probe_nvcc() -> Result:
    """The CUDA compiler that `make lib` would take."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    wheels = [p for root in sys.path if root for p in sorted(Path(root).glob("nvidia/*/bin/nvcc"), reverse=True)]
    candidates = [os.environ.get("NVCC"), shutil.which("nvcc"), str(Path(home) / "bin" / "nvcc"), *map(str, wheels)]
    path = next((c for c in candidates if c and os.access(c, os.X_OK)), None)
    return _tool(path, r"release (\d+\.\d+)")


def probe_cmake() -> Result:
    """cmake on PATH."""
    return _tool(shutil.which("cmake"), r"cmake version (\S+)")


def probe_library() -> Result:
    """The native library: is it there, does it load, what was it built for."""
    try:
        from ..kernels import library
    except ImportError as error:
        return {"status": MISSING, "detail": _one_line(error)}
    path = library.library_path()
    if not path.is_file():
        return {"status": MISSING, "detail": "not built"}
    try:
        found = library.info()
    except ReplayError as error:
        return {"status": BROKEN, "detail": _one_line(error)}
    detail = f"GPU architectures: {found['architectures']}"
    archs = found["architectures"].split()
    return {"status": OK, "version": found["version"], "detail": detail, "architectures": archs}


def probe_plugins() -> Result:
    """Registration of the plugins with every TensorRT that is here. ``lines``: what the library says of it."""
    from .. import plugins

    if not plugins.library_path().is_file():
        return {"status": MISSING, "detail": "library not built"}
    found = []
    for name in ("tensorrt", "tensorrt_rtx"):
        try:
            found.append(importlib.import_module(name))
        except BaseException:  # probe_package says why
            continue
    if not found:
        return {"status": MISSING, "detail": "no TensorRT to register with", "do": ""}
    try:
        plugins.register()
    except ReplayError as error:
        return {"status": BROKEN, "detail": _one_line(error), "lines": plugins.plugin_status().splitlines(), "do": ""}
    lines = plugins.plugin_status().splitlines()
    # registered NAME VERSION NAMESPACE INTERFACE in PRODUCT (FILE)
    there: dict[str, list[str]] = {}
    for line in lines:
        words, _, place = line.partition(" in ")
        there.setdefault(place.partition(" (")[0], []).append(words.split()[1])
    detail = "; ".join(f"{', '.join(dict.fromkeys(names))} in {place}" for place, names in there.items())
    return {"status": OK, "detail": detail, "lines": lines}


def probe_selftest() -> Result:
    """The self-test with reference/ on the CPU in float64."""
    from .. import reference

    return _selftest(reference, "cpu", "float64")


def probe_selftest_cuda() -> Result:
    """The self-test with reference/ on the GPU in float64."""
    from .. import reference

    return _selftest(reference, "cuda", "float64")


def probe_selftest_kernels() -> Result:
    """The self-test with the CUDA kernels on the GPU in float32."""
    from .. import kernels

    return _selftest(kernels, "cuda", "float32")


def _selftest(operations: Any, device: str, dtype: str) -> Result:
    from . import selftest

    errors = selftest.run(operations, device, dtype)
    status = OK if selftest.passed(errors, dtype) else BROKEN
    worst = max(errors, key=lambda kind: errors[kind])
    detail = f"replay against recurrence, {dtype}: largest error {errors[worst]:.1e} ({worst})"
    return {"status": status, "detail": detail, "errors": {k: _finite(v) for k, v in errors.items()}}


PROBES: dict[str, Callable[[], Result]] = {
    **{name: (lambda name=name: probe_package(name)) for name in PACKAGES},  # type: ignore[misc]
    "torch": probe_torch,
    "driver": probe_driver,
    "nvcc": probe_nvcc,
    "cmake": probe_cmake,
    "library": probe_library,
    "plugins": probe_plugins,
    "selftest": probe_selftest,
    "selftest_cuda": probe_selftest_cuda,
    "selftest_kernels": probe_selftest_kernels,
}


def run_probe(name: str) -> Result:
    """Run one probe; whatever it raises becomes status ``broken``."""
    try:
        return PROBES[name]()
    except BaseException as error:
        return {"status": BROKEN, "detail": _one_line(error)}


def run_in_child(names: Sequence[str], timeout: float = 120.0) -> dict[str, Result]:
    """Results of the named probes, each run in a child process.

    A probe that ends the process or outlives ``timeout`` seconds is reported as broken; the rest runs in a new child.
    """
    results: dict[str, Result] = {}
    left = list(names)
    while left:
        lines, ended = _child(left, timeout)
        begun = [line["begin"] for line in lines if "begin" in line]
        done = {line["name"]: line["result"] for line in lines if "name" in line}
        results.update(done)
        if len(done) < len(left):
            culprit = next((name for name in begun if name not in done), left[0])
            results[culprit] = {"status": BROKEN, "detail": ended}
        left = [name for name in left if name not in results]
    return results


def _child(names: Sequence[str], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """(JSON lines that a child wrote, how it ended)."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-c", _CHILD, *names]
    try:
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, timeout=timeout, env=env, check=False)
        output, errors = done.stdout, done.stderr
        code = f"exit code {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        ended = f"the process ended with {code}"
    except subprocess.TimeoutExpired as error:
        output, errors = error.stdout or b"", error.stderr or b""
        ended = f"no answer within {timeout:.0f} s"
    except OSError as error:
        return [], f"no child process: {error}"
    last = errors.decode(errors="replace").strip().splitlines()
    if last:
        ended += f": {last[-1][:200]}"
    return [json.loads(line) for line in output.decode(errors="replace").splitlines() if line.endswith("}")], ended


def _tool(path: str | None, pattern: str) -> Result:
    if path is None:
        return {"status": MISSING, "detail": ""}
    text = _output([path, "--version"])
    match = re.search(pattern, text or "")
    if match is None:
        return {"status": BROKEN, "detail": f"{path} does not tell its version"}
    return {"status": OK, "version": match.group(1), "detail": path}


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _metadata_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def child_main(names: Sequence[str]) -> None:
    """Write results to the real stdout; anything else that prints there lands on stderr."""
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name in names:
        print(json.dumps({"begin": name}), file=sink, flush=True)
        print(json.dumps({"name": name, "result": run_probe(name)}), file=sink, flush=True)
