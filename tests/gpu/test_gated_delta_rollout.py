"""GDN and KDA kernels over 20,000 tokens of the inputs that trained layers get on real text (rollout_inputs.py).

Contract 1, on the GPU: whenever the ring has been folded the checkpoint has the bits of the same kernel's window 1, in
every row, whatever the row's phase (staggered slots fold in different steps). Outputs of the two differ by the rounding
of d rows alone. Against the CPU reference: the same 300 tokens, states within fp32 rounding of gates and products.
"""

from __future__ import annotations

import pytest
import torch
from rollout_inputs import MODELS, Recorded, Rollout, record

from trtllm_replayssm import kernels, reference

TOKENS = 20_000
ROWS = 3
WINDOWS = {"gated_delta": 16, "kimi_delta": 8}
#: |o_1 - o_window| over the largest |o|.
OUTPUT_BOUND = 2.0**-6
#: ||S - S_reference|| / ||S_reference||: exp and sums of another order, over the tokens that a state remembers.
STATE_BOUND = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """The whole layer, ROWS different texts."""
    return record(request.param, ROWS, TOKENS, "cuda")


def test_checkpoints_over_20000_tokens(recorded: Recorded) -> None:
    window = WINDOWS[recorded.kind]
    rollout = Rollout(kernels, recorded, window, "bfloat16", "cuda")
    rollout.run(0, 2000, keep_outputs=True)
    largest = float(torch.cat(rollout.outputs).abs().max())
    rollout.run(2000, TOKENS)
    flushes, unequal = rollout.flushes.tolist(), rollout.unequal.tolist()
    assert min(flushes) >= TOKENS // window
    assert unequal == [0] * ROWS, f"{unequal} of {flushes} checkpoints differ from conventional decoding"
    assert float(rollout.output_gap) <= OUTPUT_BOUND * largest
    assert all(bool(torch.isfinite(pool["state"]).all()) for pool in rollout.pools)


def test_states_are_those_of_the_reference(recorded: Recorded) -> None:
    window = WINDOWS[recorded.kind]
    ours, theirs = (
        Rollout(impl, recorded, window, "bfloat16", device) for impl, device in ((kernels, "cuda"), (reference, "cpu"))
    )
    for rollout in (ours, theirs):
        rollout.run(0, 300)
    for got, want in zip(ours.pools, theirs.pools, strict=True):
        exact = want.checkpoint().double()
        error = (got.checkpoint().cpu().double() - exact).norm() / exact.norm()
        assert float(error) <= STATE_BOUND


def test_one_wrong_bit_in_the_ring_is_seen(recorded: Recorded) -> None:
    """Teeth: flipping the lowest bit of one stored v breaks that row's next checkpoint and no other row's."""
    rollout = Rollout(kernels, recorded, WINDOWS[recorded.kind], "bfloat16", "cuda")
    rollout.run(0, 43)
    assert rollout.unequal.tolist() == [0] * ROWS
    origin = int(rollout.pools[1]["cursor"][1, 0, 0, 0])
    rollout.pools[1]["ring_v"].view(torch.int16)[1, 0, origin, 3] ^= 1
    rollout.run(43, 43 + rollout.pools[1].layout.spec.window)  # type: ignore[union-attr]
    assert rollout.unequal[1] >= 1 and rollout.unequal[[0, 2]].tolist() == [0, 0]
