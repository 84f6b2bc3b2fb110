"""Every kernel of the library once or more, small, for compute-sanitizer (memcheck, racecheck, initcheck).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck python tests/gpu/sanitizer_cases.py

Pools and outputs are uninitialised memory: initcheck then reports every read of a dead ring row or of another slot.
Nothing is compared with an oracle here (pytest tests/gpu does that); results must be finite.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from replay_cases import make_inputs  # noqa: E402

from trtllm_replayssm import ConvLayout, ConvSpec, RecurrenceSpec, SlotLayout, kernels  # noqa: E402
from trtllm_replayssm.pool import StatePool, torch_dtype  # noqa: E402

DEVICE = torch.device("cuda")


def raw_pool(layout: SlotLayout | ConvLayout, slots: int) -> StatePool:
    """A pool of uninitialised memory."""
    return StatePool(layout, torch.empty(slots, layout.slot_bytes, dtype=torch.uint8, device=DEVICE))


def check(value: torch.Tensor, what: str) -> None:
    """Fail on NaN and infinity."""
    if not bool(torch.isfinite(value.float()).all()):
        raise SystemExit(f"{what}: not finite")


def mamba2(spec: RecurrenceSpec, tuning: kernels.StepTuning, steps: int = 7) -> None:
    """Reset, steps with rejection and padding, scan, materialize."""
    inputs = make_inputs(spec, 3, 24)
    tokens = {name: value.to(DEVICE) for name, value in inputs.tokens.items()}
    params = {name: value.to(DEVICE) for name, value in inputs.params.items()}
    pool = raw_pool(SlotLayout(spec), 5)
    own = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    kernels.reset(pool, own)
    for i in range(steps):
        count = 1 + i % spec.spec_len
        step = {name: value[:, i : i + count].contiguous() for name, value in tokens.items()}
        accepted = torch.tensor([i % 3, 0, -1], dtype=torch.int32, device=DEVICE)
        y = kernels.mamba2_step(pool, slots, **step, **params, accepted=accepted, tuning=tuning)
        check(y, f"step {i} of {spec}")
    spare = torch.tensor([1, 4], dtype=torch.int32, device=DEVICE)
    kernels.materialize(pool, own, torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE), spare, A=params["A"])
    check(pool["state"][spare.long()], "materialized state")
    packed = {name: value[0].contiguous() for name, value in tokens.items()}
    bounds = torch.tensor([0, 17, 17, 24], dtype=torch.int32, device=DEVICE)
    flags = torch.tensor([True, False, True], device=DEVICE)
    order = torch.tensor([3, 2, 0], dtype=torch.int32, device=DEVICE)
    for exact in (False, True):
        y = kernels.mamba2_scan(pool, order, **packed, **params, cu_seqlens=bounds, has_initial=flags, exact=exact)
        check(y, "exact scan" if exact else "scan")


def delta_scan(spec: RecurrenceSpec) -> None:
    """Scans of GDN and KDA in both ways: a slot that goes on behind a live ring, an empty sequence, padding."""
    inputs = make_inputs(spec, 1, 150)
    tokens = {name: value[0].to(DEVICE) for name, value in inputs.tokens.items()}
    params = {name: value.to(DEVICE) for name, value in inputs.params.items()}
    pool = raw_pool(SlotLayout(spec), 5)
    slots = torch.tensor([3, 2, -1, 0], dtype=torch.int32, device=DEVICE)
    kernels.reset(pool, slots[[0, 1, 3]])
    row = {name: value[None, :1] for name, value in tokens.items()}
    kernels.gated_delta_step(pool, slots[:1], **row, **params)
    bounds = torch.tensor([0, 129, 129, 140, 150], dtype=torch.int32, device=DEVICE)
    flags = torch.tensor([True, False, False, False], device=DEVICE)
    for exact in (False, True):
        o = kernels.gated_delta_scan(pool, slots, **tokens, **params, cu_seqlens=bounds, has_initial=flags, exact=exact)
        check(o, f"scan, exact {exact}, of {spec}")
    check(pool["state"][slots[[0, 1, 3]].long()], "scanned state")


def gated_delta(spec: RecurrenceSpec, tuning: kernels.StepTuning, steps: int = 7) -> None:
    """Reset, steps with rejection and padding, materialize."""
    inputs = make_inputs(spec, 3, 24)
    tokens = {name: value.to(DEVICE) for name, value in inputs.tokens.items()}
    params = {name: value.to(DEVICE) for name, value in inputs.params.items()}
    pool = raw_pool(SlotLayout(spec), 5)
    own = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    kernels.reset(pool, own)
    for i in range(steps):
        count = 1 + i % spec.spec_len
        step = {name: value[:, i : i + count].contiguous() for name, value in tokens.items()}
        accepted = torch.tensor([i % 3, 0, -1], dtype=torch.int32, device=DEVICE)
        check(
            kernels.gated_delta_step(pool, slots, **step, **params, accepted=accepted, tuning=tuning),
            f"step {i} of {spec}",
        )
    spare = torch.tensor([1, 4], dtype=torch.int32, device=DEVICE)
    kernels.materialize(pool, own, torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE), spare)
    check(pool["state"][spare.long()], "materialized state")


def gated_delta_cases() -> None:
    """Tuned and generic kernels, both gates, one and several tokens, every cut into blocks."""
    for kind, extra in (("gated_delta", {}), ("kimi_delta", {}), ("kimi_delta", {"gate": "bounded"})):
        for spec_len in (1, 3):
            for state in ("float32", "bfloat16"):
                for tuning in (kernels.StepTuning(2, 1), kernels.StepTuning(0, 8)):
                    spec = RecurrenceSpec(kind, 4, 2, 128, 128, state, window=3, spec_len=spec_len, **extra)
                    gated_delta(spec, tuning)
        for sizes, act in (((16, 48), "float32"), ((80, 256), "bfloat16"), ((256, 80), "float16")):
            spec = RecurrenceSpec(kind, 4, 2, *sizes, act_dtype=act, window=3, spec_len=2, **extra)
            gated_delta(spec, kernels.StepTuning())


def conv(spec: ConvSpec) -> None:
    """Reset, steps, scan, materialize of the convolution."""
    act = torch_dtype(spec.act_dtype)
    pool = raw_pool(ConvLayout(spec), 5)
    own = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    kernels.conv_reset(pool, own)
    weight = torch.randn(spec.channels, spec.kernel, device=DEVICE).to(act)
    bias = torch.randn(spec.channels, device=DEVICE)
    for i in range(4):
        x = torch.randn(3, 1 + i % spec.spec_len, spec.channels, device=DEVICE).to(act)
        accepted = torch.tensor([i, 0, -1], dtype=torch.int32, device=DEVICE)
        check(kernels.conv_step(pool, slots, x, weight, bias, accepted=accepted), "conv_step")
    spare = torch.tensor([1, 4], dtype=torch.int32, device=DEVICE)
    kernels.conv_materialize(pool, own, torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE), spare)
    x = torch.randn(70, spec.channels, device=DEVICE).to(act)
    bounds = torch.tensor([0, 2, 2, 70], dtype=torch.int32, device=DEVICE)
    flags = torch.tensor([True, False, True], device=DEVICE)
    order = torch.tensor([3, 2, 0], dtype=torch.int32, device=DEVICE)
    check(kernels.conv_scan(pool, order, x, weight, bias, cu_seqlens=bounds, has_initial=flags), "conv_scan")


def main() -> None:
    """All cases."""
    for heads in (1, 4):
        for options in (
            {},
            {"spec_len": 7},
            {"state_dtype": "bfloat16", "window": 3},
            {"state_dtype": "bfloat16", "spec_len": 3},
        ):
            mamba2(RecurrenceSpec("mamba2", 8, 2, 64, 128, **{"window": 4, **options}), kernels.StepTuning(heads))
    for dstate in (64, 256):
        for spec_len in (1, 4):
            mamba2(RecurrenceSpec("mamba2", 4, 2, 80, dstate, window=4, spec_len=spec_len), kernels.StepTuning(2))
    for state, act in (("float32", "float32"), ("float16", "bfloat16"), ("bfloat16", "float16")):
        mamba2(RecurrenceSpec("mamba2", 6, 2, 48, 96, state, act, window=3, spec_len=2), kernels.StepTuning())
    for kind in ("gated_delta", "kimi_delta"):
        for headdim, dstate in ((128, 128), (64, 64), (80, 96), (16, 16)):
            delta_scan(RecurrenceSpec(kind, 4, 2, headdim, dstate, window=4))
        delta_scan(RecurrenceSpec(kind, 2, 2, 64, 256, "bfloat16", "float16", window=4))
    gated_delta_cases()
    for act in ("bfloat16", "float16", "float32"):
        conv(ConvSpec(200, kernel=4, spec_len=2, act_dtype=act))
        conv(ConvSpec(72, kernel=3, spec_len=3, act_dtype=act))
    torch.cuda.synchronize()
    print("all cases ran")


if __name__ == "__main__":
    main()
