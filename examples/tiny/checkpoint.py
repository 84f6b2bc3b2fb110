"""Checkpoint directories in Hugging Face form: config.json, generation_config.json, model.safetensors, README.md."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from trtllm_replayssm.errors import ReplayError, require

from . import kimi_linear, nemotron_h, qwen3_5

CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_linear": kimi_linear.CONFIG,
    "nemotron_h": nemotron_h.CONFIG,
    "qwen3_5": qwen3_5.CONFIG,
}
MODELS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "nemotron_h": nemotron_h.NemotronH,
    "qwen3_5_text": qwen3_5.Qwen35,
    "kimi_linear": kimi_linear.KimiLinear,
}
FILES = ("README.md", "config.json", "generation_config.json", "model.safetensors")
GENERATION_CONFIG = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}


def build(config: dict[str, Any]) -> nn.Module:
    """Model with fresh weights for a config.json's content. Raises ReplayError for an unknown model_type."""
    kind = config.get("model_type")
    require(kind in MODELS, f"model_type is {kind!r}; it must be one of {', '.join(MODELS)}")
    return MODELS[str(kind)](config)


def load(directory: Path) -> nn.Module:
    """Model in fp32, in evaluation mode, from a directory that :func:`save_directory` wrote.

    Raises:
        ReplayError: a file is missing or damaged, or tensors do not match config.json.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(directory / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ReplayError(f"checkpoint {directory.name!r} cannot be read: {error}") from error
    model = build(config)
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ReplayError(f"checkpoint {directory.name!r} does not match its config.json: {error}") from error
    return model.eval()


def round_weights(model: nn.Module) -> None:
    """Round every parameter to the nearest bf16 value, in place, so that the model equals its checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def check_target(directory: Path) -> None:
    """Raise ReplayError unless ``directory`` can be made, or holds nothing but an earlier checkpoint."""
    if directory.exists():
        require(directory.is_dir(), f"--out is {str(directory)!r}, a file; it must be a folder to write")
        strange = sorted(set(os.listdir(directory)) - set(FILES))
        if strange:
            raise ReplayError(f"--out is {str(directory)!r}, which holds {strange[0]!r}; use a new or an empty folder")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplayError(f"--out is {str(directory)!r}; its parent cannot be made: {error.strerror}") from error
    require(os.access(directory.parent, os.W_OK), f"--out is {str(directory)!r}; its parent cannot be written to")


def save_directory(model: nn.Module, directory: Path, card: str) -> None:
    """Write the four files beside ``directory``, then put them in its place in one move; weights are saved as bf16.

    Raises:
        ReplayError: the files cannot be written. An earlier checkpoint at ``directory`` then stays as it was.
    """
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    old = directory.with_name(f".{directory.name}.old-{os.getpid()}")
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    try:
        partial.mkdir()
        (partial / "config.json").write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
        (partial / "generation_config.json").write_text(
            json.dumps(GENERATION_CONFIG, indent=2) + "\n", encoding="utf-8"
        )
        (partial / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        (partial / "README.md").write_text(card, encoding="utf-8")
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
    except OSError as error:
        raise ReplayError(f"--out is {str(directory)!r}; it cannot be written: {error.strerror}") from error
    finally:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
