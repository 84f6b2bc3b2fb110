"""Training forward of the Kimi-Linear kind: three Kimi Delta Attention layers, then a latent attention layer, repeated.

Parameters carry the names of published checkpoints (``model.layers.0.self_attn.f_a_proj.weight`` ...), so the state
dict is the checkpoint. No cache: whole sequences from a zero state.
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
    wide,
)
from .scans import causal_conv_silu, kimi_delta_chunked

#: config.json of the shipped model, field names as published; layers are counted from 1.
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "head_dim": 64,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "intermediate_size": 512,
    "first_k_dense_replace": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
#: eps of the norm inside latent attention, whatever rms_norm_eps is.
LATENT_EPS = 1e-6


class KimiDeltaAttention(nn.Module):
    """u [b, t, hidden] -> [b, t, hidden]; a decay per key channel."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, linear = config["hidden_size"], config["linear_attn_config"]
        self.heads, self.dim = linear["num_heads"], linear["head_dim"]
        inner, taps = self.heads * self.dim, linear["short_conv_kernel_size"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(inner, inner, taps, groups=inner, bias=False) for _ in range(3)
        )
        self.f_a_proj, self.g_a_proj = (nn.Linear(hidden, self.dim, bias=False) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (nn.Linear(self.dim, inner, bias=False) for _ in range(2))
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(draw_a_log(self.heads).view(1, 1, self.heads, 1))
        self.dt_bias = nn.Parameter(draw_dt_bias(inner))
        self.o_norm = NormThenGate(self.dim, config["rms_norm_eps"], torch.sigmoid)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        qkv = [self.q_proj(u), self.k_proj(u), self.v_proj(u)]
        forget, gate, beta = self.f_b_proj(self.f_a_proj(u)), self.g_b_proj(self.g_a_proj(u)), self.b_proj(u)
        with torch.autocast(u.device.type, enabled=False):
            o = self._recurrence(qkv, forget, beta)
            o = self.o_norm(o, gate.unflatten(-1, (self.heads, self.dim))).flatten(-2)
        return self.o_proj(o)

    def _recurrence(self, qkv: list[torch.Tensor], forget: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q, k, v = (
            causal_conv_silu(wide(x), conv.weight, None).unflatten(-1, (self.heads, self.dim))
            for x, conv in zip(qkv, convs, strict=True)
        )
        dt = F.softplus(wide(forget) + self.dt_bias).unflatten(-1, (self.heads, self.dim))
        g = -self.A_log.exp() * dt
        q, k = l2_normalise(q) * self.dim**-0.5, l2_normalise(k)
        return kimi_delta_chunked(q, k, v, g, wide(beta).sigmoid())


class LatentAttention(nn.Module):
    """Keys and values of all heads from one latent vector per token, plus one key part that the heads share."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.rank, self.shared = config["kv_lora_rank"], config["qk_rope_head_dim"]
        self.own, self.value = config["qk_nope_head_dim"], config["v_head_dim"]
        self.q_proj = nn.Linear(hidden, self.heads * (self.own + self.shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.shared, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.own + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(u).unflatten(-1, (self.heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(u).split([self.rank, self.shared], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k, v = kv.split([self.own, self.value], dim=-1)
        k = torch.cat([k, shared.unsqueeze(-2).expand(*k.shape[:-1], self.shared)], dim=-1)
        return self.o_proj(causal_attention(q, k, v).flatten(-2))


class Layer(nn.Module):
    """Token mixer, then MLP, each behind a norm; the residual stream x stays fp32."""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        full = index + 1 in config["linear_attn_config"]["full_attn_layers"]
        self.self_attn = LatentAttention(config) if full else KimiDeltaAttention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """tokens [b, t] int64 -> [b, t, hidden]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class KimiLinear(nn.Module):
    """tokens [b, t] int64 -> logits [b, t, vocab]. ``config`` has the fields of CONFIG."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        draw_weights(self, config, ("o_proj", "down_proj"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))
