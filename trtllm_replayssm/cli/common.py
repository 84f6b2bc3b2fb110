"""What the commands share: the parser with one-line errors, JSON output, progress bars, exit codes."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

PROG = "trtllm-replayssm"
EXIT_DIFFERS = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

#: Called with (done, total, what is being done now).
ProgressCallback = Callable[[int, int, str], None]
_LONGEST_ERROR = 600
_PLAIN_INTERVAL_S = 0.1


def one_line(text: str) -> str:
    """``text`` with every run of white space made one blank, cut to a length that a terminal shows."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ERROR else line[: _LONGEST_ERROR - 3] + "..."


def report_error(message: str) -> None:
    """One line on stderr."""
    print(f"{PROG}: error: {one_line(message)}", file=sys.stderr, flush=True)


def report_note(message: str) -> None:
    """One line on stderr about what was done, where something else may have been expected."""
    print(f"{PROG}: note: {one_line(message)}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line; options cannot be abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Report ``message`` and the command that shows the options, and exit with code 2."""
        report_error(f"{message}; see {self.prog} --help")
        sys.exit(EXIT_BAD_INPUT)


def open_streams() -> None:
    """Give the null device to a stdout or stderr that was closed before the start (Python makes it None)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def close_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail once more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no file here
        sys.stdout = io.StringIO()


def print_json(value: Any) -> None:
    """``value`` as one JSON document on stdout; numbers that are not finite become text."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


@contextmanager
def progress(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on stderr while the block runs, if that is a terminal: rich's where installed, else plain text."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    try:
        import rich.console
        import rich.progress
    except ImportError:
        with _plain_progress(title) as update:
            yield update
        return
    console = rich.console.Console(stderr=True)
    # What goes to stdout meanwhile must stay there, as it is: rich would reflow it onto its own console.
    with rich.progress.Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title} {what}".rstrip())

        yield update


@contextmanager
def _plain_progress(title: str) -> Iterator[ProgressCallback]:
    last = -math.inf

    def update(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_INTERVAL_S or done == total:
            last = now
            sys.stderr.write(f"\r{title} {done}/{total} {what}"[:79].ljust(79))
            sys.stderr.flush()

    try:
        yield update
    finally:
        sys.stderr.write("\r" + " " * 79 + "\r")
        sys.stderr.flush()
