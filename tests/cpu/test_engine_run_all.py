"""tests/engine/run_all.sh with a stand-in for Python and TensorRT: what it runs in which order, and what it reports."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Builds fp32 engines, hangs in an fp16 build with window 16 and fails in the other; the check of float32-w1 fails.
PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$*" in
"-m trtllm_replayssm build"*)
    case "$*" in
    *float16-w16*) sleep 60 ;;
    *float16*) exit 2 ;;
    *) mkdir -p "$5" && touch "$5/rank0.engine" ;;
    esac ;;
*check_model.py*float32-w1\ *) exit 3 ;;
*check_model.py*) echo "| float32 | 16 | equal |" >>"$4" ;;
*check_plugins.py*) echo "plugins are equal" >"$2" ;;
*bench_step.py*"${UNTIMED:-none}"*) exit 4 ;;
*bench_step.py*) echo "times" >>"$4" ;;
esac
"""


def run(tmp_path: Path, *parts: str, **settings: str) -> tuple[subprocess.CompletedProcess[str], list[str], list[str]]:
    """What run_all.sh did, the commands that the stand-in got, and the lines of RESULTS.md."""
    python, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["tests/engine/run_all.sh", str(python), str(tmp_path / "prepared"), str(out), *parts],
        cwd=ROOT,
        env={**os.environ, **settings, "LOG": str(log), "TRTLLM_REPLAYSSM_CUDART": "none"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    called = log.read_text().splitlines() if log.exists() else []
    return done, called, (out / "RESULTS.md").read_text().splitlines()


def test_each_engine_is_built_and_checked_and_none_stops_the_others(tmp_path: Path) -> None:
    done, called, results = run(tmp_path, BUILD_SECONDS="1", CHECK_OPTIONS="--no-graphs", BUILD_OPTIONS="--verbose")
    assert done.returncode == 1, done.stderr
    kinds = [next(word for word in ("plugins", " build ", "check_model", "bench") if word in call) for call in called]
    assert kinds == ["plugins", *[" build ", "check_model"] * 2, " build ", " build ", "bench"]
    assert "engines/float32-w16 " in called[2] and "engines/float32-w1 " in called[4]
    assert all(("--no-graphs" in call) == ("check_model" in call) for call in called)
    assert all(("--verbose" in call) == (" build " in call) for call in called)
    assert (
        results[0] == "plugins are equal"
        and results[-1] == "The model of the checks: times"
        and "| graphs |" in results[1]
    )
    assert results[3:-1] == [
        "| float32 | 16 | equal |",
        "| float32-w1 | | | | | not compared: exit code 3 | | | | | |",
        "| float16-w16 | | | | | no engine: not done after 1 s | | | | | |",
        "| float16-w1 | | | | | no engine: exit code 2 | | | | | |",
    ]
    assert "no pair of float16 engines to time" in done.stdout
    assert "wide-float32 is not there" in done.stdout


def test_wide_engines_are_timed_where_both_are_built(tmp_path: Path) -> None:
    for dtype in ("float32", "float16"):
        (tmp_path / "prepared" / f"wide-{dtype}").mkdir(parents=True)
    done, called, results = run(tmp_path, "wide", BUILD_SECONDS="1")
    assert done.returncode == 1  # the stand-in builds no fp16 engine
    assert [call.split()[0:3][-1] for call in called if " build " in call] == ["build"] * 4
    assert all("/prepared/wide-float" in call for call in called[:2])
    assert [call for call in called if "bench_step.py" in call] == [called[2]] and "wide-float32-w16 " in called[2]
    assert results == ["A model bound by its states (wide_model.py): times"]
    assert "no pair of wide-float16 engines to time" in done.stdout
    told = [call.split("wide-float32 ")[1].split(" ", 1)[1] for call in called[:2]]
    common = "--max-input-len 64 --max-positions 1024"
    assert told == [f"{common} --window 16 --max-batch 256", f"{common} --window 1 --max-batch 256"]
    done, _, results = run(tmp_path, "wide", BUILD_SECONDS="1", UNTIMED="wide-float32-w1")
    assert done.returncode == 1
    assert results == ["A model bound by its states (wide_model.py), wide-float32: not timed", ""]
