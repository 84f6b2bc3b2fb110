"""replay_mamba2, replay_gated_delta, replay_causal_conv on the recorded stand-in's Tensors (tests/recorded_trtllm).

What they add to a network (inputs in order, fields, output) in every form: packed and padded, paged and plain state,
optional inputs, offsets; what they refuse. Numbers are in test_trtllm_network.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from recorded_trtllm import recorded

from trtllm_replayssm import plugins
from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.spec import ConvSpec, RecurrenceSpec
from trtllm_replayssm.trtllm import functional
from trtllm_replayssm.trtllm.functional import Pool, Rows

MAMBA2 = RecurrenceSpec("mamba2", nheads=4, ngroups=2, headdim=16, dstate=16, window=6, spec_len=3)
GATED = RecurrenceSpec("gated_delta", nheads=4, ngroups=2, headdim=16, dstate=16, state_dtype="bfloat16")
CONV = ConvSpec(channels=128)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with recorded.installed() as found:
        yield found


class Net:
    """A network with inputs by name; ``padded`` and ``plain`` switch remove_input_padding and paged_state off."""

    def __init__(self, llm: Any, padded: bool = False, plain: bool = False) -> None:
        from tensorrt_llm.network import Network

        self.trt, self.padded, self.plain = llm.trt, padded, plain
        self.network = Network()
        self.network.plugin_config.remove_input_padding = not padded
        self.network.plugin_config.paged_state = not plain

    def __enter__(self) -> Net:
        from tensorrt_llm.network import net_guard

        self.guard = net_guard(self.network)
        self.guard.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.guard.__exit__(None, None, None)

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
        from tensorrt_llm.functional import Tensor

        ranges = OrderedDict((f"{name}_{i}", [[1, 2, 4] if n < 0 else n]) for i, n in enumerate(shape))
        return Tensor(name, getattr(self.trt, dtype), list(shape), ranges)

    def data(self, name: str, width: int, dtype: str = "bfloat16") -> Any:
        return self.input(name, (-1, -1, width) if self.padded else (-1, width), dtype)

    def rows(self, *optional: str) -> Rows:
        names = ["host_request_types", "last_token_ids", "slot_mapping", *optional]
        names += [] if self.padded else ["host_context_lengths"]
        return Rows(**{name: self.input(name, (-1,), "int32") for name in names})

    def pool(self, stride: int = 0) -> Pool:
        state = self.input("state", (-1, 512), "int32") if self.plain else self.input("state", (1,), "int64")
        return Pool(state, stride)

    def mamba2(self, spec: RecurrenceSpec = MAMBA2, *optional: str, z: bool = True, **options: Any) -> Any:
        head = {name: self.input(name, (4,), "float32") for name in ("dt_bias", "A", "D")}
        wide = {"x": 64, "dt": 4, "B": 32, "C": 32}
        tensors = {name: self.data(name, width) for name, width in wide.items()}
        gate = self.data("z", 64) if z else None
        return functional.replay_mamba2(**tensors, **head, pool=self.pool(), rows=self.rows(*optional), spec=spec,
                                        z=gate, **options)  # fmt: skip

    @property
    def layer(self) -> Any:
        (layer,) = self.network.trt_network.layers
        return layer


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_mamba2_forms(llm: Any, padded: bool, plain: bool) -> None:
    with Net(llm, padded, plain) as net:
        out = net.mamba2(MAMBA2, "accepted", exact_scan=True)
    fields = net.layer.attributes["plugin"].fields
    assert out.shape == ((-1, -1, 64) if padded else (-1, 64)) and out.dtype is llm.trt.bfloat16
    names = [tensor.name for tensor in net.layer.inputs]
    lengths = [] if padded else ["host_context_lengths"]
    assert names == ["x", "state", "dt", "dt_bias", "A", "B", "C", "D", "host_request_types", "last_token_ids",
                     *lengths, "slot_mapping", "z", "accepted"]  # fmt: skip
    expected = {"remove_input_padding": int(not padded), "paged_state": int(not plain), "window": 6, "spec_len": 3,
                "has_accepted": 1, "has_initial": 0, "exact_scan": 1, "stagger": 1}  # fmt: skip
    assert {name: fields[name] for name in expected} == expected


def test_optional_inputs_that_are_none(llm: Any) -> None:
    with Net(llm) as net:
        net.mamba2(z=False)
    names = [tensor.name for tensor in net.layer.inputs]
    assert names[-1] == "slot_mapping" and net.layer.attributes["plugin"].fields["z_enabled"] == 0
    with Net(llm) as net:
        net.mamba2(MAMBA2, "has_initial", z=False)
    assert [tensor.name for tensor in net.layer.inputs][-1] == "has_initial"


def test_gated_delta_and_kimi_delta(llm: Any) -> None:
    with Net(llm) as net:
        qkv, gates = net.data("qkv", 128), net.data("ba", 8)
        head = {name: net.input(name, (4,), "float32") for name in ("A_log", "dt_bias")}
        offsets = {"q": 0, "k": 32, "v": 64, "b": 0, "a": 4}
        out = functional.replay_gated_delta(q=qkv, k=qkv, v=qkv, a=gates, b=gates, **head, pool=net.pool(640),
                                            rows=net.rows(), spec=GATED, offsets=offsets, scale=0.5)  # fmt: skip
    fields = net.layer.attributes["plugin"].fields
    assert out.shape == (-1, 64)
    expected = {"kind": 2, "k_offset": 32, "v_offset": 64, "a_offset": 4, "slot_stride": 640, "state_type_id": 7,
                "scale": 0.5, "gate_bounded": 0}  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    kimi = RecurrenceSpec("kimi_delta", 4, 4, 16, 16, gate="bounded", gate_lower_bound=-3.0)
    with Net(llm) as net:
        data = {name: net.data(name, width) for name, width in {"q": 64, "k": 64, "v": 64, "a": 64, "b": 4}.items()}
        head = {"A_log": net.input("A_log", (4,), "float32"), "dt_bias": net.input("dt_bias", (64,), "float32")}
        functional.replay_gated_delta(**data, **head, pool=net.pool(), rows=net.rows(), spec=kimi)
    fields = net.layer.attributes["plugin"].fields
    assert (fields["kind"], fields["gate_bounded"], fields["gate_lower_bound"]) == (3, 1, -3.0)


@pytest.mark.parametrize("bias", [True, False])
def test_causal_conv(llm: Any, bias: bool) -> None:
    with Net(llm) as net:
        weight = net.input("weight", (128, 4))
        b = net.input("bias", (128,)) if bias else None
        x = net.data("x", 256)
        out = functional.replay_causal_conv(x, weight, b, net.pool(48), net.rows(), CONV, offsets={"x": 64})
    fields = net.layer.attributes["plugin"].fields
    assert out.shape == (-1, 128)
    names = [tensor.name for tensor in net.layer.inputs]
    assert names[:4] == ["x", "state", "weight", "bias" if bias else "host_request_types"]
    expected = {"channels": 128, "kernel": 4, "silu": 1, "has_bias": int(bias), "x_offset": 64, "slot_stride": 48}
    assert {name: fields[name] for name in expected} == expected


def test_wrong_specs(llm: Any) -> None:
    with Net(llm) as net:
        with pytest.raises(ReplayError, match="kind is gated_delta; replay_mamba2 takes mamba2"):
            net.mamba2(GATED)
        with pytest.raises(ReplayError, match="kind is mamba2; replay_gated_delta takes gated_delta, kimi_delta"):
            functional.replay_gated_delta(*[None] * 7, net.pool, net.rows, MAMBA2)  # type: ignore[arg-type]
    for spec, message in (
        (RecurrenceSpec("mamba2", 4, 2, 16, 16, read_copy="int8"), "read_copy is int8; the plugins keep none"),
        (
            RecurrenceSpec("mamba2", 4, 2, 16, 16, act_dtype="float16"),
            "input is bfloat16; the spec's act_dtype is float16",
        ),
        (RecurrenceSpec("mamba2", 4, 2, 16, 16, "float64", "float64"), "state_dtype is float64; the plugins do not"),
    ):
        with Net(llm) as net, pytest.raises(ReplayError, match=message):
            net.mamba2(spec)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ({"x": 4}, "offset of x is 4 elements of bfloat16; it must be a multiple of 16 bytes"),
        ({"dt": -1}, "offset of dt is -1; it must be a whole number, 0 or more"),
        ({"dt": True}, "offset of dt is True; it must be"),
        ({"q": 0}, "offsets names q; this operation has x, dt, B, C, z"),
    ],
)
def test_wrong_offsets(llm: Any, offsets: dict[str, Any], message: str) -> None:
    with Net(llm) as net, pytest.raises(ReplayError, match=message):
        net.mamba2(offsets=offsets)


def test_missing_tensors(llm: Any) -> None:
    with Net(llm) as net:
        x, weight = net.data("x", 128), net.input("weight", (128, 4))
        rows = Rows(net.input("host_request_types", (-1,), "int32"), None, net.input("slot_mapping", (-1,), "int32"))
        message = "ReplayCausalConv needs the tensor last_token_ids, host_context_lengths, which is None"
        with pytest.raises(ReplayError, match=message):
            functional.replay_causal_conv(x, weight, None, net.pool(), rows, CONV)


def test_plugins_that_are_not_registered(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = llm.trt.get_plugin_registry()
    monkeypatch.setattr(registry, "creators", {})
    with (
        Net(llm) as net,
        pytest.raises(ReplayError, match=r"ReplayMamba2 is not in TensorRT's registry; call .*register\(\)"),
    ):
        net.mamba2()


def test_plugin_that_refuses_its_fields(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded.RecordedCreator, "create_plugin", lambda *args: None)
    monkeypatch.setattr(plugins, "last_error", lambda: "window is 99")
    with Net(llm) as net, pytest.raises(ReplayError, match="ReplayMamba2 refused its fields: window is 99"):
        net.mamba2()


def test_layer_that_is_not_added(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.trt.INetworkDefinition, "add_plugin_v3", lambda *args: None)
    with Net(llm) as net, pytest.raises(ReplayError, match="TensorRT did not add ReplayMamba2 to the network"):
        net.mamba2()


def test_contract_of_the_stand_in_is_the_table_of_the_package() -> None:
    """Two lists of fields, written apart, agree: so the creators above check what the library's creators check."""
    assert set(recorded.CONTRACT) == set(plugins.PLUGIN_FIELDS)
    for name, text in recorded.CONTRACT.items():
        required, optional, floats = (set(part.split()) for part in text.split("|"))
        table = plugins.PLUGIN_FIELDS[name]
        assert required == {field for field, spec in table.items() if spec.required}
        assert floats == {field for field, spec in table.items() if spec.type == plugins.FLOAT32}
        assert optional == set(table) - required - floats
