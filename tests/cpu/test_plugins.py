"""trtllm_replayssm.plugins without TensorRT: the tables, what they refuse, and loading of the library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_replayssm import plugins
from trtllm_replayssm.errors import ReplayError

ROOT = Path(__file__).resolve().parents[2]
CONV = {"channels": 256, "kernel": 4, "type_id": 7}


class PluginField:
    """A tensorrt.PluginField as far as plugin_fields uses it."""

    def __init__(self, name: str, data: np.ndarray, type: str) -> None:
        self.name, self.data, self.type = name, data, type


TRT = types.SimpleNamespace(
    PluginField=PluginField, PluginFieldType=types.SimpleNamespace(INT32="INT32", FLOAT32="FLOAT32")
)


@pytest.mark.parametrize("name", plugins.PLUGIN_FIELDS)
def test_inputs_are_the_manifests_under_every_flag(name: str) -> None:
    manifest = json.loads((ROOT / "plugins/tensorrt/manifests" / f"{name}.json").read_text())
    flags = sorted({entry["when"] for entry in manifest["inputs"] if "when" in entry})
    for bits in range(2 ** len(flags)):
        values = {flag: bits >> i & 1 for i, flag in enumerate(flags)}
        expected = [entry["name"] for entry in manifest["inputs"] if values.get(entry.get("when"), 1)]
        assert plugins.plugin_inputs(name, values) == expected
    offsets = {entry["offset"] for entry in manifest["inputs"] if "offset" in entry}
    assert offsets == {field for field in plugins.PLUGIN_FIELDS[name] if field.endswith("_offset")}
    hosts = [entry["name"] for entry in manifest["inputs"] if entry.get("memory") == "host"]
    assert hosts == list(plugins.HOST_INPUTS)


def test_the_documentation_has_every_field_and_input() -> None:
    text = (ROOT / "docs/plugins.md").read_text()
    table = text[text.index("## Fields") :]
    fields = {field for table in plugins.PLUGIN_FIELDS.values() for field in table if not field.endswith("_offset")}
    assert [field for field in sorted(fields) if field not in table] == []
    inputs = {tensor for name in plugins.PLUGIN_FIELDS for tensor in plugins.plugin_inputs(name, {"has_accepted": 1})}
    assert [tensor for tensor in sorted(inputs) if tensor not in text] == []


def test_limits_of_a_call_are_the_librarys() -> None:
    """MAX_ROWS and MAX_CONTEXT_TOKENS are what the sources check, and what the documentation says."""
    sources = {name: (ROOT / "plugins" / name).read_text() for name in ("c_api/operations.h", "c_api/conv.cpp")}
    grid = int(re.search(r"kMaxGridRows = (\d+);", sources["c_api/operations.h"]).group(1))  # type: ignore[union-attr]
    rows = re.search(r'"tokens", p\.tokens, 0, kMaxGridRows \* (\d+)', sources["c_api/conv.cpp"])
    assert rows is not None and grid * int(rows.group(1)) == plugins.MAX_CONTEXT_TOKENS
    assert f'"rows", rows, 0, {plugins.MAX_ROWS})' in (ROOT / "plugins/tensorrt/op.cpp").read_text()
    readme = (ROOT / "plugins/tensorrt/README.md").read_text()
    assert f"{plugins.MAX_ROWS:,} rows; {plugins.MAX_CONTEXT_TOKENS:,} tokens of context rows" in readme


def test_inputs_with_defaults() -> None:
    assert plugins.plugin_inputs("ReplayCausalConv", CONV) == [
        *("x", "state", "weight", "bias", "host_request_types", "last_token_ids", "host_context_lengths"),
        "slot_mapping",
    ]


def test_fields_are_arrays_of_one_number() -> None:
    fields = plugins.plugin_fields(TRT, "ReplayMamba2", {
        "nheads": 8, "ngroups": np.int64(2), "headdim": 64, "dstate": 128, "type_id": 1, "dt_max": 4, "stagger": True,
    })  # fmt: skip
    read = {field.name: (field.type, field.data.dtype.name, field.data.tolist()) for field in fields}
    assert read["ngroups"] == ("INT32", "int32", [2])
    assert read["dt_max"] == ("FLOAT32", "float32", [4.0])
    assert read["stagger"] == ("INT32", "int32", [1])
    assert len(read) == 7


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ReplayConv", {}, "there is no plugin 'ReplayConv'; there are ReplayCausalConv, ReplayMamba2"),
        ("ReplayCausalConv", {"taps": 4}, "plugin ReplayCausalConv has no field taps; it has channels, kernel"),
        ("ReplayCausalConv", {"silu": 1.0}, "field silu of ReplayCausalConv is 1.0; it must be a whole number"),
        ("ReplayCausalConv", {"silu": "1"}, "field silu of ReplayCausalConv is '1'; it must be a whole number"),
        ("ReplayCausalConv", {"slot_stride": 2**31}, "slot_stride of ReplayCausalConv is 2147483648; it must fit 32"),
        ("ReplayMamba2", {**CONV}, "plugin ReplayMamba2 has no field channels, kernel"),
        ("ReplayGatedDelta", {"scale": float("nan")}, "field scale of ReplayGatedDelta is nan; it must be a number"),
        ("ReplayGatedDelta", {"scale": 1e-46}, "field scale of ReplayGatedDelta is 1e-46; it must be 0, infinite or a"),
        ("ReplayMamba2", {"dt_max": 1e300}, "field dt_max of ReplayMamba2 is 1e.300; it must be 0, infinite or a norm"),
        ("ReplayMamba2", {"dt_max": 10**400}, "field dt_max of ReplayMamba2 is 1000"),
        (
            "ReplayMamba2",
            {"dt_min": 1e-40},
            "field dt_min of ReplayMamba2 is 1e-40; it must be 0, infinite or a norm",
        ),
    ],
)
def test_bad_values_are_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    values = {field: 16 for field, spec in plugins.PLUGIN_FIELDS.get(name, {}).items() if spec.required}
    with pytest.raises(ReplayError, match=message):
        plugins.plugin_field_values(name, {**values, **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ReplayError, match="plugin ReplayCausalConv needs field kernel, type_id"):
        plugins.plugin_field_values("ReplayCausalConv", {"channels": 8})
    with pytest.raises(ReplayError, match="has no field bias"):
        plugins.plugin_inputs("ReplayCausalConv", {"bias": 1})


def test_a_missing_library_and_one_without_plugins(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"none\.so does not exist; build it with `make lib`"):
        plugins.load_library(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ReplayError, match="cannot be used"):
        plugins.load_library(tmp_path / "text.so")


def test_the_environment_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_REPLAYSSM_LIBRARY", "/elsewhere/mine.so")
    assert plugins.library_path() == Path("/elsewhere/mine.so")
    monkeypatch.delenv("TRTLLM_REPLAYSSM_LIBRARY")
    assert plugins.library_path().name == "libtrtllm_replayssm.so"


def test_the_module_needs_neither_torch_nor_tensorrt() -> None:
    code = (
        "import sys; import trtllm_replayssm.plugins; print({'torch', 'tensorrt', 'tensorrt_rtx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_what_registration_refuses_before_the_library_is_asked(tmp_path: Path) -> None:
    none = tmp_path / "none.so"
    for namespace in ("", "two words", "zero\0byte", None, 3):
        with pytest.raises(ReplayError, match=r"namespace is .*; it must be a name without blanks"):
            plugins.register(namespace=namespace, path=none)  # type: ignore[arg-type]
    for logger in ("address", b"address", True, 0, -8, 1.5, object()):
        with pytest.raises(ReplayError, match=r"logger is .*; it must be None or the address of an nvinfer1::ILogger"):
            plugins.register(logger, path=none)  # type: ignore[arg-type]
