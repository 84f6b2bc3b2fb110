"""Packed prompts of a scan: which token belongs to which sequence, and the state that each sequence starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import ReplayError, require
from ..pool import StatePool
from .checks import Rows, integers, live_rows
from .slots import Fold, load_cursor, load_state


@dataclass(frozen=True)
class Packed:
    """The live sequences of a scan, longest first.

    slots: int64 [n]. starts: int64 [n], first token of each. lengths: n Python ints, descending. resumes: bool [n].
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: list[int]
    resumes: torch.Tensor

    def steps(self) -> Iterator[tuple[int, torch.Tensor]]:
        """For t = 0, 1, ...: how many sequences (a leading part) have a token t, and its place in the flat list."""
        active = len(self.lengths)
        for t in range(self.lengths[0] if self.lengths else 0):
            while self.lengths[active - 1] <= t:
                active -= 1
            yield active, self.starts[:active] + t


def packed_sequences(pool: StatePool, slots: object, tokens: int, cu_seqlens: object, has_initial: object) -> Packed:
    """Check the arguments that all scans share and sort the live sequences by length.

    cu_seqlens: int [rows + 1], from 0 to ``tokens``, not descending. has_initial: bool [rows] or None (nobody resumes).
    """
    rows = live_rows(pool, slots)
    bounds = integers(pool, "cu_seqlens", cu_seqlens, rows.total + 1).tolist()
    require(
        bounds[0] == 0 and bounds[-1] == tokens and bounds == sorted(bounds),
        f"cu_seqlens is {_short(bounds)}; it must rise from 0 to the number of tokens, {tokens}",
    )
    resumes = _flags(pool, has_initial, rows)
    live = range(rows.total) if rows.index is None else rows.index.tolist()
    lengths = [bounds[row + 1] - bounds[row] for row in live]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    index = torch.tensor(order, dtype=torch.int64, device=pool.memory.device)
    starts = rows.take(cu_as_long(cu_seqlens)[:-1])[index]
    return Packed(rows.slots[index], starts, [lengths[i] for i in order], resumes[index])


def initial_state(pool: StatePool, packed: Packed, fold: Fold) -> torch.Tensor:
    """[n, H, P, N] in the compute type: zero, or where a sequence resumes, the slot's state with all rows folded."""
    region = pool["state"]
    state = load_state(pool, packed.slots[:0]).new_zeros(len(packed.lengths), *region.shape[1:])
    who = packed.resumes.nonzero().squeeze(1)
    if len(who):
        chosen = packed.slots[who]
        cursor = load_cursor(pool, chosen)
        state[who] = fold(chosen, cursor.origin, cursor.history + cursor.pending, load_state(pool, chosen))
    return state


def cu_as_long(cu_seqlens: object) -> torch.Tensor:
    """The checked cu_seqlens as int64."""
    assert isinstance(cu_seqlens, torch.Tensor)
    return cu_seqlens.long()


def _flags(pool: StatePool, has_initial: object, rows: Rows) -> torch.Tensor:
    if has_initial is None:
        return torch.zeros(len(rows.slots), dtype=torch.bool, device=pool.memory.device)
    if (
        not isinstance(has_initial, torch.Tensor)
        or has_initial.dtype != torch.bool
        or has_initial.shape != (rows.total,)
    ):
        have = has_initial.dtype if isinstance(has_initial, torch.Tensor) else type(has_initial).__name__
        shape = list(has_initial.shape) if isinstance(has_initial, torch.Tensor) else "no shape"
        raise ReplayError(f"has_initial is {have} with {shape}; it must be a bool tensor [rows={rows.total}]")
    return rows.take(has_initial)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-1]}]"
