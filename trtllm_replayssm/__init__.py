"""ReplaySSM decoding for TensorRT and TensorRT-LLM: plugins, engine builds and a runtime for hybrid models.

Importing this package needs numpy alone; torch is imported by what computes.
"""

from __future__ import annotations

from .errors import ReplayError
from .layout import ConvLayout, SlotLayout
from .spec import ConvSpec, RecurrenceSpec

__version__ = "0.1.0"
__all__ = ["ConvLayout", "ConvSpec", "RecurrenceSpec", "ReplayError", "SlotLayout", "__version__"]
