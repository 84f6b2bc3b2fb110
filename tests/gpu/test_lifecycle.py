"""Scan, materialize and reset of Mamba-2 slots on the GPU, against float64 and against the reference."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import DEVICE, STATE_SCALE, Rollout, mamba2_spec, poisoned_pool, random_slots
from replay_cases import assert_close, assert_same_bits, make_inputs, raw_state

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import RecurrenceSpec, ReplayError, SlotLayout, kernels, reference
from trtllm_replayssm.pool import StatePool

SHAPES = [s for s in [*ODD, MODELS["nemotron-3-nano-4b"].split(8)] if s.kind == "mamba2" and s.headdim % 16 == 0]


def recurrence(spec: RecurrenceSpec, tokens, params, state):
    """float64 outputs and state of one sequence [T, ...]."""
    exact = {n: v[None].double() for n, v in tokens.items()}
    double = {n: v.double() for n, v in params.items()}
    limits = {"dt_softplus": spec.dt_softplus, "dt_min": spec.dt_min, "dt_max": spec.dt_max}
    y, state = reference.mamba2_recurrence(state[None], **exact, **double, **limits)
    return y[0], state[0]


@pytest.mark.parametrize(
    "state, act", [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_scan_of_packed_prompts(shape, state, act):
    """Lengths 0, 1, 15..17 and longer; a padding sequence; every second one continues what its slot holds."""
    spec = shape.spec(state_dtype=state, act_dtype=act, spec_len=2)
    lengths = [5, 0, 1, 40, 15, 16, 17, 3]
    rollout = Rollout(spec, rows=len(lengths), pads=0, y_scale=1e9)
    for i in range(9):
        rollout.step(1 + i % 2)
    rollout.commit(torch.full((len(lengths),), 99, device=DEVICE))
    slots = rollout.slots.clone()
    slots[3] = -1
    resume = torch.arange(len(lengths), device=DEVICE) % 2 == 0
    inputs = make_inputs(spec, 1, sum(lengths), seed=21)
    tokens = {n: v[0].to(DEVICE) for n, v in inputs.tokens.items()}
    ends = torch.tensor([0, *lengths]).cumsum(0)
    before = rollout.pool.memory.clone()
    y = kernels.mamba2_scan(
        rollout.pool, slots, **tokens, **rollout.params, cu_seqlens=ends.int().to(DEVICE), has_initial=resume,
        out=torch.full_like(tokens["x"], float("nan")),
    )  # fmt: skip
    for i, length in enumerate(lengths):
        first, last = int(ends[i]), int(ends[i + 1])
        slot = int(rollout.slots[i])
        if i == 3:
            assert not y[first:last].any() and torch.equal(before[slot], rollout.pool.memory[slot])
            continue
        start = rollout.state[i] if resume[i] else torch.zeros_like(rollout.state[i])
        want, final = recurrence(spec, {n: v[first:last] for n, v in tokens.items()}, rollout.params, start)
        # All fp32: one element, with terms of 130 times the absolute sum that the bound measures by, is 42 eps off.
        scale = {"float32": 2.0 if act == "float32" else 1.0, "bfloat16": 48.0, "float16": 2.0}[state]
        if length:
            assert_close(y[first:last], want, act, scale=scale)
        if resume[i] or length:
            assert_close(
                rollout.pool.checkpoint(rollout.slots[i : i + 1])[0].float(),
                final,
                state,
                scale=STATE_SCALE[state],
                what="state",
            )
        cursor = rollout.pool["cursor"][slot].long()
        assert (cursor == torch.tensor([0, 0, 0, spec.first_limit(slot)], device=DEVICE)).all()
    one = int(rollout.slots[1])
    assert not rollout.pool["state"][one].any(), "an empty prompt from zero leaves a zero state"


def test_exact_prefill_and_a_step_is_a_longer_prefill():
    spec = mamba2_spec(4, 2, 64, 128)
    inputs = make_inputs(spec, 1, 40, seed=4)
    tokens = {n: v[0].to(DEVICE) for n, v in inputs.tokens.items()}
    params = {n: v.to(DEVICE) for n, v in inputs.params.items()}
    pool = StatePool.allocate(SlotLayout(spec), 2, device=DEVICE)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    for slot, length in ((0, 33), (1, 34)):
        bounds = torch.tensor([0, length], device=DEVICE)
        part = {n: v[:length] for n, v in tokens.items()}
        y = kernels.mamba2_scan(pool, slots[slot : slot + 1], **part, **params, cu_seqlens=bounds, exact=True)
    step = kernels.mamba2_step(pool, slots[:1], **{n: v[None, 33:34] for n, v in tokens.items()}, **params)
    assert_close(step[0, 0], y[33].float(), "bfloat16", scale=2.0)
    kernels.materialize(pool, slots[:1], torch.tensor([-1], device=DEVICE), slots[:1], A=params["A"])
    assert_same_bits(raw_state(pool, slots[:1]), raw_state(pool, slots[1:]))


@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("act", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_materialize_is_the_state_after_so_many_rows(shape, state, act):
    """Every count from 0 up, -1, and values past the ring, into another slot and in place, against the reference."""
    spec = shape.spec(window=5, spec_len=3, state_dtype=state, act_dtype=act)
    rollout = Rollout(spec, rows=8, pads=0, y_scale=1e9)
    for i in range(5):
        rollout.step(1 + i % 3)
    src = rollout.slots
    dst = random_slots(11, 11)[~torch.isin(random_slots(11, 11), src)]
    counts = torch.tensor([0, 1, 2, 3, 4, 99, -1, -5], dtype=torch.int32, device=DEVICE)
    ours, theirs = (StatePool(rollout.pool.layout, rollout.pool.memory.clone()) for _ in range(2))
    pairs = [(src[:3], counts[[1, 4, 6]], dst[:3], False), (src[3:], counts[3:], src[3:], True)]
    for s, c, d, in_place in pairs:
        before = raw_state(ours, s)
        kernels.materialize(ours, s, c, d, A=rollout.params["A"])
        reference.materialize(theirs, s.long(), c.long(), d.long(), A=rollout.params["A"])
        assert_close(ours.checkpoint(d).float(), theirs.checkpoint(d).double(), state, scale=2.0)
        assert torch.equal(ours["cursor"][d.long()], theirs["cursor"][d.long()])
        if not in_place:
            assert_same_bits(raw_state(ours, s), before)


def test_materialize_passes_over_slots_outside_the_pool():
    rollout = Rollout(mamba2_spec(4, 2, 64, 128), rows=2, pads=0)
    rollout.step(1)
    before = rollout.pool.memory.clone()
    bad = torch.tensor([-1, rollout.pool.slots], device=DEVICE)
    kernels.materialize(rollout.pool, bad, torch.full_like(bad, -1), rollout.slots.long(), A=rollout.params["A"])
    kernels.materialize(rollout.pool, rollout.slots.long(), torch.full_like(bad, -1), bad, A=rollout.params["A"])
    kernels.reset(rollout.pool, bad)
    assert torch.equal(before, rollout.pool.memory)


@pytest.mark.parametrize(
    "options", [{}, {"read_copy": "int8"}, {"read_copy": "bf16"}, {"state_dtype": "float16"}], ids=str
)
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta", "kimi_delta"])
def test_reset_of_every_kind(kind, options):
    spec = RecurrenceSpec(kind, 6, 2, 48, 96, **options)
    slots = torch.tensor([4, 1], dtype=torch.int32, device=DEVICE)
    ours = StatePool(
        SlotLayout(spec), torch.full((6, SlotLayout(spec).slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    )
    theirs = StatePool(ours.layout, ours.memory.clone())
    kernels.reset(ours, slots)
    reference.reset(theirs, slots)
    assert torch.equal(ours.memory, theirs.memory)


def test_arguments_are_checked():
    spec = mamba2_spec(4, 2, 64, 128)
    slots = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    pool = poisoned_pool(spec, slots, 2)
    with pytest.raises(ReplayError, match="A is None"):
        kernels.materialize(pool, slots, slots, slots)
    with pytest.raises(ReplayError, match=r"dst has shape \[2\]; it must be \[1\]"):
        kernels.materialize(pool, slots, slots, slots.repeat(2), A=torch.ones(4, device=DEVICE))
    with pytest.raises(ReplayError, match=r"slots is torch\.float32"):
        kernels.reset(pool, slots.float())
