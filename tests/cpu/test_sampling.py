"""Sampling: distributions against probabilities worked out by hand, and what a row's draw may depend on."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_replayssm import ReplayError
from trtllm_replayssm.runtime.sampling import Sampler, SamplingParams, check_logits, choose, sample

PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]
LOGITS = torch.tensor(PROBABILITIES).log()


def draws(params: SamplingParams, count: int = 4000, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """Share of each token among ``count`` draws from ``logits``."""
    tokens = choose(logits.expand(1, count, -1), [Sampler(params)])
    return torch.bincount(tokens.flatten(), minlength=logits.shape[-1]) / count


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBABILITIES),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_k": 99}, PROBABILITIES),
        ({"top_p": 0.5}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_p": 0.7}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"top_k": 3, "top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"temperature": 1e-300}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5}, [p * p / 0.275 for p in PROBABILITIES]),
    ],
    ids=str,
)
def test_distribution(params: dict[str, float], expected: list[float]) -> None:
    shares = draws(SamplingParams(**{"temperature": 1.0, "seed": 3, **params}))
    for share, probability in zip(shares.tolist(), expected, strict=True):
        # five standard deviations of 4,000 draws; exactly zero where the probability is
        assert abs(share - probability) <= 5 * math.sqrt(probability * (1 - probability) / 4000)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.50001, 3), (0.75, 3), (1.0, 4)])
def test_top_p_that_is_reached_exactly_takes_no_further_token(top_p: float, kept: int) -> None:
    shares = draws(SamplingParams(temperature=1.0, top_p=top_p, seed=3), logits=torch.zeros(4))
    assert (shares > 0).tolist() == [i < kept for i in range(4)]


def test_distribution_teeth() -> None:
    shares = draws(SamplingParams(temperature=1.0, seed=3), logits=LOGITS * 1.2)
    assert abs(float(shares[1]) - 0.4) > 5 * math.sqrt(0.24 / 4000)


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 0.0], [-3.0, -2.0, -2.0]])
    assert sample(logits, [Sampler(SamplingParams())] * 3).tolist() == [1, 0, 1]
    assert SamplingParams().greedy and not SamplingParams(temperature=0.1).greedy


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(6, 50)
    params = [SamplingParams(0.0 if i == 2 else 0.5 + i, i, 0.9, seed=i) for i in range(6)]
    together = [Sampler(p) for p in params]
    rounds = [sample(logits + r, together).tolist() for r in range(5)]
    for i, p in enumerate(params):
        alone = Sampler(p)
        assert [sample(logits[i : i + 1] + r, [alone]).item() for r in range(5)] == [r[i] for r in rounds]
    order = [3, 0, 5, 1, 4, 2]
    shuffled = sample(logits[order], [Sampler(params[i]) for i in order]).tolist()
    assert shuffled == [rounds[0][i] for i in order]


def test_seed_decides() -> None:
    logits = torch.zeros(1, 1000)
    pick = [sample(logits, [Sampler(SamplingParams(1.0, seed=s))]).item() for s in (1, 1, 2)]
    assert pick[0] == pick[1] != pick[2]


def test_tokens_ahead_are_those_of_single_steps() -> None:
    logits = torch.randn(1, 80, 40)
    params = SamplingParams(temperature=1.0, seed=9)
    single, ahead = Sampler(params), Sampler(params)
    expected = [sample(logits[:, t], [single]).item() for t in range(80)]
    got: list[int] = []
    while len(got) < 80:  # five looked at, three kept: crosses the blocks of the stream
        tokens = choose(logits[:, len(got) : len(got) + 5], [ahead])[0].tolist()[:3]
        ahead.advance(len(tokens))
        got += tokens
    assert got == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_p", -math.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", math.inf),
        ("seed", -1),
        ("seed", 1 << 63),
        ("seed", 0.0),
    ],
)
def test_parameters_refused(name: str, value: object) -> None:
    with pytest.raises(ReplayError, match=f"^{name} is .*; it must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = bad
    with pytest.raises(ReplayError, match=r"row 1 are not finite \(1 of 24"):
        sample(logits, [Sampler(SamplingParams(temperature))] * 3)
    check_logits(torch.zeros(2, 3, 4))


def test_shapes_refused() -> None:
    samplers = [Sampler(SamplingParams())]
    with pytest.raises(ReplayError, match="2 rows of logits"):
        choose(torch.zeros(2, 4), samplers)
    with pytest.raises(ReplayError, match=r"shape \(4,\)"):
        choose(torch.zeros(4), samplers)
    with pytest.raises(ReplayError, match=r"\[rows, vocab\]"):
        sample(torch.zeros(1, 2, 4), samplers)


def test_low_precision_logits() -> None:
    logits = torch.randn(4, 30).to(torch.bfloat16)
    samplers = [Sampler(SamplingParams(1.0, seed=i)) for i in range(4)]
    again = [Sampler(SamplingParams(1.0, seed=i)) for i in range(4)]
    assert sample(logits, samplers).tolist() == sample(logits.float(), again).tolist()
