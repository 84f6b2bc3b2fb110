"""Choosing the next token from logits: greedy, temperature, top-k, top-p, one random stream per row.

Contract: what a row draws depends on its own parameters, seed, logits and count of tokens so far, and on nothing else
in the batch. The stream is indexed by token, so that a speculative step which keeps three of five tokens goes on with
the same random numbers as three single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import require
from ..spec import require_int

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1 << 24
MAX_SEED = (1 << 63) - 1
_BLOCK = 64


def _require_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(number and low <= value <= high, f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence chooses its tokens.

    Attributes:
        temperature: 0 takes the best token (greedy); otherwise logits are divided by it. 0..100.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: then keep the smallest set of best tokens whose probability reaches top_p. Above 0, up to 1.
        seed: of the row's random stream, 0..2^63 - 1.

    Raises:
        ReplayError: a value that is not a finite number or is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        low = math.nextafter(0.0, 1.0)
        _require_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "a number from 0 (greedy) to 100")
        _require_number("top_p", self.top_p, low, 1.0, "a number above 0, up to 1 (keep all)")
        require_int("top_k", self.top_k, 0, MAX_TOP_K, " (0 keeps all)")
        require_int("seed", self.seed, 0, MAX_SEED)

    @property
    def greedy(self) -> bool:
        """True where no random number is used."""
        return self.temperature == 0


GREEDY = SamplingParams()


class Sampler:
    """The parameters of one row with its random stream (a CPU generator, whatever device the logits are on)."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator().manual_seed(params.seed)
        self._ahead: list[float] = []

    def peek(self, count: int) -> list[float]:
        """The next ``count`` numbers of the stream, uniform in [0, 1), without using them up."""
        while len(self._ahead) < count:
            self._ahead += torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        return self._ahead[:count]

    def advance(self, count: int) -> None:
        """Use up ``count`` numbers: one per token that the row keeps."""
        self.peek(count)
        del self._ahead[:count]


def check_logits(logits: torch.Tensor) -> None:
    """Raise ReplayError if any of ``logits`` [..., vocab] is NaN or infinite, naming the first such row."""
    bad = ~torch.isfinite(logits)
    if bool(bad.any()):
        rows = bad.reshape(-1, logits.shape[-1]).any(dim=-1).nonzero().flatten().tolist()
        require(False, f"logits of row {rows[0]} are not finite ({int(bad.sum())} of {logits.numel()} values in all)")


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Tokens of each row's next positions, without advancing the streams.

    Args:
        logits: [rows, vocab] or [rows, T, vocab], any float dtype and device; position t uses the t-th number ahead.
        samplers: one per row.

    Returns:
        int64 [rows] or [rows, T], on the CPU.

    Raises:
        ReplayError: another shape, a wrong count of samplers, or logits that are not finite.
    """
    shape = tuple(logits.shape)
    require(len(shape) in (2, 3), f"logits have shape {shape}; they must be [rows, vocab] or [rows, T, vocab]")
    require(len(samplers) == shape[0], f"there are {len(samplers)} samplers for {shape[0]} rows of logits")
    check_logits(logits)
    steps = 1 if logits.dim() == 2 else int(logits.shape[1])
    tokens = logits.argmax(dim=-1).cpu()
    drawn = [i for i, s in enumerate(samplers) if not s.params.greedy]
    if drawn:
        rows = logits[drawn].reshape(len(drawn) * steps, logits.shape[-1])
        uniform = torch.tensor([u for i in drawn for u in samplers[i].peek(steps)], dtype=torch.float64)
        params = [samplers[i].params for i in drawn for _ in range(steps)]
        tokens[drawn] = _draw(rows, params, uniform).reshape(tokens[drawn].shape).cpu()
    return tokens


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """As :func:`choose` for logits [rows, vocab], and advances every stream by one token."""
    require(logits.dim() == 2, f"logits have shape {tuple(logits.shape)}; they must be [rows, vocab]")
    tokens = choose(logits, samplers)
    for sampler in samplers:
        sampler.advance(1)
    return tokens


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw over the kept tokens, best first. logits [n, vocab], uniform [n] -> int64 [n]."""
    device, vocab = logits.device, logits.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
    weights = ((ordered - ordered[:, :1]) / column([p.temperature for p in params])).exp()
    rank = torch.arange(vocab, device=device)[None]
    weights = weights.masked_fill(rank >= column([p.top_k or vocab for p in params]), 0.0)
    before = weights.cumsum(dim=-1) - weights
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights.masked_fill((rank > 0) & (before >= column([p.top_p for p in params]) * total), 0.0)
    cumulative = weights.cumsum(dim=-1)
    target = uniform.to(device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    kept = (weights > 0).sum(dim=-1, keepdim=True)
    return order.gather(-1, index.minimum(kept - 1))[:, 0]
