"""Independent oracle: transformers' own model classes on tiny random configs, and the scenarios compared against them.

Every scenario returns max |logit difference| in fp32, inf where anything is not finite. All parameters are perturbed
(default initialisations are symmetric enough to hide a swapped tensor), attention is eager, and the training-time floor
that transformers puts under dt in Mamba-2 prefill is switched off, as in every inference engine.

tiny_hf_dir writes such a model as a published-format directory; make_oracle also loads it through our converter.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.models.checkpoint import convert, load_checkpoint
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import HybridDecoder
from trtllm_replayssm.ops.torch_ops import TorchOps
from trtllm_replayssm.runtime.state import Batch, ModelState

KINDS = ("nemotron_h", "qwen3_next", "qwen3_5", "kimi_linear")
TOLERANCE = 5e-5
STEPS = 32
RAGGED = (1, 7, 21)
MAX_POSITIONS = 96

_COMMON: dict[str, Any] = {"hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_KIMI_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense"] * 4,
    "num_key_value_heads": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_MAMBA2: dict[str, Any] = {
    "head_dim": 8,
    "hybrid_override_pattern": "M-M*M-",
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-5,
}


def hf_config(kind: str, vocab_size: int = 97, **changes: Any) -> Any:
    """The tiny transformers config of a kind; ``byte`` is nemotron_h with 256 tokens."""
    import transformers

    if kind == "byte":
        return hf_config("nemotron_h", 256, **changes)
    base = {"vocab_size": vocab_size, **_COMMON, **_ATTENTION}
    if kind == "nemotron_h":
        return transformers.NemotronHConfig(**{**base, **_MAMBA2, **changes})
    if kind == "qwen3_next":
        dense = {"mlp_only_layers": [0, 1, 2, 3]}
        return transformers.Qwen3NextConfig(**{**base, **_GATED_DELTA, **dense, **changes})
    if kind == "kimi_linear":
        return transformers.KimiLinearConfig(**{**base, **_KIMI_DELTA, **changes})
    assert kind == "qwen3_5", kind
    return transformers.Qwen3_5TextConfig(**{**base, **_GATED_DELTA, "tie_word_embeddings": False, **changes})


def hf_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of a kind with perturbed random weights, fp32, in eval mode."""
    import transformers

    config = hf_config(kind, **changes)
    names = {
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5": "Qwen3_5ForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM",
    }
    cls = getattr(transformers, names.get(kind, "NemotronHForCausalLM"))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls._from_config(config, attn_implementation="eager").eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_perturbed(name, parameter))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return model


def _perturbed(name: str, parameter: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(parameter)
    if name.endswith("A_log"):
        return noise * 0.7
    if name.endswith("dt_bias"):
        return noise - 0.5
    if name.endswith((".D", "norm.weight", "norm_f.weight")) or "layernorm" in name:
        return parameter + 0.2 * noise
    if "conv1d" in name:
        return 0.4 * noise
    if "embed" in name:
        return noise
    return noise / math.sqrt(parameter.shape[-1])


def tiny_hf_dir(kind: str, path: str | Path, **changes: Any) -> Path:
    """Write a tiny random model of ``kind`` (KINDS, or ``byte``: 256 tokens) as transformers saves it."""
    hf_model(kind, **changes).save_pretrained(path)
    return Path(path)


class Runner:
    """Our decoder over one ModelState, the way a session would drive it: scan, step, positions kept per row."""

    def __init__(self, config: HybridConfig, weights: dict[str, torch.Tensor], **state: Any) -> None:
        options = {"slots": 4, "max_positions": MAX_POSITIONS, "spec_len": 4, **state}
        self.state = ModelState(config, **options)
        self.weights = weights
        self.decoder = HybridDecoder(config)

    def forward(self, batch: Batch, ids: list[int], *, all_logits: bool = False) -> torch.Tensor:
        """Logits of a batch."""
        ops = TorchOps(self.weights, self.state, batch)
        with torch.inference_mode():
            return self.decoder.forward(ops, torch.tensor(ids), all_logits=all_logits)

    def scan(self, slots: list[int], prompts: list[list[int]], starts: list[int] | None = None) -> torch.Tensor:
        """Logits of every prompt token, packed."""
        batch = Batch.scan(slots, [len(p) for p in prompts], starts=starts)
        return self.forward(batch, [t for p in prompts for t in p], all_logits=True)

    def step(
        self, slots: list[int], starts: list[int], tokens: list[list[int]], accepted: list[int] | None = None
    ) -> torch.Tensor:
        """Logits [rows, T, vocab] of one step."""
        batch = Batch.step(slots, starts, len(tokens[0]), accepted=accepted)
        return self.forward(batch, [t for row in tokens for t in row]).unflatten(0, (len(slots), -1))


@dataclass(frozen=True)
class Oracle:
    """A transformers model and the same weights through our converter (fp32)."""

    kind: str
    model: Any
    config: HybridConfig
    weights: dict[str, torch.Tensor]

    def runner(self, window: int, **state: Any) -> Runner:
        """Our side."""
        return Runner(self.config, self.weights, window=window, **state)

    def full(self, tokens: list[int]) -> torch.Tensor:
        """Logits [tokens, vocab] of one forward pass without a cache."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    def cached(self, tokens: list[int], prompt: int) -> torch.Tensor:
        """Logits [tokens - prompt, vocab] of single-token steps with transformers' cache after a prefill."""
        import transformers

        # transformers 5.20 (the last for Python 3.10) and 5.24 name the argument differently and ignore the other name.
        known = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"
        assert name in known
        cache = {name: transformers.DynamicCache(config=self.model.config)}
        rows = []
        with torch.no_grad():
            self.model(torch.tensor([tokens[:prompt]]), use_cache=True, **cache)
            for i in range(prompt, len(tokens)):
                out = self.model(torch.tensor([[tokens[i]]]), use_cache=True, **cache, position_ids=torch.tensor([[i]]))
                rows.append(out.logits[0, 0])
        return torch.stack(rows)


@functools.cache
def make_oracle(kind: str, **changes: Any) -> Oracle:
    """The oracle of a kind (with changed config fields), built once per process."""
    model = hf_model(kind, **changes)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/hf")
        convert(f"{folder}/hf", f"{folder}/checkpoint", dtype="float32")
        config, weights = load_checkpoint(f"{folder}/checkpoint")
    return Oracle(kind, model, config, weights)


def sequence(length: int, seed: int, vocab_size: int = 97) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(vocab_size), k=length)


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """max |ours - theirs|; inf where either is not finite or the shapes differ."""
    if ours.shape != theirs.shape or not (torch.isfinite(ours).all() and torch.isfinite(theirs).all()):
        return math.inf
    return float((ours - theirs).abs().max())


def prefill_error(oracle: Oracle, window: int) -> float:
    """One prompt of 21 tokens, logits of all of them."""
    tokens = sequence(21, seed=1)
    return gap(oracle.runner(window).scan([2], [tokens]), oracle.full(tokens))


def decode_error(oracle: Oracle, window: int) -> float:
    """A prompt of 21 tokens, then 32 single-token steps, against transformers' cached steps."""
    tokens = sequence(21 + STEPS, seed=2)
    runner = oracle.runner(window)
    runner.scan([1], [tokens[:21]])
    ours = [runner.step([1], [i], [[tokens[i]]])[0, 0] for i in range(21, len(tokens))]
    return gap(torch.stack(ours), oracle.cached(tokens, 21))


def ragged_error(oracle: Oracle, window: int) -> float:
    """Prompts of 1, 7 and 21 tokens in one scan, then 32 steps of all rows, in changing order and with a pad row."""
    rows = {slot: sequence(n + STEPS, seed=10 + n) for slot, n in zip((3, 0, 2), RAGGED, strict=True)}
    lengths = dict(zip(rows, RAGGED, strict=True))
    theirs = {slot: oracle.full(tokens) for slot, tokens in rows.items()}
    runner = oracle.runner(window)
    packed = runner.scan(list(rows), [rows[s][: lengths[s]] for s in rows]).split(list(RAGGED))
    worst = max(gap(ours, theirs[s][: lengths[s]]) for s, ours in zip(rows, packed, strict=True))
    for i in range(STEPS):
        order = [*rows, -1]
        random.Random(i).shuffle(order)
        starts = [lengths[s] + i if s >= 0 else 5 for s in order]
        tokens = [[rows[s][at]] if s >= 0 else [0] for s, at in zip(order, starts, strict=True)]
        logits = runner.step(order, starts, tokens)
        live = [(ours[0], theirs[s][at]) for ours, s, at in zip(logits, order, starts, strict=True) if s >= 0]
        worst = max(worst, *(gap(a, b) for a, b in live))
    return worst


def verify_error(oracle: Oracle, window: int) -> float:
    """Two prompts, then 8 steps of 4 tokens, all accepted."""
    prompts = (5, 16)
    rows = [sequence(n + STEPS, seed=20 + n) for n in prompts]
    theirs = [oracle.full(tokens) for tokens in rows]
    runner = oracle.runner(window)
    runner.scan([0, 1], [t[:n] for t, n in zip(rows, prompts, strict=True)])
    worst = 0.0
    for i in range(0, STEPS, 4):
        starts = [n + i for n in prompts]
        logits = runner.step([0, 1], starts, [t[at : at + 4] for t, at in zip(rows, starts, strict=True)])
        want = torch.stack([full[at : at + 4] for full, at in zip(theirs, starts, strict=True)])
        worst = max(worst, gap(logits, want))
    return worst


def rollback_error(oracle: Oracle, window: int) -> float:
    """Steps of 4 tokens of which 0..4 are right and accepted (every count, both rows out of step), wrong ones compared
    too, then a single-token step that continues."""
    prompts = (3, 12)
    rows = [sequence(n + 40, seed=30 + n) for n in prompts]
    runner = oracle.runner(window)
    runner.scan([2, 3], [t[:n] for t, n in zip(rows, prompts, strict=True)])
    at, accepted, worst = list(prompts), [-1, -1], 0.0
    for i in range(10):
        right = [(3 * i) % 5, (2 * i + 1) % 5]
        drafts = [_draft(t, p, n) for t, p, n in zip(rows, at, right, strict=True)]
        logits = runner.step([2, 3], at, drafts, accepted)
        want = [oracle.full(t[:p] + d)[p:] for t, p, d in zip(rows, at, drafts, strict=True)]
        worst = max(worst, gap(logits, torch.stack(want)))
        at, accepted = [p + n for p, n in zip(at, right, strict=True)], right
    logits = runner.step([2, 3], at, [[t[p]] for t, p in zip(rows, at, strict=True)], accepted)
    want = [oracle.full(t[: p + 1])[-1:] for t, p in zip(rows, at, strict=True)]
    return max(worst, gap(logits, torch.stack(want)))


def _draft(tokens: list[int], at: int, right: int) -> list[int]:
    """4 tokens of which the first ``right`` continue ``tokens`` at ``at`` and the next one does not."""
    return [*tokens[at : at + right], *((token + 1) % 97 for token in tokens[at + right : at + 4])]


SCENARIOS = {
    "prefill": prefill_error,
    "decode": decode_error,
    "ragged": ragged_error,
    "verify": verify_error,
    "rollback": rollback_error,
}
