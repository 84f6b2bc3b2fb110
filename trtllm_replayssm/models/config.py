"""HybridConfig: what a hybrid decoder (attention + state-space layers + MLPs) is made of, whatever file it came from.

One frozen, validated object per model. The readers of published checkpoints (hf.py) make it, the decoder (decoder.py)
builds from it, runtime/state.py sizes memory by it, checkpoints carry it as JSON. Needs the standard library alone and
runs on Python 3.9, since engine builds do.

A model is a list of layers, each one mixer with its own pre-norm and residual: ``x + mixer(norm(x))``. Mixers that
keep memory between steps (``mamba2``, ``gated_delta``, ``kimi_delta``, ``attention``) are the *stateful* layers; the
``layer`` argument of the stateful operations, the keys of a ModelState and the ``{i}`` of TensorRT-LLM's
``rnn_state_ptr_{i}`` all count those alone. Weight names (``layers.{i}.…``) count every layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ReplayError, require
from ..spec import (
    GATED_DELTA,
    KIMI_DELTA,
    MAMBA2,
    ConvSpec,
    RecurrenceSpec,
    require_bool,
    require_choice,
    require_int,
)

ATTENTION = "attention"
MLP = "mlp"
#: Mixture of experts: read_hf_config(..., allow_moe=True) reports such layers for planning; no decoder runs them.
MOE = "moe"
LAYER_KINDS = (MAMBA2, GATED_DELTA, KIMI_DELTA, ATTENTION, MLP, MOE)
RECURRENT_KINDS = (MAMBA2, GATED_DELTA, KIMI_DELTA)
#: How errors list them.
ANY_RECURRENT = " or ".join(RECURRENT_KINDS)
STATEFUL_KINDS = (*RECURRENT_KINDS, ATTENTION)

FAMILIES = ("nemotron_h", "qwen3_next", "qwen3_5", "kimi_linear")
MLP_KINDS = ("relu2", "swiglu")
MODEL_DTYPES = ("bfloat16", "float16", "float32")
_SIZE_LIMIT = 1 << 24
_SWITCHES = ("attention_gate", "qk_norm", "conv_bias", "tie_embeddings", "attention_bias", "mlp_bias", "mixer_bias")


@dataclass(frozen=True)
class HybridConfig:
    """A hybrid decoder.

    Attributes:
        family: of FAMILIES: where the weights' published names come from.
        vocab_size, hidden_size: rows and columns of the embedding.
        layers: mixer kind of every layer, of LAYER_KINDS; one recurrent kind per model.
        dtype: the dtype that the weights were published in (a checkpoint made from them may have another).
        intermediate_size, mlp_kind: of the MLPs; ``relu2`` is down(relu(up x)^2), ``swiglu`` down(silu(gate x) * up x).
        num_attention_heads, num_key_value_heads, head_dim: of attention; all 0 without attention layers.
        attention_gate: multiply attention's output by the sigmoid of a gate that the query projection also emits.
        qk_norm: RMS-normalise every query and key head before the rotation.
        rotary_dim, rope_theta: leading channels of a head that are rotated (0: no positional encoding) and the base.
        latent_rank: 0, or the size of the normed latent vector from which every head's keys and values are made
            (multi-head latent attention, MLA). Then a head's query and key have head_dim channels, of which the last
            latent_shared_dim are one key that all heads share, and its value has latent_value_dim.
        latent_q_rank: 0, or the size of the normed vector from which the queries are made.
        latent_norm_eps: of the norms of these two vectors.
        ssm_heads, ssm_groups, ssm_head_dim, ssm_state_size: H, G, P, N (Mamba-2) or HV, HK, V, K (GDN, KDA).
        conv_kernel, conv_bias: the short convolution in front of the recurrence.
        dt_min, dt_max: limits of Mamba-2's dt after softplus. The published models have none (0, infinity).
        gate, gate_lower_bound: form of KDA's gate, as in RecurrenceSpec.
        state_dtype: dtype in which the publisher keeps the recurrent state.
        norm_eps: of every normalisation. tie_embeddings: the output projection is the embedding.
        attention_bias, mlp_bias, mixer_bias: whether those projections have biases.
        max_positions: longest sequence that the model was made for.
        bos_token_id, eos_token_ids, pad_token_id: special tokens; None or empty where the model names none.

    Raises:
        ReplayError: a field out of range or a combination that no supported model has.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]
    dtype: str = "bfloat16"
    intermediate_size: int = 0
    mlp_kind: str = "swiglu"
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_gate: bool = False
    qk_norm: bool = False
    rotary_dim: int = 0
    rope_theta: float = 10000.0
    latent_rank: int = 0
    latent_shared_dim: int = 0
    latent_value_dim: int = 0
    latent_q_rank: int = 0
    latent_norm_eps: float = 1e-6
    ssm_heads: int = 0
    ssm_groups: int = 0
    ssm_head_dim: int = 0
    ssm_state_size: int = 0
    conv_kernel: int = 4
    conv_bias: bool = False
    dt_min: float = 0.0
    dt_max: float = math.inf
    gate: str = "softplus"
    gate_lower_bound: float = -5.0
    state_dtype: str = "float32"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    mixer_bias: bool = False
    max_positions: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        require_choice("family", self.family, FAMILIES)
        require_choice("dtype", self.dtype, MODEL_DTYPES)
        require_choice("mlp_kind", self.mlp_kind, MLP_KINDS)
        for name in ("vocab_size", "hidden_size", "max_positions"):
            require_int(name, getattr(self, name), 1, _SIZE_LIMIT)
        for name in _SWITCHES:
            require_bool(name, getattr(self, name))
        require(len(self.layers) > 0, "layers is empty; a model has at least one layer")
        for i, kind in enumerate(self.layers):
            require_choice(f"layers[{i}]", kind, LAYER_KINDS)
        for name in ("norm_eps", "rope_theta", "latent_norm_eps"):
            value = getattr(self, name)
            ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
            require(ok, f"{name} is {value!r}; it must be a positive number")
        if MLP in self.layers:
            require_int("intermediate_size", self.intermediate_size, 1, _SIZE_LIMIT)
        self._check_attention()
        self._check_recurrence()
        self._check_tokens()

    def _check_attention(self) -> None:
        if ATTENTION not in self.layers:
            return
        require_int("num_attention_heads", self.num_attention_heads, 1, 4096)
        require_int("num_key_value_heads", self.num_key_value_heads, 1, 4096)
        require_int("head_dim", self.head_dim, 1, 4096)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(
            heads % kv_heads == 0,
            f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads, which is {heads}",
        )
        require_int("rotary_dim", self.rotary_dim, 0, self.head_dim, " (head_dim)")
        require(self.rotary_dim % 2 == 0, f"rotary_dim is {self.rotary_dim}; it must be even")
        self._check_latent()

    def _check_latent(self) -> None:
        require_int("latent_rank", self.latent_rank, 0, _SIZE_LIMIT, " (0: keys and values of their own per head)")
        sizes = ("latent_shared_dim", "latent_value_dim", "latent_q_rank")
        if not self.latent_rank:
            for name in sizes:
                value = getattr(self, name)
                require(value == 0, f"{name} is {value!r} with latent_rank 0; it applies to latent attention only")
            return
        require_int("latent_shared_dim", self.latent_shared_dim, 1, self.head_dim - 1, " (less than head_dim)")
        require_int("latent_value_dim", self.latent_value_dim, 1, 4096)
        require_int("latent_q_rank", self.latent_q_rank, 0, _SIZE_LIMIT, " (0: queries straight from the input)")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(
            heads == kv_heads,
            f"num_key_value_heads is {kv_heads}; with latent_rank it must be num_attention_heads, which is {heads}",
        )
        for name in ("rotary_dim", "attention_gate", "qk_norm", "attention_bias"):
            value = getattr(self, name)
            require(not value, f"{name} is {value!r} with latent_rank {self.latent_rank}; latent attention has none")

    def _check_recurrence(self) -> None:
        kinds = sorted(set(self.layers) & set(RECURRENT_KINDS))
        require(len(kinds) > 0, f"layers has no recurrent layer; at least one must be {ANY_RECURRENT}")
        require(len(kinds) == 1, f"layers mixes {' and '.join(kinds)}; a model has one recurrent kind")
        for name in ("ssm_heads", "ssm_groups", "ssm_head_dim", "ssm_state_size"):
            require_int(name, getattr(self, name), 1, 4096)
        for name in ("mixer_bias", "conv_bias"):
            value = getattr(self, name)
            require(
                not value or kinds == [MAMBA2], f"{name} is {value} for {kinds[0]} layers; it applies to {MAMBA2} only"
            )
        # The specs check the rest: divisibility, head sizes, dt limits, taps, state dtype.
        self.recurrence_spec()
        self.conv_spec()

    def _check_tokens(self) -> None:
        named = [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        named += [("eos_token_ids", token) for token in self.eos_token_ids]
        for name, token in named:
            if token is not None:
                require_int(name, token, 0, self.vocab_size - 1, " (a token of the vocabulary)")

    @classmethod
    def published(cls, where: str, keys: Mapping[str, str], **values: Any) -> HybridConfig:
        """HybridConfig(**values) whose errors start with ``where`` and speak of the keys of the config.json.

        Args:
            where: file, or object in it. keys: name of a field of HybridConfig or of a spec -> what the file calls it.
        """
        try:
            return cls(**values)
        except ReplayError as error:
            raise ReplayError(f"{where}: {with_keys(str(error), keys)}") from None

    @property
    def recurrent_kind(self) -> str:
        """``mamba2``, ``gated_delta`` or ``kimi_delta``."""
        return next(kind for kind in RECURRENT_KINDS if kind in self.layers)

    @property
    def stateful_layers(self) -> tuple[str, ...]:
        """Kinds of the layers that keep memory, in order. The index in this tuple is the ``layer`` of stateful ops."""
        return tuple(kind for kind in self.layers if kind in STATEFUL_KINDS)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Stateful indices of the recurrent layers."""
        return tuple(i for i, kind in enumerate(self.stateful_layers) if kind in RECURRENT_KINDS)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Stateful indices of the attention layers."""
        return tuple(i for i, kind in enumerate(self.stateful_layers) if kind == ATTENTION)

    @property
    def ssm_inner_size(self) -> int:
        """Channels that the recurrence emits: H*P or HV*V."""
        return self.ssm_heads * self.ssm_head_dim

    @property
    def ssm_group_size(self) -> int:
        """Channels of B (and of C), or of q (and of k): G*N or HK*K."""
        return self.ssm_groups * self.ssm_state_size

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: x|B|C or q|k|v."""
        return self.ssm_inner_size + 2 * self.ssm_group_size

    def recurrence_spec(
        self,
        *,
        window: int = 16,
        spec_len: int = 1,
        read_copy: str = "none",
        state_dtype: str | None = None,
        act_dtype: str | None = None,
        stagger: bool = True,
    ) -> RecurrenceSpec:
        """The RecurrenceSpec of every recurrent layer; ``state_dtype``, ``act_dtype`` default to the config's own."""
        formula: dict[str, Any] = {"gate": self.gate, "gate_lower_bound": self.gate_lower_bound}
        if self.recurrent_kind == MAMBA2:
            formula |= {"dt_min": self.dt_min, "dt_max": self.dt_max}
        return RecurrenceSpec(
            kind=self.recurrent_kind,
            nheads=self.ssm_heads,
            ngroups=self.ssm_groups,
            headdim=self.ssm_head_dim,
            dstate=self.ssm_state_size,
            state_dtype=state_dtype or self.state_dtype,
            act_dtype=act_dtype or self.dtype,
            window=window,
            spec_len=spec_len,
            read_copy=read_copy,
            stagger=stagger,
            **formula,
        )

    def conv_spec(self, *, spec_len: int = 1, act_dtype: str | None = None) -> ConvSpec:
        """The ConvSpec of every recurrent layer's short convolution."""
        return ConvSpec(
            channels=self.conv_channels, kernel=self.conv_kernel, act_dtype=act_dtype or self.dtype, spec_len=spec_len
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of JSON values; an infinite dt_max is the string ``inf``."""
        out = asdict(self)
        out["layers"] = list(self.layers)
        out["eos_token_ids"] = list(self.eos_token_ids)
        if math.isinf(self.dt_max):
            out["dt_max"] = "inf"
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HybridConfig:
        """Inverse of :meth:`to_dict`. Raises ReplayError for unknown or missing keys and for bad values."""
        if not isinstance(data, Mapping):
            raise ReplayError(f"HybridConfig data is {type(data).__name__}; it must be an object with named fields")
        names = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in set(data) - set(names))
        require(not unknown, f"HybridConfig has no field {', '.join(unknown)}")
        missing = [n for n in ("family", "vocab_size", "hidden_size", "layers") if n not in data]
        require(not missing, f"HybridConfig needs {', '.join(missing)}")
        values: dict[str, Any] = {key: math.inf if value == "inf" else value for key, value in data.items()}
        for key in ("layers", "eos_token_ids"):
            value = values.get(key, ())
            require(isinstance(value, (list, tuple)), f"{key} is {value!r}; it must be a list")
        return cls(**values)


def with_keys(text: str, keys: Mapping[str, str]) -> str:
    """``text`` with every word that ``keys`` has replaced by what it has for it."""
    words = "|".join(re.escape(word) for word in sorted(keys, key=len, reverse=True))
    return re.sub(rf"\b(?:{words})\b", lambda found: keys[found.group()], text)


def recurrence_keys(heads: str, groups: str, head_dim: str, state_size: str, kernel: str) -> dict[str, str]:
    """For HybridConfig.published: what a config.json calls the sizes of the recurrence and of its convolution."""
    group_size = f"{groups} * {state_size}"
    return {
        **dict.fromkeys(("ssm_heads", "nheads"), heads),
        **dict.fromkeys(("ssm_groups", "ngroups"), groups),
        **dict.fromkeys(("ssm_head_dim", "headdim"), head_dim),
        **dict.fromkeys(("ssm_state_size", "dstate"), state_size),
        "kernel": kernel,
        "channels": f"{heads} * {head_dim} + 2 * {group_size}",
        "act_dtype": "dtype",
    }
