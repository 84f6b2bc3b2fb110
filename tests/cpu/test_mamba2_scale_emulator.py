"""Checkpoints of Mamba-2 as state and scale, by the kernels' own source through the C interface, run on the CPU.

The bits of both are those of every other way over the same tokens: windows, tokens a step, rejected drafts, tuned and
generic kernels, the exact scan, materialize. Oracle: the recurrence in float64, whose state is scale * state.
tests/emulator stands in for the GPU; what the compiler for GPUs makes of the source is for tests/gpu.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from mamba2_emulator import Mamba2Library
from replay_cases import Inputs, assert_same_bits, oracle

from trtllm_replayssm import RecurrenceSpec, SlotLayout, kernels, reference
from trtllm_replayssm.kernels import library, mamba2, state, tensors
from trtllm_replayssm.pool import StatePool, torch_dtype

TOKENS, ROWS = 40, 2
SMALL = (2, 1, 16, 64)
# Log-decays of a token. wild: decays near 1, of 1, 0.5, 0.001, of exactly 0 and any between, from token to token.
DECAYS = ("still", "usual", "forgetful", "wild", "growing")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mamba2Library:
    out = Mamba2Library(tmp_path_factory.mktemp("mamba2"))
    out.build()
    return out


@pytest.fixture(autouse=True)
def use(built, monkeypatch):
    """CPU pools go to the emulated library; call it with a path for another one."""

    def bind(path: Path) -> None:
        bound = library.bind(path)
        monkeypatch.setattr(library, "load", lambda: bound)

    for module in (mamba2, state):
        monkeypatch.setattr(module, "on_gpu", lambda pool: True)
    monkeypatch.setattr(tensors, "stream_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    bind(built.folder / "mamba2.so")
    return bind


def spec_of(*sizes: int, **options) -> RecurrenceSpec:
    return RecurrenceSpec("mamba2", *(sizes or SMALL), dt_softplus=False, **options)


def make_inputs(spec: RecurrenceSpec, decays: str, seed: int = 1) -> Inputs:
    """x, B and C of bf16 numbers, whatever the activations' dtype."""
    rng, act = torch.Generator().manual_seed(seed), torch_dtype(spec.act_dtype)
    heads, groups = (ROWS, TOKENS, spec.nheads), (ROWS, TOKENS, spec.ngroups)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).bfloat16().to(act)

    dt = 0.02 + 0.4 * torch.randn(*heads, generator=rng).abs()
    if decays == "wild":
        some = torch.tensor([1e-5, 0.0, 0.7, 7.0, 400.0])
        drawn = torch.randint(0, 7, heads, generator=rng)
        dt = torch.where(drawn < 5, some[drawn.clamp(max=4)], dt)
    rate = {"still": -1e-4, "forgetful": -60.0, "growing": 1.5}.get(decays, -1.0)
    tokens = {"x": normal(*heads, spec.headdim), "dt": dt, "B": normal(*groups, spec.dstate)}
    tokens["C"] = normal(*groups, spec.dstate)
    return Inputs(spec, tokens, {"A": rate * (1.0 + 0.3 * torch.arange(spec.nheads)), "D": torch.ones(spec.nheads)})


def recurrence(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64: outputs, final state, and of both the sums of absolute values that errors are measured by."""
    spec, t = inputs.spec, {name: value.double() for name, value in inputs.tokens.items()}
    S = torch.zeros(ROWS, spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64)
    size, outputs, sizes = S.clone(), [], []
    for i in range(TOKENS):
        B, C = (t[name][:, i].repeat_interleave(spec.heads_per_group, 1)[:, :, None] for name in ("B", "C"))
        decay = torch.exp(inputs.params["A"] * t["dt"][:, i])[..., None, None]
        added = t["dt"][:, i, :, None, None] * t["x"][:, i, ..., None] * B
        S, size = decay * S + added, decay * size + added.abs()
        outputs.append((S * C).sum(-1) + t["x"][:, i])
        sizes.append((size * C.abs()).sum(-1) + t["x"][:, i].abs())
    return torch.stack(outputs, 1), S, torch.stack(sizes, 1), size


def new_pool(spec: RecurrenceSpec) -> tuple[StatePool, torch.Tensor]:
    """A pool of a slot more than rows, all reset, and the rows' slots."""
    pool = StatePool.allocate(SlotLayout(spec), ROWS + 1)
    kernels.reset(pool, torch.arange(ROWS + 1, dtype=torch.int32))
    return pool, torch.tensor([2, 0], dtype=torch.int32)


Checkpoint = tuple[torch.Tensor, torch.Tensor]


def checkpoint(pool: StatePool, slots: torch.Tensor, inputs: Inputs, kept: int = -1) -> Checkpoint:
    """State and scale (1 where slots have none) with all ring rows folded, the first `kept` of the last step's."""
    copy, A = StatePool(pool.layout, pool.memory.clone()), inputs.params["A"]
    counts = torch.full_like(slots, -1)
    if kept >= 0:
        counts = pool["cursor"][slots.long(), 0, 0, 1].int() + kept
    kernels.materialize(copy, slots, counts, slots, A=A)
    return stored(copy, slots)


def stored(pool: StatePool, slots: torch.Tensor) -> Checkpoint:
    held = pool["state"][slots.long()].clone()
    if not pool.layout.spec.has_state_scale:
        return held, torch.ones(ROWS, pool.layout.spec.nheads, 4)
    scale = pool["state_scale"][slots.long()].clone()
    assert (scale == scale[..., :1]).all(), "unequal copies"
    return held, scale


def decode(spec: RecurrenceSpec, inputs: Inputs, pattern: tuple[int, ...], drafts: int = 0) -> Checkpoint:
    """Steps of the pattern's lengths with `drafts` further tokens that are rejected: outputs within rounding of the
    recurrence, then the checkpoint. Every state on the way is finite."""
    (pool, slots), junk = new_pool(spec), make_inputs(inputs.spec, "usual", seed=77)
    outputs, at, kept = [], 0, -1
    for i in range(10**6):
        count = min(pattern[i % len(pattern)], TOKENS - at)
        draft = {n: torch.cat([v[:, at : at + count], junk.tokens[n][:, :drafts]], 1) for n, v in inputs.tokens.items()}
        accepted = torch.full_like(slots, kept)
        y = kernels.mamba2_step(pool, slots, **draft, **inputs.params, accepted=accepted)
        outputs.append(y[:, :count])
        at, kept = at + count, count
        assert pool["state"].isfinite().all()
        if at == TOKENS:
            break
    check_outputs(torch.cat(outputs, 1), inputs)
    return checkpoint(pool, slots, inputs, kept)


def check_outputs(y: torch.Tensor, inputs: Inputs) -> None:
    """Within half a step of bf16, beyond it 2^-16 of the terms' size (two bf16 terms of the state and of weights)."""
    if inputs.spec.state_dtype != "float32":
        return
    want, _, size, _ = recurrence(inputs)
    assert ((y.double() - want).abs() <= want.abs() / 256 + size * 2.0**-16).all()


def check_state(found: Checkpoint, inputs: Inputs) -> None:
    """scale * state is the recurrence's state, to fp32's rounding of some operations a token; scales are in range."""
    value = found[1][..., :1, None].double() * found[0].double()
    _, want, _, size = recurrence(inputs)
    assert ((value - want).abs() <= size * 2.0**-19 + 1e-38).all()
    assert ((found[1] >= 2.0**-16) & (found[1] <= 2.0**16)).all()


def scan(
    pool: StatePool,
    slots: torch.Tensor,
    inputs: Inputs,
    first: int,
    last: int,
    *,
    resume: bool = False,
    exact: bool = True,
) -> torch.Tensor:
    """Outputs of tokens first .. last-1 of all rows."""
    tokens, ends = inputs.packed([(row, first, last) for row in range(ROWS)])
    flags = torch.full((ROWS,), resume)
    y = kernels.mamba2_scan(pool, slots, **tokens, **inputs.params, cu_seqlens=ends, has_initial=flags, exact=exact)
    return y.unflatten(0, (ROWS, last - first))


def scanned(spec: RecurrenceSpec, inputs: Inputs) -> Checkpoint:
    """The checkpoint of one exact scan over everything."""
    pool, slots = new_pool(spec)
    check_outputs(scan(pool, slots, inputs, 0, TOKENS), inputs)
    return stored(pool, slots)


def assert_same(found: Checkpoint, want: Checkpoint) -> None:
    assert_same_bits(found[1], want[1], "scale")
    assert_same_bits(found[0], want[0], "state")


@pytest.mark.parametrize("decays", DECAYS)
def test_no_bit_of_state_or_scale_depends_on_the_way(decays):
    spec = spec_of()
    inputs, generic = make_inputs(spec, decays), make_inputs(spec_of(act_dtype="float32"), decays)
    want = scanned(spec, inputs)
    check_state(want, inputs)
    assert (want[1] != 1.0).any() or decays == "forgetful"
    assert_same(decode(spec_of(window=1), inputs, (1,)), want)
    assert_same(decode(spec_of(window=5, spec_len=4), inputs, (1, 3, 2)), want)
    assert_same(decode(spec_of(window=16, spec_len=3), inputs, (1,), drafts=2), want)
    assert_same(decode(spec_of(window=64, spec_len=5), inputs, (3, 1), drafts=1), want)
    assert_same(decode(spec_of(window=5, spec_len=4, act_dtype="float32"), generic, (1, 3, 2)), want)
    assert_same(decode(spec_of(window=16, act_dtype="float32"), generic, (1,)), want)


def test_no_bit_depends_on_the_way_in_heads_of_usual_size():
    spec = spec_of(2, 1, 64, 128)
    inputs = make_inputs(spec, "wild")
    want = scanned(spec, inputs)
    assert_same(decode(spec_of(2, 1, 64, 128, window=16), inputs, (1,)), want)
    assert_same(decode(spec_of(2, 1, 64, 128, window=7, spec_len=4), inputs, (4, 2)), want)


@pytest.mark.parametrize("decays", DECAYS)
def test_a_prompt_may_be_cut_anywhere(decays):
    """Exact scans in pieces, steps between them whose rows the next piece folds: the bits of one scan."""
    spec = spec_of(window=8, spec_len=3, stagger=False)
    inputs = make_inputs(spec, decays)
    pool, slots = new_pool(spec)
    outputs = [scan(pool, slots, inputs, 0, 9)]
    for first, last in ((9, 10), (10, 13), (13, 15)):
        step = inputs.span(first, last) | inputs.params
        outputs.append(kernels.mamba2_step(pool, slots, **step))
    outputs.append(scan(pool, slots, inputs, 15, 33, resume=True))
    outputs.append(scan(pool, slots, inputs, 33, TOKENS, resume=True))
    check_outputs(torch.cat(outputs, 1), inputs)
    assert_same(stored(pool, slots), scanned(spec, inputs))


@pytest.mark.parametrize("decays", ["still", "usual", "forgetful"])
def test_a_fast_scan_takes_and_leaves_scales(decays):
    """Chunks behind steps, and steps behind chunks, whose scale is 1."""
    spec = spec_of(window=5, spec_len=2)
    inputs = make_inputs(spec, decays)
    pool, slots = new_pool(spec)
    outputs = [kernels.mamba2_step(pool, slots, **inputs.span(t, t + 2), **inputs.params) for t in range(0, 14, 2)]
    outputs.append(scan(pool, slots, inputs, 14, 31, resume=True, exact=False))
    assert (stored(pool, slots)[1] == 1.0).all()
    outputs += [kernels.mamba2_step(pool, slots, **inputs.span(t, t + 1), **inputs.params) for t in range(31, TOKENS)]
    check_outputs(torch.cat(outputs, 1), inputs)
    check_state(checkpoint(pool, slots, inputs), inputs)


@pytest.mark.parametrize("decays", DECAYS)
def test_16_bit_states_are_multiplied_at_the_end_of_a_fold(decays):
    """Tuned and generic kernels leave the same bits; a fold of all tokens leaves those of the exact scan."""
    packed = {"state_dtype": "bfloat16"}
    generic = make_inputs(spec_of(act_dtype="float32", **packed), decays)
    inputs = make_inputs(spec_of(**packed), decays)
    for options in ({"window": 1}, {"window": 7, "spec_len": 3}):
        pattern = (1,) if options["window"] == 1 else (1, 3)
        want = decode(spec_of(act_dtype="float32", **packed, **options), generic, pattern)
        assert_same(decode(spec_of(**packed, **options), inputs, pattern), want)
        value, (_, exact, _, size) = want[0].double(), recurrence(inputs)
        assert ((value - exact).abs() <= 0.05 * size + 1e-30).all()
    whole = decode(spec_of(window=64, stagger=False, **packed), inputs, (1,))
    assert_same(scanned(spec_of(**packed), inputs), whole)
    value, (_, exact, _, size) = whole[0].double(), recurrence(inputs)
    assert ((value - exact).abs() <= exact.abs() / 256 + size * 2.0**-19 + 1e-38).all()


@pytest.mark.parametrize("window", [1, 6])
def test_a_slot_of_zeros_is_an_empty_one(window):
    """A scale of 0 is out of range: the first fold sets it right."""
    spec = spec_of(window=window)
    inputs = make_inputs(spec, "usual")
    pools = [new_pool(spec)[0], StatePool.allocate(SlotLayout(spec), ROWS + 1)]
    pools[0].memory.zero_()
    pools[0]["state_scale"].fill_(1.0)
    pools[1].memory.zero_()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    for t in range(TOKENS):
        y, want = (kernels.mamba2_step(p, slots, **inputs.span(t, t + 1), **inputs.params) for p in pools)
        assert torch.equal(y, want)
    check_state(checkpoint(pools[1], slots, inputs), inputs)


def weak_gates_error(spec: RecurrenceSpec, exact_scan: bool) -> float:
    """Error in norm, over that of the state, behind 600 tokens of one decay near 1 and a scale of 0.55 in front of
    them: of the exact scan, or of the reference, which multiplies every element by every decay (its scale is 1)."""
    count, rng, size = 600, torch.Generator().manual_seed(4), (ROWS, spec.nheads, spec.headdim, spec.dstate)
    A = torch.tensor([-1.03e-6, -4.4e-7])
    tokens = {"x": 0.1 * torch.randn(ROWS, count, spec.nheads, spec.headdim, generator=rng)}
    tokens["dt"] = torch.ones(ROWS, count, spec.nheads)
    tokens |= {n: torch.randn(ROWS, count, spec.ngroups, spec.dstate, generator=rng) for n in "BC"}
    inputs, (pool, slots) = Inputs(spec, tokens, {"A": A}), new_pool(spec)
    pool["state"][slots.long()] = torch.randn(size, generator=rng)
    if exact_scan:
        pool["state_scale"].fill_(0.55)
    before = pool["state"][slots.long()] * pool["state_scale"][slots.long()][..., :1, None]
    packed, ends = inputs.packed([(row, 0, count) for row in range(ROWS)])
    run = kernels.mamba2_scan if exact_scan else reference.mamba2_scan
    option = {"exact": True} if exact_scan else {}
    run(pool, slots, **packed, A=A, cu_seqlens=ends, has_initial=torch.full((ROWS,), True), **option)
    after = pool["state"][slots.long()] * pool["state_scale"][slots.long()][..., :1, None]
    rates = torch.exp(A).double().log()  # whose decays in float64 are the fp32 ones
    want = oracle(Inputs(spec, tokens, {"A": rates}), state=before)[1]
    return float((after - want).norm() / want.norm())


def test_a_scale_does_not_drift(use, built):
    """Under weak gates a state is as near to float64 as where decays meet every element; not so with an fp32 scale,
    which is rounded alike at every token."""
    spec = spec_of(act_dtype="float32")
    ours, plain = weak_gates_error(spec, True), weak_gates_error(spec, False)
    product = "__dmul_rn(scale, static_cast<double>(decay))"
    single = "__fmul_rn(static_cast<float>(scale), decay)"
    use(built.corrupted_scan("common", "state_scale.cuh", product, single))
    rounded = weak_gates_error(spec, True)
    assert ours <= plain < rounded


@pytest.mark.parametrize(
    "header, old, new",
    [
        ("scan_kernel.cuh", "tile.multiply(row.renew);", ""),
        ("scan_kernel.cuh", "__fmul_rn(scale.rounded, part[0])", "part[0]"),
        ("scan_kernel.cuh", "scale = BlockScale(load_scale<state_t>(p.pool, slot, head, quarter));", ""),
        ("ring_fold.cuh", "tile.multiply(scale.rounded);\n    scale = BlockScale();", ""),
        ("ring_fold.cuh", "tile.multiply(row.renew);", ""),
        ("head_scale.cuh", "rounded, __frcp_rn(rounded)", "rounded, __frcp_rn(static_cast<float>(scale))"),
    ],
    ids=["renewal", "outputs", "initial-scale", "end-of-a-16-bit-fold", "renewal-of-the-ring", "inverse"],
)
def test_teeth_of_the_exact_scan(use, built, header, old, new):
    """A scan with one mistake leaves other bits than a scan without, or other outputs."""
    results = []
    for path in (built.folder / "mamba2.so", built.corrupted_scan("mamba2_replay", header, old, new)):
        use(path)
        for state_dtype, decays in (("float32", "usual"), ("float32", "wild"), ("bfloat16", "usual")):
            spec = spec_of(state_dtype=state_dtype, act_dtype="float32", window=30, stagger=False)
            inputs = make_inputs(spec, decays)
            pool, slots = new_pool(spec)
            outputs = [scan(pool, slots, inputs, 0, 11)]
            for t in range(11, 29):
                outputs.append(kernels.mamba2_step(pool, slots, **inputs.span(t, t + 1), **inputs.params))
            outputs.append(scan(pool, slots, inputs, 29, TOKENS, resume=True))
            results.append((torch.cat(outputs, 1), stored(pool, slots)))
    same = [
        torch.equal(a[0], b[0]) and torch.equal(a[1][0], b[1][0]) and torch.equal(a[1][1], b[1][1])
        for a, b in zip(results[:3], results[3:], strict=True)
    ]
    assert not all(same)
