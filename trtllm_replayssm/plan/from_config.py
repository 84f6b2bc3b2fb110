"""ModelShape from a config.json: a published (Hugging Face) one, or that of a converted checkpoint, read by models/."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..directories import refuse_engine
from ..errors import require
from ..models.config import MLP, MOE, HybridConfig
from ..models.decoder import weight_shapes
from ..models.fields import Fields, read_json
from .shapes import Attention, Experts, ModelShape, Recurrent

CONFIG_FILE = "config.json"


def shape_from_path(text: str) -> ModelShape:
    """The model of a config.json, or of a directory that holds one.

    Weight bytes are those of the *.safetensors files beside it, where there are any.

    Raises:
        ReplayError: no such file, not readable, not JSON, or an architecture that models/ does not know.
    """
    path = Path(text)
    file = path / CONFIG_FILE if path.is_dir() else path
    require(file.name == CONFIG_FILE, f"model is {text!r}; it must be a {CONFIG_FILE} or the directory that holds one")
    raw = read_json(file)
    config = read_config(file, raw)
    total, experts, params_from = count_params(config, raw)
    r = Recurrent(
        kind=config.recurrent_kind,
        layers=len(config.recurrent_layers),
        nheads=config.ssm_heads,
        ngroups=config.ssm_groups,
        headdim=config.ssm_head_dim,
        dstate=config.ssm_state_size,
        conv_kernel=config.conv_kernel,
    )
    return ModelShape(
        name=file.resolve().parent.name or config.family,
        recurrent=r,
        attention=_attention(config),
        ffn=_ffn(config, experts),
        params=total,
        lookup_params=0 if config.tie_embeddings else config.vocab_size * config.hidden_size,
        params_from=params_from,
        source=text,
        experts=experts,
        weights_bytes=sum(f.stat().st_size for f in file.parent.glob("*.safetensors")) or None,
    )


def read_config(file: Path, raw: Mapping[str, Any]) -> HybridConfig:
    """HybridConfig of a converted checkpoint (its ``replayssm`` object) or of a published config."""
    refuse_engine(file.parent, raw, "the checkpoint that it was built from, or the Hugging Face directory")
    if "replayssm" in raw:
        from ..models.checkpoint import read_checkpoint_config

        return read_checkpoint_config(file.parent)
    from ..models.hf import read_hf_config

    return read_hf_config(file.parent, allow_moe=True)


def count_params(config: HybridConfig, raw: Mapping[str, Any]) -> tuple[int, Experts | None, str]:
    """(parameters, routed experts, where the count comes from). Exact without experts, else from the experts' sizes."""
    layers = tuple(kind for kind in config.layers if kind != MOE)
    dense = sum(math.prod(shape) for shape in weight_shapes(replace(config, layers=layers)).values())
    moe_layers = len(config.layers) - len(layers)
    if not moe_layers:
        return dense, None, "count of the weights that the config asks for"
    fields = Fields(raw.get("text_config") or raw, CONFIG_FILE)
    hidden, matrices = config.hidden_size, 2 if config.mlp_kind == "relu2" else 3
    count = fields.integer(("n_routed_experts", "num_experts"))
    top_k = fields.integer(("num_experts_per_tok", "num_experts_per_token"))
    latent = fields.integer("moe_latent_size", hidden)
    per_expert = fields.integer("moe_intermediate_size")
    shared = fields.integer(("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"), 0)
    shared += per_expert * fields.integer("num_shared_experts", 0)
    require(
        1 <= top_k <= count, f"{CONFIG_FILE}: num_experts_per_tok is {top_k}; it must be from 1 to {count} (experts)"
    )
    experts = Experts(moe_layers, count, top_k, matrices * latent * per_expert)
    # Beside the routed experts: norm, router, its bias or the shared expert's gate, shared expert, latent projections.
    into_latent = 2 * hidden * latent if latent != hidden else 0
    one_layer = hidden * (count + 2) + matrices * hidden * shared + into_latent
    return dense + moe_layers * one_layer + experts.total, experts, "estimate from the dimensions"


def _attention(config: HybridConfig) -> Attention:
    layers = len(config.attention_layers)
    if config.latent_rank:
        return Attention(layers, latent=config.latent_rank + config.latent_shared_dim)
    return Attention(layers, config.num_key_value_heads, config.head_dim)


def _ffn(config: HybridConfig, experts: Experts | None) -> str:
    mlps = config.layers.count(MLP)
    parts = [f"{mlps} MLP"] if mlps else []
    if experts is not None:
        parts.append(f"{experts.layers} MoE ({experts.count} experts, top {experts.top_k})")
    return " + ".join(parts) or "no MLP"
