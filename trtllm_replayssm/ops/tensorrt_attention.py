"""Attention of an emitted network: over what the KV cache holds, read in place, and the call's own tokens.

Keys of a row are its first ``bound`` cached positions, then the call's S tokens; N = bound + S. Every key has a place:
    cached position p    -1 if p < past length, else hidden
    token j              j if j < the row's tokens, else hidden
and the query of token s sees the keys whose place is <= s. Scores, softmax and the sum over values are fp32.

Queries that share a key head are rows of one matrix product, so keys are not repeated: [B, kv_heads, S*R, N] with
R = heads / kv_heads. The cache is read by one gather of whole head rows; hidden positions are read at the last seen
one, so that memory beyond a row's length is not touched. What is hidden, pad tokens of the call included, is replaced
by 0, whatever it holds: an infinite or NaN key would reach every query through a score that is only lowered.

Masks and addresses are made of network inputs and constants alone: TensorRT computes with shapes on the host, and what
layers read of that would be copied to the device in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .tensorrt_io import BOUND, ROWS, SLOTS, TOKENS, NetworkOptions
from .tensorrt_layers import Layers, Node

#: Place of a key that no query sees.
_HIDDEN = 1 << 30
#: What the score of a pair that must not count gets: exp of it is 0, and no sum of it overflows. The second is for
#: networks whose precisions may be a wish: as an fp16 number the first is infinite, and its product with 0 is NaN.
_HIDDEN_SCORE, _HIDDEN_SCORE_FP16 = -1e30, -6e4


class KVShape(NamedTuple):
    """What a layer keeps per token: ``parts`` (keys and values: 2; one tensor that is both: 1) of heads * head_dim."""

    parts: int
    heads: int
    head_dim: int


class Attention:
    """What the attention layers of one network share: masks and cache addresses, made once.

    Args:
        layers: the network. options: its dtype, and max_positions, the length of the caches.
    """

    def __init__(self, layers: Layers, options: NetworkOptions) -> None:
        self._layers = layers
        self._max_positions = options.max_positions
        rounds = layers.api.asks_for_precision(options.dtype)
        self._hidden_score = _HIDDEN_SCORE_FP16 if rounds else _HIDDEN_SCORE
        scope, layers.scope = layers.scope, "attention/"
        positions = layers.input("positions", (ROWS, TOKENS))
        zero = layers.integers([[0]])
        past = layers.gather(positions, layers.integers([0]), 1)  # [B, 1]
        index = layers.reshape(layers.input("kv_index", (BOUND,)), (1, -1))  # [1, bound]
        seen = layers.binary("GREATER", past, index)  # [B, bound]
        hidden, before = layers.integers([[_HIDDEN]]), layers.integers([[-1]])
        token = layers.input("token_index", (TOKENS,))  # [S]
        lengths = layers.reshape(layers.input("last_token_ids", (ROWS,)), (-1, 1))  # [B, 1]
        row = layers.reshape(token, (1, -1))  # [1, S]
        own = layers.select(layers.binary("GREATER", lengths, row), row, hidden)  # [B, S]
        places = layers.concat([layers.select(seen, before, hidden), own], 1)  # [B, N]
        self._places = layers.reshape(places, (0, 1, 1, -1))  # [B, 1, 1, N]
        self._token = layers.reshape(token, (-1, 1))  # [S, 1]
        self._shown = layers.reshape(layers.binary("GREATER", hidden, places), (0, 1, -1, 1))  # [B, 1, N, 1]
        last = layers.binary("MAX", layers.binary("SUM", past, before), zero)
        self._read = layers.reshape(layers.binary("MIN", index, last), (0, 1, -1))  # [B, 1, bound]
        slots = layers.reshape(layers.input("slot_mapping", (ROWS,)), (-1, 1, 1))  # [B, 1, 1]
        minus, nothing = layers.integers([[[-1]]]), layers.integers([[[0]]])
        self._live = layers.binary("GREATER", slots, minus)
        self._slots = layers.binary("MAX", slots, nothing)
        self._hidden_pairs: dict[int, Node] = {}
        self._addresses: dict[tuple[KVShape, int], Node] = {}
        layers.scope = scope

    def attend(
        self, layer: int, q: Node, kept: Sequence[Node], shape: KVShape, *, queries_per_key: int, scale: float
    ) -> Node:
        """Softmax attention of one layer; adds its cache as an input and its tokens' keys and values as an output.

        Args:
            layer: stateful layer. q: [B, S, kv_heads * R * head_dim], R = ``queries_per_key``.
            kept: per part of ``shape`` the call's tokens [B, S, kv_heads * head_dim].

        Returns:
            [B, S, kv_heads * R * head_dim] in q's dtype; zeros in rows without a slot.
        """
        layers = self._layers
        parts, heads, size = shape
        cache_shape = (SLOTS, parts, heads, self._max_positions, size)
        cache = layers.input(f"kv_cache_{layer}", cache_shape, role="kv_cache", dtype=q.dtype, layer=layer)
        new = layers.concat([layers.reshape(part, (0, 0, 1, heads, size)) for part in kept], 2)
        layers.output(new, f"new_kv_{layer}", (ROWS, TOKENS, parts, heads, size), role="new_kv", layer=layer)
        flat = layers.reshape(cache, (-1, size))
        tokens = [self._kept(flat, part, kept[part], shape) for part in range(parts)]
        keys, values = tokens[0], tokens[-1]

        split = layers.reshape(q, (0, 0, heads, queries_per_key, size), then=(0, 2, 1, 3, 4))
        rows = layers.cast(layers.reshape(split, (0, 0, -1, size)), "float32")  # [B, kv_heads, S*R, head_dim]
        rows = layers.binary("PROD", rows, layers.floats([[[[scale]]]]))
        scores = layers.binary("SUM", layers.matmul(rows, keys, transpose_b=True), self._hidden(queries_per_key))
        out = layers.cast(layers.matmul(layers.softmax(scores, 3), values), q.dtype)
        split = layers.reshape(out, (0, 0, -1, queries_per_key, size), then=(0, 2, 1, 3, 4))
        joined = layers.reshape(split, (0, 0, heads * queries_per_key * size))
        return layers.select(self._live, joined, layers.cast(layers.floats([[[0.0]]]), q.dtype))

    def _kept(self, flat: Node, part: int, tokens: Node, shape: KVShape) -> Node:
        """Keys or values fp32 [B, kv_heads, N, head_dim]: cached ones from ``flat`` [rows, head_dim], then the new."""
        layers = self._layers
        cached = layers.gather(flat, self._address(shape, part), 0)
        new = layers.reshape(tokens, (0, 0, shape.heads, shape.head_dim), then=(0, 2, 1, 3))
        kept = layers.concat([cached, new], 2)
        nothing = layers.cast(layers.floats([[[[0.0]]]]), kept.dtype)
        return layers.cast(layers.select(self._shown, kept, nothing), "float32")

    def _address(self, shape: KVShape, part: int) -> Node:
        """Rows of the flat cache that hold one part of the cached positions: int32 [B, kv_heads, bound]."""
        key = (shape, part)
        if key not in self._addresses:
            layers, length = self._layers, self._max_positions
            per_slot = layers.integers([[[shape.parts * shape.heads * length]]])
            first = (np.arange(shape.heads) + part * shape.heads) * length
            head = layers.binary(
                "SUM", layers.binary("PROD", self._slots, per_slot), layers.integers(first[None, :, None])
            )
            self._addresses[key] = layers.binary("SUM", head, self._read)
        return self._addresses[key]

    def _hidden(self, queries_per_key: int) -> Node:
        """What is added to the score of a pair, fp32 [B, 1, S*R, N]: 0, or far below it where it must not count."""
        if queries_per_key not in self._hidden_pairs:
            layers = self._layers
            copies = layers.binary("SUM", self._token, layers.integers(np.zeros((1, queries_per_key), np.int32)))
            query = layers.reshape(copies, (1, 1, -1, 1))
            hidden = layers.cast(layers.binary("GREATER", self._places, query), "float32")
            score = layers.floats([[[[self._hidden_score]]]])
            self._hidden_pairs[queries_per_key] = layers.binary("PROD", hidden, score)
        return self._hidden_pairs[queries_per_key]
