"""Operations on whole slots of any recurrent kind: reset, and materialize (the state at a chosen token, for reuse)."""

from __future__ import annotations

import torch

from ..errors import ReplayError, require
from ..pool import StatePool
from ..spec import KINDS, MAMBA2
from .checks import Rows, compute_dtype, decay_rates, integers, live_rows, recurrent_spec
from .gated_delta import fold_gated_delta
from .mamba2 import fold_mamba2
from .slots import accepted_tokens, empty_cursor, load_cursor, load_state, store_cursor, store_state


def reset(pool: StatePool, slots: torch.Tensor) -> None:
    """Zero state and an empty ring with the slot's own first window. slots: int [n]; negative entries are skipped.

    Raises:
        ReplayError: not a recurrent pool, or slots of a wrong dtype or shape, past the pool, or named twice.
    """
    spec = recurrent_spec(pool, *KINDS)
    chosen = live_rows(pool, slots).slots
    shape = (len(chosen), *pool["state"].shape[1:])
    store_state(pool, chosen, torch.zeros(shape, dtype=compute_dtype(spec), device=pool.memory.device))
    store_cursor(pool, chosen, empty_cursor(spec, chosen))


@torch.no_grad()
def materialize(
    pool: StatePool, src: torch.Tensor, count: torch.Tensor, dst: torch.Tensor, *, A: torch.Tensor | None = None
) -> None:
    """Slot dst[i] := the state of slot src[i] after the first count[i] rows of its ring, with an empty ring.

    Args:
        src, dst: int [n]. dst names no slot twice and no slot that another entry reads; src[i] = dst[i] is allowed and
            src may repeat. An entry with a negative src or dst is skipped.
        count: int [n]; committed rows come first, then pending ones. -1: all rows; others are clamped to what there is.
        A: [H], needed for a mamba2 pool (its ring holds dt, not the decay) and refused for the others; its values as
            in mamba2_step.

    Raises:
        ReplayError: a shape, dtype or slot, or an A, that is not allowed.
    """
    spec = recurrent_spec(pool, *KINDS)
    if spec.kind == MAMBA2:
        require(A is not None, f"A is None; materialize of a mamba2 pool needs A [H={spec.nheads}]")
        A = decay_rates(pool, spec, A).to(compute_dtype(spec))
    else:
        require(A is None, f"A is given for a {spec.kind} pool; its ring holds the decay, only {MAMBA2} takes A")
    source, target = copy_slots(pool, src, dst)
    wanted = source.take(integers(pool, "count", count, source.total))
    cursor = load_cursor(pool, source.slots)
    rows = accepted_tokens(wanted, cursor.history + cursor.pending)
    state = load_state(pool, source.slots)
    if A is None:
        state = fold_gated_delta(pool, source.slots, cursor.origin, rows, state)
    else:
        state = fold_mamba2(pool, A, source.slots, cursor.origin, rows, state)
    store_state(pool, target, state)
    store_cursor(pool, target, empty_cursor(spec, target))


def copy_slots(pool: StatePool, src: torch.Tensor, dst: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Check the slots of a copy; the entries in use: source rows, and int64 [n] destinations."""
    sources = integers(pool, "src", src).tolist()
    targets = integers(pool, "dst", dst, len(sources)).tolist()
    used = [i for i, pair in enumerate(zip(sources, targets, strict=True)) if min(pair) >= 0]
    for i in used:
        require(sources[i] < pool.slots, f"src names slot {sources[i]}; the pool has slots 0 to {pool.slots - 1}")
    index = torch.tensor(used, dtype=torch.int64, device=pool.memory.device)
    target = live_rows(pool, dst[index], "dst").slots
    written = {targets[i] for i in used}
    for i in used:
        if sources[i] in written and targets[i] != sources[i]:
            raise ReplayError(
                f"slot {sources[i]} is both read and overwritten; a slot may be src and dst of one entry only"
            )
    return Rows(len(sources), src.long()[index], index), target
