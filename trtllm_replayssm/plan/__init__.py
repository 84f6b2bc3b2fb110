"""Planner: memory, traffic, best window and predicted speed-up of a model on a GPU. Needs numpy alone (plots:
matplotlib)."""

from __future__ import annotations

from .command import add_arguments, main
from .predict import Workload, predict
from .shapes import Gpu, ModelShape

__all__ = ["Gpu", "ModelShape", "Workload", "add_arguments", "main", "predict"]
