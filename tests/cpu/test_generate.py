"""Generation. Oracle: a plain loop over one sequence (`alone`), on HistorySession's fixed table of logits and on a tiny
model, greedy and sampled, with and without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from history_session import HistorySession, table_logits
from oracles import make_oracle, sequence

from trtllm_replayssm import ReplayError
from trtllm_replayssm.runtime.drafts import NgramDrafter
from trtllm_replayssm.runtime.generate import Completion, filled, generate, matching, row_sampling
from trtllm_replayssm.runtime.sampling import Sampler, SamplingParams, sample
from trtllm_replayssm.runtime.torch_session import TorchSession

PROMPTS = [[1, 2], [3], [4, 5, 6, 7], [8, 8, 1], [0, 9], [2, 2], [7]]


def alone(prompt: list[int], count: int, params: SamplingParams, eos: tuple[int, ...] = ()) -> list[int]:
    """New tokens of one row, straight from the table."""
    tokens, sampler = list(prompt), Sampler(params)
    while len(tokens) < len(prompt) + count:
        token = int(sample(table_logits(tokens, 11)[None], [sampler]))
        if token in eos:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("batch", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_are_what_they_are_alone(drafts: int, batch: int, temperature: float) -> None:
    session = HistorySession(max_batch=batch, spec_len=6)
    params = [SamplingParams(temperature, 8, 0.95, seed=50 + i) for i in range(7)]
    done = generate(session, PROMPTS, max_new_tokens=30, sampling=params, eos_ids=(10,), draft_tokens=drafts)
    for prompt, param, row in zip(PROMPTS, params, done, strict=True):
        want = alone(prompt, 30, param, (10,))
        assert row.tokens == want
        assert row.finish_reason == ("length" if len(want) == 30 else "eos")
        assert 0 <= row.accepted <= row.drafted <= drafts * row.launches
        if drafts == 0:  # the first token comes from the prefill, the end token from a step
            assert row.launches == len(want) - (row.finish_reason == "length")
    assert {r.finish_reason for r in done} == {"length", "eos"}
    assert session.free_slots == batch
    if drafts and temperature == 0:
        assert sum(r.accepted for r in done) > 20
        assert sum(r.launches for r in done) < sum(len(r.tokens) for r in done) - 20


def test_finished_rows_leave_the_batch_and_waiting_ones_come_in() -> None:
    session = HistorySession(max_batch=3)
    ends: list[int] = []
    done = generate(session, PROMPTS, max_new_tokens=12, eos_ids=(10,), on_done=lambda index, row: ends.append(index))
    assert sorted(ends) == list(range(7)) and ends != list(range(7))
    assert session.batches[0] == 3 and session.batches[-1] < 3
    assert sum(session.batches) == sum(row.launches for row in done)


def test_one_set_of_parameters_seeds_every_row_differently() -> None:
    base = SamplingParams(1.0, seed=(1 << 63) - 1)
    assert [p.seed for p in row_sampling(base, 3)] == [(1 << 63) - 1, 0, 1]
    done = generate(HistorySession(), [[1, 2]] * 2, max_new_tokens=20, sampling=SamplingParams(1.0, seed=4))
    assert done[0].tokens == alone([1, 2], 20, SamplingParams(1.0, seed=4))
    assert done[1].tokens == alone([1, 2], 20, SamplingParams(1.0, seed=5)) != done[0].tokens


@pytest.mark.parametrize("drafts", [0, 3])
def test_position_limit(drafts: int) -> None:
    session = HistorySession(max_positions=20, spec_len=4)
    done = generate(session, [[1] * 19, [2] * 5, [3] * 15], max_new_tokens=9, draft_tokens=drafts)
    assert [(len(r.tokens), r.finish_reason) for r in done] == [(1, "positions"), (9, "length"), (5, "positions")]
    assert done[1].tokens == alone([2] * 5, 9, SamplingParams())


def test_drafts_of_one_row_do_not_push_another_past_the_position_limit() -> None:
    """All rows of a launch have one T: it must leave room for the row that has least."""
    for seed in range(40):
        rng = random.Random(seed)
        prompts = [[rng.randrange(11) for _ in range(2)] * n for n in (8, 2, 7)]
        session = HistorySession(max_positions=20, spec_len=4)
        done = generate(session, prompts, max_new_tokens=15, draft_tokens=3)
        assert [row.tokens for row in done] == [alone(p, min(15, 20 - len(p)), SamplingParams()) for p in prompts]
        assert [row.finish_reason for row in done] == ["positions", "length", "positions"]


@pytest.mark.parametrize("drafts", [0, 4])
def test_callbacks_see_every_token_in_order(drafts: int) -> None:
    seen: dict[int, list[int]] = {}
    ended: dict[int, Completion] = {}

    def on_tokens(index: int, tokens: list[int]) -> None:
        assert tokens and index not in ended
        seen.setdefault(index, []).extend(tokens)

    session = HistorySession(max_batch=2, spec_len=5)
    done = generate(
        session,
        PROMPTS,
        max_new_tokens=25,
        eos_ids=[10],
        draft_tokens=drafts,
        on_tokens=on_tokens,
        on_done=ended.__setitem__,
    )
    assert [seen.get(i, []) for i in range(7)] == [row.tokens for row in done]
    assert [ended[i] for i in range(7)] == done


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5"])
def test_speculation_on_a_model_changes_no_token(kind: str) -> None:
    oracle = make_oracle(kind)
    prompts = [sequence(4, seed=1) * 3, sequence(9, seed=2), [5, 6] * 6]

    def texts(params: SamplingParams, drafts: int, window: int, batch: int) -> list[Completion]:
        session = TorchSession(
            (oracle.config, oracle.weights), max_batch=batch, max_positions=128, window=window, spec_len=1 + drafts
        )
        return generate(session, prompts, max_new_tokens=90, sampling=params, draft_tokens=drafts)

    for params in (SamplingParams(), SamplingParams(0.3, 20, 0.9, seed=1)):
        plain = [r.tokens for r in texts(params, 0, 1, 3)]
        speculative = texts(params, 3, 16, 2)
        assert [r.tokens for r in speculative] == plain
        assert sum(r.accepted for r in speculative) > 0
    assert plain[0][0] in oracle.full(prompts[0])[-1].topk(20).indices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1] * 64]}, "prompt 0 has 64 tokens; the position limit is 64, of which one must be left"),
        ({"prompts": [[11]]}, "token id 11"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"draft_tokens": 3}, "draft_tokens is 3; it must be a whole number from 0 to 2"),
        ({"sampling": [SamplingParams()]}, "1 sampling parameters for 2 prompts"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    session = HistorySession(spec_len=3)
    with pytest.raises(ReplayError, match=message):
        generate(session, **{"prompts": [[1], [2]], "max_new_tokens": 4, **changes})
    assert session.free_slots == 4
    session.prefill([[1]] * 4)
    with pytest.raises(ReplayError, match="no free slot"):
        generate(session, [[1]], max_new_tokens=1)


def test_bad_logits_release_everything() -> None:
    def bend(tokens: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        return logits / 0 if len(tokens) > 6 else logits

    session = HistorySession(bend=bend)
    with pytest.raises(ReplayError, match="not finite"):
        generate(session, PROMPTS[:3], max_new_tokens=20)
    assert session.free_slots == 4


def test_drafter_proposes_what_followed() -> None:
    drafter = NgramDrafter(longest=3, shortest=2)
    assert drafter.propose(4) == []
    drafter.extend([1, 2, 3, 4, 9, 2, 3])
    assert drafter.propose(4) == [4, 9, 2, 3]
    assert drafter.propose(2) == [4, 9]
    drafter.extend([5, 1, 2, 3])
    assert drafter.propose(2) == [4, 9]  # three tokens agree with the start, two with a later place
    drafter.extend([7, 7])
    assert drafter.propose(3) == []
    drafter.extend([7])
    assert drafter.propose(4) == [7, 7, 7, 7]  # a match that overlaps the end repeats itself
    with pytest.raises(ReplayError, match="1 <= shortest <= longest"):
        NgramDrafter(2, 3)


def test_drafter_finds_what_a_search_finds() -> None:
    draw = random.Random(3)
    tokens: list[int] = []
    drafter = NgramDrafter(longest=4, shortest=1)
    for _ in range(300):
        tokens.append(draw.randrange(4))
        drafter.extend(tokens[-1:])
        want: list[int] = []
        for n in (4, 3, 2, 1):
            ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
            if n <= len(tokens) and ends:
                text = list(tokens)
                for i in range(3):
                    text.append(text[max(ends) + i])
                want = text[len(tokens) :]
                break
        assert drafter.propose(3) == want


def test_matching_and_filling() -> None:
    assert [matching(d, [1, 2, 3]) for d in ([], [2], [1], [1, 3], [1, 2])] == [0, 0, 1, 1, 2]
    assert filled([7, 8], [[1, 2], []]) == [[7, 1, 2], [8, 8, 8]]
    assert filled([7], [[]]) == [[7]]
