"""Recorded: the two architecture strings whose C++ runtime has recurrent-state pools, and their config classes."""

from __future__ import annotations

from typing import Any

from .modeling_utils import PretrainedConfig, PretrainedModel

__all__ = ["MODEL_MAP", "PretrainedConfig", "PretrainedModel"]


class MambaConfig(PretrainedConfig):
    def __init__(
        self,
        *,
        residual_in_fp32: bool = True,
        pad_vocab_size_multiple: int = -1,
        layer_types: Any = None,
        **kwargs: Any,
    ) -> None:
        self.residual_in_fp32 = residual_in_fp32
        self.pad_vocab_size_multiple = pad_vocab_size_multiple
        self.layer_types = layer_types or ["recurrent"]
        super().__init__(**kwargs)


class MambaForCausalLM(PretrainedModel):
    config_class = MambaConfig


class RecurrentGemmaForCausalLM(PretrainedModel):
    pass


MODEL_MAP: dict[str, type] = {
    "MambaForCausalLM": MambaForCausalLM,
    "RecurrentGemmaForCausalLM": RecurrentGemmaForCausalLM,
}
