"""The stateful operations of an emitted network: this package's plugins, or network inputs and outputs in their place.

``io`` replaces a plugin by its seam: every operand becomes a network output ``{conv|replay}_{layer}_{operand}`` and the
result the network input ``{conv|replay}_{layer}_y``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layout import ConvLayout, SlotLayout
from ..models.config import HybridConfig
from ..plugins import PLUGIN_FIELDS, TYPE_IDS, VECTOR_INPUTS
from .tensorrt_io import IO, ROWS, SLOTS, TOKENS, NetworkOptions
from .tensorrt_layers import Layers, Node
from .tensorrt_views import Slicer, View

_WORD_BYTES = 4


class Replay:
    """Adds stateful operations to one network.

    Args:
        layers: the network. slicer: of the same network. config, options: what is emitted.
    """

    def __init__(self, layers: Layers, slicer: Slicer, config: HybridConfig, options: NetworkOptions) -> None:
        self._layers = layers
        self._slicer = slicer
        self._options = options
        self.spec = options.recurrence_spec(config)
        self.conv_spec = config.conv_spec(spec_len=options.spec_len, act_dtype=options.dtype)
        self._words = {
            "replay": SlotLayout(self.spec).slot_bytes // _WORD_BYTES,
            "conv": ConvLayout(self.conv_spec).slot_bytes // _WORD_BYTES,
        }

    def conv(self, layer: int, x: View, constants: Mapping[str, Node]) -> Node:
        """The causal convolution: y [B, S, C]. ``constants``: weight, and bias or not."""
        fields = {
            "channels": self.conv_spec.channels,
            "kernel": self.conv_spec.kernel,
            "silu": 1,
            "has_bias": int("bias" in constants),
        }
        return self._call("ReplayCausalConv", "conv", layer, {"x": x}, constants, fields, self.conv_spec.channels)

    def recurrence(
        self, plugin: str, layer: int, data: Mapping[str, View], constants: Mapping[str, Node], fields: dict[str, Any]
    ) -> Node:
        """ReplayMamba2 or ReplayGatedDelta: [B, S, heads * headdim]. ``data``, ``constants``: inputs by name."""
        spec, options = self.spec, self._options
        common = {
            "nheads": spec.nheads,
            "ngroups": spec.ngroups,
            "headdim": spec.headdim,
            "dstate": spec.dstate,
            "state_type_id": TYPE_IDS[spec.state_dtype],
            "window": spec.window,
            "stagger": int(spec.stagger),
            "exact_scan": int(options.exact_scan),
        }
        return self._call(plugin, "replay", layer, data, constants, {**common, **fields}, spec.nheads * spec.headdim)

    def _call(
        self,
        plugin: str,
        prefix: str,
        layer: int,
        data: Mapping[str, View],
        constants: Mapping[str, Node],
        fields: Mapping[str, Any],
        width: int,
    ) -> Node:
        if self._options.replay == IO:
            return self._seam(prefix, layer, data, width)
        layers, dtype = self._layers, self._options.dtype
        words = self._words[prefix]
        name = f"{prefix}_state_{layer}"
        tensors = {
            **constants,
            "state": layers.input(name, (SLOTS, words), role=f"{prefix}_state", layer=layer),
            "host_request_types": layers.input("host_request_types", (ROWS,), location="host"),
            "last_token_ids": layers.input("last_token_ids", (ROWS,)),
            "slot_mapping": layers.input("slot_mapping", (ROWS,)),
        }
        values = {
            **fields,
            "type_id": TYPE_IDS[dtype],
            "spec_len": self._options.spec_len,
            "remove_input_padding": 0,
            "paged_state": 0,
            "has_accepted": int(self._options.spec_len > 1),
            "has_initial": int(self._options.has_initial),
        }
        for flag in ("accepted", "has_initial"):
            if values[flag if flag == "has_initial" else f"has_{flag}"]:
                tensors[flag] = layers.input(flag, (ROWS,))
        for operand, view in data.items():
            in_place = view.is_aligned or operand not in VECTOR_INPUTS
            chosen = view if in_place else View.whole(self._slicer.node(view), view.width)
            tensors[operand] = chosen.node
            values[f"{operand.lower()}_offset"] = chosen.offset
        # In the order of the plugin's own list, and without those that another plugin has.
        ordered = {key: values[key] for key in PLUGIN_FIELDS[plugin] if key in values}
        assert len(ordered) == len(values), set(values) - set(ordered)
        return layers.plugin(plugin, tensors, ordered, dtype)

    def _seam(self, prefix: str, layer: int, data: Mapping[str, View], width: int) -> Node:
        """Operands out, result in."""
        layers = self._layers
        for operand, view in data.items():
            name = f"{prefix}_{layer}_{operand.lower()}"
            node = self._slicer.node(view)
            layers.output(node, name, (ROWS, TOKENS, view.width), role=f"{prefix}_operand", layer=layer)
        name, dtype = f"{prefix}_{layer}_y", self._options.dtype
        return layers.input(name, (ROWS, TOKENS, width), role=f"{prefix}_result", dtype=dtype, layer=layer)
