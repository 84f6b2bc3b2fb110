"""Recorded: the plugin flags that are used; any other is refused, as by a model with validated fields."""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, Any] = {
    "dtype": "float16",
    "gpt_attention_plugin": "auto",
    "gemm_plugin": None,
    "mamba_conv1d_plugin": "auto",
    "context_fmha": True,
    "use_paged_context_fmha": True,
    "remove_input_padding": True,
    "paged_kv_cache": None,
    "paged_state": True,
    "tokens_per_block": 32,
    "multiple_profiles": False,
}
_TYPED = ("gpt_attention_plugin", "gemm_plugin", "mamba_conv1d_plugin")


class PluginConfig:
    """``auto`` reads as the dtype."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", dict(_DEFAULTS))

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(f"PluginConfig has no recorded field {name}")
        value = values[name]
        return values["dtype"] if name in _TYPED and value == "auto" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise ValueError(f'"PluginConfig" object has no field "{name}"')
        self._values[name] = value

    def __deepcopy__(self, memo: Any) -> PluginConfig:
        made = PluginConfig()
        made._values.update(self._values)
        return made

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)
