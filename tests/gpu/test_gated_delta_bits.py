"""What must agree to the bit on the GPU for GDN and KDA: checkpoints whatever the window, the tokens per step, the
kernel or the cut into blocks; everything else whatever the order of rows, the batch, the slot, the ring's origin, the
launch, graph or eager; beta and g of a token whatever the step that brought it.

No oracle but in the last test: each compares two runs of the library. test_gated_delta_step.py compares with float64.
"""

from __future__ import annotations

import pytest
import torch
from delta_bounds import ReadRows, assert_verify_equals_single_steps
from gated_delta_cases import GATES, assert_same_delta_pool, delta_spec
from gpu_cases import DEVICE, random_slots
from replay_cases import REGIMES, Inputs, assert_same_bits, far_pool, make_inputs, raw_state

from trtllm_replayssm import RecurrenceSpec, SlotLayout, kernels
from trtllm_replayssm.kernels import StepTuning
from trtllm_replayssm.pool import StatePool, torch_dtype

TOKENS = 40
CHOSEN = StepTuning()
ROWS = 4


class Run:
    """A pool of ROWS + 2 slots and inputs that are the same values for every spec of equal sizes."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        rows: int = ROWS,
        slots: torch.Tensor | None = None,
        total: int | None = None,
        regime: str = "plain",
    ):
        base = RecurrenceSpec(spec.kind, spec.nheads, spec.ngroups, spec.headdim, spec.dstate, gate=spec.gate)
        inputs = make_inputs(base, rows, TOKENS, seed=11, regime=regime)
        act = torch_dtype(spec.act_dtype)
        self.tokens = {n: v.to(DEVICE, act if n in "qkv" else v.dtype) for n, v in inputs.tokens.items()}
        self.params = {n: v.to(DEVICE) for n, v in inputs.params.items()}
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) if slots is None else slots
        self.pool = StatePool.allocate(SlotLayout(spec), total or rows + 2, device=DEVICE)
        kernels.reset(self.pool, self.slots)

    def step(self, first: int, last: int, accepted=None, rows=slice(None), tuning: StepTuning = CHOSEN) -> torch.Tensor:
        tokens = {n: v[rows, first:last] for n, v in self.tokens.items()}
        return kernels.gated_delta_step(
            self.pool, self.slots[rows], **tokens, **self.params, accepted=accepted, tuning=tuning
        )

    def decode(self, pattern: tuple[int, ...], tuning: StepTuning = CHOSEN) -> Run:
        """TOKENS tokens in steps of the pattern's lengths, all accepted."""
        at = i = 0
        while at < TOKENS:
            count = min(pattern[i % len(pattern)], TOKENS - at)
            self.step(at, at + count, tuning=tuning)
            at, i = at + count, i + 1
        return self

    def state(self, count: int = -1) -> torch.Tensor:
        """The checkpoints with ``count`` ring rows (-1: all) folded, on a copy."""
        copy = StatePool(self.pool.layout, self.pool.memory.clone())
        kernels.materialize(copy, self.slots, torch.full_like(self.slots, count), self.slots)
        return raw_state(copy, self.slots)


def spec_of(gate: str, **options) -> RecurrenceSpec:
    return delta_spec(gate, 8, 2, 128, 128, **options)


@pytest.fixture(scope="module")
def conventional() -> dict[str, torch.Tensor]:
    """States of window-1 decoding, token by token."""
    return {gate: Run(spec_of(gate, window=1)).decode((1,)).state() for gate in GATES}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("window", [1, 2, 5, 8, 16, 64])
@pytest.mark.parametrize("pattern", [(1,), (4,), (3, 1, 2), (16,)], ids=str)
def test_checkpoint_is_that_of_conventional_decoding(conventional, gate, window, pattern):
    run = Run(spec_of(gate, window=window, spec_len=max(pattern))).decode(pattern)
    assert_same_bits(run.state(), conventional[gate])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("regime", ["trained", "weak", "strong"])
def test_checkpoint_at_every_decay(gate, regime):
    """g near 0, and g that erases the state at every token, over full windows of 16."""
    want = Run(spec_of(gate, window=1), regime=regime).decode((1,)).state()
    assert_same_bits(Run(spec_of(gate, window=16), regime=regime).decode((1,)).state(), want)
    assert_same_bits(Run(spec_of(gate, window=16, spec_len=4), regime=regime).decode((4,)).state(), want)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tuning", [(1, 0), (2, 1), (4, 0), (2, 4), (0, 8)], ids=str)
def test_checkpoint_does_not_depend_on_the_cut(conventional, gate, tuning):
    assert_same_bits(Run(spec_of(gate)).decode((1,), StepTuning(*tuning)).state(), conventional[gate])


@pytest.mark.parametrize("gate", GATES)
def test_generic_kernel_folds_the_same_bits(conventional, gate):
    """fp32 activations (the same values) take the kernel for any shape; bf16 ones the tuned kernel."""
    run = Run(spec_of(gate, act_dtype="float32", spec_len=4)).decode((4, 1))
    assert_same_bits(run.state(), conventional[gate])


@pytest.mark.parametrize("gate", GATES)
def test_flush_anywhere_is_flush_never(conventional, gate):
    """A materialize of every slot in place after some steps leaves the same states."""
    run = Run(spec_of(gate, stagger=False))
    for t in range(TOKENS):
        run.step(t, t + 1)
        if t in (3, 4, 20, 37):
            kernels.materialize(run.pool, run.slots, torch.full_like(run.slots, -1), run.slots)
    assert_same_bits(run.state(), conventional[gate])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("spec_len", [4, 16])
def test_rejected_tokens_leave_no_trace(conventional, gate, spec_len):
    """Drafts of which a changing number stays, the rest being other tokens: the states of the true tokens alone."""
    run, at, last, i = Run(spec_of(gate, spec_len=spec_len)), 0, None, 0
    junk = {n: v.flip(1) for n, v in run.tokens.items()}
    while at < TOKENS:
        keep = min((i * 7) % (spec_len + 1), TOKENS - at)
        tokens = {
            n: torch.cat([v[:, at : at + keep], junk[n][:, : spec_len - keep]], dim=1) for n, v in run.tokens.items()
        }
        accepted = None if last is None else torch.full((ROWS,), last, dtype=torch.int32, device=DEVICE)
        kernels.gated_delta_step(run.pool, run.slots, **tokens, **run.params, accepted=accepted)
        at, last, i = at + keep, keep, i + 1
    history = run.pool["cursor"][run.slots.long(), 0, 0, 1].int()
    kernels.materialize(run.pool, run.slots, history + last, run.slots)
    assert_same_bits(raw_state(run.pool, run.slots), conventional[gate])


@pytest.mark.parametrize("gate", GATES)
def test_a_token_leaves_the_same_ring_row_in_every_step(gate):
    """k, its norm, v, g and beta of the ring: equal bits from single steps, a verify step, and the generic kernel."""
    rows = {}
    for name, options, pattern in (
        ("single", {}, (1,)),
        ("verify", {"spec_len": 8}, (8,)),
        ("generic", {"act_dtype": "float32"}, (1,)),
    ):
        run = Run(spec_of(gate, window=16, stagger=False, **options))
        for t in range(0, 8, pattern[0]):
            run.step(t, t + pattern[0])
        rows[name] = {
            n: run.pool[n][run.slots.long()][:, :, :8].float()
            for n in ("ring_k", "ring_k_rnorm", "ring_v", "ring_g", "ring_beta")
        }
    for name in ("verify", "generic"):
        for region, value in rows["single"].items():
            assert_same_bits(rows[name][region], value, f"{region} of {name}")


CUTS = [StepTuning(), StepTuning(1), StepTuning(2, 1), StepTuning(4, 4), StepTuning(0, 8)]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "options", [{}, {"spec_len": 4}, {"act_dtype": "float16"}, {"state_dtype": "bfloat16"}], ids=str
)
def test_rows_do_not_see_each_other(gate, options):
    """Permuted rows, a batch in two parts, every cut into blocks: equal outputs and slots."""
    spec = spec_of(gate, window=6, **options)
    T, order = spec.spec_len, torch.tensor([2, 0, 3, 1], device=DEVICE)
    base, permuted, halves = Run(spec), Run(spec), Run(spec)
    cuts = {cut: Run(spec) for cut in CUTS}
    for t in range(0, TOKENS - T, T):
        o = base.step(t, t + T)
        assert torch.equal(permuted.step(t, t + T, rows=order), o[order])
        assert torch.equal(torch.cat([halves.step(t, t + T, rows=half) for half in (slice(0, 1), slice(1, 4))]), o)
        for cut, run in cuts.items():
            assert torch.equal(run.step(t, t + T, tuning=cut), o), cut
    for other in (permuted, halves, *cuts.values()):
        assert_same_delta_pool(base.pool, other.pool, base.slots)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("spec_len", [1, 4])
def test_slot_and_origin_do_not_matter(gate, spec_len):
    spec = spec_of(gate, spec_len=spec_len, stagger=False, window=7)
    base = Run(spec)
    moved = Run(spec, slots=random_slots(ROWS, 40), total=40)
    shifted = Run(spec)
    shifted.pool["cursor"][:, :, :, 0] = (
        torch.arange(shifted.pool.slots, device=DEVICE).short()[:, None, None] % spec.ring_rows
    )
    for t in range(0, TOKENS - spec_len, spec_len):
        o = base.step(t, t + spec_len)
        assert torch.equal(moved.step(t, t + spec_len), o)
        assert torch.equal(shifted.step(t, t + spec_len), o)
    assert_same_bits(moved.state(), base.state())
    assert_same_bits(shifted.state(), base.state())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("spec_len", [1, 3])
def test_five_launches_on_a_large_batch(gate, spec_len):
    """Five launches from the same memory, at mixed phases: equal bytes everywhere."""
    run = Run(delta_spec(gate, 16, 8, 128, 128, window=6, spec_len=spec_len), rows=96)
    for t in range(20):
        run.step(t, t + 1)
    start = run.pool.memory.clone()
    results = []
    for _ in range(5):
        run.pool.memory.copy_(start)
        results.append((run.step(20, 20 + spec_len), run.pool.memory.clone()))
    for o, memory in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(memory, results[0][1])


@pytest.mark.parametrize("gate", GATES)
def test_one_token_of_a_pool_for_drafts_is_a_decode_step(gate):
    """T = 1 with room for 4 tokens and with room for 1: outputs and states to the bit."""
    plain, drafts = Run(spec_of(gate, window=6)), Run(spec_of(gate, window=6, spec_len=4))
    for t in range(TOKENS):
        assert torch.equal(plain.step(t, t + 1), drafts.step(t, t + 1))
    assert_same_bits(plain.state(), drafts.state())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("spec_len", [1, 4])
def test_slots_past_4_gib(gate, spec_len):
    """Slots more than 2^31 bytes apart: prompt, steps and fold leave the bits of a dense pool."""
    slots = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    dense, far = (Run(spec_of(gate, window=6, spec_len=spec_len), rows=2, slots=slots, total=3) for _ in range(2))
    far.pool = far_pool(far.pool.layout, device=DEVICE)
    bounds, results = torch.tensor([0, 16, 32], dtype=torch.int32, device=DEVICE), []
    for run in (dense, far):
        kernels.reset(run.pool, slots)
        packed = {n: v[:, :16].flatten(0, 1) for n, v in run.tokens.items()}
        outputs = [kernels.gated_delta_scan(run.pool, slots, **packed, **run.params, cu_seqlens=bounds)]
        outputs += [run.step(t, t + spec_len) for t in range(16, 36, spec_len)]
        kernels.materialize(run.pool, slots, torch.full_like(slots, -1), slots)
        results.append([*outputs, raw_state(run.pool, slots), run.pool["cursor"][slots.long()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.isfinite(results[1][-2]).all()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("spec_len", [1, 4])
def test_graph_replay_is_eager(gate, spec_len):
    """One captured step, replayed over new inputs, slots and acceptances: the bits of eager steps, padding included."""
    spec = spec_of(gate, spec_len=spec_len, window=6)
    eager, graphed = Run(spec), Run(spec)
    fixed = {n: v[:, :spec_len].clone() for n, v in graphed.tokens.items()}
    slots, accepted = graphed.slots.clone(), torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
    o = torch.empty_like(fixed["v"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gated_delta_step(graphed.pool, slots, **fixed, **graphed.params, accepted=accepted, out=o)
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
        assert torch.equal(o, eager.step(t, t + spec_len, wanted))
        assert torch.equal(eager.pool.memory, graphed.pool.memory)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
def test_verify_equals_single_steps_to_rounding(gate, regime, tokens):
    """T tokens in one step, and one by one: equal states; outputs each within what the rounding points allow.

    A step of T tokens reads d of its own tokens in fp32, single steps read it from the ring, rounded to bf16; the
    reference does the same and differs in the same way. An output sums as many of those roundings as there are rows in
    the window, each times its weight, so the bound of an element is that sum (delta_bounds.output_bounds), not a
    multiple of its own last bit.
    """
    spec, states = spec_of(gate, spec_len=tokens), []
    length = TOKENS - TOKENS % tokens

    def decode(count):
        run, read = Run(spec, regime=regime), ReadRows()
        outputs = []
        for t in range(0, length, count):
            outputs.append(run.step(t, t + count))
            read.record(run.pool["cursor"][run.slots.long(), 0, 0], t, count)
        states.append(run.state())
        return torch.cat(outputs, dim=1), read

    run = Run(spec, regime=regime)
    inputs = Inputs(spec, {n: v[:, :length] for n, v in run.tokens.items()}, run.params)
    assert_verify_equals_single_steps(decode, inputs, tokens)
    assert_same_bits(*states)
