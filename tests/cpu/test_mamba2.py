"""Mamba-2 reference: step and scan against the float64 recurrence, and that against formulas written out in numpy.

Expected error: replay_cases.RELATIVE_BOUND. Contracts that hold for every kind are in test_contracts_*.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from replay_cases import Decoder, assert_close, make_inputs, oracle, run_scan, run_step, small_spec

from benchmarks.shapes import ODD
from trtllm_replayssm import ReplayError, SlotLayout
from trtllm_replayssm.pool import StatePool
from trtllm_replayssm.reference import mamba2_recurrence, mamba2_scan, mamba2_step
from trtllm_replayssm.reference.arith import softplus

SHAPES = [shape for shape in ODD if shape.kind == "mamba2"]
DTYPES = [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")]


def test_recurrence_against_scalar_loops() -> None:
    rng = np.random.default_rng(0)
    T, H, G, P, N = 5, 4, 2, 3, 2
    x, z = rng.normal(size=(2, 1, T, H, P))
    dt, bias, A, D = rng.normal(size=(1, T, H)), rng.normal(size=H), -rng.uniform(0.5, 2, H), rng.normal(size=(H, P))
    B, C = rng.normal(size=(2, 1, T, G, N))
    S, expected = np.zeros((H, P, N)), np.zeros((T, H, P))
    for t in range(T):
        for h in range(H):
            step = math.log1p(math.exp(dt[0, t, h] + bias[h]))
            for p in range(P):
                y = 0.0
                for n in range(N):
                    S[h, p, n] = math.exp(A[h] * step) * S[h, p, n] + step * x[0, t, h, p] * B[0, t, h // 2, n]
                    y += S[h, p, n] * C[0, t, h // 2, n]
                gate = z[0, t, h, p]
                expected[t, h, p] = (y + D[h, p] * x[0, t, h, p]) * gate / (1 + math.exp(-gate))
    args = [torch.from_numpy(v) for v in (np.zeros((1, H, P, N)), x, dt, A, B, C)]
    y, state = mamba2_recurrence(*args, D=torch.from_numpy(D), z=torch.from_numpy(z), dt_bias=torch.from_numpy(bias))
    np.testing.assert_allclose(y[0].numpy(), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(state[0].numpy(), S, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("act, state", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_step_and_scan(shape: Any, act: str, state: str) -> None:
    spec = shape.spec(act_dtype=act, state_dtype=state, window=5, spec_len=2)
    inputs = make_inputs(spec, 2, 24)
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(2, 12), expected, act, what="step")
    assert_close(decoder.state(1), final[1], state, what="state of step")
    scanned = run_scan(decoder.pool, [1, 0], inputs, [(1, 0, 24), (0, 0, 24)])
    assert_close(scanned.unflatten(0, (2, 24)).flip(0), expected, act, what="scan")
    assert_close(decoder.pool["state"][0], final[0], state, what="state of scan")


def test_softplus_is_the_identity_above_20_and_nowhere_below() -> None:
    x = torch.tensor([20.0, 19.5, 15.0, 14.5, 1.0, -30.0], dtype=torch.float64)
    expected = [math.log1p(math.exp(v)) for v in x.tolist()]
    np.testing.assert_allclose(softplus(x).numpy(), expected, rtol=1e-15)
    assert (softplus(x)[:4] > x[:4]).all()
    above = torch.tensor([20.001, 25.0, 1e4], dtype=torch.float64)
    assert torch.equal(softplus(above), above)


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "no D": {"D": None},
    "no z": {"z": None},
    "no dt_bias": {"dt_bias": None},
    "only x": {"D": None, "z": None, "dt_bias": None},
    "D per channel": {"D": torch.linspace(-1, 1, 4 * 16).reshape(4, 16)},
    "D in bf16": {"D": torch.linspace(-1, 1, 4).bfloat16()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_optional_arguments(name: str) -> None:
    inputs = make_inputs(small_spec("mamba2", window=3), 2, 8)
    for key, value in OPTIONS[name].items():
        inputs.tokens.pop(key, None)
        inputs.params.pop(key, None)
        if value is not None:
            inputs.params[key] = value
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(1, 8), expected, "float32")
    assert_close(run_scan(decoder.pool, [2], inputs, [(0, 0, 8)])[None], expected[:1], "float32", what="scan")
    assert_close(decoder.pool["state"][2], final[0], "float32", what="state")


@pytest.mark.parametrize(
    "options", [{"dt_softplus": False, "dt_min": 0.001, "dt_max": 0.1}, {"dt_max": 0.5}, {"dt_min": 0.4}]
)
def test_time_step_limits(options: dict[str, Any]) -> None:
    inputs = make_inputs(small_spec("mamba2", window=4, **options), 2, 12)
    decoder = Decoder(inputs)
    assert_close(decoder.run(1, 12), oracle(inputs)[0], "float32")
    limits = decoder.pool["ring_dt"][:2][decoder.pool["ring_dt"][:2] != 0]
    assert limits.min() >= inputs.spec.dt_min and limits.max() <= inputs.spec.dt_max
    assert (limits == (inputs.spec.dt_max if options.get("dt_max") else inputs.spec.dt_min)).any()


def test_softplus_is_the_identity_above_20() -> None:
    inputs = make_inputs(small_spec("mamba2", window=4), 1, 1)
    inputs.params["dt_bias"] = None
    inputs.tokens["dt"][:] = torch.tensor([20.5, 100.0, 1000.0, -200.0])
    decoder = Decoder(inputs)
    decoder.run(1, 1)
    assert decoder.pool["ring_dt"][0, :, 0].tolist() == [20.5, 100.0, 1000.0, 0.0]


def test_strided_inputs() -> None:
    """x, B and C as the model has them: slices of one convolution output."""
    spec = small_spec("mamba2", act_dtype="bfloat16", window=3, spec_len=2)
    inputs = make_inputs(spec, 2, 12)
    expected = Decoder(inputs).run(2, 6)
    parts = [inputs.tokens[name].flatten(2) for name in ("x", "B", "C")]
    packed = torch.cat([*parts, torch.full((2, 12, 3), float("nan"), dtype=torch.bfloat16)], dim=-1)
    for name, part in zip(("x", "B", "C"), packed[..., :-3].split([p.shape[-1] for p in parts], dim=-1), strict=True):
        inputs.tokens[name] = part.unflatten(-1, inputs.tokens[name].shape[2:])
    pool = StatePool.allocate(SlotLayout(spec), 2)
    steps = [run_step(pool, torch.arange(2), inputs, inputs.span(2 * i, 2 * i + 2)) for i in range(6)]
    assert torch.equal(torch.cat(steps, dim=1), expected)


def test_fp16_output_of_a_large_state_is_finite_where_it_fits() -> None:
    spec = small_spec("mamba2", act_dtype="float16", window=4)
    pool = StatePool.allocate(SlotLayout(spec), 1)
    pool["state"].fill_(1e5)  # past fp16's largest number
    inputs = make_inputs(spec, 1, 1, regime="weak")
    inputs.tokens["C"][:] = 0.0
    inputs.tokens["C"][..., 0] = 0.5
    y = run_step(pool, torch.tensor([0]), inputs, inputs.span(0, 1))
    torch.testing.assert_close(y.float(), torch.full_like(y.float(), 5e4), rtol=1e-3, atol=0)


def _arguments(scan: bool) -> dict[str, Any]:
    inputs = make_inputs(small_spec("mamba2", spec_len=2), 3, 2)
    tokens = inputs.span(0, 2)
    out = {**({n: v[0] for n, v in tokens.items()} if scan else tokens), **inputs.params}
    out["slots"] = torch.tensor([0] if scan else [0, 1, 2])
    if scan:
        out["cu_seqlens"] = torch.tensor([0, 2])
    return out


BAD: list[tuple[bool, dict[str, Any], str]] = [
    (False, {"x": torch.zeros(3, 2, 4, 15)}, r"x has shape \[3, 2, 4, 15\]; it must be \[rows=3, T=2, H=4, P=16\]"),
    (False, {"x": torch.zeros(3, 2, 4, 16).half()}, "x is torch.float16; it must be float32"),
    (False, {"x": torch.zeros(3, 3, 4, 16)}, "x carries 3 tokens a row; a step takes 1 to 2"),
    (False, {"x": torch.zeros(3, 0, 4, 16)}, "x carries 0 tokens"),
    (False, {"x": torch.zeros(3, 2, 4)}, r"x is shape \[3, 2, 4\]; .* 4 axes"),
    (False, {"x": None}, "x is NoneType"),
    (False, {"dt": torch.zeros(3, 2, 5)}, r"dt has shape .* \[rows=3, T=2, H=4\]"),
    (False, {"dt": torch.zeros(3, 2, 4).int()}, "dt is torch.int32; it must be a floating dtype"),
    (False, {"dt": 1.0}, r"dt is float; it must be a tensor \[rows, T, H\]"),
    (False, {"A": torch.zeros(3)}, r"A has shape \[3\]; it must be \[H=4\]"),
    (False, {"A": torch.tensor([-1.0, 0.5, -2.0, 0.0])}, r"A holds 0.5; .* finite and 0 or negative: A = -exp\(A_log"),
    (False, {"A": torch.tensor([-1.0, -torch.inf, 0.0, 0.0]).double()}, "A holds -inf; every rate must be finite"),
    (True, {"A": torch.tensor([-1.0, torch.nan, 0.0, 0.0]).bfloat16()}, "A holds nan; every rate must be finite"),
    (True, {"A": torch.full((4,), 1e-6)}, "A holds 1e-06; every rate"),
    (False, {"B": torch.zeros(3, 2, 4, 8)}, r"B has shape .* \[rows=3, T=2, G=2, N=8\]"),
    (False, {"C": torch.zeros(3, 1, 2, 8)}, "C has shape"),
    (False, {"z": torch.zeros(3, 2, 4, 8)}, "z has shape"),
    (False, {"D": torch.zeros(5)}, r"D has shape \[5\]; it must be \[H=4\]"),
    (False, {"D": torch.zeros(4, 5)}, r"D has shape \[4, 5\]; it must be \[H=4, P=16\]"),
    (False, {"D": 1.0}, "D is float"),
    (False, {"dt_bias": torch.zeros(4, 1)}, "dt_bias has shape"),
    (False, {"A": torch.zeros(4, device="meta")}, "A is on meta; it must be on the pool's device, cpu"),
    (False, {"accepted": torch.zeros(2, dtype=torch.int32)}, r"accepted has shape \[2\]; .* 3 entries"),
    (False, {"accepted": torch.zeros(3)}, "accepted is torch.float32; it must be an integer dtype"),
    (False, {"accepted": [1, 1, 1]}, "accepted is list; it must be an integer tensor with 3 entries"),
    (False, {"slots": torch.tensor([0, 1])}, "x has shape"),
    (False, {"slots": torch.tensor([0, 1, 1])}, "slots names slot 1 twice"),
    (False, {"slots": torch.tensor([0, 1, 9])}, "slots names slot 9; the pool has slots 0 to 3"),
    (False, {"slots": torch.tensor([True, False, True])}, "slots is torch.bool"),
    (False, {"slots": [0, 1, 2]}, "slots is list; it must be an integer tensor with any number of entries"),
    (False, {"slots": torch.zeros(3, 1, dtype=torch.int32)}, "slots has shape"),
    (True, {"x": torch.zeros(2, 4, 8)}, r"x has shape .* \[tokens=2, H=4, P=16\]"),
    (True, {"x": 3}, "cu_seqlens is"),
    (True, {"cu_seqlens": torch.tensor([0, 1])}, r"cu_seqlens is \[0, 1\]; it must rise from 0 to .* 2"),
    (True, {"cu_seqlens": torch.tensor([1, 2])}, "cu_seqlens is"),
    (True, {"cu_seqlens": torch.tensor([0, 1, 2])}, "cu_seqlens has shape"),
    (True, {"slots": torch.tensor([0, 1, 2]), "cu_seqlens": torch.tensor([0, 2, 1, 2])}, "cu_seqlens is"),
    (True, {"has_initial": torch.tensor([1])}, r"has_initial is torch.int64 .* bool tensor \[rows=1\]"),
    (True, {"has_initial": torch.tensor([True, True])}, r"has_initial is torch.bool with \[2\]"),
    (True, {"has_initial": [True]}, "has_initial is list"),
    (True, {"slots": torch.arange(9), "cu_seqlens": torch.zeros(10).long()}, "slots names slot 4"),
    (True, {"slots": torch.full((9,), -1), "cu_seqlens": torch.zeros(10).long()}, r"cu_seqlens is \[0, 0, ..., 0\]"),
]


@pytest.mark.parametrize("scan, change, message", BAD)
def test_bad_arguments(scan: bool, change: dict[str, Any], message: str) -> None:
    pool = StatePool.allocate(SlotLayout(small_spec("mamba2", spec_len=2)), 4)
    before = pool.memory.clone()
    operation = mamba2_scan if scan else mamba2_step
    with pytest.raises(ReplayError, match=message):
        operation(pool, **{**_arguments(scan), **change})
    assert torch.equal(pool.memory, before), "a refused call wrote to the pool"


def test_pool_of_another_kind_is_refused() -> None:
    pool = StatePool.allocate(SlotLayout(small_spec("gated_delta", spec_len=2)), 4)
    with pytest.raises(ReplayError, match="pool holds gated_delta; this operation needs a pool of mamba2"):
        mamba2_step(pool, **_arguments(False))
    with pytest.raises(ReplayError, match="pool holds NoneType"):
        mamba2_step(None, **_arguments(False))
