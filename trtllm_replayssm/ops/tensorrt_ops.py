"""TensorRTOps: the model code's operations as layers of an INetworkDefinition.

Activations are padded [B, S, F] in both phases: B rows (sequences), S tokens each (ops/base.py's n = B * S). A tensor
of the model code is a View: some consecutive features of a network tensor. ``split`` makes Views and no layers; the
plugins read a View where it lies, other operations through a slice that is made once.

Needs numpy alone and runs on Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ReplayError, require
from ..kernels.abi import KIND_CODES
from ..models.config import HybridConfig
from ..models.host_weights import HostWeight, WeightLike, as_host_weight
from ..spec import KIMI_DELTA, require_choice
from .base import Ops
from .tensorrt_attention import Attention, KVShape
from .tensorrt_io import LOGITS, PLUGIN, ROWS, TOKENS, NetworkOptions
from .tensorrt_layers import Layers, Node
from .tensorrt_replay import Replay
from .tensorrt_views import Slicer, View


class TensorRTOps(Ops[View]):
    """Emits one network.

    Args:
        layers: the network. config: the model. weights: by name, HostWeight or numpy fp32 or fp16 arrays.
        options: how.

    Raises:
        ReplayError: later, a weight that is missing, of another shape than the operation implies, or that does not fit
            the dtype.
    """

    def __init__(
        self, layers: Layers, config: HybridConfig, weights: Mapping[str, WeightLike], options: NetworkOptions
    ) -> None:
        self.layers = layers
        self.config = config
        self.options = options
        self._weights = weights
        self._slicer = Slicer(layers)
        self._replay = Replay(layers, self._slicer, config, options)
        self._attention: Attention | None = None
        self._rotations: dict[tuple[int, int, float], tuple[Node, Node, Node]] = {}

    # Weights.

    def host_weight(self, name: str) -> HostWeight:
        """The weight ``name`` as it was given. Raises ReplayError where there is none."""
        if name not in self._weights:
            raise ReplayError(f"weight {name} is missing")
        return as_host_weight(name, self._weights[name])

    def _constant(self, name: str, dtype: str, shape: Sequence[int] | None = None) -> Node:
        """A weight in ``dtype``, viewed as ``shape``; ``dtype`` is the same wherever the weight is used."""
        try:
            weight = self.host_weight(name).cast(dtype)
        except ReplayError as error:
            raise ReplayError(f"weight {name}: {error}") from None if name in self._weights else error
        return self.layers.weight(name, weight, shape)

    def _fp32(self, name: str, values: np.ndarray) -> Node:
        """fp32 numbers made from weights, as a constant."""
        return self.layers.weight(name, HostWeight(np.ascontiguousarray(values, np.float32), "float32"))

    def _enter(self, weight: str) -> None:
        """Name the layers to come after the module that holds ``weight``."""
        self.layers.scope = f"{weight.rpartition('.')[0]}/"

    # Operations without memory.

    def embedding(self, ids: View, weight: str) -> View:
        self._enter(weight)
        table = self._constant(weight, self.options.dtype)
        return View.whole(self.layers.gather(table, ids.node, 0), self.host_weight(weight).shape[1])

    def linear(self, x: View, weight: str, bias: str | None = None) -> View:
        self._enter(weight)
        layers, dtype = self.layers, self.options.dtype
        rows, columns = self.host_weight(weight).shape
        require(columns == x.width, f"weight {weight} has {columns} columns for {x.width} features")
        y = self._product(self._slicer.node(x), self._constant(weight, dtype, (1, rows, columns)), transpose_b=True)
        if bias is not None:
            y = layers.binary("SUM", y, layers.cast(self._constant(bias, dtype, (1, 1, rows)), y.dtype))
        return View.whole(layers.cast(y, dtype), rows)

    def _product(self, a: Node, b: Node, *, transpose_b: bool = False) -> Node:
        """Matrix product of two tensors of the model's dtype: in it, or in fp32 where the options say so."""
        dtype = "float32" if self.options.float32_matmul else self.options.dtype
        return self.layers.matmul(self.layers.cast(a, dtype), self.layers.cast(b, dtype), transpose_b=transpose_b)

    def rms_norm(self, x: View, weight: str, eps: float, *, group_size: int | None = None) -> View:
        return self._flat(self._normalised(x, weight, eps, group_size or x.width), x.width)

    def rms_norm_gated(
        self, x: View, gate: View, weight: str, eps: float, *, group_size: int, activation: str = "silu"
    ) -> View:
        require_choice("activation", activation, ("silu", "sigmoid"))
        normalised = self._normalised(x, weight, eps, group_size)
        factor = self._gate(self._grouped(gate, group_size), activation)
        return self._flat(self.layers.binary("PROD", normalised, factor), x.width)

    def _normalised(self, x: View, weight: str, eps: float, group_size: int) -> Node:
        """rms_norm before rounding, fp32 [B, S, groups, group_size]."""
        self._enter(weight)
        layers = self.layers
        wide = layers.cast(self._grouped(x, group_size), "float32")
        mean = layers.mean(layers.binary("PROD", wide, wide), 3)
        root = layers.unary("SQRT", layers.binary("SUM", mean, layers.floats([[[[eps]]]])))
        (size,) = self.host_weight(weight).shape
        scale = self._constant(weight, "float32", (1, 1, size // group_size, group_size))
        return layers.binary("PROD", layers.binary("PROD", wide, layers.unary("RECIP", root)), scale)

    def _grouped(self, x: View, group_size: int) -> Node:
        """[B, S, groups, group_size] in x's dtype."""
        return self.layers.reshape(self._slicer.node(x), (0, 0, x.width // group_size, group_size))

    def _flat(self, x: Node, width: int) -> View:
        """[B, S, groups, group_size] rounded to the model's dtype, as [B, S, width]."""
        return View.whole(self.layers.reshape(self.layers.cast(x, self.options.dtype), (0, 0, width)), width)

    def _gate(self, gate: Node, activation: str) -> Node:
        """silu or sigmoid of ``gate`` in fp32."""
        wide = self.layers.cast(gate, "float32")
        sigmoid = self.layers.activation("SIGMOID", wide)
        return sigmoid if activation == "sigmoid" else self.layers.binary("PROD", wide, sigmoid)

    def _gated(self, gate: View, x: View, activation: str) -> View:
        product = self.layers.binary(
            "PROD", self._gate(self._slicer.node(gate), activation), self.layers.cast(self._slicer.node(x), "float32")
        )
        return View.whole(self.layers.cast(product, self.options.dtype), x.width)

    def split(self, x: View, sizes: Sequence[int]) -> list[View]:
        require(sum(sizes) == x.width, f"sizes {list(sizes)} add up to {sum(sizes)}; x has {x.width} features")
        ends = np.cumsum([0, *sizes]).tolist()
        return [x.part(start, size) for start, size in zip(ends, sizes)]

    def add(self, x: View, y: View) -> View:
        return View.whole(self.layers.binary("SUM", self._slicer.node(x), self._slicer.node(y)), x.width)

    def silu_mul(self, gate: View, x: View) -> View:
        return self._gated(gate, x, "silu")

    def sigmoid_mul(self, gate: View, x: View) -> View:
        return self._gated(gate, x, "sigmoid")

    def relu2(self, x: View) -> View:
        positive = self.layers.activation("RELU", self._slicer.node(x))
        return View.whole(self.layers.binary("PROD", positive, positive), x.width)

    def rope(self, x: View, *, head_dim: int, rotary_dim: int, theta: float) -> View:
        layers = self.layers
        cos, sin, partner = self._rotation(head_dim, rotary_dim, theta)
        heads = layers.reshape(self._slicer.node(x), (0, 0, x.width // head_dim, head_dim))
        turned = layers.binary("PROD", layers.cast(heads, "float32"), cos)
        other = layers.binary("PROD", layers.cast(layers.gather(heads, partner, 3), "float32"), sin)
        rotated = layers.cast(layers.binary("SUM", turned, other), self.options.dtype)
        return View.whole(layers.reshape(rotated, (0, 0, x.width)), x.width)

    def _rotation(self, head_dim: int, rotary_dim: int, theta: float) -> tuple[Node, Node, Node]:
        """Factors of a channel and of its partner, fp32 [B, S, 1, head_dim], and every channel's partner [head_dim].

        Tables over all positions hold one column per pair and one of the angle 0 for the channels that do not turn.
        """
        key = (head_dim, rotary_dim, theta)
        if key not in self._rotations:
            layers, half = self.layers, rotary_dim // 2
            scope, layers.scope = layers.scope, "rotation/"
            # numpy's fp32 power is off by a bit at times, which far positions multiply: fp64, rounded once.
            frequencies = (float(theta) ** -(np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
            positions = np.arange(self.options.max_positions, dtype=np.float32)
            angles = np.zeros((self.options.max_positions, half + 1), np.float32)
            angles[:, :half] = positions[:, None] * frequencies
            channel = np.arange(head_dim)
            pair = layers.integers(np.where(channel < rotary_dim, channel % half, half))
            moved = np.where(channel < half, channel + half, channel - half)
            partner = layers.integers(np.where(channel < rotary_dim, moved, channel))
            sign = layers.floats(np.where(channel < half, -1.0, 1.0)[None, None, None])
            index = layers.input("positions", (ROWS, TOKENS))
            tables = []
            for label, values in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                table = self._fp32(f"rotation.{rotary_dim}.{theta}.{label}", values)
                spread = layers.gather(layers.gather(table, index, 0), pair, 2)
                tables.append(layers.reshape(spread, (0, 0, 1, head_dim)))
            self._rotations[key] = (tables[0], layers.binary("PROD", tables[1], sign), partner)
            layers.scope = scope
        return self._rotations[key]

    # Operations with memory.

    def causal_conv(self, layer: int, x: View, weight: str, bias: str | None = None) -> View:
        self._enter(weight)
        constants = {}
        if self._uses_plugins:
            named = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            constants = {key: self._constant(name, self.options.dtype) for key, name in named.items()}
        return View.whole(self._replay.conv(layer, x, constants), x.width)

    def replay_mamba2(
        self,
        layer: int,
        x: View,
        dt: View,
        b: View,
        c: View,
        z: View | None,
        *,
        a_log: str,
        d: str,
        dt_bias: str,
    ) -> View:
        self._enter(a_log)
        data = {"x": x, "dt": dt, "B": b, "C": c}
        if z is not None:
            data["z"] = z
        constants: dict[str, Node] = {}
        if self._uses_plugins:
            decay = self._fp32(f"{a_log.rpartition('.')[0]}.A", -np.exp(self.host_weight(a_log).to_float32()))
            constants = {"A": decay, "D": self._constant(d, "float32"), "dt_bias": self._constant(dt_bias, "float32")}
        spec = self._replay.spec
        fields = {
            "dt_softplus": int(spec.dt_softplus),
            "dt_min": spec.dt_min,
            "dt_max": spec.dt_max,
            "z_enabled": int(z is not None),
        }
        return View.whole(self._replay.recurrence("ReplayMamba2", layer, data, constants, fields), x.width)

    def replay_gated_delta(
        self, layer: int, q: View, k: View, v: View, a: View, b: View, *, a_log: str, dt_bias: str
    ) -> View:
        self._enter(a_log)
        data = {"q": q, "k": k, "v": v, "a": a, "b": b}
        spec = self._replay.spec
        constants: dict[str, Node] = {}
        if self._uses_plugins:
            size = self.host_weight(dt_bias).array.size
            constants = {
                "A_log": self._constant(a_log, "float32"),
                "dt_bias": self._constant(dt_bias, "float32", (size,)),
            }
        fields: dict[str, Any] = {"kind": KIND_CODES[spec.kind], "qk_l2norm": int(spec.qk_l2norm)}
        if spec.kind == KIMI_DELTA:
            fields.update(gate_bounded=int(spec.gate == "bounded"), gate_lower_bound=spec.gate_lower_bound)
        return View.whole(self._replay.recurrence("ReplayGatedDelta", layer, data, constants, fields), v.width)

    @property
    def _uses_plugins(self) -> bool:
        return self.options.replay == PLUGIN

    def attention(self, layer: int, q: View, k: View, v: View, *, scale: float) -> View:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        shape = KVShape(2, kv_heads, self.config.head_dim)
        return self._attend(layer, q, [k, v], shape, heads // kv_heads, scale)

    def latent_attention(self, layer: int, q: View, latent: View, shared: View, *, kv_up: str, scale: float) -> View:
        # q . [U c | s] = [U^T q_1 | q_2] . [c | s] and sum p W c = W sum p c: one kept vector serves all heads.
        self._enter(kv_up)
        layers, dtype, heads = self.layers, self.options.dtype, self.config.num_attention_heads
        own, rank, kept_dim = self.config.head_dim - shared.width, latent.width, latent.width + shared.width
        up = self.host_weight(kv_up).to_float32().reshape(heads, -1, rank)
        into = np.zeros((heads, own + shared.width, kept_dim), np.float32)
        into[:, :own, :rank] = up[:, :own]
        into[:, own:, rank:] = np.eye(shared.width)
        out_of = np.zeros((heads, kept_dim, up.shape[1] - own), np.float32)
        out_of[:, :rank] = up[:, own:].transpose(0, 2, 1)
        matrices = []
        for label, matrix in (("queries", into), ("values", out_of)):
            matrices.append(layers.weight(f"{kv_up}.{label}", HostWeight(matrix, "float32").cast(dtype)))
        queries = self._per_head(self._slicer.node(q), matrices[0], into.shape)
        kept = layers.concat([self._slicer.node(latent), self._slicer.node(shared)], 2)
        mixed = self._attend(layer, queries, [View.whole(kept, kept_dim)], KVShape(1, 1, kept_dim), heads, scale)
        return self._per_head(mixed.node, matrices[1], out_of.shape)

    def _per_head(self, x: Node, matrices: Node, shape: tuple[int, ...]) -> View:
        """Every head's features times the head's own matrix: x [B, S, H*m], matrices [H, m, n] -> [B, S, H*n].

        One product of [H, B*S, m] and [H, m, n]: a matrix that is broadcast over rows as well as batched by heads is
        slow in TensorRT 8.6, and cannot be captured in a CUDA graph.
        """
        layers, (heads, size, out) = self.layers, shape
        product = self._product(layers.reshape(x, (-1, heads, size), then=(1, 0, 2)), matrices)
        rows = layers.reshape(layers.cast(product, self.options.dtype), then=(1, 0, 2))
        return View.whole(layers.reshape_to(rows, self._slicer.sizes(heads * out)), heads * out)

    def _attend(
        self, layer: int, q: View, kept: Sequence[View], shape: KVShape, queries_per_key: int, scale: float
    ) -> View:
        if self._attention is None:
            self._attention = Attention(self.layers, self.options)
        tokens = [self._slicer.node(part) for part in kept]
        out = self._attention.attend(
            layer, self._slicer.node(q), tokens, shape, queries_per_key=queries_per_key, scale=scale
        )
        return View.whole(out, q.width)

    # The end of the network.

    def select_last(self, x: View) -> View:
        """The tokens whose logits are asked for: input ``logit_index`` [B, S_out]."""
        self.layers.scope = "logits/"
        index = self.layers.input("logit_index", (ROWS, LOGITS))
        return View.whole(self.layers.gather(self._slicer.node(x), index, 1, batch_axes=1), x.width)

    def to_float32(self, x: View) -> View:
        return View.whole(self.layers.cast(self._slicer.node(x), "float32"), x.width)
