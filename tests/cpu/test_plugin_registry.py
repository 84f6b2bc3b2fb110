"""The plugins in a real plugin registry: TensorRT for RTX, whose registry takes IPluginV3 creators on a CPU.

Registered in each way that the library offers, every time in a fresh process, then read back; creators are asked for
good plugins and for bad ones. What the plugins do afterwards: test_plugin_driver.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt

from trtllm_replayssm import plugins

LIBRARY = plugins.library_path()
NAMES = list(plugins.PLUGIN_FIELDS)
GOOD: dict[str, dict[str, Any]] = {
    "ReplayCausalConv": {"channels": 256, "kernel": 4, "type_id": 7},
    "ReplayMamba2": {"nheads": 8, "ngroups": 2, "headdim": 64, "dstate": 128, "type_id": 7},
    "ReplayGatedDelta": {"kind": 3, "nheads": 8, "ngroups": 2, "headdim": 128, "dstate": 128, "type_id": 1},
}
LIST_CREATORS = """
import json, tensorrt_rtx
registry = tensorrt_rtx.get_plugin_registry()
print(json.dumps([[c.name, c.plugin_version, c.plugin_namespace] for c in registry.all_creators]))
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    assert LIBRARY.is_file(), "run `make lib` first (`make test` does)"


def run(code: str, *arguments: str, **environment: str) -> tuple[list[Any], str]:
    """JSON lines that a fresh Python printed, and its stderr."""
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "TRTLLM_REPLAYSSM_AUTOREGISTER")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, **environment},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")], done.stderr


def ours(listed: list[list[str]]) -> list[list[str]]:
    return [entry for entry in listed if entry[0].startswith("Replay")]


EXPECTED = [[name, "1", "replayssm"] for name in NAMES]


def test_an_unprepared_process_has_no_creator_of_ours() -> None:
    (listed,), _ = run(LIST_CREATORS)
    assert listed
    assert ours(listed) == []


def test_registration_by_ctypes_lists_what_it_registered() -> None:
    code = "import json, tensorrt_rtx\nfrom trtllm_replayssm import plugins\n"
    code += "print(json.dumps(plugins.register()))\nprint(json.dumps(plugins.register()))\n" + LIST_CREATORS
    (lines, again, listed), _ = run(code)
    assert ours(listed) == EXPECTED
    assert lines == again
    assert [line.split()[:4] for line in lines] == [[name, "1", "replayssm", "IPluginV3"] for name in NAMES]
    assert all("TensorRT for RTX 1." in line for line in lines)


def test_registration_in_another_namespace() -> None:
    code = "import json, tensorrt_rtx\nfrom trtllm_replayssm import plugins\n"
    code += "print(json.dumps(plugins.register(namespace='mine')))\n" + LIST_CREATORS
    (lines, listed), _ = run(code)
    assert len(lines) == len(NAMES)
    assert ours(listed) == [[name, "1", "mine"] for name in NAMES]


def test_registration_without_tensorrt_says_what_to_do() -> None:
    code = "import json\nfrom trtllm_replayssm import plugins\nfrom trtllm_replayssm.errors import ReplayError\n"
    code += "try:\n    plugins.register()\nexcept ReplayError as error:\n    print(json.dumps([str(error)]))\n"
    ((message,),), _ = run(code)
    assert "no TensorRT is loaded" in message
    assert "import tensorrt" in message


def test_load_library_of_the_registry() -> None:
    code = "import sys, tensorrt_rtx\ntensorrt_rtx.get_plugin_registry().load_library(sys.argv[1])\n" + LIST_CREATORS
    (listed,), _ = run(code, str(LIBRARY))
    assert ours(listed) == EXPECTED


@pytest.mark.parametrize("made", ["Builder", "Runtime"])
def test_a_preloaded_library_registers_itself_in_an_unmodified_process(made: str) -> None:
    code = LIST_CREATORS + f"tensorrt_rtx.{made}(tensorrt_rtx.Logger())" + LIST_CREATORS
    (before, after), errors = run(code, LD_PRELOAD=str(LIBRARY))
    assert ours(before) == []
    assert ours(after) == EXPECTED
    assert "trtllm-replayssm" not in errors


def test_a_preloaded_library_leaves_other_processes_alone() -> None:
    (listed,), errors = run("print('[1]')", LD_PRELOAD=str(LIBRARY))
    assert listed == [1]
    assert errors == ""


@pytest.mark.parametrize(("value", "found"), [("1", EXPECTED), ("0", [])])
def test_the_environment_variable_registers_when_the_library_is_loaded(value: str, found: list[list[str]]) -> None:
    code = "import ctypes, sys, tensorrt_rtx\nctypes.CDLL(sys.argv[1])\n" + LIST_CREATORS
    (listed,), _ = run(code, str(LIBRARY), TRTLLM_REPLAYSSM_AUTOREGISTER=value)
    assert ours(listed) == found


def test_a_clash_is_reported_and_survived(tmp_path: Path) -> None:
    """A second copy of the library in one process: the first one's creators stay."""
    copy = tmp_path / "second.so"
    copy.write_bytes(LIBRARY.read_bytes())
    code = "import json, sys, tensorrt_rtx\nfrom trtllm_replayssm import plugins\n"
    code += "from trtllm_replayssm.errors import ReplayError\nplugins.register()\n"
    code += "try:\n    plugins.register(path=sys.argv[1])\n    print('[]')\n"
    code += "except ReplayError as error:\n    print(json.dumps([str(error)]))\n"
    code += "print(json.dumps(plugins.plugin_status(sys.argv[1]).splitlines()))\n" + LIST_CREATORS
    (raised, status, listed), errors = run(code, str(copy))
    assert "another creator has that name, version and namespace already" in raised[0]
    assert [line.split()[:2] for line in status] == [["refused", name] for name in NAMES]
    assert ours(listed) == EXPECTED
    assert errors.count("another creator has that name") == len(NAMES)


@pytest.fixture(scope="module")
def creators() -> dict[str, Any]:
    plugins.register()
    registry = trt.get_plugin_registry()
    return {name: registry.get_creator(name, plugins.PLUGIN_VERSION, plugins.PLUGIN_NAMESPACE) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_fields_read_back_are_those_of_the_python_table(creators: dict[str, Any], name: str) -> None:
    read = [(field.name, field.type.name) for field in creators[name].field_names]
    assert read == [(field, spec.type) for field, spec in plugins.PLUGIN_FIELDS[name].items()]


def create(creator: Any, fields: list[Any]) -> Any:
    return creator.create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_is_made_from_required_fields_alone_and_from_all(creators: dict[str, Any], name: str) -> None:
    assert create(creators[name], plugins.plugin_fields(trt, name, GOOD[name])) is not None
    table = plugins.PLUGIN_FIELDS[name]
    values = {field: spec.default for field, spec in table.items() if not spec.required}
    values.update(GOOD[name])
    full = {field: int(value) if table[field].type == plugins.INT32 else value for field, value in values.items()}
    assert create(creators[name], plugins.plugin_fields(trt, name, full)) is not None


def test_flags_may_be_int8(creators: dict[str, Any]) -> None:
    fields = plugins.plugin_fields(trt, "ReplayCausalConv", GOOD["ReplayCausalConv"])
    fields.append(trt.PluginField("silu", np.array([0], dtype=np.int8), trt.PluginFieldType.INT8))
    assert create(creators["ReplayCausalConv"], fields) is not None


BAD = [
    ("ReplayMamba2", {"headdim": 72}, "field headdim is 72; it must be a multiple of 16"),
    ("ReplayMamba2", {"headdim": 512}, "field headdim is 512; it must be from 16 to 256"),
    ("ReplayMamba2", {"ngroups": 3}, "field ngroups is 3; it must divide nheads, which is 8"),
    ("ReplayMamba2", {"type_id": 3}, "field type_id is 3; it must be 0 .float32., 1 .float16. or 7 .bfloat16."),
    ("ReplayMamba2", {"state_type_id": 8}, "field state_type_id is 8"),
    ("ReplayMamba2", {"window": 0}, "field window is 0; it must be from 1 to 64"),
    ("ReplayMamba2", {"spec_len": 17}, "field spec_len is 17; it must be from 1 to 16"),
    ("ReplayMamba2", {"dt_min": 2.0, "dt_max": 1.0}, "dt_min is 2 with .*dt_max 1"),
    ("ReplayMamba2", {"x_offset": 3}, "field x_offset is 3; in bytes it must be a multiple of 16"),
    ("ReplayMamba2", {"z_enabled": 2}, "field z_enabled is 2; it must be from 0 to 1"),
    ("ReplayMamba2", {"slot_stride": 4096}, "field slot_stride is 4096; a slot of these fields takes [0-9]+ bytes"),
    ("ReplayMamba2", {"aliased_state": 1}, "aliased_state and paged_state are both 1"),
    ("ReplayCausalConv", {"channels": 12}, "spec.channels is 12; it must be a multiple of 8"),
    ("ReplayCausalConv", {"kernel": 9}, "field kernel is 9; it must be from 2 to 8"),
    ("ReplayGatedDelta", {"kind": 1}, "field kind is 1; it must be from 2 to 3"),
    ("ReplayGatedDelta", {"kind": 2, "gate_bounded": 1}, "field gate_bounded is 1 with kind 2; it is for kind 3"),
    ("ReplayGatedDelta", {"gate_lower_bound": 0.0}, "field gate_lower_bound is 0; it must be from -5 to"),
    ("ReplayGatedDelta", {"scale": -1.0}, "field scale is -1"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused_by_name(
    creators: dict[str, Any], capfd: pytest.CaptureFixture[str], name: str, change: dict[str, Any], message: str
) -> None:
    fields = plugins.plugin_fields(trt, name, {**GOOD[name], **change})
    assert create(creators[name], fields) is None
    assert re.search(message, plugins.last_error())
    assert plugins.last_error() in capfd.readouterr().err


def field(name: str, value: Any, dtype: Any, kind: str) -> Any:
    return trt.PluginField(name, np.array(value, dtype=dtype), getattr(trt.PluginFieldType, kind))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("no_such", [1], np.int32, "INT32"), "there is no field no_such; the fields are nheads, ngroups"),
        (("window", [8.0], np.float32, "FLOAT32"), "field window is FLOAT32; it must be INT32 or INT8"),
        (("window", [8, 8], np.int32, "INT32"), "field window has 2 elements; it must have 1"),
        (("dt_min", [0], np.int32, "INT32"), "field dt_min is INT32; it must be FLOAT32"),
        (("nheads", [8], np.int32, "INT32"), "field nheads is there twice"),
        (("window", [8], np.int64, "INT64"), "field window is INT64; it must be INT32 or INT8"),
        (("dt_max", [math.nan], np.float32, "FLOAT32"), "field dt_max is -?nan; it must be at least 0"),
        (("schema_version", [9], np.int32, "INT32"), "has field schema 9 .* build the engine again"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_field_is_refused_by_name(creators: dict[str, Any], extra: Any, message: str) -> None:
    fields = plugins.plugin_fields(trt, "ReplayMamba2", GOOD["ReplayMamba2"])
    fields.append(field(*extra))
    assert create(creators["ReplayMamba2"], fields) is None
    assert re.search(message, plugins.last_error()), plugins.last_error()


@pytest.mark.parametrize("name", NAMES)
def test_each_required_field_is_required(creators: dict[str, Any], name: str) -> None:
    required = [f for f, spec in plugins.PLUGIN_FIELDS[name].items() if spec.required]
    assert required == list(GOOD[name])
    for missing in required:
        arrays = plugins.plugin_field_values(name, GOOD[name])
        fields = [trt.PluginField(f, a, trt.PluginFieldType.INT32) for f, a in arrays.items() if f != missing]
        assert create(creators[name], fields) is None
        assert plugins.last_error() == f"{name}: field {missing} is missing"
