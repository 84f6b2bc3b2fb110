"""Sessions: sequences that hold slots, are prefilled, stepped, verified and released. One interface for every backend.

`Session` checks arguments and keeps the books (which slots are free, how long each sequence is, which verify still
waits for its commit); a backend implements the four operations behind it on slots that are known to be right. Contract:
verify of T tokens, then commit of c, leaves a sequence as c single steps of the same tokens would.

`TorchSession` (torch_session.py) runs the torch ops; window 1 is conventional decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import require
from ..spec import require_int

#: `accepted` value that keeps all tokens of the previous step (docs/contracts.md).
ALL = -1


@dataclass
class _Sequence:
    """Books of one live sequence.

    length: committed tokens. pending: tokens of a verify that waits for its commit, 0 if none does.
    accepted: what the next launch must be told about the tokens of the last one.
    """

    length: int
    pending: int = 0
    accepted: int = ALL


class Session(ABC):
    """Sequences of one model in a fixed number of slots.

    Args:
        vocab_size: token ids are 0..vocab_size - 1.
        max_batch: slots, so the most sequences that live at once. At least 1.
        max_positions: most tokens per sequence, prompt included. At least 1.
        spec_len: T, the most tokens of one verify, 1..16.

    Every method raises ReplayError for arguments that are wrong, and then has changed nothing.
    """

    def __init__(self, *, vocab_size: int, max_batch: int, max_positions: int, spec_len: int = 1) -> None:
        require_int("max_batch", max_batch, 1, 65536)
        require_int("max_positions", max_positions, 1, 1 << 24)
        self._vocab_size = vocab_size
        self._max_batch = max_batch
        self._max_positions = max_positions
        self._spec_len = spec_len
        self._free = list(range(max_batch - 1, -1, -1))
        self._live: dict[int, _Sequence] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    @property
    def max_positions(self) -> int:
        """Most tokens per sequence, prompt included."""
        return self._max_positions

    @property
    def spec_len(self) -> int:
        """Most tokens of one verify."""
        return self._spec_len

    @property
    def free_slots(self) -> int:
        """How many more sequences can be prefilled now."""
        return len(self._free)

    def length(self, seq: int) -> int:
        """Committed tokens of ``seq``."""
        return self._sequence(seq).length

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """Start a sequence for each of ``prompts`` (token ids, any lengths from 1 to max_positions).

        Returns:
            (handles, logits [n, vocab] fp32): one handle per prompt, and the logits after its last token.
        """
        require(len(prompts) > 0, "prompts is empty; prefill needs at least one")
        for i, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"prompt {i} is empty; it must have at least one token")
            require(
                len(prompt) <= self._max_positions,
                f"prompt {i} has {len(prompt)} tokens; the position limit is {self._max_positions}",
            )
            self._check_tokens(prompt, f"prompt {i}")
        require(
            len(prompts) <= len(self._free),
            f"{len(prompts)} prompts for {len(self._free)} free slots of {self._max_batch}; release sequences first",
        )
        slots = [self._free.pop() for _ in prompts]
        try:
            logits = self._prefill(slots, prompts)
        except BaseException:
            self._free += reversed(slots)
            raise
        for slot, prompt in zip(slots, prompts, strict=True):
            self._live[slot] = _Sequence(len(prompt))
        return slots, logits

    def step(self, seqs: Sequence[int], tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Append one token to each of ``seqs`` and commit it. tokens [n] -> logits [n, vocab] fp32."""
        grid = torch.as_tensor(tokens).cpu()
        require(grid.dim() == 1, f"tokens has shape {tuple(grid.shape)}; it must be [n]")
        logits = self._decode(seqs, grid[:, None])
        for seq in seqs:
            books = self._live[seq]
            books.length, books.accepted = books.length + 1, ALL
        return logits[:, 0]

    def verify(self, seqs: Sequence[int], tokens: Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
        """Run T tokens of each of ``seqs`` without committing them. tokens [n, T] -> logits [n, T, vocab] fp32.

        Until :meth:`commit` says how many stay, these sequences can only be committed or released.
        """
        grid = torch.as_tensor(tokens).cpu()
        require(grid.dim() == 2, f"tokens has shape {tuple(grid.shape)}; it must be [n, T]")
        steps = int(grid.shape[1])
        require(1 <= steps <= self._spec_len, f"tokens has {steps} per row; spec_len allows 1 to {self._spec_len}")
        logits = self._decode(seqs, grid)
        for seq in seqs:
            books = self._live[seq]
            books.pending, books.accepted = steps, ALL
        return logits

    def commit(self, seqs: Sequence[int], accepted: Sequence[int] | torch.Tensor) -> None:
        """Keep the first ``accepted`` [n] tokens (0..T each) of the last verify of ``seqs``; forget the others."""
        counts = [int(a) for a in torch.as_tensor(accepted).flatten().tolist()]
        require(len(counts) == len(seqs), f"accepted has {len(counts)} entries for {len(seqs)} sequences")
        self._check_distinct(seqs)
        for seq, count in zip(seqs, counts, strict=True):
            books = self._sequence(seq)
            require(books.pending > 0, f"sequence {seq} has no verify to commit")
            require_int(f"accepted of sequence {seq}", count, 0, books.pending, " (tokens of its last verify)")
        for seq, count in zip(seqs, counts, strict=True):
            books = self._live[seq]
            books.length, books.pending, books.accepted = books.length + count, 0, count

    def release(self, seqs: Sequence[int]) -> None:
        """End ``seqs``; their slots may be given to the next prompts."""
        self._check_distinct(seqs)
        for seq in seqs:
            self._sequence(seq)
        for seq in seqs:
            del self._live[seq]
            self._free.append(seq)

    def recurrent_state(self, seq: int) -> dict[int, torch.Tensor]:
        """State of every recurrent layer after the committed tokens of ``seq``, which goes on unchanged.

        Returns:
            {stateful layer index: state [heads, ...] in the state dtype}, copies.
        """
        books = self._sequence(seq)
        require(books.pending == 0, f"sequence {seq} has a verify that waits for its commit")
        return self._recurrent_state(seq, books.accepted)

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
        require(len(seqs) > 0, "seqs is empty; at least one sequence must take part")
        require(tokens.shape[0] == len(seqs), f"tokens has {tokens.shape[0]} rows for {len(seqs)} sequences")
        self._check_distinct(seqs)
        steps = int(tokens.shape[1])
        rows = [self._sequence(seq) for seq in seqs]
        for seq, books in zip(seqs, rows, strict=True):
            require(books.pending == 0, f"sequence {seq} has a verify that waits for its commit")
            require(
                books.length + steps <= self._max_positions,
                f"sequence {seq} has {books.length} tokens; {steps} more pass the position limit {self._max_positions}",
            )
        self._check_tokens(tokens, "tokens")
        lengths, accepted = [b.length for b in rows], [b.accepted for b in rows]
        return self._launch(list(seqs), tokens.to(torch.int64), lengths, accepted)

    def _sequence(self, seq: int) -> _Sequence:
        require(seq in self._live, f"sequence {seq!r} is not live; it was never prefilled here or has been released")
        return self._live[seq]

    def _check_distinct(self, seqs: Sequence[int]) -> None:
        require(len(set(seqs)) == len(seqs), f"seqs is {list(seqs)}; a sequence may appear only once")

    def _check_tokens(self, tokens: Sequence[int] | torch.Tensor, name: str) -> None:
        ids = torch.as_tensor(tokens)
        whole = not ids.is_floating_point() and ids.dtype != torch.bool
        require(whole, f"{name} has dtype {ids.dtype}; token ids must be whole numbers")
        low, high = int(ids.min()), int(ids.max())
        require(
            low >= 0 and high < self._vocab_size,
            f"{name} has token id {low if low < 0 else high}; ids must be from 0 to {self._vocab_size - 1}",
        )
