"""What must agree to the bit on the GPU: checkpoints whatever the window, the tokens per step, the kernel or the cut
into blocks; everything else whatever the order of rows, the batch, the slot, the ring's origin, the launch, graph or
eager.

No oracle: each test compares two runs of the library. test_mamba2_step.py compares with float64.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import DEVICE, assert_same_pool, mamba2_spec, random_slots
from replay_cases import assert_same_bits, far_pool, make_inputs, raw_state

from trtllm_replayssm import RecurrenceSpec, SlotLayout, kernels
from trtllm_replayssm.kernels import StepTuning
from trtllm_replayssm.pool import StatePool, torch_dtype

TOKENS = 48
CHOSEN = StepTuning()
ROWS = 4


class Run:
    """A pool of ROWS + 2 slots and inputs that are the same values for every spec of equal sizes."""

    def __init__(
        self, spec: RecurrenceSpec, rows: int = ROWS, slots: torch.Tensor | None = None, total: int | None = None
    ):
        base = mamba2_spec(spec.nheads, spec.ngroups, spec.headdim, spec.dstate)
        inputs = make_inputs(base, rows, TOKENS, seed=11)
        act = torch_dtype(spec.act_dtype)
        self.tokens = {n: v.to(DEVICE, v.dtype if n == "dt" else act) for n, v in inputs.tokens.items()}
        self.params = {n: v.to(DEVICE) for n, v in inputs.params.items()}
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) if slots is None else slots
        self.pool = StatePool.allocate(SlotLayout(spec), total or rows + 2, device=DEVICE)
        kernels.reset(self.pool, self.slots)

    def step(self, first: int, last: int, accepted=None, rows=slice(None), tuning: StepTuning = CHOSEN) -> torch.Tensor:
        tokens = {n: v[rows, first:last] for n, v in self.tokens.items()}
        return kernels.mamba2_step(
            self.pool, self.slots[rows], **tokens, **self.params, accepted=accepted, tuning=tuning
        )

    def state(self) -> torch.Tensor:
        """The checkpoints with every ring row folded, on a copy."""
        copy = StatePool(self.pool.layout, self.pool.memory.clone())
        kernels.materialize(copy, self.slots, torch.full_like(self.slots, -1), self.slots, A=self.params["A"])
        return raw_state(copy, self.slots)

    def copy(self) -> StatePool:
        return StatePool(self.pool.layout, self.pool.memory.clone())


def spec_of(**options) -> RecurrenceSpec:
    return mamba2_spec(8, 2, 64, 128, **options)


def final_state(spec: RecurrenceSpec, pattern: tuple[int, ...], tuning: StepTuning = CHOSEN) -> torch.Tensor:
    """States after TOKENS tokens decoded in steps of the pattern's lengths, all accepted."""
    run, at, i = Run(spec), 0, 0
    while at < TOKENS:
        count = min(pattern[i % len(pattern)], TOKENS - at)
        run.step(at, at + count, tuning=tuning)
        at, i = at + count, i + 1
    return run.state()


@pytest.fixture(scope="module")
def conventional() -> torch.Tensor:
    """States of window-1 decoding, token by token."""
    return final_state(spec_of(window=1), (1,))


@pytest.mark.parametrize("window", [2, 5, 16, 17, 64])
@pytest.mark.parametrize("pattern", [(1,), (4,), (3, 1, 2), (16,)], ids=str)
def test_checkpoint_is_that_of_conventional_decoding(conventional, window, pattern):
    assert_same_bits(final_state(spec_of(window=window, spec_len=max(pattern)), pattern), conventional)


@pytest.mark.parametrize("tuning", [(1, 0), (2, 1), (4, 0), (4, 2), (2, 4)], ids=str)
def test_checkpoint_does_not_depend_on_the_cut(conventional, tuning):
    assert_same_bits(final_state(spec_of(), (1,), StepTuning(*tuning)), conventional)


def test_generic_kernel_folds_the_same_bits(conventional):
    """fp32 activations (the same values) take the kernel for any shape; bf16 ones the tuned kernel."""
    assert_same_bits(final_state(spec_of(act_dtype="float32", spec_len=4), (4, 1)), conventional)


def test_exact_scan_folds_the_same_bits(conventional):
    run = Run(spec_of())
    packed = {n: v.flatten(0, 1) for n, v in run.tokens.items()}
    bounds = torch.arange(0, (ROWS + 1) * TOKENS, TOKENS, dtype=torch.int32, device=DEVICE)
    kernels.mamba2_scan(run.pool, run.slots, **packed, **run.params, cu_seqlens=bounds, exact=True)
    assert_same_bits(raw_state(run.pool, run.slots), conventional)


def test_flush_anywhere_is_flush_never(conventional):
    """A materialize of every slot in place after random steps leaves the same states."""
    run = Run(spec_of(stagger=False))
    for t in range(TOKENS):
        run.step(t, t + 1)
        if t in (3, 4, 20, 37):
            kernels.materialize(run.pool, run.slots, torch.full_like(run.slots, -1), run.slots, A=run.params["A"])
    assert_same_bits(run.state(), conventional)


@pytest.mark.parametrize("spec_len", [4, 16])
def test_rejected_tokens_leave_no_trace(conventional, spec_len):
    """Drafts of which a changing number stays, the rest being other tokens: the states of the true tokens alone."""
    run, at, last = Run(spec_of(spec_len=spec_len)), 0, None
    junk = {n: v.flip(1) for n, v in run.tokens.items()}
    for i in range(10_000):
        keep = min((i * 7) % (spec_len + 1), TOKENS - at)
        tokens = {
            n: torch.cat([v[:, at : at + keep], junk[n][:, : spec_len - keep]], dim=1) for n, v in run.tokens.items()
        }
        accepted = None if last is None else torch.full((ROWS,), last, dtype=torch.int32, device=DEVICE)
        kernels.mamba2_step(run.pool, run.slots, **tokens, **run.params, accepted=accepted)
        at, last = at + keep, keep
        if at == TOKENS:
            break
    cursor = run.pool["cursor"][run.slots.long(), 0, 0]
    counts = cursor[:, 1].int() + last
    kernels.materialize(run.pool, run.slots, counts, run.slots, A=run.params["A"])
    assert_same_bits(raw_state(run.pool, run.slots), conventional)


def test_accepting_nothing_changes_nothing():
    """accepted = 0 on append and on flush steps: the same outputs again and again, the same state."""
    for history in (5, 16):
        run = Run(spec_of(spec_len=4, stagger=False))
        for t in range(0, history, 4):
            run.step(t, min(t + 4, history))
        nothing = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
        before = run.state()
        first = run.step(20, 24)
        for _ in range(3):
            assert torch.equal(run.step(20, 24, nothing), first) or history == 16
            first = run.step(20, 24, nothing)
        kernels.materialize(
            run.pool, run.slots, run.pool["cursor"][run.slots.long(), 0, 0, 1].int(), run.slots, A=run.params["A"]
        )
        assert_same_bits(raw_state(run.pool, run.slots), before)


CUTS = [StepTuning(), StepTuning(1), StepTuning(2, 1), StepTuning(4, 2), StepTuning(4, 4)]


@pytest.mark.parametrize(
    "options", [{}, {"spec_len": 4}, {"act_dtype": "float16"}, {"state_dtype": "bfloat16"}], ids=str
)
def test_rows_do_not_see_each_other(options):
    """Permuted rows, a batch in two halves, every cut into blocks: equal outputs and slots."""
    spec = spec_of(**options)
    T, order = spec.spec_len, torch.tensor([2, 0, 3, 1], device=DEVICE)
    base, permuted, halves = Run(spec), Run(spec), Run(spec)
    cuts = {cut: Run(spec) for cut in CUTS}
    for t in range(0, TOKENS - T, T):
        y = base.step(t, t + T)
        assert torch.equal(permuted.step(t, t + T, rows=order), y[order])
        assert torch.equal(torch.cat([halves.step(t, t + T, rows=half) for half in (slice(0, 1), slice(1, 4))]), y)
        for cut, run in cuts.items():
            assert torch.equal(run.step(t, t + T, tuning=cut), y), cut
    for other in (permuted, halves, *cuts.values()):
        assert_same_pool(base.pool, other.pool, base.slots)


@pytest.mark.parametrize("spec_len", [1, 4])
def test_slot_and_origin_do_not_matter(spec_len):
    spec = spec_of(spec_len=spec_len, stagger=False, window=7)
    base = Run(spec)
    moved = Run(spec, slots=random_slots(ROWS, 40), total=40)
    shifted = Run(spec)
    shifted.pool["cursor"][:, :, :, 0] = (
        torch.arange(shifted.pool.slots, device=DEVICE).short()[:, None, None] % spec.ring_rows
    )
    for t in range(0, TOKENS - spec_len, spec_len):
        y = base.step(t, t + spec_len)
        assert torch.equal(moved.step(t, t + spec_len), y)
        assert torch.equal(shifted.step(t, t + spec_len), y)
    assert_same_bits(moved.state(), base.state())
    assert_same_bits(shifted.state(), base.state())


def test_repeated_launches_on_a_large_batch():
    """Five launches from the same memory, at mixed phases: equal bytes everywhere."""
    rows = 96
    run = Run(mamba2_spec(32, 2, 64, 128), rows=rows)
    for t in range(20):
        run.step(t, t + 1)
    start = run.copy()
    results = []
    for _ in range(5):
        run.pool.memory.copy_(start.memory)
        results.append((run.step(20, 21), run.pool.memory.clone()))
    for y, memory in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(memory, results[0][1])


def test_one_token_of_a_pool_for_drafts_is_a_decode_step():
    """T = 1 with room for 4 tokens and with room for 1: outputs and states to the bit."""
    plain, drafts = Run(spec_of(window=6)), Run(spec_of(window=6, spec_len=4))
    for t in range(TOKENS):
        assert torch.equal(plain.step(t, t + 1), drafts.step(t, t + 1))
    assert_same_bits(plain.state(), drafts.state())


@pytest.mark.parametrize("spec_len", [1, 4])
def test_slots_past_4_gib(spec_len):
    """Slots more than 2^31 bytes apart: prompt, steps and fold leave the bits of a dense pool."""
    slots = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    dense, far = (Run(spec_of(window=6, spec_len=spec_len), rows=2, slots=slots, total=3) for _ in range(2))
    far.pool = far_pool(far.pool.layout, device=DEVICE)
    bounds, results = torch.tensor([0, 16, 32], dtype=torch.int32, device=DEVICE), []
    for run in (dense, far):
        kernels.reset(run.pool, slots)
        packed = {n: v[:, :16].flatten(0, 1) for n, v in run.tokens.items()}
        outputs = [kernels.mamba2_scan(run.pool, slots, **packed, **run.params, cu_seqlens=bounds)]
        outputs += [run.step(t, t + spec_len) for t in range(16, 36, spec_len)]
        kernels.materialize(run.pool, slots, torch.full_like(slots, -1), slots, A=run.params["A"])
        results.append([*outputs, raw_state(run.pool, slots), run.pool["cursor"][slots.long()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.isfinite(results[1][-2]).all()


@pytest.mark.parametrize("spec_len", [1, 4])
def test_graph_replay_is_eager(spec_len):
    """One captured step, replayed over new inputs, slots and acceptances: the bits of eager steps, padding included."""
    spec = spec_of(spec_len=spec_len, window=6)
    eager, graphed = Run(spec), Run(spec)
    fixed = {n: v[:, :spec_len].clone() for n, v in graphed.tokens.items()}
    slots, accepted = graphed.slots.clone(), torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
    y = torch.empty_like(fixed["x"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.mamba2_step(graphed.pool, slots, **fixed, **graphed.params, accepted=accepted, out=y)
    rng = torch.Generator().manual_seed(1)
    for t in range(0, TOKENS - spec_len, spec_len):
        wanted = torch.randint(0, spec_len + 1, (ROWS,), generator=rng).int().to(DEVICE)
        pad = int(torch.randint(0, ROWS, (), generator=rng))
        for run in (eager, graphed):
            run.slots = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
            run.slots[pad] = -1
        for name, value in graphed.tokens.items():
            fixed[name].copy_(value[:, t : t + spec_len])
        slots.copy_(graphed.slots)
        accepted.copy_(wanted)
        graph.replay()
        assert torch.equal(y, eager.step(t, t + spec_len, wanted))
        assert torch.equal(eager.pool.memory, graphed.pool.memory)


def test_verify_equals_single_steps_to_rounding():
    """T tokens in one step, and one by one: equal states, outputs within one rounding of each other."""
    for T in (2, 4, 8, 16):
        spec = spec_of(spec_len=T)
        many, single = Run(spec), Run(spec)
        for t in range(0, TOKENS - T + 1, T):
            a = many.step(t, t + T).float()
            b = torch.cat([single.step(t + i, t + i + 1) for i in range(T)], dim=1).float()
            assert torch.isfinite(a).all()
            assert ((a - b).abs() <= 2**-8 * b.abs() + 1e-4 * b.abs().max()).all()
        assert_same_bits(many.state(), single.state())
