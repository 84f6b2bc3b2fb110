"""Nemotron-H (``model_type: nemotron_h``): Mamba-2, attention without positions, relu2 MLPs, one mixer per layer."""

from __future__ import annotations

import math

from ..errors import ReplayError, require
from ..spec import MAMBA2
from .config import ANY_RECURRENT, ATTENTION, MLP, MOE, HybridConfig, recurrence_keys
from .decoder import EMBEDDING, FINAL_NORM, LM_HEAD
from .fields import Fields, decode_float
from .recipes import Recipe, Source, plain, squeezed, stacked

_PATTERN = {"M": MAMBA2, "*": ATTENTION, "-": MLP, "E": MOE}
_NAMES = {
    "mamba": MAMBA2,
    "linear_attention": MAMBA2,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}
#: Largest finite fp32; a limit above it (some configs write 1e308) means that there is none.
_FLOAT32_MAX = 3.4028234663852886e38


def read_layers(fields: Fields) -> tuple[str, ...]:
    """Layer kinds from ``layers_block_type`` / ``layer_types`` or from ``hybrid_override_pattern``.

    Raises:
        ReplayError: neither is there, they disagree, or hold an unknown kind; a pattern whose length is not
            num_hidden_layers.
    """
    found = {}
    for name in ("layers_block_type", "layer_types"):
        if fields.get(name, None) is not None:
            kinds = fields.strings(name)
            unknown = sorted(set(kinds) - set(_NAMES))
            require(
                not unknown, f"{fields.where}: {name} holds {', '.join(unknown)}; known types are {', '.join(_NAMES)}"
            )
            found[name] = tuple(_NAMES[kind] for kind in kinds)
    pattern = fields.get("hybrid_override_pattern", None)
    if pattern is not None:
        where = f"{fields.where}: hybrid_override_pattern"
        require(isinstance(pattern, str), f"{where} is {pattern!r}; it must be a string")
        bad = sorted(set(pattern) - set(_PATTERN))
        require(not bad, f"{where} holds {', '.join(map(repr, bad))}; known signs are {', '.join(_PATTERN)}")
        found["hybrid_override_pattern"] = tuple(_PATTERN[sign] for sign in pattern)
        count = fields.integer("num_hidden_layers", len(pattern))
        require(count == len(pattern), f"{where} has {len(pattern)} layers; num_hidden_layers is {count}")
    if not found:
        raise ReplayError(f"{fields.where}: neither layers_block_type nor hybrid_override_pattern is there")
    require(len(set(found.values())) == 1, f"{fields.where}: {' and '.join(found)} list different layers")
    return next(iter(found.values()))


def read_dt_limits(fields: Fields) -> tuple[float, float]:
    """(dt_min, dt_max) from ``time_step_limit``; (0, inf) where it is absent. ``time_step_min`` concerns training."""
    names = ("time_step_limit", "mamba_dt_limit")
    value = fields.get(names, [0.0, math.inf])
    limits = [decode_float(item) for item in value] if isinstance(value, list) and len(value) == 2 else []
    ok = len(limits) == 2 and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in limits)
    require(ok and limits[0] >= 0, f"{fields.where}: time_step_limit is {value!r}; it must be [least, most]")
    low, high = (float(x) for x in limits)
    return low, math.inf if high > _FLOAT32_MAX else high


def read_config(fields: Fields, tie_embeddings: bool) -> HybridConfig:
    """HybridConfig of a Nemotron-H config.json.

    Raises:
        ReplayError: a field missing, of the wrong type, or with a value that this decoder does not implement.
    """
    fields.expect("mlp_hidden_act", ("relu2",), "relu2")
    fields.expect("mamba_hidden_act", ("silu",), "silu")
    fields.expect("sliding_window", (None,), None)
    layers = read_layers(fields)
    heads = fields.integer("num_attention_heads") if ATTENTION in layers else 0
    dt_min, dt_max = read_dt_limits(fields)
    return HybridConfig.published(
        fields.where,
        _keys(fields),
        family="nemotron_h",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        intermediate_size=fields.integer("intermediate_size") if MLP in layers else 0,
        mlp_kind="relu2",
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads) if heads else 0,
        head_dim=fields.integer(("head_dim", "attention_head_dim")) if heads else 0,
        ssm_heads=fields.integer("mamba_num_heads"),
        ssm_groups=fields.integer(("n_groups", "mamba_n_groups")),
        ssm_head_dim=fields.integer("mamba_head_dim"),
        ssm_state_size=fields.integer("ssm_state_size"),
        conv_kernel=fields.integer(("conv_kernel", "mamba_d_conv"), 4),
        conv_bias=fields.boolean(("use_conv_bias", "mamba_conv_bias"), True),
        dt_min=dt_min,
        dt_max=dt_max,
        state_dtype=fields.get("mamba_ssm_cache_dtype", "float32"),
        norm_eps=fields.number(("layer_norm_epsilon", "norm_eps"), 1e-5),
        tie_embeddings=tie_embeddings,
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        mixer_bias=fields.boolean("use_bias", False),
        max_positions=fields.integer("max_position_embeddings"),
    )


def _keys(fields: Fields) -> dict[str, str]:
    """What the config calls the fields of HybridConfig that have another name there."""
    listed = fields.key("layers_block_type", "layer_types", "hybrid_override_pattern")
    limit = fields.key("time_step_limit", "mamba_dt_limit")
    return {
        "layers": listed,
        ANY_RECURRENT: "M" if listed == "hybrid_override_pattern" else "mamba",
        "head_dim": fields.key("head_dim", "attention_head_dim"),
        **recurrence_keys(
            "mamba_num_heads",
            fields.key("n_groups", "mamba_n_groups"),
            "mamba_head_dim",
            "ssm_state_size",
            fields.key("conv_kernel", "mamba_d_conv"),
        ),
        "dt_min": f"{limit}[0]",
        "dt_max": f"{limit}[1]",
        "state_dtype": "mamba_ssm_cache_dtype",
        "norm_eps": fields.key("layer_norm_epsilon", "norm_eps"),
        "max_positions": "max_position_embeddings",
    }


def recipes(config: HybridConfig) -> list[Recipe]:
    """One Recipe per weight of the decoder."""
    hidden = config.hidden_size
    out = [plain(EMBEDDING, "embeddings.weight", config.vocab_size, hidden), plain(FINAL_NORM, "norm_f.weight", hidden)]
    if not config.tie_embeddings:
        out.append(plain(LM_HEAD, "lm_head.weight", config.vocab_size, hidden))
    makers = {MAMBA2: _mamba2, ATTENTION: _attention, MLP: _mlp}
    for i, kind in enumerate(config.layers):
        out.append(plain(f"layers.{i}.norm.weight", f"layers.{i}.norm.weight", hidden))
        out += makers[kind](config, f"layers.{i}.mixer")
    return out


def _linear(name: str, rows: int, columns: int, bias: bool) -> list[Recipe]:
    out = [plain(f"{name}.weight", f"{name}.weight", rows, columns)]
    return [*out, plain(f"{name}.bias", f"{name}.bias", rows)] if bias else out


def _mamba2(config: HybridConfig, name: str) -> list[Recipe]:
    inner, heads, channels = config.ssm_inner_size, config.ssm_heads, config.conv_channels
    conv = (Source(f"{name}.conv1d.weight", (channels, 1, config.conv_kernel)),)
    out = [
        *_linear(f"{name}.in_proj", inner + channels + heads, config.hidden_size, config.mixer_bias),
        Recipe(f"{name}.conv.weight", conv, squeezed),
        *(plain(f"{name}.{part}", f"{name}.{part}", heads) for part in ("A_log", "D", "dt_bias")),
        plain(f"{name}.norm.weight", f"{name}.norm.weight", inner),
        *_linear(f"{name}.out_proj", config.hidden_size, inner, config.mixer_bias),
    ]
    return [*out, plain(f"{name}.conv.bias", f"{name}.conv1d.bias", channels)] if config.conv_bias else out


def _attention(config: HybridConfig, name: str) -> list[Recipe]:
    q_rows, kv_rows = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}

    def fused(part: str, columns: int) -> Recipe:
        return stacked(f"{name}.qkv_proj.{part}", {f"{name}.{p}.{part}": n for p, n in rows.items()}, columns)

    out = [fused("weight", config.hidden_size), *([fused("bias", 0)] if config.attention_bias else [])]
    return [*out, *_linear(f"{name}.o_proj", config.hidden_size, q_rows, config.attention_bias)]


def _mlp(config: HybridConfig, name: str) -> list[Recipe]:
    size, hidden = config.intermediate_size, config.hidden_size
    up = _linear(f"{name}.up_proj", size, hidden, config.mlp_bias)
    return [*up, *_linear(f"{name}.down_proj", hidden, size, config.mlp_bias)]
