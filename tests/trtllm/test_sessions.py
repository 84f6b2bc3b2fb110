"""Generation with real engines: the Python GenerationSession, the C++ executor, the LLM API.

Oracle: the torch backend over the same weights. Every token that the engine chose must have, in a forward pass of the
torch backend over the engine's own output, a logit within TOLERANCE (of the largest logit) of the best one: tokens are
equal but for ties within rounding. 300 new tokens cross many flushes of window 16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from trtllm_cases import CASES, VOCAB_SIZE

from trtllm_replayssm.models.checkpoint import load_checkpoint
from trtllm_replayssm.trtllm import load

Engines = Callable[..., tuple[Path, Path]]
TOLERANCE = {"float32": 1e-4, "bfloat16": 16 * 2**-8, "float16": 16 * 2**-11}
NEW_TOKENS = 300
PROMPTS = [oracles.sequence(n, n, VOCAB_SIZE) for n in (1, 7, 33, 60)]


def worst_choice(checkpoint: Path, tokens: list[int], prompt: int) -> float:
    """Largest distance of a chosen token's logit from the best one, relative to the largest logit."""
    config, weights = load_checkpoint(checkpoint, device="cuda")
    state = {"window": 16, "slots": 1, "spec_len": 1, "max_positions": 512, "dtype": config.dtype, "device": "cuda"}
    runner = oracles.Runner(config, weights, **state)
    batch = oracles.Batch.scan([0], [len(tokens) - 1], device="cuda")
    ops = oracles.TorchOps(runner.weights, runner.state, batch)
    with torch.inference_mode():
        ids = torch.tensor(tokens[:-1], device="cuda")
        logits = runner.decoder.forward(ops, ids, all_logits=True)[prompt - 1 :]
    assert torch.isfinite(logits).all()
    chosen = logits.gather(1, torch.tensor(tokens[prompt:], device="cuda")[:, None])[:, 0]
    return float((logits.amax(1) - chosen).max() / logits.abs().max())


def generate(runner: Any, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy tokens, prompts included, without an end token."""
    ids = [torch.tensor(p, dtype=torch.int32) for p in prompts]
    with torch.inference_mode():
        out = runner.generate(ids, max_new_tokens=new_tokens, end_id=VOCAB_SIZE + 7, pad_id=0, top_k=1)
    return [row[0].tolist()[: len(p) + new_tokens] for row, p in zip(out, prompts, strict=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("opened", [load.generation_session, load.model_runner_cpp])
def test_tokens(engines: Engines, opened: Any, case: str, dtype: str) -> None:
    checkpoint, engine = engines(case, dtype)
    runner = opened(engine)
    for tokens, prompt in zip(generate(runner, PROMPTS), PROMPTS, strict=True):
        assert tokens[: len(prompt)] == prompt and len(tokens) == len(prompt) + NEW_TOKENS
        assert worst_choice(checkpoint, tokens, len(prompt)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", CASES)
def test_float32(engines: Engines, case: str) -> None:
    checkpoint, engine = engines(case, "float32")
    for tokens, prompt in zip(generate(load.model_runner_cpp(engine), PROMPTS, 100), PROMPTS, strict=True):
        assert worst_choice(checkpoint, tokens, len(prompt)) <= TOLERANCE["float32"]


def test_window_does_not_change_tokens(engines: Engines) -> None:
    """Window 1 is conventional decoding."""
    checkpoint, conventional = engines("nemotron_h", "float16", 1)
    _, replay = engines("nemotron_h", "float16", 16)
    first, second = (generate(load.model_runner_cpp(engine), PROMPTS) for engine in (conventional, replay))
    for a, b, prompt in zip(first, second, PROMPTS, strict=True):
        assert a == b or max(worst_choice(checkpoint, t, len(prompt)) for t in (a, b)) <= TOLERANCE["float16"]


def test_slots_are_used_again(engines: Engines) -> None:
    """More requests than slots: a slot's old bytes must not reach its next sequence."""
    _, engine = engines("nemotron_h")
    runner = load.model_runner_cpp(engine)
    alone = generate(runner, [PROMPTS[2]], 64)[0]
    for _ in range(5):
        generate(runner, PROMPTS, 40)
    assert generate(runner, [PROMPTS[2]], 64)[0] == alone


def test_llm_api_with_requests_that_come_and_go(engines: Engines, tmp_path: Path) -> None:
    from tensorrt_llm import SamplingParams
    from test_serve import write_tokenizer

    checkpoint, engine = engines("qwen3_5")
    llm = load.llm(engine, tokenizer=str(write_tokenizer(tmp_path)))
    lengths = [3 + 17 * i % 120 for i in range(12)]
    params = [SamplingParams(max_tokens=n, end_id=-1, temperature=0.0) for n in lengths]
    prompts = [oracles.sequence(1 + 5 * i, i, VOCAB_SIZE) for i in range(12)]
    results = llm.generate(prompts, params)
    for result, prompt, length in zip(results, prompts, lengths, strict=True):
        tokens = [*prompt, *result.outputs[0].token_ids]
        assert len(tokens) == len(prompt) + length
        assert worst_choice(checkpoint, tokens, len(prompt)) <= TOLERANCE["bfloat16"]
