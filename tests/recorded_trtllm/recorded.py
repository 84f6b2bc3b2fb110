"""Puts the recorded stand-in (README.md) on sys.path, with plugin creators that check the plugin contract."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
_PACKAGES = ("tensorrt", "tensorrt_llm")
#: Modules of ours that subclass or keep what they find at import.
_BOUND = ("trtllm_replayssm.trtllm.hybrid", "trtllm_replayssm.trtllm.model", "models")

_ROWS = "remove_input_padding paged_state aliased_state has_accepted has_initial slot_stride max_slots"
_RECURRENT = f"nheads ngroups headdim dstate type_id|state_type_id window spec_len stagger exact_scan {_ROWS}"
#: name: required int fields | optional int fields | float fields. Written from the contract, not from the package.
CONTRACT = {
    "ReplayCausalConv": f"channels kernel type_id|spec_len silu has_bias {_ROWS} x_offset|",
    "ReplayMamba2": f"{_RECURRENT} dt_softplus z_enabled x_offset dt_offset b_offset c_offset z_offset|dt_min dt_max",
    "ReplayGatedDelta": f"kind {_RECURRENT} qk_l2norm gate_bounded q_offset k_offset v_offset a_offset b_offset"
    "|gate_lower_bound scale",
}
_DEFAULT_ON = ("silu", "has_bias", "stagger", "dt_softplus", "qk_l2norm", "remove_input_padding", "paged_state")


class RecordedPlugin:
    """Fields by name, and the inputs in order for them."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name = name
        ints = CONTRACT[name].replace("|", " ").split()
        defaults = {field: int(field in _DEFAULT_ON) for field in ints}
        numbers = {"window": 16, "spec_len": 1, "dt_max": float("inf"), "gate_lower_bound": -5.0}
        self.fields = {**defaults, **{k: v for k, v in numbers.items() if k in defaults}, **fields}

    def input_names(self) -> list[str]:
        f = self.fields
        data = {
            "ReplayCausalConv": ["x", "state", "weight", *(["bias"] if f.get("has_bias") else [])],
            "ReplayMamba2": ["x", "state", "dt", "dt_bias", "A", "B", "C", "D"],
            "ReplayGatedDelta": ["q", "state", "k", "v", "a", "b", "A_log", "dt_bias"],
        }[self.name]
        names = [*data, "host_request_types", "last_token_ids"]
        names += ["host_context_lengths"] if f["remove_input_padding"] else []
        names += ["slot_mapping"]
        flags = (("z", "z_enabled"), ("accepted", "has_accepted"), ("has_initial", "has_initial"))
        return names + [name for name, flag in flags if f.get(flag)]

    def widths(self) -> dict[str, int]:
        """Columns of every data input."""
        f = self.fields
        if self.name == "ReplayCausalConv":
            return {"x": f["channels"]}
        value, key = f["nheads"] * f["headdim"], f["ngroups"] * f["dstate"]
        if self.name == "ReplayMamba2":
            return {"x": value, "dt": f["nheads"], "B": key, "C": key, "z": value}
        gate = f["nheads"] * (f["dstate"] if f["kind"] == 3 else 1)
        return {"q": key, "k": key, "v": value, "a": gate, "b": f["nheads"]}

    def offset(self, name: str) -> int:
        return int(self.fields[f"{name.lower()}_offset"])

    def infer(self, inputs: list[Any]) -> int:
        """Check types, widths and 16-byte rules of the inputs; columns of the output."""
        import tensorrt as trt

        names, f = self.input_names(), self.fields
        assert len(inputs) == len(names), f"{self.name}: {len(inputs)} inputs for {names}"
        tensors, act = dict(zip(names, inputs, strict=True)), trt.DataType(f["type_id"])
        size = 4 if act is trt.float32 else 2
        widths = self.widths()
        for name in names:
            tensor = tensors[name]
            if name in widths:
                assert tensor.dtype == act, (self.name, name)
                offset, width = self.offset(name), tensor.shape[-1]
                assert offset + widths[name] <= width, (self.name, name, offset, width)
                if name in "xzBCqkv":
                    assert offset * size % 16 == 0 and width * size % 16 == 0, (self.name, name, offset, width)
        for name in ("host_request_types", "last_token_ids", "host_context_lengths", "slot_mapping"):
            assert name not in tensors or (tensors[name].dtype == trt.int32 and tensors[name].shape == (-1,)), name
        if f["paged_state"]:
            assert tensors["state"].dtype == trt.int64 and tensors["state"].shape == (1,)
        else:
            assert tensors["state"].dtype == trt.int32 and len(tensors["state"].shape) == 2
        assert f["slot_stride"] % 16 == 0
        self._check_weights(tensors, trt)
        return f["channels"] if self.name == "ReplayCausalConv" else f["nheads"] * f["headdim"]

    def _check_weights(self, tensors: dict[str, Any], trt: Any) -> None:
        f = self.fields
        if self.name == "ReplayCausalConv":
            assert tensors["weight"].shape == (f["channels"], f["kernel"])
            assert "bias" not in tensors or tensors["bias"].shape == (f["channels"],)
            return
        for name in ("dt_bias", "A", "D", "A_log"):
            if name in tensors:
                wide = name == "dt_bias" and f.get("kind") == 3
                want = (f["nheads"] * (f["dstate"] if wide else 1),)
                assert tensors[name].dtype == trt.float32 and tensors[name].shape == want, (self.name, name)


class RecordedCreator:
    """Creates RecordedPlugins; None, as the contract says, for unknown, mistyped or missing fields."""

    plugin_version = "1"
    plugin_namespace = "replayssm"

    def __init__(self, name: str) -> None:
        self.name = name

    def create_plugin(self, name: str, field_collection: Any, phase: Any) -> RecordedPlugin | None:
        import tensorrt as trt

        assert isinstance(field_collection, trt.PluginFieldCollection) and phase is trt.TensorRTPhase.BUILD
        required, optional, floats = (part.split() for part in CONTRACT[self.name].split("|"))
        fields: dict[str, Any] = {}
        for field in field_collection:
            kind = trt.PluginFieldType.FLOAT32 if field.name in floats else trt.PluginFieldType.INT32
            if field.name not in (*required, *optional, *floats) or field.type is not kind or field.data.size != 1:
                return None
            fields[field.name] = field.data.reshape(-1)[0].item()
        return RecordedPlugin(self.name, fields) if set(required) <= set(fields) else None


def register() -> list[str]:
    """In place of trtllm_replayssm.plugins.register: our creators into the stand-in's registry."""
    import tensorrt as trt

    for name in CONTRACT:
        trt.get_plugin_registry().register_creator(RecordedCreator(name), "replayssm")
    return list(CONTRACT)


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in _PACKAGES or n in _BOUND]:
        del sys.modules[name]


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """The stand-in as tensorrt and tensorrt_llm, plugins registered; yields them and hybrid's class."""
    _forget()
    sys.path.insert(0, str(HERE))
    try:
        import tensorrt
        import tensorrt_llm.network

        register()
        from trtllm_replayssm.trtllm.hybrid import ReplayHybridForCausalLM

        yield SimpleNamespace(trt=tensorrt, llm=tensorrt_llm, model_class=ReplayHybridForCausalLM)
    finally:
        sys.path.remove(str(HERE))
        _forget()
