"""mamba_ssm's Triton kernels: selective_state_update for decoding, mamba_chunk_scan_combined for prompts."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from .base import SCAN_TOKENS, Call, Contender, Layer, Scan, Step, Stepper, fill_normal, tied_dt


def _update() -> ModuleType:
    return importlib.import_module("mamba_ssm.ops.triton.selective_state_update")


def _scan() -> ModuleType:
    return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")


class ConventionalStepper(Stepper):
    """One state per slot; the kernel allocates its result."""

    def __init__(self, layer: Layer, slots: int) -> None:
        self.layer = layer
        self.state = layer.state_tensor(slots)
        self.tied = layer.tied()

    def randomize(self) -> None:
        fill_normal(self.state)

    def clear(self) -> None:
        self.state.zero_()

    def call(self, slots: torch.Tensor, step: Step) -> Call:
        A, D, dt_bias = self.tied
        slots = slots.clone()  # a part of a longer tensor may be less aligned, and Triton compiles for the alignment
        x, B, C, y = (v[:, 0] for v in (step.x, step.B, step.C, step.y))
        dt = tied_dt(step.dt[:, 0], self.layer.shape.headdim)
        update = _update().selective_state_update

        def run() -> torch.Tensor:
            out: torch.Tensor = update(
                self.state, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots
            )
            return out

        def checked() -> object:
            return y.copy_(run())

        return checked if y.isnan().any() else run


class MambaSsm(Contender):
    """Both kernels; no verification."""

    package = "mamba-ssm"
    scenarios = ("step", *SCAN_TOKENS)

    def load(self) -> None:
        _update(), _scan()

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        return ConventionalStepper(layer, slots)

    def scan(self, layer: Layer, prompts: Step, chunk: int) -> Scan:
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        scan = _scan().mamba_chunk_scan_combined

        def run() -> object:
            results[:] = [
                scan(
                    prompts.x,
                    prompts.dt,
                    layer.A,
                    prompts.B,
                    prompts.C,
                    chunk,
                    D=layer.D,
                    dt_bias=layer.dt_bias,
                    dt_softplus=True,
                    return_final_states=True,
                )
            ]
            return results

        return Scan(run, lambda: results[0])
