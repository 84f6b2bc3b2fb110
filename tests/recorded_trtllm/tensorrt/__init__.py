"""Recorded stand-in of tensorrt (README.md): data types, the plugin registry and a network that is a list."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

__version__ = "10.14.1+recorded.stand.in"


class DataType(enum.IntEnum):
    """TensorRT's codes."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    BF16 = 7
    INT64 = 8


float32, float16, bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
int32, int64 = DataType.INT32, DataType.INT64


class TensorRTPhase(enum.Enum):
    """Phase of create_plugin."""

    BUILD = 0
    RUNTIME = 1


class PluginFieldType(enum.Enum):
    """Types of plugin fields that are used."""

    FLOAT32 = 1
    INT8 = 3
    INT32 = 5


class PluginField:
    """Name, array of one number, type."""

    def __init__(self, name: str, data: np.ndarray, type: PluginFieldType) -> None:
        wanted = {PluginFieldType.FLOAT32: np.float32, PluginFieldType.INT8: np.int8, PluginFieldType.INT32: np.int32}
        if data.dtype != wanted[type]:
            raise TypeError(f"field {name}: {data.dtype} array for {type}")
        self.name, self.data, self.type = name, data, type


class PluginFieldCollection(list):  # type: ignore[type-arg]
    """A list of PluginField."""


class ITensor:
    """Name, type and shape (-1: dynamic)."""

    def __init__(self, name: str, dtype: DataType, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)


class ILayer:
    """A recorded layer: what it is, inputs, attributes, outputs."""

    def __init__(self, kind: str, inputs: list[ITensor], attributes: dict[str, Any], outputs: list[ITensor]) -> None:
        self.kind, self.inputs, self.attributes, self.outputs = kind, inputs, attributes, outputs
        self.name = outputs[0].name
        self.num_outputs = len(outputs)

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]


class INetworkDefinition:
    """Inputs, layers in order, outputs."""

    def __init__(self) -> None:
        self.inputs: dict[str, ITensor] = {}
        self.outputs: dict[str, ITensor] = {}
        self.layers: list[ILayer] = []

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def add_input(self, name: str, dtype: DataType, shape: tuple[int, ...]) -> ITensor:
        if name in self.inputs:
            raise ValueError(f"input {name} twice")
        self.inputs[name] = ITensor(name, dtype, tuple(shape))
        return self.inputs[name]

    def mark_output(self, tensor: ITensor) -> None:
        self.outputs[tensor.name] = tensor

    def add_plugin_v3(self, inputs: list[ITensor], shape_inputs: list[ITensor], plugin: Any) -> ILayer:
        if shape_inputs:
            raise ValueError("shape inputs were not recorded")
        width = plugin.infer(inputs)
        shape = (*inputs[0].shape[:-1], width)
        return self.record("plugin_v3", inputs, {"plugin": plugin}, inputs[0].dtype, shape)

    def record(
        self, kind: str, inputs: list[ITensor], attributes: dict[str, Any], dtype: DataType, shape: tuple[int, ...]
    ) -> ILayer:
        """Append a layer of one output. Not part of the interface that is recorded."""
        for tensor in inputs:
            if not isinstance(tensor, ITensor):
                raise TypeError(f"{kind}: input is {type(tensor).__name__}, not an ITensor")
        layer = ILayer(kind, list(inputs), attributes, [ITensor(f"{kind}_{len(self.layers)}", dtype, shape)])
        self.layers.append(layer)
        return layer


class IPluginRegistry:
    """Creators by name, version, namespace."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self.creators.get((type, version, plugin_namespace))

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        self.creators[creator.name, creator.plugin_version, plugin_namespace] = creator
        return True


_registry = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    """The process's registry."""
    return _registry
