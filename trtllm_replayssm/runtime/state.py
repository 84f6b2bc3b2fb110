"""ModelState: the memory of all sequences of one model. Batch: which of them a forward pass works on, and how.

A *slot* is one sequence's memory in every stateful layer: a SlotLayout slot and a ConvLayout slot per recurrent layer
(docs/contracts.md), a row of keys and values, or of what latent attention makes them of, per attention layer. These
rows know no length: a token at position p sees positions 0..p of its slot, so rollback there is positions that move
back, and entries beyond are never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..errors import require
from ..layout import ConvLayout, SlotLayout
from ..models.config import HybridConfig
from ..pool import StatePool, torch_dtype
from ..spec import MAMBA2, MAX_SPEC_LEN, require_int

Ints: TypeAlias = Sequence[int] | torch.Tensor
SCAN = "scan"
STEP = "step"
MAX_POSITIONS = 1 << 24


def int_tensor(values: Ints, device: torch.device | str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """``values`` as an integer tensor on ``device``."""
    return torch.as_tensor(values, dtype=dtype, device=device)


def default_operations(device: torch.device | str) -> Any:
    """The stateful operations for ``device``: ``kernels`` on CUDA if the library is built, else ``reference``."""
    if torch.device(device).type == "cuda":
        from .. import kernels

        if kernels.library_path().is_file():
            return kernels
    from .. import reference

    return reference


class ModelState:
    """Zeroed memory for ``slots`` sequences.

    Args:
        config: the model.
        slots: sequences that fit. max_positions: longest sequence, in tokens.
        window, spec_len, read_copy, state_dtype, stagger: of the RecurrenceSpec (spec.py) of every recurrent layer.
        device: a torch device. dtype: name of the activation dtype, which KV and ring rows have.
        impl: module with the stateful operations (default: :func:`default_operations`).

    Attributes:
        spec, conv_spec: the RecurrenceSpec and ConvSpec of every recurrent layer.
        recurrent, conv: StatePool per recurrent layer; keys count stateful layers.
        kv: per attention layer (keys, values), each [slots, max_positions, kv_heads, head_dim]; of latent attention
            one tensor [slots, max_positions, 1, latent_rank + latent_shared_dim].
        decay: per Mamba-2 layer the weight A_log and A = -exp(A_log) fp32 [H], kept by the passes that fill its ring;
            folding a ring needs it.

    Raises:
        ReplayError: an argument out of range.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        slots: int,
        max_positions: int,
        window: int = 16,
        spec_len: int = 1,
        read_copy: str = "none",
        state_dtype: str = "float32",
        stagger: bool = True,
        device: torch.device | str = "cpu",
        dtype: str = "float32",
        impl: Any = None,
    ) -> None:
        require_int("slots", slots, 1, 1 << 20)
        require_int("max_positions", max_positions, 1, MAX_POSITIONS)
        if impl is None:
            impl = default_operations(device)
        self.config = config
        self.slots = slots
        self.max_positions = max_positions
        self.dtype = dtype
        self.device = torch.device(device)
        self.impl = impl
        self.spec = config.recurrence_spec(
            window=window,
            spec_len=spec_len,
            read_copy=read_copy,
            state_dtype=state_dtype,
            act_dtype=dtype,
            stagger=stagger,
        )
        self.conv_spec = config.conv_spec(spec_len=spec_len, act_dtype=dtype)
        slot_layout, conv_layout = SlotLayout(self.spec), ConvLayout(self.conv_spec)
        self.recurrent = {i: StatePool.allocate(slot_layout, slots, device) for i in config.recurrent_layers}
        self.conv = {i: StatePool.allocate(conv_layout, slots, device) for i in config.recurrent_layers}
        self.decay: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # One row more than slots: pad rows of a batch write there, so that no write depends on a device value.
        row, kept = (config.num_key_value_heads, config.head_dim), 2
        if config.latent_rank:
            row, kept = (1, config.latent_rank + config.latent_shared_dim), 1
        shape, act = (slots + 1, max_positions, *row), torch_dtype(dtype)
        self.kv_storage: dict[int, tuple[torch.Tensor, ...]] = {
            i: tuple(torch.zeros(shape, dtype=act, device=device) for _ in range(kept)) for i in config.attention_layers
        }
        self.kv = {i: tuple(t[:slots] for t in tensors) for i, tensors in self.kv_storage.items()}

    def reset(self, slots: Ints) -> None:
        """Empty ``slots`` [n]: zero states, empty rings, zero conv history. KV rows need nothing."""
        index = int_tensor(slots, self.device)
        for layer, pool in self.recurrent.items():
            self.impl.reset(pool, index)
            self.impl.conv_reset(self.conv[layer], index)

    def copy(self, src: Ints, dst: Ints, pending: Ints | None = None) -> None:
        """Make each slot ``dst[i]`` the sequence of ``src[i]``, folded: all layers, KV included. src is not changed.

        Args:
            src, dst: int [n]; a dst is no other entry's src.
            pending: int [n]: how many tokens of src's last step stay; -1 (default) means all of them, other values are
                clamped to what there is.
        """
        source, target = int_tensor(src, self.device), int_tensor(dst, self.device)
        keep = self._pending(pending, source)
        for layer, pool in self.recurrent.items():
            count = self._ring_count(pool, source, keep)
            self.impl.materialize(pool, source, count, target, **self._fold_options(layer))
            self.impl.conv_materialize(self.conv[layer], source, keep, target)
        for tensors in self.kv.values():
            for cache in tensors:
                cache[target.long()] = cache[source.long()]

    def materialized(self, slots: Ints, pending: Ints | None = None) -> dict[int, torch.Tensor]:
        """The recurrent states of ``slots`` [n] with the tokens in their rings folded in; the slots are not changed.

        Args:
            pending: as for :meth:`copy`.

        Returns:
            per recurrent layer a tensor [n, H, P, N] (GDN: [n, HV, V, K]) of the state dtype.
        """
        index = int_tensor(slots, self.device)
        keep = self._pending(pending, index)
        rows = torch.arange(len(index), dtype=torch.int32, device=self.device)
        states = {}
        for layer, pool in self.recurrent.items():
            scratch = StatePool(pool.layout, pool.memory[index.long()].contiguous())
            self.impl.materialize(
                scratch, rows, self._ring_count(scratch, rows, keep), rows, **self._fold_options(layer)
            )
            states[layer] = scratch.checkpoint()
        return states

    def nbytes(self) -> int:
        """Bytes of all memory that this object holds."""
        pools = [*self.recurrent.values(), *self.conv.values()]
        tensors = [pool.memory for pool in pools] + [t for kept in self.kv_storage.values() for t in kept]
        return sum(t.numel() * t.element_size() for t in tensors)

    def decay_of(self, layer: int, a_log: torch.Tensor) -> torch.Tensor:
        """A = -exp(a_log) [H] in the compute type, for a Mamba-2 layer; made anew for another tensor ``a_log``."""
        known = self.decay.get(layer)
        if known is None or known[0] is not a_log:
            compute = torch.float64 if self.dtype == "float64" else torch.float32
            known = self.decay[layer] = (a_log, -torch.exp(a_log.to(compute)))
        return known[1]

    def _fold_options(self, layer: int) -> dict[str, torch.Tensor]:
        """What materialize needs beside the slot. Before the first pass all rings are empty and any A will do."""
        if self.spec.kind != MAMBA2:
            return {}
        known = self.decay.get(layer)
        return {"A": known[1] if known is not None else torch.zeros(self.spec.nheads, device=self.device)}

    def _pending(self, pending: Ints | None, slots: torch.Tensor) -> torch.Tensor:
        return torch.full_like(slots, -1) if pending is None else int_tensor(pending, self.device)

    @staticmethod
    def _ring_count(pool: StatePool, slots: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Ring rows to fold: the committed ones plus ``keep`` [n] of the pending ones (-1: all)."""
        cursor = pool["cursor"][slots.long(), 0, 0].to(torch.int32)
        history_len, pending_len = cursor[:, 1], cursor[:, 2]
        return history_len + torch.where(keep == -1, pending_len, torch.minimum(keep.clamp(min=0), pending_len))


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one forward pass. Use :meth:`scan` and :meth:`step` unless the tensors live on the device already.

    Attributes:
        phase: ``scan`` (packed prompts) or ``step`` (every row has ``tokens_per_row`` tokens).
        slots: int32 [rows]; -1 is a pad row (step only). positions: int64 [tokens], consecutive within a row.
        cu_seqlens: int32 [rows + 1], scan only: tokens of row i are cu_seqlens[i] .. cu_seqlens[i + 1].
        tokens_per_row: T, step only.
        accepted: int32 [rows] or None, step only: tokens of the previous step that stay (docs/contracts.md).
        has_initial: bool [rows] or None, scan only: rows that continue what their slot holds.
        kv_bound: no position reaches it; bounds the keys that a step reads. Computed, with a device synchronisation,
            where left None.

    Raises:
        ReplayError: fields of the wrong shape, dtype or phase.
    """

    phase: str
    slots: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    tokens_per_row: int = 1
    accepted: torch.Tensor | None = None
    has_initial: torch.Tensor | None = None
    kv_bound: int | None = None

    def __post_init__(self) -> None:
        require(self.phase in (SCAN, STEP), f"phase is {self.phase!r}; it must be {SCAN} or {STEP}")
        require_int("tokens_per_row", self.tokens_per_row, 1, MAX_SPEC_LEN)
        rows = self.slots.shape[0]
        tokens = self.positions.shape[0] if self.phase == SCAN else rows * self.tokens_per_row
        expected = {"slots": (rows, torch.int32), "positions": (tokens, torch.int64)}
        if self.phase == SCAN:
            require(self.cu_seqlens is not None, "cu_seqlens is None; a scan needs it")
            expected |= {"cu_seqlens": (rows + 1, torch.int32), "has_initial": (rows, torch.bool)}
        else:
            expected["accepted"] = (rows, torch.int32)
        for name in ("slots", "positions", "cu_seqlens", "accepted", "has_initial"):
            value = getattr(self, name)
            if value is None:
                continue
            require(name in expected, f"{name} is given, but a {self.phase} has none")
            size, dtype = expected[name]
            got = f"{tuple(value.shape)} {value.dtype}"
            fits = tuple(value.shape) == (size,) and value.dtype == dtype
            require(fits, f"{name} is {got}; it must be [{size}] {dtype}")
        if self.kv_bound is None:
            bound = int(self.positions.max()) + 1 if self.positions.numel() else 0
            object.__setattr__(self, "kv_bound", bound)

    @property
    def rows(self) -> int:
        """Rows, pad rows included."""
        return int(self.slots.shape[0])

    @classmethod
    def scan(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        *,
        starts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Packed prompts.

        Args:
            slots: one per row, all different. lengths: tokens per row, at least 1.
            starts: position of each row's first token (default 0). A row that starts later continues its slot.

        Raises:
            ReplayError: lists of different lengths, a repeated slot, a length below 1, a negative slot or start.
        """
        first = [0] * len(slots) if starts is None else list(starts)
        _check_rows(slots, lengths=lengths, starts=first)
        for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            require(slot >= 0, f"slots[{i}] is {slot}; a scan has no pad rows")
            require(length >= 1, f"lengths[{i}] is {length}; a prompt has at least 1 token")
        spans = [torch.arange(s, s + n) for s, n in zip(first, lengths, strict=True)]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        initial = torch.tensor([s > 0 for s in first], device=device) if any(first) else None
        return cls(
            SCAN,
            int_tensor(slots, device),
            torch.cat(spans).to(device),
            cu_seqlens=ends.to(device, torch.int32),
            has_initial=initial,
            kv_bound=max(s + n for s, n in zip(first, lengths, strict=True)),
        )

    @classmethod
    def step(
        cls,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens_per_row: int = 1,
        *,
        accepted: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """One step of every row.

        Args:
            slots: one per row, all different; -1 is a pad row. starts: position of each row's first token.
            tokens_per_row: T. accepted: tokens of each row's previous step that stay; -1, and None for all, keeps all.

        Raises:
            ReplayError: lists of different lengths, a repeated slot, a negative start.
        """
        require_int("tokens_per_row", tokens_per_row, 1, MAX_SPEC_LEN)
        _check_rows(slots, starts=starts, accepted=accepted)
        first = torch.tensor(list(starts), dtype=torch.int64)
        positions = (first[:, None] + torch.arange(tokens_per_row)).flatten()
        return cls(
            STEP,
            int_tensor(slots, device),
            positions.to(device),
            tokens_per_row=tokens_per_row,
            accepted=None if accepted is None else int_tensor(accepted, device),
            kv_bound=max(starts) + tokens_per_row,
        )

    def check(self, state: ModelState) -> None:
        """Raise ReplayError where the batch does not fit ``state`` (slot numbers are looked at on the CPU alone)."""
        bound = self.kv_bound or 0
        limit = state.max_positions
        require(bound <= limit, f"position {bound - 1} is over the limit: max_positions is {limit}")
        require_int("tokens_per_row", self.tokens_per_row, 1, state.spec.spec_len, " (spec_len)")
        here, there = self.slots.device, state.device
        require(here.type == there.type, f"the batch is on {here}, the state on {there}; they must be on one device")
        if here.type == "cpu":
            top = int(self.slots.max())
            require(top < state.slots, f"slot {top} is out of range; the state has {state.slots} slots")


def _check_rows(slots: Sequence[int], **lists: Sequence[int] | None) -> None:
    require(len(slots) > 0, "slots is empty; a batch has at least one row")
    for name, values in lists.items():
        if values is not None:
            require(len(values) == len(slots), f"{name} has {len(values)} entries for {len(slots)} slots")
    live = [slot for slot in slots if slot >= 0]
    repeated = sorted({slot for slot in live if live.count(slot) > 1})
    require(not repeated, f"slots names {', '.join(map(str, repeated))} more than once")
    for i, start in enumerate(lists["starts"] or ()):
        require(start >= 0, f"starts[{i}] is {start}; positions begin at 0")
