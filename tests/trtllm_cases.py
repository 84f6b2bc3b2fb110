"""Tiny models for the TensorRT-LLM tests, with head sizes that its attention has, and checkpoints of them.

Used by tests/cpu/test_trtllm_*.py (recorded stand-in) and by tests/trtllm (the real packages). Needs torch; no
transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, stored_dtypes, trtllm_config
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import weight_shapes
from trtllm_replayssm.models.weight_files import write_tensors
from trtllm_replayssm.pool import torch_dtype

VOCAB_SIZE = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "max_positions": 512,
    "eos_token_ids": (2,),
    "pad_token_id": 0,
}
_MAMBA2: dict[str, Any] = {
    "family": "nemotron_h",
    "mlp_kind": "relu2",
    "ssm_heads": 4,
    "ssm_groups": 2,
    "ssm_head_dim": 16,
    "ssm_state_size": 16,
    "conv_bias": True,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
#: Families by name: two hybrids and one without attention.
CASES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        **_MAMBA2,
        **_ATTENTION,
        "layers": ("mamba2", "mlp", "mamba2", "mamba2", "attention", "mlp", "mamba2"),
    },
    "mamba2": {**_MAMBA2, "layers": ("mamba2", "mlp", "mamba2")},
    "qwen3_5": {
        **_ATTENTION,
        "family": "qwen3_5",
        "mlp_kind": "swiglu",
        "layers": ("gated_delta", "mlp", "gated_delta", "mlp", "gated_delta", "mlp", "attention", "mlp"),
        "attention_gate": True,
        "qk_norm": True,
        "rotary_dim": 8,
        "rope_theta": 1e7,
        "ssm_heads": 4,
        "ssm_groups": 2,
        "ssm_head_dim": 16,
        "ssm_state_size": 16,
        "tie_embeddings": True,
        "norm_eps": 1e-6,
    },
}


def make_config(case: str, dtype: str = "float32", **changes: Any) -> HybridConfig:
    """The tiny HybridConfig of a case."""
    return HybridConfig(**{**_COMMON, **CASES[case], "dtype": dtype, **changes})


def make_weights(config: HybridConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights in the dtypes that a checkpoint stores, drawn so that every one of them matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, dtype in stored_dtypes(config).items():
        shape = weight_shapes(config)[name]
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1.0 + 0.2 * noise
        elif name.endswith("A_log"):
            noise = 0.7 * noise
        elif name.endswith("dt_bias"):
            noise = noise - 0.5
        elif name.endswith("conv.weight"):
            noise = 0.4 * noise
        elif name != "embedding.weight" and len(shape) == 2:
            noise = noise / math.sqrt(shape[1])
        weights[name] = noise.to(torch_dtype(dtype))
    return weights


def write_checkpoint(
    directory: Path, config: HybridConfig, weights: dict[str, torch.Tensor] | None = None, *, window: int = 16
) -> Path:
    """A checkpoint directory as ``trtllm-replayssm convert`` writes it."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = make_weights(config) if weights is None else weights
    dtypes = stored_dtypes(config)
    shapes = {name: weight_shapes(config)[name] for name in dtypes}
    write_tensors(directory / WEIGHTS_FILE, shapes, dtypes, iter([(name, weights[name]) for name in dtypes]))
    (directory / CONFIG_FILE).write_text(json.dumps(trtllm_config(config, window), indent=1) + "\n")
    return directory
