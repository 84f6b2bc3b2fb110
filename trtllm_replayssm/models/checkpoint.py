"""Checkpoint directories: config.json in TensorRT-LLM's checkpoint form plus rank0.safetensors, and what text needs.

config.json carries two descriptions. The top level is what TensorRT-LLM's builder and C++ runtime read: one of the two
``architecture`` strings that switch its state pools on, ``layer_types`` with one entry per stateful layer (an MLP
belongs to the mixer before it), and a ``state_size`` and ``conv_kernel`` enlarged so that its pools hold our slots
(trtllm/budget.py). The object ``replayssm`` is ours: format_version, the default window, and the HybridConfig with the
true dimensions.

Dtypes: matrices, convolutions and their biases have the checkpoint's dtype; norm weights (with Qwen's 1 + w folded in),
A_log, D and dt_bias stay fp32 whatever that is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..directories import check_target, refuse_engine, refuse_published, written_directory
from ..errors import ReplayError, require
from ..pool import torch_dtype
from ..spec import ACT_DTYPES, require_choice
from ..trtllm import budget
from .config import ATTENTION, MODEL_DTYPES, HybridConfig
from .decoder import keeps_float32, weight_shapes
from .fields import read_json
from .hf import CONFIG_FILE, GENERATION_FILE, HF_DIRECTORY, HFWeights, read_hf_config
from .weight_files import WeightFiles, write_tensors

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "rank0.safetensors"
FORMAT_VERSION = 1
DEFAULT_WINDOW = 16
#: Files beside the weights that a checkpoint takes along where they are there.
TEXT_FILES = (
    GENERATION_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)

Progress = Callable[[int, int, str], None]


def trtllm_config(config: HybridConfig, window: int = DEFAULT_WINDOW) -> dict[str, Any]:
    """The config.json of a checkpoint of ``config``, whose ``dtype`` is that of the stored matrices."""
    pools = budget.needed(config, window)
    attention = bool(config.attention_layers)
    heads = config.num_attention_heads if attention else 1
    return {
        "architecture": "RecurrentGemmaForCausalLM" if attention else "MambaForCausalLM",
        "dtype": config.dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.stateful_layers),
        "layer_types": ["attention" if kind == ATTENTION else "recurrent" for kind in config.stateful_layers],
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads if attention else heads,
        "head_size": config.head_dim if attention else config.hidden_size,
        "hidden_act": "silu",
        "norm_epsilon": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "rope_gpt_neox" if config.rotary_dim else "learned_absolute",
        "rotary_base": config.rope_theta,
        "rotary_pct": config.rotary_dim / config.head_dim if config.rotary_dim else 0.0,
        "state_size": pools.state_size,
        "conv_kernel": pools.conv_kernel,
        "rnn_hidden_size": config.ssm_inner_size,
        "rnn_head_size": config.ssm_head_dim,
        "rnn_conv_dim_size": config.conv_channels,
        "state_dtype": "float32",
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "replayssm": {"format_version": FORMAT_VERSION, "window": window, **config.to_dict()},
    }


def convert(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a checkpoint directory from a published one. Holds one weight in memory at a time.

    The directory is written under another name beside ``out_dir`` and renamed when it is whole.

    Args:
        hf_dir: directory with config.json and safetensors files. out_dir: the new directory.
        dtype: of the matrices: bfloat16, float16 or float32.
        overwrite: replace ``out_dir`` if it is a checkpoint directory already.
        progress: called as (weights done, weights in all, name of the next one).

    Returns:
        summary: source, output, family, dtype, layers {kind: count}, parameters, tensors, bytes, skipped (published
        tensors that decoding does not use), copied (text files).

    Raises:
        ReplayError: bad input (hf.py), an ``out_dir`` that is there, that holds ``hf_dir``, or that cannot be written.
    """
    require_choice("dtype", dtype, MODEL_DTYPES)
    source, target = Path(hf_dir), Path(out_dir).absolute()
    require(os.path.isdir(source), f"{source} is not a directory{HF_DIRECTORY}")
    what = "a checkpoint directory of this package"
    check_target(target, overwrite=overwrite, is_ours=is_checkpoint_directory, what=what, inputs=[source])
    config = dataclasses.replace(read_hf_config(source), dtype=dtype)
    weights = HFWeights(source, config)
    copied = [name for name in TEXT_FILES if os.path.isfile(source / name)]
    with written_directory(target, inputs=[source]) as part:
        written = _write_weights(part / WEIGHTS_FILE, config, weights, progress)
        (part / CONFIG_FILE).write_text(json.dumps(trtllm_config(config), indent=1, allow_nan=False) + "\n")
        for name in copied:
            shutil.copyfile(source / name, part / name)
    shapes = weight_shapes(config)
    return {
        "source": str(source),
        "output": str(out_dir),
        "family": config.family,
        "dtype": dtype,
        "layers": {kind: config.layers.count(kind) for kind in dict.fromkeys(config.layers)},
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "tensors": len(shapes),
        "bytes": written,
        "skipped": weights.skipped,
        "copied": copied,
    }


def is_checkpoint_directory(path: Path) -> bool:
    """Whether ``path`` has a config.json with the ``replayssm`` object."""
    file = path / CONFIG_FILE
    return os.path.isfile(file) and "replayssm" in read_json(file)


def stored_dtypes(config: HybridConfig) -> dict[str, str]:
    """dtype of every stored weight, fp32 ones first so that each tensor starts at a multiple of its element size."""
    names = sorted(weight_shapes(config), key=lambda name: not keeps_float32(name))
    return {name: "float32" if keeps_float32(name) else config.dtype for name in names}


def _write_weights(path: Path, config: HybridConfig, weights: HFWeights, progress: Progress | None) -> int:
    shapes, dtypes = weight_shapes(config), stored_dtypes(config)

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for done, (name, dtype) in enumerate(dtypes.items()):
            if progress is not None:
                progress(done, len(dtypes), name)
            yield name, weights.make(name, torch_dtype(dtype))
        if progress is not None:
            progress(len(dtypes), len(dtypes), "")

    return write_tensors(path, {name: shapes[name] for name in dtypes}, dtypes, made())


def read_checkpoint_config(directory: str | Path) -> HybridConfig:
    """The HybridConfig of a checkpoint directory; its ``dtype`` is that of the stored matrices.

    Raises:
        ReplayError: as :func:`read_checkpoint`.
    """
    return read_checkpoint(directory)[0]


def read_checkpoint(directory: str | Path) -> tuple[HybridConfig, int]:
    """HybridConfig and default window of a checkpoint directory.

    Raises:
        ReplayError: no checkpoint directory of this package (what a Hugging Face or an engine directory needs is
            said), another format version, or top-level values that differ
            from what the ``replayssm`` object implies. ``state_size`` and ``conv_kernel`` may be any not below the
            model's own: how much room TensorRT-LLM's pools need is checked when an engine is built.
    """
    path = Path(directory)
    file = path / CONFIG_FILE
    require(os.path.isdir(path), f"{path} is not a directory; give one that `trtllm-replayssm convert` made")
    require(os.path.isfile(file), f"{path} has no {CONFIG_FILE}")
    data = read_json(file)
    refuse_engine(path, data, "the checkpoint that it was built from")
    ours = data.get("replayssm")
    if not isinstance(ours, dict):
        refuse_published(path, data)
        raise ReplayError(
            f"{file} has no replayssm object; make a checkpoint directory with `trtllm-replayssm convert`"
        )
    config, window = read_replayssm(ours, str(file))
    least = {"state_size": config.ssm_state_size, "conv_kernel": config.conv_kernel}
    implied = trtllm_config(config, window)
    del implied["replayssm"]  # what implies the others; a field that it lacks has its default
    for key, value in implied.items():
        have = data.get(key)
        if key in least:
            whole = isinstance(have, int) and not isinstance(have, bool) and have >= least[key]
            require(whole, f"{file}: {key} is {have!r}; it must be a whole number, {least[key]} or more")
        else:
            require(have == value, f"{file}: {key} is {have!r}; the replayssm object implies {value!r}")
    return config, window


def read_replayssm(data: Mapping[str, Any], where: str) -> tuple[HybridConfig, int]:
    """HybridConfig and window of a ``replayssm`` object; ``where`` starts the messages.

    Raises:
        ReplayError: another format version, fields missing, unknown or out of range.
    """
    ours = dict(data)
    version, window = ours.pop("format_version", None), ours.pop("window", DEFAULT_WINDOW)
    require(version == FORMAT_VERSION, f"{where}: format_version is {version!r}; this version reads {FORMAT_VERSION}")
    try:
        config = HybridConfig.from_dict(ours)
        config.recurrence_spec(window=window)
    except ReplayError as error:
        raise ReplayError(f"{where}: replayssm: {error}") from None
    return config, window


def require_same_names(file: Path, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise ReplayError unless ``file`` holds exactly the weights ``expected``."""
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    require(not missing, f"{file}: weight {', '.join(missing[:5])} is missing")
    require(not surplus, f"{file}: weight {', '.join(surplus[:5])} is not one that the config has")


def load_checkpoint(
    directory: str | Path, *, device: torch.device | str = "cpu", dtype: str | None = None
) -> tuple[HybridConfig, dict[str, torch.Tensor]]:
    """Read a checkpoint directory.

    Args:
        directory: what :func:`convert` wrote. device: where the weights go, one at a time.
        dtype: of the matrices, float64 included (default: as stored). Weights that are stored in fp32 whatever the
            dtype stay so.

    Returns:
        the config, as read_checkpoint_config returns it, and the weights by name.

    Raises:
        ReplayError: see read_checkpoint_config; the weight file missing or damaged; a weight missing, unexpected, or of
            another shape or dtype than the config implies.
    """
    path = Path(directory)
    config = read_checkpoint_config(path)
    if dtype is not None:
        require_choice("dtype", dtype, ACT_DTYPES)
    file = path / WEIGHTS_FILE
    require(os.path.isfile(file), f"{path} has no {WEIGHTS_FILE}")
    files = WeightFiles([file])
    shapes, stored = weight_shapes(config), stored_dtypes(config)
    require_same_names(file, shapes, files.names)
    weights = {}
    for name, shape in shapes.items():
        got = files.shape(name)
        require(got == shape, f"{file}: weight {name} has shape {list(got)}; the config implies {list(shape)}")
        tensor = files.tensor(name)
        want = torch_dtype(stored[name])
        require(tensor.dtype == want, f"{file}: weight {name} is {tensor.dtype}; the config implies {want}")
        keep = dtype is None or keeps_float32(name)
        weights[name] = tensor.to(device, want if keep else torch_dtype(str(dtype)))
    return config, weights
