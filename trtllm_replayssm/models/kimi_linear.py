"""Kimi-Linear (``model_type: kimi_linear``): Kimi Delta Attention 3:1 with latent attention, a SwiGLU MLP behind each.

One published layer is two of ours: its token mixer and its MLP. Published models replace all MLPs but the first by
mixtures of experts, which are read for planning and refused otherwise. Kimi-K3, whose text config says the same
model_type, differs in its gates, residuals and MLPs and is refused by the fields that say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import require
from ..spec import KIMI_DELTA
from .config import ANY_RECURRENT, ATTENTION, MLP, MOE, HybridConfig, recurrence_keys
from .decoder import EMBEDDING, FINAL_NORM, LM_HEAD
from .fields import Fields
from .recipes import Recipe, Source, Tensors, concatenated, only, plain, stacked

if TYPE_CHECKING:
    import torch

_NAMES = {"linear_attention": KIMI_DELTA, "full_attention": ATTENTION}
_MLP_NAMES = {"dense": MLP, "sparse": MOE}
#: The norms inside latent attention have this eps whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6


def _linear_fields(fields: Fields) -> Fields:
    """``linear_attn_config`` (published form); empty where the fields stand beside the others (transformers' form)."""
    value = fields.get("linear_attn_config", {})
    require(isinstance(value, dict), f"{fields.where}: linear_attn_config is {value!r}; it must be an object")
    return Fields(value, f"{fields.where}: linear_attn_config")


def read_layers(fields: Fields) -> tuple[str, ...]:
    """Two kinds per published layer: mixers from ``linear_attn_config`` (layers counted from 1) or ``layer_types``,
    MLPs from ``mlp_layer_types`` or from the expert fields.

    Raises:
        ReplayError: an unknown type, a list whose length is not num_hidden_layers, or lists that name a layer twice or
            not at all.
    """
    count = fields.integer("num_hidden_layers")
    require(count >= 1, f"{fields.where}: num_hidden_layers is {count}; it must be at least 1")
    linear = _linear_fields(fields)
    if linear.get("full_attn_layers", None) is not None or linear.get("kda_layers", None) is not None:
        named = {ATTENTION: linear.integers("full_attn_layers"), KIMI_DELTA: linear.integers("kda_layers")}
        together = sorted(number for numbers in named.values() for number in numbers)
        require(
            together == list(range(1, count + 1)),
            f"{linear.where}: full_attn_layers and kda_layers must name each of the layers 1 to {count} once",
        )
        mixers = [ATTENTION if i + 1 in named[ATTENTION] else KIMI_DELTA for i in range(count)]
    else:
        mixers = _typed(fields, "layer_types", _NAMES, count)
    if fields.get("mlp_layer_types", None) is not None:
        mlps = _typed(fields, "mlp_layer_types", _MLP_NAMES, count)
    else:
        dense = fields.integer("first_k_dense_replace", 1)
        every = fields.integer("moe_layer_freq", 1)
        require(every >= 1, f"{fields.where}: moe_layer_freq is {every}; it must be at least 1")
        experts = fields.integer(("num_experts", "num_local_experts"), 0)
        mlps = [MOE if experts > 0 and i >= dense and i % every == 0 else MLP for i in range(count)]
    return tuple(kind for pair in zip(mixers, mlps) for kind in pair)


def _typed(fields: Fields, name: str, names: dict[str, str], count: int) -> list[str]:
    types = fields.strings(name)
    unknown = sorted(set(types) - set(names))
    require(not unknown, f"{fields.where}: {name} holds {', '.join(unknown)}; known types are {', '.join(names)}")
    require(len(types) == count, f"{fields.where}: {name} has {len(types)} entries; num_hidden_layers is {count}")
    return [names[kind] for kind in types]


def read_config(fields: Fields, tie_embeddings: bool) -> HybridConfig:
    """HybridConfig of a Kimi-Linear config.json, in the published form or in transformers'.

    Raises:
        ReplayError: a field missing, of the wrong type, or with a value that this decoder does not implement.
    """
    linear = _linear_fields(fields)
    fields.expect("hidden_act", ("silu",), "silu")
    fields.expect("attention_bias", (False,), False)
    fields.expect("mla_use_nope", (True,), True)
    for where in (fields, linear):
        where.expect("gate_lower_bound", (None,), None)
        where.expect("use_full_rank_gate", (False,), False)
    layers = read_layers(fields)
    head_dim = linear.integer("head_dim") if "head_dim" in linear.data else fields.integer("linear_head_dim")
    heads = linear.integer("num_heads") if "num_heads" in linear.data else fields.integer("linear_num_heads")
    kernel = linear.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4))
    attention: dict[str, Any] = {}
    if ATTENTION in layers:
        shared = fields.integer("qk_rope_head_dim")
        attention = {
            "num_attention_heads": fields.integer("num_attention_heads"),
            "num_key_value_heads": fields.integer("num_key_value_heads", fields.integer("num_attention_heads")),
            "head_dim": fields.integer("qk_nope_head_dim") + shared,
            "latent_rank": fields.integer("kv_lora_rank"),
            "latent_shared_dim": shared,
            "latent_value_dim": fields.integer("v_head_dim"),
            "latent_q_rank": fields.integer("q_lora_rank", 0),
        }
        require(attention["latent_rank"] >= 1, f"{fields.where}: kv_lora_rank is 0; it must be at least 1")
    return HybridConfig.published(
        fields.where,
        _keys(fields, linear),
        family="kimi_linear",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        intermediate_size=fields.integer("intermediate_size") if MLP in layers else 0,
        mlp_kind="swiglu",
        latent_norm_eps=_LATENT_NORM_EPS,
        ssm_heads=heads,
        ssm_groups=heads,
        ssm_head_dim=head_dim,
        ssm_state_size=head_dim,
        conv_kernel=kernel,
        state_dtype="float32",
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=tie_embeddings,
        max_positions=fields.integer(("model_max_length", "max_position_embeddings")),
        **attention,
    )


def _keys(fields: Fields, linear: Fields) -> dict[str, str]:
    """What the config calls the fields of HybridConfig that have another name there."""

    def either(inner: str, beside: str) -> str:
        return f"linear_attn_config.{inner}" if inner in linear.data else beside

    heads, size = either("num_heads", "linear_num_heads"), either("head_dim", "linear_head_dim")
    listed = either("kda_layers", "layer_types")
    return {
        "layers": listed,
        ANY_RECURRENT: "linear_attention" if listed == "layer_types" else "there",
        "head_dim": "qk_nope_head_dim + qk_rope_head_dim",
        "latent_rank": "kv_lora_rank",
        "latent_shared_dim": "qk_rope_head_dim",
        "latent_value_dim": "v_head_dim",
        "latent_q_rank": "q_lora_rank",
        **recurrence_keys(heads, heads, size, size, either("short_conv_kernel_size", "linear_conv_kernel_dim")),
        "norm_eps": "rms_norm_eps",
        "max_positions": fields.key("model_max_length", "max_position_embeddings"),
    }


def recipes(config: HybridConfig) -> list[Recipe]:
    """One Recipe per weight of the decoder."""
    hidden = config.hidden_size
    out = [
        plain(EMBEDDING, "embed_tokens.weight", config.vocab_size, hidden),
        plain(FINAL_NORM, "norm.weight", hidden),
    ]
    if not config.tie_embeddings:
        out.append(plain(LM_HEAD, "lm_head.weight", config.vocab_size, hidden))
    for i, kind in enumerate(config.layers):
        published, target = f"layers.{i // 2}", f"layers.{i}"
        before = "post_attention_layernorm" if kind == MLP else "input_layernorm"
        out.append(plain(f"{target}.norm.weight", f"{published}.{before}.weight", hidden))
        if kind == MLP:
            out += _mlp(config, f"{target}.mixer", published)
        elif kind == ATTENTION:
            out += _latent_attention(config, f"{target}.mixer", f"{published}.self_attn")
        else:
            out += _kimi_delta(config, f"{target}.mixer", f"{published}.self_attn")
    return out


def _mlp(config: HybridConfig, target: str, layer: str) -> list[Recipe]:
    """``mlp`` as published; transformers writes dense MLPs under the experts' prefix."""
    size, hidden = config.intermediate_size, config.hidden_size
    out = []
    for ours, parts, shape in (
        ("gate_up_proj", ("gate_proj", "up_proj"), (size, hidden)),
        ("down_proj", ("down_proj",), (hidden, size)),
    ):
        first, second = (
            stacked(f"{target}.{ours}.weight", {f"{layer}.{name}.{p}.weight": shape[0] for p in parts}, shape[1])
            for name in ("mlp", "block_sparse_moe")
        )
        out.append(Recipe(first.target, first.sources, first.combine, otherwise=second))
    return out


def _latent_attention(config: HybridConfig, target: str, name: str) -> list[Recipe]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank, q_rank = config.latent_rank, config.latent_q_rank
    shared, value = config.latent_shared_dim, config.latent_value_dim
    q_rows, q_name = heads * config.head_dim, "q_b_proj" if q_rank else "q_proj"
    out = [
        plain(f"{target}.q_proj.weight", f"{name}.{q_name}.weight", q_rows, q_rank or hidden),
        plain(f"{target}.kv_down_proj.weight", f"{name}.kv_a_proj_with_mqa.weight", rank + shared, hidden),
        plain(f"{target}.kv_norm.weight", f"{name}.kv_a_layernorm.weight", rank),
        plain(
            f"{target}.kv_up_proj.weight",
            f"{name}.kv_b_proj.weight",
            heads * (config.head_dim - shared + value),
            rank,
        ),
        plain(f"{target}.o_proj.weight", f"{name}.o_proj.weight", hidden, heads * value),
    ]
    if q_rank:
        out.append(plain(f"{target}.q_down_proj.weight", f"{name}.q_a_proj.weight", q_rank, hidden))
        out.append(plain(f"{target}.q_norm.weight", f"{name}.q_a_layernorm.weight", q_rank))
    return out


def _kimi_delta(config: HybridConfig, target: str, name: str) -> list[Recipe]:
    hidden, heads, size, inner = config.hidden_size, config.ssm_heads, config.ssm_head_dim, config.ssm_inner_size
    rows = {"q_proj": inner, "k_proj": inner, "v_proj": inner, "f_a_proj": size, "g_a_proj": size, "b_proj": heads}
    convs = tuple(Source(f"{name}.{part}_conv1d.weight", (inner, 1, config.conv_kernel)) for part in "qkv")
    a_log = Source(f"{name}.A_log", (1, 1, heads, 1), also=((heads,),))
    dt_bias = Source(f"{name}.dt_bias", (inner,), also=((heads, size),))
    return [
        stacked(f"{target}.in_proj.weight", {f"{name}.{part}.weight": n for part, n in rows.items()}, hidden),
        Recipe(f"{target}.conv.weight", convs, _one_conv),
        plain(f"{target}.f_proj.weight", f"{name}.f_b_proj.weight", inner, size),
        plain(f"{target}.g_proj.weight", f"{name}.g_b_proj.weight", inner, size),
        Recipe(f"{target}.A_log", (a_log,), _flat),
        Recipe(f"{target}.dt_bias", (dt_bias,), lambda tensors: only(tensors).reshape(heads, size)),
        plain(f"{target}.norm.weight", f"{name}.o_norm.weight", size),
        plain(f"{target}.out_proj.weight", f"{name}.o_proj.weight", hidden, inner),
    ]


def _one_conv(tensors: Tensors) -> torch.Tensor:
    """The convolutions of q, k and v, [C, 1, taps] each, as one [3 C, taps]."""
    return concatenated(tensors).squeeze(1)


def _flat(tensors: Tensors) -> torch.Tensor:
    """One value per head, whatever axes of size 1 are around them."""
    return only(tensors).flatten()
