"""Training forward of the Nemotron-H kind: Mamba-2, attention without positions and squared-ReLU MLP, one per layer.

Parameters carry the names of published checkpoints (``backbone.layers.0.mixer.in_proj.weight`` ...), so the state
dict is the checkpoint. No cache: whole sequences from a zero state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import GatedGroupNorm, RMSNorm, causal_attention, draw_a_log, draw_dt_bias, draw_weights, wide
from .scans import causal_conv_silu, mamba2_chunked

#: config.json of the shipped model, field names as published.
CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 14,
    "hybrid_override_pattern": "M-M-M*-M-M-M*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    # transformers clamps dt from below by this in prefill but not in decode; at this value neither clamps.
    "time_step_min": 1e-9,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "intermediate_size": 768,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class Mamba2Mixer(nn.Module):
    """u [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.headdim = config["mamba_num_heads"], config["mamba_head_dim"]
        self.groups, self.dstate = config["n_groups"], config["ssm_state_size"]
        self.inner = self.heads * self.headdim
        channels = self.inner + 2 * self.groups * self.dstate
        self.in_proj = nn.Linear(config["hidden_size"], self.inner + channels + self.heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config["conv_kernel"], groups=channels)
        self.A_log = nn.Parameter(draw_a_log(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.dt_bias = nn.Parameter(draw_dt_bias(self.heads))
        self.norm = GatedGroupNorm(self.inner, self.groups, config["layer_norm_epsilon"])
        self.out_proj = nn.Linear(self.inner, config["hidden_size"], bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        packed = self.in_proj(u)
        with torch.autocast(u.device.type, enabled=False):
            y = self._recurrence(packed)
        return self.out_proj(y)

    def _recurrence(self, packed: torch.Tensor) -> torch.Tensor:
        grouped = self.groups * self.dstate
        z, xBC, dt = packed.split([self.inner, self.inner + 2 * grouped, self.heads], dim=-1)
        xBC = causal_conv_silu(wide(xBC), self.conv1d.weight, self.conv1d.bias)
        x, B, C = xBC.split([self.inner, grouped, grouped], dim=-1)
        y = mamba2_chunked(
            x.unflatten(-1, (self.heads, self.headdim)),
            F.softplus(wide(dt) + self.dt_bias),
            -self.A_log.exp(),
            B.unflatten(-1, (self.groups, self.dstate)),
            C.unflatten(-1, (self.groups, self.dstate)),
            self.D,
        )
        return self.norm(y.flatten(-2), z)


class AttentionMixer(nn.Module):
    """Grouped-query attention without position information. u [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(u).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(causal_attention(q, k, v).flatten(-2))


class SquaredReluMLP(nn.Module):
    """down(relu(up u)^2)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(u)).square())


MIXERS: dict[str, type[nn.Module]] = {"M": Mamba2Mixer, "*": AttentionMixer, "-": SquaredReluMLP}


class Layer(nn.Module):
    """x + mixer(norm(x)); the residual stream x stays fp32."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])
        self.mixer = MIXERS[kind](config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    """tokens [b, t] int64 -> [b, t, hidden]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["hybrid_override_pattern"])
        self.norm_f = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class NemotronH(nn.Module):
    """tokens [b, t] int64 -> logits [b, t, vocab]. ``config`` has the fields of CONFIG."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        draw_weights(self, config, ("out_proj", "o_proj", "down_proj"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.backbone(tokens))
