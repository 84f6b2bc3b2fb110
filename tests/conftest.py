"""Shared by all tests: the repository root on the path (benchmarks/shapes.py), one torch thread, a fixed seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Tests run in several processes on few cores; sums must not depend on a thread count either."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers, whichever tests run before it."""
    import torch

    torch.manual_seed(0)
