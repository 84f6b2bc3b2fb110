"""Recorded: the tensor names that the Python session wants, and the arguments of the two runners' from_dir."""

from __future__ import annotations

from typing import Any


def expected_tensor_names(layer_types: list[str], conv1d_plugin: bool = True, packed: bool = True) -> set[str]:
    """What GenerationSession compares an engine's tensor names with: paged state, paged KV cache, no extras."""
    attention = "attention" in layer_types
    names = {"input_ids", "logits", "last_token_ids", "slot_mapping"}
    for i, kind in enumerate(layer_types):
        if kind == "recurrent":
            names |= {f"conv_state_ptr_{i}", f"rnn_state_ptr_{i}"}
    if attention:
        names |= {"position_ids", "cache_indirection", "kv_cache_block_offsets", "host_kv_cache_block_offsets"}
        names |= {"host_kv_cache_pool_pointers", "host_kv_cache_pool_mapping", "sequence_length", "context_lengths"}
        names |= {"host_past_key_value_lengths", "host_request_types", "host_sink_token_length"}
        names |= {"host_runtime_perf_knobs", "host_context_progress", "host_max_attention_window_sizes"}
        return names | ({"host_context_lengths"} if packed else set())
    names.add("host_request_types")
    return names | ({"host_context_lengths"} if conv1d_plugin and packed else set())


class _Runner:
    calls: list[dict[str, Any]] = []

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class ModelRunner(_Runner):
    @classmethod
    def from_dir(cls, engine_dir: str, lora_dir: Any = None, rank: int = 0, debug_mode: bool = False) -> ModelRunner:
        return cls(engine_dir=engine_dir, rank=rank, debug_mode=debug_mode)


class ModelRunnerCpp(_Runner):
    @classmethod
    def from_dir(
        cls,
        engine_dir: str,
        *,
        rank: int = 0,
        max_batch_size: int | None = None,
        max_beam_width: int | None = None,
        kv_cache_enable_block_reuse: bool = False,
        kv_cache_free_gpu_memory_fraction: float | None = None,
        enable_chunked_context: bool = False,
    ) -> ModelRunnerCpp:
        return cls(
            engine_dir=engine_dir,
            kv_cache_enable_block_reuse=kv_cache_enable_block_reuse,
            enable_chunked_context=enable_chunked_context,
            max_batch_size=max_batch_size,
        )
