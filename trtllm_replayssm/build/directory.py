"""Engine directories: rank0.engine, decay.npz, config.json and what text needs. What a reader must know first.

config.json has one object, ``replayssm_engine``: the model, the network's options, limits and tensors, what the engine
was built with, and SHA-256 sums. An engine runs with the TensorRT version and the plugin library that it was built
with; check_library and check_tensorrt say so before TensorRT would in its own words.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..directories import ENGINE_KEY, sha256_of
from ..errors import ReplayError, require
from ..layout import ConvLayout, SlotLayout
from ..models.config import STATEFUL_KINDS, HybridConfig
from ..models.fields import read_json
from ..ops.tensorrt_io import BOUND, PHASES, PLUGIN, TOKENS, NetworkIO, NetworkOptions, ProfileLimits
from ..spec import MAMBA2, require_choice
from .options import MODULES

CONFIG_FILE = "config.json"
ENGINE_FILE = "rank0.engine"
#: A = -exp(A_log) fp32 [H] of every Mamba-2 layer, which folding a ring outside the engine needs.
DECAY_FILE = "decay.npz"
#: Of config.json and of the network's inputs: the runner feeds engines of this format alone.
FORMAT_VERSION = 2
OBEYED, PREFERRED = "obeyed", "preferred"
WHAT = "an engine directory of this package"


def layouts(config: HybridConfig, options: NetworkOptions) -> tuple[SlotLayout, ConvLayout]:
    """The layouts of a recurrent layer's slot and of its convolution's."""
    return SlotLayout(options.recurrence_spec(config)), ConvLayout(
        config.conv_spec(spec_len=options.spec_len, act_dtype=options.dtype)
    )


def layout_digest(config: HybridConfig, options: NetworkOptions) -> str:
    """SHA-256 over both layouts: changes with any offset of a slot."""
    slot, conv = layouts(config, options)
    return hashlib.sha256(bytes(slot) + bytes(conv)).hexdigest()


@dataclass(frozen=True)
class EngineConfig:
    """What config.json says.

    Attributes:
        model, network, limits, io: see models/config.py and ops/tensorrt_network.py. profiles: names, in their order.
        package_version: of this package when it built the engine.
        tensorrt: module name and version. compute_capability: of the GPU that kernels were chosen on, such as ``90``;
            empty where there was none.
        engine_sha256, engine_bytes: of rank0.engine. weights_sha256: of the checkpoint's weights.
        library_version, library_sha256: of the plugin library; empty for an ``io`` network.
        layout_sha256: see layout_digest; empty for an ``io`` network.
        precision: ``obeyed``: layers compute in the dtypes of the network, as they do in every strongly typed or fp32
            one; ``preferred``: some may not (BuildOptions).
    """

    model: HybridConfig
    network: NetworkOptions
    limits: ProfileLimits
    io: NetworkIO
    profiles: tuple[str, ...]
    package_version: str
    tensorrt: tuple[str, str]
    compute_capability: str
    engine_sha256: str
    engine_bytes: int
    weights_sha256: str
    library_version: str = ""
    library_sha256: str = ""
    layout_sha256: str = ""
    precision: str = OBEYED

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            ENGINE_KEY: {
                "format_version": FORMAT_VERSION,
                "package_version": self.package_version,
                "tensorrt": {"module": self.tensorrt[0], "version": self.tensorrt[1]},
                "compute_capability": self.compute_capability,
                "engine": {"file": ENGINE_FILE, "sha256": self.engine_sha256, "bytes": self.engine_bytes},
                "weights": {"sha256": self.weights_sha256},
                "plugin_library": {"version": self.library_version, "sha256": self.library_sha256},
                "layout_sha256": self.layout_sha256,
                "precision": self.precision,
                "profiles": list(self.profiles),
                "limits": asdict(self.limits),
                "network": self.network.to_dict(),
                "model": self.model.to_dict(),
                "io": self.io.to_dict(),
            }
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        """Inverse of :meth:`to_dict`. Raises ReplayError for anything that is missing, malformed or contradictory."""
        ours = data.get(ENGINE_KEY)
        if not isinstance(ours, Mapping):
            raise ReplayError(f"there is no {ENGINE_KEY} object; engine directories are made by trtllm-replayssm build")
        require("tensorrt_llm" not in ours, "it is an engine of TensorRT-LLM, which runs it: see docs/trtllm.md")
        version = ours.get("format_version")
        require(
            version == FORMAT_VERSION,
            f"format_version is {version!r}; this version of the package runs engines of format {FORMAT_VERSION}: "
            "build the engine again (trtllm-replayssm build ... --overwrite)",
        )
        try:
            tensorrt, engine, library = ours["tensorrt"], ours["engine"], ours["plugin_library"]
            config = cls(
                model=HybridConfig.from_dict(ours["model"]),
                network=NetworkOptions.from_dict(ours["network"]),
                limits=ProfileLimits(**ours["limits"]),
                io=NetworkIO.from_dict(ours["io"]),
                profiles=tuple(ours["profiles"]),
                package_version=str(ours["package_version"]),
                tensorrt=(str(tensorrt["module"]), str(tensorrt["version"])),
                compute_capability=str(ours["compute_capability"]),
                engine_sha256=str(engine["sha256"]),
                engine_bytes=int(engine["bytes"]),
                weights_sha256=str(ours["weights"]["sha256"]),
                library_version=str(library["version"]),
                library_sha256=str(library["sha256"]),
                layout_sha256=str(ours["layout_sha256"]),
                precision=str(ours.get("precision", OBEYED)),
            )
            _check_parts(config)
            return config
        except KeyError as error:
            raise ReplayError(f"{ENGINE_KEY} lacks {error}") from None
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise error if isinstance(error, ReplayError) else ReplayError(f"{ENGINE_KEY}: {error}") from None


def _check_parts(config: EngineConfig) -> None:
    """Raise ReplayError unless model, network, limits, profiles and tensors go together."""
    model, network, limits = config.model, config.network, config.limits
    layouts(model, network)
    require(config.profiles == PHASES, f"profiles is {list(config.profiles)}; it must be {list(PHASES)}")
    for low, high, name in (
        (network.max_positions, model.max_positions, "network's max_positions is {}; the model's is {}"),
        (limits.max_positions, network.max_positions, "limits' max_positions is {}; the network's is {}"),
    ):
        require(low <= high, name.format(low, high))
    same = limits.spec_len == network.spec_len
    require(same, f"limits' spec_len is {limits.spec_len}; the network's is {network.spec_len}")
    require_choice("precision", config.precision, (OBEYED, PREFERRED))
    require_choice("tensorrt module", config.tensorrt[0], MODULES)
    names = [tensor.name for tensor in config.io.tensors]
    require(len(set(names)) == len(names), "io has two tensors of one name")
    logits = config.io.get("logits")
    require(
        logits is not None and logits.shape[-1:] == (model.vocab_size,),
        f"io has no output logits of the model's {model.vocab_size} tokens",
    )
    for name, axis in (("kv_index", BOUND), ("token_index", TOKENS)) if config.io.by_role("kv_cache") else ():
        tensor = config.io.get(name)
        fits = tensor is not None and tensor.is_input and (tensor.dtype, tensor.shape) == ("int32", (axis,))
        require(fits, f"io has KV caches but no input {name} int32 [{axis}]; build the engine again")


def is_engine_directory(path: Path) -> bool:
    """Whether ``path`` has a config.json with the ``replayssm_engine`` object."""
    file = Path(path) / CONFIG_FILE
    if not os.path.isfile(file):
        return False
    try:
        return ENGINE_KEY in read_json(file)
    except ReplayError:
        return False


def write_engine_config(directory: Path, config: EngineConfig) -> None:
    """Write config.json."""
    text = json.dumps(config.to_dict(), indent=1, allow_nan=False)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def read_engine_config(directory: Path) -> EngineConfig:
    """Read and check config.json.

    Raises:
        ReplayError: no directory, no config.json, not one of an engine, or malformed.
    """
    path = Path(directory)
    require(os.path.isdir(path), f"engine {path} is not a directory; make one with: trtllm-replayssm build")
    file = path / CONFIG_FILE
    require(os.path.isfile(file), f"engine {path} has no {CONFIG_FILE}; make it with: trtllm-replayssm build")
    try:
        return EngineConfig.from_dict(read_json(file))
    except ReplayError as error:
        raise ReplayError(f"{file}: {error}") from None


def read_engine(directory: Path, config: EngineConfig) -> bytes:
    """The bytes of the serialised engine.

    Raises:
        ReplayError: the file is missing, or is not the one that config.json was written for.
    """
    file = Path(directory) / ENGINE_FILE
    require(os.path.isfile(file), f"engine {directory} has no {ENGINE_FILE}; build it again")
    data = file.read_bytes()
    require(
        len(data) == config.engine_bytes,
        f"{file} has {len(data):,} bytes; config.json says {config.engine_bytes:,}: it is cut off, build it again",
    )
    same = hashlib.sha256(data).hexdigest() == config.engine_sha256
    require(same, f"{file} is not the engine that config.json was written for (SHA-256 differs); build it again")
    return data


def decay_rates(config: HybridConfig, weights: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """A = -exp(A_log) fp32 [H] by stateful layer; empty for a model without Mamba-2 layers. weights: HostWeights."""
    rates, layer = {}, 0
    for i, kind in enumerate(config.layers):
        if kind == MAMBA2:
            rates[layer] = -np.exp(weights[f"layers.{i}.mixer.A_log"].to_float32())
        layer += kind in STATEFUL_KINDS
    return rates


def write_decay(directory: Path, rates: Mapping[int, np.ndarray]) -> None:
    """Write decay.npz."""
    arrays: dict[str, Any] = {f"layer_{layer}": rate for layer, rate in rates.items()}
    np.savez(directory / DECAY_FILE, **arrays)


def read_decay(directory: Path, config: EngineConfig) -> dict[int, np.ndarray]:
    """What write_decay wrote. Raises ReplayError where it is missing or is not that of the model."""
    file = Path(directory) / DECAY_FILE
    model = config.model
    layers = model.recurrent_layers if model.recurrent_kind == MAMBA2 else ()
    try:
        with np.load(file) as data:
            rates = {layer: np.asarray(data[f"layer_{layer}"]) for layer in layers}
    except Exception as error:  # numpy and zipfile have many for a damaged file
        raise ReplayError(f"{file} cannot be used: {error}; build the engine again") from None
    for layer, rate in rates.items():
        fits = rate.dtype == np.float32 and rate.shape == (model.ssm_heads,)
        require(
            fits, f"{file}: layer {layer} is {rate.dtype} {list(rate.shape)}; it must be float32 [{model.ssm_heads}]"
        )
        wrong = rate[~(np.isfinite(rate) & (rate <= 0))]
        if wrong.size:
            raise ReplayError(
                f"{file}: layer {layer} holds {wrong[0]:g}; every rate must be finite and 0 or negative: build the "
                "engine again"
            )
    return rates


def check_tensorrt(config: EngineConfig, module: str, version: str) -> None:
    """Raise ReplayError unless the engine was built with this TensorRT."""
    built, built_version = config.tensorrt
    require(
        config.network.replay == PLUGIN,
        "the engine has the replay operations as network inputs and outputs (network io); it cannot generate text: "
        "build one with network plugin",
    )
    require(
        (built, built_version) == (module, version),
        f"the engine was built with {built} {built_version}; here is {module} {version}. TensorRT engines run with the "
        f"version that built them: install {built}=={built_version}, or build the engine again",
    )


def check_compute_capability(config: EngineConfig, capability: str) -> None:
    """Raise ReplayError unless the engine was built on this kind of GPU (where both are known)."""
    built = config.compute_capability
    require(
        not built or not capability or built == capability,
        f"the engine was built on a GPU of compute capability {built}; this one has {capability}: build it again here",
    )


def check_library(config: EngineConfig, path: Path, version: str) -> None:
    """Raise ReplayError unless the plugin library is the one that the engine was built with.

    Args:
        path: of the library. version: what it says of itself.
    """
    built = config.library_version
    require(
        version == built,
        f"the engine was built with plugin library {built}; {path} is version {version}: build the engine again, or "
        "let TRTLLM_REPLAYSSM_LIBRARY name the library it was built with",
    )
    require(
        sha256_of(path) == config.library_sha256,
        f"the engine was built with another build of plugin library {built} than {path} (SHA-256 differs): build the "
        "engine again, or let TRTLLM_REPLAYSSM_LIBRARY name the library it was built with",
    )
    require(
        layout_digest(config.model, config.network) == config.layout_sha256,
        "this version of the package lays slots out otherwise than the one that built the engine "
        f"({config.package_version}): build it again",
    )


def describe(directory: Path, config: EngineConfig | None = None) -> dict[str, Any]:
    """What doctor and the end of a build show: plain values."""
    config = config or read_engine_config(directory)
    options, limits = config.network, config.limits
    return {
        "engine": str(directory),
        "family": config.model.family,
        "tensorrt": " ".join(config.tensorrt),
        "network": options.replay,
        "dtype": options.dtype,
        "state_dtype": options.state_dtype,
        "precision": config.precision,
        "window": options.window,
        "draft_tokens": options.spec_len - 1,
        "max_batch": limits.max_batch,
        "max_input_len": limits.max_input_len,
        "max_positions": limits.max_positions,
        "engine_bytes": config.engine_bytes,
    }
