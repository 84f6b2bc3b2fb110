"""Causal convolution: step, scan, rollback, materialize against torch's conv1d in float64 and a numpy loop.

Expected error: fp32 and float64 a few eps of the sum of magnitudes; 16-bit half an eps, from the one rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from replay_cases import assert_close

from trtllm_replayssm import ConvLayout, ConvSpec, ReplayError, SlotLayout
from trtllm_replayssm.pool import StatePool, torch_dtype
from trtllm_replayssm.reference import causal_conv, conv_materialize, conv_reset, conv_scan, conv_step

CHANNELS, ROWS, LENGTH = 72, 3, 60
DTYPES = ("float64", "float32", "bfloat16", "float16")


class Case:
    """Random inputs [rows, length, C] and weights for a spec, a pool, and the float64 outputs."""

    def __init__(self, slots: int = 5, bias: bool = True, **options: Any) -> None:
        self.spec = ConvSpec(CHANNELS, **{"act_dtype": "float32", "spec_len": 4, **options})
        rng = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, LENGTH, CHANNELS, generator=rng).to(torch_dtype(self.spec.act_dtype))
        self.junk = torch.randn(ROWS, LENGTH, CHANNELS, generator=rng).to(self.x.dtype)
        self.weight = torch.randn(CHANNELS, self.spec.kernel, generator=rng)
        self.bias = torch.randn(CHANNELS, generator=rng) if bias else None
        self.pool = StatePool.allocate(ConvLayout(self.spec), slots)

    def expected(self, row: int, length: int = LENGTH) -> torch.Tensor:
        history = torch.zeros(1, self.spec.kernel - 1, CHANNELS, dtype=torch.float64)
        x = self.x[row : row + 1, :length].double()
        return causal_conv(history, x, self.weight, self.bias, activation=self.spec.activation)[0][0]

    def step(self, slots: list[int], x: torch.Tensor, accepted: list[int] | None = None) -> torch.Tensor:
        kept = None if accepted is None else torch.tensor(accepted, dtype=torch.int32)
        return conv_step(self.pool, torch.tensor(slots), x, self.weight, self.bias, accepted=kept)

    def scan(
        self, slots: list[int], spans: list[tuple[int, int, int]], resume: list[bool] | None = None
    ) -> torch.Tensor:
        x = torch.cat([self.x[row, a:b] for row, a, b in spans])
        bounds = torch.tensor([0] + [b - a for _, a, b in spans]).cumsum(0)
        flags = None if resume is None else torch.tensor(resume)
        return conv_scan(
            self.pool, torch.tensor(slots), x, self.weight, self.bias, cu_seqlens=bounds, has_initial=flags
        )


def test_oracle_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    x, w, b, h = rng.normal(size=(5, 3)), rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=(3, 3))
    padded = np.concatenate([h, x])
    for activation in ("silu", "none"):
        expected = np.zeros((5, 3))
        for t in range(5):
            for c in range(3):
                y = b[c] + sum(w[c, i] * padded[t + i, c] for i in range(4))
                expected[t, c] = y / (1 + np.exp(-y)) if activation == "silu" else y
        tensors = [torch.from_numpy(v) for v in (h[None], x[None], w, b)]
        y, last = causal_conv(*tensors, activation=activation)
        np.testing.assert_allclose(y[0].numpy(), expected, rtol=1e-12)
        np.testing.assert_array_equal(last[0].numpy(), x[-3:])


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("kernel", [2, 3, 4, 8])
@pytest.mark.parametrize("act", DTYPES)
def test_steps_and_scan(act: str, kernel: int, activation: str) -> None:
    case = Case(act_dtype=act, kernel=kernel, activation=activation)
    steps = torch.cat([case.step([4, 0, 2], case.x[:, i : i + 4]) for i in range(0, LENGTH, 4)], dim=1)
    spans = [(row, 0, LENGTH) for row in range(ROWS)]
    scanned = case.scan([1, 3, 2], spans).unflatten(0, (ROWS, LENGTH))
    assert steps.dtype == scanned.dtype == torch_dtype(act)
    assert torch.equal(steps, scanned), "scan and step differ"
    for row in range(ROWS):
        assert_close(steps[row], case.expected(row), act)


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_16_bit_outputs_are_the_fp32_ones_rounded_once(act: str, activation: str) -> None:
    """To the bit: a rounding of a partial sum, of the bias or before the activation would show."""
    half, exact = Case(act_dtype=act, activation=activation), Case(activation=activation)
    exact.x = half.x.float()
    spans = [(row, 0, LENGTH) for row in range(ROWS)]
    outputs = [case.scan([0, 1, 2], spans) for case in (half, exact)]
    assert torch.equal(outputs[0], outputs[1].to(half.x.dtype))
    steps = [torch.cat([case.step([0, 1, 2], case.x[:, i : i + 3]) for i in (0, 3, 6)]) for case in (half, exact)]
    assert torch.equal(steps[0], steps[1].to(half.x.dtype))


@pytest.mark.parametrize("bias", [None, torch.ones(CHANNELS).bfloat16()])
def test_bias_and_weight_dtypes(bias: torch.Tensor | None) -> None:
    case = Case(act_dtype="bfloat16")
    case.bias, case.weight = bias, case.weight.bfloat16()
    assert_close(case.step([0, 1, 2], case.x[:, :4])[1], case.expected(1, 4), "bfloat16")


@pytest.mark.parametrize("tokens", range(1, 17))
def test_rollback_at_every_t(tokens: int) -> None:
    """Of T tokens 0 .. T are kept, the others are junk: outputs and columns are those of the kept ones, to the bit."""
    case = Case(spec_len=16, act_dtype="bfloat16")
    whole = case.scan([3], [(0, 0, LENGTH)])
    for kept in range(tokens + 1):
        conv_reset(case.pool, torch.tensor([0]))
        case.scan([0], [(0, 0, 5)])
        x = torch.cat([case.x[:1, 5 : 5 + kept], case.junk[:1, : tokens - kept]], dim=1)
        first = case.step([0], x)
        second = case.step([0], case.x[:1, 5 + kept : 6 + kept], [kept])
        third = case.step([0], case.x[:1, 6 + kept : 8 + kept], [1])
        assert torch.equal(torch.cat([first[0, :kept], second[0], third[0]]), whole[5 : 8 + kept])
        # A restart from the stored window gives the same numbers.
        conv_materialize(case.pool, torch.tensor([0]), torch.tensor([2]), torch.tensor([1]))
        again = case.step([1], case.x[:1, 8 + kept : 12 + kept])
        assert torch.equal(again[0], whole[8 + kept : 12 + kept])


def test_random_accepts_and_rejects_of_many_rows() -> None:
    case, random = Case(act_dtype="bfloat16"), torch.Generator().manual_seed(2)
    whole = case.scan([4, 1, 3], [(row, 0, LENGTH) for row in range(ROWS)]).unflatten(0, (ROWS, LENGTH))
    conv_reset(case.pool, torch.tensor([4, 1, 3]))
    done, kept = torch.zeros(ROWS).long(), torch.zeros(ROWS).long()
    while int((done + kept).max()) <= LENGTH - 4:
        tokens = int(torch.randint(1, 5, (), generator=random))
        keep = torch.randint(0, tokens + 1, (ROWS,), generator=random)
        start = done + kept
        x = case.junk[:, :tokens].clone()
        for row in range(ROWS):
            x[row, : keep[row]] = case.x[row, start[row] : start[row] + keep[row]]
        y = case.step([4, 1, 3], x, kept.tolist())
        for row in range(ROWS):
            assert torch.equal(y[row, : keep[row]], whole[row, start[row] : start[row] + keep[row]])
        done, kept = start, keep
    assert int(done.min()) > 20


def test_values_of_accepted() -> None:
    """-1 and None are all; others are clamped to [0, pending]; a prefilled row may carry anything."""
    case = Case()
    outputs = {}
    for value in (-1, 3, 99, 0, -2, 1):
        case.scan([0], [(0, 0, 6)])
        case.step([0], case.x[:1, 6:9], [value])  # nothing is pending after a scan
        outputs[value] = case.step([0], case.x[:1, 20:21], [value])
    case.scan([0], [(0, 0, 6)])
    case.step([0], case.x[:1, 6:9])
    outputs[None] = case.step([0], case.x[:1, 20:21])
    assert torch.equal(outputs[-1], outputs[3]) and torch.equal(outputs[99], outputs[3])
    assert torch.equal(outputs[None], outputs[3]) and torch.equal(outputs[-2], outputs[0])
    assert not torch.equal(outputs[0], outputs[3]) and not torch.equal(outputs[1], outputs[3])


def test_reject_once_then_accept_100() -> None:
    case = Case()
    case.x = torch.randn(ROWS, 110, CHANNELS, generator=torch.Generator().manual_seed(4))
    case.step([0, 1, 2], case.x[:, :3])
    case.step([0, 1, 2], torch.cat([case.x[:, 3:4], case.junk[:, :3]], dim=1), [3, 3, 3])
    outputs = [case.step([0, 1, 2], case.x[:, 4:5], [1, 1, 1])]
    outputs += [case.step([0, 1, 2], case.x[:, i : i + 1], [1, 1, 1]) for i in range(5, 104)]
    assert_close(torch.cat(outputs, dim=1)[1], case.expected(1, 104)[4:], "float32")


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 10])
def test_scan_leaves_the_last_inputs(length: int) -> None:
    case = Case(act_dtype="bfloat16")
    case.pool["columns"][1] = 9.0
    case.step([1, 2, 3], case.x[:, :2])
    case.scan([1], [(0, 0, length)])
    columns = torch.cat([torch.zeros(3, CHANNELS).bfloat16(), case.x[0, :length]])[-3:]
    assert torch.equal(case.pool["columns"][1, :3], columns)
    assert case.pool["cursor"][1].tolist() == [[0, 0, 0, 0]] * 2  # 72 channels: two groups of 64
    rest = case.scan([1], [(0, length, 20)], [True])
    assert_close(torch.cat([case.scan([0], [(0, 0, length)]), rest]), case.expected(0, 20), "bfloat16")


def test_scan_of_mixed_sequences() -> None:
    case = Case(slots=6)
    case.scan([3, 4], [(1, 0, 6), (2, 0, 2)])
    case.step([3], case.x[1:2, 6:8])
    alone = StatePool(case.pool.layout, case.pool.memory.clone())
    spans = [(0, 0, 5), (1, 0, 0), (2, 0, 12), (1, 8, 15), (2, 2, 2)]
    slots, resume = [2, 1, -1, 3, 4], [False, False, False, True, True]
    y = case.scan(slots, spans, resume)
    together, case.pool = case.pool, alone
    first = 0
    for slot, span, flag in zip(slots, spans, resume, strict=True):
        out = y[first : first + span[2] - span[1]]
        first += len(out)
        if slot < 0:
            assert (out == 0).all()
        else:
            assert torch.equal(out, case.scan([slot], [span], [flag]))
    assert torch.equal(together.memory, alone.memory)
    assert_close(y[17:24], case.expected(1, 15)[8:], "float32")


def test_padding_poison_and_untouched_slots() -> None:
    case = Case(act_dtype="bfloat16")
    clean = case.step([2, 0], case.x[:2, :3])
    clean2 = case.step([2, 0], case.x[:2, 3:5], [1, 2])
    again = Case(act_dtype="bfloat16")
    again.pool["columns"][:, 3:] = float("nan")  # nothing is pending yet
    again.pool.memory[[1, 3, 4]] = 0xFF
    x = torch.stack([case.x[0], torch.full_like(case.x[0], float("nan")), case.x[1]])
    y = again.step([2, -1, 0], x[:, :3])
    assert torch.equal(y[[0, 2]], clean) and (y[1] == 0).all()
    again.pool["columns"][2, 4:] = float("nan")  # kept: 1
    again.pool["columns"][0, 5:] = float("nan")  # kept: 2
    y = again.step([2, -1, 0], x[:, 3:5], [1, 5, 2])
    assert torch.equal(y[[0, 2]], clean2)
    assert (again.pool.memory[[1, 3, 4]] == 0xFF).all()
    assert conv_step(case.pool, torch.zeros(0).int(), case.x[:0, :1], case.weight).shape == (0, 1, CHANNELS)


def test_rows_do_not_depend_on_each_other() -> None:
    case = Case()
    case.scan([0, 1, 2], [(0, 0, 3), (1, 0, 7), (2, 0, 1)])
    pools = [StatePool(case.pool.layout, case.pool.memory.clone()) for _ in range(3)]
    x, order = case.x[:, 10:13], [2, 0, 1]
    case.pool = pools[0]
    expected = case.step([0, 1, 2], x)
    case.pool = pools[1]
    assert torch.equal(case.step(order, x[order]), expected[order])
    case.pool = pools[2]
    assert torch.equal(torch.cat([case.step([0], x[:1]), case.step([1, 2], x[1:])]), expected)
    assert torch.equal(pools[0].memory, pools[1].memory) and torch.equal(pools[0].memory, pools[2].memory)


@pytest.mark.parametrize("count, taken", [(0, 0), (1, 1), (3, 3), (-1, 3), (7, 3), (-5, 0)])
def test_materialize(count: int, taken: int) -> None:
    case = Case(act_dtype="bfloat16")
    case.scan([0], [(0, 0, 5)])
    case.step([0], case.x[:1, 5:8])
    before = case.pool.memory[0].clone()
    src, dst = torch.tensor([0, -1, 0]), torch.tensor([2, 3, -1])
    conv_materialize(case.pool, src, torch.tensor([count] * 3), dst)
    assert torch.equal(case.pool.memory[0], before)
    assert torch.equal(case.pool["columns"][2, :3], case.x[0, 2 + taken : 5 + taken])
    assert case.pool["cursor"][2, :, 2].tolist() == [0, 0]
    assert (case.pool["columns"][3] == 0).all()
    conv_materialize(case.pool, torch.tensor([0]), torch.tensor([count]), torch.tensor([0]))
    assert torch.equal(case.pool["columns"][0, :3], case.x[0, 2 + taken : 5 + taken])


def test_no_graph_is_kept_of_weights_that_require_gradients() -> None:
    case = Case()
    case.weight.requires_grad_(), case.x.requires_grad_()
    outputs = [case.step([0, 1, 2], case.x[:, :3]), case.scan([0], [(0, 0, 5)])]
    assert not any(t.requires_grad for t in (*outputs, case.pool.memory, case.pool["columns"]))


def test_reset() -> None:
    case = Case()
    case.step([0, 1, 2], case.x[:, :3])
    kept = case.pool.memory[1].clone()
    conv_reset(case.pool, torch.tensor([0, -1, 2]))
    assert torch.equal(case.pool.memory[1], kept)
    assert (case.pool["columns"][[0, 2], :3] == 0).all() and (case.pool["cursor"][[0, 2]] == 0).all()
    assert_close(case.step([0], case.x[:1, :4])[0], case.expected(0, 4), "float32")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 2, 64)}, r"x has shape \[2, 2, 64\]; it must be \[rows=2, T=2, C=72\]"),
    ({"x": torch.zeros(2, 5, 72)}, "x carries 5 tokens a row; a step takes 1 to 4"),
    ({"x": torch.zeros(2, 72)}, "x is shape"),
    ({"x": torch.zeros(2, 2, 72).double()}, "x is torch.float64; it must be float32"),
    ({"weight": torch.zeros(72, 3)}, r"weight has shape .* \[C=72, kernel=4\]"),
    ({"weight": torch.zeros(72, 4).int()}, "weight is torch.int32; it must be a floating dtype"),
    ({"bias": torch.zeros(71)}, r"bias has shape .* \[C=72\]"),
    ({"slots": torch.tensor([0, 5])}, "slots names slot 5; the pool has slots 0 to 4"),
    ({"slots": torch.tensor([1, 1])}, "slots names slot 1 twice"),
    ({"accepted": torch.tensor([1])}, "accepted has shape"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_bad_step(change: dict[str, Any], message: str) -> None:
    case = Case()
    arguments = {"slots": torch.tensor([0, 1]), "x": case.x[:2, :2], "weight": case.weight, "bias": case.bias}
    before = case.pool.memory.clone()
    with pytest.raises(ReplayError, match=message):
        conv_step(case.pool, **{**arguments, **change})
    assert torch.equal(case.pool.memory, before)


def test_bad_scan_materialize_and_pool() -> None:
    case = Case()
    x, bounds = case.x[0], torch.tensor([0, LENGTH])
    with pytest.raises(ReplayError, match="cu_seqlens is"):
        conv_scan(case.pool, torch.tensor([0]), x, case.weight, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ReplayError, match=r"x has shape .* \[tokens=60, C=72\]"):
        conv_scan(case.pool, torch.tensor([0]), x[:, :8], case.weight, cu_seqlens=bounds)
    with pytest.raises(ReplayError, match="weight has shape"):
        conv_scan(case.pool, torch.tensor([0]), x, case.weight[:8], cu_seqlens=bounds)
    one = torch.tensor([1])
    with pytest.raises(ReplayError, match="dst names slot 9"):
        conv_materialize(case.pool, one, one, torch.tensor([9]))
    with pytest.raises(ReplayError, match="count has shape"):
        conv_materialize(case.pool, one, torch.tensor([1, 2]), one)
    other = StatePool.allocate(SlotLayout(_recurrent()), 2)
    with pytest.raises(ReplayError, match="pool holds RecurrenceSpec; this operation needs a pool with a ConvLayout"):
        conv_reset(other, one)


def _recurrent() -> Any:
    from replay_cases import small_spec

    return small_spec("mamba2")


@pytest.mark.parametrize("column", range(5))
def test_one_damaged_column_fails(column: int) -> None:
    case = Case()
    case.step([0], case.x[:1, :3])
    case.pool["columns"][0, column, 5] += 0.1
    y = case.step([0], case.x[:1, 3:6], [2])
    expected = torch.cat([torch.zeros(3, CHANNELS), case.x[0, :2], case.x[0, 3:6]])
    clean = causal_conv(expected[None, 2:5].double(), expected[None, 5:], case.weight, case.bias)[0][0]
    if column < 2:  # history that has slid out of the window
        assert_close(y[0], clean, "float32")
    else:
        with pytest.raises(AssertionError):
            assert_close(y[0], clean, "float32")
