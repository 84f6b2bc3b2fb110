"""Recorded: Parameter holds a weight and becomes a constant layer, once per network, when its value is read."""

from __future__ import annotations

from typing import Any

import torch

from . import functional
from ._common import default_net

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Parameter:
    def __init__(self, value: Any = None, shape: Any = None, dtype: Any = None) -> None:
        assert value is None and isinstance(shape, (tuple, list)) and isinstance(dtype, str)
        self.shape, self.dtype = tuple(shape), dtype
        self._value: torch.Tensor | None = None

    def is_inited(self) -> bool:
        return self._value is not None

    @property
    def value(self) -> Any:
        net = default_net()
        if id(self) not in net.constants:
            trt_dtype = functional.DTYPES[self.dtype]
            weight = torch.full(self.shape, torch.nan) if self._value is None else self._value
            net.constants[id(self)] = functional._layer("constant", [], trt_dtype, self.shape, value=weight)
        return net.constants[id(self)]

    @value.setter
    def value(self, v: torch.Tensor) -> None:
        assert tuple(v.shape) == self.shape, f"{tuple(v.shape)} for {self.shape}"
        assert v.dtype == _TORCH[self.dtype], f"the real Parameter warns and becomes {v.dtype}; made as {self.dtype}"
        self._value = v
