"""Contract 4 and the row rules: what a row computes depends on nothing but its own slot's live rows and its own inputs.

All comparisons are to the bit. Oracle: the same operation on the same data, arranged in another way.
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
    live_ring_rows,
    make_inputs,
    oracle,
    poison,
    ring_regions,
    run_scan,
    run_step,
    small_spec,
)

from trtllm_replayssm import ReplayError, SlotLayout, reference
from trtllm_replayssm.pool import StatePool

WORDS = ("origin", "history_len", "pending_len", "limit")


def warm_pool(kind: str, rows: int = 4, **options: Any) -> tuple[Inputs, Decoder]:
    """Rows at different phases of their windows, some with rejected drafts behind them."""
    spec = small_spec(kind, **{"window": 5, "spec_len": 3, "act_dtype": "bfloat16", **options})
    inputs = make_inputs(spec, rows, 40)
    decoder = Decoder(inputs)
    random = torch.Generator().manual_seed(3)
    for _ in range(7):
        decoder.step(2, torch.randint(0, 3, (rows,), generator=random))
    return inputs, decoder


def step_at(pool: StatePool, slots: list[int], inputs: Inputs, rows: list[int], decoder: Decoder) -> torch.Tensor:
    """One step of two tokens for the given sequences, in the given order."""
    index = torch.tensor(rows)
    positions = (decoder.done + decoder.kept)[index, None] + torch.arange(2)
    return run_step(pool, torch.tensor(slots), inputs, inputs.at(index, positions), decoder.kept[index].int())


def copy_of(pool: StatePool) -> StatePool:
    return StatePool(pool.layout, pool.memory.clone())


def slot_content(pool: StatePool, slot: int) -> dict[str, torch.Tensor]:
    """Everything in a slot that a later operation may read, ring rows in order of age."""
    rows = live_ring_rows(pool, slot)
    content = {name: pool[name][slot].clone() for name in pool._views if not name.startswith("ring")}
    content["cursor"][..., 0] = 0
    return {**content, **{name: pool[name][slot][:, rows].clone() for name in ring_regions(pool)}}


def assert_same_content(a: StatePool, slot_a: int, b: StatePool, slot_b: int) -> None:
    first, second = slot_content(a, slot_a), slot_content(b, slot_b)
    for name, value in first.items():
        assert torch.equal(value.contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
def test_warm_pool_has_rows_at_all_phases(kind: str) -> None:
    _, decoder = warm_pool(kind)
    cursors = decoder.pool["cursor"][:4, 0, 0]
    assert len(cursors[:, 1].unique()) > 1 and len(cursors[:, 0].unique()) > 1
    flush = cursors[:, 1] + decoder.kept + 2 > cursors[:, 3]
    assert flush.any() and not flush.all()


@pytest.mark.parametrize("read_copy", ["none", "fp8_e4m3"])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_rows_and_unused_slots_may_hold_nan(kind: str, read_copy: str) -> None:
    spec = small_spec(kind, window=5, spec_len=3, act_dtype="bfloat16", read_copy=read_copy)
    inputs = make_inputs(spec, 3, 150)
    clean, dirty = Decoder(inputs, slots=[4, 0, 2]), Decoder(inputs, slots=[4, 0, 2])

    def spoil(decoder: Decoder, accepted: torch.Tensor) -> None:
        poison(decoder.pool, [4, 0, 2], accepted.tolist())
        unused = [slot for slot in range(decoder.pool.slots) if slot not in (4, 0, 2)]
        assert (decoder.pool.memory[unused] == 0xFF).all()

    dirty.before_step = spoil
    random = torch.Generator().manual_seed(9)
    for _ in range(40):
        tokens = int(torch.randint(1, 4, (), generator=random))
        keep = torch.randint(0, tokens + 1, (3,), generator=random)
        expected, got = clean.step(tokens, keep)[1], dirty.step(tokens, keep)[1]
        assert torch.isfinite(got).all()
        assert torch.equal(got, expected)
        for slot in (4, 0, 2):
            assert_same_content(clean.pool, slot, dirty.pool, slot)
        assert (dirty.pool.memory[[1, 3, 5]] == 0xFF).all(), "an unused slot was written"
    assert int(clean.done.max()) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_nan_inputs_of_padding_rows_and_their_slots(kind: str) -> None:
    inputs, decoder = warm_pool(kind)
    pool = copy_of(decoder.pool)
    expected = step_at(decoder.pool, [0, 2], inputs, [0, 2], decoder)
    index = torch.tensor([0, 1, 2, 3])
    tokens = inputs.at(index, (decoder.done + decoder.kept)[:, None] + torch.arange(2))
    for value in tokens.values():
        value[[1, 3]] = float("nan")
    accepted = decoder.kept.int()
    accepted[1] = 99
    y = run_step(pool, torch.tensor([0, -1, 2, -7]), inputs, tokens, accepted)
    assert torch.equal(y[[0, 2]], expected) and (y[[1, 3]] == 0).all()
    assert torch.equal(pool.memory, decoder.pool.memory)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_padding_only_and_empty_batch(kind: str) -> None:
    inputs, decoder = warm_pool(kind)
    before = decoder.pool.memory.clone()
    y = run_step(
        decoder.pool, torch.tensor([-1, -1]), inputs, inputs.at(torch.tensor([0, 1]), torch.zeros(2, 1).long())
    )
    assert y.shape[:2] == (2, 1) and (y == 0).all()
    none = {name: value[:0, :1] for name, value in inputs.tokens.items()}
    assert run_step(decoder.pool, torch.zeros(0).int(), inputs, none).shape[0] == 0
    assert torch.equal(decoder.pool.memory, before)


@pytest.mark.parametrize(
    "options", [{}, {"read_copy": "int8"}, {"headdim": 80, "dstate": 96, "window": 17, "act_dtype": "float32"}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_permuted_rows_and_split_batch(kind: str, options: dict[str, Any]) -> None:
    inputs, decoder = warm_pool(kind, **options)
    whole, permuted, split = (copy_of(decoder.pool) for _ in range(3))
    expected = step_at(whole, [0, 1, 2, 3], inputs, [0, 1, 2, 3], decoder)
    order = [2, 0, 3, 1]
    assert torch.equal(step_at(permuted, order, inputs, order, decoder), expected[order])
    assert torch.equal(permuted.memory, whole.memory)
    parts = [step_at(split, rows, inputs, rows, decoder) for rows in ([0], [1, 2], [3])]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(split.memory, whole.memory)


@pytest.mark.parametrize("kind", KINDS)
def test_moved_slot(kind: str) -> None:
    """The slot is one block of bytes: copied into a pool of another size and stride it goes on as before."""
    inputs, decoder = warm_pool(kind)
    layout = decoder.pool.layout
    memory = torch.full((9, layout.slot_bytes + 4096 + 16), 0xFF, dtype=torch.uint8)
    moved = StatePool(layout, memory)
    for slot, target in enumerate([7, 0, 4, 8]):
        moved.memory[target, : layout.slot_bytes] = decoder.pool.memory[slot]
    for _ in range(4):
        expected = step_at(decoder.pool, [0, 1, 2, 3], inputs, [0, 1, 2, 3], decoder)
        assert torch.equal(step_at(moved, [7, 0, 4, 8], inputs, [0, 1, 2, 3], decoder), expected)
        decoder.done, decoder.kept = decoder.done + decoder.kept, torch.tensor([2, 1, 0, 2])
    for slot, target in enumerate([7, 0, 4, 8]):
        assert torch.equal(moved.memory[target, : layout.slot_bytes], decoder.pool.memory[slot])
    assert (memory[[1, 2, 3, 5, 6]] == 0xFF).all() and (memory[:, layout.slot_bytes :] == 0xFF).all()


@pytest.mark.parametrize("kind", KINDS)
def test_shifted_origin(kind: str) -> None:
    """Rotating a ring, rows and origin together, changes nothing but where the rows lie."""
    inputs, decoder = warm_pool(kind)
    rows = decoder.pool.layout.spec.ring_rows
    for shift in range(1, rows):
        pool, shifted = copy_of(decoder.pool), copy_of(decoder.pool)
        for name in ring_regions(shifted):
            shifted[name].copy_(shifted[name].clone().roll(shift, dims=2))
        shifted["cursor"][..., 0] = (shifted["cursor"][..., 0] + shift) % rows
        again = Decoder(inputs)
        again.done, again.kept = decoder.done.clone(), decoder.kept.clone()
        for _ in range(3):
            expected = step_at(pool, [0, 1, 2, 3], inputs, [0, 1, 2, 3], again)
            assert torch.equal(step_at(shifted, [0, 1, 2, 3], inputs, [0, 1, 2, 3], again), expected)
            again.done, again.kept = again.done + again.kept, torch.tensor([1, 2, 2, 0])
        for slot in range(4):
            assert_same_content(pool, slot, shifted, slot)
            assert (pool["cursor"][slot, 0, 0, 0] + shift) % rows == shifted["cursor"][slot, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_five_equal_runs(kind: str) -> None:
    inputs, decoder = warm_pool(kind)
    runs = []
    for _ in range(5):
        pool = copy_of(decoder.pool)
        runs.append((step_at(pool, [0, 1, 2, 3], inputs, [0, 1, 2, 3], decoder), pool.memory))
    assert all(torch.equal(y, runs[0][0]) and torch.equal(m, runs[0][1]) for y, m in runs[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_is_kept_of_tensors_that_require_gradients(kind: str) -> None:
    """A pool whose regions joined a graph would hold every step's tensors for good."""
    inputs, decoder = warm_pool(kind)
    values = [*inputs.tokens.values(), *(p for p in inputs.params.values() if isinstance(p, torch.Tensor))]
    for value in values:
        value.requires_grad_()
    y = decoder.run(2, 4)  # across a flush
    scanned = run_scan(decoder.pool, [1], inputs, [(1, 0, 5)])
    decoder.state(0)
    regions = [decoder.pool[region.name] for region in decoder.pool.layout.regions]
    assert not any(t.requires_grad for t in (y, scanned, decoder.pool.memory, *regions))


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_outputs_are_the_fp32_ones_rounded_once(kind: str, act: str) -> None:
    """To the bit, in scans and in steps that read no 16-bit d row: one rounding, after D, the gate and all sums."""
    half = make_inputs(small_spec(kind, act_dtype=act, window=5, spec_len=3), 2, 12)
    exact = Inputs(small_spec(kind, window=5, spec_len=3), {n: v.float() for n, v in half.tokens.items()}, half.params)
    results = []
    for inputs in (half, exact):
        decoder = Decoder(inputs)
        scanned = run_scan(decoder.pool, [0, 1], inputs, [(0, 0, 8), (1, 0, 8)])
        decoder.done[:] = 8
        results.append([scanned, decoder.step(3)[1], *([decoder.step(1)[1]] if kind == "mamba2" else [])])
    for y, expected in zip(*results, strict=True):
        assert torch.equal(y, expected.to(y.dtype)) and y.dtype != expected.dtype


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_index_dtypes(kind: str, dtype: torch.dtype) -> None:
    inputs, decoder = warm_pool(kind)
    pool, tokens = copy_of(decoder.pool), inputs.span(0, 1)
    expected = run_step(decoder.pool, torch.arange(4), inputs, tokens, torch.tensor([0, 1, 2, -1]))
    y = run_step(pool, torch.arange(4).to(dtype), inputs, tokens, torch.tensor([0, 1, 2, -1]).to(dtype))
    assert torch.equal(y, expected) and torch.equal(pool.memory, decoder.pool.memory)


@pytest.mark.parametrize("kind", KINDS)
def test_cursor_words_and_copies(kind: str) -> None:
    """The cursor after each step, written out by hand, in every copy of every head."""
    inputs = make_inputs(small_spec(kind, window=5, spec_len=3), 1, 40)
    decoder = Decoder(inputs, slots=[2])  # first window: 5 - 2 = 3
    expected = [  # (tokens, kept of the step before) -> origin, history_len, pending_len, limit
        (2, 0, (0, 0, 2, 3)),
        (1, 1, (0, 1, 1, 3)),  # 1 + 1 <= 3: no flush
        (1, 1, (0, 2, 1, 3)),
        (3, 1, (3, 0, 3, 5)),  # 3 + 3 > 3: flush, limit becomes the window
        (2, 0, (3, 0, 2, 5)),  # nothing committed: nothing to fold
        (2, 2, (3, 2, 2, 5)),
        (3, 1, (6, 0, 3, 5)),  # 3 + 3 > 5
        (3, 3, (1, 0, 3, 5)),  # origin 6 + 3 = 9 = 1 mod 8
    ]
    for step, (tokens, kept, words) in enumerate(expected):
        decoder.kept[:] = kept
        decoder.step(tokens)
        cursor = decoder.pool["cursor"][2]
        assert cursor.reshape(-1, 4).unique(dim=0).tolist() == [list(words)], f"step {step}: {WORDS}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_ring_is_not_folded(kind: str) -> None:
    """With nothing committed a step past the limit is no flush: the short first window stays."""
    decoder = Decoder(make_inputs(small_spec(kind, window=5, spec_len=3), 1, 40), slots=[4])  # first window: 1
    for tokens, kept, words in ((3, 0, [0, 0, 3, 1]), (2, 0, [0, 0, 2, 1]), (3, 1, [1, 0, 3, 5])):
        decoder.kept[:] = kept
        decoder.step(tokens)
        assert decoder.pool["cursor"][4, 0, 0].tolist() == words


@pytest.mark.parametrize("kind", KINDS)
def test_stagger_spreads_the_flushes(kind: str) -> None:
    """16 slots admitted together: with stagger one of them flushes in any step, without it all in one step."""
    counts = {}
    for stagger in (True, False):
        inputs = make_inputs(small_spec(kind, nheads=1, ngroups=1, headdim=8, window=16, stagger=stagger), 16, 50)
        decoder, flushed = Decoder(inputs), []
        for _ in range(50):
            before = decoder.pool["cursor"][:16, 0, 0, 0].clone()
            decoder.step(1)
            flushed.append(int((decoder.pool["cursor"][:16, 0, 0, 0] != before).sum()))
        counts[stagger] = flushed[17:49]
        assert_close(decoder.state(3), oracle(inputs)[1][3], "float32", what="state")
    assert set(counts[True]) == {1} and sorted(set(counts[False])) == [0, 16]


@pytest.mark.parametrize("kind", KINDS)
def test_reset(kind: str) -> None:
    _, decoder = warm_pool(kind, read_copy="int8")
    pool = decoder.pool
    kept = pool.memory[[0, 3]].clone()
    pool["state"][2] = float("nan")
    reference.reset(pool, torch.tensor([1, -1, 2], dtype=torch.int32))
    assert torch.equal(pool.memory[[0, 3]], kept)
    for slot in (1, 2):
        assert pool["cursor"][slot].reshape(-1, 4).unique(dim=0).tolist() == [[0, 0, 0, 5 - slot]]
        assert (pool["state"][slot] == 0).all() and (pool["read_copy"][slot] == 0).all()
        assert (pool["read_scale"][slot] == 1).all()
    with pytest.raises(ReplayError, match="slots names slot 9; the pool has slots 0 to 4"):
        reference.reset(pool, torch.tensor([9]))
    with pytest.raises(ReplayError, match="slots names slot 1 twice"):
        reference.reset(pool, torch.tensor([1, 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_recycled_slot(kind: str) -> None:
    """A slot left in the middle of its window starts afresh after a reset or a scan, whatever its ring holds."""
    inputs, decoder = warm_pool(kind)
    fresh = StatePool.allocate(SlotLayout(inputs.spec), 5)
    reference.reset(decoder.pool, torch.arange(4))
    for name in ring_regions(decoder.pool):
        decoder.pool[name].fill_(float("nan"))
    for first in range(0, 20, 2):
        tokens = inputs.span(first, first + 2)
        y, expected = (run_step(pool, torch.arange(4), inputs, tokens) for pool in (decoder.pool, fresh))
        assert torch.equal(y, expected)
    assert_same_content(decoder.pool, 1, fresh, 1)
