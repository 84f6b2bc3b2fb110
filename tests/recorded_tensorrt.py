"""A recorded stand-in for the tensorrt module: what the network API of 8.6 and of 10 offers and refuses, no engine.

Names were read off the real modules (dir() of the 8.6.0 wheel's classes; for 10 the parts that differ): enumerators,
layer attributes, constructor forms. Layers only record what they are given, so tests/network_interpreter.py can run the
network. What a version does not have is absent here (AttributeError, TypeError), and these are refused by hand:
operands of different types or ranks, a type that is no float as a layer's precision, 8.6 networks without explicit
batch, plugin fields that plugins.PLUGIN_FIELDS does not list, a plugin input that is missing or of a wrong type.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from trtllm_replayssm.plugins import PLUGIN_FIELDS, PLUGIN_NAMESPACE, plugin_inputs

_SHUFFLE_ORDER = tuple(range(8))
_NUMPY_TYPES = {"float32": "FLOAT", "float16": "HALF", "int32": "INT32", "int64": "INT64", "bool": "BOOL"}


def _enum(name: str, members: str) -> Any:
    """An enumeration with TensorRT's codes: ``NAME`` counts up, ``NAME=code`` jumps."""
    codes, code = {}, 0
    for member in members.split():
        label, _, value = member.partition("=")
        code = int(value) if value else code
        codes[label] = code
        code += 1
    return enum.IntEnum(name, codes)


class Tensor:
    """An ITensor: type and rank are known, lengths are not followed."""

    __slots__ = ("allowed_formats", "axes", "dtype", "name", "rank", "shape")

    def __init__(self, dtype: Any, rank: int, shape: Any = None) -> None:
        self.dtype, self.rank, self.shape, self.name, self.allowed_formats = dtype, rank, shape, "", 0
        self.axes: dict[int, str] = {}

    def set_dimension_name(self, i: int, name: str) -> None:
        assert self.shape is not None and self.shape[i] == -1, "axes of network inputs have names"
        self.axes[i] = name

    def get_dimension_name(self, i: int) -> str | None:
        return self.axes.get(i)


class Layer:
    """A layer: operands, output, and the attributes that its kind has in TensorRT."""

    def __init__(self, module: Any, kind: str, operands: list[Any], output: Tensor, attributes: dict[str, Any]) -> None:
        settable = {"name", *attributes} | (set() if module.strongly_typed else {"precision"})
        object.__setattr__(self, "_settable", settable)
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "type", getattr(module.LayerType, kind))
        object.__setattr__(self, "_operands", operands)
        object.__setattr__(self, "_output", output)
        object.__setattr__(self, "output_type", None)
        self.name = ""
        for key, value in attributes.items():
            object.__setattr__(self, key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in self._settable:
            raise AttributeError(f"{self.type.name} layers have no attribute {key}")
        if key == "precision":
            assert value in (self._module.DataType.FLOAT, self._module.DataType.HALF), value
        object.__setattr__(self, key, value)

    @property
    def num_inputs(self) -> int:
        return len(self._operands)

    def get_input(self, i: int) -> Any:
        return self._operands[i]

    def set_input(self, i: int, tensor: Tensor) -> None:
        self._operands.extend([None] * (i + 1 - len(self._operands)))
        self._operands[i] = tensor

    def get_output(self, i: int) -> Tensor:
        assert i == 0
        return self._output

    def set_output_type(self, i: int, dtype: Any) -> None:
        if self._module.strongly_typed:
            raise AttributeError("strongly typed layers have no set_output_type here")
        assert i == 0
        object.__setattr__(self, "output_type", dtype)
        self._output.dtype = dtype


class Weights:
    """Weights(array), and Weights(type, address, count) where the version has it."""

    def __init__(self, *args: Any) -> None:
        raise NotImplementedError


class Network:
    """The methods of an INetworkDefinition that emission uses."""

    module: Any = None

    def __init__(self, flags: int) -> None:
        self.flags, self.layers, self.inputs, self.outputs = flags, [], [], []  # type: ignore[var-annotated]

    num_layers = property(lambda self: len(self.layers))
    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_layer(self, i: int) -> Layer:
        return self.layers[i]

    def get_input(self, i: int) -> Tensor:
        return self.inputs[i]

    def get_output(self, i: int) -> Tensor:
        return self.outputs[i]

    def _add(self, kind: str, operands: list[Any], dtype: Any, rank: int, **attributes: Any) -> Layer:
        layer = Layer(self.module, kind, operands, Tensor(dtype, rank), attributes)
        self.layers.append(layer)
        return layer

    def _same(self, *tensors: Tensor) -> None:
        assert len({tensor.dtype for tensor in tensors}) == 1, [tensor.dtype for tensor in tensors]
        assert len({tensor.rank for tensor in tensors}) == 1, [tensor.rank for tensor in tensors]

    def add_input(self, name: str, dtype: Any, shape: Any) -> Tensor:
        if not self.module.strongly_typed:
            assert self.flags & 1, "networks with dynamic shapes need explicit batch"
        assert name not in [tensor.name for tensor in self.inputs], name
        tensor = Tensor(dtype, len(shape), tuple(shape))
        tensor.name = name
        self.inputs.append(tensor)
        return tensor

    def mark_output(self, tensor: Tensor) -> None:
        assert tensor not in self.outputs and tensor not in self.inputs, tensor.name
        self.outputs.append(tensor)

    def add_constant(self, shape: Any, weights: Any) -> Layer:
        array = weights if isinstance(weights, _AddressWeights) else weights.array
        assert int(np.prod(shape)) == array.size, (shape, array.size)
        dtype = array.dtype if isinstance(array, _AddressWeights) else self.module.of_numpy(array)
        return self._add("CONSTANT", [], dtype, len(shape), shape=tuple(shape), weights=array)

    def add_elementwise(self, a: Tensor, b: Tensor, op: Any) -> Layer:
        self._same(a, b)
        comparison = op.name in ("EQUAL", "GREATER", "LESS")
        return self._add("ELEMENTWISE", [a, b], self.module.DataType.BOOL if comparison else a.dtype, a.rank, op=op)

    def add_unary(self, x: Tensor, op: Any) -> Layer:
        assert x.dtype.name in ("FLOAT", "HALF", "BF16"), x.dtype
        return self._add("UNARY", [x], x.dtype, x.rank, op=op)

    def add_activation(self, x: Tensor, kind: Any) -> Layer:
        assert x.dtype.name in ("FLOAT", "HALF", "BF16"), x.dtype
        return self._add("ACTIVATION", [x], x.dtype, x.rank, activation_type=kind)

    def add_reduce(self, x: Tensor, op: Any, axes: int, keep_dims: bool) -> Layer:
        return self._add("REDUCE", [x], x.dtype, x.rank, op=op, axes=axes, keep_dims=keep_dims)

    def add_matrix_multiply(self, a: Tensor, op0: Any, b: Tensor, op1: Any) -> Layer:
        self._same(a, b)
        return self._add("MATRIX_MULTIPLY", [a, b], a.dtype, a.rank, op0=op0, op1=op1)

    def add_softmax(self, x: Tensor) -> Layer:
        return self._add("SOFTMAX", [x], x.dtype, x.rank, axes=0)

    def add_select(self, condition: Tensor, then: Tensor, otherwise: Tensor) -> Layer:
        self._same(then, otherwise)
        assert condition.dtype == self.module.DataType.BOOL and condition.rank == then.rank
        return self._add("SELECT", [condition, then, otherwise], then.dtype, then.rank)

    def add_cast(self, x: Tensor, to_type: Any) -> Layer:
        return self._add("CAST", [x], to_type, x.rank, to_type=to_type)

    def add_identity(self, x: Tensor) -> Layer:
        return self._add("IDENTITY", [x], x.dtype, x.rank)

    def add_shuffle(self, x: Tensor) -> Layer:
        layer = self._add(
            "SHUFFLE",
            [x],
            x.dtype,
            -1,
            first_transpose=_SHUFFLE_ORDER,
            reshape_dims=None,
            second_transpose=_SHUFFLE_ORDER,
        )
        layer._output.rank = _LaterRank(layer, x)
        return layer

    def add_concatenation(self, parts: list[Tensor]) -> Layer:
        self._same(*parts)
        return self._add("CONCATENATION", list(parts), parts[0].dtype, parts[0].rank, axis=0)

    def add_gather(self, data: Tensor, index: Tensor, axis: int) -> Layer:
        assert index.dtype.name in ("INT32", "INT64"), index.dtype
        layer = self._add("GATHER", [data, index], data.dtype, -1, axis=axis, mode=_DEFAULT, num_elementwise_dims=0)
        layer._output.rank = _GatherRank(layer, data, index)
        return layer

    def add_slice(self, x: Tensor, start: Any, shape: Any, stride: Any) -> Layer:
        assert len(start) == len(shape) == len(stride) == x.rank
        return self._add("SLICE", [x], x.dtype, x.rank, start=start, shape=shape, stride=stride)

    def add_shape(self, x: Tensor) -> Layer:
        return self._add("SHAPE", [x], self.module.shape_type, 1)


class _LaterRank:
    """Rank of a shuffle's output, known once reshape_dims are set."""

    def __init__(self, layer: Layer, x: Tensor) -> None:
        self.layer, self.x = layer, x

    def value(self) -> int:
        dims = self.layer.reshape_dims
        return int(self.x.rank) if dims is None else len(dims)

    def __eq__(self, other: object) -> bool:
        return self.value() == (other.value() if isinstance(other, _LaterRank) else other)

    def __hash__(self) -> int:
        return hash(self.value())

    def __int__(self) -> int:
        return self.value()

    __index__ = __int__


class _GatherRank(_LaterRank):
    """Rank of a gather's output, known once num_elementwise_dims is set."""

    def __init__(self, layer: Layer, data: Tensor, index: Tensor) -> None:
        super().__init__(layer, data)
        self.index = index

    def value(self) -> int:
        return int(self.x.rank) + int(self.index.rank) - 1 - int(self.layer.num_elementwise_dims)


class _AddressWeights:
    def __init__(self, dtype: Any, address: int, count: int) -> None:
        self.dtype, self.address, self.size = dtype, address, count


_DEFAULT = SimpleNamespace(name="DEFAULT")


class _Creator:
    """A plugin creator that checks fields against PLUGIN_FIELDS."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_plugin(self, name: str, fields: list[Any], phase: Any = None) -> Any:
        values = {field.name: field.data[0] for field in fields}
        known = PLUGIN_FIELDS[self.name]
        if set(values) - set(known) or {key for key, spec in known.items() if spec.required} - set(values):
            return None
        for field in fields:
            assert field.type.name == known[field.name].type and field.data.dtype.name == field.type.name.lower()
        return SimpleNamespace(plugin_type=self.name, name=name, fields=values, phase=phase)


class _Registry:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find(self, name: str, version: str, namespace: str) -> Any:
        found = name in self.names and version == "1" and namespace == PLUGIN_NAMESPACE
        return _Creator(name) if found else None


def _add_plugin(network: Network, inputs: list[Tensor], plugin: Any, kind: str) -> Layer:
    names = plugin_inputs(plugin.plugin_type, plugin.fields)
    assert len(names) == len(inputs), (names, len(inputs))
    types = network.module.DataType
    act = next(member for member in types if int(member) == plugin.fields["type_id"])
    for name, tensor in zip(names, inputs):  # noqa: B905  (this file also runs on Python 3.9)
        expected = {
            "state": types.INT32,
            "dt_bias": types.FLOAT,
            "A": types.FLOAT,
            "D": types.FLOAT,
            "A_log": types.FLOAT,
        }
        ints = name in ("host_request_types", "last_token_ids", "slot_mapping", "accepted", "has_initial")
        want = types.INT32 if ints else expected.get(name, act)
        assert tensor.dtype == want, f"{plugin.plugin_type} input {name} is {tensor.dtype}; it takes {want}"
    return network._add(kind, list(inputs), act, inputs[0].rank, plugin=plugin)


def recorded_tensorrt(version: str, plugins: tuple[str, ...] = tuple(PLUGIN_FIELDS)) -> Any:
    """The stand-in for ``8.6`` or ``10``; its registry has the creators of ``plugins``."""
    old = {"8.6": True, "10": False}[version]
    types = "FLOAT HALF INT8 INT32 BOOL UINT8 FP8" + ("" if old else " BF16 INT64")
    module = SimpleNamespace(
        __name__=f"recorded_tensorrt_{version}",
        __version__="8.6.0" if old else "10.14.1",
        strongly_typed=not old,
        DataType=_enum("DataType", types),
        BuilderFlag=_enum(
            "BuilderFlag",
            "FP16 INT8 REFIT TF32 OBEY_PRECISION_CONSTRAINTS PREFER_PRECISION_CONSTRAINTS",
        ),
        NetworkDefinitionCreationFlag=_enum(
            "NetworkDefinitionCreationFlag", "EXPLICIT_BATCH EXPLICIT_PRECISION" + ("" if old else " STRONGLY_TYPED")
        ),
        ElementWiseOperation=_enum("ElementWiseOperation", "SUM PROD MAX MIN SUB DIV POW FLOOR_DIV EQUAL GREATER LESS"),
        UnaryOperation=_enum("UnaryOperation", "EXP LOG SQRT RECIP ABS NEG SIN COS"),
        ActivationType=_enum("ActivationType", "RELU SIGMOID TANH"),
        ReduceOperation=_enum("ReduceOperation", "SUM PROD MAX MIN AVG"),
        MatrixOperation=_enum("MatrixOperation", "NONE TRANSPOSE VECTOR"),
        MemoryPoolType=_enum("MemoryPoolType", "WORKSPACE"),
        TensorFormat=_enum("TensorFormat", "LINEAR CHW2 HWC8"),
        LayerType=_enum(
            "LayerType",
            "ACTIVATION CAST CONCATENATION CONSTANT ELEMENTWISE GATHER IDENTITY MATRIX_MULTIPLY REDUCE SELECT "
            "SHAPE SHUFFLE SLICE SOFTMAX UNARY " + ("PLUGIN_V2" if old else "PLUGIN_V2 PLUGIN_V3"),
        ),
        PluginFieldType=_enum("PluginFieldType", "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 CHAR DIMS UNKNOWN"),
        PluginField=lambda name, data, kind: SimpleNamespace(name=name, data=data, type=kind),
        PluginFieldCollection=list,
        ILayer=type("ILayer", (), {}),
    )
    module.shape_type = module.DataType.INT32 if old else module.DataType.INT64
    module.of_numpy = lambda array: module.DataType[_NUMPY_TYPES[array.dtype.name]]
    registry = _Registry(list(plugins))
    lookup = "get_plugin_creator" if old else "get_creator"
    module.get_plugin_registry = lambda: SimpleNamespace(**{lookup: registry.find})

    def weights(*args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], np.ndarray):
            module.of_numpy(args[0])
            return SimpleNamespace(array=args[0])
        if old:
            raise TypeError("Weights takes a type or an array")
        return _AddressWeights(*args)

    methods: dict[str, Any] = {"module": module}
    if old:

        def add_plugin_v2(self: Network, inputs: list[Tensor], plugin: Any) -> Layer:
            return _add_plugin(self, inputs, plugin, "PLUGIN_V2")

        methods["add_plugin_v2"] = add_plugin_v2
    else:
        module.TensorRTPhase = _enum("TensorRTPhase", "BUILD RUNTIME")

        def add_plugin_v3(self: Network, inputs: list[Tensor], shapes: list[Tensor], plugin: Any) -> Layer:
            assert shapes == [] and plugin.phase == module.TensorRTPhase.BUILD
            return _add_plugin(self, inputs, plugin, "PLUGIN_V3")

        methods["add_plugin_v3"] = add_plugin_v3
    module.Weights = weights
    module.INetworkDefinition = type("INetworkDefinition", (Network,), methods)
    module.Builder = SimpleNamespace(create_network=module.INetworkDefinition)
    return module
