"""``trtllm-replayssm doctor``: runs the probes, judges what they mean for each capability, prints both."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .. import __version__
from ..errors import require
from ..plan.report import align
from .engines import examine_engine
from .probes import BROKEN, MISSING, OK, PACKAGES, UNSUPPORTED, Result, run_in_child

_PYTHONS = ((3, 10), (3, 13))
_NVCC_WHEELS = "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm nvidia-cuda-crt"
#: Part -> (what it is for, the command that puts it right).
_PARTS = {
    "python": ("everything", "install Python 3.10 to 3.13 and make its environment anew: make PYTHON=python3.12 demo"),
    "numpy": ("everything", "pip install 'numpy>=1.24'"),
    "torch": ("decoding", "pip install torch safetensors"),
    "safetensors": ("checkpoints", "pip install torch safetensors"),
    "tokenizers": ("checkpoints with a tokenizer", "pip install tokenizers jinja2"),
    "jinja2": ("chat templates", "pip install tokenizers jinja2"),
    "matplotlib": ("plan --plot", "pip install matplotlib"),
    "rich": ("progress bars", "pip install rich"),
    "transformers": ("tests only", "pip install 'transformers>=5.20,<6'"),
    "driver": ("CUDA", "install NVIDIA's driver, on a machine with an NVIDIA GPU"),
    "nvcc": ("make lib", f"pip install {_NVCC_WHEELS}"),
    "cmake": ("CMake builds", "pip install cmake"),
    "library": ("CUDA kernels", "make lib"),
    "tensorrt": ("engines (8.6, 10.x, 11.x)", "pip install 'tensorrt>=10,<12'"),
    "tensorrt_rtx": ("checks without a GPU", "pip install tensorrt-rtx"),
    "plugins": ("TensorRT plugins", "make lib"),
    "tensorrt_llm": ("TensorRT-LLM 1.2.1", "pip install tensorrt_llm==1.2.1"),
}
#: Parts that serve a module which a version of this package may lack.
_PART_MODULES = {"tensorrt": "build", "tensorrt_rtx": "build", "plugins": "plugins", "tensorrt_llm": "trtllm"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor`` to a parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="for each group of probes (default 120)"
    )
    parser.add_argument(
        "--engine", action="append", default=[], metavar="DIR", help="an engine directory to judge; may be repeated"
    )


def main(args: argparse.Namespace) -> int:
    """Run ``doctor``. Returns 0 where decoding on the CPU works (its self-test) and every engine runs, else 1."""
    ok = math.isfinite(args.timeout) and args.timeout > 0
    require(ok, f"timeout is {args.timeout}; it must be a positive number of seconds")
    report = examine(args.timeout, args.engine)
    print(json.dumps(report, indent=1, allow_nan=False) if args.json else render(report))
    return 0 if report["core_works"] and all(row["runs"] for row in report["engines"]) else 1


def examine(timeout: float = 120.0, engines: Sequence[str] = ()) -> dict[str, Any]:
    """The whole report: ``core_works``, ``parts``, ``capabilities``, ``registered`` (plugins) and ``engines``.

    Never raises for what is missing or broken.
    """
    names = [*PACKAGES, "driver", "nvcc", "cmake", "library", "plugins"]
    found = {"python": _python(), **run_in_child(names, timeout)}
    # Self-tests run last, and only where what they need was importable.
    if _usable(found["torch"]):
        tests = ["selftest"]
        if found["torch"].get("gpus"):
            tests += ["selftest_cuda", *(["selftest_kernels"] if _usable(found["library"]) else [])]
        found.update(run_in_child(tests, timeout))
    parts = [_part(name, found[name]) for name in _PARTS]
    core = found.get("selftest", {}).get("status") == OK
    return {
        "version": __version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "core_works": core,
        "parts": parts,
        "gpus": found["torch"].get("gpus", []),
        "capabilities": capabilities(found),
        "registered": found["plugins"].get("lines", []),
        "engines": [examine_engine(path, found) for path in engines],
    }


def _python() -> Result:
    version, (low, high) = sys.version_info[:2], _PYTHONS
    text = platform.python_version()
    if low <= version <= high:
        return {"status": OK, "version": text, "detail": sys.executable}
    detail = f"needs {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return {"status": UNSUPPORTED, "version": text, "detail": detail}


def _usable(result: Mapping[str, Any]) -> bool:
    return result["status"] in (OK, UNSUPPORTED)


def _part(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    purpose, command = _PARTS[name]
    command = result.get("do", command)
    detail = result.get("detail", "")
    if not _has_module(_PART_MODULES.get(name, "plan")):
        command, detail = "", detail or f"not used by version {__version__}"
    return {
        "name": name,
        "for": purpose,
        "status": result["status"],
        "version": result.get("version"),
        "detail": detail,
        "do": "" if result["status"] == OK else command,
    }


def capabilities(found: Mapping[str, Result]) -> list[dict[str, Any]]:
    """What works: name, works, why or why not, and the one command that would change it ('' where none would)."""
    torch, library = found["torch"], found["library"]
    rows = [_from_test("reference decoding on the CPU", found, "selftest", "torch")]
    rows.append(_needs("convert and run checkpoints", found, ["torch", "safetensors"], "models.checkpoint"))
    rows.append(_needs("tokenizers, chat templates", found, ["tokenizers", "jinja2"], "runtime.tokenizer"))
    rows.append(_needs("plan --plot", found, ["matplotlib"], "plan"))
    if torch.get("gpus"):
        rows.append(_from_test("reference decoding on CUDA", found, "selftest_cuda", "torch"))
    else:
        rows.append(_no_cuda(found))
    rows.append(_kernels(found, torch, library))
    rows.append(_needs("TensorRT engine builds", found, ["tensorrt", "library", "plugins", "driver"], "build"))
    rows.append(_needs("network checks without a GPU", found, ["tensorrt_rtx"], "build"))
    rows.append(_needs("engines for TensorRT-LLM", found, ["tensorrt_llm", "library", "plugins"], "trtllm"))
    return rows


def _row(name: str, works: bool, detail: str, command: str = "") -> dict[str, Any]:
    return {"name": name, "works": works, "detail": detail, "do": "" if works else command}


def _no_cuda(found: Mapping[str, Result]) -> dict[str, Any]:
    name = "reference decoding on CUDA"
    if not _usable(found["torch"]):
        return _row(name, False, f"torch is {found['torch']['status']}", _PARTS["torch"][1])
    if found["driver"]["status"] != OK:
        return _row(name, False, "torch sees no GPU", _PARTS["driver"][1])
    return _row(name, False, "torch does not use the GPU", "pip install --force-reinstall torch")


def _from_test(name: str, found: Mapping[str, Result], test: str, package: str) -> dict[str, Any]:
    if test not in found:
        return _row(name, False, f"needs {package}, which is {found[package]['status']}", _PARTS[package][1])
    result = found[test]
    works = result["status"] == OK
    return _row(name, works, result["detail"], "report it with the output of: trtllm-replayssm doctor --json")


def _needs(name: str, found: Mapping[str, Result], parts: list[str], module: str) -> dict[str, Any]:
    if not _has_module(module):
        return _row(name, False, f"not part of version {__version__}")
    for part in parts:
        status = found[part]["status"]
        if status != OK:
            return _row(name, False, f"{part} is {status}", _PARTS[part][1])
    versions = ", ".join(f"{part} {found[part].get('version', '')}".strip() for part in parts)
    return _row(name, True, f"has {versions}")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"trtllm_replayssm.{name}") is not None
    except ImportError:
        return False


def _kernels(found: Mapping[str, Result], torch: Result, library: Result) -> dict[str, Any]:
    name = "CUDA kernels"
    if library["status"] != OK:
        detail = {MISSING: "library not built", BROKEN: library["detail"]}[library["status"]]
        return _row(name, False, detail, _PARTS["library"][1])
    gpus = torch.get("gpus") or []
    if not gpus:
        return _row(name, False, f"library built ({library['detail']}), but torch sees no GPU", _PARTS["driver"][1])
    missing = sorted({gpu["arch"] for gpu in gpus} - set(library["architectures"]))
    if missing:
        archs = " ".join([*library["architectures"], *missing])
        return _row(name, False, f"library has no code for sm_{missing[0]}", f'make lib CUDA_ARCHS="{archs}"')
    return _from_test(name, found, "selftest_kernels", "torch")


def render(report: Mapping[str, Any]) -> str:
    """The report as two tables and a verdict."""
    parts = [("part", "version", "status", "for", "detail")]
    for part in report["parts"]:
        parts.append((part["name"], part["version"] or "-", part["status"], part["for"], part["detail"]))
    works = [("capability", "works", "detail")]
    for row in report["capabilities"]:
        works.append((row["name"], "yes" if row["works"] else "no", row["detail"]))
    # One line per command, under the name of the first thing that it puts right.
    todo: dict[str, str] = {}
    for row in (*report["parts"], *report["capabilities"], *report["engines"]):
        if row["do"]:
            todo.setdefault(row["do"], f"{row['name']}:")
    head = f"trtllm-replayssm {report['version']} on {report['platform']}"
    gpus = [f"GPU {g['name']}, sm_{g['arch']}, {g['memory'] / (1 << 30):.1f} GiB"
            + (f", planner preset {g['class']}" if g["class"] else "") for g in report["gpus"]]  # fmt: skip
    sections = ["\n".join([head, *gpus]), align(parts, left=5, indent=""), align(works, left=3, indent="")]
    if report["engines"]:
        engines = [(row["name"], "yes" if row["runs"] else "no", row["detail"]) for row in report["engines"]]
        sections.append(align([("engine", "runs", "detail"), *engines], left=3, indent=""))
    if todo:
        rows = [(name, command) for command, name in todo.items()]
        sections.append("what to do about the rest\n" + align(rows, left=2))
    return "\n\n".join([*sections, verdict(report)])


def verdict(report: Mapping[str, Any]) -> str:
    """The last line: what failed where :func:`main` returns 1, else that the core works."""
    failed = [] if report["core_works"] else ["the core does not work: see the first capability"]
    failed += [f"engine {row['name']} does not run here" for row in report["engines"] if not row["runs"]]
    return "; ".join(failed) or "the core works" + (", and every engine runs" if report["engines"] else "")
