"""Emitted networks as data: options, tensors, profiles; views and outputs one by one. Needs no TensorRT."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from network_cases import CONFIGS, emit
from network_interpreter import Interpreter
from recorded_tensorrt import recorded_tensorrt

from trtllm_replayssm import ReplayError
from trtllm_replayssm.ops import tensorrt_network as tn
from trtllm_replayssm.ops.tensorrt_api import TensorRTApi
from trtllm_replayssm.ops.tensorrt_layers import Layers, Node
from trtllm_replayssm.ops.tensorrt_views import View

LIMITS = tn.ProfileLimits(max_batch=4, max_input_len=24, max_positions=32, slots=6, spec_len=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of bfloat16, float16, float32"),
        ({"replay": "none"}, "replay is 'none'; it must be one of plugin, io"),
        ({"max_positions": 0}, "max_positions is 0; it must be a whole number from 1"),
        ({"has_initial": 1}, "has_initial is 1; it must be true or false"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8'"),
    ],
)
def test_bad_options(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        tn.NetworkOptions(**{"dtype": "float16", "max_positions": 32, **change})


def test_objects_survive_json() -> None:
    options = tn.NetworkOptions("float16", 32, window=8)
    assert tn.NetworkOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    _, io = emit(recorded_tensorrt("8.6"), CONFIGS["nemotron_h"], options)
    assert tn.NetworkIO.from_dict(json.loads(json.dumps(io.to_dict()))) == io
    for cls, data, message in (
        (tn.NetworkOptions, {"dtype": "float16"}, "NetworkOptions needs max_positions"),
        (tn.NetworkOptions, {"dtype": "float16", "max_positions": 3, "depth": 1}, "NetworkOptions has no field depth"),
        (tn.NetworkIO, {}, "NetworkIO data must be an object with a list named tensors"),
        (tn.NetworkIO, {"tensors": [{"name": "x"}]}, "IOTensor needs role, dtype, shape, is_input"),
    ):
        with pytest.raises(ReplayError, match=message):
            cls.from_dict(data)


def test_profile_ranges() -> None:
    limits = tn.ProfileLimits(8, 64, 100, 10, spec_len=4)
    assert limits.ranges("context") == {
        "rows": (1, 8, 8), "tokens": (1, 32, 64), "slots": (1, 10, 10), "bound": (1, 1, 100), "logits": (1, 1, 1)
    }  # fmt: skip
    assert limits.ranges("context", continues=False)["bound"] == (1, 1, 1)
    generation = limits.ranges("generation")
    assert (generation["tokens"], generation["logits"], generation["bound"]) == ((1, 4, 4), (1, 4, 4), (1, 50, 100))
    tuned = dataclasses.replace(limits, context_logits=3, opt_batch=2, opt_input_len=5, opt_positions=7)
    context, generation = tuned.ranges("context"), tuned.ranges("generation")
    assert (context["rows"], context["tokens"], context["logits"]) == ((1, 2, 8), (1, 5, 64), (1, 1, 3))
    assert (generation["rows"], generation["bound"]) == ((1, 2, 8), (1, 7, 100))
    for change, message in (
        ({"slots": 7}, r"slots is 7; it must be a whole number from 8 to \d+ \(at least max_batch\)"),
        ({"max_input_len": 101}, r"max_input_len is 101; .* \(max_positions\)"),
        ({"opt_batch": 9}, r"opt_batch is 9; it must be a whole number from 1 to 8 \(max_batch\)"),
        ({"spec_len": 17}, "spec_len is 17"),
    ):
        with pytest.raises(ReplayError, match=message):
            dataclasses.replace(limits, **change)


def test_limits_that_the_caches_cannot_hold() -> None:
    trt = recorded_tensorrt("10")
    _, io = emit(trt, CONFIGS["nemotron_h"], tn.NetworkOptions("float32", 32, replay="io"))
    for change, message in (
        ({"max_positions": 33}, "max_positions is 33; kv_cache_1 has 32"),
        ({"slots": 1 << 24}, r"slots is 16777216; kv_cache_1 would have 2147483648 rows, more than int32 counts"),
    ):
        with pytest.raises(ReplayError, match=message):
            tn.add_profiles(trt, None, None, io, dataclasses.replace(LIMITS, **change))


@pytest.mark.parametrize(
    ("options", "most"), [({}, 32), ({"has_initial": False}, 1), ({"replay": "io", "has_initial": False}, 32)]
)
def test_prompts_in_pieces_need_the_caches(options: dict[str, Any], most: int) -> None:
    """The context profile reads cached positions where a call may go on with a prompt."""
    trt = recorded_tensorrt("10")
    _, io = emit(trt, CONFIGS["nemotron_h"], tn.NetworkOptions("float32", 32, spec_len=4, **options))
    shapes: list[dict[str, Any]] = []

    def profile() -> Any:
        shapes.append({})
        return SimpleNamespace(set_shape=lambda name, *spans: shapes[-1].update({name: spans}))

    config = SimpleNamespace(add_optimization_profile=lambda made: 0)
    tn.add_profiles(trt, SimpleNamespace(create_optimization_profile=profile), config, io, LIMITS)
    context, generation = shapes
    assert context["kv_index"] == ((1,), (1,), (most,)) and generation["kv_index"] == ((1,), (16,), (32,))
    assert context["input_ids"] == ((1, 1), (4, 12), (4, 24)) and generation["input_ids"] == ((1, 1), (4, 4), (4, 4))
    assert context["logit_index"] == ((1, 1), (4, 1), (4, 1))
    assert context["kv_cache_1"] == ((1, 2, 2, 32, 8), (6, 2, 2, 32, 8), (6, 2, 2, 32, 8))


def test_views_that_plugins_cannot_load_as_vectors() -> None:
    node = Node(None, "float16")
    for offset, total, aligned in ((0, 16, True), (8, 16, True), (4, 16, False), (8, 12, False), (4, 12, False)):
        assert View(node, offset, 4, total).is_aligned is aligned, (offset, total)
    assert View(Node(None, "float32"), 4, 4, 12).is_aligned


def test_a_tensor_may_be_several_outputs() -> None:
    """An input, and a tensor that is an output already, are copied: each output has its own name."""
    trt = recorded_tensorrt("10")
    network = tn.create_network(trt, trt.Builder)
    layers = Layers(TensorRTApi(trt), network)
    given = layers.input("given", ("rows",))
    made = layers.binary("SUM", given, given)
    for node, name in ((given, "a"), (made, "b"), (made, "c")):
        layers.output(node, name, ("rows",))
    assert [tensor.name for tensor in network.outputs] == ["a", "b", "c"] and given.tensor.name == "given"
    values = Interpreter(trt, network, layers.keep).run({"given": torch.tensor([2, 3], dtype=torch.int32)}, _nothing)
    assert [values[name].tolist() for name in "abc"] == [[2, 3], [4, 6], [4, 6]]


def _nothing(*_: Any) -> torch.Tensor:
    raise AssertionError("every input is given")
