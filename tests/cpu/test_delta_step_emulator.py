"""The CUDA step of GDN and KDA, its own source through binding and C interface, run on the CPU.

tests/emulator stands in for the GPU: threads as fibers, one block after another. Oracle: reference.gated_delta_step on
the same inputs; checkpoints of different windows and kernels are compared to the bit. Dead ring rows and other slots
hold NaN. Not seen here: races within a warp, fences, and what the compiler for GPUs makes of the source; tests/gpu is
for that.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from delta_bounds import ReadRows, assert_verify_equals_single_steps
from replay_cases import (
    REGIMES,
    Inputs,
    assert_close,
    assert_same_bits,
    far_pool,
    live_ring_rows,
    make_inputs,
    poison,
    raw_state,
    ring_regions,
    strided_views,
)

from trtllm_replayssm import RecurrenceSpec, ReplayError, SlotLayout, kernels, reference
from trtllm_replayssm.kernels import StepTuning
from trtllm_replayssm.pool import StatePool, torch_dtype

pytest_plugins = ("step_emulator",)

KINDS = {
    "gdn": ("gated_delta", {}),
    "kda": ("kimi_delta", {}),
    "kda-bounded": ("kimi_delta", {"gate": "bounded"}),
}


def spec_of(kind: str, *sizes: int, **options) -> RecurrenceSpec:
    name, extra = KINDS[kind]
    return RecurrenceSpec(name, *sizes, **extra, **options)


def decode(spec: RecurrenceSpec, steps: int, tuning: StepTuning, regime: str = "plain") -> None:
    """Steps of all lengths with rejection and padding, every output, row and state against the reference.

    Padding's inputs are NaN. No step, flush or not, changes a row that is live when it starts.
    """
    inputs, eps_scale = make_inputs(spec, 3, 48, seed=3, regime=regime), 3.0 if spec.state_dtype != "float32" else 1.0
    for value in inputs.tokens.values():
        value[1] = float("nan")
    pools = [StatePool.allocate(SlotLayout(spec), 4) for _ in range(2)]
    slots, own = torch.tensor([2, -1, 0], dtype=torch.int32), [2, 0]
    for pool in pools:
        reference.reset(pool, slots)
        poison(pool, own)
    rng, at, last = torch.Generator().manual_seed(1), 0, 0
    for i in range(steps):
        tokens = 1 + i % spec.spec_len
        accepted = torch.randint(-1, last + 1, (3,), generator=rng).int()
        step = {name: value[:, at : at + tokens] for name, value in inputs.tokens.items()}
        kept = [last if a < 0 else int(a) for a in accepted[[0, 2]]]
        for pool in pools:
            poison(pool, own, kept)
        live = [(slot, live_ring_rows(pools[0], slot, count)) for slot, count in zip(own, kept, strict=True)]
        before = live_values(pools[0], live)
        o = kernels.gated_delta_step(pools[0], slots, **step, **inputs.params, accepted=accepted, tuning=tuning)
        want = reference.gated_delta_step(pools[1], slots, **step, **inputs.params, accepted=accepted)
        assert_close(o[[0, 2]], want[[0, 2]].double(), spec.act_dtype, scale=2.0 * eps_scale)
        assert not o[1].any()
        assert all(torch.equal(a, b) for a, b in zip(before, live_values(pools[0], live), strict=True))
        assert torch.equal(pools[0]["cursor"][own], pools[1]["cursor"][own])
        at, last = at + tokens, tokens
    compare_pools(pools[0], pools[1], own, eps_scale)
    counts = torch.tensor([-1, 1], dtype=torch.int32)
    for op, pool in zip((kernels, reference), pools, strict=True):
        op.materialize(pool, torch.tensor(own), counts, torch.tensor([1, 0]))
    assert torch.equal(pools[0]["cursor"][:2], pools[1]["cursor"][:2])
    ours, theirs = (pool.checkpoint(torch.tensor([0, 1])) for pool in pools)
    assert_close(ours.float(), theirs.double(), spec.state_dtype, scale=2.0 * eps_scale, what="state")


def live_values(pool: StatePool, live: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """Copies of the given ring rows of each slot."""
    return [pool[name][slot][:, rows].clone() for slot, rows in live for name in ring_regions(pool)]


def compare_pools(ours: StatePool, theirs: StatePool, slots: list[int], eps_scale: float) -> None:
    """Live ring rows: raw ones to the bit, the others to rounding."""
    for slot in slots:
        rows = live_ring_rows(theirs, slot)
        for name in ring_regions(ours):
            a, b = (pool[name][slot][:, rows] for pool in (ours, theirs))
            if name in ("ring_k", "ring_v"):
                assert_same_bits(a, b, name)
            elif rows:
                dtype = ours.layout.spec.act_dtype if name == "ring_d" else "float32"  # type: ignore[union-attr]
                assert_close(a.float(), b.double(), dtype, scale=4.0 * eps_scale, what=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes, options, tuning",
    [
        ((4, 2, 128, 128), {"window": 4}, (2, 1)),
        ((2, 1, 128, 128), {"window": 5, "spec_len": 3}, (0, 8)),
        ((2, 1, 128, 128), {"window": 3, "spec_len": 2, "state_dtype": "bfloat16"}, (2, 0)),
        ((3, 1, 48, 80), {"window": 3, "spec_len": 5}, (0, 0)),
        ((3, 1, 128, 128), {"window": 4, "spec_len": 2}, (3, 0)),
        ((14, 1, 128, 128), {"window": 4}, (7, 0)),
        ((14, 1, 16, 16), {"window": 4, "spec_len": 2}, (0, 0)),
        ((2, 1, 16, 16), {"window": 18, "spec_len": 2, "act_dtype": "float32"}, (0, 0)),
        ((2, 2, 64, 256), {"window": 4, "spec_len": 3, "act_dtype": "float16"}, (0, 0)),
    ],
    ids=str,
)
def test_step_agrees_with_the_reference(emulated, kind, sizes, options, tuning):
    decode(spec_of(kind, *sizes, **options), 11, StepTuning(*tuning))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", ["weak", "strong"])
def test_decays_near_one_and_near_zero(emulated, kind, regime):
    decode(spec_of(kind, 2, 1, 128, 128, window=16, spec_len=2), 16, StepTuning(), regime)


def final_state(spec: RecurrenceSpec, pattern: tuple[int, ...], tuning: StepTuning) -> torch.Tensor:
    """States and scales after 18 tokens in steps of the pattern's lengths; the same values whatever the dtypes."""
    base = RecurrenceSpec(spec.kind, spec.nheads, spec.ngroups, spec.headdim, spec.dstate, gate=spec.gate)
    inputs, act = make_inputs(base, 2, 18, seed=5), torch_dtype(spec.act_dtype)
    tokens = {n: v.to(act) if n in "qkv" else v for n, v in inputs.tokens.items()}
    pool, slots = StatePool.allocate(SlotLayout(spec), 2), torch.tensor([0, 1], dtype=torch.int32)
    kernels.reset(pool, slots)
    at = i = 0
    while at < 18:
        count = min(pattern[i % len(pattern)], 18 - at)
        step = {name: value[:, at : at + count] for name, value in tokens.items()}
        kernels.gated_delta_step(pool, slots, **step, **inputs.params, tuning=tuning)
        at, i = at + count, i + 1
    kernels.materialize(pool, slots, torch.full_like(slots, -1), slots)
    return raw_state(pool, slots)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_do_not_depend_on_window_tokens_or_kernel(emulated, kind):
    def state_of(pattern, tuning=(0, 0), **options):
        return final_state(spec_of(kind, 2, 1, 128, 128, **options), pattern, StepTuning(*tuning))

    want = state_of((1,), window=1)
    assert_same_bits(state_of((1,), (2, 1), window=7), want)
    assert_same_bits(state_of((4, 1, 2), (0, 8), window=8, spec_len=4), want)
    assert_same_bits(state_of((3,), window=5, spec_len=3, act_dtype="float32"), want)


def verify_and_single(op, spec: RecurrenceSpec, regime: str) -> None:
    """Outputs of steps of spec_len tokens and of single steps, from the kernels or the reference."""
    length = 24 - 24 % spec.spec_len
    whole = make_inputs(spec, 2, length, seed=11, regime=regime)
    inputs = Inputs(spec, whole.span(0, length), whole.params)

    def decode(count):
        pool, slots = StatePool.allocate(SlotLayout(spec), 2), torch.tensor([0, 1], dtype=torch.int32)
        op.reset(pool, slots)
        outputs, read = [], ReadRows()
        for t in range(0, length, count):
            outputs.append(op.gated_delta_step(pool, slots, **inputs.span(t, t + count), **inputs.params))
            read.record(pool["cursor"][:, 0, 0], t, count)
        return torch.cat(outputs, dim=1), read

    assert_verify_equals_single_steps(decode, inputs, spec.spec_len)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("op", [kernels, reference], ids=["kernels", "reference"])
def test_verify_equals_single_steps_to_rounding(emulated, op, kind, regime):
    """Windows with folds between, and a step as long as the ring."""
    verify_and_single(op, spec_of(kind, 2, 1, 128, 128, window=7, spec_len=4), regime)
    verify_and_single(op, spec_of(kind, 2, 1, 48, 80, window=16, spec_len=12), regime)


def run_on(spec: RecurrenceSpec, rows: int, steps: int, flags: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the pool's bytes after ``steps`` steps of ``rows`` rows."""
    inputs = make_inputs(spec, rows, steps * spec.spec_len, seed=8)
    pool, slots = StatePool.allocate(SlotLayout(spec), rows), torch.arange(rows, dtype=torch.int32)
    kernels.reset(pool, slots)
    outputs = []
    for t in range(0, inputs.length, spec.spec_len):
        step = inputs.span(t, t + spec.spec_len)
        outputs.append(kernels.gated_delta_step(pool, slots, **step, **inputs.params, tuning=StepTuning(0, flags)))
    return torch.cat(outputs, dim=1), pool.memory


@pytest.mark.parametrize("kind, spec_len, blocks", [("gdn", 1, 26), ("gdn", 2, 24), ("kda", 1, 36)])
def test_no_bit_depends_on_the_cut_of_the_grid(emulated, built, monkeypatch, kind, spec_len, blocks):
    """One multiprocessor: blocks of two heads, one and a half in one grid, or of one size (flag 1). 132: half heads."""
    spec = spec_of(kind, 4, 2, 128, 128, window=3, spec_len=spec_len)
    grid = ctypes.CDLL(str(built.folder / "step.so")).emulated_blocks
    results = {}
    for name, multiprocessors, flags in (("mixed", 1, 0), ("halves", 132, 0), ("even", 1, 1)):
        monkeypatch.setenv("EMULATED_MULTIPROCESSORS", str(multiprocessors))
        results[name] = (*run_on(spec, 8, 5, flags), grid())
    assert [results[name][-1] for name in ("mixed", "halves")] == [blocks, 64]
    for o, memory, _ in results.values():
        assert torch.equal(o, results["mixed"][0]) and torch.equal(memory, results["mixed"][1])


@pytest.mark.parametrize("kind, spec_len", [("gdn", 1), ("gdn", 2), ("kda", 1)])
def test_what_is_read_too_early_decides_nothing(emulated, monkeypatch, kind, spec_len):
    """Blocks that look at slots and cursors before the kernels in front are done, and see something else."""
    spec = spec_of(kind, 4, 2, 128, 128, window=3, spec_len=spec_len)
    expected = run_on(spec, 8, 5, 0)
    monkeypatch.setenv("EMULATED_STALE", "1")
    for one, other in zip(expected, run_on(spec, 8, 5, 0), strict=True):
        assert torch.equal(one, other)


def guessed(spec: RecurrenceSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the pool's bytes of steps with rejection, padding between rows and slots far past the pool."""
    inputs, rng = make_inputs(spec, 5, 14, seed=8), torch.Generator().manual_seed(4)
    pool = StatePool.allocate(SlotLayout(spec), 7)
    slots = torch.tensor([5, -1, 0, 2**32 if dtype == torch.int64 else 7, 3], dtype=dtype)
    kernels.reset(pool, slots)
    counts, outputs = torch.tensor([-1, 0, 1, 2**33 if dtype == torch.int64 else 99, -3]), []
    for t in range(inputs.length):
        accepted = counts[torch.randint(0, 5, (5,), generator=rng)].to(dtype)
        step = inputs.span(t, t + 1) | inputs.params
        outputs.append(kernels.gated_delta_step(pool, slots, **step, accepted=accepted))
    return torch.cat(outputs, dim=1), pool.memory


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_single_tokens_behind_wrong_guesses(emulated, monkeypatch, dtype, state_dtype):
    """Slots, counts or cursors, one or all of them, that were others before the wait, but might have been right."""
    spec = spec_of("gdn", 6, 2, 128, 128, window=4, state_dtype=state_dtype)
    o, memory = guessed(spec, dtype)
    assert o[[0, 2, 4]].abs().amax((1, 2, 3)).all() and not o[[1, 3]].any()
    for series in ("2", "3", "4"):
        monkeypatch.setenv("EMULATED_STALE", series)
        for one, other in zip((o, memory), guessed(spec, dtype), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "sizes, options, tuning",
    [
        ((3, 1), {"window": 64}, (3, 0)),
        ((2, 1), {"window": 64, "state_dtype": "bfloat16"}, (0, 1)),
        ((4, 2), {"window": 50, "spec_len": 3, "qk_l2norm": False}, (0, 0)),
    ],
    ids=str,
)
def test_single_tokens_at_every_length_of_the_ring(emulated, sizes, options, tuning):
    """One step of the kernel at ring lengths around 16, 32 and 48, 64 and behind a fold, from the reference's pool. The
    ring wraps; its dead rows hold NaN."""
    spec = spec_of("gdn", *sizes, 128, 128, stagger=False, **options)
    inputs = make_inputs(spec, 3, spec.window + 3, seed=15, regime="trained")
    if not spec.qk_l2norm:
        inputs.tokens["k"] *= spec.dstate**-0.5
    slots, own = torch.tensor([1, -1, 2], dtype=torch.int32), [1, 2]
    pool = reset_pool(StatePool.allocate(SlotLayout(spec), 3))
    pool["cursor"][..., 0] = torch.tensor([0, spec.ring_rows - 7, 20])[:, None, None]
    pool["state"].copy_(0.1 * torch.randn(pool["state"].shape, generator=torch.Generator().manual_seed(2)))
    lengths = [0, 1, 8, 9, *(tile + i for tile in (16, 32, 48) for i in range(3)), spec.window, spec.window + 1]
    for t in range(inputs.length):
        step = inputs.span(t, t + 1) | inputs.params
        poison(pool, own)
        ours = StatePool(pool.layout, pool.memory.clone())
        want = reference.gated_delta_step(pool, slots, **step)
        if t not in lengths:
            continue
        o = kernels.gated_delta_step(ours, slots, **step, tuning=StepTuning(*tuning))
        assert_close(o[[0, 2]], want[[0, 2]].double(), "bfloat16", scale=2.0, what=f"output {t}")
        assert torch.equal(ours["cursor"][own], pool["cursor"][own])
        compare_pools(ours, pool, own, 1.0)
        state = [each.checkpoint(torch.tensor(own)) for each in (ours, pool)]
        assert_close(state[0].float(), state[1].double(), spec.state_dtype, scale=2.0, what=f"state {t}")


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [(0,), (63,), (0, 1, 30, 31, 32, 33, 63), (7, 8), (32,), (31,), ()], ids=str)
def test_single_tokens_fold_renewals_anywhere(emulated, rows, state_dtype):
    """64 rows, some of which renew the scale, others in every head: the bits of materialize (16 rows at once)."""
    spec = spec_of("gdn", 3, 1, 128, 128, window=64, state_dtype=state_dtype)
    rng = torch.Generator().manual_seed(6)
    pools = [reset_pool(StatePool.allocate(SlotLayout(spec), 1)) for _ in range(2)]
    for name in ("state", "ring_k", "ring_v"):
        pools[0][name].copy_(torch.randn(pools[0][name].shape, generator=rng))
    pools[0]["ring_k_rnorm"].copy_(1 / pools[0]["ring_k"].float().norm(dim=-1))
    pools[0]["ring_beta"].copy_(torch.rand(pools[0]["ring_beta"].shape, generator=rng))
    pools[0]["ring_g"].copy_(torch.rand(pools[0]["ring_g"].shape, generator=rng) * -0.01)
    pools[0]["cursor"].copy_(torch.tensor([40, 64, 0, 64]))
    for head in range(3):
        live = [(40 + (row + head) % 64) % spec.ring_rows for row in rows]
        pools[0]["ring_g"][0, head, live] = -11.5
    pools[1].memory.copy_(pools[0].memory)
    slots, step = torch.tensor([0]), make_inputs(spec, 1, 1)
    kernels.gated_delta_step(pools[0], slots, **step.span(0, 1), **step.params, tuning=StepTuning(3, 0))
    kernels.materialize(pools[1], slots, torch.tensor([-1]), slots)
    assert_same_bits(raw_state(pools[0], slots), raw_state(pools[1], slots))


@pytest.mark.parametrize("kind, tokens", [("gdn", 1), ("gdn", 2), ("kda", 1)])
@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
def test_tokens_are_read_behind_the_wait(emulated, built, kind, tokens, name):
    """Half a head, whose guesses are right; a tensor of its tokens is NaN until it waits for the kernels in front."""
    spec = spec_of(kind, 1, 1, 128, 128, window=3, spec_len=tokens)
    inputs, slots = make_inputs(spec, 1, 2 * tokens, seed=3), torch.tensor([0])
    pools = [reset_pool(StatePool.allocate(SlotLayout(spec), 1)) for _ in range(2)]
    step = {key: value.clone() for key, value in inputs.span(0, tokens).items()}
    expected = kernels.gated_delta_step(pools[0], slots, **step, **inputs.params)
    value = step[name].clone()
    step[name].fill_(float("nan"))
    front = ctypes.CDLL(str(built.folder / "step.so")).emulated_previous_writes
    front(*(ctypes.c_void_p(each.data_ptr()) for each in (step[name], value)), ctypes.c_long(value.nbytes))
    assert torch.equal(kernels.gated_delta_step(pools[1], slots, **step, **inputs.params), expected)
    assert torch.equal(pools[1].memory, pools[0].memory)


def test_what_the_library_refuses(emulated):
    """The checks of the C interface, by name."""
    inputs = make_inputs(spec_of("kda", 4, 2, 128, 128), 2, 3)
    slots = torch.tensor([0, 1], dtype=torch.int32)

    def refused(message, tokens=1, tuning=(0, 0), change=None, **options):
        spec = spec_of("kda", 4, 2, 128, options.pop("dstate", 128), **({"spec_len": 2} | options))
        step = inputs.span(0, tokens) | inputs.params | (change or {})
        narrow = {n: v[..., : spec.dstate].contiguous() for n, v in step.items() if n in ("q", "k", "a", "dt_bias")}
        pool = StatePool.allocate(SlotLayout(spec), 2)
        with pytest.raises(ReplayError, match=message):
            kernels.gated_delta_step(pool, slots, **(step | narrow), tuning=StepTuning(*tuning))

    refused("tokens is 3; it must be from 1 to 2", tokens=3)
    refused("heads_per_block is 3; it must be 0 or divide the heads per group, 2", tuning=(3, 0))
    refused("heads_per_block is -1; it must be 0 or divide", tuning=(-1, 0))
    refused("spec.dstate is 24; the kernels have multiples of 16 from 16 to 256", dstate=24)
    refused("spec.read_copy is 3; the gated delta kernels have 0", read_copy="int8")
    refused(
        "b has dtype float64; it must be float32, bfloat16 or float16", change={"b": inputs.tokens["b"][:, :1].double()}
    )
    wide = far_pool(SlotLayout(spec_of("kda", 4, 2, 128, 128))).memory.flatten().view(torch.bfloat16)
    far_rows = [wide.as_strided((2, 1, 4, 128), (stride, 512, 128, 1)) for stride in (2**31, 2**31 - 8)]
    refused("v has stride 2147483648 along axis 0; it must be from 0 to 2147483647", change={"v": far_rows[0]})
    refused("v spans 2147484024 elements; it must span less than", change={"v": far_rows[1]})
    pool = StatePool.allocate(SlotLayout(spec_of("kda", 4, 2, 128, 128)), 4)
    with pytest.raises(ReplayError, match="slots has stride 2; it must be dense"):
        kernels.gated_delta_step(pool, torch.arange(4)[::2], **inputs.span(0, 1), **inputs.params)
    mamba = StatePool.allocate(SlotLayout(RecurrenceSpec("mamba2", 4, 2, 16, 16)), 2)
    with pytest.raises(ReplayError, match="A is None; materialize of a mamba2 pool needs A"):
        kernels.materialize(mamba, slots, slots, slots)


@pytest.mark.parametrize(
    "header, old, new",
    [
        ("fold.cuh", "__fsub_rn(v_own, held)", "__fadd_rn(v_own, held)"),
        (
            "step_prepare.cuh",
            "acc.add(g);\n            }\n        }\n        value[2 * i]",
            "}\n        }\n        value[2 * i]",
        ),
    ],
    ids=["fold", "decays"],
)
def test_teeth(emulated, built, header, old, new):
    """Another sign in the fold, and decays of ring rows that are not summed, are seen."""
    emulated(built.corrupted(header, old, new))
    with pytest.raises(AssertionError):
        decode(spec_of("kda", 2, 1, 128, 128, window=4), 11, StepTuning())


@pytest.mark.parametrize(
    "header, old, new, message",
    [
        ("step_tensor.cuh", "if (f > own_group || q > m % 4)", "if (f > own_group)", "relative error"),
        ("step_tensor.cuh", "a[h][term][i] = terms[term];", "a[h][term][i] = term ? 0 : terms[term];", "largest error"),
        (
            "step_parts.cuh",
            "(at + 8) = __float2bfloat16_rn(value - __bfloat162float(first));",
            "(at + 8) = first;",
            "relative error",
        ),
    ],
    ids=["solve", "state", "weights"],
)
def test_teeth_of_products_on_tensor_cores(emulated, built, header, old, new, message):
    """Tokens that do not see each other, a state of one bf16 term, weights that count twice."""
    emulated(built.corrupted(header, old, new))
    with pytest.raises(AssertionError, match=message):
        verify_and_single(kernels, spec_of("gdn", 2, 1, 128, 128, spec_len=4), "trained")


def test_teeth_of_the_rounding_bound(emulated, built):
    """Ring rows of d that are off by one rounding more are seen, in single steps and in verify steps."""
    emulated(built.corrupted("fold.cuh", "-kLargest ? -kLargest : d);", "-kLargest ? -kLargest : d * 1.0040f);"))
    for spec_len in (1, 4):
        with pytest.raises(AssertionError, match="times its largest error"):
            verify_and_single(kernels, spec_of("gdn", 2, 1, 128, 128, spec_len=spec_len), "trained")


def reset_pool(pool: StatePool) -> StatePool:
    """The pool, every slot reset by the kernels."""
    kernels.reset(pool, torch.arange(pool.slots, dtype=torch.int32))
    return pool


def steps_of(pool: StatePool, slots: list[int], inputs: Inputs, first: int, last: int, tokens: int = 1) -> torch.Tensor:
    """Outputs of steps of ``tokens`` tokens over tokens first .. last-1, everything accepted."""
    index = torch.tensor(slots, dtype=torch.int32)
    outputs = [
        kernels.gated_delta_step(pool, index, **inputs.span(t, t + tokens), **inputs.params)
        for t in range(first, last, tokens)
    ]
    return torch.cat(outputs, dim=1)


def folded(pool: StatePool, slots: list[int]) -> torch.Tensor:
    """What ``slots`` hold of their checkpoints after a fold of everything, in place."""
    index = torch.tensor(slots, dtype=torch.int32)
    kernels.materialize(pool, index, torch.full_like(index, -1), index)
    return raw_state(pool, index)


SMALL = [("gdn", (2, 1, 16, 16)), ("kda", (2, 1, 16, 16)), ("gdn", (2, 1, 128, 128)), ("kda", (2, 1, 128, 128))]


@pytest.mark.parametrize("kind, sizes", SMALL)
def test_slots_past_4_gib(emulated, kind, sizes):
    """Slots further apart than they are long, by more than 2^31 bytes: the bits of a dense pool."""
    spec = spec_of(kind, *sizes, window=3, spec_len=2)
    inputs = make_inputs(spec, 2, 10, seed=2)
    dense, far = reset_pool(StatePool.allocate(SlotLayout(spec), 3)), reset_pool(far_pool(SlotLayout(spec)))
    assert torch.equal(steps_of(far, [2, 1], inputs, 0, 10, 2), steps_of(dense, [2, 1], inputs, 0, 10, 2))
    assert torch.equal(far.memory[:, : far.layout.slot_bytes], dense.memory)
    assert not far.memory[:, far.layout.slot_bytes : far.layout.slot_bytes + 65536].any()
    src, dst = torch.tensor([2, 1]), torch.tensor([0, 1])
    for pool in (far, dense):
        kernels.materialize(pool, src, torch.tensor([1, -1]), dst)
    assert torch.equal(far.memory[:, : far.layout.slot_bytes], dense.memory)


@pytest.mark.parametrize("kind, sizes", SMALL)
def test_strided_views_and_int64_slots_are_dense_ones(emulated, kind, sizes):
    """Slices of a convolution output, gates with strides of their own: the same bits."""
    spec = spec_of(kind, *sizes, window=3, spec_len=2)
    dense = make_inputs(spec, 2, 8, seed=4)
    views = Inputs(spec, strided_views(dense.tokens), dense.params)
    assert not any(value.is_contiguous() for value in views.tokens.values())
    pools = [reset_pool(StatePool.allocate(SlotLayout(spec), 2)) for _ in range(2)]
    expected = steps_of(pools[0], [1, 0], dense, 0, 8, 2)
    for t in range(0, 8, 2):
        o = kernels.gated_delta_step(pools[1], torch.tensor([1, 0]), **views.span(t, t + 2), **views.params)
        assert torch.equal(o, expected[:, t : t + 2])
    assert torch.equal(pools[1].memory, pools[0].memory)


@pytest.mark.parametrize("kind, sizes", SMALL)
def test_one_token_of_a_pool_for_drafts_is_a_decode_step(emulated, kind, sizes):
    """T = 1 with room for 4 and with room for 1: outputs and states to the bit, through flushes."""
    plain, drafts = (spec_of(kind, *sizes, window=4, spec_len=spec_len) for spec_len in (1, 4))
    inputs = make_inputs(plain, 2, 14, seed=6)
    pools = [reset_pool(StatePool.allocate(SlotLayout(spec), 2)) for spec in (plain, drafts)]
    outputs = [steps_of(pool, [0, 1], inputs, 0, 14) for pool in pools]
    assert torch.equal(*outputs)
    assert_same_bits(*(folded(pool, [0, 1]) for pool in pools))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rejection_counts_once(emulated, kind):
    """A step of which a part stays, then 100 tokens that all stay: as if the rejected ones had never been there."""
    spec = spec_of(kind, 2, 1, 16, 16, window=6, spec_len=4, act_dtype="float32")
    inputs, junk = (make_inputs(spec, 2, 106, seed=seed) for seed in (3, 9))
    pool, plain = (reset_pool(StatePool.allocate(SlotLayout(spec), 2)) for _ in range(2))
    slots = torch.tensor([0, 1], dtype=torch.int32)
    steps_of(pool, [0, 1], inputs, 0, 3)
    draft = {n: torch.cat([v[:, 3:5], junk.tokens[n][:, :2]], dim=1) for n, v in inputs.tokens.items()}
    kernels.gated_delta_step(pool, slots, **draft, **inputs.params)
    accepted = torch.tensor([2, 2], dtype=torch.int32)
    kernels.gated_delta_step(pool, slots, **inputs.span(5, 6), **inputs.params, accepted=accepted)
    outputs, expected = steps_of(pool, [0, 1], inputs, 6, 106), steps_of(plain, [0, 1], inputs, 0, 106)
    assert_close(outputs, expected[:, 6:].double(), "float32")
    assert_same_bits(folded(pool, [0, 1]), folded(plain, [0, 1]))


@pytest.mark.parametrize("kind, sizes", SMALL)
def test_a_slot_is_moved_and_recycled_in_the_middle_of_its_window(emulated, kind, sizes):
    """A ring that wraps, with pending rows: copied as bytes, copied by a fold, and then given to another sequence."""
    spec = spec_of(kind, *sizes, window=4, spec_len=2, stagger=False)
    inputs = make_inputs(spec, 1, 20, seed=12)
    pool = reset_pool(StatePool.allocate(SlotLayout(spec), 3))
    steps_of(pool, [0], inputs, 0, 8, 2)
    origin, history, pending, _ = pool["cursor"][0, 0, 0].tolist()
    assert pending > 0 and history > 0 and origin + history + pending > spec.ring_rows
    elsewhere = StatePool(pool.layout, pool.memory.roll(2, dims=0))
    kernels.materialize(pool, torch.tensor([0]), torch.tensor([-1]), torch.tensor([1]))
    fresh = reset_pool(StatePool.allocate(SlotLayout(spec), 3))
    kernels.reset(pool, torch.tensor([0], dtype=torch.int32))
    assert torch.equal(steps_of(pool, [0], inputs, 0, 8, 2), steps_of(fresh, [0], inputs, 0, 8, 2))
    went_on = steps_of(fresh, [0], inputs, 8, 14, 2)
    assert torch.equal(steps_of(elsewhere, [2], inputs, 8, 14, 2), went_on)
    steps_of(pool, [1], inputs, 8, 14, 2)
    want = folded(fresh, [0])
    assert_same_bits(folded(elsewhere, [2]), want)
    assert_same_bits(folded(pool, [1]), want)


def test_slots_outside_the_pool_are_padding(emulated):
    """In a step, a materialize and a reset: zeros, and no byte of any slot."""
    spec = spec_of("gdn", 2, 1, 128, 128)
    inputs, pool = make_inputs(spec, 2, 2), reset_pool(StatePool.allocate(SlotLayout(spec), 2))
    before, bad, good = pool.memory.clone(), torch.tensor([2, -7]), torch.tensor([0, 1])
    assert not kernels.gated_delta_step(pool, bad, **inputs.span(0, 1), **inputs.params).any()
    kernels.materialize(pool, bad, torch.full_like(bad, -1), good)
    kernels.materialize(pool, good, torch.full_like(bad, -1), bad)
    kernels.reset(pool, bad)
    assert torch.equal(pool.memory, before)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_fp16_rows_and_outputs_of_a_large_state(emulated, kind):
    """d leaves fp16's range, the outputs do not: finite, and those of the reference."""
    spec = spec_of(kind, 2, 1, 64, 64, act_dtype="float16", window=4, stagger=False)
    inputs = make_inputs(spec, 2, 6, regime="weak")
    pools = [StatePool.allocate(SlotLayout(spec), 2) for _ in range(2)]
    for pool in pools:
        pool["state"].copy_(torch.randn(pool["state"].shape, generator=torch.Generator().manual_seed(1)) * 3e5)
    slots, pairs = torch.tensor([0, 1], dtype=torch.int32), [(kernels, pools[0]), (reference, pools[1])]
    for t in range(6):
        step = inputs.span(t, t + 1) | inputs.params
        o, want = (op.gated_delta_step(p, slots, **step, scale=0.01) for op, p in pairs)
        assert_close(o, want.double(), "float16", scale=2.0)
    assert float(pools[0]["ring_d"].abs().max()) == torch.finfo(torch.float16).max
