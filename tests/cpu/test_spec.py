"""RecurrenceSpec and ConvSpec: values, round trips, every refused combination and what its message allows."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import ConvSpec, RecurrenceSpec, ReplayError

SIZES = {"nheads": 8, "ngroups": 2, "headdim": 64, "dstate": 128}


def spec(kind: str = "mamba2", **options: Any) -> RecurrenceSpec:
    return RecurrenceSpec(kind, **{**SIZES, **options})


def test_defaults() -> None:
    s = spec()
    assert (s.state_dtype, s.act_dtype, s.window, s.spec_len, s.read_copy) == ("float32", "bfloat16", 16, 1, "none")
    assert s.stagger and s.dt_softplus and s.qk_l2norm and s.dt_min == 0 and s.dt_max == math.inf
    assert s.heads_per_group == 4 and s.conv_channels == 8 * 64 + 2 * 2 * 128 and s.decay_dtype == "float32"
    assert spec(act_dtype="float64", state_dtype="float64").decay_dtype == "float64"


def test_frozen_and_hashable() -> None:
    assert len({spec(), spec(), spec(window=8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec().window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "window, spec_len, rows", [(16, 1, 17), (16, 4, 20), (1, 1, 2), (1, 4, 8), (3, 16, 32), (64, 16, 80), (4, 4, 8)]
)
def test_ring_rows(window: int, spec_len: int, rows: int) -> None:
    assert spec(window=window, spec_len=spec_len).ring_rows == rows


def test_first_limits() -> None:
    assert [spec(window=4).first_limit(slot) for slot in range(6)] == [4, 3, 2, 1, 4, 3]
    assert [spec(window=4, stagger=False).first_limit(slot) for slot in range(6)] == [4] * 6
    assert {spec(window=1).first_limit(slot) for slot in range(9)} == {1}


ALLOWED: list[dict[str, Any]] = [
    {"dt_min": 0.001, "dt_max": 0.1},
    {"dt_softplus": False, "dt_max": 0.0},
    {"kind": "gated_delta", "qk_l2norm": False},
    {"kind": "kimi_delta", "gate": "bounded", "gate_lower_bound": -0.5},
    {"window": 64, "spec_len": 16, "read_copy": "int8", "stagger": False},
    {"state_dtype": "bfloat16", "act_dtype": "float16", "read_copy": "fp8_e4m3"},
    {"state_dtype": "float64", "act_dtype": "float64", "read_copy": "bf16"},
    {"nheads": 1024, "ngroups": 1024, "headdim": 256, "dstate": 8},
]


@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_round_trip(options: dict[str, Any]) -> None:
    s = spec(**options)
    data = json.loads(json.dumps(s.to_dict(), allow_nan=False))
    assert RecurrenceSpec.from_dict(data) == s
    assert list(data) == [field.name for field in dataclasses.fields(s)]


def test_infinite_dt_max_is_legal_json() -> None:
    assert spec().to_dict()["dt_max"] == "inf"
    assert RecurrenceSpec.from_dict(spec().to_dict()).dt_max == math.inf


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "mamba1"}, "kind is 'mamba1'; it must be one of mamba2, gated_delta, kimi_delta"),
    ({"kind": None}, "kind is None"),
    ({"nheads": 0}, "nheads is 0; it must be a whole number from 1 to 1024"),
    ({"nheads": 1025, "ngroups": 1}, "nheads is 1025; it must be a whole number from 1 to 1024"),
    ({"nheads": 8.0}, "nheads is 8.0; it must be a whole number"),
    ({"nheads": True, "ngroups": 1}, "nheads is True; it must be a whole number"),
    ({"ngroups": 0}, "ngroups is 0; it must be a whole number from 1 to 1024"),
    ({"ngroups": 3}, "ngroups is 3; it must divide nheads, which is 8"),
    ({"ngroups": 16}, "ngroups is 16; it must divide nheads"),
    ({"headdim": 60}, "headdim is 60; it must be a multiple of 8 from 8 to 256"),
    ({"headdim": 4}, "headdim is 4; it must be a whole number from 8 to 256"),
    ({"headdim": 264}, "headdim is 264; it must be a whole number from 8 to 256"),
    ({"dstate": 100}, "dstate is 100; it must be a multiple of 8 from 8 to 256"),
    ({"dstate": "128"}, "dstate is '128'; it must be a whole number from 8 to 256"),
    ({"state_dtype": "int8"}, "state_dtype is 'int8'; it must be one of float32, bfloat16, float16, float64"),
    ({"act_dtype": "fp16"}, "act_dtype is 'fp16'; it must be one of bfloat16, float16, float32, float64"),
    ({"act_dtype": "float64"}, "state_dtype is float32 with act_dtype float64; float64 .* both or for neither"),
    ({"state_dtype": "float64"}, "state_dtype is float64 with act_dtype bfloat16"),
    ({"window": 0}, r"window is 0; it must be a whole number from 1 to 64 \(1 is conventional decoding\)"),
    ({"window": 65}, "window is 65; it must be a whole number from 1 to 64"),
    ({"spec_len": 0}, r"spec_len is 0; it must be a whole number from 1 to 16 \(1 \+ draft tokens\)"),
    ({"spec_len": 17}, "spec_len is 17; it must be a whole number from 1 to 16"),
    ({"read_copy": "fp8"}, "read_copy is 'fp8'; it must be one of none, bf16, fp8_e4m3, int8"),
    ({"read_copy": "bf16", "state_dtype": "bfloat16"}, "read_copy is bf16 .* use none, fp8_e4m3 or int8"),
    ({"read_copy": "bf16", "state_dtype": "float16"}, "read_copy is bf16 with state_dtype float16"),
    ({"stagger": 1}, "stagger is 1; it must be true or false"),
    ({"dt_softplus": "yes"}, "dt_softplus is 'yes'; it must be true or false"),
    ({"dt_min": -0.1}, "dt_min is -0.1 with dt_max inf; they must satisfy 0 <= dt_min <= dt_max"),
    ({"dt_min": 0.2, "dt_max": 0.1}, "dt_min is 0.2 with dt_max 0.1; they must satisfy"),
    ({"dt_min": math.inf}, "dt_min is inf; it must be finite"),
    ({"dt_max": math.nan}, "dt_max is nan; it must be a number"),
    ({"dt_max": True}, "dt_max is True; it must be a number"),
    ({"dt_min": "0"}, "dt_min is '0'; it must be a number"),
    ({"gate": "bounded"}, "gate is 'bounded' for kind mamba2; it applies to kimi_delta only"),
    ({"qk_l2norm": False}, "qk_l2norm is False for kind mamba2; it applies to gated_delta, kimi_delta only"),
    ({"kind": "gated_delta", "gate_lower_bound": -1.0}, "gate_lower_bound is -1.0 for kind gated_delta"),
    ({"kind": "gated_delta", "dt_max": 0.1}, "dt_max is 0.1 for kind gated_delta; it applies to mamba2 only"),
    ({"kind": "gated_delta", "dt_min": 0.1}, "dt_min is 0.1 for kind gated_delta"),
    ({"kind": "kimi_delta", "dt_softplus": False}, "dt_softplus is False for kind kimi_delta"),
    ({"kind": "kimi_delta", "gate": "sigmoid"}, "gate is 'sigmoid'; it must be one of softplus, bounded"),
    (
        {"kind": "kimi_delta", "gate_lower_bound": -5.1},
        "gate_lower_bound is -5.1; it must be from -5 up to, not includ",
    ),
    ({"kind": "kimi_delta", "gate_lower_bound": 0.0}, "gate_lower_bound is 0.0; it must be from -5"),
    ({"kind": "kimi_delta", "gate_lower_bound": math.nan}, "gate_lower_bound is nan; it must be a number"),
    ({"kind": "kimi_delta", "qk_l2norm": 0}, "qk_l2norm is 0; it must be true or false"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=lambda v: str(v)[:60])
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        spec(**options)


DATA: list[tuple[Any, str]] = [
    ([], "RecurrenceSpec data is list; it must be an object with named fields"),
    ({"kind": "mamba2"}, "RecurrenceSpec needs nheads, ngroups, headdim, dstate"),
    ({"kind": "mamba2", **SIZES, "windw": 3}, "RecurrenceSpec has no field windw; its fields are kind, nheads, "),
    ({"kind": "mamba2", **SIZES, "x": 1, 3: 2}, "RecurrenceSpec has no field 3, x; its fields"),
    ({"kind": "mamba2", **SIZES, "window": "inf"}, "window is inf; it must be a whole number"),
    ({"kind": "mamba2", **SIZES, "window": 0}, "window is 0"),
]


@pytest.mark.parametrize("data, message", DATA, ids=lambda v: str(v)[:40])
def test_from_dict_refuses(data: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        RecurrenceSpec.from_dict(data)


CONV_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"channels": 0}, "channels is 0; it must be a whole number from 8 to 65536"),
    ({"channels": 12}, "channels is 12; it must be a multiple of 8"),
    ({"channels": 65544}, "channels is 65544; it must be a whole number from 8 to 65536"),
    ({"kernel": 1}, "kernel is 1; it must be a whole number from 2 to 8"),
    ({"kernel": 9}, "kernel is 9; it must be a whole number from 2 to 8"),
    ({"act_dtype": "int8"}, "act_dtype is 'int8'; it must be one of bfloat16"),
    ({"spec_len": 17}, "spec_len is 17; it must be a whole number from 1 to 16"),
    ({"activation": "relu"}, "activation is 'relu'; it must be one of silu, none"),
]


@pytest.mark.parametrize("options, message", CONV_REFUSED, ids=lambda v: str(v)[:40])
def test_conv_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        ConvSpec(**{"channels": 64, **options})


def test_conv_round_trip() -> None:
    s = ConvSpec(64, kernel=3, act_dtype="float16", spec_len=5, activation="none")
    assert s.columns == 7 and ConvSpec(64).columns == 4
    assert ConvSpec.from_dict(json.loads(json.dumps(s.to_dict()))) == s
    with pytest.raises(ReplayError, match="ConvSpec has no field taps"):
        ConvSpec.from_dict({"channels": 64, "taps": 4})
    with pytest.raises(ReplayError, match="ConvSpec needs channels"):
        ConvSpec.from_dict({})


def test_shapes_of_published_models() -> None:
    for shape in (*MODELS.values(), *ODD):
        s = shape.spec(window=8)
        assert (s.kind, s.nheads, s.window) == (shape.kind, shape.nheads, 8)
        assert shape.conv_spec().channels == s.conv_channels
    super_ = MODELS["nemotron-3-super"]
    assert super_.split(1) == super_
    rank = super_.split(8)
    assert (rank.nheads, rank.ngroups, rank.name) == (16, 1, "nemotron-3-super-tp8")
    assert super_.split(16).spec().heads_per_group == 8
    with pytest.raises(ReplayError, match="ranks is 3; it must divide nemotron-3-super's 128 heads"):
        super_.split(3)
    with pytest.raises(ReplayError, match=r"ranks is 3; it must divide qwen3\.5-27b's 16 groups"):
        MODELS["qwen3.5-27b"].split(3)


def test_import_needs_no_torch() -> None:
    """The package, its specs and layouts load where torch is missing."""
    code = """
import sys
sys.modules["torch"] = None
import trtllm_replayssm, trtllm_replayssm.pool
print(trtllm_replayssm.SlotLayout(trtllm_replayssm.RecurrenceSpec("mamba2", 8, 2, 64, 128)).slot_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
