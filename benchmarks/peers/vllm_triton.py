"""vLLM's Triton kernels for Mamba-2: conventional decoding, native verification, ReplaySSM decoding, chunked scan.

Slot 0 is vLLM's null block, so slot s of a stepper is state s + 1. Verification is native: every token of the step
writes its state into a block of its own, and ``num_accepted_tokens`` picks the block that the next step reads.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from .base import (
    CONVENTIONAL_SCENARIOS,
    REPLAY_HISTORIES,
    SCAN_TOKENS,
    WINDOW,
    Call,
    Contender,
    Layer,
    Scan,
    Step,
    Stepper,
    fill_normal,
    tied_dt,
)


def _conventional() -> ModuleType:
    return importlib.import_module("vllm.model_executor.layers.mamba.ops.mamba_ssm")


def _replay() -> ModuleType:
    return importlib.import_module("vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only")


def _scan() -> ModuleType:
    return importlib.import_module("vllm.model_executor.layers.mamba.ops.ssd_combined")


class ConventionalStepper(Stepper):
    """``tokens`` states per slot: token t of a verification writes block 1 + slot * tokens + t."""

    def __init__(self, layer: Layer, tokens: int, slots: int) -> None:
        self.layer, self.tokens = layer, tokens
        self.state = layer.state_tensor(slots * tokens + 1)
        self.accepted = torch.ones(slots, dtype=torch.int32, device=layer.device)
        self.tied = layer.tied()

    def randomize(self) -> None:
        fill_normal(self.state)

    def clear(self) -> None:
        self.state.zero_()
        self.accepted.fill_(1)

    def call(self, slots: torch.Tensor, step: Step) -> Call:
        rows, tokens = step.x.shape[:2]
        A, D, dt_bias = self.tied
        x, dt, B, C, y = (v.flatten(0, 1) for v in (step.x, step.dt, step.B, step.C, step.y))
        dt = tied_dt(dt, self.layer.shape.headdim)
        blocks = 1 + slots[:, None] * tokens + torch.arange(tokens, device=slots.device, dtype=torch.int32)
        options: dict[str, Any] = {"state_batch_indices": blocks}
        if tokens > 1:
            options["num_accepted_tokens"] = self.accepted[slots.long()]
            options["cu_seqlens"] = torch.arange(rows + 1, device=slots.device, dtype=torch.int32) * tokens
        update = _conventional().selective_state_update

        def run() -> object:
            return update(self.state, x, dt, A, B, C, D, dt_bias, dt_softplus=True, out=y, **options)

        return run

    def accept(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        self.accepted[slots.long()] = counts


class ReplayStepper(Stepper):
    """vLLM's buffer of 16 rows. A row at position 15 flushes, with the step's own token as the 16th row of the fold."""

    histories = {**REPLAY_HISTORIES, "flush": (WINDOW - 1,), "mixed": range(WINDOW)}

    def __init__(self, layer: Layer, slots: int) -> None:
        self.layer = layer
        s, device = layer.shape, layer.device
        self.state = layer.state_tensor(slots + 1)
        self.x = torch.empty(slots + 1, s.nheads, WINDOW, s.headdim, dtype=torch.bfloat16, device=device)
        self.B = torch.empty(slots + 1, s.ngroups, WINDOW, s.dstate, dtype=torch.bfloat16, device=device)
        self.dt = torch.empty(slots + 1, s.nheads, WINDOW, device=device)
        self.history = torch.zeros(slots, dtype=torch.int32, device=device)
        self.products = torch.empty(0, device=device)
        self.tied = layer.tied()

    def randomize(self) -> None:
        for tensor in (self.state, self.x, self.B):
            fill_normal(tensor)
        self.dt.uniform_(0.001, 0.1)

    def clear(self) -> None:
        self.state.zero_()
        self.history.zero_()

    def set_history(self, history: torch.Tensor) -> None:
        self.history.copy_(history)

    def call(self, slots: torch.Tensor, step: Step) -> Call:
        A, D, dt_bias = self.tied
        rows, groups = len(slots), self.layer.shape.ngroups
        x, B, C, y = (v[:, 0] for v in (step.x, step.B, step.C, step.y))
        dt = tied_dt(step.dt[:, 0], self.layer.shape.headdim)
        position = self.history[slots.long()]
        flush = (position == WINDOW - 1).to(torch.int8)
        if self.products.shape[:1] != (rows,):  # scratch, shared by all calls as by all layers of a model
            self.products = torch.empty(rows, groups, WINDOW, device=slots.device)
        products, blocks = self.products, slots + 1
        update = _replay().selective_state_update_replayssm_output_only

        def run() -> object:
            return update(
                self.state,
                x,
                dt,
                A,
                B,
                C,
                D=D,
                dt_bias=dt_bias,
                dt_softplus=True,
                x_cache=self.x,
                dt_cache=self.dt,
                B_cache=self.B,
                bc_pre=products,
                write_pos=position,
                is_flush=flush,
                max_cache_len=WINDOW,
                state_batch_indices=blocks,
                out=y,
            )

        return run

    def accept(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        self.history[slots.long()] = (self.history[slots.long()] + 1) % WINDOW


class _Vllm(Contender):
    package = "vllm"

    def load(self) -> None:
        _conventional(), _replay(), _scan()


class VllmReplay(_Vllm):
    """selective_state_update_replayssm_output_only: two launches, T = 1."""

    scenarios = ("mixed", "append", "flush")

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        return ReplayStepper(layer, slots)


class VllmConventional(_Vllm):
    """selective_state_update with the tuned table that vLLM ships, and mamba_chunk_scan_combined_varlen."""

    scenarios = (*CONVENTIONAL_SCENARIOS, *SCAN_TOKENS)

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        return ConventionalStepper(layer, tokens, slots)

    def scan(self, layer: Layer, prompts: Step, chunk: int) -> Scan:
        rows, length = prompts.x.shape[:2]
        device = layer.device
        per_prompt = -(-length // chunk)
        starts = torch.arange(per_prompt, device=device, dtype=torch.int32) * chunk
        prompt = torch.arange(rows, device=device, dtype=torch.int32)
        total = torch.full((1,), rows * length, device=device, dtype=torch.int32)
        state = layer.state_tensor(rows)
        x, dt, B, C, y = (v.flatten(0, 1) for v in (prompts.x, prompts.dt, prompts.B, prompts.C, prompts.y))
        options = {
            "cu_seqlens": torch.arange(rows + 1, device=device, dtype=torch.int32) * length,
            "cu_chunk_seqlens": torch.cat([(prompt[:, None] * length + starts).flatten(), total]),
            "last_chunk_indices": (prompt + 1) * per_prompt - 1,
            "seq_idx": prompt.repeat_interleave(per_prompt),
            "final_states_out": state,
            "final_state_indices": prompt,
            "state_dtype": state.dtype,
        }
        scan = _scan().mamba_chunk_scan_combined_varlen

        def run() -> object:
            return scan(
                x, dt, layer.A, B, C, chunk, out=y, D=layer.D, dt_bias=layer.dt_bias, dt_softplus=True, **options
            )

        return Scan(run, lambda: (prompts.y, state))
