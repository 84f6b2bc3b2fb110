"""The CUDA convolution against a float64 one over the accepted inputs, with rollback, padding and packed prompts.

Oracle: reference.causal_conv in float64 over each row's accepted inputs. Expected error: one rounding to act_dtype.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import DEVICE, assert_untouched, random_slots
from replay_cases import assert_close, far_pool

from trtllm_replayssm import ConvLayout, ConvSpec, ReplayError, kernels, reference
from trtllm_replayssm.pool import StatePool, torch_dtype

ROWS = 4


def make_pool(spec: ConvSpec, slots: torch.Tensor, total: int) -> StatePool:
    """Slots of ``slots`` reset, everything else NaN."""
    layout = ConvLayout(spec)
    pool = StatePool(layout, torch.full((total, layout.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE))
    kernels.conv_reset(pool, slots)
    return pool


def make_weights(spec: ConvSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(spec.channels, spec.kernel, device=DEVICE) * 0.5).to(dtype), torch.randn(
        spec.channels, device=DEVICE
    ).to(dtype)


def exact(
    spec: ConvSpec, seen: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """float64 outputs of x [T, C] behind the inputs ``seen`` [n, C]."""
    u = torch.cat(
        [torch.zeros(spec.kernel - 1, spec.channels, dtype=torch.float64, device=DEVICE), seen.double(), x.double()]
    )
    start = len(seen)
    y = sum(u[start + i : start + i + len(x)] * weight.double()[:, i] for i in range(spec.kernel))
    y = y + (0 if bias is None else bias.double())
    return torch.nn.functional.silu(y) if spec.activation == "silu" else y


SPECS = [
    ConvSpec(10240, spec_len=1),
    ConvSpec(9728, spec_len=4),
    ConvSpec(200, kernel=2, spec_len=3, act_dtype="float16"),
    ConvSpec(72, kernel=8, spec_len=16, act_dtype="float32", activation="none"),
    ConvSpec(8, kernel=3, spec_len=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.channels}x{s.kernel}-T{s.spec_len}-{s.act_dtype}")
@pytest.mark.parametrize("weights", ["own", "float32"])
def test_steps_with_rollback(spec, weights):
    act = torch_dtype(spec.act_dtype)
    weight, bias = make_weights(spec, act if weights == "own" else torch.float32)
    own = random_slots(ROWS, 7)
    slots = own.clone()
    slots[2] = -1
    pool = make_pool(spec, own, 7)
    seen = [torch.zeros(0, spec.channels, device=DEVICE, dtype=act) for _ in range(ROWS)]
    rng, last, x = torch.Generator().manual_seed(2), 0, None
    for i in range(14):
        accepted = torch.randint(0, last + 1, (ROWS,), generator=rng).int()
        accepted[0] = -1 if i % 3 else 99
        for row in range(ROWS):
            count = last if accepted[row] in (-1, 99) else int(accepted[row])
            if x is not None and row != 2:
                seen[row] = torch.cat([seen[row], x[row, :count]])
        tokens = int(torch.randint(1, spec.spec_len + 1, (), generator=rng))
        x = torch.randn(ROWS, tokens, spec.channels, device=DEVICE).to(act)
        before = pool.memory.clone()
        y = kernels.conv_step(
            pool,
            slots,
            x,
            weight,
            bias if i % 2 else None,
            accepted=accepted.to(DEVICE),
            out=torch.full_like(x, float("nan")),
        )
        for row in range(ROWS):
            if row == 2:
                assert not y[row].any()
            else:
                assert_close(y[row], exact(spec, seen[row], x[row], weight, bias if i % 2 else None), spec.act_dtype)
        assert_untouched(before, pool.memory, slots)
        last = tokens


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.channels}x{s.kernel}-T{s.spec_len}-{s.act_dtype}")
def test_scan_then_the_reference_agrees(spec):
    """Packed prompts of many lengths, with and without history: outputs and slots as the reference leaves them."""
    act = torch_dtype(spec.act_dtype)
    lengths = [3, 0, 1, 2, 70, 5, 33, 4]
    slots = random_slots(len(lengths), 10)
    ours = make_pool(spec, slots, 10)
    theirs = StatePool(ours.layout, ours.memory.clone())
    weight, bias = make_weights(spec, act)
    first = torch.randn(len(lengths), spec.spec_len, spec.channels, device=DEVICE).to(act)
    for op, pool in ((kernels, ours), (reference, theirs)):
        op.conv_step(pool, slots, first, weight, bias)
    slots[3] = -1
    resume = torch.arange(len(lengths), device=DEVICE) % 2 == 0
    x = torch.randn(sum(lengths), spec.channels, device=DEVICE).to(act)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    y = kernels.conv_scan(
        ours, slots, x, weight, bias, cu_seqlens=bounds, has_initial=resume, out=torch.full_like(x, float("nan"))
    )
    ref = reference.conv_scan(theirs, slots, x, weight, bias, cu_seqlens=bounds, has_initial=resume)
    assert_close(y, ref.double(), spec.act_dtype, scale=2.0)
    taps = spec.kernel - 1
    assert torch.equal(ours["columns"][slots.long(), :taps], theirs["columns"][slots.long(), :taps])
    assert torch.equal(ours["cursor"], theirs["cursor"])
    plain = kernels.conv_scan(ours, slots, x, weight, cu_seqlens=bounds)
    assert_close(
        plain, reference.conv_scan(theirs, slots, x, weight, cu_seqlens=bounds).double(), spec.act_dtype, scale=2.0
    )


def test_scan_and_steps_are_one_longer_scan():
    spec = ConvSpec(264, spec_len=2)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    pool = make_pool(spec, slots, 2)
    weight, bias = make_weights(spec, torch.bfloat16)
    x = torch.randn(40, 264, device=DEVICE).bfloat16()
    whole = kernels.conv_scan(pool, slots[:1], x, weight, bias, cu_seqlens=torch.tensor([0, 40], device=DEVICE))
    parts = [kernels.conv_scan(pool, slots[1:], x[:31], weight, bias, cu_seqlens=torch.tensor([0, 31], device=DEVICE))]
    parts += [kernels.conv_step(pool, slots[1:], x[None, t : t + 1], weight, bias)[0] for t in range(31, 40)]
    assert torch.equal(torch.cat(parts), whole)


def test_materialize_against_the_reference():
    spec = ConvSpec(72, kernel=4, spec_len=4)
    slots = torch.arange(6, dtype=torch.int32, device=DEVICE)
    ours = make_pool(spec, slots, 12)
    weight, bias = make_weights(spec, torch.bfloat16)
    kernels.conv_step(ours, slots, torch.randn(6, 4, 72, device=DEVICE).bfloat16(), weight, bias)
    theirs = StatePool(ours.layout, ours.memory.clone())
    count = torch.tensor([0, 1, 2, 4, 99, -1], dtype=torch.int32, device=DEVICE)
    dst = torch.tensor([6, 7, 2, 8, 9, -1], dtype=torch.int32, device=DEVICE)
    kernels.conv_materialize(ours, slots, count, dst)
    reference.conv_materialize(theirs, slots, count, dst)
    used = dst[dst >= 0].long()
    assert torch.equal(ours["columns"][used, :3], theirs["columns"][used, :3])
    assert torch.equal(ours["cursor"], theirs["cursor"])


def test_arguments_are_checked():
    spec = ConvSpec(72)
    slots = torch.arange(2, dtype=torch.int32, device=DEVICE)
    pool = make_pool(spec, slots, 2)
    weight, _ = make_weights(spec, torch.bfloat16)
    x = torch.randn(2, 1, 72, device=DEVICE).bfloat16()
    with pytest.raises(ReplayError, match=r"weight has shape \[72, 3\]"):
        kernels.conv_step(pool, slots, x, weight[:, :3])
    with pytest.raises(ReplayError, match=r"x is torch\.float32"):
        kernels.conv_step(pool, slots, x.float(), weight)
    with pytest.raises(ReplayError, match="tokens is 2; it must be from 1 to 1"):
        kernels.conv_step(pool, slots, x.expand(2, 2, 72), weight)


def test_slots_past_4_gib():
    """Slots more than 2^31 bytes apart: prompt, steps and fold leave the bits of a dense pool."""
    spec = ConvSpec(72, spec_len=2)
    slots = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32, device=DEVICE)
    weight, bias = make_weights(spec, torch.bfloat16)
    x = torch.randn(2, 12, 72, device=DEVICE).bfloat16()
    results = []
    for pool in (make_pool(spec, slots, 3), far_pool(ConvLayout(spec), device=DEVICE)):
        kernels.conv_reset(pool, slots)
        outputs = [kernels.conv_scan(pool, slots, x[0, :8], weight, bias, cu_seqlens=bounds)]
        outputs += [kernels.conv_step(pool, slots, x[:, t : t + 2], weight, bias) for t in (8, 10)]
        kernels.conv_materialize(pool, slots, torch.full_like(slots, -1), slots)
        results.append([*outputs, pool["columns"][slots.long(), : spec.kernel - 1]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
