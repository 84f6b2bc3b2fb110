"""TensorRT-LLM 1.2.1: hybrid engines with ReplaySSM layers for its TensorRT backend (docs/trtllm.md).

    budget       does a slot fit the state pools that TensorRT-LLM sizes from config.json
    functional   replay_mamba2, replay_gated_delta, replay_causal_conv on tensorrt_llm's Tensors
    network_ops  the ops vocabulary as tensorrt_llm layers, so that models/decoder.py emits itself
    hybrid       ReplayHybridForCausalLM; model.py is the file for ``trtllm-build --model_cls_file``
    build        checkpoint directory -> engine directory
    load         sessions and the LLM API over an engine directory

Importing this package takes neither tensorrt_llm nor tensorrt. What needs them says so with a ReplayError.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MODEL_CLS_FILE", "MODEL_CLS_NAME", "ReplayHybridForCausalLM"]

#: File name beside this one, and class name, for ``trtllm-build --model_cls_file ... --model_cls_name ...``.
MODEL_CLS_FILE = "model.py"
MODEL_CLS_NAME = "ReplayHybridForCausalLM"


def __getattr__(name: str) -> Any:
    """The model class on first use: defining it needs tensorrt_llm. Raises ReplayError where that is missing."""
    if name == MODEL_CLS_NAME:
        from .hybrid import ReplayHybridForCausalLM

        return ReplayHybridForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
