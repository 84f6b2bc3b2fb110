"""Calling the command line in this process, and the form that every refusal has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trtllm_replayssm.cli import main

PREFIX = "trtllm-replayssm: error: "


def call(argv: Sequence[object]) -> int:
    """Exit code of the command line, also where argparse exits."""
    try:
        return main([str(a) for a in argv])
    except SystemExit as stop:
        return int(stop.code or 0)


def refused(argv: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    """Require exit code 2, one line on stderr and nothing on stdout; returns the message."""
    capsys.readouterr()
    code = call(argv)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith(PREFIX) and err.endswith("\n") and err.count("\n") == 1, err
    return err[len(PREFIX) : -1]
