"""GDN and KDA reference: step and scan against the float64 recurrence, that one against formulas written out in numpy.

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
from trtllm_replayssm.reference import delta_gates, gated_delta_recurrence, gated_delta_scan, gated_delta_step

SHAPES = [shape for shape in ODD if shape.kind != "mamba2"]
DTYPES = [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")]
DELTA_KINDS = ("gated_delta", "kimi_delta")


@pytest.mark.parametrize("kind", ["gated_delta", "kimi softplus", "kimi bounded"])
def test_recurrence_against_scalar_loops(kind: str) -> None:
    rng = np.random.default_rng(0)
    T, HV, HK, V, K = 5, 4, 2, 3, 2
    q, k = rng.normal(size=(2, 1, T, HK, K))
    v, b, A_log = rng.normal(size=(1, T, HV, V)), rng.normal(size=(1, T, HV)), rng.normal(size=HV)
    channels = (HV,) if kind == "gated_delta" else (HV, K)
    a, bias = rng.normal(size=(1, T, *channels)), rng.normal(size=channels)

    def gate(t: int, h: int, c: int) -> float:
        where = (h,) if kind == "gated_delta" else (h, c)
        shifted = a[(0, t, *where)] + bias[where]
        if kind == "kimi bounded":
            return -3.0 / (1 + math.exp(-math.exp(A_log[h]) * shifted))
        return -math.exp(A_log[h]) * math.log1p(math.exp(shifted))

    S, expected = np.zeros((HV, V, K)), np.zeros((T, HV, V))
    for t in range(T):
        for h in range(HV):
            qn, kn = (u[0, t, h // 2] / math.sqrt((u[0, t, h // 2] ** 2).sum() + 1e-6) for u in (q, k))
            beta = 1 / (1 + math.exp(-b[0, t, h]))
            for c in range(K):
                S[h, :, c] *= math.exp(gate(t, h, c))
            d = beta * (v[0, t, h] - S[h] @ kn)
            S[h] += np.outer(d, kn)
            expected[t, h] = S[h] @ qn / math.sqrt(K)
    form = {"gate": "bounded", "lower_bound": -3.0} if kind == "kimi bounded" else {}
    g, beta_ = delta_gates(*(torch.from_numpy(u) for u in (a, b, A_log, bias)), **form)
    state = torch.zeros(1, HV, V, K, dtype=torch.float64)
    o, state = gated_delta_recurrence(state, *(torch.from_numpy(u) for u in (q, k, v)), g, beta_)
    np.testing.assert_allclose(o[0].numpy(), expected, rtol=1e-12, atol=1e-13)
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


@pytest.mark.parametrize("kind", DELTA_KINDS)
@pytest.mark.parametrize("scale, qk_l2norm", [(None, False), (0.3, True), (1, False)])
def test_scale_and_norm(kind: str, scale: float | None, qk_l2norm: bool) -> None:
    # Without the norm |k| must stay below about 1, or the delta rule itself diverges.
    inputs = make_inputs(small_spec(kind, window=3, spec_len=2, qk_l2norm=qk_l2norm), 2, 12)
    inputs.tokens["k"] *= 0.3
    inputs.params["scale"] = scale
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(2, 6), expected, "float32")
    assert_close(run_scan(decoder.pool, [2], inputs, [(0, 0, 12)])[None], expected[:1], "float32", what="scan")
    assert_close(decoder.pool["state"][2], final[0], "float32", what="state")


@pytest.mark.parametrize("kind", DELTA_KINDS)
def test_zero_keys_and_queries(kind: str) -> None:
    """A key of zeros has norm 0: the eps inside the root keeps it finite, and the state only decays."""
    inputs = make_inputs(small_spec(kind, window=3), 1, 8)
    inputs.tokens["k"][:, 4:] = 0.0
    inputs.tokens["q"][:, 6:] = 0.0
    decoder = Decoder(inputs)
    expected, final = oracle(inputs)
    o = decoder.run(1, 8)
    assert_close(o[:, :6], expected[:, :6], "float32")
    assert (o[:, 6:] == 0).all()
    assert_close(decoder.state(0), final[0], "float32", what="state")


def test_bounded_gate_reaches_its_bound_and_no_further() -> None:
    spec = small_spec("kimi_delta", gate="bounded", gate_lower_bound=-2.5, window=4)
    inputs = make_inputs(spec, 1, 1)
    inputs.params["A_log"] = torch.zeros(4)
    inputs.params["dt_bias"] = torch.zeros(4, 8)
    inputs.tokens["a"][:] = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 30.0, 100.0, 1e4])
    decoder = Decoder(inputs)
    decoder.run(1, 1)
    g = decoder.pool["ring_g"][0, 0, 0]
    expected = -2.5 * torch.sigmoid(inputs.tokens["a"][0, 0, 0].double())
    torch.testing.assert_close(g.double(), expected, rtol=1e-6, atol=1e-30)
    assert g[0] == 0 and g[-1] == -2.5


@pytest.mark.parametrize("kind", DELTA_KINDS)
def test_strided_inputs(kind: str) -> None:
    """q, k and v as the model has them: slices of one convolution output."""
    spec = small_spec(kind, act_dtype="bfloat16", window=3, spec_len=2)
    inputs = make_inputs(spec, 2, 12)
    expected = Decoder(inputs).run(2, 6)
    parts = [inputs.tokens[name].flatten(2) for name in ("q", "k", "v")]
    packed = torch.cat([*parts, torch.full((2, 12, 5), float("nan"), dtype=torch.bfloat16)], dim=-1)
    for name, part in zip(("q", "k", "v"), packed[..., :-5].split([p.shape[-1] for p in parts], dim=-1), strict=True):
        inputs.tokens[name] = part.unflatten(-1, inputs.tokens[name].shape[2:])
    pool = StatePool.allocate(SlotLayout(spec), 2)
    steps = [run_step(pool, torch.arange(2), inputs, inputs.span(2 * i, 2 * i + 2)) for i in range(6)]
    assert torch.equal(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", DELTA_KINDS)
def test_beta_and_gate_are_not_rounded_to_the_activation_dtype(kind: str, act: str) -> None:
    """The ring's beta and g come from fp32 arithmetic on the raw inputs, for one token and for several."""
    inputs = make_inputs(small_spec(kind, act_dtype=act, window=8, spec_len=4), 1, 4)
    decoder = Decoder(inputs)
    decoder.step(4)
    beta = torch.sigmoid(inputs.tokens["b"].double())[0].T
    torch.testing.assert_close(decoder.pool["ring_beta"][0, :, :].double()[:, :4], beta, rtol=3e-7, atol=0)
    single = Decoder(inputs)
    single.run(1, 4)
    for name in ("ring_beta", "ring_g", "ring_k_rnorm", "ring_v", "ring_k"):
        assert torch.equal(single.pool[name][0][:, :4], decoder.pool[name][0][:, :4]), name


def _arguments(kind: str, scan: bool) -> dict[str, Any]:
    inputs = make_inputs(small_spec(kind, spec_len=2), 3, 2)
    tokens = inputs.span(0, 2)
    out = {**({n: v[0] for n, v in tokens.items()} if scan else tokens), **inputs.params}
    out["slots"] = torch.tensor([0] if scan else [0, 1, 2])
    if scan:
        out["cu_seqlens"] = torch.tensor([0, 2])
    return out


BAD: list[tuple[str, bool, dict[str, Any], str]] = [
    ("gated_delta", False, {"q": torch.zeros(3, 2, 2, 9)}, r"q has shape .* \[rows=3, T=2, HK=2, K=8\]"),
    ("gated_delta", False, {"q": torch.zeros(3, 5, 2, 8)}, "q carries 5 tokens a row; a step takes 1 to 2"),
    ("gated_delta", False, {"k": torch.zeros(3, 2, 4, 8)}, "k has shape"),
    ("gated_delta", False, {"v": torch.zeros(3, 2, 4, 16).bfloat16()}, "v is torch.bfloat16; it must be float32"),
    ("gated_delta", False, {"a": torch.zeros(3, 2, 4, 8)}, r"a has shape .* \[rows=3, T=2, HV=4\]"),
    ("gated_delta", False, {"dt_bias": torch.zeros(4, 8)}, r"dt_bias has shape .* \[HV=4\]"),
    ("gated_delta", False, {"scale": float("nan")}, "scale is nan; it must be a finite number"),
    ("gated_delta", False, {"scale": "1"}, "scale is '1'"),
    ("gated_delta", False, {"accepted": torch.zeros(1, dtype=torch.int32)}, "accepted has shape"),
    ("kimi_delta", False, {"a": torch.zeros(3, 2, 4)}, r"a has shape .* \[rows=3, T=2, HV=4, K=8\]"),
    ("kimi_delta", False, {"dt_bias": torch.zeros(4)}, r"dt_bias has shape .* \[HV=4, K=8\]"),
    ("kimi_delta", False, {"A_log": torch.zeros(4, 8)}, r"A_log has shape .* \[HV=4\]"),
    ("kimi_delta", False, {"b": torch.zeros(3, 2, 2)}, "b has shape"),
    ("kimi_delta", True, {"q": None}, "cu_seqlens is"),
    ("kimi_delta", True, {"v": torch.zeros(2, 4, 17)}, r"v has shape .* \[tokens=2, HV=4, V=16\]"),
    ("kimi_delta", True, {"scale": float("inf")}, "scale is inf"),
]


@pytest.mark.parametrize("kind, scan, change, message", BAD)
def test_bad_arguments(kind: str, scan: bool, change: dict[str, Any], message: str) -> None:
    pool = StatePool.allocate(SlotLayout(small_spec(kind, spec_len=2)), 4)
    before = pool.memory.clone()
    operation = gated_delta_scan if scan else gated_delta_step
    with pytest.raises(ReplayError, match=message):
        operation(pool, **{**_arguments(kind, scan), **change})
    assert torch.equal(pool.memory, before), "a refused call wrote to the pool"


def test_pool_of_another_kind_is_refused() -> None:
    pool = StatePool.allocate(SlotLayout(small_spec("mamba2", spec_len=2)), 4)
    with pytest.raises(
        ReplayError, match="pool holds mamba2; this operation needs a pool of gated_delta or kimi_delta"
    ):
        gated_delta_step(pool, **_arguments("gated_delta", False))


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_fp16_rows_of_a_large_state_stay_finite(kind):
    """d leaves fp16's range, the outputs do not: the ring keeps fp16's largest number, and later outputs are finite."""
    spec = small_spec(kind, act_dtype="float16", window=4, stagger=False)
    inputs = make_inputs(spec, 2, 6, regime="weak")
    pool, slots = StatePool.allocate(SlotLayout(spec), 2), torch.tensor([0, 1])
    pool["state"].copy_(torch.randn(pool["state"].shape, generator=torch.Generator().manual_seed(1)) * 1e5)
    largest = 0.0
    for t in range(6):
        o = gated_delta_step(pool, slots, **inputs.span(t, t + 1), **inputs.params, scale=0.02)
        assert torch.isfinite(o).all()
        largest = max(largest, float(pool["ring_d"].abs().max()))
    assert largest == torch.finfo(torch.float16).max
