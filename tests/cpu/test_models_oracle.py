"""Whole models against transformers' own classes (tests/oracles.py), fp32, tolerance 5e-5 on logits of std about 1.

Sources of the error: sums in another order. Checked: prefill, 32 cached steps, a batch of different lengths, steps of 4
tokens, rollback with every accept count, chunked prefill, each at window 1 (conventional decoding), 5 and 16. Teeth:
changing any one weight, or a formula switch of the config, moves the logits past the tolerance.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import KINDS, TOLERANCE, make_oracle, sequence

from trtllm_replayssm.models.decoder import keeps_float32, weight_shapes

WINDOWS = (1, 5, 16)


@pytest.mark.parametrize("scenario", oracles.SCENARIOS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, window: int, scenario: str) -> None:
    assert oracles.SCENARIOS[scenario](make_oracle(kind), window) < TOLERANCE


VARIANTS = {
    "nemotron_h biases": ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    "qwen3_next tied": ("qwen3_next", {"tie_word_embeddings": True}),
    "nemotron_h attention-free": ("nemotron_h", {"hybrid_override_pattern": "MM-M"}),
    "nemotron_h mlp first": ("nemotron_h", {"hybrid_override_pattern": "-*M*-"}),
    "qwen3_next biases": ("qwen3_next", {"attention_bias": True}),
    "qwen3_next sparse step": ("qwen3_next", {"mlp_only_layers": None, "decoder_sparse_step": 9}),
    "qwen3_5 tied, other pattern": ("qwen3_5", {"tie_word_embeddings": True, "full_attention_interval": 2}),
    "kimi_linear queries from a latent": ("kimi_linear", {"q_lora_rank": 20}),
    "kimi_linear other pattern and sizes": (
        "kimi_linear",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 2,
            "linear_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "qk_rope_head_dim": 4,
            "v_head_dim": 20,
        },
    ),
    "kimi_linear attention-free": ("kimi_linear", {"layer_types": ["linear_attention"] * 4}),
    "qwen3_5 whole rotation": (
        "qwen3_5",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0}},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_config_variants_equal_transformers(name: str) -> None:
    kind, changes = VARIANTS[name]
    oracle = make_variant(kind, changes)
    # Tied embeddings of std 1 make logits of std sqrt(hidden_size).
    tolerance = TOLERANCE * max(1.0, float(oracle.full(sequence(30, seed=3)).std()))
    assert oracles.ragged_error(oracle, window=5) < tolerance
    assert oracles.rollback_error(oracle, window=16) < tolerance


def make_variant(kind: str, changes: dict[str, Any]) -> oracles.Oracle:
    """An oracle whose config fields need not be hashable."""
    return make_oracle.__wrapped__(kind, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_of_a_size_that_the_tolerance_can_judge(kind: str) -> None:
    logits = make_oracle(kind).full(sequence(30, seed=3))
    assert 0.5 < float(logits.std()) < 2.0


def test_the_bounded_gate_of_kimi_delta() -> None:
    """transformers has no class with it beside this block: the oracle's gate is replaced by math.md's formula (2.3)."""
    oracle = make_variant("kimi_linear", {"layer_types": ["linear_attention"] * 4})
    bound = -4.0
    for layer in oracle.model.model.layers:
        gate = layer.self_attn.forget_gate

        def bounded(u: torch.Tensor, gate: Any = gate) -> torch.Tensor:
            raw = (gate.f_b_proj(gate.f_a_proj(u)) + gate.dt_bias).unflatten(-1, (gate.num_heads, gate.head_dim))
            return bound * torch.sigmoid(gate.A_log.exp() * raw)

        gate.forward = bounded
    config = dataclasses.replace(oracle.config, gate="bounded", gate_lower_bound=bound)
    changed = dataclasses.replace(oracle, config=config)
    for window in WINDOWS:
        assert oracles.ragged_error(changed, window) < TOLERANCE
    assert oracles.prefill_error(oracle, 5) > 20 * TOLERANCE, "the other gate is another model"


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_equals_one_scan(kind: str) -> None:
    oracle = make_oracle(kind)
    a, b = sequence(20, seed=4), sequence(9, seed=5)
    runner = oracle.runner(window=5)
    runner.scan([1, 3], [a[:1], b[:4]])
    runner.scan([3, 1], [b[4:5], a[1:13]], starts=[4, 1])
    last = runner.scan([1, 3], [a[13:], b[5:]], starts=[13, 5])
    want = torch.cat([oracle.full(a)[13:], oracle.full(b)[5:]])
    assert oracles.gap(last, want) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_behind_decoded_tokens_continues_the_sequence(kind: str) -> None:
    """A scan with a start takes pending ring rows in, as a chat turn behind generated tokens does."""
    oracle = make_oracle(kind)
    tokens = sequence(30, seed=6)
    runner = oracle.runner(window=16)
    runner.scan([0], [tokens[:8]])
    for i in range(8, 13):
        runner.step([0], [i], [[tokens[i]]])
    last = runner.scan([0], [tokens[13:30]], starts=[13])
    assert oracles.gap(last, oracle.full(tokens)[13:]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_last_token_logits_by_default(kind: str) -> None:
    oracle = make_oracle(kind)
    prompts = [sequence(n, seed=n) for n in (4, 11)]
    runner = oracle.runner(window=5)
    batch = oracles.Batch.scan([2, 0], [4, 11])
    logits = runner.forward(batch, prompts[0] + prompts[1])
    want = torch.stack([oracle.full(p)[-1] for p in prompts])
    assert logits.dtype == torch.float32
    assert oracles.gap(logits, want) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_teeth_every_weight_matters(kind: str) -> None:
    """A weight that the decoder did not read, or read in the wrong place, would leave the logits alone."""
    oracle = make_oracle(kind)
    tokens = sequence(21, seed=1)
    want = oracle.full(tokens)
    assert set(oracle.weights) == set(weight_shapes(oracle.config))
    for name, weight in oracle.weights.items():
        changed = weight.clone()
        changed.view(-1)[: max(1, weight.numel() // 3)] += 0.5
        runner = oracles.Runner(oracle.config, {**oracle.weights, name: changed}, window=5)
        assert oracles.gap(runner.scan([0], [tokens]), want) > 20 * TOLERANCE, name


SWITCHES = {
    "nemotron_h": {"norm_eps": 0.01, "dt_min": 0.5, "dt_max": 0.4, "rotary_dim": 4},
    "qwen3_next": {"norm_eps": 0.01, "rope_theta": 100.0, "rotary_dim": 2, "qk_norm": False},
    "qwen3_5": {"norm_eps": 0.01, "rope_theta": 100.0, "rotary_dim": 0, "qk_norm": False},
    "kimi_linear": {"norm_eps": 0.01, "latent_norm_eps": 0.1, "gate": "bounded"},
}


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in SWITCHES.items() for field in fields])
def test_teeth_config_fields_matter(kind: str, field: str) -> None:
    oracle = make_oracle(kind)
    config = dataclasses.replace(oracle.config, **{field: SWITCHES[kind][field]})
    tokens = sequence(21, seed=1)
    runner = oracles.Runner(config, oracle.weights, window=5)
    assert oracles.gap(runner.scan([0], [tokens]), oracle.full(tokens)) > 20 * TOLERANCE


def greedy(oracle: oracles.Oracle, window: int, count: int, drafts: int = 0) -> list[int]:
    """Greedy continuation of a fixed prompt; with ``drafts``, verified in steps of 1 + drafts, some of them wrong."""
    prompt = sequence(6, seed=8)
    runner = oracle.runner(window)
    text = [int(runner.scan([0], [prompt])[-1].argmax())]
    truth = greedy(oracle, 1, count + 8) if drafts else []
    accepted = [-1]
    while len(text) < count:
        at = len(prompt) + len(text) - 1
        right = len(text) % (drafts + 1)
        tail = [(t + (i >= right)) % 97 for i, t in enumerate(truth[len(text) : len(text) + drafts])]
        tokens = [text[-1], *tail]
        best = runner.step([0], [at], [tokens], accepted)[0].argmax(-1).tolist()
        kept = 1
        while kept < len(tokens) and tokens[kept] == best[kept - 1]:
            kept += 1
        accepted = [kept]
        text += best[:kept]
    return text[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_do_not_depend_on_window_or_speculation(kind: str) -> None:
    oracle = make_oracle(kind)
    want = greedy(oracle, 1, 48)
    assert len(set(want)) > 5
    assert greedy(oracle, 16, 48) == want
    assert greedy(oracle, 5, 48, drafts=3) == want
    assert int(oracle.full([*sequence(6, seed=8), *want[:-1]])[-1].argmax()) == want[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32_with_the_same_weights(kind: str) -> None:
    """Weights rounded to bf16 in both runs, so the gap is rounding of activations: some ten roundings of 2^-9 each."""
    oracle = make_oracle(kind)
    rounded = {n: w if keeps_float32(n) else w.bfloat16() for n, w in oracle.weights.items()}
    exact = {n: w.float() for n, w in rounded.items()}
    tokens = sequence(24, seed=9)
    results = []
    for weights, dtype in ((rounded, "bfloat16"), (exact, "float32")):
        runner = oracles.Runner(oracle.config, weights, window=5, dtype=dtype)
        rows = [runner.scan([0], [tokens[:12]])]
        rows += [runner.step([0], [i], [[tokens[i]]])[0] for i in range(12, 24)]
        results.append(torch.cat(rows))
    assert results[0].dtype == torch.float32
    difference = (results[0] - results[1]).abs()
    assert torch.isfinite(difference).all()
    assert 1e-4 < float(difference.mean()) < 0.03
    assert float(difference.max()) < 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_float64_and_float32_agree(kind: str) -> None:
    oracle = make_oracle(kind)
    weights = {n: w.double() for n, w in oracle.weights.items()}
    tokens = sequence(16, seed=7)
    runner = oracles.Runner(oracle.config, weights, window=5, dtype="float64", state_dtype="float64")
    wide = runner.scan([0], [tokens])
    assert wide.dtype == torch.float64
    assert oracles.gap(wide.float(), oracle.full(tokens)) < TOLERANCE
    assert math.isinf(oracles.gap(wide.float() * math.nan, oracle.full(tokens)))


def test_the_accuracy_document_has_the_rows_that_the_script_prints() -> None:
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("oracle_table", root / "benchmarks" / "oracle_table.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (root / "docs" / "accuracy.md").read_text()
    section = text.split("## Against transformers", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == ["family", "window", *oracles.SCENARIOS]
    assert [(row[0], int(row[1])) for row in rows[2:]] == [(kind, w) for kind in KINDS for w in script.WINDOWS]
    assert script.WINDOWS == WINDOWS and all(0 < float(cell) < TOLERANCE for row in rows[2:] for cell in row[2:])
    assert re.search(r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7}", section)
