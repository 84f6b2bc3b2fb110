"""ModelState and Batch: reset, copy at a chosen token, folded states, sizes; and the errors of batches.

Oracle: transformers' logits for the tokens that a slot is meant to hold (tests/oracles.py), tolerance 5e-5; the fold
itself is compared bit for bit with window-1 decoding of the same inputs.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracles
import pytest
import torch
from oracles import KINDS, TOLERANCE, gap, make_oracle, sequence
from replay_cases import leave_scales

from trtllm_replayssm import kernels, reference
from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.layout import ConvLayout, SlotLayout
from trtllm_replayssm.runtime.state import Batch, ModelState, default_operations


def slot_bytes(state: ModelState, slot: int) -> list[torch.Tensor]:
    """Copies of all memory of one slot."""
    pools = [*state.recurrent.values(), *state.conv.values()]
    kv = [cache[slot].clone() for pair in state.kv.values() for cache in pair]
    return [pool.memory[slot].clone() for pool in pools] + kv


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def started(kind: str, window: int, tokens: list[int], slot: int = 1) -> oracles.Runner:
    """A prompt of 9 tokens, 3 single steps, then a step of 4 tokens whose acceptance is open."""
    runner = make_oracle(kind).runner(window)
    runner.scan([slot], [tokens[:9]])
    for i in (9, 10, 11):
        runner.step([slot], [i], [[tokens[i]]])
    runner.step([slot], [12], [tokens[12:16]])
    return runner


@pytest.mark.parametrize("pending", [0, 1, 4, -1, -2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_copy_continues_at_the_chosen_token(kind: str, pending: int) -> None:
    tokens = sequence(30, seed=40)
    runner = started(kind, 16, tokens)
    source, bystander = slot_bytes(runner.state, 1), slot_bytes(runner.state, 0)
    runner.state.copy([1], [3], [pending])
    assert_same(source, slot_bytes(runner.state, 1))
    assert_same(bystander, slot_bytes(runner.state, 0))
    kept = {-1: 4, -2: 0, 9: 4}.get(pending, pending)  # other than -1: clamped to 0 .. 4
    other = tokens[: 12 + kept] + sequence(6, seed=41)
    ours = [runner.step([3], [i], [[other[i]]])[0, 0] for i in range(12 + kept, len(other))]
    assert gap(torch.stack(ours), make_oracle(kind).full(other)[12 + kept :]) < TOLERANCE
    last = runner.step([1], [16], [tokens[16:20]])[0]
    assert gap(last, make_oracle(kind).full(tokens[:20])[16:]) < TOLERANCE, "the source goes on as before"


@pytest.mark.parametrize("kind", KINDS)
def test_copy_defaults_to_all_pending_tokens_and_may_fold_in_place(kind: str) -> None:
    tokens = sequence(20, seed=42)
    runner = started(kind, 5, tokens)
    runner.state.copy(torch.tensor([1]), torch.tensor([1]))
    assert all(pool["cursor"][1, 0, 0, 1:3].tolist() == [0, 0] for pool in runner.state.recurrent.values())
    last = runner.step([1], [16], [tokens[16:20]])[0]
    assert gap(last, make_oracle(kind).full(tokens)[16:]) < TOLERANCE


@pytest.mark.parametrize("pending", [0, 2, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_materialized_is_the_state_of_conventional_decoding(kind: str, pending: int) -> None:
    """To rounding: deeper layers read outputs that were summed in another order."""
    tokens = sequence(20, seed=43)
    runner = started(kind, 16, tokens)
    before = slot_bytes(runner.state, 1)
    states = runner.state.materialized([1], [pending])
    assert_same(before, slot_bytes(runner.state, 1))
    plain = make_oracle(kind).runner(window=1)
    plain.scan([1], [tokens[:9]])
    for i in range(9, 16 if pending < 0 else 12 + pending):
        plain.step([1], [i], [[tokens[i]]])
    want = plain.state.materialized(torch.tensor([1]))
    spec = runner.state.spec
    assert set(states) == set(runner.state.recurrent) == set(want)
    for layer, state in states.items():
        assert state.shape == (1, spec.nheads, spec.headdim, spec.dstate) and state.dtype == torch.float32
        torch.testing.assert_close(state, want[layer], atol=2e-5, rtol=1e-4)
    assert float(states[0].abs().max()) > 0.1


def test_exact_fold_through_a_model() -> None:
    """Single steps at window 16 and at window 1 leave bit-equal states in the layer whose inputs are bit-equal."""
    tokens = sequence(40, seed=44)
    folded = []
    for window in (1, 16):
        runner = make_oracle("nemotron_h").runner(window)
        runner.scan([0], [tokens[:9]])
        for i in range(9, 40):
            runner.step([0], [i], [[tokens[i]]])
        folded.append(runner.state.materialized([0])[0])
    assert torch.equal(*folded)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_empties_a_slot(kind: str) -> None:
    """Steps from position 0 behind a reset are those of a new sequence: no state, ring, history or key is left."""
    tokens = sequence(12, seed=45)
    runner = started(kind, 5, sequence(20, seed=46))
    other = slot_bytes(runner.state, 0)
    runner.state.reset([1])
    assert_same(other, slot_bytes(runner.state, 0))
    ours = [runner.step([1], [i], [[tokens[i]]])[0, 0] for i in range(12)]
    assert gap(torch.stack(ours), make_oracle(kind).full(tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_materialized_reads_the_scale_that_an_operation_leaves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = started(kind, 16, sequence(30, seed=40))
    want = runner.state.materialized([1])

    def materialize(pool: Any, src: Any, count: Any, dst: Any, **options: Any) -> None:
        reference.materialize(pool, src, count, dst, **options)
        leave_scales(pool, dst)

    monkeypatch.setattr(runner.state, "impl", SimpleNamespace(materialize=materialize))
    got = runner.state.materialized([1])
    assert all(torch.equal(got[layer], want[layer]) for layer in want)


def test_materialized_before_any_pass_is_zero() -> None:
    state = make_oracle("nemotron_h").runner(window=16).state
    for tensor in state.materialized([0, 3]).values():
        assert torch.equal(tensor, torch.zeros_like(tensor))
    state.copy([0], [1])


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_options(kind: str) -> None:
    config = make_oracle(kind).config
    state = ModelState(
        config,
        slots=3,
        max_positions=10,
        window=5,
        spec_len=2,
        read_copy="int8",
        state_dtype="bfloat16",
        dtype="bfloat16",
    )
    spec = state.spec
    assert (spec.window, spec.spec_len, spec.read_copy, spec.state_dtype, spec.act_dtype, spec.stagger) == (
        5, 2, "int8", "bfloat16", "bfloat16", True)  # fmt: skip
    assert set(state.recurrent) == set(state.conv) == set(config.recurrent_layers)
    assert set(state.kv) == set(config.attention_layers)
    latent = (3, 10, 1, 24 + 8)
    kv_shape = latent if config.latent_rank else (3, 10, config.num_key_value_heads, config.head_dim)
    for tensors in state.kv.values():
        assert len(tensors) == (1 if config.latent_rank else 2)
        assert all(cache.shape == kv_shape and cache.dtype == torch.bfloat16 for cache in tensors)
    recurrent = len(state.recurrent) * 3 * (SlotLayout(spec).slot_bytes + ConvLayout(state.conv_spec).slot_bytes)
    kept = 1 if config.latent_rank else 2
    kv_bytes = 2 * kept * len(state.kv) * 4 * 10 * math.prod(kv_shape[2:])
    assert state.nbytes() == recurrent + kv_bytes, "KV has one spare row for pad writes"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots is 0; it must be a whole number from 1"),
        ({"max_positions": 0}, "max_positions is 0"),
        ({"window": 65}, "window is 65"),
        ({"spec_len": 17}, "spec_len is 17"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8'"),
        ({"dtype": "int8"}, "act_dtype is 'int8'"),
    ],
)
def test_state_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        ModelState(make_oracle("nemotron_h").config, **{"slots": 2, "max_positions": 8, **changes})


def test_batches() -> None:
    scan = Batch.scan([4, 1], [2, 3], starts=[0, 5])
    assert scan.positions.tolist() == [0, 1, 5, 6, 7]
    assert scan.cu_seqlens is not None and scan.cu_seqlens.tolist() == [0, 2, 5]
    assert scan.has_initial is not None and scan.has_initial.tolist() == [False, True]
    assert (scan.rows, scan.kv_bound) == (2, 8)
    assert Batch.scan([4, 1], [2, 3]).has_initial is None
    step = Batch.step([2, -1], [7, 0], 2, accepted=[1, -1])
    assert step.positions.tolist() == [7, 8, 0, 1]
    assert step.accepted is not None and step.accepted.tolist() == [1, -1] and step.kv_bound == 9
    slots = torch.tensor([0], dtype=torch.int32)
    assert Batch("step", slots, torch.tensor([6])).kv_bound == 7
    assert Batch("scan", slots, torch.tensor([], dtype=torch.int64), torch.zeros(2, dtype=torch.int32)).kv_bound == 0


INT32, INT64 = torch.tensor([0], dtype=torch.int32), torch.tensor([0])
BATCH_ERRORS = [
    (lambda: Batch.scan([], []), "slots is empty"),
    (lambda: Batch.scan([0], [1, 2]), "lengths has 2 entries for 1 slots"),
    (lambda: Batch.scan([0, 1], [1, 0]), r"lengths\[1\] is 0; a prompt has at least 1 token"),
    (lambda: Batch.scan([-1], [1]), r"slots\[0\] is -1; a scan has no pad rows"),
    (lambda: Batch.scan([0, 0], [1, 1]), "slots names 0 more than once"),
    (lambda: Batch.scan([0], [1], starts=[-2]), r"starts\[0\] is -2; positions begin at 0"),
    (lambda: Batch.step([0, 1], [0]), "starts has 1 entries for 2 slots"),
    (lambda: Batch.step([0], [0], accepted=[1, 1]), "accepted has 2 entries for 1 slots"),
    (lambda: Batch.step([0], [0], 0), "tokens_per_row is 0"),
    (lambda: Batch.step([0], [0], 17), "tokens_per_row is 17"),
    (lambda: Batch("stop", INT32, INT64), "phase is 'stop'; it must be scan or step"),
    (lambda: Batch("scan", INT32, INT64), "cu_seqlens is None; a scan needs it"),
    (lambda: Batch("step", INT64, INT64), r"slots is \(1,\) torch.int64; it must be \[1\] torch.int32"),
    (lambda: Batch("step", INT32, INT32), r"positions is \(1,\) torch.int32; it must be \[1\] torch.int64"),
    (lambda: Batch("step", INT32, INT64, tokens_per_row=2), r"positions is \(1,\) torch.int64; it must be \[2\]"),
    (lambda: Batch("step", INT32, INT64, cu_seqlens=INT32), "cu_seqlens is given, but a step has none"),
    (lambda: Batch("scan", INT32, INT64, cu_seqlens=INT32), r"cu_seqlens is \(1,\) torch.int32; it must be \[2\]"),
]


@pytest.mark.parametrize(("make", "message"), BATCH_ERRORS, ids=[m for _, m in BATCH_ERRORS])
def test_batch_errors(make: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        make()


def test_batch_and_state_on_different_devices() -> None:
    state = ModelState(make_oracle("nemotron_h").config, slots=2, max_positions=8)
    batch = Batch("step", INT32.to("meta"), INT64.to("meta"), kv_bound=1)
    with pytest.raises(ReplayError, match="the batch is on meta, the state on cpu; they must be on one device"):
        batch.check(state)


def test_the_operations_follow_the_device_and_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library.so"
    monkeypatch.setenv("TRTLLM_REPLAYSSM_LIBRARY", str(library))
    assert default_operations("cuda:0") is reference
    library.touch()
    assert default_operations("cuda:0") is kernels
    assert default_operations("cpu") is reference
