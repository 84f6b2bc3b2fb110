"""Recorded: PretrainedConfig and PretrainedModel."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from safetensors.torch import load_file

from ..functional import PositionEmbeddingType
from ..module import Module
from .generation_mixin import GenerationMixin


class Mapping:
    def __init__(self, world_size: int = 1, rank: int = 0, tp_size: int = 1, pp_size: int = 1) -> None:
        assert world_size == tp_size * pp_size
        self.world_size, self.rank, self.tp_size, self.pp_size = world_size, rank, tp_size, pp_size

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class QuantConfig:
    def __init__(self, quant_algo: Any = None, kv_cache_quant_algo: Any = None) -> None:
        self.quant_algo, self.kv_cache_quant_algo = quant_algo, kv_cache_quant_algo


class PretrainedConfig:
    """Unknown keys become attributes and are written back."""

    def __init__(
        self,
        *,
        architecture: str,
        dtype: str,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        vocab_size: int | None = None,
        hidden_act: str = "gelu",
        logits_dtype: str = "float32",
        norm_epsilon: float = 1e-5,
        position_embedding_type: str = "learned_absolute",
        max_position_embeddings: int | None = None,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        mapping: Any = None,
        quantization: Any = None,
        head_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        given["mapping"] = Mapping(**(mapping or {}))
        given["quantization"] = QuantConfig(**(quantization or {}))
        given["position_embedding_type"] = PositionEmbeddingType.from_string(position_embedding_type)
        for name, value in {**given, **kwargs}.items():
            setattr(self, name, value)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Any:
        from . import MODEL_MAP

        return getattr(MODEL_MAP[config["architecture"]], "config_class", cls)(**config)

    @classmethod
    def from_json_file(cls, config_file: str) -> Any:
        with open(config_file) as f:
            return cls.from_dict(json.load(f))

    def set_rank(self, rank: int) -> None:
        self.mapping.rank = rank

    def to_dict(self) -> dict[str, Any]:
        output = copy.deepcopy(self.__dict__)
        output["position_embedding_type"] = str(self.position_embedding_type)
        output["mapping"] = self.mapping.to_dict()
        output["mapping"].pop("rank")
        output["quantization"] = dict(self.quantization.__dict__)
        return output


class _PostInitCaller(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = type.__call__(cls, *args, **kwargs)
        made.__post_init__()
        return made


class PretrainedModel(Module, GenerationMixin, metaclass=_PostInitCaller):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config

    def __post_init__(self) -> None:
        raise AssertionError("the stock hook quantises and fuses; a model of other modules overrides it")

    @classmethod
    def from_checkpoint(cls, ckpt_dir: str, rank: int | None = None, config: Any = None) -> Any:
        if config is None:
            config = PretrainedConfig.from_json_file(os.path.join(ckpt_dir, "config.json"))
        weights = load_file(os.path.join(ckpt_dir, f"rank{rank or 0}.safetensors"))
        model = cls(config)
        model.load(weights, from_pruned=False)
        return model

    def load(self, weights: dict[str, Any], from_pruned: bool = False) -> None:
        needed = {name for name, parameter in self.named_parameters() if not parameter.is_inited()}
        if not needed <= set(weights):
            raise RuntimeError(f"Required but not provided tensors:{needed - set(weights)}")
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.value = weights[name]
