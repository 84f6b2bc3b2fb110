"""The operations in readable torch, on CPU or CUDA tensors, up to float64: the oracle of every other implementation.

The contract of each operation is docs/contracts.md; none of them keeps a graph for gradients. Oracles that share no
code with these are in ``recurrence``.
"""

from __future__ import annotations

from .conv import conv_materialize, conv_reset, conv_scan, conv_step
from .gated_delta import gated_delta_scan, gated_delta_step
from .lifecycle import materialize, reset
from .mamba2 import mamba2_scan, mamba2_step
from .recurrence import causal_conv, delta_gates, gated_delta_recurrence, mamba2_recurrence

__all__ = [
    "causal_conv",
    "conv_materialize",
    "conv_reset",
    "conv_scan",
    "conv_step",
    "delta_gates",
    "gated_delta_recurrence",
    "gated_delta_scan",
    "gated_delta_step",
    "mamba2_recurrence",
    "mamba2_scan",
    "mamba2_step",
    "materialize",
    "reset",
]
