"""Tests of the native library on a GPU: `make lib` and `python -m pytest tests/gpu`. Without it they do not start."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where nothing could be tested."""
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs an NVIDIA GPU; tests/cpu is the part that runs without one")
