"""The TensorRT plugins through the lifecycle that TensorRT gives them: both adapters, without TensorRT, without a GPU.

tests/driver is a program that stands in for a plugin registry (of the version asked for) and for the library's own step
operations, and walks each plugin from creation to a call: one line for each check. The cases that it reads, with the
types and extents that a plugin must take, are made here from the manifests in plugins/tensorrt/manifests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from emulator_build import cuda_include

from trtllm_replayssm import plugins
from trtllm_replayssm.layout import ConvLayout, SlotLayout
from trtllm_replayssm.spec import ConvSpec, RecurrenceSpec

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests/driver"
MANIFESTS = ROOT / "plugins/tensorrt/manifests"
#: getInferLibVersion of TensorRT 8.6.1, TensorRT for RTX 1.7.1, 10.14.1 and 11.1.
TRT8, RTX, TRT10, TRT11 = 8601, 10701, 101401, 110100
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 7
CODES = {"float32": 0, "float16": 1, "int32": 3, "bfloat16": 7, "int64": 8}
ROWS, TOKENS = 2, 2

SIZES: dict[str, dict[str, int]] = {
    "ReplayCausalConv": {"channels": 256, "kernel": 4},
    "ReplayMamba2": {"nheads": 4, "ngroups": 2, "headdim": 32, "dstate": 64},
    "ReplayGatedDelta": {"kind": 2, "nheads": 4, "ngroups": 2, "headdim": 32, "dstate": 64},
}


def slot_bytes(name: str, values: dict[str, Any]) -> int:
    types = {code: dtype for dtype, code in CODES.items()}
    act = types[values["type_id"]]
    if name == "ReplayCausalConv":
        return ConvLayout(ConvSpec(values["channels"], values["kernel"], act, values.get("spec_len", 1))).slot_bytes
    kind = {"ReplayMamba2": {0: "mamba2"}, "ReplayGatedDelta": {2: "gated_delta", 3: "kimi_delta"}}[name]
    spec = RecurrenceSpec(
        kind[values.get("kind", 0)],
        *(values[field] for field in ("nheads", "ngroups", "headdim", "dstate")),
        act_dtype=act,
        window=values.get("window", 16),
        spec_len=values.get("spec_len", 1),
    )
    return SlotLayout(spec).slot_bytes


def symbols(name: str, values: dict[str, Any]) -> dict[str, int]:
    """What the letters of a manifest's extents stand for."""
    v = values
    out = {"C": v.get("channels", 0), "kernel": v.get("kernel", 0), "words": slot_bytes(name, v) // 4}
    heads, groups = v.get("nheads", 0), v.get("ngroups", 0)
    out.update({"H": heads, "HP": heads * v.get("headdim", 0), "GN": groups * v.get("dstate", 0)})
    out["gates"] = heads * (v["dstate"] if v.get("kind") == 3 else 1)
    return out


def tensor_text(name: str, entry: dict[str, Any], values: dict[str, Any], pad: int, address: str) -> str:
    """``name:types:extents`` for the driver; ``?`` marks an extent that varies. pad: columns beyond those used."""
    packed = values.get("remove_input_padding", 1)
    sizes = symbols(name, values)
    types = [CODES[t] if t in CODES else values[t] for t in entry["types"]]
    kind = entry["extents"]
    if kind == "rows":
        extents = f"?{ROWS}"
    elif kind == "state" and values.get("paged_state", 1):
        types, extents = [CODES[address]], "1" if address == "int64" else "2"
    elif kind == "state":
        types, extents = [CODES["int32"]], f"?3x{sizes['words']}"
    elif kind[0] == "tokens":
        width = sizes[kind[1]] + values.get(entry.get("offset", ""), 0) + (pad if entry.get("offset") else 0)
        extents = f"?{TOKENS}x{width}" if packed else f"?{ROWS}x?1x{width}"
    else:
        extents = "x".join(str(sizes.get(extent, extent)) for extent in kind)
    return f"{entry['name']}:{','.join(map(str, dict.fromkeys(types)))}:{extents}"


def manifest(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MANIFESTS / f"{name}.json").read_text())
    return data


def case(name: str, type_id: int, pad: int = 0, address: str = "int64", **flags: Any) -> str:
    """A line of the driver's input: the plugin with these fields, and what each tensor may be."""
    values = {**SIZES[name], "type_id": type_id, **flags}
    table = manifest(name)
    entries = {entry["name"]: entry for entry in table["inputs"]}
    present = plugins.plugin_inputs(name, values)
    inputs = [tensor_text(name, entries[tensor], values, pad, address) for tensor in present]
    outputs = [tensor_text(name, entry, values, 0, address) for entry in table["outputs"]]
    if not values.get("aliased_state"):
        outputs = outputs[:1]
    fields = ";".join(f"{field}={value}{'f' if isinstance(value, float) else ''}" for field, value in values.items())
    return "|".join([name, fields, ";".join(inputs), ";".join(outputs)])


def cases(name: str, type_ids: tuple[int, ...]) -> list[str]:
    out = [case(name, type_id) for type_id in type_ids]
    out.append(case(name, type_ids[0], address="int32"))
    out.append(case(name, type_ids[0], paged_state=0))
    out.append(case(name, type_ids[-1], remove_input_padding=0, has_accepted=1, has_initial=1))
    out.append(case(name, type_ids[-1], paged_state=0, aliased_state=1, has_accepted=1))
    if name == "ReplayCausalConv":
        out.append(case(name, type_ids[-1], has_bias=0, silu=0, x_offset=64, pad=32))
    elif name == "ReplayMamba2":
        out.append(
            case(name, type_ids[-1], z_enabled=1, dt_min=0.5, dt_max=4.0, x_offset=64, dt_offset=3, z_offset=8, pad=64)
        )
    else:
        out.append(
            case(name, type_ids[-1], kind=3, gate_bounded=1, gate_lower_bound=-4.0, a_offset=5, b_offset=1, pad=8)
        )
    return out


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "these tests need a C++17 compiler"
    assert plugins.library_path().is_file(), "run `make lib` first (`make test` does)"
    out = tmp_path_factory.mktemp("driver") / "plugin_driver"
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-rdynamic"]
    programs = ("layout_check.cpp", "row_map.cpp", "host_rows.cpp")
    sources = [str(path) for path in sorted(DRIVER.glob("*.cpp")) if path.name not in programs]
    done = subprocess.run([compiler, *flags, *sources, "-o", str(out), "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def row_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("row_map") / "row_map"
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "these tests need a C++17 compiler"
    command = [compiler, "-std=c++17", "-Wall", "-Werror", str(DRIVER / "row_map.cpp"), "-o", str(out)]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins built with a C++ compiler alone: the kernel in front of a scan runs on the host."""
    out = tmp_path_factory.mktemp("host") / "host_plugins.so"
    sources = [*sorted((ROOT / "plugins/tensorrt").glob("*.cpp")), ROOT / "plugins/c_api/layout.cpp"]
    flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-isystem", str(cuda_include())]
    flags += ['-DREPLAYSSM_VERSION_STRING="0.0"', '-DREPLAYSSM_ARCH_STRING="none"']
    command = [shutil.which("c++") or "g++", *flags, *map(str, sources), str(DRIVER / "host_rows.cpp")]
    done = subprocess.run([*command, "-o", str(out), "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def walk(driver: Path, version: int, lines: list[str], passes: bool = True, library: Path | None = None) -> list[str]:
    done = subprocess.run(
        [str(driver), str(library or plugins.library_path()), str(version), *(["host"] if library else [])],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key != "TRTLLM_REPLAYSSM_AUTOREGISTER"},
    )
    checks = done.stdout.splitlines()
    bad = [line for line in checks if not line.startswith("ok ")]
    assert not bad or not passes, "\n".join(bad)
    assert done.returncode == (0 if passes else 1), done.stdout[-2000:] + done.stderr[-2000:]
    return checks


@pytest.mark.parametrize("name", plugins.PLUGIN_FIELDS)
@pytest.mark.parametrize("version", [TRT8, TRT10, TRT11, RTX])
def test_every_call_of_the_lifecycle_is_answered(driver: Path, name: str, version: int) -> None:
    type_ids = (FLOAT32, FLOAT16) if version == TRT8 else (FLOAT32, FLOAT16, BFLOAT16)
    lines = cases(name, type_ids)
    checks = walk(driver, version, lines)
    walks = [line for line in lines if version != TRT8]
    walks += [line for line in lines if version in (TRT8, TRT10) and "state_out" not in line]
    for step in ("creation", "clone", "timing during a build", "deserialisation", "enqueue allocates nothing"):
        assert sum(f": {step}" in check for check in checks) >= len(walks), step
    tensors = sum(line.count(":") // 2 for line in walks)
    assert sum(": formats of " in check for check in checks) == tensors


@pytest.mark.parametrize(("version", "text"), [(9300, "TensorRT 9.3.0"), (120001, "TensorRT 12.0.1"), (8501, "8.5.1")])
def test_a_tensorrt_of_another_major_is_refused_by_name(driver: Path, version: int, text: str) -> None:
    checks = walk(driver, version, [])
    assert len(checks) == 3
    assert text in checks[0]
    assert "this library knows TensorRT 8.6, TensorRT for RTX 1.7 to 1.99, TensorRT 10.0 to 10.99" in checks[0]


def test_bfloat16_is_refused_under_tensorrt_8(driver: Path) -> None:
    checks = walk(driver, TRT8, [case("ReplayMamba2", BFLOAT16)], passes=False)
    assert "field type_id is 7 (bfloat16); TensorRT 8.6 has 0 (float32) and 1 (float16)" in checks[-1]


def test_the_driver_can_fail(driver: Path) -> None:
    """A case with a wrong type, a wrong shape: the walk says so."""
    line = case("ReplayCausalConv", BFLOAT16)
    assert ":7,0:256x4" in line
    for wrong in (line.replace(":7,0:256x4", ":7:256x4"), line.replace("|y:7:?2x256", "|y:7:?2x128")):
        assert any(check.startswith("FAIL") for check in walk(driver, TRT10, [wrong], passes=False))


@pytest.mark.parametrize("name", plugins.PLUGIN_FIELDS)
def test_defaults_of_the_python_table_are_the_librarys(driver: Path, name: str) -> None:
    """A plugin from required fields alone serialises every field in the table's order, with the table's default."""
    (line,) = [check for check in walk(driver, RTX, [case(name, FLOAT16)]) if ": serialisation | " in check]
    stored = [pair.split("=") for pair in line.split(" | ")[1].split()]
    given = {**SIZES[name], "type_id": FLOAT16}
    expected = [[field, given.get(field, spec.default)] for field, spec in plugins.PLUGIN_FIELDS[name].items()]
    assert [[field, float(value)] for field, value in stored[: len(expected)]] == expected
    assert [field for field, _ in stored[len(expected) :]] == ["schema_version", "layout_version"]


def test_a_step_is_called_with_the_views_that_the_fields_describe(driver: Path) -> None:
    """Two generation rows of one token in fused buffers: data offsets, strides, pool and slots of the C call."""
    flags: dict[str, dict[str, Any]] = {
        "ReplayMamba2": {"type_id": BFLOAT16, "z_enabled": 1, "x_offset": 64, "dt_offset": 3, "z_offset": 8, "pad": 64},
        "ReplayGatedDelta": {"type_id": FLOAT16, "kind": 3, "a_offset": 5, "b_offset": 1, "pad": 8, "max_slots": 9},
        "ReplayCausalConv": {"type_id": FLOAT32, "remove_input_padding": 0, "has_accepted": 1, "paged_state": 0},
    }
    flags["ReplayMamba2"]["slot_stride"] = 1 << 20
    lines = [case(name, **values) for name, values in flags.items()]
    stride = {name: slot_bytes(name, {**SIZES[name], **values}) for name, values in flags.items()}
    calls = [check.split(" | ")[1] for check in walk(driver, TRT11, lines) if ": a generation call runs | " in check]
    assert calls == [
        f"mamba2_step rows=2 tokens=1 base=0x7000 stride={1 << 20} slots={2**31 - 1} slots=in11+0[]d32"
        " x=in0+128[256,256,32,1]d3 dt=in2+6[71,71,1]d3 A=in4+0[1]d2 B=in5+0[192,192,64,1]d3 C=in6+0[192,192,64,1]d3"
        " D=in7+0[1,0]d2 z=in12+16[200,200,32,1]d3 dt_bias=in3+0[1]d2 y=out0+0[128,128,32,1]d3",
        f"gated_delta_step rows=2 tokens=1 base=0x7000 stride={stride['ReplayGatedDelta']} slots=9 slots=in11+0[]d32"
        " q=in0+0[136,136,64,1]d4 k=in2+0[136,136,64,1]d4 v=in3+0[136,136,32,1]d4 a=in4+10[269,269,64,1]d4"
        " b=in5+2[13,13,1]d4 A_log=in6+0[1]d2 dt_bias=in7+0[64,1]d2 o=out0+0[128,128,32,1]d4",
        f"conv_step rows=2 tokens=1 base=0x200000000 stride={stride['ReplayCausalConv']} slots=3 slots=in6+0[]d32"
        " accepted=in7+0[]d32 x=in0+0[256,256,1]d2 weight=in2+0[4,1]d2 bias=in3+0[1]d2 y=out0+0[256,256,1]d2",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["0", "9", "2,2,9", "4,-1,0"], ["cu_seqlens 0 2 2 9", "has_initial 0 0 0"]),
        (["0", "9", "2,2,9", "4,-1,0", "1,0,7"], ["cu_seqlens 0 2 2 9", "has_initial 1 0 1"]),
        (["0", "9", "-3,99,9", "4,-1,0"], ["cu_seqlens 0 0 9 9", "has_initial 0 0 0"]),
        (
            ["4", "12", "3,4,0", "5,-1,2", "1,1,0"],
            ["cu_seqlens 0 3 4 8 8 8 12", "slots 5 -1 -1 -1 2 -1", "has_initial 1 0 1 0 0 0"],
        ),
        (["4", "8", "-1,77", "5,6"], ["cu_seqlens 0 0 4 8 8", "slots 5 -1 6 -1", "has_initial 0 0 0 0"]),
    ],
)
def test_row_inputs_become_packed_sequences(row_map: Path, arguments: list[str], expected: list[str]) -> None:
    """cu_seqlens, slots and has_initial in front of a scan; padding behind a row is a sequence without a slot."""
    done = subprocess.run([str(row_map), *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ("0,3,-1,-1,2", []),
        ("4,-2", ["slot_mapping[0] is 4; it must be -1 or from 0 to 3", "slot_mapping[1] is -2; it must be -1 or"]),
        ("1,0,-1,1", ["slot_mapping[0] and slot_mapping[3] are both 1"]),
    ],
)
def test_a_debug_build_names_bad_slots(row_map: Path, slots: str, said: list[str]) -> None:
    done = subprocess.run([str(row_map), "check", "4", slots], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(f"[trtllm-replayssm] {part}") for line, part in zip(lines, said, strict=True))


def test_context_rows_are_scanned_and_the_others_stepped(driver: Path, host_library: Path) -> None:
    """Packed: a prompt of one token in slot 5, then a generation row in slot 6. Padded: prompts of 1 and 0 tokens."""
    flags: list[tuple[str, dict[str, Any]]] = [
        ("ReplayMamba2", {"type_id": FLOAT16, "x_offset": 64, "pad": 64, "has_initial": 1, "has_accepted": 1}),
        ("ReplayGatedDelta", {"type_id": FLOAT32, "max_slots": 9}),
        ("ReplayCausalConv", {"type_id": BFLOAT16}),
        ("ReplayCausalConv", {"type_id": FLOAT32, "remove_input_padding": 0, "has_initial": 1, "has_bias": 0}),
    ]
    lines = [case(name, **values) for name, values in flags]
    pools = [
        f" base=0x7000 stride={slot_bytes(name, {**SIZES[name], **values})} slots={values.get('max_slots', 2**31 - 1)}"
        for name, values in flags
    ]
    checks = walk(driver, TRT11, lines, library=host_library)
    calls = [check.split(" | ")[1].split("; ") for check in checks if ": a context call runs | " in check]
    parameters = " A=in4+0[1]d2", " D=in7+0[1,0]d2 dt_bias=in3+0[1]d2"
    assert calls[0][0] == (
        f"mamba2_scan sequences=1 tokens=1{pools[0]} cu 0 1 ids 5 initial 1 x=in0+128[256,32,1]d4 dt=in2+0[68,1]d4"
        f"{parameters[0]} B=in5+0[192,64,1]d4 C=in6+0[192,64,1]d4{parameters[1]} y=out0+0[128,32,1]d4"
    )
    assert calls[0][1] == (
        f"mamba2_step rows=1 tokens=1{pools[0]} id 6 accepted=in12+4[]d32 x=in0+640[256,256,32,1]d4"
        f" dt=in2+136[68,68,1]d4{parameters[0]} B=in5+384[192,192,64,1]d4 C=in6+384[192,192,64,1]d4{parameters[1]}"
        " y=out0+256[128,128,32,1]d4"
    )
    assert calls[1][0] == (
        f"gated_delta_scan sequences=1 tokens=1{pools[1]} cu 0 1 ids 5 q=in0+0[128,64,1]d2 k=in2+0[128,64,1]d2"
        " v=in3+0[128,32,1]d2 a=in4+0[4,1,1]d2 b=in5+0[4,1]d2 A_log=in6+0[1]d2 dt_bias=in7+0[1,0]d2"
        " o=out0+0[128,32,1]d2"
    )
    assert calls[1][1] == (
        f"gated_delta_step rows=1 tokens=1{pools[1]} id 6 q=in0+512[128,128,64,1]d2 k=in2+512[128,128,64,1]d2"
        " v=in3+512[128,128,32,1]d2 a=in4+16[4,4,1,1]d2"
        " b=in5+16[4,4,1]d2 A_log=in6+0[1]d2 dt_bias=in7+0[1,0]d2 o=out0+512[128,128,32,1]d2"
    )
    assert calls[2] == [
        f"conv_scan sequences=1 tokens=1{pools[2]} cu 0 1 ids 5 x=in0+0[256,1]d3 weight=in2+0[4,1]d3 bias=in3+0[1]d3"
        " y=out0+0[256,1]d3",
        f"conv_step rows=1 tokens=1{pools[2]} id 6 x=in0+512[256,256,1]d3 weight=in2+0[4,1]d3 bias=in3+0[1]d3"
        " y=out0+512[256,256,1]d3",
    ]
    assert calls[3] == [
        f"conv_scan sequences=4 tokens=2{pools[3]} cu 0 1 1 1 2 ids 5 -1 6 -1 initial 1 0 0 0 x=in0+0[256,1]d2"
        " weight=in2+0[4,1]d2 y=out0+0[256,1]d2"
    ]
    assert sum(": a context call allocates nothing" in check for check in checks) == len(lines)
