"""Engine builds: checkpoint directory -> engine directory (TensorRT 8.6, 10, 11; TensorRT-RTX for checks).

Needs numpy alone beside TensorRT and runs on Python 3.9, which TensorRT 8.6 is made for.
"""

from __future__ import annotations

from .directory import EngineConfig, is_engine_directory, read_engine_config
from .engine import build_engine
from .options import BuildOptions

__all__ = ["BuildOptions", "EngineConfig", "build_engine", "is_engine_directory", "read_engine_config"]
