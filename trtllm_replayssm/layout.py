"""SlotLayout and ConvLayout: where every byte of a slot lies. The only place in Python that knows offsets.

One sequence's memory for one layer is one contiguous block, the slot. Regions follow each other, each starting on a
128-byte line, each row inside a region on 16 bytes. The C side (plugins/common/slot_layout.h) computes the same
numbers; ``bytes(layout)`` is the packed struct that both sides compare. Needs the standard library alone (Python 3.9
included).

Cursors are four int16 words ``origin, history_len, pending_len, limit``:
    origin       ring row of the oldest committed token, in [0, ring_rows)
    history_len  committed tokens in the ring (not yet folded into the state)
    pending_len  tokens that the last step appended behind them, not yet accepted
    limit        length of the current window: the first one may be shortened (stagger), later ones equal ``window``
Every head holds CURSOR_COPIES equal copies, so that a kernel may split one head over that many blocks and each block
reads and writes a cursor that no other block touches.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ReplayError, require
from .spec import DTYPE_BYTES, MAMBA2, ConvSpec, RecurrenceSpec

REGION_ALIGNMENT = 128
ROW_ALIGNMENT = 16
CURSOR_WORDS = ("origin", "history_len", "pending_len", "limit")
CURSOR_COPIES = 4
#: Channels that share one cursor of the convolution; a kernel block owns whole groups of them.
CONV_CURSOR_CHANNELS = 64
LAYOUT_VERSION = 3

_COPY_DTYPE = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3", "int8": "int8"}
#: Read copies with one fp32 scale per (head, headdim row); bf16 has fp32's exponent range and needs none.
SCALED_COPIES = ("fp8_e4m3", "int8")

#: Region order is part of the format: index in this tuple = index in the packed struct.
REGION_NAMES = (
    "cursor",
    "state",
    "state_scale",
    "read_copy",
    "read_scale",
    "ring_x",
    "ring_b",
    "ring_dt",
    "ring_k",
    "ring_k_rnorm",
    "ring_v",
    "ring_d",
    "ring_g",
    "ring_beta",
    "columns",
)
_STRUCT_HEAD = struct.Struct("<8sIIqq")
_STRUCT_REGION = struct.Struct("<qq4i4q")
_MAGIC = b"RSSMSLOT"
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_BYTES, start=1)}


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Region:
    """A strided array inside the slot: ``shape`` elements of ``dtype`` at byte ``offset``.

    ``strides`` are in elements; the last axis is dense. ``nbytes`` includes the padding of rows to 16 bytes.
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte past the region."""
        return self.offset + self.nbytes


class _Builder:
    """Places regions one after another."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.offset = 0

    def add(self, name: str, dtype: str, row_alignment: int = ROW_ALIGNMENT, **axes: int) -> None:
        """Append a region with the named axes, rows (the last axis) padded to ``row_alignment`` bytes."""
        size = DTYPE_BYTES[dtype]
        shape = tuple(axes.values())
        strides = [1]
        if len(shape) > 1:
            strides.insert(0, _round_up(shape[-1] * size, row_alignment) // size)
            for extent in reversed(shape[1:-1]):
                strides.insert(0, strides[0] * extent)
        nbytes = _round_up(shape[0] * strides[0] * size, ROW_ALIGNMENT)
        offset = _round_up(self.offset, REGION_ALIGNMENT)
        self.regions.append(Region(name, dtype, tuple(axes), shape, tuple(strides), offset, nbytes))
        self.offset = offset + nbytes


class _Layout:
    """Behaviour shared by SlotLayout and ConvLayout; ``spec`` and ``_build`` come from the subclass."""

    spec: RecurrenceSpec | ConvSpec
    kind: str

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        builder = _Builder()
        self._build(builder)
        self.regions = tuple(builder.regions)
        #: Bytes of one slot; a pool may use a larger stride, in whole multiples of 16.
        self.slot_bytes = _round_up(builder.offset, REGION_ALIGNMENT)
        self._by_name = {r.name: r for r in self.regions}

    def _build(self, add: _Builder) -> None:
        raise TypeError("use SlotLayout or ConvLayout")

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Region:
        if name not in self._by_name:
            raise ReplayError(f"region {name!r} is not in this layout; it has {', '.join(self._by_name)}")
        return self._by_name[name]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and bytes(self) == bytes(other)

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r}, slot_bytes={self.slot_bytes})"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The layout for a reader: one line a region, offsets and sizes in bytes."""
        rows = [("region", "dtype", "shape", "offset", "bytes", "share")]
        for r in self.regions:
            shape = " x ".join(f"{a}={n}" for a, n in zip(r.axes, r.shape))
            share = f"{100 * r.nbytes / self.slot_bytes:.2f} %"
            rows.append((r.name, r.dtype, shape, str(r.offset), str(r.nbytes), share))
        rows.append(("slot", "", "", "0", str(self.slot_bytes), "100.00 %"))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = []
        for row in rows:
            cells = [row[i].ljust(widths[i]) if i < 3 else row[i].rjust(widths[i]) for i in range(6)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def byte_map(self) -> str:
        """Every byte of the slot, padding included: ``0xfirst..0xlast  region``, one line a run."""
        lines, position = [], 0
        for r in self.regions:
            if r.offset > position:
                lines.append(f"{position:#010x}..{r.offset - 1:#010x}  (padding)")
            lines.append(f"{r.offset:#010x}..{r.end - 1:#010x}  {r.name} {r.dtype}{list(r.shape)}")
            position = r.end
        if position < self.slot_bytes:
            lines.append(f"{position:#010x}..{self.slot_bytes - 1:#010x}  (padding)")
        return "\n".join(lines)

    def __bytes__(self) -> bytes:
        """Packed little-endian struct: magic, version, region count, slot bytes, ring rows; then per region of
        REGION_NAMES offset, bytes, dtype code, rank, two reserved words, strides (elements, leading axes first)."""
        rows = self.spec.ring_rows if isinstance(self.spec, RecurrenceSpec) else self.spec.columns
        out = [_STRUCT_HEAD.pack(_MAGIC, LAYOUT_VERSION, len(REGION_NAMES), self.slot_bytes, rows)]
        for name in REGION_NAMES:
            r = self._by_name.get(name)
            if r is None:
                out.append(_STRUCT_REGION.pack(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
            else:
                strides = list(r.strides) + [0] * (4 - len(r.strides))
                out.append(_STRUCT_REGION.pack(r.offset, r.nbytes, _DTYPE_CODES[r.dtype], len(r.shape), 0, 0, *strides))
        return b"".join(out)

    def to_json(self) -> str:
        """JSON with the spec, and the regions for readers and for the check of :meth:`from_json`."""
        regions = [{"name": r.name, "dtype": r.dtype, "shape": list(r.shape), "offset": r.offset, "bytes": r.nbytes}
                   for r in self.regions]  # fmt: skip
        data = {
            "layout": self.kind,
            "version": LAYOUT_VERSION,
            "spec": self.spec.to_dict(),
            "slot_bytes": self.slot_bytes,
            "regions": regions,
        }
        return json.dumps(data, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Any:
        """Rebuild from :meth:`to_json`.

        Raises:
            ReplayError: not JSON, of another kind or version, a bad spec, or regions that differ from what this
                version of the package lays out for that spec (memory written by another version).
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ReplayError(f"layout text is not JSON: {error}") from None
        require(isinstance(data, Mapping), "layout text must be a JSON object")
        require(data.get("layout") == cls.kind, f"layout is {data.get('layout')!r}; this reads {cls.kind!r}")
        require(
            data.get("version") == LAYOUT_VERSION, f"version is {data.get('version')!r}; it must be {LAYOUT_VERSION}"
        )
        spec_type = RecurrenceSpec if cls.kind == "slot" else ConvSpec
        layout = cls(spec_type.from_dict(data.get("spec", {})))
        own = json.loads(layout.to_json())
        for key in ("slot_bytes", "regions"):
            require(
                data.get(key) == own[key],
                f"{key} in the layout text differs from what its spec gives: {data.get(key)!r}",
            )
        return layout


class SlotLayout(_Layout):
    """Byte layout of one recurrent layer's slot for a :class:`RecurrenceSpec`.

    Regions (H = nheads, G = ngroups, P = headdim, N = dstate, R = ring_rows; rows marked * are padded to 16 bytes):
        cursor       int16 [H, copy, word]       see the module docstring
        state        state_dtype [H, P, N]       the checkpoint S0, divided by state_scale where there is one
        state_scale  fp64 [H, copy]              fp32 states of Mamba-2 and GDN: what decays in place of the state's
                                                 elements (docs/math.md 4.2); equal copies as of the cursor
        read_copy    [H, P, N], read_scale fp32 [H, P]*   optional; value = copy * scale
        Mamba-2:     ring_x act [H, R, P], ring_b act [G, R, N], ring_dt fp32 [H, R]* (after bias, softplus, clamp)
        GDN, KDA:    ring_k act [HK, R, K] (before normalisation), ring_k_rnorm fp32 [HK, R]* (1/|k|, or 1),
                     ring_v act [HV, R, V] (raw, for the fold), ring_d act [HV, R, V] (for reads only),
                     ring_g fp32 [HV, R]* (KDA: [HV, R, K]), ring_beta fp32 [HV, R]*
    """

    kind = "slot"
    spec: RecurrenceSpec

    def __init__(self, spec: RecurrenceSpec) -> None:
        require(isinstance(spec, RecurrenceSpec), f"spec is {type(spec).__name__}; it must be a RecurrenceSpec")
        super().__init__(spec)

    def _build(self, add: _Builder) -> None:
        s = self.spec
        act, decay, rows = s.act_dtype, s.decay_dtype, s.ring_rows
        add.add("cursor", "int16", 8, head=s.nheads, copy=CURSOR_COPIES, word=len(CURSOR_WORDS))
        add.add("state", s.state_dtype, head=s.nheads, headdim=s.headdim, dstate=s.dstate)
        if s.has_state_scale:
            add.add("state_scale", "float64", head=s.nheads, copy=CURSOR_COPIES)
        if s.read_copy != "none":
            add.add("read_copy", _COPY_DTYPE[s.read_copy], head=s.nheads, headdim=s.headdim, dstate=s.dstate)
        if s.read_copy in SCALED_COPIES:
            add.add("read_scale", decay, head=s.nheads, headdim=s.headdim)
        if s.kind == MAMBA2:
            add.add("ring_x", act, head=s.nheads, row=rows, headdim=s.headdim)
            add.add("ring_b", act, group=s.ngroups, row=rows, dstate=s.dstate)
            add.add("ring_dt", decay, head=s.nheads, row=rows)
            return
        add.add("ring_k", act, group=s.ngroups, row=rows, dstate=s.dstate)
        add.add("ring_k_rnorm", decay, group=s.ngroups, row=rows)
        add.add("ring_v", act, head=s.nheads, row=rows, headdim=s.headdim)
        add.add("ring_d", act, head=s.nheads, row=rows, headdim=s.headdim)
        if s.kind == "kimi_delta":
            add.add("ring_g", decay, head=s.nheads, row=rows, dstate=s.dstate)
        else:
            add.add("ring_g", decay, head=s.nheads, row=rows)
        add.add("ring_beta", decay, head=s.nheads, row=rows)


class ConvLayout(_Layout):
    """Byte layout of one convolution's slot for a :class:`ConvSpec`.

    Regions: cursor int16 [ceil(C / 64), word] (only pending_len is used), columns act [kernel-1+spec_len, C]: rows
    0..kernel-2 are the history before the last step, then the raw inputs of the last step's pending_len tokens. After
    ``accepted`` = a of them the history is rows a..a+kernel-2.
    """

    kind = "conv"
    spec: ConvSpec

    def __init__(self, spec: ConvSpec) -> None:
        require(isinstance(spec, ConvSpec), f"spec is {type(spec).__name__}; it must be a ConvSpec")
        super().__init__(spec)

    def _build(self, add: _Builder) -> None:
        s = self.spec
        groups = -(-s.channels // CONV_CURSOR_CHANNELS)
        add.add("cursor", "int16", 8, block=groups, word=len(CURSOR_WORDS))
        add.add("columns", s.act_dtype, column=s.columns, channel=s.channels)
