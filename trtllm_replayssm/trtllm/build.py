"""Checkpoint directory -> TensorRT-LLM engine directory, by tensorrt_llm's own builder with our model class.

One process, one GPU. The result is what ``trtllm-build`` writes (config.json, rank0.engine), the checkpoint's tokenizer
files, and in config.json an object ``replayssm_engine`` that says what the engine was built with. TensorRT-LLM reads
config.json by key, so it does not see that object.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from .. import __version__, plugins
from ..build.directory import CONFIG_FILE, ENGINE_FILE, ENGINE_KEY, WHAT, is_engine_directory
from ..directories import check_target, sha256_of, written_directory
from ..errors import require
from ..models.checkpoint import TEXT_FILES, WEIGHTS_FILE, read_checkpoint
from ..models.config import HybridConfig
from ..spec import MAX_WINDOW, require_bool, require_choice, require_int
from . import budget, requirement
from .network_ops import require_call_sizes, require_supported

_LIMIT = 1 << 24


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """What :func:`build` takes beside the directories.

    Attributes:
        window: of every recurrent layer (default: the checkpoint's).
        max_batch_size: sequences at once. max_input_len, max_seq_len: longest prompt; longest prompt plus output
            (default: the model's own limit). max_num_tokens: packed tokens in one call.
        gemm_plugin: ``auto`` or ``none``: TensorRT-LLM's GEMM plugin, or TensorRT's own products.
        logits_dtype: float32 or float16. gather_context_logits: logits of every prompt token.

    Raises:
        ReplayError: an option out of range.
    """

    window: int | None = None
    max_batch_size: int = 8
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_num_tokens: int = 8192
    gemm_plugin: str = "auto"
    logits_dtype: str = "float32"
    gather_context_logits: bool = False

    def __post_init__(self) -> None:
        if self.window is not None:
            require_int("window", self.window, 1, MAX_WINDOW)
        require_int("max_input_len", self.max_input_len, 1, _LIMIT)
        require_call_sizes(self.max_batch_size, self.max_num_tokens)
        if self.max_seq_len is not None:
            require_int("max_seq_len", self.max_seq_len, self.max_input_len, _LIMIT, " (max_input_len or more)")
        require_choice("gemm_plugin", self.gemm_plugin, ("auto", "none"))
        require_choice("logits_dtype", self.logits_dtype, ("float32", "float16"))
        require_bool("gather_context_logits", self.gather_context_logits)


def build(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Build an engine directory.

    The directory is written under another name beside ``output_dir`` and renamed when it is whole; parents are made.

    Args:
        checkpoint_dir: what ``trtllm-replayssm convert`` wrote. output_dir: the new directory.
        overwrite: replace ``output_dir`` if it is an engine directory of this package.
        options: fields of BuildOptions.

    Returns:
        the ``replayssm_engine`` object, with output, bytes (of the engine) and seconds.

    Raises:
        ReplayError: a bad option; tensorrt_llm missing (says what to install); no checkpoint directory; an
            ``output_dir`` that is there, holds the checkpoint or cannot be written; a slot that does not fit the state
            pools; the plugin library missing; TensorRT built no engine.
    """
    known = {field.name for field in dataclasses.fields(BuildOptions)}
    unknown = sorted(set(options) - known)
    require(not unknown, f"build has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    chosen = BuildOptions(**options)
    requirement.tensorrt_llm()
    checkpoint, output = Path(checkpoint_dir), Path(output_dir).absolute()
    config, stored_window = read_checkpoint(checkpoint)
    require_supported(config)
    require((checkpoint / WEIGHTS_FILE).is_file(), f"{checkpoint} has no {WEIGHTS_FILE}")
    check_target(output, overwrite=overwrite, is_ours=is_engine_directory, what=WHAT, inputs=[checkpoint])
    pretrained = _pretrained_config(checkpoint, config, stored_window, chosen)
    requirement.tensorrt()
    plugins.register()
    started = time.monotonic()
    engine = _build_engine(checkpoint, config, pretrained, chosen)
    with written_directory(output, inputs=[checkpoint]) as part:
        engine.save(str(part))
        recorded = _record(part, checkpoint, config, pretrained)
        for name in TEXT_FILES:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, part / name)
    size = (output / ENGINE_FILE).stat().st_size
    return {**recorded, "output": str(output_dir), "bytes": size, "seconds": round(time.monotonic() - started, 3)}


def library_facts() -> dict[str, str]:
    """Version and SHA-256 of the plugin library. Raises ReplayError where it cannot be loaded."""
    library = plugins.load_library()
    library.replayssm_version.restype = ctypes.c_char_p
    return {
        "version": library.replayssm_version().decode(),
        "sha256": sha256_of(plugins.library_path()),
    }


def _pretrained_config(checkpoint: Path, config: HybridConfig, stored_window: int, chosen: BuildOptions) -> Any:
    """tensorrt_llm's config of the checkpoint. Another window than the stored one gets pools of its own size."""
    pretrained = requirement.module("models.modeling_utils").PretrainedConfig.from_json_file(
        str(checkpoint / CONFIG_FILE)
    )
    pretrained.logits_dtype = chosen.logits_dtype
    if chosen.window is not None and chosen.window != stored_window:
        pools = budget.needed(config, chosen.window)
        pretrained.state_size, pretrained.conv_kernel = pools.state_size, pools.conv_kernel
        pretrained.replayssm = {**pretrained.replayssm, "window": chosen.window}
    window = pretrained.replayssm.get("window", stored_window)
    budget.checked(config, window, pretrained.state_size, pretrained.conv_kernel)
    return pretrained


def _build_engine(checkpoint: Path, config: HybridConfig, pretrained: Any, chosen: BuildOptions) -> Any:
    """tensorrt_llm's Engine of the checkpoint. Its timing cache is written aside and dropped."""
    from .hybrid import ReplayHybridForCausalLM

    builder = requirement.module("builder")
    model = ReplayHybridForCausalLM.from_checkpoint(str(checkpoint), config=pretrained)
    with tempfile.TemporaryDirectory() as scratch:
        options = _build_config(builder, config, chosen, f"{scratch}/timing.cache")
        engine = builder.build(model, options)
    require(engine is not None and engine.engine is not None, "TensorRT built no engine; its log above says why")
    return engine


def _build_config(builder: Any, config: HybridConfig, chosen: BuildOptions, timing_cache: str) -> Any:
    """tensorrt_llm's BuildConfig: packed input, paged state and KV cache, one beam."""
    flags = requirement.module("plugin").PluginConfig()
    flags.gemm_plugin = "auto" if chosen.gemm_plugin == "auto" else None
    flags.mamba_conv1d_plugin = "auto"
    flags.gpt_attention_plugin = "auto"
    flags.remove_input_padding = True
    flags.paged_state = True
    if config.dtype == "float32":
        # The fused attention of prompts exists in 16-bit types alone.
        flags.context_fmha = False
    return builder.BuildConfig(
        max_input_len=chosen.max_input_len,
        max_seq_len=chosen.max_seq_len,
        max_batch_size=chosen.max_batch_size,
        max_beam_width=1,
        max_num_tokens=chosen.max_num_tokens,
        gather_context_logits=chosen.gather_context_logits,
        output_timing_cache=timing_cache,
        plugin_config=flags,
    )


def _record(part: Path, checkpoint: Path, config: HybridConfig, pretrained: Any) -> dict[str, Any]:
    """Write the ``replayssm_engine`` object into the engine's config.json; the object."""
    window = pretrained.replayssm["window"]
    pools = budget.checked(config, window, pretrained.state_size, pretrained.conv_kernel)
    recorded = {
        "package": __version__,
        "tensorrt_llm": str(requirement.tensorrt_llm().__version__),
        "tensorrt": str(requirement.tensorrt().__version__),
        "library": library_facts(),
        "checkpoint_config_sha256": sha256_of(checkpoint / CONFIG_FILE),
        "family": config.family,
        "dtype": config.dtype,
        "window": window,
        "pools": dataclasses.asdict(pools),
    }
    file = part / CONFIG_FILE
    data = json.loads(file.read_text(encoding="utf-8"))
    data[ENGINE_KEY] = recorded
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return recorded
