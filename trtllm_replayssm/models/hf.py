"""Published (Hugging Face format) checkpoints: config.json in every published form, tensors under every published name.

A checkpoint is a directory with config.json and safetensors files. Its family decides how the config is read and which
tensors each weight is made of (nemotron_h.py, qwen.py, kimi_linear.py); the rest is here: finding the family, taking
off name prefixes, and checking that every tensor is there, is expected and has the shape that the config implies.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..directories import refuse_engine
from ..errors import ReplayError, require
from . import kimi_linear, nemotron_h, qwen
from .config import MODEL_DTYPES, MOE, HybridConfig, with_keys
from .decoder import EMBEDDING, HybridDecoder
from .fields import Fields, read_json
from .recipes import Recipe, Source
from .weight_files import WeightFiles, require_readable

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
#: How errors say what is wanted.
HF_DIRECTORY = "; give one that holds a downloaded Hugging Face checkpoint"
#: model_type -> (family, whether all its MLPs are mixtures of experts).
MODEL_TYPES = {
    "nemotron_h": ("nemotron_h", False),
    "qwen3_next": ("qwen3_next", False),
    "qwen3_5": ("qwen3_5", False),
    "qwen3_5_text": ("qwen3_5", False),
    "qwen3_5_moe": ("qwen3_5", True),
    "qwen3_5_moe_text": ("qwen3_5", True),
    "kimi_linear": ("kimi_linear", False),
}
#: Prefixes in front of the names that the recipes use, longest first.
_PREFIXES = {
    "nemotron_h": ("backbone.", "model."),
    "qwen3_next": ("model.",),
    "kimi_linear": ("model.",),
    "qwen3_5": ("model.language_model.", "language_model.model.", "language_model.", "model."),
}
#: Parts of published checkpoints that text decoding does not use: draft heads, vision towers, rotation tables.
_SKIPPED_PREFIXES = ("mtp.", "model.mtp.", "backbone.mtp.", "model.visual.", "visual.")
_SKIPPED_SUFFIX = "rotary_emb.inv_freq"
#: family -> the recipes of its weights.
_RECIPES = {
    "nemotron_h": nemotron_h.recipes,
    "qwen3_next": qwen.recipes,
    "qwen3_5": qwen.recipes,
    "kimi_linear": kimi_linear.recipes,
}
_LISTED = 5
#: exp of it is still finite in fp32 (the limit is 88.7).
MAX_A_LOG = 88.0


def read_hf_config(directory: str | Path, *, allow_moe: bool = False) -> HybridConfig:
    """Read the config.json of a published checkpoint.

    Args:
        directory: the checkpoint, or a directory with its config.json alone.
        allow_moe: report mixture-of-experts layers as kind ``moe`` (for planning memory) instead of refusing them.

    Raises:
        ReplayError: no directory, config.json missing or not JSON, an architecture that is not supported, a missing,
            mistyped or unsupported field, quantized weights, MoE layers without ``allow_moe``; a directory that this
            package made. Messages name fields as the config.json does.
    """
    path = Path(directory)
    file = path / CONFIG_FILE
    require(os.path.isdir(path), f"{path} is not a directory{HF_DIRECTORY}")
    require(os.path.isfile(file), f"{path} has no {CONFIG_FILE}")
    outer = Fields(read_json(file), str(file))
    refuse_engine(path, outer.data, "the Hugging Face directory that its checkpoint was converted from")
    require("replayssm" not in outer.data, f"{path} is a checkpoint of this package already; give a Hugging Face one")
    family, moe = _family(outer)
    inner = outer
    if outer.get("text_config", None) is not None:
        text = outer.data["text_config"]
        require(isinstance(text, dict), f"{file}: text_config is {text!r}; it must be an object")
        inner = Fields(text, f"{file}: text_config")
    for fields in (outer, inner):
        quantized = fields.get("quantization_config", None)
        require(
            not quantized, f"{fields.where}: quantization_config is there; quantized checkpoints are not supported yet"
        )
    tied = (outer if "tie_word_embeddings" in outer.data else inner).boolean("tie_word_embeddings", False)
    if family == "nemotron_h":
        config = nemotron_h.read_config(inner, tied)
    elif family == "kimi_linear":
        config = kimi_linear.read_config(inner, tied)
    else:
        config = qwen.read_config(inner, tied, family, moe)
    if MOE in config.layers and not allow_moe:
        count, total = config.layers.count(MOE), len(config.layers)
        raise ReplayError(f"{file}: {count} of {total} layers are mixtures of experts (MoE); MoE is not supported yet")
    tokens = _special_tokens(path, inner, outer)
    try:
        return dataclasses.replace(config, dtype=_dtype(inner, outer), **tokens)
    except ReplayError as error:
        raise ReplayError(f"{path}: {with_keys(str(error), {'eos_token_ids': 'eos_token_id'})}") from None


def _family(fields: Fields) -> tuple[str, bool]:
    """(family, all-MoE) of a config's model_type."""
    model_type = fields.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        names = fields.get("architectures", None)
        known = ", ".join(MODEL_TYPES)
        raise ReplayError(
            f"{fields.where}: model_type is {model_type!r} (architectures {names!r}); supported types are {known}"
        )
    return MODEL_TYPES[model_type]


def published_dtype(directory: str | Path) -> str:
    """The dtype that the config.json of a checkpoint names, whether decoding uses it or not; "" where it names none.

    Raises:
        ReplayError: config.json missing or not JSON.
    """
    file = Path(directory) / CONFIG_FILE
    outer = Fields(read_json(file), str(file))
    text = outer.get("text_config", None)
    return _named_dtype(Fields(text, str(file)) if isinstance(text, dict) else outer, outer)


def _named_dtype(inner: Fields, outer: Fields) -> str:
    """The first dtype named that decoding uses; where there is none the first that is named, or ""."""
    names = [str(fields.get(("dtype", "torch_dtype"), "")).removeprefix("torch.") for fields in (inner, outer)]
    return next((name for name in names if name in MODEL_DTYPES), names[0] or names[1])


def _dtype(inner: Fields, outer: Fields) -> str:
    """The published dtype; bfloat16 where the config names none or one that decoding does not use."""
    name = _named_dtype(inner, outer)
    return name if name in MODEL_DTYPES else "bfloat16"


def _special_tokens(directory: Path, inner: Fields, outer: Fields) -> dict[str, Any]:
    """Token ids of the config, joined by the stop tokens of generation_config.json."""
    source = inner if inner.get("eos_token_id", None) is not None else outer
    stops = list(source.integers("eos_token_id"))
    generation = directory / GENERATION_FILE
    if os.path.isfile(generation):
        stops += Fields(read_json(generation), str(generation)).integers("eos_token_id")
    return {
        "bos_token_id": source.optional_integer("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(stops)),
        "pad_token_id": source.optional_integer("pad_token_id"),
    }


class HFWeights:
    """The weights of a published checkpoint under our names, made one at a time.

    Args:
        directory: the checkpoint. config: what read_hf_config made of it.

    Attributes:
        recipes: per weight of the decoder, by our name, how it is made.
        skipped: published tensors that decoding does not use.

    Raises:
        ReplayError: files missing or damaged; a tensor missing, unexpected, of another shape than the config implies,
            or of a quantized dtype; MoE layers.
    """

    def __init__(self, directory: str | Path, config: HybridConfig) -> None:
        family = _RECIPES[HybridDecoder(config).config.family]
        self._files = WeightFiles.in_directory(Path(directory))
        self._raw, self.skipped = _canonical_names(self._files.names, config.family)
        self.recipes = {recipe.target: self._chosen(recipe) for recipe in family(config)}
        if config.tie_embeddings and "lm_head.weight" in self._raw:
            self._check_tied()
        self._check_names()
        self._check_shapes()

    def __iter__(self) -> Iterator[str]:
        return iter(self.recipes)

    def make(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read the sources of the weight ``name`` and combine them.

        Raises:
            ReplayError: the result is not finite (in ``dtype``: fp16 overflows above 65,504), or A_log is so large
                that the decay rate exp(A_log) would not be.
        """
        import torch

        recipe = self.recipes[name]
        tensor = recipe.combine([self._files.tensor(self._raw[s.name]) for s in recipe.sources]).to(dtype)
        if not torch.isfinite(tensor).all():
            listed = ", ".join(self._raw[s.name] for s in recipe.sources)
            raise ReplayError(f"tensor {listed} holds NaN or infinite values (as {dtype})")
        if name.endswith("A_log") and float(tensor.max()) > MAX_A_LOG:
            listed = self._raw[recipe.sources[0].name]
            raise ReplayError(
                f"tensor {listed} holds {float(tensor.max()):g}; at most {MAX_A_LOG:g} keeps exp(A_log) finite in fp32"
            )
        return tensor

    def _chosen(self, recipe: Recipe) -> Recipe:
        """The first form of which any source is there."""
        form: Recipe | None = recipe
        while form is not None:
            if any(source.name in self._raw for source in form.sources):
                return form
            form = form.otherwise
        return recipe

    def _sources(self) -> list[Source]:
        return [source for recipe in self.recipes.values() for source in recipe.sources]

    def _check_tied(self) -> None:
        """A tied checkpoint may hold the output projection again; it must be the embedding."""
        import torch

        (embedding,) = self.recipes[EMBEDDING].sources
        raw = self._raw.pop("lm_head.weight")
        self.skipped.append(raw)
        if embedding.name in self._raw:
            same = torch.equal(self._files.tensor(raw), self._files.tensor(self._raw[embedding.name]))
            require(same, f"tensor {raw} differs from the embedding, but tie_word_embeddings is true")

    def _check_names(self) -> None:
        wanted = {source.name for source in self._sources()}
        missing = sorted(wanted - set(self._raw))
        require(not missing, f"tensor {_listed(missing)} is missing from the checkpoint")
        surplus = sorted(raw for name, raw in self._raw.items() if name not in wanted)
        require(not surplus, f"tensor {_listed(surplus)} is in the checkpoint, but its config has no such weight")

    def _check_shapes(self) -> None:
        for source in self._sources():
            raw = self._raw[source.name]
            got = self._files.shape(raw)
            fits = got == source.shape or got in source.also
            require(fits, f"tensor {raw} has shape {list(got)}; the config implies {list(source.shape)}")
        require_readable({raw: self._files.dtype(raw) for raw in (self._raw[s.name] for s in self._sources())})


def _canonical_names(names: Iterable[str], family: str) -> tuple[dict[str, str], list[str]]:
    """({name without prefix: published name}, published names to skip)."""
    raw: dict[str, str] = {}
    skipped = []
    for name in names:
        if name.startswith(_SKIPPED_PREFIXES) or name.endswith(_SKIPPED_SUFFIX):
            skipped.append(name)
            continue
        prefix = next((p for p in _PREFIXES[family] if name.startswith(p)), "")
        canonical = name[len(prefix) :]
        require(canonical not in raw, f"tensors {raw.get(canonical)} and {name} are the same weight")
        raw[canonical] = name
    return raw, skipped


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
