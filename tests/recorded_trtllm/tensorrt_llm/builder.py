"""Recorded: BuildConfig, and build() as far as the network; the engine is a line of text that says so."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, field
from typing import Any

from . import __version__
from ._common import net_guard
from .bindings import KVCacheType
from .network import Network
from .plugin import PluginConfig


@dataclass
class BuildConfig:
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    max_prompt_embedding_table_size: int = 0
    kv_cache_type: KVCacheType | None = None
    gather_context_logits: bool = False
    max_draft_len: int = 0
    output_timing_cache: str | None = "model.cache"
    plugin_config: PluginConfig = field(default_factory=PluginConfig)

    def update_kv_cache_type(self, model_architecture: str) -> None:
        """Both stock recurrent models decide by paged_state; the KV cache is paged for the one that has attention."""
        assert model_architecture in ("MambaForCausalLM", "RecurrentGemmaForCausalLM") and self.kv_cache_type is None
        self.kv_cache_type = KVCacheType.PAGED if self.plugin_config.paged_state else KVCacheType.CONTINUOUS
        attention = model_architecture == "RecurrentGemmaForCausalLM"
        self.plugin_config.paged_kv_cache = self.plugin_config.paged_state if attention else False

    def to_dict(self) -> dict[str, Any]:
        out = dict(self.__dict__)
        out["kv_cache_type"] = None if self.kv_cache_type is None else self.kv_cache_type.name
        out["plugin_config"] = self.plugin_config.to_dict()
        return out


class EngineConfig:
    def __init__(self, pretrained_config: Any, build_config: BuildConfig, version: str) -> None:
        self.pretrained_config, self.build_config, self.version = pretrained_config, build_config, version

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "pretrained_config": self.pretrained_config.to_dict(),
            "build_config": self.build_config.to_dict(),
        }


class Engine:
    def __init__(self, config: EngineConfig, engine: bytes | None, network: Network) -> None:
        self.config, self.engine, self.network = config, engine, network

    def save(self, engine_dir: str) -> None:
        os.makedirs(engine_dir, exist_ok=True)
        with open(os.path.join(engine_dir, "config.json"), "w", encoding="utf-8") as f:
            json.dump(self.config.to_dict(), f, indent=4)
        assert self.engine is not None
        with open(os.path.join(engine_dir, "rank0.engine"), "wb") as f:
            f.write(self.engine)


def build(model: Any, build_config: BuildConfig) -> Engine:
    """The calls that the real one makes on a model, in order."""
    build_config = copy.deepcopy(build_config)
    build_config.plugin_config.dtype = model.config.dtype
    build_config.update_kv_cache_type(model.config.architecture)
    if build_config.max_seq_len is None:
        build_config.max_seq_len = model.config.max_position_embeddings or 2048
    network = Network()
    network.plugin_config = build_config.plugin_config
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        inputs = model.prepare_inputs(
            max_batch_size=build_config.max_batch_size,
            max_input_len=build_config.max_input_len,
            max_seq_len=build_config.max_seq_len,
            use_cache=build_config.kv_cache_type is not KVCacheType.DISABLED,
            max_beam_width=build_config.max_beam_width,
            max_num_tokens=build_config.max_num_tokens,
            opt_num_tokens=build_config.opt_num_tokens,
            prompt_embedding_table_size=build_config.max_prompt_embedding_table_size,
            max_draft_len=build_config.max_draft_len,
            speculative_decoding_draft_tokens_external=False,
            gather_context_logits=build_config.gather_context_logits,
            lora_target_modules=[],
        )
        model(**inputs)
    engine = f"recorded stand-in: {network.trt_network.num_layers} layers".encode()
    return Engine(EngineConfig(model.config, build_config, __version__), engine, network)
