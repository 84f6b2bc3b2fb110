"""The operations on CUDA memory, through the native library; same names and signatures as ``reference`` (plus ``out``).

CPU pools, and float64 ones, go through the reference.

The operations are imported when they are first asked for: ``library`` and ``abi`` work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .library import info, library_path, load

if TYPE_CHECKING:
    from .conv import conv_materialize, conv_reset, conv_scan, conv_step
    from .gated_delta import gated_delta_scan, gated_delta_step
    from .mamba2 import StepTuning, mamba2_scan, mamba2_step
    from .state import materialize, reset

__all__ = [
    "StepTuning",
    "conv_materialize",
    "conv_reset",
    "conv_scan",
    "conv_step",
    "gated_delta_scan",
    "gated_delta_step",
    "info",
    "library_path",
    "load",
    "mamba2_scan",
    "mamba2_step",
    "materialize",
    "reset",
]

#: Module that each operation is imported from.
_SOURCES = {
    "StepTuning": "mamba2",
    "conv_materialize": "conv",
    "conv_reset": "conv",
    "conv_scan": "conv",
    "conv_step": "conv",
    "gated_delta_scan": "gated_delta",
    "gated_delta_step": "gated_delta",
    "mamba2_scan": "mamba2",
    "mamba2_step": "mamba2",
    "materialize": "state",
    "reset": "state",
}


def __getattr__(name: str) -> Any:
    source = _SOURCES.get(name)
    if source is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{source}", __name__), name)
    globals()[name] = value
    return value
