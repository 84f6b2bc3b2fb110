"""``doctor --engine``: an engine that runs here, and what is said of one that does not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_standin import StandInBuild
from cli_cases import call
from oracles import tiny_hf_dir

from trtllm_replayssm import plugins
from trtllm_replayssm.build import build_engine, engine
from trtllm_replayssm.directories import sha256_of
from trtllm_replayssm.doctor import command
from trtllm_replayssm.doctor.engines import examine_engine
from trtllm_replayssm.models.checkpoint import convert

FOUND: dict[str, dict[str, Any]] = {
    "tensorrt": {"status": "ok", "version": "8.6.0"},
    "library": {"status": "ok", "version": "0.1.0"},
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine directory as the stand-in builder leaves it, and the library that it was built with."""
    file = tmp_path / "library.so"
    file.write_bytes(b"library")
    convert(tiny_hf_dir("byte", tmp_path / "hf"), tmp_path / "checkpoint", dtype="float32")
    monkeypatch.setattr(engine, "find_tensorrt", lambda *asked: StandInBuild("8.6").trt)
    monkeypatch.setattr(engine, "_register_plugins", lambda: ("0.1.0", sha256_of(file)))
    monkeypatch.setattr(plugins, "library_path", lambda: file)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    return tmp_path / "engine"


def test_an_engine_that_runs(directory: Path) -> None:
    row = examine_engine(str(directory), FOUND)
    assert row["runs"] and row["do"] == "" and row["name"] == str(directory)
    assert row["detail"].startswith("nemotron_h, float32, window 16, 0 drafts, 8 sequences of ")
    assert row["detail"].endswith("tensorrt 8.6.0")


@pytest.mark.parametrize(
    "changes, detail, do",
    [
        ({"tensorrt": {"status": "missing"}}, "needs tensorrt 8.6.0, which is not here", "pip install tensorrt"),
        (
            {"tensorrt": {"status": "ok", "version": "10.3"}},
            "built with tensorrt 8.6.0; here is tensorrt 10.3",
            "build",
        ),
        ({"library": {"status": "missing"}}, "needs the plugin library, which is missing", "make lib"),
        ({"library": {"status": "ok", "version": "0.2.0"}}, "built with plugin library 0.1.0", "build"),
    ],
)
def test_an_engine_that_does_not(directory: Path, changes: dict[str, Any], detail: str, do: str) -> None:
    row = examine_engine(str(directory), {**FOUND, **changes})
    assert not row["runs"] and detail in row["detail"] and do in row["do"]


def test_damaged_and_absent_ones(directory: Path, tmp_path: Path) -> None:
    whole = (directory / "decay.npz").read_bytes()
    (directory / "decay.npz").write_bytes(whole[:-30])
    assert "decay.npz cannot be used" in examine_engine(str(directory), FOUND)["detail"]
    with np.load(io.BytesIO(whole)) as rates:
        np.savez(directory / "decay.npz", **{name: -rate for name, rate in rates.items()})
    assert "every rate must be finite and 0 or negative" in examine_engine(str(directory), FOUND)["detail"]
    (directory / "rank0.engine").write_bytes(b"other")
    assert "it is cut off" in examine_engine(str(directory), FOUND)["detail"]
    assert examine_engine(str(directory), FOUND)["do"].endswith(f"{directory} --overwrite")
    absent = examine_engine(str(tmp_path / "none"), FOUND)
    assert "is not a directory" in absent["detail"] and absent["do"].endswith(f" CHECKPOINT {tmp_path / 'none'}")
    other = examine_engine(str(tmp_path / "checkpoint"), FOUND)  # build would not overwrite it
    assert not other["runs"] and "--overwrite" not in other["do"]


def test_the_command(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both engines are in the report and its table; one that does not run makes the exit code 1."""
    monkeypatch.setattr(command, "run_in_child", lambda names, timeout: {
        name: {"status": "ok", "version": "0.1.0", "detail": "", **FOUND.get(name, {})} for name in names
    } | {"library": {"status": "ok", "version": "0.1.0", "detail": "", "architectures": ["90"]}})  # fmt: skip
    assert call(["doctor", "--engine", directory, "--json"]) == 0
    assert [row["runs"] for row in json.loads(capsys.readouterr().out)["engines"]] == [True]
    assert call(["doctor", "--engine", directory]) == 0
    assert capsys.readouterr().out.endswith("\n\nthe core works, and every engine runs\n")
    assert call(["doctor", "--engine", directory, "--engine", "/nowhere"]) == 1
    shown = capsys.readouterr().out
    assert shown.endswith("\n\nengine /nowhere does not run here\n")
    assert "/nowhere" in shown and "window 16" in shown and "is not a directory" in shown
