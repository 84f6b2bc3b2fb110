"""What differs between TensorRT versions, in one place: 8.6, 10.x, 11.x (package tensorrt) and TensorRT-RTX.

Everything is found out from the module itself, not from version numbers:
    strongly typed networks   a layer's type is that of its operands; else (8.6) types are asked for layer by layer
    plugin interface          v3 (10 and later), v2 (8.6) or none (TensorRT-RTX networks take no plugins)
    bfloat16                  absent in 8.6
    shape tensors             int64 from 10 on, int32 before

Needs numpy alone and runs on Python 3.9. The tensorrt module is an argument, never imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ReplayError, require
from ..plugins import PLUGIN_NAMESPACE, PLUGIN_VERSION, last_error, plugin_fields, plugin_inputs

_TYPE_NAMES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}
FLOATS = ("float32", "float16", "bfloat16")


class TensorRTApi:
    """One TensorRT module.

    Args:
        trt: the module ``tensorrt`` or ``tensorrt_rtx``.

    Attributes:
        trt: the module. label: its name and version for messages. strongly_typed: its networks are.
        plugin_interface: ``v3``, ``v2`` or None.

    Raises:
        ReplayError: not a TensorRT module, or one without explicit batch dimensions.
    """

    def __init__(self, trt: Any) -> None:
        known = all(hasattr(trt, name) for name in ("INetworkDefinition", "DataType", "NetworkDefinitionCreationFlag"))
        have = getattr(trt, "__name__", type(trt).__name__)
        require(known, f"trt is {have}; it must be the module tensorrt (8.6 or later) or tensorrt_rtx")
        require(hasattr(trt.INetworkDefinition, "add_cast"), f"{have} {trt.__version__} is too old; use 8.6 or later")
        self.trt = trt
        self.label = f"{have} {trt.__version__}"
        self.strongly_typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
        self.plugin_interface: str | None = None
        if hasattr(trt.INetworkDefinition, "add_plugin_v3"):
            self.plugin_interface = "v3"
        elif hasattr(trt.INetworkDefinition, "add_plugin_v2"):
            self.plugin_interface = "v2"

    def has_dtype(self, dtype: str) -> bool:
        """Whether this TensorRT knows the dtype."""
        return hasattr(self.trt.DataType, _TYPE_NAMES[dtype])

    def dtype(self, dtype: str) -> Any:
        """The DataType called ``dtype``. Raises ReplayError where this TensorRT has none."""
        if not self.has_dtype(dtype):
            allowed = ", ".join(name for name in FLOATS if self.has_dtype(name))
            raise ReplayError(f"dtype is {dtype}; {self.label} has {allowed} only")
        return getattr(self.trt.DataType, _TYPE_NAMES[dtype])

    def create_network(self, builder: Any) -> Any:
        """A strongly typed network where there is such a mode, else one with explicit batch dimensions."""
        flags = self.trt.NetworkDefinitionCreationFlag
        flag = flags.STRONGLY_TYPED if self.strongly_typed else flags.EXPLICIT_BATCH
        return builder.create_network(1 << int(flag))

    def configure(self, builder_config: Any, dtype: str, workspace_bytes: int | None) -> None:
        """Make the builder keep to the network's types.

        TF32 off: it rounds the factors of fp32 products to 11 bits. In networks that are not strongly typed, fp16 is
        allowed, and what the layers ask for is obeyed; :meth:`prefer` makes that a wish.
        """
        flags = self.trt.BuilderFlag
        builder_config.clear_flag(flags.TF32)
        if self.asks_for_precision(dtype):
            builder_config.set_flag(flags.FP16)
            builder_config.set_flag(flags.OBEY_PRECISION_CONSTRAINTS)
        if workspace_bytes is not None:
            require(workspace_bytes > 0, f"workspace_bytes is {workspace_bytes}; it must be positive")
            builder_config.set_memory_pool_limit(self.trt.MemoryPoolType.WORKSPACE, workspace_bytes)

    def prefer(self, builder_config: Any) -> None:
        """After configure(): where TensorRT has no kernel of the precision that a layer asks for, it takes another."""
        flags = self.trt.BuilderFlag
        builder_config.clear_flag(flags.OBEY_PRECISION_CONSTRAINTS)
        builder_config.set_flag(flags.PREFER_PRECISION_CONSTRAINTS)

    def asks_for_precision(self, dtype: str) -> bool:
        """Whether layers of a network of ``dtype`` ask for a precision that TensorRT could not keep to."""
        return not self.strongly_typed and dtype == "float16"

    def weights(self, array: np.ndarray, dtype: str) -> Any:
        """``array`` (C order, bfloat16 as uint16 bits) as Weights that refer to its memory."""
        if dtype == "bfloat16":
            return self.trt.Weights(self.dtype(dtype), array.ctypes.data, array.size)
        return self.trt.Weights(array)

    @staticmethod
    def name_axes(tensor: Any, shape: Sequence[int | str]) -> None:
        """Tell TensorRT which axes of network inputs have one length: those of one name. It need not know names."""
        for i, axis in enumerate(shape):
            if isinstance(axis, str) and hasattr(tensor, "set_dimension_name"):
                tensor.set_dimension_name(i, axis)

    def add_plugin(
        self, network: Any, plugin: str, name: str, tensors: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> Any:
        """A plugin layer of this package.

        Args:
            plugin: ``ReplayMamba2`` ... name: of the layer. tensors: ITensors by the names of plugins.plugin_inputs.
            fields: values by the names of plugins.PLUGIN_FIELDS.

        Raises:
            ReplayError: this TensorRT's networks take no plugins, the plugin is not registered, or it refuses the
                fields.
        """
        self.require_plugins()
        registry = self.trt.get_plugin_registry()
        find = registry.get_creator if self.plugin_interface == "v3" else registry.get_plugin_creator
        creator = find(plugin, PLUGIN_VERSION, PLUGIN_NAMESPACE)
        if creator is None:
            raise ReplayError(
                f"plugin {plugin} is not registered with {self.label}; load the plugin library first "
                "(trtllm_replayssm.plugins.register())"
            )
        values = plugin_fields(self.trt, plugin, fields)
        collection = self.trt.PluginFieldCollection(values)
        inputs: Sequence[Any] = [tensors[key] for key in plugin_inputs(plugin, fields)]
        if self.plugin_interface == "v3":
            made = creator.create_plugin(name, collection, self.trt.TensorRTPhase.BUILD)
        else:
            made = creator.create_plugin(name, collection)
        if made is None:
            raise ReplayError(f"plugin {plugin} ({name}) refuses its fields: {_refusal(fields)}")
        if self.plugin_interface == "v3":
            return network.add_plugin_v3(inputs, [], made)
        return network.add_plugin_v2(inputs, made)

    def require_plugins(self) -> None:
        """Raise ReplayError where networks of this TensorRT take no plugins."""
        if self.plugin_interface is None:
            raise ReplayError(f"replay is plugin; networks of {self.label} take no plugins: use io")


def _refusal(fields: Mapping[str, Any]) -> str:
    """The library's reason for the last refusal, or the fields where it gives none."""
    try:
        reason = last_error()
    except ReplayError:
        reason = ""
    return reason or ", ".join(f"{key}={value}" for key, value in fields.items())
