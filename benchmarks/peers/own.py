"""Our kernels: replay at window 16, and the same kernel at window 1 as conventional decoding."""

from __future__ import annotations

import torch

from trtllm_replayssm import RecurrenceSpec, SlotLayout, __version__, kernels
from trtllm_replayssm.pool import StatePool

from .base import (
    REPLAY_HISTORIES,
    REPLAY_SCENARIOS,
    SCAN_TOKENS,
    WINDOW,
    Call,
    Contender,
    Layer,
    Scan,
    Step,
    Stepper,
    fill_normal,
)


def make_pool(layer: Layer, window: int, tokens: int, slots: int) -> StatePool:
    """Uninitialised slots."""
    s = layer.shape
    spec = RecurrenceSpec(
        "mamba2", s.nheads, s.ngroups, s.headdim, s.dstate, layer.state_dtype, window=window, spec_len=tokens
    )
    layout = SlotLayout(spec)
    return StatePool(layout, torch.empty(slots, layout.slot_bytes, dtype=torch.uint8, device=layer.device))


class OwnStepper(Stepper):
    """A pool of slots. The cursors live in the slots, so a timed step moves them: ``restore`` puts them back."""

    #: "step" is the steady state of window 1: the previous token is folded, this one appended.
    histories = {**REPLAY_HISTORIES, "step": (1,)}

    def __init__(self, layer: Layer, window: int, tokens: int, slots: int) -> None:
        self.layer, self.tokens = layer, tokens
        self.pool = make_pool(layer, window, tokens, slots)
        self.accepted = torch.zeros(slots, dtype=torch.int32, device=layer.device)
        self.cursor = torch.empty(0)
        self.clear()

    def randomize(self) -> None:
        for name in ("state", "ring_x", "ring_b"):
            fill_normal(self.pool[name])
        self.pool["ring_dt"].uniform_(0.001, 0.1)

    def clear(self) -> None:
        self.pool.memory.zero_()
        if "state_scale" in self.pool:
            self.pool["state_scale"].fill_(1.0)
        self.accepted.zero_()
        self.set_history(torch.zeros_like(self.accepted))

    def set_history(self, history: torch.Tensor) -> None:
        spec = self.pool.layout.spec
        assert isinstance(spec, RecurrenceSpec)
        cursor = torch.zeros(len(history), 4, dtype=torch.int16, device=history.device)
        cursor[:, 0] = torch.arange(len(history), device=history.device) % spec.ring_rows
        cursor[:, 1] = history
        cursor[:, 3] = spec.window
        self.cursor = cursor[:, None, None, :].expand_as(self.pool["cursor"]).contiguous()
        self.restore()

    def restore(self) -> None:
        self.pool["cursor"].copy_(self.cursor)

    def call(self, slots: torch.Tensor, step: Step) -> Call:
        layer = self.layer
        accepted = self.accepted[slots.long()] if self.tokens > 1 else None

        def run() -> object:
            return kernels.mamba2_step(
                self.pool,
                slots,
                step.x,
                step.dt,
                layer.A,
                step.B,
                step.C,
                D=layer.D,
                dt_bias=layer.dt_bias,
                accepted=accepted,
                out=step.y,
            )

        return run

    def accept(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        self.accepted[slots.long()] = counts


class OwnReplay(Contender):
    """Window 16."""

    package = "trtllm-replayssm"
    scenarios = (*REPLAY_SCENARIOS, *SCAN_TOKENS)
    window = WINDOW

    def load(self) -> None:
        kernels.load()

    def version(self) -> str:
        return __version__

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        return OwnStepper(layer, self.window, tokens, slots)

    def scan(self, layer: Layer, prompts: Step, chunk: int) -> Scan:
        rows, length = prompts.x.shape[:2]
        pool = make_pool(layer, self.window, 1, rows)
        slots = torch.arange(rows, device=layer.device, dtype=torch.int32)
        kernels.reset(pool, slots)
        bounds = torch.arange(rows + 1, device=layer.device, dtype=torch.int32) * length
        x, dt, B, C, y = (v.flatten(0, 1) for v in (prompts.x, prompts.dt, prompts.B, prompts.C, prompts.y))

        def run() -> object:
            return kernels.mamba2_scan(
                pool, slots, x, dt, layer.A, B, C, cu_seqlens=bounds, D=layer.D, dt_bias=layer.dt_bias, out=y
            )

        return Scan(run, lambda: (prompts.y, pool.checkpoint()))


class OwnConventional(OwnReplay):
    """Window 1: the state is read, one token folded, and written in every step."""

    scenarios = ("step",)
    window = 1
