"""Training forward of the Qwen3.5 kind (text): three Gated DeltaNet layers, then one gated attention layer, repeated.

Parameters carry the names of checkpoints of the text-only class (``model.layers.0.linear_attn.in_proj_qkv.weight``
...), so the state dict is the checkpoint. No cache: whole sequences from a zero state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import (
    NormThenGate,
    RMSNorm,
    SwiGLU,
    causal_attention,
    draw_a_log,
    draw_dt_bias,
    draw_weights,
    l2_normalise,
    rotary_tables,
    rotate,
    wide,
)
from .scans import causal_conv_silu, gated_delta_chunked

#: config.json of the shipped model, field names as published.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class GatedDeltaNet(nn.Module):
    """u [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.key_heads, self.key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        self.value_heads, self.value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        self.keys, self.values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        channels = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config["linear_conv_kernel_dim"], groups=channels, bias=False)
        self.A_log = nn.Parameter(draw_a_log(self.value_heads))
        self.dt_bias = nn.Parameter(draw_dt_bias(self.value_heads))
        self.norm = NormThenGate(self.value_dim, config["rms_norm_eps"])
        self.out_proj = nn.Linear(self.values, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        qkv, z, b, a = self.in_proj_qkv(u), self.in_proj_z(u), self.in_proj_b(u), self.in_proj_a(u)
        with torch.autocast(u.device.type, enabled=False):
            o = self._recurrence(qkv, b, a)
            o = self.norm(o, z.unflatten(-1, (self.value_heads, self.value_dim))).flatten(-2)
        return self.out_proj(o)

    def _recurrence(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        qkv = causal_conv_silu(wide(qkv), self.conv1d.weight, None)
        q, k, v = qkv.split([self.keys, self.keys, self.values], dim=-1)
        repeat = self.value_heads // self.key_heads
        q, k = (l2_normalise(part.unflatten(-1, (self.key_heads, self.key_dim))) for part in (q, k))
        q, k = q.repeat_interleave(repeat, dim=2), k.repeat_interleave(repeat, dim=2)
        g = -self.A_log.exp() * F.softplus(wide(a) + self.dt_bias)
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        return gated_delta_chunked(q * self.key_dim**-0.5, k, v, g, wide(b).sigmoid())


class GatedAttention(nn.Module):
    """Grouped-query attention with q and k norms, partial rotary embedding and a sigmoid output gate."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, 2 * heads * self.head_dim, bias=False)  # per head: query, then gate
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config["rms_norm_eps"], offset=True)
        self.k_norm = RMSNorm(self.head_dim, config["rms_norm_eps"], offset=True)
        rope = config["rope_parameters"]
        self.rotary_dim = int(self.head_dim * rope["partial_rotary_factor"])
        self.theta = float(rope["rope_theta"])

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        q, gate = self.q_proj(u).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(u).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(u).unflatten(-1, (-1, self.head_dim))
        cos, sin = rotary_tables(u.shape[1], self.rotary_dim, self.theta, u.device)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        out = causal_attention(q, k, v) * gate.sigmoid()
        return self.o_proj(out.flatten(-2))


class Layer(nn.Module):
    """Token mixer, then MLP, each behind a norm; the residual stream x stays fp32."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], offset=True)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], offset=True)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixer = self.self_attn if self.kind == "full_attention" else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """tokens [b, t] int64 -> [b, t, hidden]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["layer_types"])
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], offset=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Qwen35(nn.Module):
    """tokens [b, t] int64 -> logits [b, t, vocab]; the output matrix is the embedding. ``config`` as CONFIG."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        draw_weights(self, config, ("out_proj", "o_proj", "down_proj"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)
