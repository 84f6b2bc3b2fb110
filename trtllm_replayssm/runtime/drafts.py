"""Prompt lookup: draft tokens taken from earlier text of the same sequence.

The last few tokens are looked up in what came before; what followed there is proposed. No second model, and no effect
on the text: the verify step keeps only drafts that the model would have chosen itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import require

LONGEST_NGRAM = 8
SHORTEST_NGRAM = 2


class NgramDrafter:
    """Index of one sequence's n-grams: for each, where it last ended.

    Args:
        longest, shortest: n-gram lengths, tried from the longest down. 1 <= shortest <= longest.

    Raises:
        ReplayError: lengths out of order.
    """

    def __init__(self, longest: int = LONGEST_NGRAM, shortest: int = SHORTEST_NGRAM) -> None:
        require(1 <= shortest <= longest, f"n-grams from {shortest} to {longest}; needs 1 <= shortest <= longest")
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        self._tokens += tokens

    def propose(self, count: int) -> list[int]:
        """Up to ``count`` draft tokens; empty where the last tokens never occurred before."""
        self._index()
        for n in self._lengths:
            start = self._ends.get(tuple(self._tokens[-n:])) if n <= len(self._tokens) else None
            if start is not None:
                drafts: list[int] = []
                for i in range(start, start + count):  # a match near the end goes on into the drafts themselves
                    known = i < len(self._tokens)
                    drafts.append(self._tokens[i] if known else drafts[i - len(self._tokens)])
                return drafts
        return []

    def _index(self) -> None:
        """Enter every n-gram that ends before the last token (the ones at the very end are what is looked up)."""
        for end in range(self._indexed + 1, len(self._tokens)):
            for n in self._lengths:
                if n <= end:
                    self._ends[tuple(self._tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(self._tokens) - 1)
