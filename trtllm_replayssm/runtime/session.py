"""Sessions: sequences that hold slots, are prefilled, stepped, verified and released. One interface for every backend.

`Session` checks arguments and keeps the books (books.py); a backend implements the three operations behind it on slots
that are known to be right. Contract: verify of T tokens, then commit of c, leaves a sequence as c single steps of the
same tokens would.

`TorchSession` (torch_session.py) runs the torch ops, `EngineSession` (engine_session.py) a TensorRT engine; window 1 is
conventional decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ReplayError, require
from .books import ALL, SequenceBooks

__all__ = ["ALL", "Session"]


class Session(SequenceBooks, ABC):
    """Sequences of one model in a fixed number of slots; arguments as SequenceBooks.

    Every method raises ReplayError for arguments that are wrong, and then has changed nothing.
    """

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """Start a sequence for each of ``prompts`` (token ids, any lengths from 1 to max_positions).

        Returns:
            (handles, logits [n, vocab] fp32): one handle per prompt, and the logits after its last token.
        """
        self._check_prompts(prompts)
        for i, prompt in enumerate(prompts):
            self._check_tokens(prompt, f"prompt {i}")
        slots = self._take_slots(len(prompts))
        try:
            logits = self._prefill(slots, prompts)
        except BaseException:
            self._give_back(slots)
            raise
        self._start(slots, [len(prompt) for prompt in prompts])
        return slots, logits

    def step(self, seqs: Sequence[int], tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Append one token to each of ``seqs`` and commit it. tokens [n] -> logits [n, vocab] fp32."""
        grid = _tensor("tokens", tokens).cpu()
        require(grid.dim() == 1, f"tokens has shape {tuple(grid.shape)}; it must be [n]")
        logits = self._decode(seqs, grid[:, None])
        self._stepped(seqs)
        return logits[:, 0]

    def verify(self, seqs: Sequence[int], tokens: Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
        """Run T tokens of each of ``seqs`` without committing them. tokens [n, T] -> logits [n, T, vocab] fp32.

        Until :meth:`commit` says how many stay, these sequences can only be committed or released.
        """
        grid = _tensor("tokens", tokens).cpu()
        require(grid.dim() == 2, f"tokens has shape {tuple(grid.shape)}; it must be [n, T]")
        steps = int(grid.shape[1])
        self._check_steps(steps)
        logits = self._decode(seqs, grid)
        self._verified(seqs, steps)
        return logits

    def commit(self, seqs: Sequence[int], accepted: Sequence[int] | torch.Tensor) -> None:
        """Keep the first ``accepted`` [n] tokens (0..T each) of the last verify of ``seqs``; forget the others."""
        counts = _tensor("accepted", accepted).flatten()
        whole = not counts.is_floating_point() and counts.dtype != torch.bool
        require(whole or not counts.numel(), f"accepted is {counts.dtype}; counts must be whole numbers")
        self._commit(seqs, counts.tolist())

    def recurrent_state(self, seq: int) -> dict[int, torch.Tensor]:
        """State of every recurrent layer after the committed tokens of ``seq``, which goes on unchanged.

        Returns:
            {stateful layer index: state [heads, ...] in the state dtype}, copies.
        """
        return self._recurrent_state(seq, self._settled(seq))

    @abstractmethod
    def _prefill(self, slots: list[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Scan ``prompts`` into ``slots``, whatever those held; logits [n, vocab] after each last token."""

    @abstractmethod
    def _launch(self, slots: list[int], tokens: torch.Tensor, lengths: list[int], accepted: list[int]) -> torch.Tensor:
        """One step. tokens int64 [n, T] on the CPU, lengths: committed tokens per row -> logits [n, T, vocab]."""

    @abstractmethod
    def _recurrent_state(self, slot: int, accepted: int) -> dict[int, torch.Tensor]:
        """Materialised states of ``slot`` where ``accepted`` of its last launch's tokens count."""

    def _decode(self, seqs: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        lengths, accepted = self._check_decode(seqs, tokens.shape[0], int(tokens.shape[1]))
        self._check_tokens(tokens, "tokens")
        return self._launch(list(seqs), tokens.to(torch.int64), lengths, accepted)

    def _check_tokens(self, tokens: Sequence[int] | torch.Tensor, name: str) -> None:
        ids = _tensor(name, tokens)
        whole = not ids.is_floating_point() and ids.dtype != torch.bool
        require(whole, f"{name} has dtype {ids.dtype}; token ids must be whole numbers")
        self._check_range(int(ids.min()), int(ids.max()), name)


def _tensor(name: str, values: Sequence[Any] | torch.Tensor) -> torch.Tensor:
    """``values`` as a tensor. Raises ReplayError for rows of several lengths, and for what are no numbers."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ReplayError(f"{name} is no tensor: {error}") from None
