"""FlashInfer's CUDA kernels: checkpointing_ssu (replay) and selective_state_update (conventional).

They are compiled on first use. Replay: a ring of 16 + T rows per slot with a start and a count that the host advances;
the scratch of its two-kernel path is given, so that its own rule picks the path. Conventional verification writes the
state of every token, as in vllm_triton.py.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from .base import (
    CONVENTIONAL_SCENARIOS,
    REPLAY_HISTORIES,
    REPLAY_SCENARIOS,
    WINDOW,
    Call,
    Contender,
    Layer,
    Step,
    Stepper,
    fill_normal,
    tied_dt,
)


def _replay() -> ModuleType:
    return importlib.import_module("flashinfer.mamba.checkpointing_ssu")


def _conventional() -> ModuleType:
    return importlib.import_module("flashinfer.mamba.selective_state_update")


class ReplayStepper(Stepper):
    """Ring rows start .. start + count - 1 (mod rows) are live; the kernel folds them when T more would not fit."""

    histories = REPLAY_HISTORIES

    def __init__(self, layer: Layer, tokens: int, slots: int) -> None:
        self.layer, self.tokens, self.rows = layer, tokens, WINDOW + tokens
        s, device = layer.shape, layer.device
        self.state = layer.state_tensor(slots)
        self.x = torch.empty(slots, s.nheads, self.rows, s.headdim, dtype=torch.bfloat16, device=device)
        self.B = torch.empty(slots, s.ngroups, self.rows, s.dstate, dtype=torch.bfloat16, device=device)
        self.dt = torch.empty(slots, s.nheads, self.rows, device=device)
        self.start = torch.zeros(slots, dtype=torch.int32, device=device)
        self.count = torch.zeros(slots, dtype=torch.int32, device=device)
        self.scratch: dict[int, tuple[torch.Tensor, ...]] = {}
        self.tied = layer.tied()

    def randomize(self) -> None:
        for tensor in (self.state, self.x, self.B):
            fill_normal(tensor)
        self.dt.uniform_(0.001, 0.1)

    def clear(self) -> None:
        for tensor in (self.state, self.x, self.B, self.dt, self.start, self.count):
            tensor.zero_()

    def set_history(self, history: torch.Tensor) -> None:
        self.start.copy_(torch.arange(len(history), device=history.device) % self.rows)
        self.count.copy_(history)

    def call(self, slots: torch.Tensor, step: Step) -> Call:
        s = self.layer.shape
        A, D, dt_bias = self.tied
        module, rows = _replay(), len(slots)
        if rows not in self.scratch:  # shared by all calls as by all layers of a model
            self.scratch = {
                rows: module.allocate_checkpointing_ssu_scratch(
                    rows, s.nheads, self.tokens, WINDOW, torch.bfloat16, slots.device
                )
            }
        scratch = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), self.scratch[rows], strict=True))
        dt = tied_dt(step.dt, s.headdim)

        def run() -> object:
            return module.checkpointing_ssu(
                self.state,
                self.x,
                self.B,
                self.dt,
                self.start,
                self.count,
                step.x,
                dt,
                A,
                step.B,
                step.C,
                step.y,
                D=D,
                dt_bias=dt_bias,
                dt_softplus=True,
                state_batch_indices=slots,
                **scratch,
            )

        return run

    def accept(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        index = slots.long()
        start, count = self.start[index], self.count[index]
        folded = count + self.tokens > WINDOW
        self.start[index] = torch.where(folded, (start + count) % self.rows, start)
        self.count[index] = torch.where(folded, counts, count + counts)


class ConventionalStepper(Stepper):
    """``tokens`` states per slot, as in vllm_triton.ConventionalStepper. D and dt_bias must have dt's dtype."""

    def __init__(self, layer: Layer, tokens: int, slots: int) -> None:
        self.layer, self.tokens = layer, tokens
        self.state = layer.state_tensor(slots * tokens)
        self.accepted = torch.ones(slots, dtype=torch.int32, device=layer.device)
        headdim = layer.shape.headdim
        self.A = layer.tied()[0]
        self.D, self.dt_bias = (v.bfloat16()[:, None].expand(-1, headdim) for v in (layer.D, layer.dt_bias))

    def randomize(self) -> None:
        fill_normal(self.state)

    def clear(self) -> None:
        self.state.zero_()
        self.accepted.fill_(1)

    def call(self, slots: torch.Tensor, step: Step) -> Call:
        tokens, device = self.tokens, slots.device
        dt = tied_dt(step.dt, self.layer.shape.headdim)
        options: dict[str, Any] = {}
        if tokens == 1:
            x, dt, B, C, y = (v[:, 0] for v in (step.x, dt, step.B, step.C, step.y))
            options["state_batch_indices"] = slots
        else:
            x, B, C, y = step.x, step.B, step.C, step.y
            blocks = slots[:, None] * tokens + torch.arange(tokens, device=device, dtype=torch.int32)
            options["state_batch_indices"] = options["dst_state_batch_indices"] = blocks
            options["num_accepted_tokens"] = self.accepted[slots.long()]
            options["cache_steps"] = tokens
        update = _conventional().selective_state_update

        def run() -> object:
            return update(
                self.state, x, dt, self.A, B, C, self.D, dt_bias=self.dt_bias, dt_softplus=True, out=y, **options
            )

        return run

    def accept(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        self.accepted[slots.long()] = counts


class _FlashInfer(Contender):
    package = "flashinfer-python"

    def load(self) -> None:
        _replay(), _conventional()


class FlashInferReplay(_FlashInfer):
    """checkpointing_ssu. 512 rows of 128 heads ended version 0.7.4 with an illegal address on an H200."""

    scenarios = REPLAY_SCENARIOS
    fragile_rows = 512

    def refuses(self, layer: Layer, scenario: str) -> str:
        # It is built for whole and halved heads at once, and its tiles are 16 rows of a head.
        if layer.shape.headdim // 2 % 16:
            return f"headdim {layer.shape.headdim}: version 0.7.4 does not compile for it"
        return super().refuses(layer, scenario)

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        return ReplayStepper(layer, tokens, slots)

    def variants(self) -> tuple[dict[str, str], ...]:
        # The knobs of its main kernel that are read at every launch; its default is one stage and 16 blocks per SM.
        stages, blocks = "FLASHINFER_SSU_MAIN_PIPELINE_STAGES", "FLASHINFER_SSU_MAIN_CTA_PER_SM"
        return ({}, {blocks: "4"}, {blocks: "8"}, {stages: "2", blocks: "2"}, {stages: "2", blocks: "4"})


class FlashInferConventional(_FlashInfer):
    """selective_state_update with its own choice of algorithm."""

    scenarios = CONVENTIONAL_SCENARIOS

    def refuses(self, layer: Layer, scenario: str) -> str:
        ratio = layer.shape.nheads // layer.shape.ngroups
        if scenario.startswith("verify") and ratio & (ratio - 1):
            return f"{ratio} heads per group: its multi-token kernel takes powers of two only"
        return super().refuses(layer, scenario)

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        return ConventionalStepper(layer, tokens, slots)
