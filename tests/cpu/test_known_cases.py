"""Cases that broke other implementations (docs/known_cases.md) and that the contract tests leave open; and the list's
own test names.

Oracle: the float64 recurrence, or the same operation on the same data, arranged in another way. These run the
reference; the CUDA kernels' own source meets the same cases in test_step_emulator.py, test_delta_step_emulator.py and
the two scan emulators, and tests/gpu on a GPU.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from replay_cases import (
    KINDS,
    Decoder,
    Inputs,
    assert_close,
    assert_same_bits,
    far_pool,
    live_ring_rows,
    make_inputs,
    oracle,
    ring_regions,
    run_scan,
    run_step,
    small_spec,
    state_after,
    strided_views,
)

from trtllm_replayssm import SlotLayout, reference
from trtllm_replayssm.pool import StatePool

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "known_cases.md"
CASES = 44


def listed_rows() -> list[list[str]]:
    """Cells of the rows of the list's tables that begin with a number."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_case_is_listed_once_with_tests_or_a_reason() -> None:
    rows = listed_rows()
    assert [int(row[0]) for row in rows] == list(range(1, CASES + 1))
    for number, what, where, on_cpu, on_gpu in rows:
        assert what and where, f"case {number}"
        assert "::test_" in on_cpu or "::test_" in on_gpu or on_cpu.startswith("none: "), f"case {number}"


def test_every_listed_test_exists() -> None:
    text = LIST.read_text(encoding="utf-8")
    names = re.findall(r"`(\w+)/(\w+)::(\w+)`", text)
    assert len(names) == text.count("::") > CASES
    defined: dict[Path, set[str]] = {}
    for folder, module, name in names:
        path = ROOT / "tests" / folder / f"{module}.py"
        if path not in defined:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            defined[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in defined[path], f"{folder}/{module}::{name} is not there"


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_token_of_a_pool_for_drafts_is_a_decode_step(kind: str, act: str) -> None:
    """T = 1 with room for 4 tokens and with room for 1: outputs and states to the bit, through flushes (case 4)."""
    plain, drafts = (small_spec(kind, window=5, spec_len=n, act_dtype=act) for n in (1, 4))
    inputs = make_inputs(plain, 2, 24)
    decoders = [Decoder(inputs, spec=spec) for spec in (plain, drafts)]
    assert torch.equal(*(decoder.run(1, 24) for decoder in decoders))
    assert_same_bits(*(decoder.state(0) for decoder in decoders))


def _tf32(value: torch.Tensor) -> torch.Tensor:
    """fp32 with 10 mantissa bits, to nearest."""
    bits = value.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_operands_of_tf32_fail_the_fp32_bounds(kind: str) -> None:
    """The bounds for fp32 outputs and states are out of reach for products of one TF32 term (case 6)."""
    inputs = make_inputs(small_spec(kind, headdim=64, dstate=64), 2, 24)
    expected, final = oracle(inputs)
    names = ("x", "B", "C") if kind == "mamba2" else ("q", "k", "v")
    rounded = {name: _tf32(v) if name in names else v for name, v in inputs.tokens.items()}
    y, state = oracle(Inputs(inputs.spec, rounded, inputs.params))
    assert_close(expected.float(), expected, "float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(y.float(), expected, "float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(state.float(), final, "float32", scale=4.0, what="state")


@pytest.mark.parametrize("window, tokens", [(1, 1), (1, 4), (3, 2), (3, 8), (5, 3), (16, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_overwrites_a_row_that_it_reads(kind: str, window: int, tokens: int) -> None:
    """Rows that are live when a step starts keep their bytes through it, folded or not (case 28)."""
    inputs = make_inputs(small_spec(kind, window=window, spec_len=tokens, act_dtype="bfloat16"), 3, 40)
    decoder, random = Decoder(inputs), torch.Generator().manual_seed(window + tokens)
    flushes = 0
    for i in range(24):
        count = 1 + i % tokens
        accepted = [int(a) for a in decoder.kept]
        live = [live_ring_rows(decoder.pool, slot, accepted[slot]) for slot in range(3)]
        before = decoder.pool.memory.clone()
        decoder.step(count, torch.randint(0, count + 1, (3,), generator=random))
        old = StatePool(decoder.pool.layout, before)
        for slot, rows in enumerate(live):
            flushes += bool(rows) and int(decoder.pool["cursor"][slot, 0, 0, 1]) == 0
            for name in ring_regions(old):
                assert torch.equal(old[name][slot][:, rows], decoder.pool[name][slot][:, rows]), name
    assert flushes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_of_a_sequence_may_hold_nan(kind: str) -> None:
    """Packed prompts whose other sequences, padding or not, are NaN: the bits of the sequence alone (case 34)."""
    inputs = make_inputs(small_spec(kind, act_dtype="bfloat16"), 3, 20)
    spoiled = Inputs(inputs.spec, {n: v.clone() for n, v in inputs.tokens.items()}, inputs.params)
    for value in spoiled.tokens.values():
        value[[0, 2]] = float("nan")
    alone, together = (StatePool.allocate(SlotLayout(inputs.spec), 3) for _ in range(2))
    for length in (1, 7, 17):
        expected = run_scan(alone, [1], inputs, [(1, 0, length)])
        y = run_scan(together, [0, 1, -1], spoiled, [(0, 0, 5), (1, 0, length), (2, 0, 3)])
        assert torch.equal(y[5 : 5 + length], expected) and not y[5 + length :].any()
        assert torch.equal(together.memory[1], alone.memory[1])


@pytest.mark.parametrize("window, tokens", [(1, 1), (16, 1), (16, 4)])
def test_states_that_stay_and_negative_steps(window: int, tokens: int) -> None:
    """A = 0 forgets nothing (A > 0 is refused here); without softplus a negative dt is dt_min, 0 (case 40)."""
    spec = small_spec("mamba2", window=window, spec_len=tokens, dt_softplus=False)
    inputs = make_inputs(spec, 2, 48)
    inputs.params["A"][::2] = 0.0
    assert (inputs.tokens["dt"] + inputs.params["dt_bias"] < 0).any()
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(tokens, 48 // tokens), expected, "float32")
    assert_close(decoder.state(0), final[0], "float32", what="state")
    assert decoder.pool["ring_dt"].min() == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_is_moved_and_recycled_in_the_middle_of_its_window(kind: str) -> None:
    """A ring that wraps, with pending rows: copied as bytes, copied by a fold, then recycled (cases 15, 16)."""
    inputs = make_inputs(small_spec(kind, window=4, spec_len=2, stagger=False, act_dtype="bfloat16"), 1, 20)
    decoder = Decoder(inputs)
    decoder.run(2, 4)
    pool = decoder.pool
    origin, history, pending, _ = pool["cursor"][0, 0, 0].tolist()
    assert pending > 0 and history > 0 and origin + history + pending > pool.layout.spec.ring_rows
    moved = StatePool.allocate(pool.layout, 4)
    moved.memory[3] = pool.memory[0]
    state_after(pool, 0, inputs, spare=1)
    went_on, moved_on, other = [], [], StatePool(pool.layout, pool.memory.clone())
    fresh, zero = StatePool.allocate(pool.layout, 1), torch.tensor([0])
    reference.reset(other, zero)
    for first in range(0, 8, 2):
        tokens = inputs.span(first, first + 2)
        assert torch.equal(*(run_step(p, zero, inputs, tokens) for p in (other, fresh)))
    for first in range(8, 14, 2):
        tokens = inputs.span(first, first + 2)
        went_on.append(run_step(pool, zero, inputs, tokens))
        moved_on.append(run_step(moved, torch.tensor([3]), inputs, tokens))
        run_step(pool, torch.tensor([1]), inputs, tokens)
    assert torch.equal(torch.cat(went_on), torch.cat(moved_on))
    assert_close(torch.cat(went_on, dim=1), oracle(inputs)[0][:, 8:14], "bfloat16")
    states = [state_after(p, slot, inputs, spare=2) for p, slot in ((pool, 0), (moved, 3), (pool, 1))]
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_past_4_gib_and_strided_views(kind: str) -> None:
    """Slots more than 2^31 bytes apart, operands and gates with strides: the bits of dense ones (case 33)."""
    spec = small_spec(kind, window=3, spec_len=2, act_dtype="bfloat16")
    inputs, slots = make_inputs(spec, 2, 10), torch.tensor([2, 1])
    views = Inputs(spec, strided_views(inputs.tokens), inputs.params)
    assert not any(value.is_contiguous() for value in views.tokens.values())
    dense, far = StatePool.allocate(SlotLayout(spec), 3), far_pool(SlotLayout(spec))
    reference.reset(far, torch.arange(3))
    for t in range(0, 10, 2):
        expected = run_step(dense, slots, inputs, inputs.span(t, t + 2))
        assert torch.equal(run_step(far, slots, inputs, views.span(t, t + 2)), expected)
    assert_same_bits(state_after(far, 2, inputs, spare=0), state_after(dense, 2, inputs, spare=0))
    assert torch.equal(far.memory[:, : far.layout.slot_bytes], dense.memory)
