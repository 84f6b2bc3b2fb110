"""The read copy: outputs read copy * scale in place of the state; the fold never sees it.

Expected output error with a copy, relative: one rounding of the state's elements to the copy's format, which the sum
over dstate averages. bf16: 2^-9 / sqrt(3) of each element. e4m3: 2^-4 / sqrt(3) of each. int8: 1 / (254 sqrt(3)) of the
row's largest element, which is 2 to 3 times its rms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_cases import KINDS, Decoder, Inputs, make_inputs, oracle, relative_error, run_scan, small_spec, state_after

from trtllm_replayssm import reference
from trtllm_replayssm.reference.slots import COPY_MAX, store_state

COPIES = ("bf16", "fp8_e4m3", "int8")
#: Bounds of the relative output error; at least a third of them is seen, so a copy that is not read fails too.
OUTPUT_BOUND = {"bf16": 2.5e-3, "fp8_e4m3": 4e-2, "int8": 1e-2}


def expected_copy(state: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The copy [.., P, N] as float and its scale [.., P], one element after another."""
    if kind == "bf16":
        return state.bfloat16().float(), None
    top = {"fp8_e4m3": 448.0, "int8": 127.0}[kind]
    amax = state.abs().amax(-1)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / top)
    value = state / scale[..., None]
    return (value.to(torch.float8_e4m3fn).float() if kind == "fp8_e4m3" else torch.round(value)), scale


def check_copy(decoder: Decoder, copy: str) -> None:
    """The copy in every slot in use is that of the checkpoint in it."""
    for slot in decoder.slots.tolist():
        value, scale = expected_copy(decoder.pool["state"][slot].float(), copy)
        assert torch.equal(decoder.pool["read_copy"][slot].float(), value)
        if scale is None:
            assert "read_scale" not in decoder.pool
        else:
            assert torch.equal(decoder.pool["read_scale"][slot], scale)


def decoded(kind: str, copy: str, **options: Any) -> tuple[Inputs, Decoder, torch.Tensor]:
    inputs = make_inputs(
        small_spec(kind, dstate=64, window=6, spec_len=2, read_copy=copy, **options), 3, 60, regime="trained"
    )
    decoder = Decoder(inputs)
    run_scan(decoder.pool, [0, 1, 2], inputs, [(row, 0, 20) for row in range(3)])
    decoder.done[:] = 20
    return inputs, decoder, decoder.run(2, 20)


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_fold_is_unaffected_and_output_error_bounded(kind: str, copy: str, act: str) -> None:
    inputs, plain, _ = decoded(kind, "none", act_dtype=act)
    _, decoder, y = decoded(kind, copy, act_dtype=act)
    assert torch.equal(decoder.pool["state"][:3], plain.pool["state"][:3])
    assert torch.equal(decoder.state(1), plain.state(1))
    check_copy(decoder, copy)
    assert torch.isfinite(y).all()
    error = relative_error(y, oracle(inputs)[0][:, 20:])
    assert OUTPUT_BOUND[copy] / 20 < error < OUTPUT_BOUND[copy]


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_write_of_the_state_writes_the_copy(kind: str, copy: str) -> None:
    inputs = make_inputs(small_spec(kind, window=3, spec_len=2, read_copy=copy), 2, 12)
    decoder = Decoder(inputs, slots=[1, 0])
    run_scan(decoder.pool, [1, 0], inputs, [(0, 0, 4), (1, 0, 4)])
    check_copy(decoder, copy)
    decoder.done[:] = 4
    for _ in range(4):
        decoder.step(2)
        check_copy(decoder, copy)
    state_after(decoder.pool, 0, inputs, spare=1)
    check_copy(decoder, copy)
    reference.reset(decoder.pool, torch.tensor([0]))
    check_copy(decoder, copy)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_read_nothing_but_the_copy(kind: str, copy: str) -> None:
    """With a state of NaN a step that does not fold still works; with a copy of NaN it does not."""
    inputs, decoder, _ = decoded(kind, copy, stagger=False)
    state_after(decoder.pool, 0, inputs, spare=0)
    state_after(decoder.pool, 1, inputs, spare=1)
    decoder.pool["state"][0] = float("nan")
    decoder.pool["read_copy" if copy != "int8" else "read_scale"][1] = float("nan")
    decoder.done[:2] += decoder.kept[:2]
    decoder.done[:2] -= 2
    decoder.kept[:2] = 0
    y = decoder.step(2)[1]
    assert torch.isfinite(y[0]).all() and torch.isnan(y[1]).any()


@pytest.mark.parametrize("copy", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
def test_copy_of_a_16_bit_state_is_that_of_the_rounded_state(state_dtype: str, copy: str) -> None:
    _, decoder, _ = decoded("mamba2", copy, state_dtype=state_dtype)
    check_copy(decoder, copy)


@pytest.mark.parametrize("copy", ["fp8_e4m3", "int8"])
def test_copy_of_extreme_rows(copy: str) -> None:
    """Zero rows have scale 1; the largest element is met exactly; tiny, huge and denormal rows stay finite."""
    inputs = make_inputs(small_spec("mamba2", read_copy=copy), 1, 4)
    decoder = Decoder(inputs)
    rows = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(1))
    rows[0, 0] = 0.0
    for p, factor in enumerate([1e-45, 1e-42, 1e-38, 1e-30, 1e30, 3e37]):
        rows[1, p] *= factor / rows[1, p].abs().max()
    store_state(decoder.pool, torch.tensor([0]), rows[None])
    scale, value = decoder.pool["read_scale"][0], decoder.pool["read_copy"][0].float()
    assert scale[0, 0] == 1 and (value[0, 0] == 0).all() and (scale > 0).all()
    assert torch.isfinite(value).all() and torch.isfinite(scale).all() and value.abs().max() == COPY_MAX[copy]
    normal = rows.abs().amax(-1) > 1e-35  # below, the scale itself is a denormal with few bits
    back = value * scale[..., None]
    # Half a step of the copy: 1/254 of the row's largest for int8; 2^-4 of the element or 2^-10 of scale for e4m3.
    step = rows.abs() / 16 + scale[..., None] / 1024 if copy == "fp8_e4m3" else scale[..., None].expand_as(rows) * 0.5
    assert ((back - rows).abs() <= step * (1 + 1e-5))[normal].all()
    assert ((back - rows).abs() <= rows.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("copy", COPIES)
def test_float64_spec_with_copy(copy: str) -> None:
    spec = small_spec("gated_delta", act_dtype="float64", state_dtype="float64", window=4, read_copy=copy)
    inputs = make_inputs(spec, 2, 20, regime="trained")
    decoder = Decoder(inputs)
    y = decoder.run(1, 20)
    assert relative_error(y, oracle(inputs)[0]) < OUTPUT_BOUND[copy]
    assert relative_error(decoder.state(0), oracle(inputs)[1][0]) < 1e-14
