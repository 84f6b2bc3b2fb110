"""Contract 3: verifying T tokens equals T single steps to rounding, and a rejected token leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_cases import (
    KINDS,
    Decoder,
    assert_close,
    assert_same_bits,
    make_inputs,
    oracle,
    run_scan,
    run_step,
    small_spec,
)

from trtllm_replayssm import SlotLayout
from trtllm_replayssm.pool import StatePool


@pytest.mark.parametrize("window", [1, 2, 3, 17])
@pytest.mark.parametrize("tokens", range(1, 17))
@pytest.mark.parametrize("kind", KINDS)
def test_verify_of_t_tokens(kind: str, tokens: int, window: int) -> None:
    """Every T in windows shorter and longer than it: outputs as the float64 recurrence, states as single steps."""
    inputs = make_inputs(small_spec(kind, window=window, spec_len=tokens, dstate=16), 2, 3 * tokens)
    decoder, single = Decoder(inputs), Decoder(inputs)
    assert_close(decoder.run(tokens, 3), oracle(inputs)[0], "float32")
    assert_close(single.run(1, 3 * tokens), oracle(inputs)[0], "float32", what="single steps")
    assert_same_bits(decoder.state(0), single.state(0))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_choice_is_the_same(kind: str) -> None:
    """16-bit outputs of a verify step and of single steps differ by a rounding at most, and rarely at all."""
    inputs = make_inputs(small_spec(kind, window=8, spec_len=4, act_dtype="bfloat16"), 4, 64, regime="trained")
    many, single = Decoder(inputs).run(4, 16).float(), Decoder(inputs).run(1, 64).float()
    assert_close(many, single, "bfloat16")
    same = (many.flatten(2).argmax(-1) == single.flatten(2).argmax(-1)).float().mean()
    assert same > 0.98
    if kind == "mamba2":  # no 16-bit d rows in the way: both forms compute in fp32 what they round once
        assert (many == single).float().mean() > 0.99


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_accepted_0_is_a_no_op(kind: str, flush: bool) -> None:
    """Rejecting a whole step, once or five times, on a step that folds or not: the next step is as if it never was."""
    spec = small_spec(kind, window=6, spec_len=3, act_dtype="bfloat16", stagger=False)
    inputs = make_inputs(spec, 2, 30)
    with_rejects, without = Decoder(inputs), Decoder(inputs)
    for decoder in (with_rejects, without):
        decoder.run(1, 5 if flush else 1)
    state = with_rejects.pool["state"][:2].clone()
    for _ in range(5):
        with_rejects.step(3, [0, 0])
    assert torch.equal(with_rejects.pool["state"][:2], state) != flush
    if flush:  # folded by the first of the rejected steps, and once only
        assert_close(with_rejects.pool["state"][:2], oracle(inputs, 0, 5)[1], "float32", what="state")
    for _ in range(4):
        expected, got = without.step(2)[1], with_rejects.step(2)[1]
        # The two flush at different steps: same sums, another order.
        assert_close(got, expected, "bfloat16")
    for row in range(2):
        assert with_rejects.count(row) == without.count(row)
        assert_same_bits(with_rejects.state(row), without.state(row))


@pytest.mark.parametrize("kind", KINDS)
def test_reject_once_then_accept_100(kind: str) -> None:
    """One rejection is applied once, not again at later steps."""
    inputs = make_inputs(small_spec(kind, window=16, spec_len=4), 2, 130)
    decoder = Decoder(inputs)
    decoder.run(1, 3)
    decoder.step(4, [1, 2])
    outputs = []
    for _ in range(100):
        outputs.append(decoder.step(1)[1])
    assert decoder.count(0) == 104 and decoder.count(1) == 105
    for row in range(2):
        first = 4 + row
        expected, final = oracle(inputs, 0, first + 100, rows=slice(row, row + 1))
        assert_close(torch.cat(outputs, dim=1)[row], expected[0, first:], "float32")
        assert_close(decoder.state(row), final[0], "float32", what="state")


def _accepted_case(kind: str) -> tuple[Any, StatePool]:
    """Seven rows behind the same prompt and the same four pending tokens, none yet accepted."""
    inputs = make_inputs(small_spec(kind, window=16, spec_len=4, stagger=False), 7, 12)
    for value in inputs.tokens.values():
        value.copy_(value[:1].clone().expand_as(value))
    pool = StatePool.allocate(SlotLayout(inputs.spec), 7)
    run_scan(pool, list(range(7)), inputs, [(row, 0, 2) for row in range(7)])
    run_step(pool, torch.arange(7), inputs, inputs.span(2, 6))
    return inputs, pool


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_accepted(kind: str) -> None:
    """-1 is all; every other value is clamped to what is pending; each row decides for itself."""
    inputs, pool = _accepted_case(kind)
    run_step(pool, torch.arange(7), inputs, inputs.span(6, 7), [-1, 4, 99, 0, -2, 1, 3])
    assert pool["cursor"][:, 0, 0, 1].tolist() == [4, 4, 4, 0, 0, 1, 3]
    assert (pool["cursor"][:, 0, 0, 2] == 1).all()
    everything = _accepted_case(kind)[1]
    run_step(everything, torch.arange(7), inputs, inputs.span(6, 7), None)
    assert torch.equal(everything.memory[:3], pool.memory[:3])


@pytest.mark.parametrize("accepted", [None, [-1] * 3, [0] * 3, [1, 4, 99]])
@pytest.mark.parametrize("kind", KINDS)
def test_prefilled_rows_carry_any_accepted(kind: str, accepted: list[int] | None) -> None:
    inputs = make_inputs(small_spec(kind, window=4, spec_len=3), 3, 12)
    pool = StatePool.allocate(SlotLayout(inputs.spec), 3)
    run_scan(pool, [0, 1, 2], inputs, [(row, 0, 5) for row in range(3)])
    y = run_step(pool, torch.arange(3), inputs, inputs.span(5, 8), accepted)
    assert_close(y, oracle(inputs)[0][:, 5:8], "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_verify_step_and_start_in_one_batch(kind: str) -> None:
    """Row 0 keeps 2 of 3, row 1 all, row 2 has just been prefilled: one call, each as the recurrence."""
    inputs = make_inputs(small_spec(kind, window=4, spec_len=3), 3, 16)
    decoder = Decoder(inputs)
    run_scan(decoder.pool, [0, 1], inputs, [(0, 0, 2), (1, 0, 3)])
    decoder.done[:] = torch.tensor([2, 3, 0])
    decoder.step(3, [2, 3, 0])
    run_scan(decoder.pool, [2], inputs, [(2, 0, 7)])  # replaces what the step did to row 2
    decoder.done[2] = 7
    for _ in range(3):
        positions, y = decoder.step(3)
        for row in range(3):
            inside = positions[row] < 16
            expected = oracle(inputs, rows=slice(row, row + 1))[0][0, positions[row][inside]]
            assert_close(y[row][inside], expected, "float32", what=f"row {row}")
