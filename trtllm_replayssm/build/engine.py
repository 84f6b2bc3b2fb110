"""build_engine: checkpoint directory -> engine directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from .. import __version__
from ..directories import check_target, sha256_of, written_directory
from ..errors import ReplayError, require
from . import directory
from .backend import BuildLog, Progress, find_tensorrt, interruptible, major_version, make_logger, make_monitor
from .directory import CONFIG_FILE, ENGINE_FILE, EngineConfig, write_engine_config
from .options import PREFER, BuildOptions


def build_engine(
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    options: BuildOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Build an engine on this machine's GPU (TensorRT-RTX: without one) and write its directory.

    The directory is written under another name beside ``out_dir`` and renamed when it is whole.

    Args:
        checkpoint: directory made by ``convert``. out_dir: the engine directory to make.
        options: what to build; BuildOptions() by default.
        overwrite: replace ``out_dir`` if it is an engine directory already.
        progress: called as (done, total, what is being done now).
        verbose: print TensorRT's log on stderr.

    Returns:
        summary: what directory.describe returns, and ``copied``: engine, family, tensorrt, network, dtype,
        state_dtype, precision, window, draft_tokens, max_batch, max_input_len, max_positions, engine_bytes.

    Raises:
        ReplayError: bad input, no TensorRT, no plugin library, a dtype that this TensorRT lacks, a ``precision`` that
            it has no use for, an ``out_dir`` that is there or cannot be written, or a build that TensorRT gave up, with
            its reasons. KeyboardInterrupt. A timing cache that cannot be written when the engine is built is a
            RuntimeWarning.
    """
    from ..models.checkpoint import TEXT_FILES, WEIGHTS_FILE
    from ..models.host_weights import load_host_checkpoint
    from ..ops.tensorrt_network import check_options, chooses_precision

    options = options or BuildOptions()
    source, target = Path(checkpoint), Path(out_dir).absolute()
    check_target(
        target, overwrite=overwrite, is_ours=directory.is_engine_directory, what=directory.WHAT, inputs=[source]
    )
    config, weights = load_host_checkpoint(source)
    network, limits = options.network_options(config), options.profile_limits(config)
    trt = find_tensorrt(options.tensorrt, options.network)
    check_options(trt, config, network)
    if options.precision is not None:
        require(
            chooses_precision(trt, network),
            f"precision is {options.precision} for a {network.dtype} network of {trt.__name__} {trt.__version__}; it "
            "applies to TensorRT 8.6 and float16 only, the others always keep to the network's dtypes: leave it out",
        )
    log = BuildLog(progress, verbose=verbose)
    logger = make_logger(trt, log)
    library = _register_plugins() if network.replay == "plugin" else ("", "")
    copied = [name for name in TEXT_FILES if os.path.isfile(source / name)]
    with written_directory(target, inputs=[source]) as part:
        engine, io, profiles, precision = _build(trt, logger, log, config, weights, network, limits, options, progress)
        (part / ENGINE_FILE).write_bytes(engine)
        written = EngineConfig(
            model=config,
            network=network,
            limits=limits,
            io=io,
            profiles=tuple(profiles),
            package_version=__version__,
            tensorrt=(trt.__name__, str(trt.__version__)),
            compute_capability=_compute_capability(),
            engine_sha256=sha256_of(part / ENGINE_FILE),
            engine_bytes=engine.nbytes,
            weights_sha256=sha256_of(source / WEIGHTS_FILE),
            library_version=library[0],
            library_sha256=library[1],
            layout_sha256=directory.layout_digest(config, network) if network.replay == "plugin" else "",
            precision=precision,
        )
        directory.write_decay(part, directory.decay_rates(config, weights))
        write_engine_config(part, written)
        for name in copied:
            shutil.copyfile(source / name, part / name)
        assert CONFIG_FILE not in copied
    return {**directory.describe(Path(out_dir), written), "copied": copied}


def _register_plugins() -> tuple[str, str]:
    """Register the plugins with the TensorRT that is loaded; (version, SHA-256) of their library."""
    from .. import plugins
    from ..kernels import library

    path = plugins.library_path()
    plugins.register()
    return library.load().replayssm_version().decode(), sha256_of(path)


def _compute_capability() -> str:
    """Of GPU 0, such as ``90``; empty where there is none."""
    from ..runtime.cuda import cuda

    try:
        return cuda().compute_capability(0)
    except ReplayError:
        return ""


def _build(
    trt: Any,
    logger: Any,
    log: BuildLog,
    config: Any,
    weights: Any,
    network_options: Any,
    limits: Any,
    options: BuildOptions,
    progress: Progress | None,
) -> tuple[memoryview, Any, tuple[str, ...], str]:
    """(serialised engine, NetworkIO, profile names, precision). Raises ReplayError with TensorRT's reasons."""
    from ..ops import tensorrt_network as emission

    try:
        builder = trt.Builder(logger)
    except TypeError:  # what its binding raises for a null pointer
        raise ReplayError(f"TensorRT {trt.__version__} cannot start a build: {log.reason()}") from None
    network = emission.create_network(trt, builder)
    if progress is not None:
        progress(0, 1, "network")
    io = emission.emit_network(trt, network, config, weights, network_options)
    settings = builder.create_builder_config()
    emission.configure_builder(trt, settings, network_options, options.workspace_bytes)
    profiles = emission.add_profiles(trt, builder, settings, io, limits)
    cache = _set_build_options(trt, settings, options)
    if hasattr(trt, "IProgressMonitor"):  # also what lets Ctrl-C stop the build
        settings.progress_monitor = make_monitor(trt, log, progress or (lambda done, total, what: None))
    preferred = options.precision == PREFER and emission.prefer_precision(trt, settings, network_options)
    with interruptible(log):
        engine = builder.build_serialized_network(network, settings)
        again = engine is None and log.lacks_kernel and options.precision is None and not log.interrupted
        if again and emission.prefer_precision(trt, settings, network_options):
            preferred = True
            log.clear()
            if progress is not None:
                progress(0, 1, "again, with precisions preferred")
            engine = builder.build_serialized_network(network, settings)
    if engine is None:
        raise ReplayError(f"TensorRT {trt.__version__} gave no engine: {log.reason()}")
    if cache is not None and options.timing_cache is not None:
        _write_cache(options.timing_cache, settings.get_timing_cache().serialize())
    return memoryview(engine).cast("B"), io, profiles, directory.PREFERRED if preferred else directory.OBEYED


def _set_build_options(trt: Any, settings: Any, options: BuildOptions) -> Any:
    """Optimization level, timing cache, shared profiles; the cache object, which must outlive the build, or None."""
    if options.optimization_level is not None:
        settings.builder_optimization_level = options.optimization_level
    if hasattr(settings, "set_tactic_sources") and major_version(trt) < 10 and trt.__name__ == "tensorrt":
        settings.set_tactic_sources(0)  # TensorRT 8's kernels alone: cuBLAS and cuDNN of its time need not be there
    # One context per captured graph: from TensorRT 9 on contexts may always share a profile.
    sharing = getattr(getattr(trt, "PreviewFeature", None), "PROFILE_SHARING_0806", None)
    if sharing is not None:
        settings.set_preview_feature(sharing, True)
    if options.timing_cache is None:
        return None
    path = Path(options.timing_cache)
    require(not path.is_dir(), f"timing cache {path} is a directory; it must be a file")
    writable = os.path.isdir(path.parent) and os.access(path.parent, os.W_OK)
    require(writable, f"timing cache {path} cannot be written: {path.parent} is no directory that may be written to")
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ReplayError(f"timing cache {path} cannot be read: {error.strerror or error}") from None
    cache = settings.create_timing_cache(data)
    taken = cache is not None and settings.set_timing_cache(cache, ignore_mismatch=False)
    require(bool(taken), f"timing cache {path} is of another TensorRT or GPU; delete it or name another file")
    return cache


def _write_cache(path: Path, data: Any) -> None:
    """Replace the timing cache file as a whole. The engine is there already, so a failure is a warning."""
    part = None
    try:
        number, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            file.write(memoryview(data))
        os.replace(part, path)
        part = None
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"timing cache {path} was not written: {reason}", RuntimeWarning, stacklevel=3)
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
