"""SlotLayout and ConvLayout: alignment, no overlap, published sizes, the packed struct, text and JSON forms."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import pytest

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import ConvLayout, ConvSpec, RecurrenceSpec, ReplayError, SlotLayout
from trtllm_replayssm.layout import CURSOR_COPIES, CURSOR_WORDS, LAYOUT_VERSION, REGION_NAMES, Region
from trtllm_replayssm.spec import DTYPE_BYTES

DTYPES = [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float16"), ("float64", "float64")]
SPECS = [
    shape.spec(state_dtype=state, act_dtype=act, window=window, spec_len=spec_len, read_copy=copy)
    for shape in (*ODD, MODELS["nemotron-3-super"], MODELS["kimi-k3"])
    for (state, act), (window, spec_len), copy in itertools.product(
        DTYPES, [(1, 1), (3, 2), (16, 4), (17, 16), (64, 1)], ["none", "bf16", "fp8_e4m3", "int8"]
    )
    if not (copy == "bf16" and state == "bfloat16")
]
CONV_SPECS = [
    ConvSpec(channels, kernel=kernel, act_dtype=act, spec_len=spec_len)
    for channels, kernel, act, spec_len in itertools.product(
        [8, 64, 72, 10240], [2, 4, 8], ["bfloat16", "float32", "float64"], [1, 16]
    )
]
LAYOUTS: list[Any] = [SlotLayout(s) for s in SPECS] + [ConvLayout(s) for s in CONV_SPECS]
HEAD, REGION = struct.Struct("<8sIIqq"), struct.Struct("<qqiiiiqqqq")


def addresses(region: Region) -> set[int]:
    """Every byte of the region's elements (not the padding of its rows)."""
    size = DTYPE_BYTES[region.dtype]
    out = set()
    for index in itertools.product(*(range(n) for n in region.shape[:-1])):
        first = region.offset + size * sum(i * s for i, s in zip(index, region.strides, strict=False))
        out.update(range(first, first + size * region.shape[-1]))
    return out


def test_regions_are_aligned_and_disjoint() -> None:
    for layout in LAYOUTS:
        end = 0
        for region in layout.regions:
            size = DTYPE_BYTES[region.dtype]
            assert region.offset >= end, f"{region.name} overlaps"
            assert region.offset % 128 == 0 and region.nbytes % 16 == 0
            assert region.strides[-1] == 1 and len(region.strides) == len(region.shape) == len(region.axes)
            rows = [s * size for s in region.strides[:-1]] if region.name != "cursor" else []
            assert all(stride % 16 == 0 for stride in rows), f"rows of {region.name} are not on 16 bytes"
            assert all(
                a >= b * n for a, b, n in zip(region.strides, region.strides[1:], region.shape[1:], strict=False)
            )
            assert (
                region.strides[0] * region.shape[0] * size
                <= region.nbytes
                < region.strides[0] * region.shape[0] * size + 16
            )
            end = region.end
        assert layout.slot_bytes % 128 == 0 and 0 <= layout.slot_bytes - end < 128


@pytest.mark.parametrize("spec", [ODD[0].spec(window=3, read_copy="int8"), ODD[6].spec(window=3, spec_len=2)])
def test_no_byte_belongs_to_two_elements(spec: RecurrenceSpec) -> None:
    layout = SlotLayout(spec)
    seen: set[int] = set()
    for region in layout.regions:
        own = addresses(region)
        count = 1
        for extent in region.shape:
            count *= extent
        assert len(own) == count * DTYPE_BYTES[region.dtype], f"elements of {region.name} overlap"
        assert not own & seen and min(own) == region.offset and max(own) < region.end
        seen |= own


def test_regions_of_each_kind() -> None:
    shape = {"nheads": 6, "ngroups": 2, "headdim": 16, "dstate": 24, "window": 5, "spec_len": 3}
    R = 8
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        "mamba2": {
            "ring_x": ("bfloat16", (6, R, 16)),
            "ring_b": ("bfloat16", (2, R, 24)),
            "ring_dt": ("float32", (6, R)),
        },
        "gated_delta": {
            "ring_k": ("bfloat16", (2, R, 24)),
            "ring_k_rnorm": ("float32", (2, R)),
            "ring_v": ("bfloat16", (6, R, 16)),
            "ring_d": ("bfloat16", (6, R, 16)),
            "ring_g": ("float32", (6, R)),
            "ring_beta": ("float32", (6, R)),
        },
    }
    expected["kimi_delta"] = {**expected["gated_delta"], "ring_g": ("float32", (6, R, 24))}
    common = {
        "cursor": ("int16", (6, CURSOR_COPIES, len(CURSOR_WORDS))),
        "state": ("float32", (6, 16, 24)),
        "read_copy": ("float8_e4m3", (6, 16, 24)),
        "read_scale": ("float32", (6, 16)),
    }
    scale = {"state_scale": ("float64", (6, CURSOR_COPIES))}
    for kind, rings in expected.items():
        layout = SlotLayout(RecurrenceSpec(kind, **shape, read_copy="fp8_e4m3"))
        own = rings if kind == "kimi_delta" else {**scale, **rings}
        assert {r.name: (r.dtype, r.shape) for r in layout.regions} == {**common, **own}
        for dtype in ("bfloat16", "float16"):
            assert "state_scale" not in SlotLayout(RecurrenceSpec(kind, **shape, state_dtype=dtype))
    assert "read_scale" not in SlotLayout(RecurrenceSpec("mamba2", **shape, read_copy="bf16"))
    assert "read_copy" not in SlotLayout(RecurrenceSpec("mamba2", **shape))
    conv = ConvLayout(ConvSpec(72, kernel=3, spec_len=2))
    assert {r.name: (r.dtype, r.shape) for r in conv.regions} == {
        "cursor": ("int16", (2, 4)),
        "columns": ("bfloat16", (4, 72)),
    }


#: Published: bytes of state, of one ring row without padding (GDN and KDA keep raw v, k's norm and beta besides what
#: other implementations keep), and of the convolution's history.
FIGURES = {
    "nemotron-3-nano-4b": (3_932_160, 17_792, 58_368),
    "nemotron-3-super": (4_194_304, 18_944, 61_440),
    "nemotron-3-ultra": (8_388_608, 35_840, 110_592),
    "nemotron-h-56b": (16_777_216, 37_888, 122_880),
    "qwen3.5-4b": (2_097_152, 12_416 + 8_192 + 64 + 128, 49_152),
    "qwen3.5-122b": (4_194_304, 20_736 + 16_384 + 64 + 256, 73_728),
    "kimi-linear-48b": (2_097_152, 32_768 + 8_192 + 128 + 128, 73_728),
    "kimi-k3": (6_291_456, 98_304 + 24_576 + 384 + 384, 221_184),
}


@pytest.mark.parametrize("name", FIGURES)
def test_bytes_of_published_models(name: str) -> None:
    layout = SlotLayout(MODELS[name].spec())
    row = 0
    for region in layout.regions:
        if region.name.startswith("ring"):
            elements = region.shape[0] * (region.shape[2] if len(region.shape) == 3 else 1)
            row += elements * DTYPE_BYTES[region.dtype]
    columns = ConvLayout(MODELS[name].conv_spec())["columns"]
    history = 3 * columns.strides[0] * DTYPE_BYTES[columns.dtype]
    assert (layout["state"].nbytes, row, history) == FIGURES[name]
    assert layout["cursor"].nbytes == 32 * MODELS[name].nheads
    assert layout.slot_bytes < 1.02 * (layout["state"].nbytes + layout.spec.ring_rows * row)


def test_packed_struct_parses_back() -> None:
    codes = dict(enumerate(DTYPE_BYTES, start=1))
    for layout in LAYOUTS:
        data = bytes(layout)
        assert len(data) == HEAD.size + len(REGION_NAMES) * REGION.size == 32 + 15 * 64
        magic, version, count, slot_bytes, rows = HEAD.unpack_from(data)
        assert (magic, version, count, slot_bytes) == (b"RSSMSLOT", LAYOUT_VERSION, 15, layout.slot_bytes)
        assert rows == (layout.spec.ring_rows if isinstance(layout, SlotLayout) else layout.spec.columns)
        for i, name in enumerate(REGION_NAMES):
            offset, nbytes, dtype, rank, *rest = REGION.unpack_from(data, HEAD.size + i * REGION.size)
            if name not in layout:
                assert (offset, nbytes, dtype, rank, *rest) == (-1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
                continue
            region = layout[name]
            strides = (*region.strides, 0, 0, 0)[:4]
            assert (offset, nbytes, codes[dtype], rank) == (
                region.offset,
                region.nbytes,
                region.dtype,
                len(region.shape),
            )
            assert tuple(rest) == (0, 0, *strides)


def test_equality_and_hash() -> None:
    a, b = (SlotLayout(MODELS["qwen3.5-4b"].spec()) for _ in range(2))
    other = SlotLayout(MODELS["qwen3.5-4b"].spec(window=8))
    assert a == b and hash(a) == hash(b) and a != other and a != "layout"
    assert len({a, b, other}) == 2
    assert len({bytes(layout) for layout in map(SlotLayout, set(SPECS))}) > len(set(SPECS)) // 2


def test_table_and_byte_map() -> None:
    layout = SlotLayout(ODD[0].spec(window=3, read_copy="int8"))
    lines = str(layout).splitlines()
    assert lines[0].split() == ["region", "dtype", "shape", "offset", "bytes", "share"]
    assert len(lines) == len(layout.regions) + 2
    for line, region in zip(lines[1:], layout.regions, strict=False):
        cells = line.split()
        assert cells[:2] == [region.name, region.dtype]
        assert (int(cells[-4]), int(cells[-3])) == (region.offset, region.nbytes)
        assert float(cells[-2]) == pytest.approx(100 * region.nbytes / layout.slot_bytes, abs=0.006)
    assert lines[-1].split() == ["slot", "0", str(layout.slot_bytes), "100.00", "%"]
    assert "slot_bytes=" in repr(layout) and "nheads=6" in repr(layout)


@pytest.mark.parametrize(
    "layout", [SlotLayout(ODD[0].spec(window=3)), ConvLayout(ConvSpec(72)), ConvLayout(ConvSpec(8))]
)
def test_byte_map_covers_every_byte_once(layout: Any) -> None:
    position, named = 0, []
    for line in layout.byte_map().splitlines():
        bounds, name = line.split(None, 1)
        first, last = (int(part, 16) for part in bounds.split(".."))
        assert first == position and last >= first
        position = last + 1
        if name != "(padding)":
            region = layout[name.split()[0]]
            assert (first, last + 1) == (region.offset, region.end)
            named.append(region.name)
    assert position == layout.slot_bytes and named == [r.name for r in layout.regions]


def test_json_round_trip() -> None:
    for layout in LAYOUTS:
        again = type(layout).from_json(layout.to_json())
        assert again == layout and again.spec == layout.spec


def _changed(**changes: Any) -> str:
    data = json.loads(SlotLayout(ODD[0].spec()).to_json())
    for key, value in changes.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    return json.dumps(data)


def _other_region(index: int, key: str, value: Any) -> str:
    data = json.loads(SlotLayout(ODD[0].spec()).to_json())
    data["regions"][index][key] = value
    return json.dumps(data)


TEXTS: list[tuple[str, str]] = [
    ("{", "layout text is not JSON"),
    ("", "layout text is not JSON"),
    ("[" * 100_000, "layout text is not JSON"),
    (None, "layout text is not JSON"),  # type: ignore[list-item]
    ("[1]", "layout text must be a JSON object"),
    (_changed(layout="conv"), "layout is 'conv'; this reads 'slot'"),
    (_changed(layout=...), "layout is None; this reads 'slot'"),
    (_changed(version=0), "version is 0; it must be 3"),
    (_changed(version=...), "version is None; it must be 3"),
    (_changed(spec=...), "RecurrenceSpec needs kind, nheads"),
    (_changed(spec=[]), "RecurrenceSpec data is list"),
    (
        _changed(spec={"kind": "mamba2", "nheads": 5, "ngroups": 2, "headdim": 8, "dstate": 8}),
        "ngroups is 2; it must divide",
    ),
    (_changed(slot_bytes=128), "slot_bytes in the layout text differs from what its spec gives: 128"),
    (_changed(slot_bytes=...), "slot_bytes in the layout text differs"),
    (_changed(regions=[]), "regions in the layout text differs"),
    (_changed(regions=...), "regions in the layout text differs"),
    (_other_region(1, "offset", 16), "regions in the layout text differs"),
    (_other_region(1, "dtype", "bfloat16"), "regions in the layout text differs"),
    (_other_region(2, "name", "ring_v"), "regions in the layout text differs"),
]


@pytest.mark.parametrize("text, message", TEXTS, ids=[m[:30] + str(i) for i, (_, m) in enumerate(TEXTS)])
def test_json_refused(text: str, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        SlotLayout.from_json(text)


def test_unknown_region_and_wrong_spec() -> None:
    layout = SlotLayout(ODD[0].spec())
    with pytest.raises(
        ReplayError, match="region 'ring_v' is not in this layout; it has cursor, state, state_scale, ring_x, ring_b"
    ):
        layout["ring_v"]
    with pytest.raises(ReplayError, match="spec is ConvSpec; it must be a RecurrenceSpec"):
        SlotLayout(ConvSpec(8))  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="spec is RecurrenceSpec; it must be a ConvSpec"):
        ConvLayout(ODD[0].spec())  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="layout is 'slot'; this reads 'conv'"):
        ConvLayout.from_json(layout.to_json())


def test_base_class_lays_out_nothing() -> None:
    from trtllm_replayssm.layout import _Layout

    with pytest.raises(TypeError, match="use SlotLayout or ConvLayout"):
        _Layout(ODD[0].spec())
