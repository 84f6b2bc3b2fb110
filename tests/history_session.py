"""HistorySession: a Session without a model, for what sits on top of sessions.

Logits are random but fixed numbers of the last ORDER tokens, so texts repeat themselves and drafts are sometimes right.
Every slot keeps its tokens in plain lists, so a wrong commit, a recycled slot that leaks or a mixed-up row shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtllm_replayssm.runtime.session import Session

ORDER = 2
#: Called with (tokens so far, logits [vocab]); returns what the session says instead.
Bend = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]


def table_logits(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    """fp32 [vocab] from the last ORDER tokens."""
    seed = 0
    for token in tokens[-ORDER:]:
        seed = seed * 1009 + token + 1
    return 3 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


class HistorySession(Session):
    """See the module. ``bend`` changes logits, ``state_bend`` is added to the state."""

    def __init__(
        self,
        vocab_size: int = 11,
        *,
        max_batch: int = 4,
        max_positions: int = 64,
        spec_len: int = 1,
        bend: Bend | None = None,
        state_bend: float = 0.0,
    ) -> None:
        super().__init__(vocab_size=vocab_size, max_batch=max_batch, max_positions=max_positions, spec_len=spec_len)
        self.history: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}
        self.batches: list[int] = []
        self._bend, self._state_bend = bend, state_bend

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        logits = table_logits(tokens, self.vocab_size)
        return logits if self._bend is None else self._bend(tuple(tokens), logits)

    def _prefill(self, slots: list[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        for slot, prompt in zip(slots, prompts, strict=True):
            self.history[slot], self.pending[slot] = list(prompt), []
        return torch.stack([self._logits(self.history[slot]) for slot in slots])

    def _launch(self, slots: list[int], tokens: torch.Tensor, lengths: list[int], accepted: list[int]) -> torch.Tensor:
        rows = []
        self.batches.append(len(slots))
        for slot, row, length, keep in zip(slots, tokens.tolist(), lengths, accepted, strict=True):
            self._settle(slot, keep)
            assert len(self.history[slot]) == length
            self.pending[slot] = row
            rows.append(torch.stack([self._logits(self.history[slot] + row[: t + 1]) for t in range(len(row))]))
        return torch.stack(rows)

    def _recurrent_state(self, slot: int, accepted: int) -> dict[int, torch.Tensor]:
        kept = self.pending[slot] if accepted < 0 else self.pending[slot][:accepted]
        tokens = torch.tensor(self.history[slot] + kept, dtype=torch.float32)
        weights = torch.arange(1, len(tokens) + 1)
        state = torch.stack([tokens.sum() + 1, (tokens * weights).sum()])
        return {0: state + self._state_bend, 2: state * 2}

    def _settle(self, slot: int, accepted: int) -> None:
        kept = self.pending[slot] if accepted < 0 else self.pending[slot][:accepted]
        self.history[slot] = self.history[slot] + kept
        self.pending[slot] = []
