"""Layers: the network layers that models need, typed and named, whatever the TensorRT.

A Node is an ITensor with the dtype that we mean it to have. Strongly typed networks derive the same dtypes by
themselves. In the others every layer that computes in fp32 is told its precision and output type. fp16 layers are not,
so that TensorRT may compute them in fp32 where it has no fp16 kernel; nor are layers that only move data, since
TensorRT 8.6 moves all data of a fused group in one type and refuses the group where one of them asks for another
(`verify_output_type`). Operations therefore move data before they widen it and after they round it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ReplayError
from ..models.host_weights import HostWeight
from .tensorrt_api import TensorRTApi
from .tensorrt_io import Axis, IOTensor

_COMPARISONS = ("EQUAL", "GREATER", "LESS")
_INT_CODES = {"int32": np.int32, "int64": np.int64}


class Node(NamedTuple):
    """An ITensor and its dtype's name."""

    tensor: Any
    dtype: str


class Layers:
    """Adds layers to one network.

    Args:
        api: the TensorRT. network: an empty INetworkDefinition.

    Attributes:
        scope: prefix of the names of the layers to come. keep: arrays that constants refer to. io: network inputs and
            outputs so far.
    """

    def __init__(self, api: TensorRTApi, network: Any) -> None:
        self.api = api
        self.network = network
        self.scope = ""
        self.keep: list[np.ndarray] = []
        self.io: list[IOTensor] = []
        self._inputs: dict[str, Node] = {}
        self._outputs: list[Node] = []
        self._names: dict[str, int] = {}
        self._constants: dict[str, tuple[Node, tuple[int, ...]]] = {}

    # Network inputs and outputs.

    def input(
        self,
        name: str,
        shape: Sequence[Axis],
        *,
        role: str | None = None,
        dtype: str = "int32",
        location: str = "device",
        layer: int | None = None,
    ) -> Node:
        """The network input ``name``, added on first use. ``role`` defaults to the name."""
        if name not in self._inputs:
            entry = IOTensor(name, role or name, dtype, tuple(shape), True, location, layer)
            tensor = self.network.add_input(name, self.api.dtype(dtype), entry.dims)
            if tensor is None:
                raise ReplayError(f"{self.api.label} refuses network input {name} {dtype}{list(entry.dims)}")
            tensor.allowed_formats = 1 << int(self.api.trt.TensorFormat.LINEAR)
            self.api.name_axes(tensor, entry.shape)
            self.io.append(entry)
            self._inputs[name] = Node(tensor, dtype)
        return self._inputs[name]

    def output(
        self, node: Node, name: str, shape: Sequence[Axis], *, role: str | None = None, layer: int | None = None
    ) -> None:
        """Make ``node`` the network output ``name``."""
        if any(node.tensor is known.tensor for known in (*self._inputs.values(), *self._outputs)):
            node = self._done(self.network.add_identity(node.tensor), node.dtype, name)
        self._outputs.append(node)
        node.tensor.name = name
        self.network.mark_output(node.tensor)
        node.tensor.allowed_formats = 1 << int(self.api.trt.TensorFormat.LINEAR)
        if not self.api.strongly_typed:
            node.tensor.dtype = self.api.dtype(node.dtype)
        self.io.append(IOTensor(name, role or name, node.dtype, tuple(shape), False, "device", layer))

    # Constants.

    def weight(self, name: str, weight: HostWeight, shape: Sequence[int] | None = None) -> Node:
        """A constant called ``name``; asked for again it is the same one, reshaped where ``shape`` differs."""
        wanted = tuple(weight.shape if shape is None else shape)
        if name not in self._constants:
            array = np.ascontiguousarray(weight.array)
            self.keep.append(array)
            layer = self.network.add_constant(wanted, self.api.weights(array, weight.dtype))
            self._constants[name] = (self._done(layer, weight.dtype, name, scoped=False, typed=False), wanted)
        node, made = self._constants[name]
        return node if made == wanted else self.reshape(node, wanted)

    def integers(self, values: Any, dtype: str = "int32") -> Node:
        """A constant of whole numbers with the shape of ``values``."""
        array = np.ascontiguousarray(values, _INT_CODES[dtype]).reshape(np.shape(values))
        self.keep.append(array)
        layer = self.network.add_constant(array.shape, self.api.weights(array, dtype))
        return self._done(layer, dtype, "constant", typed=False)

    def floats(self, values: Any) -> Node:
        """A constant fp32 with the shape of ``values``."""
        array = np.ascontiguousarray(values, np.float32).reshape(np.shape(values))
        self.keep.append(array)
        layer = self.network.add_constant(array.shape, self.api.weights(array, "float32"))
        return self._done(layer, "float32", "constant", typed=False)

    # Arithmetic.

    def binary(self, operation: str, a: Node, b: Node) -> Node:
        """``SUM``, ``PROD``, ``GREATER`` ... of two tensors of one dtype and rank, broadcast over axes of length 1."""
        assert a.dtype == b.dtype, (operation, a.dtype, b.dtype)
        code = getattr(self.api.trt.ElementWiseOperation, operation)
        layer = self.network.add_elementwise(a.tensor, b.tensor, code)
        return self._done(layer, "bool" if operation in _COMPARISONS else a.dtype, operation.lower())

    def unary(self, operation: str, x: Node) -> Node:
        """``SQRT``, ``RECIP`` ..."""
        code = getattr(self.api.trt.UnaryOperation, operation)
        return self._done(self.network.add_unary(x.tensor, code), x.dtype, operation.lower())

    def activation(self, kind: str, x: Node) -> Node:
        """``SIGMOID``, ``RELU``."""
        code = getattr(self.api.trt.ActivationType, kind)
        return self._done(self.network.add_activation(x.tensor, code), x.dtype, kind.lower())

    def mean(self, x: Node, axis: int) -> Node:
        """Mean over one axis, which stays with length 1."""
        code = self.api.trt.ReduceOperation.AVG
        return self._done(self.network.add_reduce(x.tensor, code, 1 << axis, True), x.dtype, "mean")

    def matmul(self, a: Node, b: Node, *, transpose_b: bool = False) -> Node:
        """Product of the last two axes; leading axes broadcast."""
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        kinds = self.api.trt.MatrixOperation
        kind = kinds.TRANSPOSE if transpose_b else kinds.NONE
        return self._done(self.network.add_matrix_multiply(a.tensor, kinds.NONE, b.tensor, kind), a.dtype, "matmul")

    def softmax(self, x: Node, axis: int) -> Node:
        """Softmax over one axis."""
        layer = self.network.add_softmax(x.tensor)
        layer.axes = 1 << axis
        return self._done(layer, x.dtype, "softmax")

    def select(self, condition: Node, then: Node, otherwise: Node) -> Node:
        """``then`` where ``condition`` holds; all of one rank, broadcast over axes of length 1."""
        assert condition.dtype == "bool" and then.dtype == otherwise.dtype, (condition.dtype, then, otherwise)
        layer = self.network.add_select(condition.tensor, then.tensor, otherwise.tensor)
        return self._done(layer, then.dtype, "select", typed=False)

    def cast(self, x: Node, dtype: str) -> Node:
        """``x`` in another dtype; itself where it has that already."""
        if x.dtype == dtype:
            return x
        return self._done(self.network.add_cast(x.tensor, self.api.dtype(dtype)), dtype, "cast", typed=False)

    # Moving data.

    def reshape(self, x: Node, dims: Sequence[int] | None = None, *, then: Sequence[int] | None = None) -> Node:
        """View as ``dims`` (0: as before; one may be -1), then permute the axes by ``then``."""
        layer = self.network.add_shuffle(x.tensor)
        if dims is not None:
            layer.reshape_dims = tuple(dims)
        if then is not None:
            layer.second_transpose = tuple(then)
        return self._done(layer, x.dtype, "view", typed=False)

    def reshape_to(self, x: Node, sizes: Node) -> Node:
        """View with the sizes that the shape tensor ``sizes`` holds."""
        layer = self.network.add_shuffle(x.tensor)
        layer.set_input(1, sizes.tensor)
        return self._done(layer, x.dtype, "view", typed=False)

    def concat(self, parts: Sequence[Node], axis: int) -> Node:
        """Tensors of one dtype behind each other."""
        assert len({part.dtype for part in parts}) == 1, [part.dtype for part in parts]
        layer = self.network.add_concatenation([part.tensor for part in parts])
        layer.axis = axis
        return self._done(layer, parts[0].dtype, "concat", typed=False)

    def gather(self, data: Node, indices: Node, axis: int, *, batch_axes: int = 0) -> Node:
        """Slices of ``data`` along ``axis`` at ``indices``; the first ``batch_axes`` (0 or 1) axes run along."""
        layer = self.network.add_gather(data.tensor, indices.tensor, axis)
        layer.num_elementwise_dims = batch_axes
        return self._done(layer, data.dtype, "gather", typed=False)

    def slice(self, x: Node, sizes: Node, start: Sequence[int]) -> Node:
        """The part of ``x`` that begins at ``start``; ``sizes`` is a shape tensor."""
        rank = len(start)
        layer = self.network.add_slice(x.tensor, tuple(start), (1,) * rank, (1,) * rank)
        layer.set_input(2, sizes.tensor)
        return self._done(layer, x.dtype, "slice", typed=False)

    def shape_of(self, x: Node) -> Node:
        """The shape tensor of ``x``: int64, int32 before TensorRT 10.

        For sizes alone: TensorRT computes it on the host, and would have to copy it where it is used as data.
        """
        layer = self.network.add_shape(x.tensor)
        dtype = "int32" if layer.get_output(0).dtype == self.api.dtype("int32") else "int64"
        return self._done(layer, dtype, "shape")

    def plugin(self, plugin: str, tensors: dict[str, Node], fields: dict[str, Any], dtype: str) -> Node:
        """Output 0 of one of this package's plugins (TensorRTApi.add_plugin)."""
        name = self._unique(f"{self.scope}{plugin}")
        layer = self.api.add_plugin(
            self.network, plugin, name, {key: node.tensor for key, node in tensors.items()}, fields
        )
        return self._done(layer, dtype, name, scoped=False, typed=False)

    def _done(self, layer: Any, dtype: str, label: str, *, scoped: bool = True, typed: bool = True) -> Node:
        """Name a new layer and its output; in networks that are not strongly typed, say that fp32 is fp32."""
        name = self._unique(f"{self.scope}{label}") if scoped else label
        if layer is None:
            raise ReplayError(f"{self.api.label} refuses layer {name}")
        layer.name = name
        if typed and not self.api.strongly_typed and dtype == "float32":
            layer.precision = self.api.dtype(dtype)
            layer.set_output_type(0, self.api.dtype(dtype))
        tensor = layer.get_output(0)
        tensor.name = name
        return Node(tensor, dtype)

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}.{count}" if count else name
