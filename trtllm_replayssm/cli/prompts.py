"""Prompts of ``run``: from arguments, files and stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ReplayError, require


def collect(arguments: Sequence[str], files: Sequence[str]) -> list[str]:
    """All prompts, those of the arguments first; stdin where neither is given.

    Args:
        arguments: prompts as they are.
        files: each one prompt, the whole file as it is; a ``.jsonl`` file has one per line, text or an object with a
            ``prompt``; ``-`` is stdin.

    Raises:
        ReplayError: no prompt, an empty one, or a file that cannot be read.
    """
    prompts = list(arguments)
    for i, prompt in enumerate(prompts):
        require(prompt != "", f"prompt {i} is empty; --prompt must have at least one character")
    for name in files:
        prompts += from_file(name)
    if not arguments and not files:
        given = sys.stdin is not None and not sys.stdin.isatty()
        require(given, "no prompt; give --prompt, --prompt-file or text on stdin")
        prompts.append(_stdin())
    return prompts


def from_file(name: str) -> list[str]:
    """The prompts of one file; see :func:`collect`."""
    if name == "-":
        return [_stdin()]
    text = _decoded(read_bytes(Path(name)), name)
    require(text != "", f"{name} is empty; it must hold a prompt")
    if not name.endswith(".jsonl"):
        return [text]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    require(len(lines) > 0, f"{name} has no prompt; it must have one per line")
    return [_from_json(line, f"{name} line {number}") for number, line in lines]


def read_bytes(path: Path) -> bytes:
    """The content of ``path``. Raises ReplayError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReplayError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # a zero byte in the name
        raise ReplayError(f"cannot read {str(path)!r}: {error}") from None


def _from_json(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{where} is no JSON: {error}") from None
    value = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(value, str):
        raise ReplayError(f'{where} has no prompt; a line is text in quotes, or an object with "prompt"')
    require(value != "", f"{where} is an empty prompt; it must have at least one character")
    return value


def _stdin() -> str:
    require(sys.stdin is not None, "stdin is closed; give --prompt or --prompt-file with a file")
    stream = getattr(sys.stdin, "buffer", None)
    text = sys.stdin.read() if stream is None else _decoded(stream.read(), "stdin")
    require(text != "", "the prompt on stdin is empty; write it there, or give --prompt TEXT or --prompt-file FILE")
    return text


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReplayError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None
