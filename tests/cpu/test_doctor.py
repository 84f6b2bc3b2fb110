"""doctor: the self-test and its teeth, probes of good, missing and broken packages, what they mean, the command.

Broken packages are real ones on a child's path: they raise, exit, crash or hang when imported. GPUs are described to
the judging code, and to the probes by stand-ins for torch and nvidia-smi.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_replayssm import __version__, reference
from trtllm_replayssm.doctor import add_arguments, command, examine, main, probes, selftest
from trtllm_replayssm.errors import ReplayError

KINDS = {"mamba2", "gated_delta", "kimi_delta", "causal_conv"}
GPU = {"name": "NVIDIA H200", "arch": "90", "memory": 150_000_000_000, "class": "h200"}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(words))


def operations(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**{name: getattr(reference, name) for name in reference.__all__}, **changed})


def found(**changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Probe results of a machine where everything is there, with changes."""
    ok = {"status": "ok", "version": "1.0", "detail": "fine"}
    names = ("python", *probes.PACKAGES, *probes.PROBES)
    result = {name: dict(ok) for name in names}
    result["torch"]["gpus"] = [GPU]
    result["library"]["architectures"] = ["90"]
    return {**result, **changed}


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_selftest_passes(dtype: str) -> None:
    errors = selftest.run(reference, "cpu", dtype)
    assert set(errors) == KINDS
    assert selftest.passed(errors, dtype)


def test_selftest_sees_rejections_and_folds() -> None:
    """Rows keep different numbers, 0 and all included; the window folds several times."""
    kept = [selftest._kept(step) for step in range(selftest._STEPS)]
    assert {n for step in kept for n in step} == set(range(selftest._TOKENS + 1))
    assert any(len(set(step)) == selftest._ROWS for step in kept)
    assert min(sum(row) for row in zip(*kept, strict=True)) > 2 * selftest._WINDOW


@pytest.mark.parametrize("name", ["mamba2_step", "gated_delta_step", "conv_step"])
def test_selftest_teeth(name: str) -> None:
    """Operations that keep rejected tokens, or return NaN, must fail."""
    real = getattr(reference, name)

    def keeps_all(*args: Any, accepted: Any = None, **options: Any) -> Any:
        return real(*args, **options)

    def not_a_number(*args: Any, **options: Any) -> Any:
        return real(*args, **options) * float("nan")

    for wrong in (keeps_all, not_a_number):
        errors = selftest.run(operations(**{name: wrong}))
        assert not selftest.passed(errors)
    assert float("inf") in errors.values()
    assert not selftest.passed({})


def test_selftest_teeth_of_the_state() -> None:
    """A materialize that forgets the last row must fail."""

    def forgets(pool: Any, src: Any, count: Any, dst: Any, **options: Any) -> None:
        reference.materialize(pool, src, count + 2, dst, **options)  # -1 (all) becomes 1

    errors = selftest.run(operations(materialize=forgets))
    assert all(errors[kind] > 1e-3 for kind in KINDS - {"causal_conv"})


def test_selftest_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    result = probes.probe_selftest()
    assert result["status"] == "ok"
    assert "largest error" in result["detail"]
    monkeypatch.setattr(selftest, "run", lambda *_: {"mamba2": float("inf"), "causal_conv": 0.0})
    result = probes.probe_selftest()
    assert (result["status"], result["errors"]) == ("broken", {"mamba2": None, "causal_conv": 0.0})
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(selftest, "run", lambda ops, *rest: seen.append((ops.__name__, *rest)) or {"mamba2": 0.0})
    assert probes.probe_selftest_cuda()["status"] == probes.probe_selftest_kernels()["status"] == "ok"
    package = "trtllm_replayssm"
    assert seen == [(f"{package}.reference", "cuda", "float64"), (f"{package}.kernels", "cuda", "float32")]


@pytest.mark.parametrize(
    ("version", "low", "below", "fits"),
    [
        ("2.13.0+cpu", "2.6", "", True),
        ("2.5.1", "2.6", "", False),
        ("10.14.1.48", "8.6", "11", True),
        ("11.0.0", "8.6", "11", False),
        ("1.2.1", "1.2.1", "1.2.2", True),
        ("1.2.0", "1.2.1", "1.2.2", False),
        ("nightly", "1.0", "", False),
        ("nightly", "", "", True),
    ],
)
def test_version_range(version: str, low: str, below: str, fits: bool) -> None:
    assert probes.in_range(version, low, below) is fits


def make_packages(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source, encoding="utf-8")


def test_broken_packages_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an import does, its package is reported and the others are still looked at."""
    make_packages(
        tmp_path,
        rich="raise RuntimeError('half\\ninstalled')",
        tokenizers="import os, sys; print('bye', file=sys.stderr, flush=True); os._exit(3)",
        jinja2="raise SystemExit(4)",
        matplotlib="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        tensorrt="print('welcome to stdout'); __version__ = '12.0'",
        tensorrt_rtx="__version__ = '1.2'",
        tensorrt_llm="import a_missing_dependency",
        safetensors="__version__ = 7",
        numpy="import time; time.sleep(60)",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["rich", "tokenizers", "jinja2", "matplotlib", "tensorrt", "tensorrt_rtx", "tensorrt_llm", "safetensors"]
    results = probes.run_in_child(names, timeout=60)
    assert {name: r["status"] for name, r in results.items()} == {
        "rich": "broken", "tokenizers": "broken", "jinja2": "broken", "matplotlib": "broken",
        "tensorrt": "unsupported", "tensorrt_rtx": "ok", "tensorrt_llm": "broken", "safetensors": "broken",
    }  # fmt: skip
    assert results["rich"]["detail"] == "RuntimeError: half installed"
    assert results["tokenizers"]["detail"] == "the process ended with exit code 3: bye"
    assert results["matplotlib"]["detail"].startswith("the process ended with signal 11")
    assert (results["tensorrt"]["version"], results["tensorrt"]["detail"]) == ("12.0", "needs >= 8.6 and < 12")
    assert "a_missing_dependency" in results["tensorrt_llm"]["detail"]
    assert "no version" in results["safetensors"]["detail"]
    hung = probes.run_in_child(["numpy", "cmake"], timeout=3)
    assert hung["numpy"] == {"status": "broken", "detail": "no answer within 3 s"}
    assert hung["cmake"]["status"] in ("ok", "missing")


def test_a_package_of_the_working_directory_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that the doctor is called in does not stand in for the package that is installed."""
    make_packages(tmp_path, trtllm_replayssm="raise RuntimeError('not this one')", rich="raise OSError('nor this')")
    monkeypatch.chdir(tmp_path)
    assert probes.run_in_child(["rich"], timeout=60)["rich"]["status"] in ("ok", "missing")


def test_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    results = probes.run_in_child(["rich", "numpy"])
    assert [r["status"] for r in results.values()] == ["broken", "broken"]
    assert "no child process" in results["rich"]["detail"]


def test_child_protocol(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results on stdout as JSON lines, everything else on stderr."""
    monkeypatch.setitem(probes.PROBES, "loud", lambda: print("noise", flush=True) or {"status": "ok"})
    monkeypatch.setitem(probes.PROBES, "bad", lambda: 1 / 0)
    keep = os.dup(1)
    try:
        probes.child_main(["loud", "bad"])
    finally:
        os.dup2(keep, 1)
        os.close(keep)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [line.get("begin") or line["name"] for line in lines] == ["loud", "loud", "bad", "bad"]
    assert lines[1]["result"] == {"status": "ok"}
    assert lines[3]["result"] == {"status": "broken", "detail": "ZeroDivisionError: division by zero"}


def test_probe_of_installed_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.probe_package("numpy")["status"] == "ok"
    # tokenizers and the like may have no __version__: the metadata has it.
    monkeypatch.setitem(sys.modules, "rich", SimpleNamespace())
    assert probes.probe_package("rich")["status"] == "ok"
    monkeypatch.setitem(probes.PACKAGES, "no_such_package", ("no-such-package", "", ""))
    assert probes.probe_package("no_such_package") == {"status": "missing", "detail": ""}
    monkeypatch.setitem(sys.modules, "no_such_package", SimpleNamespace())
    assert probes.probe_package("no_such_package")["status"] == "broken"


def test_probe_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    props = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150_000_000_000)
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda i: props)
    fake = SimpleNamespace(__version__="2.9.0", version=SimpleNamespace(cuda="12.8"), cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", fake)
    result = probes.probe_torch()
    assert result["gpus"] == [GPU, GPU]
    assert result["detail"] == "CUDA 12.8; 2 GPU(s)"
    fake.__version__ = "1.13"
    assert probes.probe_torch()["detail"].startswith("needs >= 2.6")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert probes.probe_torch()["status"] == "missing"


def make_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def test_probe_of_driver_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("NVCC", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    assert probes.probe_driver()["status"] == "missing"
    assert probes.probe_nvcc() == probes.probe_cmake() == {"status": "missing", "detail": ""}
    make_tool(tmp_path, "nvidia-smi", "echo '570.10, NVIDIA H200, 143771 MiB'")
    make_tool(tmp_path, "cmake", "echo 'cmake version 3.28.1'")
    wheel = tmp_path / "nvidia" / "cu13" / "bin"
    wheel.mkdir(parents=True)
    make_tool(wheel, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.1'")
    driver = {"status": "ok", "version": "570.10", "detail": "NVIDIA H200, 143771 MiB"}
    assert probes.probe_driver() == driver
    assert probes.probe_cmake()["version"] == "3.28.1"
    nvcc = {"status": "ok", "version": "13.0", "detail": str(wheel / "nvcc")}
    assert probes.probe_nvcc() == nvcc
    make_tool(tmp_path, "nvidia-smi", "echo 'no devices'; exit 9")
    make_tool(tmp_path, "cmake", "echo hello")
    assert probes.probe_driver()["status"] == probes.probe_cmake()["status"] == "broken"
    monkeypatch.setenv("NVCC", str(tmp_path / "cmake"))
    assert probes.probe_nvcc()["status"] == "broken"
    assert probes._output([str(tmp_path / "gone")]) is None


def test_probe_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_replayssm.kernels import library

    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "lib.so"))
    assert probes.probe_library() == {"status": "missing", "detail": "not built"}
    (tmp_path / "lib.so").write_bytes(b"no library")
    library.load.cache_clear()
    assert probes.probe_library()["status"] == "broken"
    monkeypatch.setattr(library, "info", lambda: {"version": "0.1.0", "architectures": "80 90"})
    assert probes.probe_library()["architectures"] == ["80", "90"]
    monkeypatch.setitem(sys.modules, "trtllm_replayssm.kernels", None)
    assert probes.probe_library()["status"] == "missing"


def test_probe_of_the_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child each: registered with tensorrt_rtx; refused because another copy was there first; nothing to ask."""
    from trtllm_replayssm import plugins

    result = probes.run_in_child(["plugins"])["plugins"]
    assert result["status"] == "ok" and "ReplayMamba2, ReplayGatedDelta in TensorRT for RTX 1." in result["detail"]
    assert [line.split()[:2] for line in result["lines"]] == [["registered", name] for name in plugins.PLUGIN_FIELDS]
    make_packages(tmp_path, tensorrt_rtx="raise ImportError('broken')", tensorrt="raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    alone = probes.run_in_child(["plugins"])["plugins"]
    assert alone == {"status": "missing", "detail": "no TensorRT to register with", "do": ""}
    first = f"import ctypes, sys; sys.path.remove({str(tmp_path)!r}); del sys.modules['tensorrt_rtx']\n"
    second = tmp_path / "second_library.so"
    first += f"import tensorrt_rtx; ctypes.CDLL({str(second)!r}).initTrtllmReplaySsmPlugins(None, None)"
    second.write_bytes(plugins.library_path().read_bytes())
    (tmp_path / "tensorrt_rtx" / "__init__.py").write_text(first)
    clash = probes.run_in_child(["plugins"])["plugins"]
    assert clash["status"] == "broken" and "another creator has that name" in clash["detail"]
    assert clash["lines"][0].startswith("refused ReplayCausalConv")
    part = command._part("plugins", clash)
    assert (part["do"], part["status"]) == ("", "broken")
    rows = by_name(command.capabilities(found(plugins=clash)))
    assert rows["TensorRT engine builds"]["detail"] == "plugins is broken"
    assert rows["engines for TensorRT-LLM"]["works"] is False
    monkeypatch.setenv("TRTLLM_REPLAYSSM_LIBRARY", str(tmp_path / "none.so"))
    assert probes.run_in_child(["plugins"])["plugins"] == {"status": "missing", "detail": "library not built"}


def test_everything_there() -> None:
    rows = by_name(command.capabilities(found()))
    for name in ("reference decoding on the CPU", "reference decoding on CUDA", "CUDA kernels", "plan --plot"):
        assert rows[name]["works"]
        assert rows[name]["do"] == ""


MISSING = {"status": "missing", "detail": ""}


@pytest.mark.parametrize(
    ("changed", "capability", "detail", "do"),
    [
        ({"torch": MISSING}, "reference decoding on CUDA", "torch is missing", "pip install torch safetensors"),
        (
            {"torch": {"status": "ok", "gpus": []}, "driver": MISSING},
            "reference decoding on CUDA",
            "sees no GPU",
            "driver",
        ),
        (
            {"torch": {"status": "ok", "gpus": []}},
            "reference decoding on CUDA",
            "does not use",
            "--force-reinstall torch",
        ),
        (
            {"selftest": {"status": "broken", "detail": "error 3.0"}},
            "reference decoding on the CPU",
            "error 3.0",
            "report it",
        ),
        ({"matplotlib": MISSING}, "plan --plot", "matplotlib is missing", "pip install matplotlib"),
        ({"library": MISSING}, "CUDA kernels", "library not built", "make lib"),
        ({"library": {"status": "broken", "detail": "ABI 3"}}, "CUDA kernels", "ABI 3", "make lib"),
        ({"torch": {"status": "ok", "gpus": []}}, "CUDA kernels", "torch sees no GPU", "driver"),
        (
            {"torch": {"status": "ok", "gpus": [{**GPU, "arch": "100"}]}},
            "CUDA kernels",
            "no code for sm_100",
            'make lib CUDA_ARCHS="90 100"',
        ),
    ],
)
def test_what_is_missing_and_what_to_do(changed: dict[str, Any], capability: str, detail: str, do: str) -> None:
    row = by_name(command.capabilities(found(**changed)))[capability]
    assert not row["works"]
    assert detail in row["detail"]
    assert do in row["do"]


def test_without_a_selftest() -> None:
    results = found(torch=MISSING)
    del results["selftest"]
    row = by_name(command.capabilities(results))["reference decoding on the CPU"]
    assert (row["works"], row["detail"]) == (False, "needs torch, which is missing")


def test_parts_that_this_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not command._has_module("no_such_part")
    assert not command._has_module("no_such_part.inner")
    row = command._needs("dreams", found(), ["torch"], "no_such_part")
    assert row["detail"] == f"not part of version {__version__}"
    monkeypatch.setitem(command._PART_MODULES, "tensorrt", "no_such_part")
    part = command._part("tensorrt", MISSING)
    assert (part["do"], part["detail"]) == ("", f"not used by version {__version__}")
    monkeypatch.setitem(command._PART_MODULES, "tensorrt", "plan")
    assert command._part("tensorrt", MISSING)["do"] == "pip install 'tensorrt>=10,<12'"


def test_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command._python()["status"] == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert command._python()["status"] == "unsupported"


def run_with(monkeypatch: pytest.MonkeyPatch, **changed: dict[str, Any]) -> list[list[str]]:
    """Let examine() see found(**changed); returns the groups of probes that it asks for."""
    asked: list[list[str]] = []

    def child(names: list[str], timeout: float) -> dict[str, Any]:
        asked.append(list(names))
        return {name: result for name, result in found(**changed).items() if name in names}

    monkeypatch.setattr(command, "run_in_child", child)
    return asked


def test_command_prints_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = run_with(monkeypatch, matplotlib=MISSING)
    assert main(parse()) == 0
    assert asked[1] == ["selftest", "selftest_cuda", "selftest_kernels"]
    text = capsys.readouterr().out
    assert "GPU NVIDIA H200, sm_90, 139.7 GiB, planner preset h200" in text
    assert text.count("pip install matplotlib") == 1
    assert text.rstrip().endswith("the core works")


def test_command_reports_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(monkeypatch, selftest={"status": "broken", "detail": "largest error 1.0"})
    assert main(parse("--json")) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["core_works"] is False
    run_with(monkeypatch, selftest={"status": "broken", "detail": "largest error 1.0"})
    assert main(parse()) == 1
    assert "the core does not work" in capsys.readouterr().out


def test_no_selftest_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_with(monkeypatch, torch=MISSING)
    report = examine()
    assert len(asked) == 1
    assert report["core_works"] is False
    part = by_name(report["parts"])["torch"]
    assert (part["status"], part["do"]) == ("missing", "pip install torch safetensors")


def test_cpu_machine_runs_the_cpu_selftest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["registered ReplayMamba2 1 replayssm"]
    asked = run_with(monkeypatch, torch={"status": "ok", "gpus": []}, plugins={"status": "ok", "lines": lines})
    report = examine()
    assert report["core_works"] and report["registered"] == lines
    assert asked[1] == ["selftest"]


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf"])
def test_bad_timeout(timeout: str) -> None:
    with pytest.raises(ReplayError, match="timeout is"):
        main(parse("--timeout", timeout))


def test_here(capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing on this machine: torch is there, so the core works; the JSON is all of stdout."""
    assert main(parse("--json")) == 0
    report = json.loads(capsys.readouterr().out)
    parts = by_name(report["parts"])
    assert parts["torch"]["status"] == "ok"
    assert set(parts) == set(command._PARTS)
    first = report["capabilities"][0]
    assert first["works"]
    assert "replay against recurrence" in first["detail"]
