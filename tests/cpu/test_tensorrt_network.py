"""Emitted TensorRT networks: what they compute, what they read, and that a real builder takes them.

Oracle of the numbers: TorchOps, operation by operation (network_cases.py), over prompts of different lengths, a prompt
in pieces, steps with pad rows, drafts of four tokens with rejections, slots that are used again. Errors are in units of
each result's largest value: fp32 1e-5 (order of sums); 16 bits 8 eps (single roundings that fall the other way, and
torch's own 16-bit attention). KV caches start as NaN. The builder is TensorRT-RTX's, on the CPU; networks with plugins
are emitted into recorded_tensorrt.py, since TensorRT-RTX networks take none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import network_cases as cases
import numpy as np
import pytest
import torch
from network_cases import CONFIGS, Row, Twice, conversation, emit, random_weights
from recorded_tensorrt import recorded_tensorrt

from trtllm_replayssm import ConvLayout, ReplayError, SlotLayout
from trtllm_replayssm.models.checkpoint import convert
from trtllm_replayssm.models.host_weights import HostWeight, host_weights, load_host_checkpoint
from trtllm_replayssm.ops import tensorrt_network as tn
from trtllm_replayssm.plugins import last_error, library_path, plugin_fields, register

rtx = pytest.importorskip("tensorrt_rtx", reason="needs the PyPI package tensorrt-rtx (its builder runs without a GPU)")

ROOT = Path(__file__).resolve().parents[2]
LIMITS = tn.ProfileLimits(max_batch=4, max_input_len=24, max_positions=32, slots=6, spec_len=4)


@pytest.fixture(scope="module")
def builder() -> Any:
    """A real builder, on the CPU."""
    return rtx.Builder(rtx.Logger(rtx.Logger.ERROR))


def plugins_of(network: Any) -> list[Any]:
    """Plugin layers of a recorded network."""
    return [layer for layer in network.layers if layer.type.name.startswith("PLUGIN")]


@pytest.mark.parametrize("dtype", sorted(cases.TOLERANCE))
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_result_of_a_real_network(kind: str, dtype: str, builder: Any) -> None:
    model = Twice(rtx, CONFIGS[kind], dtype, "io", builder=builder)
    conversation(model)
    assert model.compared > 10_000 and model.worst <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("version", "dtype"), [("8.6", "float32"), ("8.6", "float16"), ("10", "float32"), ("10", "bfloat16")]
)
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_result_of_a_network_with_plugins(kind: str, version: str, dtype: str) -> None:
    model = Twice(recorded_tensorrt(version), CONFIGS[kind], dtype, "plugin")
    conversation(model)
    assert model.compared > 10_000 and model.worst <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_pad_tokens_reach_no_other(kind: str, dtype: str) -> None:
    """The tokens behind a row's own are NaN all the way through the network; the row's results are torch's."""
    config = dataclasses.replace(CONFIGS[kind], tie_embeddings=False)
    weights = random_weights(config, dtype)
    weights["embedding.weight"][0] = torch.nan
    model = Twice(recorded_tensorrt("8.6"), config, dtype, "plugin", weights=weights)
    model.call(tn.CONTEXT, [Row(2, 0, [3, 4, 5, 6, 7, 8]), Row(0, 0, [9, 2]), Row(1, 0, [1])])
    model.call(tn.CONTEXT, [Row(0, 2, [1]), Row(1, 1, [5, 6, 7])])
    model.call(tn.GENERATION, [Row(slot, place, [7, 8]) for slot, place in ((2, 6), (0, 3), (1, 4))])
    padded = [value for name, value in model.values.items() if name.startswith("new_kv")]
    assert all(torch.isfinite(value).all() for value in padded), "generation has no pad tokens"
    assert model.compared > 2000 and model.worst <= cases.TOLERANCE[dtype]


def test_every_result_with_the_bounded_gate() -> None:
    config = dataclasses.replace(CONFIGS["kimi_linear"], gate="bounded", gate_lower_bound=-3.0)
    model = Twice(recorded_tensorrt("10"), config, "float32", "plugin", window=4, stagger=False)
    conversation(model)
    assert model.compared > 10_000 and model.worst <= cases.TOLERANCE["float32"]


@pytest.mark.parametrize("kind", ["biases", "kimi_linear"])
def test_float32_products_round_once(kind: str) -> None:
    model = Twice(recorded_tensorrt("10"), CONFIGS[kind], "bfloat16", "plugin", float32_matmul=True)
    conversation(model)
    assert model.compared > 10_000 and model.worst <= cases.TOLERANCE["bfloat16"]
    products = [layer for layer in model.network.layers if layer.type.name == "MATRIX_MULTIPLY"]
    assert {layer.get_output(0).dtype.name for layer in products} == {"FLOAT"}


@pytest.mark.parametrize("damage", ["weight", "address", "mask"])
def test_teeth(damage: str) -> None:
    """One wrong constant of the network shows: a matrix, a head's place in the KV cache, a hidden key's place."""
    model = Twice(recorded_tensorrt("8.6"), CONFIGS["qwen3_5"], "float32", "plugin")
    constants = [layer for layer in model.network.layers if layer.type.name == "CONSTANT"]

    def spoil(chosen: Any) -> None:
        array = np.array(chosen.weights)
        array.flat[-1] = array.flat[-1] + 1 if damage != "mask" else -1
        object.__setattr__(chosen, "weights", array)

    if damage == "weight":
        spoil(next(layer for layer in constants if layer.name == "layers.1.mixer.up_proj.weight" or
                   layer.name == "layers.1.mixer.gate_up_proj.weight"))  # fmt: skip
    elif damage == "address":
        spoil(next(layer for layer in constants if layer.shape == (1, 2, 1)))
    else:
        spoil(next(layer for layer in constants if layer.weights.size == 1 and int(layer.weights.flat[0]) == 1 << 30))
    conversation(model)
    assert model.worst > 1e-3


@pytest.mark.parametrize("kind", ["nemotron-h", "qwen3_5"])
def test_the_builder_takes_the_trained_models(kind: str, builder: Any, tmp_path: Path) -> None:
    convert(ROOT / "examples" / "models" / f"tiny-{kind}", tmp_path / "checkpoint")
    config, weights = load_host_checkpoint(tmp_path / "checkpoint")
    options = tn.NetworkOptions("bfloat16" if kind == "qwen3_5" else "float32", 256, replay="io", spec_len=4)
    network, io = emit(rtx, config, options, weights, builder)
    builder_config = builder.create_builder_config()
    tn.configure_builder(rtx, builder_config, options, workspace_bytes=1 << 28)
    limits = dataclasses.replace(LIMITS, max_positions=256, max_input_len=64)
    assert tn.add_profiles(rtx, builder, builder_config, io, limits) == ("context", "generation")
    assert builder_config.num_optimization_profiles == 2
    engine = builder.build_serialized_network(network, builder_config)
    assert engine is not None and engine.nbytes > 1 << 20


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("nemotron_h", "float16"), ("qwen3_5", "bfloat16"), ("kimi_linear", "float16"), ("biases", "float32")],
)
def test_the_builder_takes_every_family(kind: str, dtype: str, builder: Any) -> None:
    options = tn.NetworkOptions(dtype, 32, replay="io", spec_len=4)
    network, io = emit(rtx, CONFIGS[kind], options, builder=builder)
    builder_config = builder.create_builder_config()
    tn.configure_builder(rtx, builder_config, options)
    tn.add_profiles(rtx, builder, builder_config, io, LIMITS)
    assert builder.build_serialized_network(network, builder_config) is not None
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    assert names == {tensor.name for tensor in io.inputs}
    for i in range(network.num_outputs):
        tensor = network.get_output(i)
        entry = io.get(tensor.name)
        assert entry is not None and tuple(tensor.shape) == entry.dims, tensor.name
        assert tensor.dtype == getattr(rtx, entry.dtype), tensor.name


def uses_of_shapes(network: Any) -> list[str]:
    """Where a value computed from shapes is anything but the sizes of a slice or a view: layer and input, or output."""
    derived = {id(layer.get_output(0)) for layer in network.layers if layer.type.name == "SHAPE"}
    uses = []
    for layer in network.layers:
        for i in range(layer.num_inputs):
            tensor = layer.get_input(i)
            if tensor is None or id(tensor) not in derived:
                continue
            if layer.type.name == "CONCATENATION":
                derived.add(id(layer.get_output(0)))
            elif (layer.type.name, i) not in (("SLICE", 2), ("SHUFFLE", 1)):
                uses.append(f"{layer.name} input {i}")
    return uses + [tensor.name for tensor in network.outputs if id(tensor) in derived]


@pytest.mark.parametrize("replay", ["plugin", "io"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_shapes_are_sizes_alone(kind: str, replay: str) -> None:
    """What TensorRT computes on the host is not copied to the device: it is no operand of any layer."""
    for version in ("8.6", "10"):
        network, _ = emit(recorded_tensorrt(version), CONFIGS[kind], tn.NetworkOptions("float32", 32, replay=replay))
        kinds = [layer.type.name for layer in network.layers]
        assert kinds.count("SHAPE") == 1 and "SLICE" in kinds and "FILL" not in kinds
        assert uses_of_shapes(network) == []
        shape = next(layer for layer in network.layers if layer.type.name == "SHAPE").get_output(0)
        shape.name = "shape"
        first = network.add_constant((1,), recorded_tensorrt(version).Weights(np.zeros(1, np.int32))).get_output(0)
        network.add_gather(shape, first, 0).name = "a gather"
        network.mark_output(shape)
        assert uses_of_shapes(network) == ["a gather input 0", "shape"]


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e7])
def test_rotation_at_far_positions(theta: float) -> None:
    """The tables against torch's own cos and sin, up to position 2^18.

    Expected error: a bit of a frequency (2^-24) times the position, in few channels of low frequency.
    """
    far = 1 << 18
    config = dataclasses.replace(CONFIGS["qwen3_5"], head_dim=64, rotary_dim=64, rope_theta=theta, max_positions=far)
    network, _ = emit(recorded_tensorrt("10"), config, tn.NetworkOptions("float32", far))
    tables = {layer.name: layer.weights for layer in network.layers if layer.name.startswith("rotation.64.")}
    angles = torch.arange(far).float()[:, None] * theta ** -(torch.arange(0, 64, 2).float() / 64)
    for label, want in (("cos", angles.cos()), ("sin", angles.sin())):
        got = torch.from_numpy(tables[f"rotation.64.{theta}.{label}"])
        assert got.shape == (far, 33) and float((got[:, :32] - want).abs().max()) < 2e-4
        assert (got[:, 32] == (label == "cos")).all()


def test_plugins_read_views_in_place_where_vectors_are_aligned() -> None:
    """fp32: the operands are offsets into the projections, no slices. fp16: rows of 264 bytes are cut out first."""
    config = CONFIGS["nemotron_h"]
    network, _ = emit(recorded_tensorrt("8.6"), config, tn.NetworkOptions("float32", 32))
    conv, mamba = plugins_of(network)[:2]
    assert conv.plugin.fields["x_offset"] == 32
    offsets = {name: int(mamba.plugin.fields[f"{name}_offset"]) for name in ("x", "b", "c", "dt", "z")}
    assert offsets == {"x": 0, "b": 32, "c": 64, "dt": 128, "z": 0}
    inputs = [mamba.get_input(i) for i in range(mamba.num_inputs)]
    projected = conv.get_input(0)
    assert inputs[2] is projected and inputs[-2] is projected, "dt and z"
    assert inputs[0] is inputs[5] is inputs[6] is conv.get_output(0), "x, B and C"
    cut = [layer for layer in network.layers if layer.type.name == "SLICE"]
    assert all("mixer" in layer.name and "in_proj" not in layer.name for layer in cut)
    assert len(cut) == 2 * 3, "q, k and v of each attention layer"

    network, _ = emit(recorded_tensorrt("8.6"), config, tn.NetworkOptions("float16", 32))
    conv, mamba = plugins_of(network)[:2]
    assert conv.plugin.fields["x_offset"] == 0 and mamba.plugin.fields["z_offset"] == 0
    assert mamba.plugin.fields["dt_offset"] == 128, "dt is read by element, where it lies"
    assert mamba.plugin.fields["b_offset"] == 32, "the convolution's rows are aligned"
    cut = [layer for layer in network.layers if layer.type.name == "SLICE"]
    assert len(cut) == 2 * 3 + 2 * 2, "and x and z of each Mamba-2 layer"


def test_inputs_follow_the_options() -> None:
    config = CONFIGS["nemotron_h"]
    trt = recorded_tensorrt("8.6")
    _, io = emit(trt, config, tn.NetworkOptions("float16", 32, window=8, has_initial=False))
    names = [tensor.name for tensor in io.inputs]
    assert "accepted" not in names and "has_initial" not in names
    host = io.get("host_request_types")
    assert host is not None and host.location == "host" and host.shape == ("rows",)
    spec = config.recurrence_spec(window=8, act_dtype="float16")
    state, conv = io.get("replay_state_0"), io.get("conv_state_2")
    assert state is not None and state.shape == ("slots", SlotLayout(spec).slot_bytes // 4) and state.layer == 0
    assert conv is not None
    assert conv.shape == ("slots", ConvLayout(config.conv_spec(act_dtype="float16")).slot_bytes // 4)
    index, token = io.get("kv_index"), io.get("token_index")
    assert index is not None and index.shape == ("bound",) and index.role == "kv_index"
    assert token is not None and token.shape == ("tokens",) and token.dtype == "int32" and token.role == "token_index"
    cache, new = io.get("kv_cache_1"), io.get("new_kv_1")
    assert cache is not None and cache.shape == ("slots", 2, 2, 32, 8) and cache.dtype == "float16"
    assert new is not None and new.shape == ("rows", "tokens", 2, 2, 8) and not new.is_input
    logits = io.by_role("logits")[0]
    assert logits.shape == ("rows", "logits", 37) and logits.dtype == "float32"
    _, io = emit(trt, CONFIGS["kimi_linear"], tn.NetworkOptions("float16", 32, spec_len=4))
    cache = io.get("kv_cache_1")
    assert cache is not None and cache.shape == ("slots", 1, 1, 32, 19)
    assert io.get("accepted") is not None and io.get("has_initial") is not None
    bare = dataclasses.replace(config, layers=("mamba2", "mlp"))
    _, io = emit(trt, bare, tn.NetworkOptions("float16", 32))
    for name in ("positions", "kv_index", "token_index"):
        assert io.get(name) is None, "no attention reads it"


def test_axes_of_one_length_have_one_name(builder: Any) -> None:
    """TensorRT is told which lengths are equal: those of the same axis."""
    network, io = emit(rtx, CONFIGS["kimi_linear"], tn.NetworkOptions("float32", 32, replay="io"), builder=builder)
    assert network.num_inputs == len(io.inputs)
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        entry = io.get(tensor.name)
        assert entry is not None
        for at, axis in enumerate(entry.shape):
            assert tensor.get_dimension_name(at) == (axis if isinstance(axis, str) else None), tensor.name


def test_plugin_fields_carry_the_spec() -> None:
    config = dataclasses.replace(CONFIGS["nemotron_h"], dt_min=0.01, dt_max=0.5)
    options = tn.NetworkOptions(
        "float16", 32, window=8, spec_len=2, stagger=False, state_dtype="float16", exact_scan=True
    )
    network, _ = emit(recorded_tensorrt("10"), config, options)
    fields = {key: value.item() for key, value in plugins_of(network)[1].plugin.fields.items()}
    expected = {"window": 8, "spec_len": 2, "stagger": 0, "state_type_id": 1, "type_id": 1, "exact_scan": 1}
    expected |= {"paged_state": 0, "remove_input_padding": 0, "has_accepted": 1, "has_initial": 1, "z_enabled": 1}
    assert {key: fields[key] for key in expected} == expected
    assert fields["dt_min"] == pytest.approx(0.01) and fields["dt_max"] == 0.5
    config = dataclasses.replace(CONFIGS["kimi_linear"], gate="bounded", gate_lower_bound=-3.0)
    network, _ = emit(recorded_tensorrt("10"), config, tn.NetworkOptions("float16", 32))
    fields = {key: value.item() for key, value in plugins_of(network)[1].plugin.fields.items()}
    assert (fields["kind"], fields["gate_bounded"], fields["gate_lower_bound"]) == (3, 1, -3.0)


@pytest.mark.skipif(not library_path().is_file(), reason="the native library is not built (make lib)")
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_librarys_own_creators_take_the_fields(kind: str) -> None:
    """Emitted fields, given to the creators that the plugin library registers with a real TensorRT registry.

    The kernels' heads are multiples of 16.
    """
    config = dataclasses.replace(CONFIGS[kind], ssm_head_dim=16)
    register()
    registry = rtx.get_plugin_registry()
    for dtype in sorted(cases.TOLERANCE):
        options = tn.NetworkOptions(dtype, 32, spec_len=4)
        network, _ = emit(recorded_tensorrt("10"), config, options)
        for layer in plugins_of(network):
            name = layer.plugin.plugin_type
            values = {key: value.item() for key, value in layer.plugin.fields.items()}
            creator = registry.get_creator(name, "1", "replayssm")
            assert creator is not None, name
            fields = plugin_fields(rtx, name, values)
            collection = rtx.PluginFieldCollection(fields)
            assert creator.create_plugin(layer.name, collection, rtx.TensorRTPhase.BUILD) is not None, last_error()


MOVERS = ("CONCATENATION", "GATHER", "SELECT", "SHUFFLE", "SLICE")


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_layers_that_are_not_strongly_typed_say_their_types(kind: str) -> None:
    """Every 8.6 layer that computes in fp32 has that precision and output type; no other layer asks for anything.

    8.6 moves the data of a fused group in one type, so that one that moves fp32 among fp16 would round it: there are
    none but the gathers of rotation tables.
    """
    network, _ = emit(recorded_tensorrt("8.6"), CONFIGS[kind], tn.NetworkOptions("float16", 32))
    for layer in network.layers:
        sort, out = layer.type.name, layer.get_output(0)
        told = getattr(layer, "precision", None)
        if sort in MOVERS:
            assert out.dtype.name != "FLOAT" or layer.name.startswith("rotation/"), layer.name
        if sort in ("CONSTANT", "CAST", "PLUGIN_V2", *MOVERS) or out.dtype.name != "FLOAT":
            assert told is None, layer.name
        else:
            assert told == out.dtype == layer.output_type, layer.name
    names = [layer.name for layer in network.layers]
    assert len(set(names)) == len(names)
    constants = {layer.name for layer in network.layers if layer.type.name == "CONSTANT"}
    assert "embedding.weight" in constants and any(name.endswith("mixer.norm.weight") for name in constants)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_constants_that_may_be_rounded_to_fp16_stay_finite(kind: str) -> None:
    """Where precisions are a wish, 8.6 may compute any fp32 layer in fp16: an infinite factor would make NaN of 0."""
    network, _ = emit(recorded_tensorrt("8.6"), CONFIGS[kind], tn.NetworkOptions("float16", 32))
    constants = [layer for layer in network.layers if layer.type.name == "CONSTANT"]
    floats = [layer for layer in constants if np.asarray(layer.weights).dtype == np.float32]
    assert min(float(layer.weights.min()) for layer in floats) == -6e4
    for layer in floats:
        assert np.isfinite(layer.weights.astype(np.float16)).all(), layer.name


def test_builder_flags() -> None:
    class Config:
        def __init__(self) -> None:
            self.set: list[Any] = []
            self.cleared: list[Any] = []
            self.set_flag, self.clear_flag = self.set.append, self.cleared.append

        def set_memory_pool_limit(self, pool: Any, size: int) -> None:
            self.set.append((pool.name, size))

    old, new = recorded_tensorrt("8.6"), recorded_tensorrt("10")
    half, single = tn.NetworkOptions("float16", 32), tn.NetworkOptions("float32", 32)
    for trt, options, expected in (
        (old, half, [old.BuilderFlag.FP16, old.BuilderFlag.OBEY_PRECISION_CONSTRAINTS, ("WORKSPACE", 5)]),
        (old, single, [("WORKSPACE", 5)]),
        (new, half, [("WORKSPACE", 5)]),
    ):
        config = Config()
        tn.configure_builder(trt, config, options, 5)
        assert config.set == expected and config.cleared == [trt.BuilderFlag.TF32]
        loosened = tn.prefer_precision(trt, config, options)
        assert loosened == (trt is old and options is half)
        if loosened:
            flags = trt.BuilderFlag
            assert config.set[-1] == flags.PREFER_PRECISION_CONSTRAINTS
            assert config.cleared[-1] == flags.OBEY_PRECISION_CONSTRAINTS
    with pytest.raises(ReplayError, match="workspace_bytes is 0; it must be positive"):
        tn.configure_builder(old, Config(), half, 0)


def test_what_a_tensorrt_cannot_do() -> None:
    config = CONFIGS["nemotron_h"]
    old = recorded_tensorrt("8.6")
    with pytest.raises(
        ReplayError, match=r"dtype is bfloat16; recorded_tensorrt_8\.6 8\.6\.0 has float32, float16 only"
    ):
        emit(old, config, tn.NetworkOptions("bfloat16", 32))
    with pytest.raises(ReplayError, match=r"replay is plugin; networks of tensorrt_rtx \S+ take no plugins: use io"):
        tn.check_options(rtx, config, tn.NetworkOptions("float32", 32))
    refusing = recorded_tensorrt("10")
    refusing.get_plugin_registry = lambda: SimpleNamespace(
        get_creator=lambda *_: SimpleNamespace(create_plugin=lambda *_: None)
    )
    with pytest.raises(ReplayError, match=r"plugin ReplayCausalConv \(layers\.0\.mixer\.conv/.*\) refuses its fields"):
        emit(refusing, config, tn.NetworkOptions("float32", 32))
    bare = recorded_tensorrt("10", plugins=("ReplayCausalConv",))
    with pytest.raises(
        ReplayError, match=r"plugin ReplayMamba2 is not registered with .* load the plugin library first"
    ):
        emit(bare, config, tn.NetworkOptions("float32", 32))
    with pytest.raises(ReplayError, match="trt is json; it must be the module tensorrt"):
        tn.check_options(json, config, tn.NetworkOptions("float32", 32))
    with pytest.raises(ReplayError, match="max_positions is 5000; the model was made for 4096"):
        tn.check_options(old, config, tn.NetworkOptions("float32", 5000))


def test_weights_that_do_not_fit() -> None:
    config, trt = CONFIGS["nemotron_h"], recorded_tensorrt("8.6")
    options = tn.NetworkOptions("float16", 32)
    good = host_weights(random_weights(config, "float32"))
    name = "layers.1.mixer.up_proj.weight"
    bad: list[tuple[Any, str]] = [
        ({k: v for k, v in good.items() if k != name}, f"weight {name} is missing"),
        ({**good, name: np.zeros((40, 7), np.float32)}, f"weight {name} has 7 columns for 24 features"),
        ({**good, name: np.zeros((40, 24))}, f"weight {name} is float64; give float32, float16 or a HostWeight"),
        (
            {**good, name: np.full((40, 24), 1e5, np.float32)},
            f"weight {name}: dtype is float16; .* a weight has 100000",
        ),
    ]
    for weights, message in bad:
        with pytest.raises(ReplayError, match=message):
            emit(trt, config, options, weights)
    plain = {k: v.to_float32() for k, v in good.items()}
    _, io = emit(trt, config, options, plain)
    assert io.get("logits") is not None


def test_generation_reads_no_cache_beyond_a_rows_length() -> None:
    """Hidden positions are read where seen ones lie, so a row costs no memory traffic for another row's length."""
    model = Twice(recorded_tensorrt("8.6"), CONFIGS["nemotron_h"], "float32", "plugin")
    model.call(tn.CONTEXT, [Row(0, 0, [1, 2]), Row(1, 0, list(range(9)))])
    model.call(tn.GENERATION, [Row(0, 2, [1]), Row(1, 9, [2])])
    gathers = [layer for layer in model.network.layers if layer.type.name == "GATHER" and "mixer" in layer.name]
    addresses = [model.values[g.get_input(1).name] for g in gathers if model.values[g.get_input(1).name].dim() == 3]
    assert addresses and addresses[0].shape == (2, 2, 9)
    assert (addresses[0][0] % 32).max() == 1 and (addresses[0][1] % 32).max() == 8


CHILD = """
import sys
for name in ("torch", "safetensors", "transformers"):
    sys.modules[name] = None
from recorded_tensorrt import recorded_tensorrt
from trtllm_replayssm.models.host_weights import load_host_checkpoint
from trtllm_replayssm.ops.tensorrt_network import NetworkOptions, create_network, emit_network
trt = recorded_tensorrt("8.6")
config, weights = load_host_checkpoint(sys.argv[1])
io = emit_network(trt, create_network(trt, trt.Builder), config, weights, NetworkOptions("float16", 64))
print(len(io.tensors))
"""


def pythons() -> list[str]:
    """This interpreter, and a Python 3.9 with numpy where there is one (TRTLLM_REPLAYSSM_PYTHON39, python3.9)."""
    found = [sys.executable]
    for candidate in (os.environ.get("TRTLLM_REPLAYSSM_PYTHON39"), shutil.which("python3.9")):
        if candidate:
            probe = "import sys, numpy; sys.exit(sys.version_info[:2] != (3, 9))"
            if subprocess.run([candidate, "-c", probe], capture_output=True, check=False).returncode == 0:
                return [*found, candidate]
    return found


def test_emission_needs_numpy_alone(tmp_path: Path) -> None:
    convert(ROOT / "examples" / "models" / "tiny-nemotron-h", tmp_path / "checkpoint")
    for python in pythons():
        done = subprocess.run(
            [python, "-c", CHILD, str(tmp_path / "checkpoint")],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, f"{python}: {done.stderr}"
        assert int(done.stdout) > 20


def test_host_weights(tmp_path: Path) -> None:
    values = torch.randn(500) * torch.tensor([1e-8, 1.0, 1e3, 1e30]).repeat(125)
    values[:3] = torch.tensor([torch.inf, -0.0, torch.nan])
    wide = HostWeight(values.numpy(), "float32")
    for dtype in ("bfloat16", "float32"):
        want = values.to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(wide.cast(dtype).to_float32(), want)
    with pytest.raises(ReplayError, match="dtype is float16; it holds numbers up to 65504"):
        wide.cast("float16")
    small = HostWeight(values[4::4].numpy(), "float32")
    np.testing.assert_array_equal(small.cast("float16").to_float32(), values[4::4].half().float().numpy())
    with pytest.raises(ReplayError, match="array is float32; a bfloat16 weight is held as uint16"):
        HostWeight(np.zeros(3, np.float32), "bfloat16")

    source = tmp_path / "checkpoint"
    convert(ROOT / "examples" / "models" / "tiny-qwen3_5", source)
    file = source / "rank0.safetensors"
    whole = file.read_bytes()
    for damaged, message in (
        (whole[:-7], "is not a whole safetensors file: tensor .* needs"),
        (whole[:5], "is not a whole safetensors file: its header is cut off"),
        (whole[:8] + b"[" + whole[9:], "is not a whole safetensors file"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ReplayError, match=message):
            load_host_checkpoint(source)
    file.unlink()
    with pytest.raises(ReplayError, match=r"has no rank0\.safetensors"):
        load_host_checkpoint(source)
