"""What the GPU tests of GDN and KDA share: decoding on the GPU beside a float64 recurrence of the accepted tokens."""

from __future__ import annotations

from typing import Any

import torch
from gpu_cases import DEVICE, STATE_SCALE, assert_untouched, random_slots
from replay_cases import assert_close, assert_same_bits, make_inputs, raw_state, ring_regions

from trtllm_replayssm import RecurrenceSpec, SlotLayout, kernels, reference
from trtllm_replayssm.pool import StatePool

GATES = {
    "gdn": ("gated_delta", {}),
    "kda": ("kimi_delta", {}),
    "kda-bounded": ("kimi_delta", {"gate": "bounded"}),
}


def delta_spec(gate: str, nheads: int, ngroups: int, headdim: int, dstate: int, **options: Any) -> RecurrenceSpec:
    """RecurrenceSpec of one of GATES."""
    kind, extra = GATES[gate]
    return RecurrenceSpec(kind, nheads, ngroups, headdim, dstate, **extra, **options)


def poisoned_delta_pool(spec: RecurrenceSpec, slots: torch.Tensor, total: int) -> StatePool:
    """A pool whose slots outside ``slots`` are 0xFF (NaN), and whose own rings hold NaN."""
    layout = SlotLayout(spec)
    pool = StatePool(layout, torch.full((total, layout.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE))
    kernels.reset(pool, slots)
    return pool


def dead_rows(pool: StatePool, slots: torch.Tensor, accepted: torch.Tensor | None = None) -> torch.Tensor:
    """bool [pool.slots, ring_rows]: rows that the next step may not read; accepted int [len(slots)] or None."""
    cursor = pool["cursor"][:, 0, 0].long()
    pending = cursor[:, 2].clone()
    if accepted is not None:
        live = slots >= 0
        own, wanted = slots[live].long(), accepted[live].long()
        pending[own] = torch.where(wanted == -1, pending[own], torch.minimum(wanted.clamp(min=0), pending[own]))
    R = pool.layout.spec.ring_rows  # type: ignore[union-attr]
    rows = torch.arange(R, device=DEVICE)
    return (rows[None, :] - cursor[:, :1]) % R >= (cursor[:, 1] + pending)[:, None]


def poison_dead_delta_rows(pool: StatePool, slots: torch.Tensor, accepted: torch.Tensor | None) -> None:
    """NaN in every ring row that the next step may not read."""
    dead = dead_rows(pool, slots, accepted)
    for name in ring_regions(pool):
        region = pool[name]
        region.masked_fill_(dead.reshape(dead.shape[0], 1, -1, *[1] * (region.dim() - 3)), float("nan"))


def assert_same_delta_pool(a: StatePool, b: StatePool, slots: torch.Tensor) -> None:
    """State, cursors and live ring rows of ``slots`` agree to the bit."""
    own = slots[slots >= 0].long()
    assert torch.equal(a["cursor"][own], b["cursor"][own]), "cursors differ"
    assert_same_bits(raw_state(a, own), raw_state(b, own))
    live = ~dead_rows(a, slots)[own]
    for name in ring_regions(a):
        mask = live.reshape(len(own), 1, -1, *[1] * (a[name].dim() - 3))
        zero = torch.zeros((), dtype=a[name].dtype, device=DEVICE)
        assert_same_bits(torch.where(mask, a[name][own], zero), torch.where(mask, b[name][own], zero), name)


class DeltaRollout:
    """Decodes random tokens on the GPU, checking every output against a float64 recurrence of the accepted tokens.

    Rows with slot -1 are padding, their inputs NaN. Dead ring rows are poisoned before every step; slots of others
    hold NaN throughout.
    """

    def __init__(
        self,
        spec: RecurrenceSpec,
        rows: int = 2,
        *,
        regime: str = "plain",
        pads: int = 1,
        length: int = 40,
        o_scale: float = 1.0,
        scale: float | None = None,
        tuning: kernels.StepTuning | None = None,
    ) -> None:
        self.spec, self.rows, self.o_scale = spec, rows, o_scale
        self.tuning = tuning or kernels.StepTuning()
        inputs = make_inputs(spec, rows + pads, length, seed=7, regime=regime)
        self.tokens = {name: value.to(DEVICE) for name, value in inputs.tokens.items()}
        self.params: dict[str, Any] = {name: value.to(DEVICE) for name, value in inputs.params.items()}
        self.scale, self.length = scale, length
        own = random_slots(rows, rows + 3, seed=3)
        self.slots = torch.cat([own[:1], torch.full((pads,), -1, dtype=torch.int32, device=DEVICE), own[1:]])
        self.live = (self.slots >= 0).nonzero().squeeze(1)
        for value in self.tokens.values():
            value[self.slots < 0] = float("nan")
        self.pool = poisoned_delta_pool(spec, own, rows + 3)
        shape = (rows, spec.nheads, spec.headdim, spec.dstate)
        self.state = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
        self.draft: dict[str, torch.Tensor] | None = None
        self.at = 0

    def recur(self, tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 outputs and state of ``tokens`` [live rows, T, ...] behind the accepted ones."""
        spec, exact = self.spec, {n: v.double() for n, v in tokens.items()}
        A_log, dt_bias = (self.params[n].double() for n in ("A_log", "dt_bias"))
        g, beta = reference.delta_gates(
            exact["a"], exact["b"], A_log, dt_bias, gate=spec.gate, lower_bound=spec.gate_lower_bound
        )
        q, k, v = (exact[n] for n in "qkv")
        return reference.gated_delta_recurrence(
            self.state, q, k, v, g, beta, scale=self.scale, qk_l2norm=spec.qk_l2norm
        )

    def commit(self, accepted: torch.Tensor) -> None:
        """Move the oracle's state past the accepted tokens of the last step; accepted int [live rows]."""
        if self.draft is None:
            return
        for t in range(self.draft["v"].shape[1]):
            after = self.recur({n: v[:, t : t + 1] for n, v in self.draft.items()})[1]
            self.state = torch.where((accepted > t)[:, None, None, None], after, self.state)
        self.draft = None

    def next_tokens(self, tokens: int) -> dict[str, torch.Tensor]:
        """The next ``tokens`` tokens of every row."""
        positions = [(self.at + i) % self.length for i in range(tokens)]
        self.at += tokens
        return {name: value[:, positions] for name, value in self.tokens.items()}

    def run(self, step: dict[str, torch.Tensor], accepted: torch.Tensor | None) -> torch.Tensor:
        """The kernel alone; the step's live rows become the draft."""
        o = kernels.gated_delta_step(
            self.pool,
            self.slots,
            **step,
            **self.params,
            scale=self.scale,
            accepted=accepted,
            out=torch.full_like(step["v"], float("nan")),
            tuning=self.tuning,
        )
        self.draft = {name: value[self.live] for name, value in step.items()}
        return o

    def step(self, tokens: int, accepted: torch.Tensor | None = None) -> torch.Tensor:
        """One step; accepted int32 [rows + pads] of the previous step, None for all of it. Checks o and returns it."""
        step = self.next_tokens(tokens)
        last = 0 if self.draft is None else self.draft["v"].shape[1]
        own = torch.full((self.rows,), last, device=DEVICE) if accepted is None else accepted[self.live].long()
        self.commit(torch.where(own == -1, last, own))
        poison_dead_delta_rows(self.pool, self.slots, accepted)
        before = self.pool.memory.clone()
        o = self.run(step, accepted)
        assert self.draft is not None
        assert_close(o[self.live], self.recur(self.draft)[0], self.spec.act_dtype, scale=self.o_scale)
        assert not o[self.slots < 0].any(), "a padding row is not zero"
        assert_untouched(before, self.pool.memory, self.slots)
        return o

    def final_state(self, count: int = -1) -> torch.Tensor:
        """The checkpoints [rows, HV, V, K] with ``count`` ring rows folded, made in a copy of the pool."""
        copy = StatePool(self.pool.layout, self.pool.memory.clone())
        own = self.slots[self.live]
        kernels.materialize(copy, own, torch.full_like(own, count), own)
        return copy.checkpoint(own)

    def check_state(self) -> torch.Tensor:
        """Accept everything and compare the checkpoints with the oracle's state."""
        self.commit(torch.full((self.rows,), 99, device=DEVICE))
        state = self.final_state()
        name = self.spec.state_dtype
        assert_close(state.float(), self.state, name, scale=STATE_SCALE[name], what="state")
        return state
