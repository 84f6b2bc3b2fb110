"""Writing a directory whole or not at all; telling directories apart; hashes of files.

Needs the standard library alone, runs on Python 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ReplayError, require

#: Object of config.json that every engine directory of this package has.
ENGINE_KEY = "replayssm_engine"
_CHUNK = 1 << 22
_ENGINE_OF_TRTLLM = {"pretrained_config", "build_config"}
_PUBLISHED = {"model_type", "architectures", "text_config"}


def refuse_engine(path: Path, config: Mapping[str, Any], instead: str) -> None:
    """Raise ReplayError, which says to give ``instead``, where ``config`` is the config.json of an engine at ``path``.

    Engines of TensorRT-LLM's own builder count too.
    """
    engine = ENGINE_KEY in config or config.keys() >= _ENGINE_OF_TRTLLM
    require(not engine, f"{path} is an engine directory; give {instead}")


def refuse_published(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ReplayError where ``config`` is the config.json of a Hugging Face checkpoint, at ``path``."""
    require(
        "architecture" in config or not _PUBLISHED & config.keys(),
        f"{path} is a Hugging Face checkpoint; convert it first with: trtllm-replayssm convert {path} OUT_DIR",
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises OSError where it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def check_target(
    target: Path, *, overwrite: bool, is_ours: Callable[[Path], bool], what: str, inputs: Sequence[Path] = ()
) -> None:
    """Raise ReplayError unless a directory can be made at ``target``.

    Args:
        target: absolute path. overwrite: whether a directory that ``is_ours`` may be replaced.
        what: how messages call such a directory (``an engine directory of this package``).
        inputs: paths that will be read; a ``target`` that holds one of them is refused.
    """
    try:
        _check_target(target, overwrite, is_ours, what)
        _check_inputs(target, inputs)
    except OSError as error:
        raise ReplayError(f"{target} cannot be written: {error.strerror or error}") from None


def _check_target(target: Path, overwrite: bool, is_ours: Callable[[Path], bool], what: str) -> None:
    require("\0" not in str(target), f"output {str(target)!r} has a zero byte in its name")
    require(not os.path.islink(target), f"{target} is a symbolic link; give the directory itself")
    above = next(path for path in (*target.parents, Path("/")) if os.path.exists(path))
    require(os.path.isdir(above), f"{target} cannot be made: {above} is not a directory")
    if not os.path.lexists(target) or (os.path.isdir(target) and not os.listdir(target)):
        return
    require(overwrite, f"{target} exists; choose another directory or overwrite it (--overwrite)")
    require(os.path.isdir(target) and is_ours(target), f"{target} is not {what}; it is not overwritten")


def _check_inputs(target: Path, inputs: Sequence[Path]) -> None:
    here = Path(os.path.realpath(target))
    for path in inputs:
        real = Path(os.path.realpath(path))
        inside = os.path.exists(target) and here in (real, *real.parents)
        require(not inside, f"{target} holds the input {path}; overwriting would delete it: choose another directory")


@contextmanager
def written_directory(target: Path, inputs: Sequence[Path] = ()) -> Iterator[Path]:
    """A new directory to write into, that becomes ``target`` when the block ends without an error, else vanishes.

    It lies beside ``target`` under a name of its own, so that two writers of one ``target`` do not meet before the end;
    parents are made. What was at ``target`` is replaced: see check_target.

    Args:
        inputs: paths that are read meanwhile; replacing a ``target`` that holds one of them is refused.

    Raises:
        ReplayError: ``target`` holds one of ``inputs``, or cannot be written.
    """
    _check_inputs(target, inputs)
    part: Path | None = None
    made: list[Path] = []
    try:
        made = _make_parents(target.parent)
        part = _new_directory(target)
        yield part
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
        made = []
    except OSError as error:
        raise ReplayError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        for path in reversed(made):
            if path.exists() and not os.listdir(path):
                path.rmdir()


def _new_directory(target: Path) -> Path:
    """A new directory beside ``target`` that no other writer has, with the permissions that mkdir gives."""
    while True:
        part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        with contextlib.suppress(FileExistsError):
            part.mkdir()
            return part


def _make_parents(path: Path) -> list[Path]:
    """Make ``path`` and its parents; the ones that were made, outermost first."""
    missing = [p for p in (path, *path.parents) if not os.path.exists(p)]
    path.mkdir(parents=True, exist_ok=True)
    return missing[::-1]
