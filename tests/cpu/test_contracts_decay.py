"""Decays from none at all to one that erases the state within a token, in every window, against float64.

Expected error: replay_cases.RELATIVE_BOUND; every exponent is a sum of numbers <= 0, so no decay overflows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_cases import REGIMES, Decoder, assert_close, make_inputs, oracle, run_scan, small_spec

from benchmarks.shapes import MODELS, ODD

FORMS: dict[str, dict[str, Any]] = {
    "mamba2": {"kind": "mamba2"},
    "gdn": {"kind": "gated_delta"},
    "kda softplus": {"kind": "kimi_delta"},
    "kda bounded": {"kind": "kimi_delta", "gate": "bounded"},
}


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
@pytest.mark.parametrize("window, tokens", [(1, 1), (16, 1), (16, 4), (17, 16), (64, 3)])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("form", FORMS)
def test_decay_regimes(form: str, regime: str, window: int, tokens: int, act: str) -> None:
    inputs = make_inputs(small_spec(**FORMS[form], window=window, spec_len=tokens, act_dtype=act), 2, 48, regime=regime)
    steps = 48 // tokens
    expected, final = oracle(inputs, 0, steps * tokens)
    decoder = Decoder(inputs)
    assert_close(decoder.run(tokens, steps), expected, act)
    assert_close(decoder.state(1), final[1], "float32", what="state")
    scanned = run_scan(decoder.pool, [0], inputs, [(0, 0, steps * tokens)])
    assert_close(scanned[None], expected[:1], act, what="scan")


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
def test_kda_at_its_bound_for_a_whole_window(act: str) -> None:
    """g = -5 in every channel and step, window 16: exp(+-80) must not appear, since exp(-G) at the end leaves fp32."""
    spec = small_spec("kimi_delta", gate="bounded", window=16, spec_len=4, act_dtype=act, stagger=False)
    inputs = make_inputs(spec, 2, 64, regime="strong")
    decoder = Decoder(inputs)
    y = decoder.run(4, 16)
    assert (decoder.pool["ring_g"][:2, :, :16] == -5).all()
    assert_close(y, oracle(inputs)[0], act)


@pytest.mark.parametrize("form", FORMS)
def test_decay_that_differs_by_head_and_token(form: str) -> None:
    """Erasing and keeping heads side by side, and a window whose decay changes from token to token."""
    inputs = make_inputs(small_spec(**FORMS[form], window=16, spec_len=4, stagger=False), 2, 64)
    name = "dt" if form == "mamba2" else "a"
    gate = inputs.tokens[name]
    gate[:, ::5, 1] = 30.0
    gate[:, 1::5, 2] = -30.0
    gate[:, :, 3] = -30.0
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(4, 16), expected, "float32")
    assert_close(decoder.state(0), final[0], "float32", what="state")


@pytest.mark.parametrize("form", FORMS)
def test_very_large_states(form: str) -> None:
    """States of 1e30 decode without overflow in fp32."""
    inputs = make_inputs(small_spec(**FORMS[form], window=4, spec_len=2), 2, 12, regime="trained")
    name = "x" if form == "mamba2" else "v"
    inputs.tokens[name].mul_(1e30)
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(2, 6), expected, "float32")
    assert_close(decoder.state(0), final[0], "float32", what="state")


@pytest.mark.parametrize("window, tokens", [(1, 2), (2, 3), (3, 1), (17, 5)])
@pytest.mark.parametrize("shape", ODD, ids=lambda s: s.name)
def test_odd_shapes(shape: Any, window: int, tokens: int) -> None:
    """3 and 14 heads per group, headdim 48 and 80, dstate 96, in windows that are no power of two."""
    inputs = make_inputs(shape.spec(window=window, spec_len=tokens), 2, 8 * tokens)
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(tokens, 8), expected, "bfloat16")
    assert_close(decoder.state(1), final[1], "float32", what="state")


@pytest.mark.parametrize("name", ["nemotron-3-nano-4b", "nemotron-3-super", "qwen3.5-27b", "kimi-k3"])
def test_published_layers(name: str) -> None:
    """One rank's share of a published layer, two rows, across a flush."""
    shape = MODELS[name].split(8)
    inputs = make_inputs(shape.spec(window=4, spec_len=2), 2, 8, regime="trained")
    expected, final = oracle(inputs)
    decoder = Decoder(inputs)
    assert_close(decoder.run(2, 4), expected, "bfloat16")
    assert_close(decoder.state(0), final[0], "float32", what="state")
    assert torch.isfinite(decoder.pool["state"]).all()
