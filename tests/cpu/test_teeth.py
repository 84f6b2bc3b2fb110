"""The comparisons of the contract tests have teeth: one cached value changed by a little must fail them.

Also the comparators: they fail on NaN and infinity, on cancelling errors, on one wrong element and on -0 for 0.
"""

from __future__ import annotations

import pytest
import torch
from replay_cases import KINDS, Decoder, assert_close, assert_same_bits, make_inputs, oracle, relative_error, small_spec

from trtllm_replayssm.pool import StatePool

#: region: what a change of one live value in it must break.
EFFECTS = {
    "mamba2": {"state": "ys", "ring_x": "ys", "ring_b": "ys", "ring_dt": "ys"},
    "gated_delta": {
        "state": "ys",
        "ring_k": "ys",
        "ring_k_rnorm": "ys",
        "ring_v": "s",  # raw v is for the fold
        "ring_d": "y",  # d is for reads
        "ring_g": "ys",
        "ring_beta": "s",
    },
}
EFFECTS["kimi_delta"] = EFFECTS["gated_delta"]
CASES = [(kind, region) for kind in KINDS for region in EFFECTS[kind]]


def _damage(pool: StatePool, region: str, head: int, row: int, factor: float) -> None:
    """Multiply one value of slot 0, the largest of its row (so that it is not a zero that changes)."""
    view = pool[region][0]
    values = view[head] if region == "state" else view[head, row]
    flat = values.reshape(-1)
    index = int(flat.float().abs().argmax())
    flat[index] = flat[index] * factor
    if values.dim():
        values.copy_(flat.reshape(values.shape))
    else:
        view[head, row] = flat[0]


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind, region", CASES)
def test_one_damaged_value_fails(kind: str, region: str, act: str) -> None:
    spec = small_spec(kind, window=16, spec_len=2, act_dtype=act, stagger=False)
    inputs = make_inputs(spec, 1, 32, regime="trained")
    expected, states = oracle(inputs)[0], {}
    outputs = {}
    for damaged in (False, True):
        decoder = Decoder(inputs)
        decoder.run(2, 12)  # folded at 16 tokens, then 6 committed and 2 pending
        origin, history, pending, _ = decoder.pool["cursor"][0, 0, 0].tolist()
        assert history == 6 and pending == 2
        if damaged:
            before = decoder.pool.memory.clone()
            # 20 % of one value is far outside fp32's bounds; 16-bit outputs do not show less than a factor of 4.
            factor = 1.2 if act == "float32" else 4.0
            _damage(decoder.pool, region, 1, (origin + 2) % spec.ring_rows, factor)
            assert 1 <= int((decoder.pool.memory != before).sum()) <= 4
        outputs[damaged] = decoder.step(2)[1]
        states[damaged] = decoder.state(0)
    assert_close(outputs[False], expected[:, 24:26], act)
    final = oracle(inputs, 0, 26)[1][0]
    assert_close(states[False], final, "float32", what="state")
    for letter, check in (
        ("y", lambda: assert_close(outputs[True], expected[:, 24:26], act)),
        ("s", lambda: assert_close(states[True], final, "float32", what="state")),
        ("s", lambda: assert_same_bits(states[True], states[False])),
    ):
        if letter in EFFECTS[kind][region]:
            with pytest.raises(AssertionError):
                check()
        else:
            check()


@pytest.mark.parametrize("word", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_one_damaged_cursor_word_fails(kind: str, word: int) -> None:
    """A cursor word that is off by one changes outputs or states (limit: the step that flushes)."""
    inputs = make_inputs(small_spec(kind, window=8, spec_len=2, stagger=False), 1, 32, regime="trained")
    results = []
    for change in (0, -1):
        decoder = Decoder(inputs)
        decoder.run(2, 3)
        decoder.pool["cursor"][0, :, :, word] += change
        decoder.pool["cursor"][0, :, :, 0] %= inputs.spec.ring_rows
        y = decoder.step(2)[1]
        results.append((y, decoder.pool["state"][0].clone()))
    assert not all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_close(results[0][0], oracle(inputs)[0][:, 6:8], "float32")
    if word != 3:
        with pytest.raises(AssertionError):
            assert_close(results[1][0], oracle(inputs)[0][:, 6:8], "float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_comparators_fail_on_non_finite_values(value: float) -> None:
    ref = torch.ones(2, 3, 4)
    out = ref.clone()
    out[1, 2, 3] = value
    with pytest.raises(AssertionError, match="1 values are not finite"):
        assert_close(out, ref, "float32")
    with pytest.raises(AssertionError, match="oracle is not finite"):
        assert_close(ref, out, "float32")
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(out, out, "float32")
    with pytest.raises(AssertionError, match="not finite"):
        assert_same_bits(out, out)
    assert relative_error(out, ref) == float("inf")


def test_comparators_fail_on_small_and_cancelling_errors() -> None:
    ref = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0))
    assert_close(ref, ref, "float32")
    assert_same_bits(ref, ref.clone())
    noise = torch.ones_like(ref)
    noise[..., ::2] = -1.0  # errors that sum to zero
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(ref + 2e-6 * noise, ref, "float32")
    one = ref.clone()
    one[1, 1, 7] += 2e-5
    with pytest.raises(AssertionError, match="an element is"):
        assert_close(one, ref, "float32")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(ref[:1], ref, "float32")
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_same_bits(one, ref)
    with pytest.raises(AssertionError, match="1 bytes differ"):
        assert_same_bits(torch.tensor([-0.0]), torch.tensor([0.0]))
    with pytest.raises(AssertionError, match="float64"):
        assert_same_bits(ref.double(), ref)
