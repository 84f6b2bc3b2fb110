"""Recorded: the LLM class over the TensorRT backend."""

from __future__ import annotations

from typing import Any


class LLM:
    def __init__(self, model: str, tokenizer: Any = None, kv_cache_config: Any = None, **kwargs: Any) -> None:
        self.arguments = {"model": model, "tokenizer": tokenizer, "kv_cache_config": kv_cache_config, **kwargs}
