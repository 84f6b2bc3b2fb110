"""The CUDA GDN and KDA step against a float64 recurrence of the accepted tokens.

Oracle: reference.gated_delta_recurrence in float64 (no ring, no window). Every step of every case also checks: padding
rows are zero, slots that no row names keep every byte, dead ring rows hold NaN and are never used, every output is
written. Expected error: one rounding of o to act_dtype, and as much again from the rounded d rows that outputs read;
16-bit states add their own rounding at every fold.
"""

from __future__ import annotations

import pytest
import torch
from gated_delta_cases import GATES, DeltaRollout, delta_spec, poisoned_delta_pool
from gpu_cases import DEVICE
from replay_cases import assert_close, relative_error, set_state

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import ReplayError, kernels, reference

DELTA = [s for s in MODELS.values() if s.kind != "mamba2"]
SMALL = [s for s in ODD if s.kind != "mamba2" and s.headdim % 16 == 0]
#: Outputs of a 16-bit state carry the rounding of its folds: about three eps of the state's dtype, in units of the
#: bound of the activation dtype.
O_SCALE = {
    ("bfloat16", "bfloat16"): 6.0,
    ("bfloat16", "float16"): 48.0,
    ("bfloat16", "float32"): 2.5e4,
    ("float16", "bfloat16"): 2.0,
    ("float16", "float16"): 6.0,
    ("float16", "float32"): 3e3,
}


def decode(rollout: DeltaRollout, steps: int, seed: int = 0) -> None:
    """Steps of random length and acceptance, -1 and out-of-range values included."""
    rng = torch.Generator().manual_seed(seed)
    spec_len, last = rollout.spec.spec_len, 0
    for i in range(steps):
        tokens = int(torch.randint(1, spec_len + 1, (), generator=rng))
        accepted = torch.randint(0, last + 1, (len(rollout.slots),), generator=rng).int()
        if i % 5 == 3:
            accepted[0], accepted[-1] = -1, 99
        rollout.step(tokens, None if i % 7 == 2 else accepted.to(DEVICE))
        last = tokens


@pytest.mark.parametrize("window, spec_len", [(16, 1), (16, 4), (1, 1)])
@pytest.mark.parametrize("shape", DELTA, ids=lambda s: s.name)
def test_model_shapes(shape, window, spec_len):
    rollout = DeltaRollout(shape.spec(window=window, spec_len=spec_len))
    decode(rollout, 20)
    rollout.check_state()


@pytest.mark.parametrize("act", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SMALL, DELTA[0].split(8), DELTA[-1].split(16)], ids=lambda s: s.name)
def test_dtypes(shape, state, act):
    spec = shape.spec(window=5, spec_len=3, state_dtype=state, act_dtype=act)
    rollout = DeltaRollout(spec, o_scale=O_SCALE.get((state, act), 1.0))
    decode(rollout, 24)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("headdim", [16, 64, 80, 128, 176, 256])
@pytest.mark.parametrize("dstate", [16, 64, 112, 128, 144, 256])
def test_head_sizes(gate, headdim, dstate):
    rollout = DeltaRollout(delta_spec(gate, 4, 2, headdim, dstate, window=6, spec_len=2))
    decode(rollout, 12)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("window, spec_len", [(1, 1), (1, 4), (2, 1), (3, 16), (16, 8), (17, 3), (64, 1), (64, 16)])
@pytest.mark.parametrize("tuning", [(1, 0), (4, 1), (0, 8)], ids=str)
def test_windows_and_cuts(gate, window, spec_len, tuning):
    """Wrapped rings of every length, blocks of parts of heads up to whole groups."""
    spec = delta_spec(gate, 8, 2, 128, 128, window=window, spec_len=spec_len)
    rollout = DeltaRollout(spec, length=80, tuning=kernels.StepTuning(*tuning))
    decode(rollout, 24)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("regime", ["trained", "weak", "strong"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decays_of_every_strength(gate, regime, dtype):
    """g near 0, and g = -5 (bounded) or far below at every token of a full window: finite and right."""
    rollout = DeltaRollout(delta_spec(gate, 4, 2, 128, 128, window=16, spec_len=4, act_dtype=dtype), regime=regime)
    decode(rollout, 40)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
def test_scale_and_plain_keys(gate):
    """A scale of its own; keys and queries that are taken as they are, short enough to keep the recurrence stable."""
    rollout = DeltaRollout(delta_spec(gate, 4, 2, 128, 128, spec_len=2, qk_l2norm=False), scale=0.25)
    rollout.tokens |= {name: rollout.tokens[name] * 0.05 for name in "qk"}
    decode(rollout, 12)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gates_and_parameters(gate, dtype):
    for size in (128, 64):
        rollout = DeltaRollout(delta_spec(gate, 4, 2, size, size, spec_len=2))
        rollout.tokens |= {name: rollout.tokens[name].to(dtype) for name in "ab"}
        rollout.params = {name: value.to(dtype) for name, value in rollout.params.items()}
        decode(rollout, 10)
        rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
def test_views_of_a_convolution_output_and_int64_slots(gate):
    """q, k, v as slices of wider rows, a and b with strides of their own, and the same values dense: equal bits."""
    outs = []
    for strided in (False, True):
        rollout = DeltaRollout(delta_spec(gate, 4, 2, 128, 128, spec_len=2))
        if strided:
            parts = {n: rollout.tokens[n].flatten(2) for n in "qkv"}
            wide = torch.cat([*parts.values(), torch.full_like(parts["v"], float("nan"))], dim=2)
            pieces = wide.split([p.shape[2] for p in parts.values()] + [parts["v"].shape[2]], dim=2)
            for name, piece in zip(parts, pieces, strict=False):
                rollout.tokens[name] = piece.unflatten(2, rollout.tokens[name].shape[2:])
            rollout.tokens |= {n: torch.stack([rollout.tokens[n]] * 3, dim=-1)[..., 1] for n in "ab"}
            rollout.slots = rollout.slots.long()
        outs.append([rollout.step(2) for _ in range(8)])
    for dense, view in zip(*outs, strict=True):
        assert torch.equal(dense, view)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("spec_len", [1, 3])
def test_fp16_outputs_of_large_states(gate, spec_len):
    """A state so large that d and S kn leave fp16's range while the outputs do not: nothing becomes inf."""
    spec = delta_spec(gate, 4, 2, 128, 128, act_dtype="float16", window=4, spec_len=spec_len, stagger=False)
    rollout = DeltaRollout(spec, regime="weak")
    own = rollout.slots[rollout.live].long()
    set_state(rollout.pool, own, torch.randn_like(rollout.pool["state"][own]) * 6e4)
    rollout.state = rollout.pool["state"][own].double()
    rollout.step(spec_len)
    for _ in range(8):
        o = rollout.run(rollout.next_tokens(spec_len), None)
        assert torch.isfinite(o[rollout.live]).all()
        assert not torch.isinf(rollout.pool["ring_d"][own]).any()
    assert torch.isfinite(rollout.final_state()).all()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("heads, groups", [(6, 2), (14, 1)])
def test_heads_per_group_3_and_14(gate, heads, groups):
    """In the tuned kernel; test_dtypes has them in the generic one."""
    rollout = DeltaRollout(delta_spec(gate, heads, groups, 128, 128, window=6, spec_len=4))
    decode(rollout, 16)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
def test_one_rejection_counts_once(gate):
    """A step of which two tokens stay, then 100 that all stay."""
    rollout = DeltaRollout(delta_spec(gate, 4, 2, 128, 128, spec_len=4))
    for tokens in (1, 1, 1, 4):
        rollout.step(tokens)
    rollout.step(1, torch.full_like(rollout.slots, 2))
    for _ in range(100):
        rollout.step(1)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
def test_nothing_accepted_after_a_flush(gate):
    """accepted = 0 behind a step that folded, and again: the folded state, an empty ring, no row folded twice."""
    spec = delta_spec(gate, 4, 2, 128, 128, window=4, spec_len=2, stagger=False)
    rollout = DeltaRollout(spec)
    nothing = torch.zeros(len(rollout.slots), dtype=torch.int32, device=DEVICE)
    for i in range(12):
        rollout.step(2, nothing if i in (3, 4, 5, 9) else None)
    rollout.check_state()


@pytest.mark.parametrize("gate", GATES)
def test_error_does_not_grow_over_4096_steps(gate):
    """State error against float64 at the end is at most twice that at an eighth of the way (plus one rounding)."""
    spec = delta_spec(gate, 2, 1, 128, 128, window=16, spec_len=4)
    rollout = DeltaRollout(spec, rows=2, regime="trained", length=512, pads=0)
    rng = torch.Generator().manual_seed(5)
    errors, last = [], 0
    for i in range(4096):
        tokens = 1 + i % 4
        accepted = torch.randint(0, last + 1, (2,), generator=rng).int().to(DEVICE)
        if i % 64 == 0:
            rollout.step(tokens, accepted)
        else:
            step = rollout.next_tokens(tokens)
            rollout.commit(accepted.long())
            rollout.run(step, accepted)
        last = tokens
        if i in (511, 4095):
            rollout.commit(torch.full((2,), last, device=DEVICE))
            errors.append(relative_error(rollout.final_state().cpu(), rollout.state.cpu()))
            last, own = 0, rollout.slots
            kernels.materialize(rollout.pool, own, torch.full_like(own, -1), own)
    assert 0 < errors[0] < 2e-6 and errors[1] < 2 * errors[0] + 1e-7, errors


@pytest.mark.parametrize("gate", GATES)
def test_more_rows_than_blocks_fit_at_once(gate):
    """Every row of a large batch, at its own phase, against float64."""
    big = DeltaRollout(delta_spec(gate, 8, 2, 128, 128, window=6), rows=200, pads=0, length=12)
    for _ in range(12):
        big.step(1)
    big.check_state()


@pytest.mark.parametrize("gate", GATES)
def test_teeth(gate):
    """A comparison that passes must fail once one ring row, one input or one state element is another."""
    for region in ("ring_k", "ring_k_rnorm", "ring_d", "ring_g", "state"):
        rollout = DeltaRollout(delta_spec(gate, 4, 2, 128, 128, stagger=False), regime="trained")
        for _ in range(6):
            rollout.step(1)
        slot = int(rollout.slots[0])
        rollout.pool[region][slot][1, 3] -= 2.0
        with pytest.raises(AssertionError):
            rollout.step(1)


def test_teeth_of_the_fold():
    """v and beta of ring rows are read by folds alone: another value changes the state and no earlier output."""
    for region in ("ring_v", "ring_beta"):
        rollout = DeltaRollout(delta_spec("gdn", 4, 2, 128, 128, stagger=False))
        for _ in range(6):
            rollout.step(1)
        rollout.pool[region][int(rollout.slots[0])][1, 3] += 0.7
        rollout.step(1)
        with pytest.raises(AssertionError):
            rollout.check_state()


def test_arguments_are_checked():
    rollout = DeltaRollout(delta_spec("kda", 4, 2, 128, 128, spec_len=2), pads=0)
    good = {name: value[:, :1] for name, value in rollout.tokens.items()} | rollout.params

    def step(message: str, pool=rollout.pool, **changes):
        with pytest.raises(ReplayError, match=message):
            kernels.gated_delta_step(pool, changes.pop("slots", rollout.slots), **(good | changes))

    step(r"v has shape .*it must be \[", v=good["v"][:, :, :2])
    step("k is torch.float32; it must be torch.bfloat16", k=good["k"].float())
    step(r"a has shape \[2, 1, 4\]; it must be \[2, 1, 4, 128\]", a=good["a"][..., 0])
    step("slots is torch.int16; it must be int32 or int64", slots=rollout.slots.short())
    step("scale is 0.0; it must be a finite number other than 0", scale=0.0)
    step("b has dtype float64; it must be float32", b=good["b"].double())
    step("dt_bias is torch.int64; it must be a floating dtype", dt_bias=good["dt_bias"].long())
    three = {name: value[:, :3] for name, value in rollout.tokens.items()}
    step("tokens is 3; it must be from 1 to 2", **three)
    step("heads_per_block is 3; it must be 0 or divide", tuning=kernels.StepTuning(3))
    own = torch.arange(2, dtype=torch.int32, device=DEVICE)
    odd = delta_spec("kda", 4, 2, 128, 24)
    eight = {n: u[..., :24].contiguous() if n in ("q", "k", "a", "dt_bias") else u for n, u in good.items()}
    with pytest.raises(ReplayError, match="dstate is 24; the kernels have multiples of 16"):
        kernels.gated_delta_step(poisoned_delta_pool(odd, own, 3), own, **eight)
    copied = delta_spec("kda", 4, 2, 128, 128, read_copy="int8")
    with pytest.raises(ReplayError, match="read_copy"):
        kernels.gated_delta_step(poisoned_delta_pool(copied, own, 3), own, **good)
    with pytest.raises(ReplayError, match="A is given for a kimi_delta pool"):
        kernels.materialize(rollout.pool, own, own, own, A=torch.ones(4, device=DEVICE))


def test_no_rows_and_slots_outside_the_pool():
    rollout = DeltaRollout(delta_spec("gdn", 4, 2, 128, 128), rows=2, pads=0)
    step = {name: value[:, :1] for name, value in rollout.tokens.items()}
    empty = {name: value[:0] for name, value in step.items()}
    none = kernels.gated_delta_step(rollout.pool, rollout.slots[:0], **empty, **rollout.params)
    assert none.shape == (0, 1, 4, 128)
    before = rollout.pool.memory.clone()
    slots = torch.tensor([rollout.pool.slots, -7], device=DEVICE)
    o = kernels.gated_delta_step(rollout.pool, slots, **step, **rollout.params)
    assert not o.any() and torch.equal(before, rollout.pool.memory)


@pytest.mark.parametrize("gate", GATES)
def test_the_reference_agrees(gate):
    """reference.gated_delta_step on the same device and bits: the same outputs to rounding, the same cursors."""
    rollout = DeltaRollout(delta_spec(gate, 4, 2, 128, 128, window=6, spec_len=3), pads=0)
    pool = type(rollout.pool)(rollout.pool.layout, rollout.pool.memory.clone())
    own = rollout.slots.long()
    for i in range(12):
        step = rollout.next_tokens(1 + i % 3)
        accepted = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
        o = rollout.run(step, accepted)
        ref = reference.gated_delta_step(pool, rollout.slots, **step, **rollout.params, accepted=accepted)
        assert_close(o, ref.double(), "bfloat16", scale=2.0)
        assert torch.equal(pool["cursor"][own], rollout.pool["cursor"][own])
    counts = torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE)
    kernels.materialize(rollout.pool, rollout.slots, counts, rollout.slots)
    reference.materialize(pool, rollout.slots, counts, rollout.slots)
    assert_close(rollout.pool.checkpoint(own), pool.checkpoint(own).double(), "float32", scale=2.0)
    assert torch.equal(pool["cursor"][own], rollout.pool["cursor"][own])
