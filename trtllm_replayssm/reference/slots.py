"""Slot memory: cursors, state with its read copy, ring rows, and the commit that opens every step.

Works on live rows only: ``slots`` is int64 [n], every entry a slot of the pool, none twice. Ring rows come back
token-major, [n, rows, heads, ...], oldest first, whatever the ring's origin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..layout import SCALED_COPIES
from ..pool import StatePool
from ..spec import RecurrenceSpec
from .checks import compute_dtype

#: Largest magnitude of a scaled read copy.
COPY_MAX = {"fp8_e4m3": 448.0, "int8": 127.0}


class Cursor(NamedTuple):
    """The cursor words of n slots, int64 [n] each."""

    origin: torch.Tensor
    history: torch.Tensor
    pending: torch.Tensor
    limit: torch.Tensor


#: fold(slots, origin, count, state) -> state with the first ``count`` rows of each ring folded in.
Fold = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def load_cursor(pool: StatePool, slots: torch.Tensor) -> Cursor:
    """The cursor of each slot, from the first of its equal copies."""
    return Cursor(*pool["cursor"][slots, 0, 0].long().unbind(-1))


def store_cursor(pool: StatePool, slots: torch.Tensor, cursor: Cursor) -> None:
    """Write the cursor to all copies of all heads."""
    words = torch.stack(cursor, dim=-1).to(torch.int16)
    pool["cursor"][slots] = words[:, None, None, :].expand(-1, *pool["cursor"].shape[1:])


def empty_cursor(spec: RecurrenceSpec, slots: torch.Tensor) -> Cursor:
    """The cursor after a reset: an empty ring whose first window has the slot's own length."""
    zero = torch.zeros_like(slots)
    limit = spec.window - slots % spec.window if spec.stagger else zero + spec.window
    return Cursor(zero, zero, zero, limit)


def load_state(pool: StatePool, slots: torch.Tensor) -> torch.Tensor:
    """The checkpoint [n, H, P, N] in the compute type."""
    return pool.checkpoint(slots).to(_compute(pool))


def store_state(pool: StatePool, slots: torch.Tensor, state: torch.Tensor) -> None:
    """Round the checkpoint to state_dtype and write it, with a scale of 1; write the read copy of what was written."""
    rounded = state.to(pool["state"].dtype)
    pool["state"].index_copy_(0, slots, rounded)
    if "state_scale" in pool:
        pool["state_scale"][slots] = 1.0
    if "read_copy" not in pool:
        return
    value = rounded.to(_compute(pool))
    kind = _spec(pool).read_copy
    if kind in SCALED_COPIES:
        scale = value.abs().amax(dim=-1) / COPY_MAX[kind]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        pool["read_scale"].index_copy_(0, slots, scale)
        value = (value / scale[..., None]).clamp(-COPY_MAX[kind], COPY_MAX[kind])
        value = value.round() if kind == "int8" else value
    pool["read_copy"][slots] = value.to(pool["read_copy"].dtype)


def read_state(pool: StatePool, slots: torch.Tensor) -> torch.Tensor:
    """What outputs read, [n, H, P, N] in the compute type: the checkpoint, or copy * scale."""
    if "read_copy" not in pool:
        return load_state(pool, slots)
    value = pool["read_copy"][slots].to(_compute(pool))
    return value * pool["read_scale"][slots][..., None] if "read_scale" in pool else value


def load_rows(pool: StatePool, name: str, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Ring rows ``rows`` [n, count] of region ``name``: [n, count, heads, ...] in the compute type, dense."""
    return pool[name][slots[:, None], :, rows].to(_compute(pool)).contiguous()


def append_rows(pool: StatePool, slots: torch.Tensor, cursor: Cursor, **values: torch.Tensor) -> None:
    """Write a step's tokens, [n, T, heads, ...], behind the live rows of the named rings: the new pending rows."""
    tokens = next(iter(values.values())).shape[1]
    rows = ring_rows(pool, cursor.origin + cursor.history, tokens)
    for name, value in values.items():
        ring = pool[name]
        ring[slots[:, None], :, rows] = value.to(ring.dtype)
    store_cursor(pool, slots, cursor._replace(pending=torch.full_like(slots, tokens)))


def ring_rows(pool: StatePool, first: torch.Tensor, count: int) -> torch.Tensor:
    """Ring rows [n, count] that follow position ``first`` [n]."""
    return (first[:, None] + torch.arange(count, device=first.device)) % _spec(pool).ring_rows


def history_rows(pool: StatePool, cursor: Cursor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that a step of ``tokens`` tokens reads after its commit: ring rows [n, J] and which are live, bool [n, J].

    J = window - tokens holds every history that was not folded (committed + tokens <= limit <= window). It is the same
    for every batch, so that no row's sums depend on the others.
    """
    count = max(_spec(pool).window - tokens, 0)
    rows = ring_rows(pool, cursor.origin, count)
    live = torch.arange(count, device=rows.device)[None, :] < cursor.history[:, None]
    return rows, live


def load_live(pool: StatePool, name: str, slots: torch.Tensor, rows: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """As :func:`load_rows`, with zeros in the dead rows (selected, never multiplied: they may hold NaN)."""
    value = load_rows(pool, name, slots, rows)
    return torch.where(live.reshape(*live.shape, *[1] * (value.dim() - 2)), value, torch.zeros_like(value))


def oldest_rows(pool: StatePool, origin: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Ring rows [n, max(count)] from the oldest on: what a fold of ``count`` [n] rows loads."""
    return ring_rows(pool, origin, int(count.max()) if len(count) else 0)


def fold_ring(
    count: torch.Tensor, state: torch.Tensor, fold_row: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``state`` [n, ...] after fold_row(j, state) for j = 0 .. count - 1, with a count [n] of each slot's own."""
    if len(count) == 0:
        return state
    shortest, longest = (int(limit) for limit in torch.aminmax(count))
    for j in range(longest):
        folded = fold_row(j, state)
        state = folded if j < shortest else torch.where((count > j)[:, None, None, None], folded, state)
    return state


def begin_step(pool: StatePool, slots: torch.Tensor, tokens: int, accepted: torch.Tensor | None, fold: Fold) -> Cursor:
    """Contract steps 1 and 2: commit the accepted tokens of the previous step, fold where the next ones would not fit.

    Returns the cursor after the fold; pending still counts the previous step's tokens.
    """
    spec = _spec(pool)
    cursor = load_cursor(pool, slots)
    committed = cursor.history + accepted_tokens(accepted, cursor.pending)
    flush = (committed > 0) & (committed + tokens > cursor.limit)
    if bool(flush.any()):
        who = flush.nonzero().squeeze(1)
        chosen, count = slots[who], committed[who]
        store_state(pool, chosen, fold(chosen, cursor.origin[who], count, load_state(pool, chosen)))
    return Cursor(
        origin=torch.where(flush, (cursor.origin + committed) % spec.ring_rows, cursor.origin),
        history=torch.where(flush, 0, committed),
        pending=cursor.pending,
        limit=torch.where(flush, spec.window, cursor.limit),
    )


def accepted_tokens(accepted: torch.Tensor | None, pending: torch.Tensor) -> torch.Tensor:
    """How many pending tokens stay: all of them for None and for -1, else the value clamped to [0, pending]."""
    if accepted is None:
        return pending
    wanted = accepted.long()
    return torch.where(wanted == -1, pending, torch.minimum(wanted.clamp(min=0), pending))


def _spec(pool: StatePool) -> RecurrenceSpec:
    spec = pool.layout.spec
    assert isinstance(spec, RecurrenceSpec)
    return spec


def _compute(pool: StatePool) -> torch.dtype:
    return compute_dtype(pool.layout.spec)
