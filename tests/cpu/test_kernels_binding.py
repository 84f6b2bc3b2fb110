"""The binding of the native library without a GPU: layouts and struct sizes against the C side, loading, CPU fallback.

Oracle: the host part of the C interface (plugins/c_api/layout.cpp), compiled here with the system's C++ compiler. What
the kernels compute is tested in tests/gpu.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from replay_cases import make_inputs, small_spec

from trtllm_replayssm import ConvLayout, ConvSpec, RecurrenceSpec, ReplayError, SlotLayout, kernels, reference
from trtllm_replayssm.kernels import abi, gated_delta, library, mamba2, tensors
from trtllm_replayssm.kernels import state as lifecycle
from trtllm_replayssm.pool import StatePool

ROOT = Path(__file__).resolve().parents[2]
STRUCTS = {
    "replayssm_recurrence_spec": abi.CRecurrenceSpec,
    "replayssm_conv_spec": abi.CConvSpec,
    "replayssm_region": abi.CRegion,
    "replayssm_layout": abi.CLayout,
    "replayssm_pool": abi.CPool,
    "replayssm_tensor": abi.CTensor,
    "replayssm_index": abi.CIndex,
    "replayssm_step_tuning": abi.CStepTuning,
    "replayssm_mamba2_step_params": abi.Mamba2StepParams,
    "replayssm_mamba2_scan_params": abi.Mamba2ScanParams,
    "replayssm_gated_delta_step_params": abi.GatedDeltaStepParams,
    "replayssm_gated_delta_scan_params": abi.GatedDeltaScanParams,
    "replayssm_materialize_params": abi.MaterializeParams,
    "replayssm_reset_params": abi.ResetParams,
    "replayssm_conv_step_params": abi.ConvStepParams,
    "replayssm_conv_scan_params": abi.ConvScanParams,
    "replayssm_conv_materialize_params": abi.ConvMaterializeParams,
    "replayssm_conv_reset_params": abi.ConvResetParams,
    "replayssm_kv_append_params": abi.KvAppendParams,
}


def compile_library(folder: Path, *sources: Path, abi_version: int | None = None) -> Path:
    """A shared library of C++ sources, with the version strings that the build script gives."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "these tests need a C++17 compiler"
    out = folder / f"library{abi_version}.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    flags += ['-DREPLAYSSM_VERSION_STRING="9.9"', '-DREPLAYSSM_ARCH_STRING="90"']
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(out)], check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    """The host part of the library, bound as kernels.load() binds the whole."""
    folder = tmp_path_factory.mktemp("host")
    sizes = folder / "sizes.cpp"
    lines = [f'extern "C" unsigned long size_of_{name}() {{ return sizeof({name}); }}' for name in STRUCTS]
    fields = "\n".join(
        f'extern "C" unsigned long offset_of_{name}_{field[0]}() {{ return offsetof({name}, {field[0]}); }}'
        for name, struct in STRUCTS.items()
        for field in struct._fields_
    )
    sizes.write_text(
        '#include <cstddef>\n#include "plugins/c_api/replayssm.h"\n' + "\n".join(lines) + "\n" + fields + "\n"
    )
    return library.bind(compile_library(folder, ROOT / "plugins/c_api/layout.cpp", sizes))


def specs() -> list[RecurrenceSpec]:
    shapes = [(6, 2, 48, 96), (14, 1, 80, 16), (4, 4, 8, 8), (128, 8, 64, 128)]
    types = [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "float64")]
    windows = [(1, 1), (16, 1), (16, 4), (3, 16), (64, 16)]
    out = []
    for kind, shape, (state, act), (window, spec_len), copy in itertools.product(
        ("mamba2", "gated_delta", "kimi_delta"), shapes, types, windows, ("none", "bf16", "fp8_e4m3", "int8")
    ):
        if copy == "bf16" and state in ("bfloat16", "float16"):
            continue
        out.append(
            RecurrenceSpec(
                kind, *shape, state, act, window=window, spec_len=spec_len, read_copy=copy, stagger=window > 3
            )
        )
    return out


def test_slot_layouts_are_the_same_bytes(host):
    """bytes(SlotLayout) against replayssm_slot_layout for 840 specs."""
    out = abi.CLayout()
    checked = 0
    for spec in specs():
        library.check(host, host.replayssm_slot_layout(ctypes.byref(abi.c_recurrence_spec(spec)), ctypes.byref(out)))
        assert bytes(out) == bytes(SlotLayout(spec)), spec
        checked += 1
    assert checked == 840


def test_conv_layouts_are_the_same_bytes(host):
    out = abi.CLayout()
    for channels, taps, act, spec_len in itertools.product(
        (8, 64, 72, 10240), (2, 4, 8), ("bfloat16", "float32"), (1, 16)
    ):
        spec = ConvSpec(channels, taps, act, spec_len)
        library.check(host, host.replayssm_conv_layout(ctypes.byref(abi.c_conv_spec(spec)), ctypes.byref(out)))
        assert bytes(out) == bytes(ConvLayout(spec)), spec


def test_structs_have_the_same_members_at_the_same_places(host):
    for name, struct in STRUCTS.items():
        size = getattr(host, f"size_of_{name}")
        size.restype = ctypes.c_ulong
        assert size() == ctypes.sizeof(struct), name
        for field, *_ in struct._fields_:
            offset = getattr(host, f"offset_of_{name}_{field}")
            offset.restype = ctypes.c_ulong
            assert offset() == getattr(struct, field).offset, f"{name}.{field}"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"struct_size": 12}, f"spec.struct_size is 12; this library .ABI {abi.ABI_VERSION}. knows"),
        ({"kind": 4}, "spec.kind is 4; it must be from 1 to 3"),
        ({"nheads": 0}, "spec.nheads is 0; it must be from 1 to 1024"),
        ({"ngroups": 3}, "spec.ngroups is 3; it must divide spec.nheads, which is 4"),
        ({"headdim": 12}, "spec.headdim is 12; it must be a multiple of 8"),
        ({"dstate": 264}, "spec.dstate is 264; it must be a multiple of 8 from 8 to 256"),
        ({"act_dtype": 7}, "spec.act_dtype is int8"),
        ({"state_dtype": 1}, "spec.state_dtype is float64 with spec.act_dtype float32"),
        ({"window": 65}, "spec.window is 65; it must be from 1 to 64"),
        ({"spec_len": 17}, "spec.spec_len is 17; it must be from 1 to 16"),
        ({"read_copy": 9}, "spec.read_copy is 9"),
        ({"dt_min": 0.5, "dt_max": 0.25}, "spec.dt_min is 0.5 with spec.dt_max 0.25"),
    ],
)
def test_the_library_refuses_a_bad_spec_by_name(host, change, message):
    spec = abi.c_recurrence_spec(small_spec("mamba2"))
    for name, value in change.items():
        setattr(spec, name, value)
    status = host.replayssm_slot_layout(ctypes.byref(spec), ctypes.byref(abi.CLayout()))
    assert status == 1
    with pytest.raises(ReplayError, match=message):
        library.check(host, status)


def test_null_pointers_are_refused(host):
    assert host.replayssm_slot_layout(None, ctypes.byref(abi.CLayout())) == 1
    assert b"spec is NULL" in host.replayssm_last_error()
    assert host.replayssm_conv_layout(ctypes.byref(abi.c_conv_spec(ConvSpec(64))), None) == 1
    assert b"out is NULL" in host.replayssm_last_error()


def test_statuses_become_exceptions(host):
    library.check(host, 0)
    with pytest.raises(ReplayError):
        library.check(host, 2)
    with pytest.raises(RuntimeError):
        library.check(host, abi.CUDA_ERROR)


def test_a_missing_library_says_how_to_build_it(tmp_path):
    with pytest.raises(ReplayError, match="does not exist; build it with `make lib`"):
        library.bind(tmp_path / "none.so")


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(ReplayError, match=r"cannot be used: .*build it again"):
        library.bind(path)


def test_another_abi_is_refused(tmp_path):
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int replayssm_abi_version() { return 77; }\n')
    with pytest.raises(ReplayError, match=f"has ABI 77; this package needs {abi.ABI_VERSION}:"):
        library.bind(compile_library(tmp_path, source, abi_version=77))


def test_the_environment_names_the_library(monkeypatch, tmp_path):
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "mine.so"))
    assert kernels.library_path() == tmp_path / "mine.so"
    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE)
    assert kernels.library_path().name == "libtrtllm_replayssm.so"


def test_names_and_arguments_are_those_of_the_reference():
    """Everything the models call exists in both, with the same leading arguments; kernels may add some."""
    names = set(kernels.__all__) - {"StepTuning", "info", "library_path", "load"}
    assert names <= set(reference.__all__)
    for name in names:
        ours, theirs = (list(inspect.signature(getattr(m, name)).parameters) for m in (kernels, reference))
        assert ours[: len(theirs)] == theirs, name
        assert set(ours[len(theirs) :]) <= {"out", "tuning", "exact"}, name


def test_cpu_pools_go_through_the_reference():
    """Same bits as the reference, without a library; `out` is filled."""
    spec = small_spec("mamba2", spec_len=2)
    inputs = make_inputs(spec, 3, 6)
    pools = [StatePool.allocate(SlotLayout(spec), 4) for _ in range(2)]
    slots, A = torch.tensor([2, 0, -1]), inputs.params["A"]
    for first in (0, 2, 4):
        step = inputs.span(first, first + 2)
        out = torch.empty_like(step["x"])
        y = kernels.mamba2_step(pools[0], slots, **step, **inputs.params, out=out)
        assert y is out
        assert torch.equal(y, reference.mamba2_step(pools[1], slots, **step, **inputs.params))
    kernels.materialize(pools[0], slots[:1], torch.tensor([1]), torch.tensor([3]), A=A)
    reference.materialize(pools[1], slots[:1], torch.tensor([1]), torch.tensor([3]), A=A)
    kernels.reset(pools[0], slots[1:2])
    reference.reset(pools[1], slots[1:2])
    assert torch.equal(pools[0].memory, pools[1].memory)
    tokens, bounds = inputs.packed([(0, 0, 5), (1, 0, 2)])
    scans = [
        op.mamba2_scan(p, slots[:2], **tokens, **inputs.params, cu_seqlens=bounds)
        for op, p in zip((kernels, reference), pools, strict=True)
    ]
    assert torch.equal(*scans)


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_cpu_pools_of_the_delta_rule_go_through_the_reference(kind):
    """Same bits as the reference, without a library; `out` is filled; materialize takes no A."""
    spec = small_spec(kind, spec_len=2)
    inputs = make_inputs(spec, 3, 6)
    pools = [StatePool.allocate(SlotLayout(spec), 4) for _ in range(2)]
    slots = torch.tensor([2, 0, -1])
    for first in (0, 2, 4):
        step = inputs.span(first, first + 2)
        out = torch.empty_like(step["v"])
        o = kernels.gated_delta_step(pools[0], slots, **step, **inputs.params, scale=0.5, out=out)
        assert o is out
        assert torch.equal(o, reference.gated_delta_step(pools[1], slots, **step, **inputs.params, scale=0.5))
    for op, pool in zip((kernels, reference), pools, strict=True):
        op.materialize(pool, slots[:1], torch.tensor([1]), torch.tensor([3]))
    tokens, bounds = inputs.packed([(0, 0, 5), (1, 0, 2)])
    scans = [
        op.gated_delta_scan(p, slots[:2], **tokens, **inputs.params, cu_seqlens=bounds)
        for op, p in zip((kernels, reference), pools, strict=True)
    ]
    assert torch.equal(*scans)
    assert torch.equal(pools[0].memory, pools[1].memory)


@pytest.fixture
def claimed(monkeypatch):
    """CPU pools are taken for CUDA ones; what passes the binding's own checks is noted in place of a library call."""
    calls = []
    for module in (mamba2, gated_delta, lifecycle):
        monkeypatch.setattr(module, "on_gpu", lambda pool: True)
        monkeypatch.setattr(module, "call", lambda name, params, stream: calls.append((name, params)))
    monkeypatch.setattr(tensors, "stream_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return calls


def test_delta_arguments_are_checked_by_name(claimed):
    spec = small_spec("kimi_delta", spec_len=2, act_dtype="bfloat16")
    inputs, slots = make_inputs(spec, 2, 2), torch.tensor([0, 1], dtype=torch.int32)
    pool, good = StatePool.allocate(SlotLayout(spec), 2), inputs.span(0, 1) | inputs.params

    def refused(message, **changes):
        with pytest.raises(ReplayError, match=message):
            kernels.gated_delta_step(pool, changes.pop("slots", slots), **(good | changes))

    refused(r"q has shape \[2, 2, 8\]; it must be \[rows, T, HK, K\]", q=good["q"][:, 0])
    refused(r"v has shape .*it must be \[2, 1, 4, 16\]", v=good["v"][:, :, :2])
    refused("k is torch.float32; it must be torch.bfloat16, the spec's act_dtype", k=good["k"].float())
    refused(r"a has shape \[2, 1, 4\]; it must be \[2, 1, 4, 8\]", a=good["a"][..., 0])
    refused(r"b has shape \[2, 1, 4, 8\]; it must be \[2, 1, 4\]", b=good["a"])
    refused(r"A_log has shape \[1\]; it must be \[4\]", A_log=good["A_log"][:1])
    refused("dt_bias is torch.int64; it must be a floating dtype", dt_bias=good["dt_bias"].long())
    refused("slots is torch.int16; it must be int32 or int64", slots=slots.short())
    refused(r"accepted has shape \[1\]; it must be \[2\]", accepted=slots[:1])
    refused("scale is 0.0; it must be a finite number other than 0", scale=0.0)
    refused("scale is inf; it must be a finite number", scale=float("inf"))
    refused("out is torch.float32; it must be torch.bfloat16", out=good["v"].float())
    with pytest.raises(ReplayError, match="pool holds mamba2; this operation needs gated_delta or kimi_delta"):
        kernels.gated_delta_step(StatePool.allocate(SlotLayout(small_spec("mamba2")), 1), slots, **good)
    with pytest.raises(ReplayError, match="A is given for a kimi_delta pool"):
        kernels.materialize(pool, slots, slots, slots, A=torch.ones(4))
    assert not claimed


def test_delta_parameters_arrive_as_the_c_interface_wants_them(claimed):
    """Strides of a view, 16-bit parameters widened, scale 0 for the default, sizes of the step and of the scan."""
    spec = small_spec("kimi_delta", spec_len=2)
    inputs, slots = make_inputs(spec, 2, 2), torch.tensor([0, 1], dtype=torch.int32)
    pool, good = StatePool.allocate(SlotLayout(spec), 2), inputs.span(0, 2) | inputs.params
    wide = torch.zeros(2, 2, 4, 3, 8)
    kernels.gated_delta_step(pool, slots, **(good | {"a": wide[..., 1, :], "A_log": good["A_log"].half()}))
    bounds = torch.tensor([0, 1, 3])
    packed = {n: v.flatten(0, 1)[:3] for n, v in inputs.tokens.items()}
    kernels.gated_delta_scan(pool, slots, **packed, **inputs.params, cu_seqlens=bounds, scale=2.0, exact=True)
    (step_name, step), (scan_name, scan) = claimed
    assert (step_name, scan_name) == ("replayssm_gated_delta_step", "replayssm_gated_delta_scan")
    assert (step.rows, step.tokens, step.scale, list(step.a.strides)) == (2, 2, 0.0, [192, 96, 24, 1])
    assert step.A_log.dtype == abi.DTYPE_CODES["float32"] and step.accepted.data is None
    assert (scan.sequences, scan.tokens, scan.scale, scan.exact, scan.cu_seqlens.bits) == (2, 3, 2.0, 1, 64)


def test_cpu_convolutions_go_through_the_reference():
    spec = ConvSpec(16, kernel=3, act_dtype="float32", spec_len=2)
    pools = [StatePool.allocate(ConvLayout(spec), 3) for _ in range(2)]
    weight, x, slots = torch.randn(16, 3), torch.randn(2, 2, 16), torch.tensor([1, 2])
    bounds = torch.tensor([0, 1, 4])
    results = []
    for op, pool in zip((kernels, reference), pools, strict=True):
        op.conv_reset(pool, slots)
        y = op.conv_step(pool, slots, x, weight)
        op.conv_materialize(pool, slots[:1], torch.tensor([1]), torch.tensor([0]))
        results.append((y, op.conv_scan(pool, slots, x.flatten(0, 1), weight, cu_seqlens=bounds)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch.equal(pools[0].memory, pools[1].memory)


def test_rates_that_are_positive_are_refused_on_the_cpu():
    """By every operation that takes A, and the slots stay as they were."""
    spec = small_spec("mamba2")
    inputs, slots, wrong = make_inputs(spec, 1, 1), torch.tensor([0]), torch.ones(spec.nheads)
    pool, packed = StatePool.allocate(SlotLayout(spec), 1), {n: v[0] for n, v in inputs.tokens.items()}
    before = pool.memory.clone()
    for call in (
        lambda: kernels.mamba2_step(pool, slots, **inputs.tokens, **(inputs.params | {"A": wrong})),
        lambda: kernels.mamba2_scan(
            pool, slots, **packed, **(inputs.params | {"A": wrong}), cu_seqlens=torch.tensor([0, 1])
        ),
        lambda: kernels.materialize(pool, slots, slots, slots, A=wrong),
    ):
        with pytest.raises(
            ReplayError, match=r"A holds 1; every rate must be finite and 0 or negative: A = -exp\(A_log"
        ):
            call()
    assert torch.equal(pool.memory, before)


def test_pools_of_another_kind_are_refused():
    conv = StatePool.allocate(ConvLayout(ConvSpec(16)), 1)
    recurrent = StatePool.allocate(SlotLayout(small_spec("mamba2")), 1)
    with pytest.raises(ReplayError, match="holds a convolution"):
        kernels.reset(conv, torch.tensor([0]))
    one = torch.tensor([0])
    for call in (
        lambda pool: kernels.mamba2_step(pool, one, *[one] * 5),
        lambda pool: kernels.reset(pool, one),
        lambda pool: kernels.conv_reset(pool, one),
    ):
        with pytest.raises(ReplayError, match="pool is SlotLayout; it must be a StatePool"):
            call(recurrent.layout)
    with pytest.raises(ReplayError, match="holds mamba2; this operation needs a pool with a ConvLayout"):
        kernels.conv_reset(recurrent, torch.tensor([0]))
