"""The CUDA Mamba-2 step against a float64 recurrence of the accepted tokens.

Oracle: reference.mamba2_recurrence in float64 (no ring, no window). Every step of every case also checks: padding rows
are zero, slots that no row names keep every byte, dead ring rows hold NaN and are never used, every output is written.
Expected error: one rounding of y to act_dtype; 16-bit states add their own rounding at every fold.

Cases that broke other implementations: NaN in dead rows and in padding's slots; decays near 0 and near 1; heads per
group 3 and 14; P and N that are no power of two; windows 1, 2, 3, 16, 64; T from 1 to 16, also above the window;
rejection of everything, of nothing, and out-of-range values of `accepted`; every optional argument left out; strided
views; 4,096 steps.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import DEVICE, Rollout, mamba2_spec, poisoned_pool
from replay_cases import assert_close, make_inputs, relative_error

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import ReplayError, kernels, reference

NEMOTRON = [s for s in MODELS.values() if s.kind == "mamba2"]
SMALL = [s for s in ODD if s.kind == "mamba2" and s.headdim % 16 == 0]
#: Outputs of a 16-bit state carry the rounding of its folds: about three eps of the state's dtype, in units of the
#: bound of the activation dtype.
Y_SCALE = {
    ("bfloat16", "bfloat16"): 6.0,
    ("bfloat16", "float16"): 48.0,
    ("bfloat16", "float32"): 2.5e4,
    ("float16", "bfloat16"): 2.0,
    ("float16", "float16"): 6.0,
    ("float16", "float32"): 3e3,
}


def y_scale(state: str, act: str) -> float:
    """Multiple of the activation dtype's own bound."""
    return Y_SCALE.get((state, act), 1.0)


def decode(rollout: Rollout, steps: int, seed: int = 0) -> None:
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
@pytest.mark.parametrize("shape", NEMOTRON, ids=lambda s: s.name)
def test_model_shapes(shape, window, spec_len):
    rollout = Rollout(shape.spec(window=window, spec_len=spec_len), rows=2)
    decode(rollout, 20)
    rollout.check_state()


@pytest.mark.parametrize("act", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SMALL, NEMOTRON[1].split(8)], ids=lambda s: s.name)
def test_dtypes(shape, state, act):
    spec = shape.spec(window=5, spec_len=3, state_dtype=state, act_dtype=act)
    rollout = Rollout(spec, y_scale=y_scale(state, act))
    decode(rollout, 24)
    rollout.check_state()


@pytest.mark.parametrize("headdim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dstate", [16, 48, 64, 96, 128, 256])
def test_head_sizes(headdim, dstate):
    rollout = Rollout(mamba2_spec(4, 2, headdim, dstate, window=6, spec_len=2))
    decode(rollout, 16)
    rollout.check_state()


@pytest.mark.parametrize("window, spec_len", [(1, 1), (1, 4), (2, 1), (3, 16), (16, 8), (17, 3), (64, 1), (64, 16)])
@pytest.mark.parametrize("heads_per_block", [1, 2, 4])
def test_windows_and_cuts(window, spec_len, heads_per_block):
    spec = mamba2_spec(8, 2, 64, 128, window=window, spec_len=spec_len)
    rollout = Rollout(spec, length=80, tuning=kernels.StepTuning(heads_per_block))
    decode(rollout, 30)
    rollout.check_state()


@pytest.mark.parametrize("regime", ["trained", "weak", "strong"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decays_of_every_strength(regime, dtype):
    spec = mamba2_spec(4, 2, 64, 128, window=16, spec_len=4, act_dtype=dtype)
    rollout = Rollout(spec, regime=regime)
    decode(rollout, 40)
    rollout.check_state()


@pytest.mark.parametrize("options", [{"dt_softplus": False, "dt_max": 0.2}, {"dt_min": 0.05, "dt_max": 0.1}], ids=str)
def test_time_step_limits(options):
    rollout = Rollout(mamba2_spec(4, 2, 64, 128, spec_len=2, **options))
    decode(rollout, 12)
    rollout.check_state()


@pytest.mark.parametrize("left_out", ["D", "z", "dt_bias"])
def test_optional_arguments(left_out):
    for dstate in (128, 64):
        rollout = Rollout(mamba2_spec(4, 2, 64, dstate, spec_len=2))
        (rollout.tokens if left_out == "z" else rollout.params).pop(left_out)
        decode(rollout, 10)
        rollout.check_state()


def test_skip_weight_per_channel_and_16_bit_parameters():
    rollout = Rollout(mamba2_spec(4, 2, 64, 128))
    rollout.params["D"] = torch.randn(4, 64, device=DEVICE, dtype=torch.bfloat16)
    rollout.params["dt_bias"] = rollout.params["dt_bias"].half()
    rollout.tokens["dt"] = rollout.tokens["dt"].bfloat16()
    decode(rollout, 10)
    rollout.check_state()


def test_views_of_a_convolution_output_and_int64_slots():
    """x, B, C, z as slices of wider rows, as a model passes them, dt with gaps, and the same dense: equal bits."""
    spec = mamba2_spec(4, 2, 64, 128, spec_len=2)
    outs = []
    for strided in (False, True):
        rollout = Rollout(spec)
        if strided:
            parts = {n: rollout.tokens[n].flatten(2) for n in ("x", "B", "C", "z")}
            wide = torch.cat([*parts.values(), torch.zeros_like(parts["x"])], dim=2)
            for name, piece in zip(
                parts, wide.split([p.shape[2] for p in parts.values()] + [256], dim=2), strict=False
            ):
                rollout.tokens[name] = piece.unflatten(2, rollout.tokens[name].shape[2:])
            rollout.tokens["dt"] = torch.stack([rollout.tokens["dt"]] * 3, dim=-1)[..., 1]
            rollout.slots = rollout.slots.long()
        outs.append([rollout.step(2) for _ in range(6)])
    for dense, view in zip(*outs, strict=True):
        assert torch.equal(dense, view)


@pytest.mark.parametrize("heads, groups", [(6, 2), (14, 1)])
def test_heads_per_group_3_and_14(heads, groups):
    """In the tuned kernel; test_dtypes has them in the generic one."""
    rollout = Rollout(mamba2_spec(heads, groups, 64, 128, window=6, spec_len=4))
    decode(rollout, 20)
    rollout.check_state()


def test_one_rejection_counts_once():
    """A step of which two tokens stay, then 100 that all stay."""
    rollout = Rollout(mamba2_spec(4, 2, 64, 128, spec_len=4))
    for tokens in (1, 1, 1, 4):
        rollout.step(tokens)
    rollout.step(1, torch.full_like(rollout.slots, 2))
    for _ in range(100):
        rollout.step(1)
    rollout.check_state()


def test_states_that_grow():
    """A > 0: no exponent is cut off."""
    rollout = Rollout(mamba2_spec(4, 2, 64, 128, spec_len=4))
    rollout.params["A"] = rollout.params["A"].abs() * 0.05
    decode(rollout, 20)
    rollout.check_state()


def test_fp16_outputs_of_a_large_state():
    """Elements of the state are past fp16's largest number, the outputs are not."""
    spec = mamba2_spec(4, 2, 64, 128, act_dtype="float16", window=4)
    slots = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    pool = poisoned_pool(spec, slots, 1)
    pool["state"].fill_(1e5)
    inputs = make_inputs(spec, 1, 1, regime="weak")
    inputs.tokens["C"].zero_()
    inputs.tokens["C"][..., 0] = 0.5
    on_gpu = {name: value.to(DEVICE) for name, value in (inputs.tokens | inputs.params).items()}
    y = kernels.mamba2_step(pool, slots, **on_gpu)
    torch.testing.assert_close(y.float(), torch.full_like(y.float(), 5e4), rtol=1e-3, atol=0)


def test_error_does_not_grow_over_4096_steps():
    """State error against float64 at the end is at most twice that at an eighth of the way (plus one rounding)."""
    rollout = Rollout(mamba2_spec(4, 2, 64, 128, window=16, spec_len=4), rows=2, regime="trained", length=512, pads=0)
    rng = torch.Generator().manual_seed(5)
    errors, last = [], 0
    for i in range(4096):
        tokens = 1 + i % 4
        accepted = torch.randint(0, last + 1, (2,), generator=rng).int().to(DEVICE)
        rollout.step(tokens, accepted) if i % 8 == 0 else quiet_step(rollout, tokens, accepted)
        last = tokens
        if i in (511, 4095):
            rollout.commit(torch.full((2,), last, device=DEVICE))
            errors.append(relative_error(rollout.final_state().cpu(), rollout.state.cpu()))
            last = 0
            own = rollout.slots
            kernels.materialize(rollout.pool, own, torch.full_like(own, -1), own, A=rollout.params["A"])
    assert 0 < errors[0] < 1e-6 and errors[1] < 2 * errors[0] + 1e-7, errors


def quiet_step(rollout: Rollout, tokens: int, accepted: torch.Tensor) -> None:
    """Rollout.step without its checks."""
    positions = [(rollout.at + i) % rollout.length for i in range(tokens)]
    rollout.at += tokens
    step = {name: value[:, positions] for name, value in rollout.tokens.items()}
    rollout.commit(accepted.long())
    kernels.mamba2_step(rollout.pool, rollout.slots, **step, **rollout.params, accepted=accepted)
    rollout.draft = step


def test_more_rows_than_blocks_fit_at_once():
    """Every row of a large batch, at its own phase, against the same row decoded alone."""
    spec = mamba2_spec(16, 2, 64, 128)
    big = Rollout(spec, rows=400, pads=0, length=20)
    for _ in range(20):
        big.step(1)
    big.check_state()


def test_teeth():
    """A comparison that passes must fail once one ring row, one input or one state element is another."""
    for region in ("ring_x", "ring_b", "ring_dt", "state"):
        rollout = Rollout(mamba2_spec(4, 2, 64, 128, stagger=False), regime="trained")
        for _ in range(6):
            rollout.step(1)
        slot = int(rollout.slots[0])
        rollout.pool[region][slot][1, 3] += 0.7
        with pytest.raises(AssertionError):
            rollout.step(1)


def test_arguments_are_checked():
    spec = mamba2_spec(4, 2, 64, 128, spec_len=2)
    rollout = Rollout(spec, pads=0)
    good = {name: value[:, :1] for name, value in rollout.tokens.items()} | rollout.params

    def step(message: str, pool=rollout.pool, **changes):
        with pytest.raises(ReplayError, match=message):
            kernels.mamba2_step(pool, changes.pop("slots", rollout.slots), **(good | changes))

    step(r"x has shape .*it must be \[", x=good["x"][:, :, :2])
    step("B is torch.float32; it must be torch.bfloat16", B=good["B"].float())
    step("slots is torch.int16; it must be int32 or int64", slots=rollout.slots.short())
    step("is on cpu; it must be on cuda", dt=good["dt"].cpu())
    three = {name: value[:, :3] for name, value in rollout.tokens.items()}
    step("tokens is 3; it must be from 1 to 2", **three)
    step("heads_per_block is 3; it must be 0 or divide", tuning=kernels.StepTuning(3))
    odd = mamba2_spec(4, 2, 64, 24)
    own = torch.arange(3, dtype=torch.int32, device=DEVICE)
    eight = {n: v[..., :24] if n in "BC" else v for n, v in good.items()}
    with pytest.raises(ReplayError, match="dstate is 24; the kernels have multiples of 16"):
        kernels.mamba2_step(poisoned_pool(odd, own, 4), own, **eight)
    copied = mamba2_spec(4, 2, 64, 128, read_copy="int8")
    with pytest.raises(ReplayError, match="read_copy"):
        kernels.mamba2_step(poisoned_pool(copied, own, 4), own, **good)


def test_no_rows():
    rollout = Rollout(mamba2_spec(4, 2, 64, 128), pads=0)
    empty = {name: value[:0, :1] for name, value in rollout.tokens.items()}
    assert kernels.mamba2_step(rollout.pool, rollout.slots[:0], **empty, **rollout.params).shape == (0, 1, 4, 64)


def test_slots_outside_the_pool_are_padding():
    rollout = Rollout(mamba2_spec(4, 2, 64, 128), rows=2, pads=0)
    before = rollout.pool.memory.clone()
    slots = torch.tensor([rollout.pool.slots, -7], device=DEVICE)
    step = {name: value[:, :1] for name, value in rollout.tokens.items()}
    y = kernels.mamba2_step(rollout.pool, slots, **step, **rollout.params)
    assert not y.any() and torch.equal(before, rollout.pool.memory)


def test_outputs_of_the_reference_agree():
    """reference.mamba2_step on the same device and bits: the same outputs to rounding, the same cursors."""
    spec = mamba2_spec(4, 2, 64, 128, window=6, spec_len=3)
    rollout = Rollout(spec, pads=0)
    pool = type(rollout.pool)(rollout.pool.layout, rollout.pool.memory.clone())
    for i in range(12):
        tokens = 1 + i % 3
        step = {name: value[:, i : i + tokens] for name, value in rollout.tokens.items()}
        accepted = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
        y = kernels.mamba2_step(rollout.pool, rollout.slots, **step, **rollout.params, accepted=accepted)
        ref = reference.mamba2_step(pool, rollout.slots, **step, **rollout.params, accepted=accepted)
        assert_close(y, ref, "bfloat16", scale=2.0)
        assert torch.equal(pool["cursor"][rollout.slots.long()], rollout.pool["cursor"][rollout.slots.long()])
