"""The scale of a GDN state (common/state_scale.cuh) in the CUDA source of step, scans and materialize, run on the CPU.

A scale is renewed where decays have made it small, at tokens that follow from the decays alone. So what a slot holds,
elements and scale, has the same bits whichever kernel folded the tokens and however they were grouped. Oracle: the
recurrence in float64. As in test_delta_step_emulator.py, tests/emulator stands in for the GPU.
"""

from __future__ import annotations

import pytest
import torch
from replay_cases import (
    Inputs,
    assert_close,
    assert_same_bits,
    make_inputs,
    oracle,
    raw_state,
    run_scan,
    set_state,
)

from trtllm_replayssm import RecurrenceSpec, SlotLayout, kernels
from trtllm_replayssm.kernels import StepTuning
from trtllm_replayssm.pool import StatePool

pytest_plugins = ("step_emulator",)

LENGTH = 44
SLOTS = torch.tensor([1, 0], dtype=torch.int32)
#: Raw gates and how often they come: decays near 1, of 1/2, 1/1000 and exactly 0.
GATES = torch.tensor([-14.0, 0.0, 6.9, float("inf")])
REGIMES = {
    "near one": (1.0, 0.0, 0.0, 0.0),
    "halves": (0.0, 1.0, 0.0, 0.0),
    "thousandths": (0.0, 0.0, 1.0, 0.0),
    "mixed": (0.4, 0.35, 0.15, 0.1),
    "mild": (0.3, 0.6, 0.1, 0.0),
}


def spec_of(sizes: tuple[int, ...] = (2, 1, 128, 128), **options) -> RecurrenceSpec:
    return RecurrenceSpec("gated_delta", *sizes, **options)


def gdn_inputs(sizes: tuple[int, ...] = (2, 1, 128, 128), regime: str = "mixed", act: str = "bfloat16") -> Inputs:
    """Two sequences; q, k and v have the values of bf16 numbers whatever the activations' dtype."""
    made = make_inputs(spec_of(sizes), 2, LENGTH, seed=21)
    chances = torch.tensor(REGIMES[regime]).expand(made.tokens["a"].numel(), 4)
    rng = torch.Generator().manual_seed(5)
    tokens = dict(made.tokens)
    tokens["a"] = GATES[torch.multinomial(chances, 1, generator=rng)].reshape(made.tokens["a"].shape)
    dtype = getattr(torch, act)
    tokens |= {name: tokens[name].to(dtype) for name in "qkv"}
    params = {name: torch.zeros_like(value) for name, value in made.params.items()}
    return Inputs(spec_of(sizes, act_dtype=act), tokens, params)


def zeros(spec: RecurrenceSpec) -> torch.Tensor:
    return torch.zeros(2, spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64)


def random_state(spec: RecurrenceSpec) -> torch.Tensor:
    """Checkpoints of the two sequences, float64."""
    rng = torch.Generator().manual_seed(2)
    return torch.randn(2, spec.nheads, spec.headdim, spec.dstate, generator=rng, dtype=torch.float64)


def pool_of(spec: RecurrenceSpec, start: torch.Tensor | float = 0.0, scale: float = 1.0) -> StatePool:
    """A pool of two slots whose checkpoints are ``start``, kept with a scale."""
    pool = StatePool.allocate(SlotLayout(spec), 2)
    kernels.reset(pool, SLOTS)
    set_state(pool, SLOTS, start / scale)
    if "state_scale" in pool:
        pool["state_scale"].fill_(scale)
    return pool


def steps(pool: StatePool, inputs: Inputs, first: int, last: int, pattern=(1,), tuning=(0, 0)) -> torch.Tensor:
    """Outputs of steps of the pattern's lengths over tokens first .. last-1, everything accepted."""
    outputs, at, i = [], first, 0
    while at < last:
        count = min(pattern[i % len(pattern)], last - at)
        step = inputs.span(at, at + count) | inputs.params
        outputs.append(kernels.gated_delta_step(pool, SLOTS, **step, tuning=StepTuning(*tuning)))
        at, i = at + count, i + 1
    return torch.cat(outputs, dim=1)


def scan(pool: StatePool, inputs: Inputs, first: int, last: int, resume: bool, exact: bool = True) -> torch.Tensor:
    tokens, bounds = inputs.packed([(row, first, last) for row in range(2)])
    flags = torch.full((2,), resume, device=SLOTS.device)
    o = kernels.gated_delta_scan(
        pool, SLOTS, **tokens, **inputs.params, cu_seqlens=bounds, has_initial=flags, exact=exact
    )
    return o.unflatten(0, (2, last - first))


def folded(pool: StatePool) -> torch.Tensor:
    """What the slots hold after everything is folded, in place, elements then scales."""
    kernels.materialize(pool, SLOTS, torch.full_like(SLOTS, -1), SLOTS)
    return raw_state(pool, SLOTS)


def assert_scales(pool: StatePool, renewed: bool) -> None:
    """All copies alike and in range; ``renewed``: different heads have come to different scales."""
    scale = pool["state_scale"]
    assert torch.equal(scale, scale[..., :1].expand_as(scale))
    assert ((scale >= 2.0**-16) & (scale <= 2.0**16)).all()
    if renewed:
        assert scale.unique().numel() > 1


@pytest.mark.parametrize("regime", REGIMES)
def test_elements_and_scale_do_not_depend_on_what_folds(emulated, regime):
    """Windows 1, 5 and 16, one and several tokens, tuned and generic step, exact scan from nothing and from a ring."""
    inputs, wide = gdn_inputs(regime=regime), gdn_inputs(regime=regime, act="float32")
    pool = pool_of(inputs.spec)
    scan(pool, inputs, 0, LENGTH, resume=False)
    want = raw_state(pool, SLOTS)
    assert_scales(pool, renewed=regime == "mixed")
    assert_close(pool.checkpoint(SLOTS), oracle(inputs, state=zeros(inputs.spec))[1], "float32", what="state")
    for window, pattern, tuning in ((1, (1,), (0, 0)), (5, (1,), (2, 1)), (16, (4, 1, 3), (0, 8)), (5, (5, 2), (0, 0))):
        for source in (inputs, wide):
            pool = pool_of(spec_of(window=window, spec_len=max(pattern), act_dtype=source.spec.act_dtype))
            steps(pool, source, 0, LENGTH, pattern, tuning if source is inputs else (0, 0))
            assert_scales(pool, renewed=False)
            assert_same_bits(folded(pool), want, f"window {window}, {source.spec.act_dtype}")
    pool = pool_of(spec_of(window=16))
    steps(pool, inputs, 0, 27)
    scan(pool, inputs, 27, LENGTH, resume=True)
    assert_same_bits(raw_state(pool, SLOTS), want, "a scan behind steps")


@pytest.mark.parametrize("sizes", [(3, 1, 48, 80), (2, 2, 64, 256)], ids=str)
def test_other_sizes(emulated, sizes):
    """The generic kernels against the exact scan and float64."""
    inputs = gdn_inputs(sizes)
    pool = pool_of(inputs.spec)
    o = scan(pool, inputs, 0, LENGTH, resume=False)
    outputs, states = oracle(inputs, state=zeros(inputs.spec))
    assert_close(o, outputs, "bfloat16")
    assert_close(pool.checkpoint(SLOTS), states, "float32", what="state")
    want = raw_state(pool, SLOTS)
    for window, pattern in ((1, (1,)), (20, (2, 3))):
        pool = pool_of(spec_of(sizes, window=window, spec_len=max(pattern)))
        assert_close(steps(pool, inputs, 0, LENGTH, pattern), outputs, "bfloat16", scale=2.0)
        assert_same_bits(folded(pool), want, f"window {window}")


@pytest.mark.parametrize("sizes", [(2, 1, 128, 128), (3, 1, 48, 80)], ids=str)
@pytest.mark.parametrize("spec_len", [1, 4, 12])
@pytest.mark.parametrize("scale", [1.0, 1.6e-5, 5e4, 1e5])
def test_outputs_read_elements_times_scale(emulated, sizes, spec_len, scale):
    """A checkpoint whose scale is anything, also out of range: outputs and the state are those of float64."""
    inputs = gdn_inputs(sizes, regime="near one" if spec_len == 4 else "mixed")
    start = random_state(inputs.spec)
    outputs, states = oracle(inputs, state=start)
    pool = pool_of(spec_of(sizes, window=14, spec_len=spec_len), start.float(), scale)
    assert_close(steps(pool, inputs, 0, LENGTH, (spec_len,)), outputs, "bfloat16", scale=2.0)
    kernels.materialize(pool, SLOTS, torch.full_like(SLOTS, -1), SLOTS)
    assert_close(pool.checkpoint(SLOTS), states, "float32", scale=2.0, what="state")


@pytest.mark.parametrize("regime", ["near one", "mixed"])
@pytest.mark.parametrize("exact", [False, True], ids=["chunks", "exact"])
def test_scans_begin_with_a_scale(emulated, exact, regime):
    """From a state with a scale and live ring rows; chunks leave a scale of 1; steps go on from there."""
    inputs = gdn_inputs(regime=regime)
    start = random_state(inputs.spec)
    outputs, states = oracle(inputs, state=start)
    pool = pool_of(spec_of(window=8), start.float(), 2e-5)
    parts = [
        steps(pool, inputs, 0, 13),
        scan(pool, inputs, 13, 33, resume=True, exact=exact),
        steps(pool, inputs, 33, LENGTH),
    ]
    assert_close(torch.cat(parts, dim=1), outputs, "bfloat16", scale=2.0)
    folded(pool)
    assert_close(pool.checkpoint(SLOTS), states, "float32", scale=2.0, what="state")
    scan(pool, inputs, 0, 20, resume=False, exact=exact)
    assert_scales(pool, renewed=exact and regime == "mixed")
    assert exact or (pool["state_scale"] == 1.0).all()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
def test_a_16_bit_state_has_no_scale(emulated, state_dtype):
    """Folds of the same rows leave the same bits, whichever kernel does them; the state is that of float64."""
    inputs = gdn_inputs(regime="halves")
    wide = gdn_inputs(regime="halves", act="float32")
    start = 0.5 * random_state(inputs.spec)

    def pool(act="bfloat16", **options):
        spec = spec_of(window=24, stagger=False, state_dtype=state_dtype, act_dtype=act, **options)
        assert "state_scale" not in SlotLayout(spec)
        return pool_of(spec, start.to(getattr(torch, state_dtype)))

    # One fold of 24 rows: by a step of one token and of several, by materialize.
    results = []
    for source, pattern in ((inputs, (1,)), (wide, (1,)), (inputs, (4,)), (wide, (4,))):
        one = pool(source.spec.act_dtype, spec_len=max(pattern))
        steps(one, source, 0, 24, pattern)
        other = StatePool(one.layout, one.memory.clone())
        steps(one, source, 24, 25)
        assert (one["cursor"][..., 1] == 0).all()
        results += [raw_state(one, SLOTS), folded(other)]
    for result in results[1:]:
        assert_same_bits(result, results[0])
    first = pool()["state"][SLOTS.long()].double()
    ours = results[0].reshape(first.shape)
    assert_close(ours, oracle(inputs, 0, 24, state=first)[1], state_dtype, what="state")
    # From nothing an exact scan is one fold. Behind ring rows it is two, and one rounding.
    one, other = pool(), pool()
    for each in (one, other):
        kernels.reset(each, SLOTS)
    scan(one, inputs, 0, 24, resume=False)
    steps(other, inputs, 0, 24)
    assert_same_bits(folded(other), raw_state(one, SLOTS))
    one = pool()
    steps(one, inputs, 0, 20)
    o = scan(one, inputs, 20, LENGTH, resume=True)
    outputs, states = oracle(inputs, state=first)
    assert_close(o, outputs[:, 20:], "bfloat16")
    assert_close(one.checkpoint(SLOTS), states, state_dtype, what="state")


@pytest.mark.parametrize("spec_len", [1, 4])
def test_a_zeroed_slot_heals_itself(emulated, spec_len):
    """A scale of 0 beside a state of zeros is an empty checkpoint, in reads and after the first fold."""
    inputs = gdn_inputs()
    outputs, states = oracle(inputs, state=zeros(inputs.spec))
    pool = pool_of(spec_of(window=5, spec_len=spec_len))
    pool["state_scale"].zero_()
    assert_close(steps(pool, inputs, 0, LENGTH, (spec_len,)), outputs, "bfloat16", scale=2.0)
    folded(pool)
    assert_scales(pool, renewed=True)
    assert_close(pool.checkpoint(SLOTS), states, "float32", what="state")
    pool["state"].zero_()
    pool["state_scale"].zero_()
    assert_close(scan(pool, inputs, 0, LENGTH, resume=True), outputs, "bfloat16")
    assert_scales(pool, renewed=True)


def weak_gates_error(kernel: bool) -> float:
    """Error in norm, over that of the state, behind 600 tokens of one gate near 0 and a scale of 0.55 in front of them:
    of the exact scan, or of the reference, which multiplies every element by every decay (and has a scale of 1)."""
    spec, count = spec_of((2, 1, 16, 16), act_dtype="float32"), 600
    made = make_inputs(spec, 2, count, seed=3)
    inputs = Inputs(spec, made.tokens | {"a": torch.full_like(made.tokens["a"], -14.0)},
                    {name: torch.zeros_like(value) for name, value in made.params.items()})  # fmt: skip
    decay = torch.exp(-torch.nn.functional.softplus(torch.tensor(-14.0))).double()
    raw = (-decay.log()).expm1().log()  # the gate whose decay in float64 is the fp32 one
    exact = Inputs(spec, inputs.tokens | {"a": raw.expand(inputs.tokens["a"].shape)}, inputs.params)
    pool = pool_of(spec, random_state(spec).float(), 0.55 if kernel else 1.0)

    def checkpoint() -> torch.Tensor:
        return pool["state"][SLOTS.long()] * pool["state_scale"][SLOTS.long()][..., :1, None]

    want = oracle(exact, state=checkpoint())[1]
    if kernel:
        scan(pool, inputs, 0, count, resume=True)
    else:
        run_scan(pool, SLOTS.tolist(), inputs, [(0, 0, count), (1, 0, count)], resume=True)
    return float((checkpoint() - want).norm() / want.norm())


def test_a_scale_does_not_drift(emulated, built):
    """Under weak gates a state is as near to float64 as where decays meet every element; not so with an fp32 scale."""
    ours, plain = weak_gates_error(kernel=True), weak_gates_error(kernel=False)
    product = "__dmul_rn(scale, static_cast<double>(decay))"
    single = "__fmul_rn(static_cast<float>(scale), decay)"
    emulated(built.corrupted("../common/state_scale.cuh", product, single, kernel="scan_fp32"))
    rounded = weak_gates_error(kernel=True)
    assert ours <= plain < rounded


#: Header, text of the kernel, and what replaces it.
CORRUPTIONS = {
    "weight": ("row_weights.cuh", "__fmul_rn(beta, __frcp_rn(own.scale))", "beta"),
    "range": ("row_weights.cuh", "__all_sync(kFullMask, scale_stays(behind) || lane >= count)", "true"),
    "renewal": ("row_weights.cuh", "own.renew = step.renew, own.scale", "own.scale"),
    "held": ("fold.cuh", "__fmul_rn(row.weights.scale, part[0])", "part[0]"),
    "one token": ("step_parts.cuh", "1.0f : expf(behind) * up_to * scale)", "1.0f : expf(behind) * up_to)"),
    "several tokens": ("step_parts.cuh", "decay = expf(behind) * up_to * scale;", "decay = expf(behind) * up_to;"),
    "copies": ("step_parts.cuh", "min(b.items, Traits::kParts) * Traits::kCopies)", "Traits::kCopies)"),
    "load": ("step_parts.cuh", "double scale = gates.scale;", "double scale = 1.0;"),
    "store": (
        "step_parts.cuh",
        "[item * Traits::kCopies + b.lane()] = scale;",
        "[item * Traits::kCopies + b.lane()] = 1;",
    ),
    "after a fold": (
        "step_parts.cuh",
        "item, buffer, gates) : static_cast<float>(gates.scale);",
        "item, buffer, gates), 1.0f : static_cast<float>(gates.scale);",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_teeth(emulated, built, name):
    """Each of what the scale is used for, left out of the tuned kernel, is seen."""
    emulated(built.corrupted(*CORRUPTIONS[name]))
    inputs = gdn_inputs(regime="mild")
    outputs, _ = oracle(inputs, state=zeros(inputs.spec))
    pool = pool_of(inputs.spec)
    scan(pool, inputs, 0, LENGTH, resume=False)
    want = raw_state(pool, SLOTS)
    with pytest.raises(AssertionError):
        for window, pattern in ((5, (1,)), (8, (4,))):
            pool = pool_of(spec_of(window=window, spec_len=max(pattern)))
            assert_close(steps(pool, inputs, 0, LENGTH, pattern, (1, 1)), outputs, "bfloat16", scale=2.0)
            assert_scales(pool, renewed=False)
            assert_same_bits(folded(pool), want)
