"""Running an engine directory with TensorRT-LLM 1.2.1: registers the plugins, and asks for what such engines allow.

An engine can be deserialised only where the plugins are registered: in this process these helpers do it, in worker
processes (``trtllm-serve``, the LLM API's default) the library must be preloaded: :func:`preload_environment`.
Block reuse, chunked prefill and beams are refused: a recurrent layer needs every token of its sequence, in order.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import plugins
from ..build.directory import CONFIG_FILE, ENGINE_FILE, ENGINE_KEY
from ..errors import ReplayError, require
from ..models.checkpoint import read_replayssm
from ..models.fields import read_json
from . import budget, requirement
from .build import library_facts

_SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
#: Options of TensorRT-LLM's loaders that recurrent layers rule out, and the only value that is taken.
_RESTRICTED = {
    "kv_cache_enable_block_reuse": False,
    "enable_chunked_context": False,
    "enable_chunked_prefill": False,
    "max_beam_width": 1,
    "num_beams": 1,
    "speculative_config": None,
}


def check_engine(engine_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Check an engine directory against this package and its library; needs neither tensorrt_llm nor a GPU.

    Returns:
        what :func:`trtllm_replayssm.trtllm.build.build` recorded in config.json.

    Raises:
        ReplayError: no engine directory of this package; a config.json whose pools do not hold the slots; an engine
            built with another version of the plugin library.

    Warns:
        UserWarning: the library has the version that the engine was built with but other bytes.
    """
    path = Path(engine_dir)
    file = path / CONFIG_FILE
    require(file.is_file(), f"{path} is no engine directory: it has no {CONFIG_FILE}")
    require((path / ENGINE_FILE).is_file(), f"{path} is no engine directory: it has no {ENGINE_FILE}")
    data = read_json(file)
    pretrained, recorded = data.get("pretrained_config"), data.get(ENGINE_KEY)
    ours = pretrained.get("replayssm") if isinstance(pretrained, dict) else None
    if not isinstance(ours, dict) or not isinstance(recorded, dict) or not isinstance(recorded.get("library"), dict):
        raise ReplayError(f"{file} was not written by `trtllm-replayssm build --runtime trtllm`")
    assert isinstance(pretrained, dict)
    config, window = read_replayssm(ours, str(file))
    try:
        budget.checked(config, window, pretrained.get("state_size", 0), pretrained.get("conv_kernel", 0))
    except ReplayError as error:
        raise ReplayError(f"{file}: {error}") from None
    built, have = recorded["library"], library_facts()
    require(
        built.get("version") == have["version"],
        f"{path} was built with plugin library version {built.get('version')}; this one is {have['version']}: build "
        "the engine again",
    )
    if built.get("sha256") != have["sha256"]:
        warnings.warn(f"{path} was built with another build of the plugin library {have['version']}", stacklevel=2)
    return recorded


def preload_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of ``environ`` (default: the process's) in which LD_PRELOAD starts with the plugin library.

    For the processes that TensorRT-LLM starts: ``subprocess.run(["trtllm-serve", ...], env=preload_environment())``.

    Raises:
        ReplayError: the library is not there.
    """
    library = plugins.library_path()
    require(library.is_file(), f"plugin library {library} does not exist; build it with `make lib` (needs nvcc)")
    out = dict(os.environ if environ is None else environ)
    others = [name for name in out.get("LD_PRELOAD", "").replace(":", " ").split() if name != str(library)]
    out["LD_PRELOAD"] = ":".join([str(library), *others])
    return out


def prepare(engine_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """:func:`check_engine`, then register the plugins with this process's TensorRT. Raises ReplayError."""
    recorded = check_engine(engine_dir)
    requirement.tensorrt_llm()
    requirement.tensorrt()
    plugins.register()
    return recorded


def generation_session(engine_dir: str | os.PathLike[str], **options: Any) -> Any:
    """tensorrt_llm's ModelRunner (its Python GenerationSession). Raises ReplayError as :func:`prepare`."""
    _refuse(options)
    prepare(engine_dir)
    return requirement.module("runtime").ModelRunner.from_dir(engine_dir=str(engine_dir), **options)


def model_runner_cpp(engine_dir: str | os.PathLike[str], **options: Any) -> Any:
    """tensorrt_llm's ModelRunnerCpp (the C++ executor in this process). Raises ReplayError as :func:`prepare`."""
    _refuse(options)
    prepare(engine_dir)
    fixed = {"kv_cache_enable_block_reuse": False, "enable_chunked_context": False}
    runner = requirement.module("runtime").ModelRunnerCpp
    return runner.from_dir(engine_dir=str(engine_dir), **{**options, **fixed})


def llm(engine_dir: str | os.PathLike[str], *, tokenizer: Any, **options: Any) -> Any:
    """tensorrt_llm's LLM over its TensorRT backend.

    Its executor lives in a worker process unless TLLM_WORKER_USE_SINGLE_PROCESS is 1; that is set here where the
    plugin library is not preloaded.

    Args:
        tokenizer: directory, name or object, as the LLM class takes it. options: further ones of that class.

    Raises:
        ReplayError: as :func:`prepare`; an option that recurrent layers rule out.
    """
    _refuse(options)
    prepare(engine_dir)
    cache = options.pop("kv_cache_config", None)
    if cache is None:
        cache = requirement.module("llmapi").KvCacheConfig(enable_block_reuse=False)
    require(
        not getattr(cache, "enable_block_reuse", True),
        "kv_cache_config.enable_block_reuse is on; recurrent layers would miss the tokens that a reused block skips",
    )
    if plugins.library_path().name not in os.environ.get("LD_PRELOAD", ""):
        os.environ[_SINGLE_PROCESS] = "1"
    cls = requirement.module("_tensorrt_engine").LLM
    return cls(model=str(engine_dir), tokenizer=tokenizer, kv_cache_config=cache, **options)


def extra_llm_options() -> str:
    """YAML for ``trtllm-serve --extra_llm_api_options FILE``: no block reuse, no chunked prefill."""
    return "kv_cache_config:\n  enable_block_reuse: false\nenable_chunked_prefill: false\n"


def _refuse(options: Mapping[str, Any]) -> None:
    for name, allowed in _RESTRICTED.items():
        value = options.get(name, allowed)
        require(
            value == allowed,
            f"{name} is {json.dumps(value, default=str)}; engines with recurrent layers take {json.dumps(allowed)}",
        )
