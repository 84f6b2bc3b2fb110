"""Contract 2: outputs and states stay within a fixed distance of the float64 recurrence over thousands of steps.

A rollout takes random numbers of tokens and keeps random numbers of them, 0 and T included. An error that fed back into
the recurrence would grow with the number of folds; the last third of a rollout must not be worse than the first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_cases import KINDS, Decoder, assert_close, make_inputs, oracle, relative_error, small_spec

from trtllm_replayssm import reference
from trtllm_replayssm.reference.slots import load_rows

STEPS = 4096
CHECKS = 48
#: ||state - oracle|| / ||state||. The fold rounds every element a few times per token and forgets at the decay's rate:
#: the error settles at eps(fp32) = 1.2e-7 times the square root of the tokens that the state remembers (some 100).
STATE_BOUND = 5e-7
#: Bounds are wider by this where nothing is forgotten: the error of a sum of 1,000 tokens is a random walk.
SLACK = {"plain": 1.0, "trained": 1.0, "weak": 4.0}


def _rollout(kind: str, act: str, regime: str, steps: int) -> list[tuple[float, float]]:
    """(relative state error, relative output error) at CHECKS moments of a rollout."""
    spec = small_spec(kind, nheads=2, ngroups=1, headdim=8, dstate=8, act_dtype=act, window=16, spec_len=4)
    length = steps * 3
    inputs, random = make_inputs(spec, 2, length, regime=regime), torch.Generator().manual_seed(5)
    decoder, exact = Decoder(inputs), [None, None]
    spans: list[list[tuple[int, torch.Tensor]]] = [[], []]
    errors, counted = [], [0, 0]
    accepts = set()
    slack = SLACK[regime]
    for step in range(1, steps + 1):
        tokens = int(torch.randint(1, 5, (), generator=random))
        keep = torch.randint(0, tokens + 1, (2,), generator=random)
        accepts |= {(tokens, int(k)) for k in keep}
        positions, y = decoder.step(tokens, keep)
        for row in range(2):
            spans[row].append((int(positions[row, 0]), y[row, : int(keep[row])]))
        if step % (steps // CHECKS):
            continue
        for row in range(2):
            if counted[row] == decoder.count(row):
                continue  # nothing was kept since the last check
            ref, exact[row] = oracle(inputs, counted[row], decoder.count(row), exact[row], rows=slice(row, row + 1))
            got = torch.cat([out for _, out in spans[row]])
            assert_close(got, ref[0], act, scale=slack, what=f"outputs up to step {step}")
            error = relative_error(decoder.state(row), exact[row][0])
            errors.append((error, relative_error(got, ref[0])))
            counted[row], spans[row] = decoder.count(row), []
    assert {(4, 0), (4, 4), (1, 0), (1, 1)} <= accepts
    assert min(counted) > steps
    return errors


@pytest.mark.parametrize("kind, regime", [("mamba2", "trained"), ("gated_delta", "trained"), ("kimi_delta", "trained")])
def test_4096_steps(kind: str, regime: str) -> None:
    errors = _rollout(kind, "bfloat16", regime, STEPS)
    third = len(errors) // 3
    early, late = errors[third // 2 : third], errors[-third:]
    for index, name in enumerate(("state", "output")):
        first, last = (sum(e[index] for e in part) / len(part) for part in (early, late))
        assert last <= 1.3 * first, f"{name} error grew from {first:.3e} to {last:.3e}"
    assert max(e[0] for e in errors) <= STATE_BOUND


@pytest.mark.parametrize("regime", ["plain", "weak"])
@pytest.mark.parametrize("kind", KINDS)
def test_rollout_fp32(kind: str, regime: str) -> None:
    """fp32 activations: nothing but fp32 rounding. With weak decay Mamba-2 forgets nothing, so its state grows too."""
    errors = _rollout(kind, "float32", regime, 384)
    assert max(e[0] for e in errors) <= STATE_BOUND * SLACK[regime]


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_folding_rounded_rows_would_be_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a fold of the stored 16-bit d rows, in place of the exact one, breaks the bound on the state."""

    def fold_stored_d(pool: Any, slots: Any, origin: Any, count: Any, state: torch.Tensor) -> torch.Tensor:
        for j in range(int(count.max())):
            row = ((origin + j) % pool.layout.spec.ring_rows)[:, None]
            k, rnorm, d, g = (
                load_rows(pool, name, slots, row)[:, 0] for name in ("ring_k", "ring_k_rnorm", "ring_d", "ring_g")
            )
            decay = g.exp()[..., None, None] if g.dim() == 2 else g.exp()[:, :, None]
            folded = decay * state + d[..., None] * (k * rnorm[..., None]).repeat_interleave(2, dim=1)[:, :, None]
            state = torch.where((count > j)[:, None, None, None], folded, state)
        return state

    errors = _rollout(kind, "bfloat16", "trained", 96)
    monkeypatch.setattr(reference.gated_delta, "fold_gated_delta", fold_stored_d)
    monkeypatch.setattr(reference.lifecycle, "fold_gated_delta", fold_stored_d)
    broken = _rollout(kind, "bfloat16", "trained", 96)
    assert max(e[0] for e in errors) <= STATE_BOUND
    assert max(e[0] for e in broken) > 100 * STATE_BOUND
