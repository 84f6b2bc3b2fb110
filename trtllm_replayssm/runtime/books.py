"""The books of a session: which slots are free, how long each sequence is, which verify still waits for its commit.

Shared by Session (torch tensors) and EngineRunner (numpy arrays). Needs the standard library alone and runs on Python
3.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import require
from ..spec import MAX_SPEC_LEN, require_int

#: `accepted` value that keeps all tokens of the previous step (docs/contracts.md).
ALL = -1


@dataclass
class SequenceEntry:
    """One live sequence.

    length: committed tokens. pending: tokens of a verify that waits for its commit, 0 if none does.
    accepted: what the next launch must be told about the tokens of the last one.
    """

    length: int
    pending: int = 0
    accepted: int = ALL


class SequenceBooks:
    """Sequences of one model in a fixed number of slots; a slot's number is its sequence's handle.

    Args:
        vocab_size: token ids are 0..vocab_size - 1.
        max_batch: slots, so the most sequences that live at once. At least 1.
        max_positions: most tokens per sequence, prompt included. At least 1.
        spec_len: T, the most tokens of one verify, 1..16.
        keeps_all: the backend cannot forget tokens, so a commit must keep all of its verify.

    Every method raises ReplayError for arguments that are wrong, and then has changed nothing.
    """

    def __init__(
        self, *, vocab_size: int, max_batch: int, max_positions: int, spec_len: int = 1, keeps_all: bool = False
    ) -> None:
        require_int("max_batch", max_batch, 1, 65536)
        require_int("max_positions", max_positions, 1, 1 << 24)
        require_int("spec_len", spec_len, 1, MAX_SPEC_LEN)
        self._vocab_size = vocab_size
        self._max_batch = max_batch
        self._max_positions = max_positions
        self._spec_len = spec_len
        self._keeps_all = keeps_all
        self._free: list[int] = list(range(max_batch - 1, -1, -1))
        self._live: dict[int, SequenceEntry] = {}

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

    def release(self, seqs: Sequence[int]) -> None:
        """End ``seqs``; their slots may be given to the next prompts."""
        self._check_distinct(seqs)
        for seq in seqs:
            self._sequence(seq)
        for seq in seqs:
            del self._live[seq]
            self._free.append(seq)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts of a wrong length, and more of them than there are free slots."""
        require(len(prompts) > 0, "prompts is empty; prefill needs at least one")
        for i, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"prompt {i} is empty; it must have at least one token")
            require(
                len(prompt) <= self._max_positions,
                f"prompt {i} has {len(prompt)} tokens; the position limit is {self._max_positions}",
            )
        require(
            len(prompts) <= len(self._free),
            f"{len(prompts)} prompts for {len(self._free)} free slots of {self._max_batch}; release sequences first",
        )

    def _take_slots(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def _give_back(self, slots: Sequence[int]) -> None:
        """Undo _take_slots."""
        self._free += reversed(slots)

    def _start(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """``slots`` hold sequences of so many tokens from now on."""
        for slot, length in zip(slots, lengths):
            self._live[slot] = SequenceEntry(length)

    def _check_decode(self, seqs: Sequence[int], rows: int, steps: int) -> tuple[list[int], list[int]]:
        """(committed tokens, `accepted` of the last launch) of ``seqs``, which may all be decoded ``steps`` further."""
        require(len(seqs) > 0, "seqs is empty; at least one sequence must take part")
        require(rows == len(seqs), f"tokens has {rows} rows for {len(seqs)} sequences")
        self._check_distinct(seqs)
        entries = [self._sequence(seq) for seq in seqs]
        for seq, entry in zip(seqs, entries):
            require(entry.pending == 0, f"sequence {seq} has a verify that waits for its commit")
            require(
                entry.length + steps <= self._max_positions,
                f"sequence {seq} has {entry.length} tokens; {steps} more pass the position limit {self._max_positions}",
            )
        return [e.length for e in entries], [e.accepted for e in entries]

    def _check_steps(self, steps: int) -> None:
        require(1 <= steps <= self._spec_len, f"tokens has {steps} per row; spec_len allows 1 to {self._spec_len}")

    def _stepped(self, seqs: Sequence[int]) -> None:
        """One token of each of ``seqs`` was decoded and counts."""
        for seq in seqs:
            entry = self._live[seq]
            entry.length, entry.accepted = entry.length + 1, ALL

    def _verified(self, seqs: Sequence[int], steps: int) -> None:
        """``steps`` tokens of each of ``seqs`` were decoded and wait for a commit."""
        for seq in seqs:
            self._live[seq].pending = steps

    def _commit(self, seqs: Sequence[int], counts: Sequence[int]) -> None:
        """Keep so many tokens of the last verify of ``seqs``."""
        require(len(counts) == len(seqs), f"accepted has {len(counts)} entries for {len(seqs)} sequences")
        self._check_distinct(seqs)
        for seq, count in zip(seqs, counts):
            entry = self._sequence(seq)
            require(entry.pending > 0, f"sequence {seq} has no verify to commit")
            least, why = 0, " (tokens of its last verify)"
            if self._keeps_all:
                least, why = entry.pending, " (all of its last verify: the engine was built without draft tokens)"
            require_int(f"accepted of sequence {seq}", count, least, entry.pending, why)
        for seq, count in zip(seqs, counts):
            entry = self._live[seq]
            entry.length, entry.pending, entry.accepted = entry.length + count, 0, count

    def _settled(self, seq: int) -> int:
        """`accepted` of the last launch of ``seq``, which has no verify that waits."""
        entry = self._sequence(seq)
        require(entry.pending == 0, f"sequence {seq} has a verify that waits for its commit")
        return entry.accepted

    def _sequence(self, seq: int) -> SequenceEntry:
        require(seq in self._live, f"sequence {seq!r} is not live; it was never prefilled here or has been released")
        return self._live[seq]

    def _check_distinct(self, seqs: Sequence[int]) -> None:
        require(len(set(seqs)) == len(seqs), f"seqs is {list(seqs)}; a sequence may appear only once")

    def _check_range(self, low: int, high: int, name: str) -> None:
        require(
            low >= 0 and high < self._vocab_size,
            f"{name} has token id {low if low < 0 else high}; ids must be from 0 to {self._vocab_size - 1}",
        )
