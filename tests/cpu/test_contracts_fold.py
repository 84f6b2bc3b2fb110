"""Contracts 1 and 5: the checkpoint is, to the bit, the state of conventional decoding in fp32, whatever the window.

Oracles: conventional decoding written out below (one token, one update, fp32), and the reference with window 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_cases import (
    KINDS,
    Decoder,
    Inputs,
    assert_close,
    assert_same_bits,
    make_inputs,
    oracle,
    run_scan,
    small_spec,
    state_after,
)

from trtllm_replayssm import ReplayError, SlotLayout, reference
from trtllm_replayssm.pool import StatePool, torch_dtype

LENGTH = 70


def conventional_states(inputs: Inputs, length: int, state_dtype: str = "float32") -> list[torch.Tensor]:
    """States [rows, H, P, N] after 0 .. length tokens: one plain fp32 update per token, rounded to state_dtype."""
    spec, t, p = inputs.spec, inputs.tokens, inputs.params
    heads = torch.arange(spec.nheads) // spec.heads_per_group
    state = torch.zeros(inputs.rows, spec.nheads, spec.headdim, spec.dstate, dtype=torch_dtype(state_dtype))
    states = [state]
    for i in range(length):
        S = state.float()
        if spec.kind == "mamba2":
            raw = t["dt"][:, i] + p["dt_bias"]
            dt = torch.where(raw > 20, raw, raw.exp().log1p())
            x, B = t["x"][:, i].float(), t["B"][:, i, heads].float()
            S = (p["A"] * dt).exp()[..., None, None] * S + (dt[..., None] * x)[..., None] * B[:, :, None]
        else:
            raw = t["a"][:, i] + p["dt_bias"]
            rate = p["A_log"].exp().reshape(-1, *[1] * (raw.dim() - 2))
            g = (
                -rate * raw.exp().log1p()
                if spec.gate == "softplus"
                else spec.gate_lower_bound / ((-rate * raw).exp() + 1)
            )
            beta = 1 / (1 + (-t["b"][:, i]).exp())
            k, v = t["k"][:, i].float(), t["v"][:, i].float()
            kn = (k * (1 / ((k * k).sum(-1) + 1e-6).sqrt())[..., None])[:, heads]
            S = g.exp()[:, :, None, None] * S if g.dim() == 2 else g.exp()[:, :, None] * S
            d = beta[..., None] * (v - (S * kn[:, :, None]).sum(-1))
            S = S + d[..., None] * kn[:, :, None]
        state = S.to(torch_dtype(state_dtype))
        states.append(state)
    return states


def test_conventional_decoding_is_right() -> None:
    for kind in KINDS:
        inputs = make_inputs(small_spec(kind), 2, 40)
        states = conventional_states(inputs, 40)
        for count in (1, 17, 40):
            assert_close(states[count], oracle(inputs, 0, count)[1], "float32", what=kind)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_bounded_gate_fold(gate: str) -> None:
    inputs = make_inputs(small_spec("kimi_delta", gate=gate, window=5, spec_len=2, dstate=24), 2, 20)
    decoder = Decoder(inputs)
    decoder.run(2, 10)
    expected = conventional_states(inputs, 20)[20]
    for row in range(2):
        if gate == "softplus":
            assert_same_bits(decoder.state(row), expected[row])
        else:  # conventional_states divides where the contract multiplies by a sigmoid
            assert_close(decoder.state(row), expected[row], "float32", what="state")


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_window_1_is_conventional_decoding(kind: str, act: str) -> None:
    inputs = make_inputs(small_spec(kind, window=1, act_dtype=act, dstate=24), 3, LENGTH)
    states, decoder = conventional_states(inputs, LENGTH), Decoder(inputs)
    for count in range(1, LENGTH + 1):
        decoder.step(1)
        for row in range(3):
            # The state is one token behind the output: the token of this step is folded by the next one.
            assert_same_bits(decoder.pool["state"][row], states[count - 1][row], f"checkpoint after {count - 1} tokens")
            assert_same_bits(decoder.state(row), states[count][row], f"state after {count} tokens")


@pytest.mark.parametrize(
    "window, tokens", [(2, 1), (3, 2), (4, 4), (16, 1), (16, 4), (17, 3), (2, 5), (1, 4), (64, 16)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_bits_under_random_accepts(kind: str, window: int, tokens: int) -> None:
    """After every step, flush or not, the checkpoint and the state at the accepted tokens are conventional ones."""
    spec = small_spec(kind, window=window, spec_len=tokens, act_dtype="bfloat16")
    length = max(LENGTH, 3 * window)
    inputs = make_inputs(spec, 3, length + 2 * tokens)
    states = conventional_states(inputs, length + 2 * tokens)
    decoder, random = Decoder(inputs), torch.Generator().manual_seed(window * 100 + tokens)
    flushes = 0
    while int(decoder.done.max()) < length:
        count = int(torch.randint(1, tokens + 1, (), generator=random))
        before = decoder.pool["state"][:3].clone()
        decoder.step(count, torch.randint(0, count + 1, (3,), generator=random))
        for row in range(3):
            folded = int(decoder.done[row]) - int(decoder.pool["cursor"][row, 0, 0, 1])
            assert_same_bits(decoder.pool["state"][row], states[folded][row], f"checkpoint after {folded} tokens")
            assert_same_bits(decoder.state(row), states[decoder.count(row)][row], "state at the accepted tokens")
            flushes += not torch.equal(before[row], decoder.pool["state"][row])
    assert flushes >= 3


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_state_is_rounded_once_a_flush(kind: str, state_dtype: str) -> None:
    """Folding is in fp32; with a 16-bit state window 1 rounds every token, a longer window once per window."""
    spec = small_spec(kind, window=1, state_dtype=state_dtype)
    inputs = make_inputs(spec, 2, 33, regime="trained")
    conventional, exact = conventional_states(inputs, 33, state_dtype)[32], oracle(inputs, 0, 32)[1]
    errors = {}
    for window in (1, 8):
        decoder = Decoder(inputs, spec=small_spec(kind, window=window, state_dtype=state_dtype, stagger=False))
        for _ in range(33):
            decoder.step(1)
        state = decoder.pool["state"][:2]
        assert state.dtype == torch_dtype(state_dtype)
        if window == 1:
            assert_same_bits(state, conventional)
        errors[window] = float((state.double() - exact).norm() / exact.norm())
    assert errors[8] < 0.8 * errors[1] < 0.05, errors


@pytest.mark.parametrize("split", [0, 1, 5, 19, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_is_one_prefill(kind: str, split: int) -> None:
    inputs = make_inputs(small_spec(kind, window=4, spec_len=2, act_dtype="bfloat16"), 1, 20)
    pool = StatePool.allocate(SlotLayout(inputs.spec), 3)
    whole = run_scan(pool, [0], inputs, [(0, 0, 20)])
    expected = pool["state"][0].clone()
    assert_same_bits(expected, conventional_states(inputs, 20)[20][0])
    # Prefill, then decode.
    decoder = Decoder(inputs)
    first = run_scan(decoder.pool, [0], inputs, [(0, 0, split)])
    decoder.done[:] = split
    for _ in range(20 - split):
        decoder.step(1)
    assert_same_bits(decoder.state(0), expected)
    # Prefill, then prefill of the rest from what the slot holds.
    pool["state"][1] = float("nan")
    run_scan(pool, [1], inputs, [(0, 0, split)])
    rest = run_scan(pool, [1], inputs, [(0, split, 20)], resume=True)
    assert_same_bits(pool["state"][1], expected)
    assert torch.equal(torch.cat([first, rest]), whole)


@pytest.mark.parametrize("kind", ["mamba2", "gated_delta"])
def test_a_state_is_what_its_scale_makes_of_it(kind: str) -> None:
    """Elements times 2^5 with a scale of 2^-5, as a kernel may leave them: the outputs and checkpoints of scale 1."""
    spec = small_spec(kind, window=4, spec_len=2)
    inputs = make_inputs(spec, 2, 20)
    plain, scaled = Decoder(inputs), Decoder(inputs)
    for steps in (3, 1, 6):
        assert torch.equal(plain.run(2, steps), scaled.run(2, steps))
        assert_same_bits(scaled.pool.checkpoint(), plain.pool.checkpoint())
        assert_same_bits(scaled.state(1), plain.state(1))
        scaled.pool["state"].mul_(32.0)
        scaled.pool["state_scale"].mul_(1 / 32)
        assert not torch.equal(scaled.pool["state"], plain.pool["state"])
        assert_same_bits(scaled.pool.checkpoint(scaled.slots), plain.pool.checkpoint(plain.slots))


@pytest.mark.parametrize("kind", KINDS)
def test_scan_resumes_behind_ring_rows(kind: str) -> None:
    """A scan that resumes folds the slot's committed and pending rows first, and leaves an empty ring."""
    inputs = make_inputs(small_spec(kind, window=8, spec_len=3), 1, 30)
    states, decoder = conventional_states(inputs, 30), Decoder(inputs)
    decoder.step(3, [2])
    decoder.step(3)  # 2 committed, 3 pending
    run_scan(decoder.pool, [0], inputs, [(0, 5, 30)], resume=True)
    assert_same_bits(decoder.pool["state"][0], states[30][0])
    assert decoder.pool["cursor"][0, 0, 0].tolist() == [0, 0, 0, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_scan_of_mixed_sequences(kind: str) -> None:
    """Sequences of different lengths, empty ones, padding and resumed ones in one batch equal each run alone."""
    inputs = make_inputs(small_spec(kind, window=4), 4, 12)
    spans = [(0, 0, 5), (1, 0, 0), (2, 0, 12), (3, 0, 7), (0, 5, 5)]
    slots, resume = [2, 1, -1, 4, 3], [False, False, False, True, True]
    pool = StatePool.allocate(SlotLayout(inputs.spec), 6)
    run_scan(pool, [3, 4], inputs, [(1, 0, 6), (2, 0, 3)])
    pool["state"][5] = 7.0
    alone = StatePool(pool.layout, pool.memory.clone())
    scan = reference.mamba2_scan if kind == "mamba2" else reference.gated_delta_scan
    tokens, bounds = inputs.packed(spans)
    flags = torch.tensor(resume)
    y = scan(pool, torch.tensor(slots), **tokens, **inputs.params, cu_seqlens=bounds, has_initial=flags)
    for slot, span, flag, first in zip(slots, spans, resume, bounds.tolist(), strict=False):
        out = y[first : first + span[2] - span[1]]
        if slot < 0:
            assert (out == 0).all()
        else:
            assert torch.equal(out, run_scan(alone, [slot], inputs, [span], resume=flag))
    assert torch.equal(pool.memory, alone.memory)
    assert (pool["state"][1] == 0).all() and (pool["state"][5] == 7).all() and pool["state"][3].abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_materialize_of_p_rows_is_p_steps(kind: str) -> None:
    spec = small_spec(kind, window=6, spec_len=3, act_dtype="bfloat16", stagger=False)
    inputs = make_inputs(spec, 2, 40)
    states, decoder = conventional_states(inputs, 40), Decoder(inputs)
    decoder.run(3, 3)  # folded at 6 tokens
    decoder.step(3, [2, 3])  # row 0: history 3, pending 3 of which 2 stay
    decoder.step(2)
    folded = [int(decoder.done[r] - decoder.pool["cursor"][r, 0, 0, 1]) for r in range(2)]
    before = decoder.pool.memory.clone()
    for row in range(2):
        rows = int(decoder.pool["cursor"][row, 0, 0, 1:3].sum())
        assert rows >= 2
        for count in [*range(rows + 1), -1, rows + 5, -3]:
            taken = rows if count == -1 else min(max(count, 0), rows)
            made = state_after(decoder.pool, row, inputs, count)
            assert_same_bits(made, states[folded[row] + taken][row], f"materialize({count})")
            assert decoder.pool["cursor"][-1, :, :].unique(dim=0).shape[0] == 1
            assert decoder.pool["cursor"][-1, 0, 0].tolist() == [0, 0, 0, 6]
        assert torch.equal(decoder.pool.memory[:2], before[:2]), "materialize changed its source"


@pytest.mark.parametrize("kind", KINDS)
def test_materialize_in_place_many_and_padding(kind: str) -> None:
    inputs = make_inputs(small_spec(kind, window=8, spec_len=2, stagger=False), 3, 10)
    states, decoder = conventional_states(inputs, 10), Decoder(inputs, slots=[0, 1, 5])
    decoder.run(2, 3)
    pool, extra = decoder.pool, {"A": inputs.params["A"]} if kind == "mamba2" else {}
    untouched = pool.memory[4].clone()
    src, count = torch.tensor([0, 1, 1, -1, 5]), torch.tensor([1, -1, 2, 3, 4])
    reference.materialize(pool, src, count, torch.tensor([3, 2, 6, 4, 5]), **extra)
    for slot, row, tokens in ((3, 0, 1), (2, 1, 6), (6, 1, 2), (5, 2, 4)):
        assert_same_bits(pool["state"][slot], states[tokens][row], f"slot {slot}")
    assert torch.equal(pool.memory[4], untouched), "a skipped entry wrote its destination"
    # The copy decodes on as the original would have.
    decoder.slots, decoder.done, decoder.kept = torch.tensor([3, 2, 5]), torch.tensor([1, 6, 4]), torch.zeros(3).long()
    decoder.run(1, 4)
    assert_same_bits(decoder.state(1), states[10][1])
    assert_same_bits(decoder.state(2), states[8][2])


@pytest.mark.parametrize("kind", KINDS)
def test_materialize_resets_the_cursor_of_its_destination(kind: str) -> None:
    """The destination's first window is its own, and a batch of skipped entries writes nothing."""
    inputs = make_inputs(small_spec(kind, window=8), 1, 10)
    decoder, extra = Decoder(inputs, slots=[3]), {"A": inputs.params["A"]} if kind == "mamba2" else {}
    decoder.run(1, 3)
    assert decoder.pool["cursor"][3, 0, 0].tolist() == [0, 2, 1, 5]
    before, none = decoder.pool.memory.clone(), torch.tensor([-1, -1])
    reference.materialize(decoder.pool, none, none, torch.tensor([0, 1]), **extra)
    reference.materialize(decoder.pool, torch.tensor([3, 3]), none, none, **extra)
    reference.reset(decoder.pool, none)
    assert torch.equal(decoder.pool.memory, before)
    reference.materialize(decoder.pool, torch.tensor([3]), none[:1], torch.tensor([1]), **extra)
    assert decoder.pool["cursor"][1].reshape(-1, 4).unique(dim=0).tolist() == [[0, 0, 0, 7]]


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"A": None}, r"A is None; materialize of a mamba2 pool needs A \[H=4\]"),
    ({"A": torch.zeros(5)}, "A has shape"),
    ({"src": torch.tensor([9, 1])}, "src names slot 9; the pool has slots 0 to 3"),
    ({"dst": torch.tensor([2, 4])}, "dst names slot 4; the pool has slots 0 to 3"),
    ({"dst": torch.tensor([2, 2])}, "dst names slot 2 twice"),
    ({"dst": torch.tensor([1, 0])}, "slot 0 is both read and overwritten"),
    ({"dst": torch.tensor([3, 0])}, "slot 0 is both read and overwritten"),
    ({"dst": torch.tensor([2])}, "dst has shape"),
    ({"count": torch.tensor([1.0, 2.0])}, "count is torch.float32"),
    ({"count": torch.tensor([1])}, "count has shape"),
    ({"src": 3}, "src is int"),
]


@pytest.mark.parametrize("change, message", ERRORS)
def test_bad_materialize(change: dict[str, Any], message: str) -> None:
    pool = StatePool.allocate(SlotLayout(small_spec("mamba2")), 4)
    arguments = {"src": torch.tensor([0, 1]), "count": torch.tensor([1, 1]), "dst": torch.tensor([2, 3])}
    with pytest.raises(ReplayError, match=message):
        reference.materialize(pool, **{**arguments, "A": -torch.ones(4), **change})


def test_materialize_refuses_decays_of_a_ring_that_holds_them() -> None:
    pool = StatePool.allocate(SlotLayout(small_spec("gated_delta")), 4)
    one = torch.tensor([1])
    with pytest.raises(ReplayError, match="A is given for a gated_delta pool"):
        reference.materialize(pool, one, one, one, A=torch.zeros(4))
