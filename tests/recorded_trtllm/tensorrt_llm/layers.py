"""Recorded: ColumnLinear and Embedding."""

from __future__ import annotations

from typing import Any

import tensorrt as trt

from . import functional
from .module import Module
from .parameter import Parameter


class ColumnLinear(Module):
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = None, gather_output: bool = True
    ) -> None:
        super().__init__()
        self.weight = Parameter(shape=(out_features, in_features), dtype=dtype)
        if bias:
            self.bias = Parameter(shape=(out_features,), dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Any) -> Any:
        weight = self.weight.value
        if x.dtype == trt.float16:
            wide = functional.matmul(functional.cast(x, "float32"), functional.cast(weight, "float32"), transb=True)
            product = functional.cast(wide, "float16")
        else:
            product = functional.matmul(x, weight, transb=True)
        return product if self.bias is None else product + functional.cast(self.bias.value, product.dtype)


class Embedding(Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: Any = None) -> None:
        super().__init__()
        self.weight = Parameter(shape=(num_embeddings, embedding_dim), dtype=dtype)

    def forward(self, x: Any) -> Any:
        return functional.embedding(x, self.weight.value)
