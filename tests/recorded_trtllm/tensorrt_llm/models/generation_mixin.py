"""Recorded: profile ranges and the attention inputs of a paged KV cache, packed input, beam width 1."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import tensorrt as trt

from ..bindings import KVCacheType
from ..functional import Tensor


def _default_range(most: int, offset: int = 0) -> list[int]:
    return [1 + offset, (most + 1) // 2 + offset, most + offset]


class GenerationMixin:
    @staticmethod
    def get_profiles_ranges(
        *,
        max_batch_size: int,
        max_beam_width: int,
        max_input_len: int,
        max_num_tokens: int,
        max_draft_len: int,
        opt_batch_size: int,
        opt_num_tokens: int | None,
        enable_ctx_gen_opt_profiles: bool,
        multiple_profiles: bool,
        kv_cache_type: KVCacheType,
    ) -> tuple[int, dict[str, Any]]:
        assert max_beam_width == 1 and max_draft_len == 0 and not enable_ctx_gen_opt_profiles and not multiple_profiles
        assert kv_cache_type is KVCacheType.PAGED
        best = min(max_num_tokens, max_batch_size) if opt_num_tokens is None else opt_num_tokens
        batch = [1, opt_batch_size, max_batch_size] if opt_batch_size else _default_range(max_batch_size)
        lengths = [[1, 1, max_input_len]]
        return 1, {
            "bb_range": [batch],
            "bbd_range": [batch],
            "inlen_range": lengths,
            "position_ids_inlen_range": lengths,
            "num_tokens_range": [[1, best, max_num_tokens]],
            "position_ids_num_tokens_range": [[1, best, max_num_tokens]],
        }

    def prepare_attention_inputs(
        self,
        *,
        max_batch_size: int,
        max_beam_width: int,
        max_input_len: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_size: int,
        num_layers: int,
        kv_dtype: trt.DataType,
        kv_cache_type: KVCacheType,
        num_profiles: int,
        remove_input_padding: bool,
        use_gpt_attention_plugin: bool,
        tokens_per_block: int,
        mapping: Any,
        attn_layer_idx: list[int] | None = None,
    ) -> dict[str, Any]:
        assert max_beam_width == 1 and num_profiles == 1 and remove_input_padding and use_gpt_attention_plugin
        assert kv_cache_type is KVCacheType.PAGED and isinstance(kv_dtype, trt.DataType)
        if attn_layer_idx is not None:
            # The range below holds local counts; the index of its first attention layer is what the real one looks up.
            next(i for i in range(num_layers) if i in attn_layer_idx)
        batch, lengths = _default_range(max_batch_size), _default_range(max_seq_len)
        blocks = [math.ceil(n / tokens_per_block) for n in lengths]

        def made(name: str, dtype: trt.DataType, shape: list[int], **ranges: Any) -> Tensor:
            return Tensor(name, dtype, shape, OrderedDict((key, [value]) for key, value in ranges.items()))

        def per_row(name: str) -> Tensor:
            return made(name, trt.int32, [-1], batch_size_beam_width=batch)

        tensors: dict[str, Any] = {"past_key_value": [None] * num_layers, "attention_mask": None}
        for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
            tensors[name] = made(name, trt.int32, [1, -1, 2, -1], num_kv_cache_pools=1, batch_size_beam_width=batch,
                                 kv=2, max_blocks_per_seq=blocks)  # fmt: skip
        tensors["host_kv_cache_pool_pointers"] = made(
            "host_kv_cache_pool_pointers", trt.int64, [1, 2], num_pools_layers=1, num_pools_kv=2
        )
        tensors["host_kv_cache_pool_mapping"] = made(
            "host_kv_cache_pool_mapping",
            trt.int32,
            [num_layers, 2],
            pools_mapping=num_layers,
            layer_cache_pool_locator=2,
        )
        rows = ("sequence_length", "host_request_types", "host_past_key_value_lengths", "context_lengths",
                "host_context_lengths")  # fmt: skip
        tensors.update({name: per_row(name) for name in rows})
        tensors["host_runtime_perf_knobs"] = made("host_runtime_perf_knobs", trt.int64, [16], perf_knob_size=16)
        tensors["host_context_progress"] = made("host_context_progress", trt.int64, [1], context_progress_size=1)
        tensors["host_max_attention_window_sizes"] = made(
            "host_max_attention_window_sizes", trt.int32, [num_layers], num_layers=num_layers
        )
        tensors["host_sink_token_length"] = made("host_sink_token_length", trt.int32, [1], scalar=1)
        tensors["cache_indirection"] = made(
            "cache_indirection", trt.int32, [-1, -1, -1], batch_size_cache=batch, beam_width=1, max_seq_len=lengths
        )
        return tensors
