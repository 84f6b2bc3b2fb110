"""Byte corpus made from the source of Python's standard library.

Every installation of Python has this text, so anybody can repeat the training and the held-out measurement. A file is
held out or trained on by the hash of its path below the library's folder, so a module stays on its side of the split
in every Python version. Byte 0 never occurs in source files; it separates documents and is the models' bos, eos and
pad token.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_replayssm.errors import ReplayError, require

SEPARATOR = 0
VOCAB_SIZE = 256
#: One file in this many is held out.
HELD_OUT_ONE_IN = 16
#: Folders left out: other people's packages, tests (many distributions drop them) and generated tables.
SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "lib-dynload",
    }
)
#: Generated at Python's own build and full of the building machine's paths.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Corpus:
    """Two byte streams. train, held_out: [n] uint8 on the CPU; each document is followed by one separator byte."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def standard_library() -> Path:
    """Folder that holds the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Whether the file at this path (below the library's folder, with forward slashes) belongs to the held-out part."""
    digest = hashlib.sha256(relative_path.encode("utf-8")).digest()
    return digest[0] % HELD_OUT_ONE_IN == 0


def source_files(root: Path) -> list[str]:
    """Sorted relative paths of the .py files of the corpus below ``root``."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        parts = relative.parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        found.append(relative.as_posix())
    return sorted(found)


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus below ``root`` (default: the running Python's standard library).

    Raises:
        ReplayError: ``root`` is no readable folder, or one side of the split would be empty.
    """
    root = standard_library() if root is None else root
    require(root.is_dir(), f"--data is {str(root)!r}; it must be a folder of .py files")
    streams: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    names: dict[bool, list[str]] = {False: [], True: []}
    for name in source_files(root):
        try:
            text = (root / name).read_bytes()
        except OSError as error:
            raise ReplayError(f"--data file {name!r} cannot be read: {error.strerror}") from error
        if not text or SEPARATOR in text:
            continue
        side = is_held_out(name)
        streams[side] += text
        streams[side].append(SEPARATOR)
        names[side].append(name)
    require(
        bool(names[False]) and bool(names[True]),
        f"--data is {str(root)!r} with {len(names[False])} training and {len(names[True])} held-out files; "
        "both must be at least 1",
    )
    return Corpus(
        train=torch.frombuffer(streams[False], dtype=torch.uint8),
        held_out=torch.frombuffer(streams[True], dtype=torch.uint8),
        train_files=tuple(names[False]),
        held_out_files=tuple(names[True]),
    )


def random_windows(stream: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``count`` windows of ``length`` + 1 bytes at random places.

    stream [n] uint8 on any device; ``generator`` is a CPU one, so the draw does not depend on the device.
    Returns [count, length + 1] int64 on the stream's device.

    Raises:
        ReplayError: the stream is shorter than one window.
    """
    require(stream.numel() > length + 1, f"the text has {stream.numel()} bytes; a window needs more than {length + 1}")
    starts = torch.randint(0, stream.numel() - length - 1, (count, 1), generator=generator)
    index = starts.to(stream.device) + torch.arange(length + 1, device=stream.device)
    return stream[index].long()


def cut_windows(stream: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Cut ``stream`` [n] into windows of at most ``length`` + 1 bytes that overlap by one byte.

    Every byte but the first is predicted exactly once; the context starts anew in each window.
    """
    return [stream[start : start + length + 1].long() for start in range(0, stream.numel() - 1, length)]


def excerpt(stream: torch.Tensor, pieces: int, length: int) -> torch.Tensor:
    """``pieces`` evenly spaced windows of ``length`` + 1 bytes of ``stream`` [n]: [pieces, length + 1] int64."""
    require(
        stream.numel() >= pieces * (length + 1),
        f"the text has {stream.numel()} bytes; {pieces} pieces of {length + 1} need {pieces * (length + 1)}",
    )
    stride = (stream.numel() - length - 1) // max(pieces - 1, 1)
    return torch.stack([stream[i * stride : i * stride + length + 1].long() for i in range(pieces)])
