"""The operations on CUDA memory, through the native library; same names and signatures as ``reference`` (plus ``out``).

CPU pools, and float64 ones, go through the reference. So do GDN and KDA pools on CUDA, apart from their reset: the
library has no kernels for them, and the reference's torch code runs there (it synchronises, so no CUDA graph can hold
it).
"""

from __future__ import annotations

from ..reference import gated_delta_scan, gated_delta_step
from .conv import conv_materialize, conv_reset, conv_scan, conv_step
from .library import info, library_path, load
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
