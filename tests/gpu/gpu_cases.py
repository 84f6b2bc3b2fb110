"""What the GPU tests share: Mamba-2 decoding on the GPU beside a float64 recurrence, poison, pool comparisons."""

from __future__ import annotations

from typing import Any

import torch
from replay_cases import assert_close, assert_same_bits, make_inputs, raw_state

from trtllm_replayssm import RecurrenceSpec, SlotLayout, kernels, reference
from trtllm_replayssm.kernels.mamba2 import DEFAULT_TUNING
from trtllm_replayssm.pool import StatePool

DEVICE = torch.device("cuda")
#: Bound of a checkpoint against float64, in units of replay_cases.assert_close: fp32 folds round three times a row; a
#: 16-bit state is rounded once per fold, and errors of several folds add up (window 1: of every row).
STATE_SCALE = {"float32": 4.0, "bfloat16": 12.0, "float16": 12.0}


def mamba2_spec(nheads: int, ngroups: int, headdim: int, dstate: int, **options: Any) -> RecurrenceSpec:
    """RecurrenceSpec of kind mamba2."""
    return RecurrenceSpec("mamba2", nheads, ngroups, headdim, dstate, **options)


def random_slots(rows: int, total: int, seed: int = 0) -> torch.Tensor:
    """``rows`` different slots of ``total``, in random order, int32 on the GPU."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:rows].int().to(DEVICE)


def poisoned_pool(spec: RecurrenceSpec, slots: torch.Tensor, total: int) -> StatePool:
    """A pool whose slots outside ``slots`` are 0xFF (NaN), and whose own rings hold NaN."""
    pool = StatePool(
        SlotLayout(spec), torch.full((total, SlotLayout(spec).slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    )
    kernels.reset(pool, slots)
    return pool


def poison_dead_rows(pool: StatePool, accepted: torch.Tensor | None, slots: torch.Tensor) -> None:
    """NaN in every ring row of ``slots`` that the next step may not read."""
    R = pool.layout.spec.ring_rows  # type: ignore[union-attr]
    cursor = pool["cursor"][:, 0, 0].long()
    pending = cursor[:, 2].clone()
    if accepted is not None:
        live = slots >= 0
        wanted = accepted[live].long()
        own = slots[live].long()
        pending[own] = torch.where(wanted == -1, pending[own], torch.minimum(wanted.clamp(min=0), pending[own]))
    rows = torch.arange(R, device=DEVICE)
    dead = (rows[None, :] - cursor[:, :1]) % R >= (cursor[:, 1] + pending)[:, None]
    pool["ring_x"].masked_fill_(dead[:, None, :, None], float("nan"))
    pool["ring_b"].masked_fill_(dead[:, None, :, None], float("nan"))
    pool["ring_dt"].masked_fill_(dead[:, None, :], float("nan"))


class Rollout:
    """Decodes random tokens on the GPU, checking every output against a float64 recurrence of the accepted tokens.

    Rows with slot -1 are padding, their inputs NaN. Dead ring rows are poisoned before every step; slots of others
    hold NaN throughout.
    """

    def __init__(
        self,
        spec: RecurrenceSpec,
        rows: int = 3,
        *,
        regime: str = "plain",
        pads: int = 1,
        length: int = 40,
        y_scale: float = 1.0,
        tuning: kernels.StepTuning = DEFAULT_TUNING,
    ) -> None:
        self.spec, self.rows, self.y_scale, self.tuning = spec, rows, y_scale, tuning
        inputs = make_inputs(spec, rows + pads, length, seed=7, regime=regime)
        self.tokens = {name: value.to(DEVICE) for name, value in inputs.tokens.items()}
        self.params = {name: value.to(DEVICE) for name, value in inputs.params.items()}
        self.length = length
        own = random_slots(rows, rows + 3, seed=3)
        self.slots = torch.cat([own[:1], torch.full((pads,), -1, dtype=torch.int32, device=DEVICE), own[1:]])
        self.live = (self.slots >= 0).nonzero().squeeze(1)
        for value in self.tokens.values():
            value[self.slots < 0] = float("nan")
        self.pool = poisoned_pool(spec, own, rows + 3)
        shape = (rows, spec.nheads, spec.headdim, spec.dstate)
        self.state = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
        self.draft: dict[str, torch.Tensor] | None = None
        self.at = 0

    def recur(self, tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 outputs and state of ``tokens`` [live rows, T, ...] behind the accepted ones."""
        spec, double = self.spec, {n: v.double() for n, v in self.params.items()}
        exact = {n: v.double() for n, v in tokens.items()}
        limits = {"dt_softplus": spec.dt_softplus, "dt_min": spec.dt_min, "dt_max": spec.dt_max}
        return reference.mamba2_recurrence(self.state, **exact, **double, **limits)

    def commit(self, accepted: torch.Tensor) -> None:
        """Move the oracle's state past the accepted tokens of the last step; accepted int [live rows]."""
        if self.draft is None:
            return
        for t in range(self.draft["x"].shape[1]):
            after = self.recur({n: v[:, t : t + 1] for n, v in self.draft.items()})[1]
            self.state = torch.where((accepted > t)[:, None, None, None], after, self.state)
        self.draft = None

    def step(self, tokens: int, accepted: torch.Tensor | None = None) -> torch.Tensor:
        """One step; accepted int32 [rows + pads] of the previous step, None for all of it. Checks y and returns it."""
        positions = [(self.at + i) % self.length for i in range(tokens)]
        self.at += tokens
        step = {name: value[:, positions] for name, value in self.tokens.items()}
        last = 0 if self.draft is None else self.draft["x"].shape[1]
        own = torch.full((self.rows,), last, device=DEVICE) if accepted is None else accepted[self.live].long()
        self.commit(torch.where(own == -1, last, own))
        poison_dead_rows(self.pool, accepted, self.slots)
        before = self.pool.memory.clone()
        y = kernels.mamba2_step(
            self.pool,
            self.slots,
            **step,
            **self.params,
            accepted=accepted,
            out=torch.full_like(step["x"], float("nan")),
            tuning=self.tuning,
        )
        self.draft = {name: value[self.live] for name, value in step.items()}
        assert_close(y[self.live], self.recur(self.draft)[0], self.spec.act_dtype, scale=self.y_scale)
        assert not y[self.slots < 0].any(), "a padding row is not zero"
        assert_untouched(before, self.pool.memory, self.slots)
        return y

    def final_state(self, count: int = -1) -> torch.Tensor:
        """The checkpoints [rows, H, P, N] with ``count`` ring rows folded, made in a copy of the pool."""
        copy = StatePool(self.pool.layout, self.pool.memory.clone())
        own = self.slots[self.live]
        kernels.materialize(copy, own, torch.full_like(own, count), own, A=self.params["A"])
        return copy.checkpoint(own)

    def check_state(self) -> torch.Tensor:
        """Accept everything and compare the checkpoints with the oracle's state."""
        self.commit(torch.full((self.rows,), 99, device=DEVICE))
        state = self.final_state()
        name = self.spec.state_dtype
        assert_close(state.float(), self.state, name, scale=STATE_SCALE[name], what="state")
        return state


def assert_untouched(before: torch.Tensor, after: torch.Tensor, slots: torch.Tensor) -> None:
    """Slots that no row names keep every byte."""
    others = torch.ones(before.shape[0], dtype=torch.bool, device=DEVICE)
    others[slots[slots >= 0].long()] = False
    assert torch.equal(before[others], after[others]), "a slot that no row names was written"


def assert_same_pool(a: StatePool, b: StatePool, slots: torch.Tensor) -> None:
    """State, cursors and live ring rows of ``slots`` agree to the bit."""
    own = slots[slots >= 0].long()
    assert torch.equal(a["cursor"][own], b["cursor"][own]), "cursors differ"
    assert_same_bits(raw_state(a, own), raw_state(b, own))
    R = a.layout.spec.ring_rows  # type: ignore[union-attr]
    cursor = a["cursor"][own, 0, 0].long()
    rows = torch.arange(R, device=DEVICE)
    live = (rows[None, :] - cursor[:, :1]) % R < (cursor[:, 1] + cursor[:, 2])[:, None]
    for name in ("ring_x", "ring_b", "ring_dt"):
        mask = live[:, None, :, None] if name != "ring_dt" else live[:, None, :]
        zero = torch.zeros((), dtype=a[name].dtype, device=DEVICE)
        assert_same_bits(torch.where(mask, a[name][own], zero), torch.where(mask, b[name][own], zero), name)
