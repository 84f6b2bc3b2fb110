"""Correctness of a contender before it is timed: small rollouts and scans against the float64 recurrence."""

from __future__ import annotations

import torch

from trtllm_replayssm.reference import mamba2_recurrence

from .base import Contender, Layer, Step

#: Largest ||y - reference|| / ||reference|| by state dtype: one bf16 rounding of y is 2e-3, tensor-core products of
#: bf16 operands add a few of them, and a bf16 state is rounded in every write.
LIMITS = {"float32": 1.5e-2, "bfloat16": 4e-2}
ROWS = 3
#: Two full windows at T = 1; three folds and more at T = 4 and 8.
STEPS = {1: 36, 4: 12, 8: 8}
SCAN_LENGTH = 200


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| in float64; infinite if anything in ``got`` is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - expected).norm() / expected.norm())


def check_steps(contender: Contender, layer: Layer, tokens: int) -> float:
    """Worst relative error of y over a rollout from empty slots, with random accepts where T > 1."""
    stepper = contender.stepper(layer, tokens, ROWS + 2)
    stepper.clear()
    slots = torch.tensor([3, 0, 4], dtype=torch.int32, device=layer.device)
    steps = STEPS[tokens]
    inputs = layer.inputs(ROWS, tokens * steps)
    generator = torch.Generator().manual_seed(tokens)
    counts = torch.randint(1, tokens + 1, (steps, ROWS), generator=generator, dtype=torch.int32).to(layer.device)
    state = reference_state(layer)
    worst = 0.0
    for i in range(steps):
        step = inputs.part(i * tokens, (i + 1) * tokens)
        stepper.call(slots, step)()
        worst = max(worst, relative_error(step.y, recur(layer, state, step)[0]))
        stepper.accept(slots, counts[i])
        for t in range(tokens):
            after = recur(layer, state, step.part(t, t + 1))[1]
            state = torch.where((counts[i] > t)[:, None, None, None], after, state)
    return worst


def check_scan(contender: Contender, layer: Layer, chunk: int) -> float:
    """Worst relative error of y and of the final state over three prompts."""
    prompts = layer.inputs(ROWS, SCAN_LENGTH)
    prompts.y.fill_(float("nan"))
    scan = contender.scan(layer, prompts, chunk)
    scan.call()
    y, state = scan.result()
    expected_y, expected_state = recur(layer, reference_state(layer), prompts)
    return max(relative_error(y, expected_y), relative_error(state, expected_state))


def reference_state(layer: Layer) -> torch.Tensor:
    """Zero state of the check's rows, float64."""
    s = layer.shape
    return torch.zeros(ROWS, s.nheads, s.headdim, s.dstate, dtype=torch.float64, device=layer.device)


def recur(layer: Layer, state: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 y and state after the step's tokens."""
    A, D, dt_bias = (v.double() for v in (layer.A, layer.D, layer.dt_bias))
    return mamba2_recurrence(state, step.x, step.dt.double(), A, step.B, step.C, D=D, dt_bias=dt_bias)
