"""TrtllmOps: the ops vocabulary as layers of a tensorrt_llm network, so that HybridDecoder.forward emits the model.

Activations are packed [tokens, F]. Rounding is that of the vocabulary (ops/base.py): norms, activations and logits are
cast to fp32, computed, and cast back once; products are tensorrt_llm's own Linear layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ReplayError, require
from ..models.config import HybridConfig
from ..models.decoder import EMBEDDING, weight_shapes
from ..ops.base import Ops
from ..plugins import MAX_CONTEXT_TOKENS, MAX_ROWS, VECTOR_INPUTS
from ..spec import KIMI_DELTA, MAMBA2, ConvSpec, RecurrenceSpec, require_choice, require_int
from . import functional as replay
from . import requirement
from .budget import PoolShape
from .functional import Pool, Rows


@dataclass(frozen=True, eq=False)
class Value:
    """Columns ``offset .. offset + size`` of ``tensor`` [tokens, width].

    ``rotation`` (head_dim, rotary_dim, theta) is one that is still to be applied: gpt_attention does it.
    """

    tensor: Any
    width: int
    offset: int
    size: int
    rotation: tuple[int, int, float] | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.size == self.width


@dataclass(frozen=True, eq=False)
class NetworkInputs:
    """The network inputs that stateful layers read.

    Attributes:
        rows: of the batch. states: per recurrent layer (stateful index) the tensors conv_state_ptr, rnn_state_ptr.
        attention: keyword arguments of gpt_attention that are network inputs, and max_context_length.
        pools: strides of the state pools.
    """

    rows: Rows
    states: Mapping[int, tuple[Any, Any]]
    attention: Mapping[str, Any]
    pools: PoolShape


class TrtllmOps(Ops[Any]):
    """One network. Its tensors are Values.

    Args:
        modules: the Module whose attributes follow the weight names (hybrid.py).
        config: the model. spec, conv_spec: of every recurrent layer.
        inputs: network inputs.

    Raises:
        ReplayError: tensorrt_llm is missing; later, an operation that TensorRT-LLM engines do not have.
    """

    def __init__(
        self, modules: Any, config: HybridConfig, spec: RecurrenceSpec, conv_spec: ConvSpec, inputs: NetworkInputs
    ) -> None:
        self.f = requirement.module("functional")
        self.modules = modules
        self.config = config
        self.spec = spec
        self.conv_spec = conv_spec
        self.inputs = inputs
        self._shapes = weight_shapes(config)
        self._attention_order = {layer: i for i, layer in enumerate(config.attention_layers)}
        self._rotations: dict[tuple[int, float], tuple[Any, Any]] = {}

    def tensor(self, x: Value) -> Any:
        """x as a tensor of its own [tokens, size]; a slice is emitted unless it is whole."""
        assert x.rotation is None, "only attention reads a rotated tensor"
        if x.whole:
            return x.tensor
        sizes = self.f.concat([self.f.shape(x.tensor, 0), x.size])
        return self.f.slice(x.tensor, [0, x.offset], sizes)

    def embedding(self, ids: Any, weight: str) -> Value:
        return self._value(self._find(weight.removesuffix(".weight"))(ids), self._shapes[weight][1])

    def linear(self, x: Value, weight: str, bias: str | None = None) -> Value:
        module = self._find(weight.removesuffix(".weight"))
        if weight == EMBEDDING:
            product = self.f.matmul(self.tensor(x), module.weight.value, transb=True)
        else:
            assert (bias is None) == (module.bias is None), weight
            product = module(self.tensor(x))
        return self._value(product, self._shapes[weight][0])

    def rms_norm(self, x: Value, weight: str, eps: float, *, group_size: int | None = None) -> Value:
        return self._rounded(self._normalised(x, weight, eps, group_size or x.size), x.size)

    def rms_norm_gated(
        self, x: Value, gate: Value, weight: str, eps: float, *, group_size: int, activation: str = "silu"
    ) -> Value:
        require_choice("activation", activation, ("silu", "sigmoid"))
        factor = self._float32(gate)
        factor = self._silu(factor) if activation == "silu" else self.f.sigmoid(factor)
        return self._rounded(self._normalised(x, weight, eps, group_size) * factor, x.size)

    def _normalised(self, x: Value, weight: str, eps: float, group_size: int) -> Any:
        """rms_norm in fp32 [tokens, F]. Strongly typed networks want the scale in fp32, which checkpoints store."""
        values, scale = self._float32(x), self._weight(weight)
        groups = x.size // group_size
        if groups > 1:
            values = values.view([0, groups, group_size])
            if self._shapes[weight] != (group_size,):
                scale = scale.view([groups, group_size])
        mean = (values * values).mean(dim=(-1,), keepdim=True)
        values = values / self.f.sqrt(mean + eps) * scale
        return values.view([0, x.size]) if groups > 1 else values

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        starts = [x.offset + sum(sizes[:i]) for i in range(len(sizes))]
        return [dataclasses.replace(x, offset=start, size=size) for start, size in zip(starts, sizes, strict=True)]

    def add(self, x: Value, y: Value) -> Value:
        return self._value(self.tensor(x) + self.tensor(y), x.size)

    def silu_mul(self, gate: Value, x: Value) -> Value:
        return self._rounded(self._silu(self._float32(gate)) * self._float32(x), x.size)

    def sigmoid_mul(self, gate: Value, x: Value) -> Value:
        return self._rounded(self.f.sigmoid(self._float32(gate)) * self._float32(x), x.size)

    def relu2(self, x: Value) -> Value:
        positive = self.f.relu(self.tensor(x))
        return self._value(positive * positive, x.size)

    def rope(self, x: Value, *, head_dim: int, rotary_dim: int, theta: float) -> Value:
        return dataclasses.replace(x, rotation=(head_dim, rotary_dim, theta))

    def causal_conv(self, layer: int, x: Value, weight: str, bias: str | None = None) -> Value:
        pool = Pool(self.inputs.states[layer][0], self.inputs.pools.conv_stride)
        data, offsets = self._columns({"x": x})
        w, b = self._weight(weight), None if bias is None else self._weight(bias)
        y = replay.replay_causal_conv(data["x"], w, b, pool, self.inputs.rows, self.conv_spec, offsets=offsets)
        return self._value(y, self.conv_spec.channels)

    def replay_mamba2(
        self,
        layer: int,
        x: Value,
        dt: Value,
        b: Value,
        c: Value,
        z: Value | None,
        *,
        a_log: str,
        d: str,
        dt_bias: str,
    ) -> Value:
        assert self.spec.kind == MAMBA2
        data, offsets = self._columns({"x": x, "dt": dt, "B": b, "C": c, **({} if z is None else {"z": z})})
        weights = {"dt_bias": self._weight(dt_bias), "A": self.f.exp(self._weight(a_log)) * -1.0, "D": self._weight(d)}
        y = replay.replay_mamba2(
            **data, **weights, pool=self._state(layer), rows=self.inputs.rows, spec=self.spec, offsets=offsets
        )
        return self._value(y, self.config.ssm_inner_size)

    def replay_gated_delta(
        self, layer: int, q: Value, k: Value, v: Value, a: Value, b: Value, *, a_log: str, dt_bias: str
    ) -> Value:
        data, offsets = self._columns({"q": q, "k": k, "v": v, "a": a, "b": b})
        bias = self._weight(dt_bias)
        if self.spec.kind == KIMI_DELTA:
            bias = bias.view([self.spec.nheads * self.spec.dstate])
        weights = {"A_log": self._weight(a_log), "dt_bias": bias}
        o = replay.replay_gated_delta(
            **data, **weights, pool=self._state(layer), rows=self.inputs.rows, spec=self.spec, offsets=offsets
        )
        return self._value(o, self.config.ssm_inner_size)

    def attention(self, layer: int, q: Value, k: Value, v: Value, *, scale: float) -> Value:
        assert q.rotation == k.rotation and v.rotation is None
        config = self.config
        output, _ = self.f.gpt_attention(
            qkv=self._joined([q, k, v]),
            past_key_value=None,
            layer_idx=self._attention_order[layer],
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            hidden_size_per_head=config.head_dim,
            q_scaling=1.0 / (scale * config.head_dim**0.5),
            **self._rope_arguments(q.rotation),
            **self.inputs.attention,
        )
        return self._value(output, q.size)

    def _rope_arguments(self, rotation: tuple[int, int, float] | None) -> dict[str, Any]:
        """gpt_attention's arguments for a rotation of the first channels of every head by the tokens' positions."""
        kinds = self.f.PositionEmbeddingType
        if rotation is None:
            return {"position_embedding_type": kinds.learned_absolute}
        _, rotary_dim, theta = rotation
        key, positions = (rotary_dim, theta), self.config.max_positions
        if key not in self._rotations:
            make = self.f.RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin
            tables = make(positions, rotary_dim, theta)
            first, second = (self.f.constant(np.ascontiguousarray(table, dtype=np.float32)) for table in tables)
            self._rotations[key] = (first, second)
        inv_freq, cos_sin = self._rotations[key]
        return {
            "position_embedding_type": kinds.rope_gpt_neox,
            "rotary_embedding_dim": rotary_dim,
            "rotary_embedding_base": theta,
            "rotary_embedding_max_positions": positions,
            "rotary_inv_freq": inv_freq,
            "rotary_cos_sin": cos_sin,
        }

    def latent_attention(self, layer: int, q: Value, latent: Value, shared: Value, *, kv_up: str, scale: float) -> Any:
        raise ReplayError(
            f"stateful layer {layer} is multi-head latent attention (MLA); TensorRT-LLM engines of this package do not "
            "have it. The torch backend runs such models"
        )

    def select_last(self, x: Value) -> Value:
        return self._value(
            self.f.gather_last_token_logits(self.tensor(x), self.inputs.rows.last_token_ids, True), x.size
        )

    def to_float32(self, x: Value) -> Value:
        return self._value(self._float32(x), x.size)

    def _value(self, tensor: Any, size: int) -> Value:
        return Value(tensor, size, 0, size)

    def _float32(self, x: Value) -> Any:
        return self.f.cast(self.tensor(x), "float32")

    def _rounded(self, tensor: Any, size: int) -> Value:
        return self._value(self.f.cast(tensor, self.config.dtype), size)

    def _silu(self, x: Any) -> Any:
        return x * self.f.sigmoid(x)

    def _state(self, layer: int) -> Pool:
        return Pool(self.inputs.states[layer][1], self.inputs.pools.state_stride)

    def _find(self, path: str) -> Any:
        """The Module or Parameter at ``path``."""
        found = self.modules
        for part in path.split("."):
            found = getattr(found, part)
        return found

    def _weight(self, name: str) -> Any:
        return self._find(name).value

    def _columns(self, values: Mapping[str, Value]) -> tuple[dict[str, Any], dict[str, int]]:
        """Tensors and first columns for a plugin; what it could not read as 16-byte vectors is sliced first."""
        tensors, offsets = {}, {}
        for name, x in values.items():
            readable = all(replay.is_aligned(columns, self.config.dtype) for columns in (x.offset, x.width))
            assert x.rotation is None
            if readable or name not in VECTOR_INPUTS:
                tensors[name], offsets[name] = x.tensor, x.offset
            else:
                tensors[name] = self.tensor(x)
        return tensors, offsets

    def _joined(self, values: Sequence[Value]) -> Any:
        """The columns of ``values`` side by side; without a copy where they already are."""
        plain = [dataclasses.replace(x, rotation=None) for x in values]
        first, total = plain[0], sum(x.size for x in plain)
        starts = [first.offset + sum(x.size for x in plain[:i]) for i in range(len(plain))]
        if all(x.tensor is first.tensor and x.offset == start for x, start in zip(plain, starts, strict=True)):
            return self.tensor(dataclasses.replace(first, size=total))
        return self.f.concat([self.tensor(x) for x in plain], dim=1)


def require_call_sizes(max_batch_size: int, max_num_tokens: int) -> None:
    """Raise ReplayError for an engine whose calls would have more rows or tokens than the plugins take."""
    require_int("max_batch_size", max_batch_size, 1, MAX_ROWS, " (rows that a plugin takes)")
    why = " (prompt tokens that ReplayCausalConv takes in one call)"
    require_int("max_num_tokens", max_num_tokens, 1, MAX_CONTEXT_TOKENS, why)


def require_supported(config: HybridConfig) -> None:
    """Raise ReplayError for a model that has layers which TensorRT-LLM engines of this package do not have."""
    require(
        not config.latent_rank or not config.attention_layers,
        f"latent_rank is {config.latent_rank}: multi-head latent attention (MLA) is not in TensorRT-LLM engines of "
        "this package; the torch backend runs such models",
    )
