"""The mixers of hybrid decoders, written against Ops alone. Each maps normed activations [n, hidden] to [n, hidden].

``name`` is the prefix of the layer's weights (``layers.3.mixer``), ``layer`` its index among the stateful layers. Fused
projections hold their rows in the order of the ``split`` below them; checkpoint conversion puts them there.
"""

from __future__ import annotations

from ..ops.base import Ops, TensorT
from .config import HybridConfig


def _bias(present: bool, name: str) -> str | None:
    return f"{name}.bias" if present else None


def mamba2(ops: Ops[TensorT], config: HybridConfig, name: str, layer: int, u: TensorT) -> TensorT:
    """Mamba-2: gate first, then a norm over each group's heads."""
    inner, group = config.ssm_inner_size, config.ssm_group_size
    projected = ops.linear(u, f"{name}.in_proj.weight", _bias(config.mixer_bias, f"{name}.in_proj"))
    z, xbc, dt = ops.split(projected, [inner, config.conv_channels, config.ssm_heads])
    xbc = ops.causal_conv(layer, xbc, f"{name}.conv.weight", _bias(config.conv_bias, f"{name}.conv"))
    x, b, c = ops.split(xbc, [inner, group, group])
    y = ops.replay_mamba2(layer, x, dt, b, c, z, a_log=f"{name}.A_log", d=f"{name}.D", dt_bias=f"{name}.dt_bias")
    y = ops.rms_norm(y, f"{name}.norm.weight", config.norm_eps, group_size=inner // config.ssm_groups)
    return ops.linear(y, f"{name}.out_proj.weight", _bias(config.mixer_bias, f"{name}.out_proj"))


def gated_delta(ops: Ops[TensorT], config: HybridConfig, name: str, layer: int, u: TensorT) -> TensorT:
    """Gated DeltaNet: a norm per value head first, then the gate."""
    inner, group, heads = config.ssm_inner_size, config.ssm_group_size, config.ssm_heads
    projected = ops.linear(u, f"{name}.in_proj.weight")
    qkv, z, b, a = ops.split(projected, [config.conv_channels, inner, heads, heads])
    qkv = ops.causal_conv(layer, qkv, f"{name}.conv.weight")
    q, k, v = ops.split(qkv, [group, group, inner])
    o = ops.replay_gated_delta(layer, q, k, v, a, b, a_log=f"{name}.A_log", dt_bias=f"{name}.dt_bias")
    o = ops.rms_norm_gated(o, z, f"{name}.norm.weight", config.norm_eps, group_size=config.ssm_head_dim)
    return ops.linear(o, f"{name}.out_proj.weight")


def kimi_delta(ops: Ops[TensorT], config: HybridConfig, name: str, layer: int, u: TensorT) -> TensorT:
    """Kimi Delta Attention: decay gates and output gate come through projections of head size; norm, then gate."""
    inner, group, heads, rank = config.ssm_inner_size, config.ssm_group_size, config.ssm_heads, config.ssm_head_dim
    projected = ops.linear(u, f"{name}.in_proj.weight")
    qkv, f, z, b = ops.split(projected, [config.conv_channels, rank, rank, heads])
    qkv = ops.causal_conv(layer, qkv, f"{name}.conv.weight")
    q, k, v = ops.split(qkv, [group, group, inner])
    a = ops.linear(f, f"{name}.f_proj.weight")
    o = ops.replay_gated_delta(layer, q, k, v, a, b, a_log=f"{name}.A_log", dt_bias=f"{name}.dt_bias")
    z = ops.linear(z, f"{name}.g_proj.weight")
    o = ops.rms_norm_gated(
        o, z, f"{name}.norm.weight", config.norm_eps, group_size=config.ssm_head_dim, activation="sigmoid"
    )
    return ops.linear(o, f"{name}.out_proj.weight")


def latent_attention(ops: Ops[TensorT], config: HybridConfig, name: str, layer: int, u: TensorT) -> TensorT:
    """Multi-head latent attention (MLA) without positions."""
    q = u
    if config.latent_q_rank:
        q = ops.linear(u, f"{name}.q_down_proj.weight")
        q = ops.rms_norm(q, f"{name}.q_norm.weight", config.latent_norm_eps)
    q = ops.linear(q, f"{name}.q_proj.weight")
    projected = ops.linear(u, f"{name}.kv_down_proj.weight")
    latent, shared = ops.split(projected, [config.latent_rank, config.latent_shared_dim])
    latent = ops.rms_norm(latent, f"{name}.kv_norm.weight", config.latent_norm_eps)
    scale = config.head_dim**-0.5
    y = ops.latent_attention(layer, q, latent, shared, kv_up=f"{name}.kv_up_proj.weight", scale=scale)
    return ops.linear(y, f"{name}.o_proj.weight")


def attention(ops: Ops[TensorT], config: HybridConfig, name: str, layer: int, u: TensorT) -> TensorT:
    """Grouped-query attention; optional norm of q and k, partial rotation and output gate, as the config says."""
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    gate_size = q_size if config.attention_gate else 0
    projected = ops.linear(u, f"{name}.qkv_proj.weight", _bias(config.attention_bias, f"{name}.qkv_proj"))
    sizes = [size for size in (q_size, gate_size, kv_size, kv_size) if size]
    q, *gate, k, v = ops.split(projected, sizes)
    if config.qk_norm:
        q = ops.rms_norm(q, f"{name}.q_norm.weight", config.norm_eps, group_size=config.head_dim)
        k = ops.rms_norm(k, f"{name}.k_norm.weight", config.norm_eps, group_size=config.head_dim)
    if config.rotary_dim:
        q, k = (
            ops.rope(x, head_dim=config.head_dim, rotary_dim=config.rotary_dim, theta=config.rope_theta) for x in (q, k)
        )
    y = ops.attention(layer, q, k, v, scale=config.head_dim**-0.5)
    if gate:
        y = ops.sigmoid_mul(gate[0], y)
    return ops.linear(y, f"{name}.o_proj.weight", _bias(config.attention_bias, f"{name}.o_proj"))


def mlp(ops: Ops[TensorT], config: HybridConfig, name: str, u: TensorT) -> TensorT:
    """down(relu(up u)^2) or down(silu(gate u) * up u)."""
    if config.mlp_kind == "relu2":
        hidden = ops.relu2(ops.linear(u, f"{name}.up_proj.weight", _bias(config.mlp_bias, f"{name}.up_proj")))
    else:
        gate_up = ops.linear(u, f"{name}.gate_up_proj.weight", _bias(config.mlp_bias, f"{name}.gate_up_proj"))
        gate, up = ops.split(gate_up, [config.intermediate_size, config.intermediate_size])
        hidden = ops.silu_mul(gate, up)
    return ops.linear(hidden, f"{name}.down_proj.weight", _bias(config.mlp_bias, f"{name}.down_proj"))
