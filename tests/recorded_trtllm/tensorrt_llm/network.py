"""Recorded: Network around an INetworkDefinition, with the plugin config that functions read."""

from __future__ import annotations

from typing import Any

import tensorrt as trt

from ._common import net_guard
from .plugin import PluginConfig

__all__ = ["Network", "net_guard"]


class Network:
    """Strongly typed, as every network that trtllm-build makes."""

    def __init__(self) -> None:
        self.trt_network = trt.INetworkDefinition()
        self.plugin_config = PluginConfig()
        self.strongly_typed = True
        self.input_ranges: dict[str, Any] = {}
        self.constants: dict[int, Any] = {}
        self.named_parameters: Any = None

    def set_named_parameters(self, named_parameters: Any) -> None:
        self.named_parameters = list(named_parameters)
