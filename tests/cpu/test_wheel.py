"""The wheel: built from a copy of the sources, installed elsewhere, used from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "trtllm_replayssm" / "lib" / "libtrtllm_replayssm.so"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tmp_path: Path, *, library: bool) -> Path:
    """A wheel of the package as it lies here, with or without the library."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", *(() if library else ("lib",)))
    shutil.copytree(ROOT / "trtllm_replayssm", source / "trtllm_replayssm", ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "dist", ".", cwd=source)
    (wheel,) = (tmp_path / "dist").iterdir()
    return wheel


@pytest.mark.parametrize("library", [True, False])
def test_wheel_installs_and_runs(tmp_path: Path, library: bool) -> None:
    assert LIBRARY.is_file(), "run `make lib` first"
    wheel = build(tmp_path, library=library)
    tag = wheel.stem.split("-", 2)[2]
    assert (tag == "py3-none-any") is not library, wheel.name
    assert tag.startswith("py3-none-"), wheel.name
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    code = (
        "import trtllm_replayssm, trtllm_replayssm.kernels.library as library; print(trtllm_replayssm.__file__);"
        "print(library.library_path().is_file() and library.info()['architectures'])"
    )
    where, architectures = run(
        sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site), TRTLLM_REPLAYSSM_LIBRARY=""
    ).splitlines()
    assert Path(where).is_relative_to(site)
    assert (architectures != "False") is library, architectures
    assert (site / "trtllm_replayssm" / "py.typed").is_file()
