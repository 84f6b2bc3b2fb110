"""The comparison of two decodings: on tables of logits whose differences are known, and on tiny models.

Teeth: a replay session that is wrong by more than rounding must fail, by token, by logit and by state.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from history_session import HistorySession, table_logits
from oracles import make_oracle, sequence

from trtllm_replayssm import ReplayError
from trtllm_replayssm.runtime.compare import (
    Comparison,
    Difference,
    Rounding,
    RowComparison,
    compare,
    relative_difference,
)
from trtllm_replayssm.runtime.generate import generate
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.torch_session import TorchSession

PROMPTS = [[1, 2], [3], [4, 5, 6], [8, 8], [0, 9]]
ROUNDING = Rounding(logits=1e-4, states=1e-4)


def run(replay: HistorySession | None = None, **options: Any) -> Comparison:
    sessions = (HistorySession(max_batch=2), replay or HistorySession(max_batch=3, spec_len=4))
    result = compare(*sessions, PROMPTS, **{"max_new_tokens": 25, "rounding": ROUNDING, "eos_ids": (10,), **options})
    assert [s.free_slots for s in sessions] == [2, sessions[1]._max_batch]
    return result


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_equal_sessions_are_identical(drafts: int, temperature: float) -> None:
    params = SamplingParams(temperature, seed=3)
    seen: dict[int, int] = {}
    result = run(
        draft_tokens=drafts,
        sampling=params,
        on_tokens=lambda i, tokens: seen.update({i: seen.get(i, 0) + len(tokens)}),
    )
    assert result.ok and result.identical
    texts = generate(HistorySession(), PROMPTS, max_new_tokens=25, sampling=params, eos_ids=(10,))
    for i, (row, text) in enumerate(zip(result.rows, texts, strict=True)):
        assert row.tokens == text.tokens and row.finish_reason == text.finish_reason
        assert row.compared == len(row.tokens) + (row.finish_reason == "eos")
        assert row.logit_difference == row.logit_difference_relative == row.state_difference == 0.0
        assert row.differing == 0 and row.first is None
        assert seen.get(i, 0) == len(row.tokens)
        assert 0 <= row.accepted <= row.drafted
    assert (sum(row.accepted for row in result.rows) > 0) == (drafts > 0)


def test_drafts_of_one_row_do_not_push_another_past_the_position_limit() -> None:
    for a in range(11):
        prompts = [[a, (a + b) % 11] * n for b in (1, 3, 5) for n in (8, 2, 7)]
        sessions = (
            HistorySession(max_batch=9, max_positions=20),
            HistorySession(max_batch=9, max_positions=20, spec_len=4),
        )
        result = compare(*sessions, prompts, max_new_tokens=15, rounding=ROUNDING, draft_tokens=3)
        assert result.ok and result.identical
        assert [row.finish_reason for row in result.rows] == ["positions", "length", "positions"] * 3


def bent_at(length: int, by: float, index: int = 0) -> Any:
    """Adds ``by`` to one logit of every text of ``length`` tokens."""

    def bend(tokens: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_add(0, torch.tensor([index]), torch.tensor([by])) if len(tokens) == length else logits

    return bend


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_small_difference_is_measured_and_allowed(drafts: int) -> None:
    result = run(HistorySession(spec_len=4, bend=bent_at(9, 2e-4)), draft_tokens=drafts)
    assert result.ok and result.identical
    long = [row for row, prompt in zip(result.rows, PROMPTS, strict=True) if row.compared > 9 - len(prompt)]
    assert long
    for row in long:
        assert row.logit_difference == pytest.approx(2e-4, rel=1e-2)
        assert row.logit_difference_agreeing == row.logit_difference
        assert 0 < row.logit_difference_relative < 1e-4


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_large_difference_fails_although_no_token_changes(drafts: int) -> None:
    worst = int(table_logits([1, 2], 11).argmin())
    result = run(HistorySession(spec_len=4, bend=bent_at(2, 0.01, worst)), draft_tokens=drafts)
    assert result.identical and not result.ok
    assert [row.within(ROUNDING) for row in result.rows] == [len(p) > 2 for p in PROMPTS]


@pytest.mark.parametrize("drafts", [0, 2])
def test_another_token_is_found_and_the_comparison_goes_on(drafts: int) -> None:
    def bend(tokens: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(1) if len(tokens) in (6, 12) else logits

    result = run(HistorySession(spec_len=4, bend=bend), draft_tokens=drafts, eos_ids=())
    plain = run(eos_ids=())
    assert not result.ok and not result.identical
    for prompt, row, other in zip(PROMPTS, result.rows, plain.rows, strict=True):
        assert row.tokens == other.tokens and row.compared == 25 and row.differing == 2
        first = row.first
        assert first is not None and first.position == 6 - len(prompt)
        logits = table_logits((prompt + row.tokens)[:6], 11)
        best = int(logits.argmax())
        assert (first.conventional, first.replay) == (best, (best + 1) % 11)
        assert first.conventional_logits == pytest.approx((float(logits[best]), float(logits[first.replay])))
        rolled = logits.roll(1)
        assert first.replay_logits == pytest.approx((float(rolled[best]), float(rolled[first.replay])))
        assert first.gap == pytest.approx(float(logits[best] - logits[first.replay]))
        assert first.logit_difference == pytest.approx(float((logits - rolled).abs().max()))
        assert first.allowed == pytest.approx(1e-4 * float(logits.abs().max()))
        assert row.logit_difference_agreeing == pytest.approx(first.logit_difference)


def test_another_choice_is_rounding_up_to_the_allowed_gap_alone() -> None:
    """All other measures within their bounds: the gap decides, and of a draw it says nothing."""
    for gap, ok in ((0.0, True), (2e-4, True), (2.1e-4, False), (1e-2, False)):
        first = Difference(3, 1, 2, (2.0, 2.0 - gap), (2.0, 2.0), gap, 1e-4, allowed=2e-4)
        row = RowComparison(first=first, logit_difference_relative=5e-5, state_difference=5e-5)
        assert row.within(ROUNDING) is ok
        row.greedy = False
        assert row.within(ROUNDING)


def test_a_tie_decided_otherwise_is_rounding() -> None:
    def tie(by: float) -> Any:
        def bend(tokens: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
            if len(tokens) != 7:
                return logits
            return logits.index_fill(0, torch.tensor([3, 5]), 9.0) + by * torch.nn.functional.one_hot(
                torch.tensor(5), 11
            )

        return bend

    sessions = (HistorySession(bend=tie(-1e-5)), HistorySession(bend=tie(1e-5)))
    result = compare(*sessions, PROMPTS[:2], max_new_tokens=10, rounding=ROUNDING)
    assert result.ok and not result.identical
    for row in result.rows:
        assert row.first is not None and (row.first.conventional, row.first.replay) == (3, 5)
        assert row.first.gap <= row.first.allowed and row.differing == 1
    strict = Rounding(logits=1e-7, states=1e-4)
    assert not compare(*sessions, PROMPTS[:2], max_new_tokens=10, rounding=strict).ok


def test_sampled_choices_may_differ_where_the_logits_are_close() -> None:
    # Differences of 5e-3 in every logit move some draws across a border between tokens.
    def bend(tokens: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        return logits + 5e-3 * torch.sin(torch.arange(11.0) * len(tokens))

    prompts = [[i, j] for i in range(11) for j in range(4)]
    sessions = (HistorySession(max_batch=44), HistorySession(max_batch=44, bend=bend))
    options: dict[str, Any] = {"max_new_tokens": 60, "sampling": SamplingParams(1.0), "rounding": Rounding(1e-2, 1e-2)}
    result = compare(*sessions, prompts, **options)
    assert result.ok and not result.identical
    assert not any(row.greedy for row in result.rows)


def test_another_state_fails() -> None:
    result = run(HistorySession(spec_len=4, state_bend=1.0))
    assert result.identical and not result.ok
    assert all(row.state_difference > 1e-4 for row in result.rows)
    result = run(HistorySession(spec_len=4, state_bend=math.nan))
    assert not result.ok and all(row.state_difference == math.inf for row in result.rows)


def test_wrong_commits_are_noticed() -> None:
    class Careless(HistorySession):
        def commit(self, seqs: Any, accepted: Any) -> None:
            super().commit(seqs, accepted)
            for seq in seqs:
                self._live[seq].accepted = -1  # keeps the rejected drafts
                self.pending[seq] = self.pending[seq][::-1][: self._live[seq].accepted]

    with pytest.raises(AssertionError):
        run(Careless(spec_len=4), draft_tokens=3)


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_models(kind: str, drafts: int) -> None:
    oracle = make_oracle(kind)

    def session(window: int, spec_len: int, **options: Any) -> TorchSession:
        model = (oracle.config, options.pop("weights", oracle.weights))
        return TorchSession(model, max_batch=3, max_positions=128, window=window, spec_len=spec_len, **options)

    prompts = [sequence(n, seed=n) for n in (1, 8, 13)]
    options: dict[str, Any] = {"max_new_tokens": 60, "rounding": Rounding.of("float32", "float32")}
    result = compare(session(1, 1), session(16, 1 + drafts), prompts, draft_tokens=drafts, **options)
    assert result.ok and sum(row.compared for row in result.rows) == 180
    assert all(0 < row.state_difference < 3e-6 and row.logit_difference < 3e-5 for row in result.rows)
    name = next(n for n in oracle.weights if n.endswith("conv.weight"))
    wrong = oracle.weights | {name: oracle.weights[name] * 1.001}  # a thousandth in one layer
    result = compare(session(1, 1), session(16, 1 + drafts, weights=wrong), prompts, draft_tokens=drafts, **options)
    assert not result.ok


def test_bounds_follow_the_coarsest_dtype() -> None:
    full = Rounding.of("float32", "float32")
    assert full.logits < 2e-5 and Rounding.of("float64", "float64").logits < 1e-13
    half = Rounding.of("bfloat16", "float32")
    assert full.logits < Rounding.of("float32", "float16").logits < half.logits < 0.1
    assert Rounding.of("float32", "float32", "fp8_e4m3").logits >= Rounding.of("float32", "float32", "int8").logits
    for bad in (("int8", "float32", "none"), ("float32", "int8", "none"), ("float32", "float32", "fp4")):
        with pytest.raises(ReplayError, match="must be one of"):
            Rounding.of(*bad)


def test_relative_difference() -> None:
    a = torch.tensor([3.0, 4.0])
    assert relative_difference(a, a) == 0.0
    assert relative_difference(a, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_difference(torch.zeros(2), a) == math.inf
    assert relative_difference(a, torch.tensor([math.nan, 4.0])) == math.inf


def test_result_as_json() -> None:
    data = run(HistorySession(spec_len=4, bend=bent_at(6, 50.0, 3))).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))
    assert data["ok"] is False and data["rounding"] == {"logits": 1e-4, "states": 1e-4}
    assert {"identical", "within_rounding", "first", "tokens"} <= data["rows"][0].keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1] * 64]}, "position limit is 64"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"draft_tokens": 4}, "draft_tokens is 4"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    sessions = (HistorySession(), HistorySession(spec_len=4))
    with pytest.raises(ReplayError, match=message):
        compare(*sessions, **{"prompts": [[1]], "max_new_tokens": 4, "rounding": ROUNDING, **changes})
    sessions[0].prefill([[1]] * 4)
    with pytest.raises(ReplayError, match="no free slot"):
        compare(*sessions, [[1]], max_new_tokens=4, rounding=ROUNDING)
