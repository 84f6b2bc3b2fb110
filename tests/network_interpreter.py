"""Runs an emitted INetworkDefinition layer by layer in torch, from nothing but what the network itself says.

Knows one small function per layer type and reads the layers' own attributes, so a wrong axis, shape, constant, order or
name shows as a wrong number. Works on the networks of a real TensorRT (whose layers are cast to their class) and of
recorded_tensorrt.py. Every value has the dtype that the network implies; the arithmetic is torch's in that dtype.
What a network cannot do itself comes from ``supply``: plugin layers, and inputs that depend on outputs (``io``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}
CLASSES = {
    "ACTIVATION": "IActivationLayer",
    "CAST": "ICastLayer",
    "CONCATENATION": "IConcatenationLayer",
    "CONSTANT": "IConstantLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "GATHER": "IGatherLayer",
    "IDENTITY": "IIdentityLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "REDUCE": "IReduceLayer",
    "SELECT": "ISelectLayer",
    "SHAPE": "IShapeLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "UNARY": "IUnaryLayer",
}
Values = dict[str, torch.Tensor]


class Interpreter:
    """One network.

    Args:
        trt: its module. network: the INetworkDefinition. keep: NetworkIO.keep, for bfloat16 constants, which numpy
            cannot read out of a network: the k-th constant layer holds the k-th array.
    """

    def __init__(self, trt: Any, network: Any, keep: Sequence[np.ndarray]) -> None:
        self.network = network
        self.layers = [_typed(trt, network.get_layer(i)) for i in range(network.num_layers)]  # (kind, layer)
        self.inputs = [network.get_input(i) for i in range(network.num_inputs)]
        self.outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        constants = [layer for kind, layer in self.layers if kind == "CONSTANT"]
        assert len(constants) == len(keep), "one kept array per constant"
        self._arrays = {layer.name: array for layer, array in zip(constants, keep, strict=True)}
        names = [layer.get_output(0).name for _, layer in self.layers] + [tensor.name for tensor in self.inputs]
        assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)

    def run(self, feeds: Mapping[str, torch.Tensor], supply: Callable[[str, Values, Any], torch.Tensor]) -> Values:
        """All tensors of the network by name.

        Args:
            feeds: inputs by name. supply: called as (name, values so far, layer) for an input that has no feed (layer
                None) and for plugin layers.
        """
        shapes = {tensor.name: tensor for tensor in self.inputs}
        values: Values = {}
        axes: dict[str, int] = {}

        def value(tensor: Any) -> torch.Tensor:
            name = tensor.name
            if name not in values:
                assert name in shapes, f"{name} is used before it is made"
                given = feeds[name] if name in feeds else supply(name, values, None)
                _check_input(shapes[name], given, axes)
                values[name] = given
            return values[name]

        for kind, layer in self.layers:
            if kind in ("PLUGIN_V2", "PLUGIN_V3"):
                for i in range(layer.num_inputs):
                    value(layer.get_input(i))
                out = supply(layer.name, values, layer)
            elif kind == "CONSTANT":
                out = self._constant(layer)
            else:
                operands = [
                    value(layer.get_input(i)) for i in range(layer.num_inputs) if layer.get_input(i) is not None
                ]
                out = _RULES[kind](layer, *operands)
            tensor = layer.get_output(0)
            assert DTYPES[tensor.dtype.name] == out.dtype, (layer.name, tensor.dtype, out.dtype)
            values[tensor.name] = out
        return values

    def _constant(self, layer: Any) -> torch.Tensor:
        array = layer.weights
        if not isinstance(array, np.ndarray):
            assert array.dtype.name == "BF16", array.dtype
            bits = np.ascontiguousarray(self._arrays[layer.name]).view(np.int16)
            return torch.from_numpy(bits).view(torch.bfloat16).reshape(tuple(layer.shape))
        return torch.from_numpy(np.array(array)).reshape(tuple(layer.shape))


def _typed(trt: Any, layer: Any) -> tuple[str, Any]:
    """A layer's kind, and the layer as its own class: a real network hands out the base class.

    The kind is read first, since an activation layer's ``type`` is that of its function.
    """
    kind = layer.type.name
    if type(layer) is trt.ILayer:
        layer.__class__ = getattr(trt, CLASSES[kind])
    return kind, layer


def _check_input(tensor: Any, given: torch.Tensor, axes: dict[str, int]) -> None:
    """``axes``: lengths of the named axes so far, which TensorRT wants to be one length wherever they occur."""
    want = tuple(tensor.shape)
    fits = len(want) == given.dim() and all(w in (-1, g) for w, g in zip(want, given.shape, strict=True))
    assert fits, f"input {tensor.name} is {tuple(given.shape)}; the network wants {want}"
    assert DTYPES[tensor.dtype.name] == given.dtype, (tensor.name, given.dtype)
    for i, length in enumerate(given.shape):
        label = tensor.get_dimension_name(i)
        assert (want[i] == -1) == bool(label), f"axis {i} of {tensor.name} is called {label}"
        if label:
            assert axes.setdefault(label, length) == length, f"{label} is {axes[label]}; {tensor.name} has {length}"


def _activation(layer: Any, x: torch.Tensor) -> torch.Tensor:
    function = getattr(layer, "activation_type", layer.type)
    return {"SIGMOID": torch.sigmoid, "RELU": torch.relu}[function.name](x)


def _elementwise(layer: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.dtype == b.dtype and a.dim() == b.dim(), (layer.name, a.shape, b.shape, a.dtype, b.dtype)
    rules = {"SUM": torch.add, "PROD": torch.mul, "MAX": torch.maximum, "MIN": torch.minimum, "GREATER": torch.gt}
    return rules[layer.op.name](a, b)


def _unary(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return {"SQRT": torch.sqrt, "RECIP": torch.reciprocal}[layer.op.name](x)


def _reduce(layer: Any, x: torch.Tensor) -> torch.Tensor:
    assert layer.op.name == "AVG" and layer.keep_dims
    return x.mean(_axes(layer.axes), keepdim=True)


def _softmax(layer: Any, x: torch.Tensor) -> torch.Tensor:
    (axis,) = _axes(layer.axes)
    return x.softmax(axis)


def _axes(mask: int) -> list[int]:
    return [i for i in range(8) if mask >> i & 1]


def _matmul(layer: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.dtype == b.dtype and a.dim() == b.dim() and layer.op0.name == "NONE", layer.name
    if layer.op1.name == "TRANSPOSE":
        b = b.transpose(-1, -2)
    if a.dim() == 3 and b.shape[0] == 1:  # the product of torch's own linear layers
        return torch.nn.functional.linear(a, b[0].T)
    return a @ b


def _select(layer: Any, condition: torch.Tensor, then: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    assert condition.dtype == torch.bool and then.dtype == otherwise.dtype, layer.name
    assert condition.dim() == then.dim() == otherwise.dim(), layer.name
    return torch.where(condition, then, otherwise)


def _cast(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x.to(DTYPES[layer.to_type.name])


def _shuffle(layer: Any, x: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
    x = x.permute(*list(layer.first_transpose)[: x.dim()])
    if sizes is not None:
        x = x.reshape(sizes.tolist())
    elif layer.reshape_dims is not None:
        x = x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(layer.reshape_dims)])
    return x.permute(*list(layer.second_transpose)[: x.dim()])


def _concat(layer: Any, *parts: torch.Tensor) -> torch.Tensor:
    assert len({part.dtype for part in parts}) == 1, layer.name
    return torch.cat(parts, dim=layer.axis)


def _gather(layer: Any, data: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    assert layer.mode.name == "DEFAULT" and index.dtype in (torch.int32, torch.int64), layer.name
    low, high = int(index.min()), int(index.max())
    assert low >= 0 and high < data.shape[layer.axis], f"{layer.name}: index {low}..{high} of {data.shape[layer.axis]}"
    if layer.num_elementwise_dims == 0:
        picked = data.index_select(layer.axis, index.flatten().long())
        return picked.reshape(*data.shape[: layer.axis], *index.shape, *data.shape[layer.axis + 1 :])
    assert layer.num_elementwise_dims == 1 and layer.axis == 1 and data.dim() == 3 and index.dim() == 2, layer.name
    return data.gather(1, index.long()[..., None].expand(*index.shape, data.shape[2]))


def _slice(layer: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    start, stride = list(layer.start), list(layer.stride)
    assert all(step == 1 for step in stride) and len(start) == x.dim() == len(sizes), layer.name
    for axis, (first, size) in enumerate(zip(start, sizes.tolist(), strict=True)):
        assert first + size <= x.shape[axis], f"{layer.name}: {first}+{size} of {x.shape[axis]} on axis {axis}"
        x = x.narrow(axis, first, size)
    return x


def _shape(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.shape, dtype=DTYPES[layer.get_output(0).dtype.name])


def _identity(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_RULES: dict[str, Callable[..., torch.Tensor]] = {
    "ACTIVATION": _activation,
    "CAST": _cast,
    "CONCATENATION": _concat,
    "ELEMENTWISE": _elementwise,
    "GATHER": _gather,
    "IDENTITY": _identity,
    "MATRIX_MULTIPLY": _matmul,
    "REDUCE": _reduce,
    "SELECT": _select,
    "SHAPE": _shape,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": _softmax,
    "UNARY": _unary,
}
