"""Recorded: the functions that are used. Each appends one layer, under the typing rules of a strongly typed network."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorrt as trt
import torch

from ._common import default_net, default_trtnet

DTYPES = {
    "float32": trt.float32,
    "float16": trt.float16,
    "bfloat16": trt.bfloat16,
    "int32": trt.int32,
    "int64": trt.int64,
}


class PositionEmbeddingType(enum.IntEnum):
    learned_absolute = 0
    rope_gpt_neox = 2

    def is_rope(self) -> bool:
        return self is PositionEmbeddingType.rope_gpt_neox

    @staticmethod
    def from_string(s: str) -> PositionEmbeddingType:
        return PositionEmbeddingType[s]

    def __str__(self) -> str:
        return self.name


class Tensor:
    """A network input when made with a name; else the output of a layer."""

    def __init__(self, name: str | None = None, dtype: Any = None, shape: Any = None, dim_range: Any = None) -> None:
        if name is None:
            return
        assert isinstance(dim_range, OrderedDict) and len(dim_range) == len(shape), name
        for ranges in dim_range.values():
            for one in ranges:
                low, best, high = (one, one, one) if isinstance(one, int) else one
                assert 0 <= low <= best <= high, (name, one)
        assert len({len(ranges) for ranges in dim_range.values()}) == 1, name
        self.trt_tensor = default_trtnet().add_input(name=name, shape=shape, dtype=dtype)
        default_net().input_ranges[name] = dim_range

    @property
    def dtype(self) -> trt.DataType:
        return self.trt_tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.trt_tensor.shape

    def size(self, dim: int) -> int:
        return self.trt_tensor.shape[dim]

    def mark_output(self, name: str, dtype: Any) -> None:
        tensor = cast(self, dtype)
        tensor.trt_tensor.name = name
        default_trtnet().mark_output(tensor.trt_tensor)

    def __add__(self, other: Any) -> Tensor:
        return _elementwise("add", self, other)

    def __mul__(self, other: Any) -> Tensor:
        return _elementwise("mul", self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return _elementwise("div", self, other)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("== adds a layer; compare with `is`")

    __hash__ = object.__hash__

    def view(self, shape: Sequence[int]) -> Tensor:
        assert list(shape).count(-1) <= 1
        made = tuple(self.shape[i] if n == 0 else n for i, n in enumerate(shape))
        return _layer("shuffle", [self], self.dtype, made, dims=list(shape))

    def mean(self, dim: tuple[int, ...], keepdim: bool = False) -> Tensor:
        assert dim == (-1,) and keepdim
        return _layer("mean", [self], self.dtype, (*self.shape[:-1], 1))


def _create_tensor(trt_tensor: trt.ITensor, producer: trt.ILayer) -> Tensor:
    assert isinstance(trt_tensor, trt.ITensor) and isinstance(producer, trt.ILayer)
    tensor = Tensor()
    tensor.trt_tensor, tensor.producer = trt_tensor, producer
    return tensor


def _layer(kind: str, inputs: list[Tensor], dtype: trt.DataType, shape: tuple[int, ...], **attributes: Any) -> Tensor:
    layer = default_trtnet().record(kind, [t.trt_tensor for t in inputs], attributes, dtype, shape)
    return _create_tensor(layer.get_output(0), layer)


def _elementwise(op: str, left: Tensor, right: Any) -> Tensor:
    if isinstance(right, float):
        return _layer("elementwise", [left], left.dtype, left.shape, op=op, scalar=right)
    assert isinstance(right, Tensor), type(right)
    assert left.dtype == right.dtype, f"strongly typed: {op} of {left.dtype!r} and {right.dtype!r}"
    rank = max(len(left.shape), len(right.shape))
    shapes = [(1,) * (rank - len(t.shape)) + t.shape for t in (left, right)]
    for a, b in zip(*shapes, strict=True):
        assert a == b or 1 in (a, b), f"{op} of shapes {shapes}"
    made = tuple(b if a == 1 else a for a, b in zip(*shapes, strict=True))
    return _layer("elementwise", [left, right], left.dtype, made, op=op)


def cast(input: Tensor, dtype: Any) -> Tensor:
    wanted = DTYPES[dtype] if isinstance(dtype, str) else dtype
    return input if input.dtype == wanted else _layer("cast", [input], wanted, input.shape, to=int(wanted))


def _floating(kind: str, input: Tensor) -> Tensor:
    assert input.dtype in (trt.float32, trt.float16, trt.bfloat16)
    return _layer(kind, [input], input.dtype, input.shape)


def sigmoid(input: Tensor) -> Tensor:
    return _floating("sigmoid", input)


def relu(input: Tensor) -> Tensor:
    return _floating("relu", input)


def exp(input: Tensor) -> Tensor:
    return _floating("exp", input)


def sqrt(input: Tensor) -> Tensor:
    return _floating("sqrt", input)


def constant(ndarray: np.ndarray) -> Tensor:
    assert isinstance(ndarray, np.ndarray) and ndarray.flags["C_CONTIGUOUS"] and ndarray.dtype == np.float32
    return _layer("constant", [], trt.float32, ndarray.shape, value=torch.from_numpy(ndarray.copy()))


def shape(input: Tensor, dim: int) -> Tensor:
    """A tensor of rank 0."""
    return _layer("shape", [input], trt.int64, (), dim=dim, known=input.shape[dim])


def concat(inputs: Sequence[Any], dim: int = 0) -> Tensor:
    if all(isinstance(t, Tensor) and t.shape for t in inputs):
        assert len({t.dtype for t in inputs}) == 1
        made = list(inputs[0].shape)
        made[dim] = sum(t.shape[dim] for t in inputs)
        return _layer("concat", list(inputs), inputs[0].dtype, tuple(made), dim=dim)
    parts = [part if isinstance(part, int) else None for part in inputs]
    return _layer("sizes", [t for t in inputs if isinstance(t, Tensor)], trt.int64, (len(parts),), parts=parts)


def slice(input: Tensor, starts: Sequence[int], sizes: Tensor) -> Tensor:
    parts = sizes.producer.attributes["parts"]
    assert len(starts) == len(parts) == len(input.shape)
    for start, part, have in zip(starts, parts, input.shape, strict=True):
        assert part is None or start + part <= have, "slice out of range"
    made = tuple(-1 if part is None else part for part in parts)
    return _layer("slice", [input, sizes], input.dtype, made, starts=list(starts))


def matmul(input: Tensor, mat2: Tensor, transa: bool = False, transb: bool = False) -> Tensor:
    assert input.dtype == mat2.dtype, f"strongly typed: product of {input.dtype!r} and {mat2.dtype!r}"
    assert not transa and transb and input.shape[-1] == mat2.shape[-1], (input.shape, mat2.shape)
    return _layer("matmul", [input, mat2], input.dtype, (*input.shape[:-1], mat2.shape[0]))


def embedding(input: Tensor, weight: Tensor) -> Tensor:
    assert input.dtype == trt.int32
    return _layer("embedding", [input, weight], weight.dtype, (*input.shape, weight.shape[1]))


def gather_last_token_logits(hidden_states: Tensor, last_token_ids: Tensor, remove_input_padding: bool) -> Tensor:
    assert remove_input_padding and last_token_ids.dtype == trt.int32
    return _layer("gather_last", [hidden_states, last_token_ids], hidden_states.dtype, (-1, hidden_states.shape[1]))


class RopeEmbeddingUtils:
    @staticmethod
    def create_sinusoidal_positions_for_attention_plugin(
        num_pos: int, dim: int, theta: float = 10000.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inverse frequencies [dim/2] and (cos, sin) pairs [1, num_pos * dim]."""
        inv_freq = (1.0 / theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
        angles = np.arange(num_pos, dtype=np.float32)[:, None] * inv_freq
        return inv_freq, np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(1, -1).astype(np.float32)


_HOST_INT32 = (
    "host_past_key_value_lengths",
    "host_max_attention_window_sizes",
    "host_sink_token_length",
    "host_request_types",
    "host_kv_cache_block_offsets",
    "host_kv_cache_pool_mapping",
)


def gpt_attention(
    *,
    qkv: Tensor,
    past_key_value: Tensor | None,
    sequence_length: Tensor,
    host_past_key_value_lengths: Tensor,
    host_max_attention_window_sizes: Tensor,
    host_sink_token_length: Tensor,
    context_lengths: Tensor,
    cache_indirection: Tensor,
    host_request_types: Tensor,
    layer_idx: int,
    num_heads: int,
    num_kv_heads: int,
    hidden_size_per_head: int,
    q_scaling: float,
    rotary_embedding_dim: int = 0,
    rotary_embedding_base: float = 10000.0,
    rotary_embedding_max_positions: int = 1024,
    position_embedding_type: PositionEmbeddingType = PositionEmbeddingType.learned_absolute,
    rotary_inv_freq: Tensor | None = None,
    rotary_cos_sin: Tensor | None = None,
    max_context_length: int | None = None,
    kv_cache_block_offsets: Tensor | None = None,
    host_kv_cache_block_offsets: Tensor | None = None,
    host_kv_cache_pool_pointers: Tensor | None = None,
    host_kv_cache_pool_mapping: Tensor | None = None,
    host_context_lengths: Tensor | None = None,
    host_runtime_perf_knobs: Tensor | None = None,
    host_context_progress: Tensor | None = None,
) -> tuple[Tensor, None]:
    given = dict(locals())
    flags = default_net().plugin_config
    assert flags.gpt_attention_plugin and flags.paged_kv_cache and past_key_value is None
    assert isinstance(max_context_length, int)
    assert qkv.dtype == DTYPES[flags.gpt_attention_plugin]
    width = (num_heads + 2 * num_kv_heads) * hidden_size_per_head
    assert qkv.shape == (-1, width), qkv.shape
    for name in _HOST_INT32:
        assert given[name].dtype == trt.int32, name
    assert 0 <= layer_idx < host_kv_cache_pool_mapping.shape[0] == host_max_attention_window_sizes.shape[0]
    assert host_kv_cache_pool_pointers.dtype == host_runtime_perf_knobs.dtype == trt.int64
    assert host_context_progress.dtype == trt.int64 and cache_indirection.shape == (-1, -1, -1)
    if position_embedding_type.is_rope():
        assert rotary_inv_freq.shape == (rotary_embedding_dim // 2,)
        assert rotary_cos_sin.shape == (1, rotary_embedding_max_positions * rotary_embedding_dim)
    else:
        assert rotary_inv_freq is None and rotary_cos_sin is None and rotary_embedding_dim == 0
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float)) and value is not None}
    inputs = list(tensors)
    made = _layer("gpt_attention", list(tensors.values()), qkv.dtype, (-1, num_heads * hidden_size_per_head),
                  names=inputs, **numbers)  # fmt: skip
    return made, None
