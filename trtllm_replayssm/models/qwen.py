"""Qwen3-Next and Qwen3.5 (dense text): Gated DeltaNet 3:1 with gated attention, a SwiGLU MLP behind each of them.

One published layer is two of ours: its token mixer and its MLP. The two generations differ in how the projections in
front of the recurrence are stored, nothing else.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import require
from ..spec import GATED_DELTA
from .config import ANY_RECURRENT, ATTENTION, MLP, MOE, HybridConfig, recurrence_keys
from .decoder import EMBEDDING, FINAL_NORM, LM_HEAD
from .fields import Fields
from .recipes import Recipe, Source, Tensors, concatenated, one_plus, plain, squeezed, stacked

if TYPE_CHECKING:
    import torch

_NAMES = {"linear_attention": GATED_DELTA, "full_attention": ATTENTION}


def read_layers(fields: Fields, moe: bool) -> tuple[str, ...]:
    """Two kinds per published layer, from ``layer_types`` or ``full_attention_interval``; ``moe`` is for all-MoE types.

    Raises:
        ReplayError: an unknown type, or a list whose length is not num_hidden_layers.
    """
    count = fields.integer("num_hidden_layers")
    require(count >= 1, f"{fields.where}: num_hidden_layers is {count}; it must be at least 1")
    if fields.get("layer_types", None) is not None:
        types = fields.strings("layer_types")
        unknown = sorted(set(types) - set(_NAMES))
        require(
            not unknown, f"{fields.where}: layer_types holds {', '.join(unknown)}; known types are {', '.join(_NAMES)}"
        )
        require(
            len(types) == count, f"{fields.where}: layer_types has {len(types)} entries; num_hidden_layers is {count}"
        )
        mixers = [_NAMES[name] for name in types]
    else:
        interval = fields.integer("full_attention_interval", 4)
        require(interval >= 1, f"{fields.where}: full_attention_interval is {interval}; it must be at least 1")
        mixers = [GATED_DELTA if (i + 1) % interval else ATTENTION for i in range(count)]
    experts = fields.integer("num_experts", 1 if moe else 0)
    sparse_step = fields.integer("decoder_sparse_step", 1)
    require(sparse_step >= 1, f"{fields.where}: decoder_sparse_step is {sparse_step}; it must be at least 1")
    dense = fields.integers("mlp_only_layers")
    layers: list[str] = []
    for i, mixer in enumerate(mixers):
        sparse = experts > 0 and i not in dense and (i + 1) % sparse_step == 0
        layers += [mixer, MOE if sparse else MLP]
    return tuple(layers)


def read_config(fields: Fields, tie_embeddings: bool, family: str, moe: bool) -> HybridConfig:
    """HybridConfig of a Qwen text config (the wrapper's ``text_config``, where there is one).

    Raises:
        ReplayError: a field missing, of the wrong type, or with a value that this decoder does not implement.
    """
    fields.expect("hidden_act", ("silu", "swish"), "silu")
    fields.expect("output_gate_type", ("silu", "swish"), "silu")
    fields.expect("attn_output_gate", (True,), True)
    rope = Fields(_rope_parameters(fields), f"{fields.where}: rope_parameters")
    rope.expect("rope_type", ("default", "mrope"), rope.get("type", "default"))
    layers = read_layers(fields, moe)
    head_dim = fields.integer("head_dim")
    return HybridConfig.published(
        fields.where,
        _keys(fields),
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        intermediate_size=fields.integer("intermediate_size") if MLP in layers else 0,
        mlp_kind="swiglu",
        num_attention_heads=fields.integer("num_attention_heads"),
        num_key_value_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        attention_gate=True,
        qk_norm=True,
        rotary_dim=int(head_dim * rope.number("partial_rotary_factor", 0.25)),
        rope_theta=rope.number("rope_theta", 10000.0),
        ssm_heads=fields.integer("linear_num_value_heads"),
        ssm_groups=fields.integer("linear_num_key_heads"),
        ssm_head_dim=fields.integer("linear_value_head_dim"),
        ssm_state_size=fields.integer("linear_key_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4),
        state_dtype=fields.get("mamba_ssm_dtype", "float32"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=tie_embeddings,
        attention_bias=fields.boolean("attention_bias", False),
        max_positions=fields.integer("max_position_embeddings"),
    )


def _keys(fields: Fields) -> dict[str, str]:
    """What the config calls the fields of HybridConfig that have another name there."""
    return {
        "layers": fields.key("layer_types", "full_attention_interval"),
        ANY_RECURRENT: "linear_attention",
        "rotary_dim": "head_dim * partial_rotary_factor",
        **recurrence_keys(
            "linear_num_value_heads",
            "linear_num_key_heads",
            "linear_value_head_dim",
            "linear_key_head_dim",
            "linear_conv_kernel_dim",
        ),
        "state_dtype": "mamba_ssm_dtype",
        "norm_eps": "rms_norm_eps",
        "max_positions": "max_position_embeddings",
    }


def _rope_parameters(fields: Fields) -> dict[str, object]:
    """``rope_parameters``, or ``rope_scaling`` (older), over the values that stand beside them."""
    beside = {name: fields.data[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields.data}
    inner = fields.get(("rope_parameters", "rope_scaling"), {})
    require(isinstance(inner, dict), f"{fields.where}: rope_parameters is {inner!r}; it must be an object")
    return {**beside, **inner}


def recipes(config: HybridConfig) -> list[Recipe]:
    """One Recipe per weight of the decoder."""
    hidden = config.hidden_size
    out = [
        plain(EMBEDDING, "embed_tokens.weight", config.vocab_size, hidden),
        _norm(FINAL_NORM, "norm.weight", hidden),
    ]
    if not config.tie_embeddings:
        out.append(plain(LM_HEAD, "lm_head.weight", config.vocab_size, hidden))
    for i, kind in enumerate(config.layers):
        published, target = f"layers.{i // 2}", f"layers.{i}"
        before = "post_attention_layernorm" if kind == MLP else "input_layernorm"
        out.append(_norm(f"{target}.norm.weight", f"{published}.{before}.weight", hidden))
        if kind == MLP:
            out += _mlp(config, f"{target}.mixer", f"{published}.mlp")
        elif kind == ATTENTION:
            out += _attention(config, f"{target}.mixer", f"{published}.self_attn")
        else:
            out += _gated_delta(config, f"{target}.mixer", f"{published}.linear_attn")
    return out


def _norm(target: str, name: str, size: int) -> Recipe:
    """All norms but the one behind the recurrence are published as their distance from 1."""
    return Recipe(target, (Source(name, (size,)),), one_plus)


def _mlp(config: HybridConfig, target: str, name: str) -> list[Recipe]:
    size, hidden = config.intermediate_size, config.hidden_size
    pair = {f"{name}.gate_proj.weight": size, f"{name}.up_proj.weight": size}
    return [
        stacked(f"{target}.gate_up_proj.weight", pair, hidden),
        plain(f"{target}.down_proj.weight", f"{name}.down_proj.weight", hidden, size),
    ]


def _attention(config: HybridConfig, target: str, name: str) -> list[Recipe]:
    q_rows, kv_rows = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    rows = {"q_proj": 2 * q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    combine = functools.partial(_queries_then_gates, config.head_dim)
    out = []
    for part, tail in [("weight", (config.hidden_size,)), ("bias", ())][: 2 if config.attention_bias else 1]:
        sources = tuple(Source(f"{name}.{p}.{part}", (n, *tail)) for p, n in rows.items())
        out.append(Recipe(f"{target}.qkv_proj.{part}", sources, combine))
    for norm in ("q_norm", "k_norm"):
        out.append(_norm(f"{target}.{norm}.weight", f"{name}.{norm}.weight", config.head_dim))
    out.append(plain(f"{target}.o_proj.weight", f"{name}.o_proj.weight", config.hidden_size, q_rows))
    if config.attention_bias:
        out.append(plain(f"{target}.o_proj.bias", f"{name}.o_proj.bias", config.hidden_size))
    return out


def _queries_then_gates(head_dim: int, tensors: Tensors) -> torch.Tensor:
    """q_proj's rows are [query | gate] per head; ours are all queries, all gates, keys, values."""
    import torch

    q, k, v = tensors
    per_head = q.reshape(-1, 2, head_dim, *q.shape[1:])
    return torch.cat([per_head[:, 0].flatten(0, 1), per_head[:, 1].flatten(0, 1), k, v])


def _gated_delta(config: HybridConfig, target: str, name: str) -> list[Recipe]:
    hidden, heads, channels = config.hidden_size, config.ssm_heads, config.conv_channels
    inner = config.ssm_inner_size
    # Qwen3.5: four flat projections. Qwen3-Next: two, whose rows are grouped per key head.
    parts = {"in_proj_qkv": channels, "in_proj_z": inner, "in_proj_b": heads, "in_proj_a": heads}
    flat = tuple(Source(f"{name}.{part}.weight", (rows, hidden)) for part, rows in parts.items())
    pair = {"in_proj_qkvz": channels + inner, "in_proj_ba": 2 * heads}
    grouped = tuple(Source(f"{name}.{part}.weight", (rows, hidden)) for part, rows in pair.items())
    forms = [
        Recipe(f"{target}.in_proj.weight", flat, concatenated),
        Recipe(f"{target}.in_proj.weight", grouped, functools.partial(_ungrouped, config)),
    ]
    first, second = forms if config.family == "qwen3_5" else forms[::-1]
    conv = (Source(f"{name}.conv1d.weight", (channels, 1, config.conv_kernel)),)
    return [
        Recipe(first.target, first.sources, first.combine, otherwise=second),
        Recipe(f"{target}.conv.weight", conv, squeezed),
        plain(f"{target}.A_log", f"{name}.A_log", heads),
        plain(f"{target}.dt_bias", f"{name}.dt_bias", heads),
        plain(f"{target}.norm.weight", f"{name}.norm.weight", config.ssm_head_dim),
        plain(f"{target}.out_proj.weight", f"{name}.out_proj.weight", hidden, inner),
    ]


def _ungrouped(config: HybridConfig, tensors: Tensors) -> torch.Tensor:
    """[q | k | v | z] and [b | a] per key head, as flat q, k, v, z, b, a."""
    import torch

    groups, key, ratio = config.ssm_groups, config.ssm_state_size, config.ssm_heads // config.ssm_groups
    value = ratio * config.ssm_head_dim
    qkvz, ba = (t.reshape(groups, -1, t.shape[-1]) for t in tensors)
    pieces = [*qkvz.split([key, key, value, value], dim=1), *ba.split([ratio, ratio], dim=1)]
    return torch.cat([piece.flatten(0, 1) for piece in pieces])
