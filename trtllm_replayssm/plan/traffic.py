"""Traffic model: bytes that the recurrent layers move per decode step. docs/math.md section 9 has the derivation.

Two forms of it. ``ideal_*`` is the closed form over S (state bytes) and r (bytes of one ring row), with the rows that
published implementations keep. ``replay_step`` counts what this package's slot moves: the elements of its SlotLayout
regions, both d and raw v of GDN and KDA, cursors and scales, the row that a fold reads, and the real cycle of flushes.
Both leave out what every form of decoding moves alike (x, z, y and other activations of the step), so their ratios are
upper bounds of a speed-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import require
from ..layout import CURSOR_COPIES, ConvLayout, Region, SlotLayout
from ..spec import DTYPE_BYTES, KIMI_DELTA, MAX_WINDOW, ConvSpec, RecurrenceSpec

#: Ring regions that outputs read, and that a fold reads. A step appends to all of them.
_OUTPUT_REGIONS = ("ring_x", "ring_b", "ring_dt", "ring_k", "ring_k_rnorm", "ring_d", "ring_g")
_FOLD_REGIONS = ("ring_x", "ring_b", "ring_dt", "ring_k", "ring_k_rnorm", "ring_v", "ring_g", "ring_beta")


@dataclass(frozen=True)
class Cycle:
    """Means over decoding steps: ``steps`` from flush to flush, ``history`` rows that outputs read, ``folded`` rows."""

    steps: float
    history: float
    folded: float


@dataclass(frozen=True)
class StepBytes:
    """Bytes moved by one sequence in one layer and one step, on average. cursors: with the scales of the state."""

    state_read: float = 0.0
    state_write: float = 0.0
    copy_read: float = 0.0
    copy_write: float = 0.0
    ring_read: float = 0.0
    fold_read: float = 0.0
    ring_append: float = 0.0
    cursors: float = 0.0
    conv_read: float = 0.0
    conv_write: float = 0.0

    @property
    def recurrence(self) -> float:
        """Total without the convolution."""
        return self.total - self.conv_read - self.conv_write

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


def check_acceptance(acceptance: float, spec_len: int) -> None:
    """Raise ReplayError unless 1 <= acceptance <= spec_len: tokens kept per step, the model's own token included."""
    ok = math.isfinite(acceptance) and 1.0 <= acceptance <= spec_len
    require(ok, f"acceptance is {acceptance}; it must be from 1 to {spec_len} tokens per step (1 + draft tokens)")


def flush_cycle(window: int, spec_len: int, acceptance: float) -> Cycle:
    """The cycle that the flush rule of docs/contracts.md settles into.

    Every step keeps floor(acceptance) or one more token of the step before, at random, so that the mean is
    ``acceptance``. A step with h committed rows folds them when h > 0 and h + spec_len > window.

    Raises:
        ReplayError: acceptance outside [1, spec_len].
    """
    check_acceptance(acceptance, spec_len)
    low = math.floor(acceptance)
    choices = [(low, 1.0 - (acceptance - low)), (low + 1, acceptance - low)]
    steps = history = folded = 0.0
    reached = {0: 1.0}  # probability that a cycle passes through h committed rows
    for h in range(window + 1):
        for kept, share in choices:
            mass, after = reached.get(h, 0.0) * share, h + kept
            if mass == 0.0:
                continue
            steps += mass
            if after + spec_len > window:
                folded += mass * after
            else:
                history += mass * after
                reached[after] = reached.get(after, 0.0) + mass
    return Cycle(steps, history / steps, folded / steps)


def row_bytes(region: Region) -> int:
    """Bytes of one row (one token) of a ring region, all heads or groups, without padding."""
    elements = math.prod(n for axis, n in zip(region.axes, region.shape, strict=True) if axis != "row")
    return elements * DTYPE_BYTES[region.dtype]


def ring_row_bytes(layout: SlotLayout) -> tuple[int, int, int]:
    """(read by outputs, read by a fold, appended) bytes per ring row of this package's slot."""
    ring = [r for r in layout.regions if r.name.startswith("ring_")]
    output = sum(row_bytes(r) for r in ring if r.name in _OUTPUT_REGIONS)
    fold = sum(row_bytes(r) for r in ring if r.name in _FOLD_REGIONS)
    return output, fold, sum(row_bytes(r) for r in ring)


def state_bytes(spec: RecurrenceSpec) -> int:
    """Bytes of the checkpoint state of one layer and sequence."""
    return spec.nheads * spec.headdim * spec.dstate * DTYPE_BYTES[spec.state_dtype]


def published_row_bytes(spec: RecurrenceSpec) -> int:
    """Ring bytes per token of the published layout: x, dt, B (Mamba-2) or d, k, g (GDN, KDA), decay in fp32."""
    act = DTYPE_BYTES[spec.act_dtype]
    gate = spec.nheads * spec.dstate if spec.kind == KIMI_DELTA else spec.nheads
    return spec.nheads * spec.headdim * act + spec.ngroups * spec.dstate * act + gate * 4


def conv_column_bytes(conv: ConvSpec) -> int:
    """Bytes of one column (one token's raw inputs) of the convolution."""
    return conv.channels * DTYPE_BYTES[conv.act_dtype]


# ---- closed form -----------------------------------------------------------------------------------------------------


def ideal_replay(state: float, row: float, window: int) -> float:
    """One token per step: S (1 + 1/L) + r (L - 1)/2 + r (L - 1)/L."""
    return state * (1 + 1 / window) + row * (window - 1) / 2 + row * (window - 1) / window


def ideal_native(state: float, spec_len: int) -> float:
    """Speculation that writes a state per token: (1 + T) S."""
    return (1 + spec_len) * state


def ideal_verify(state: float, row: float, window: int, spec_len: int, acceptance: float) -> float:
    """T tokens per step, a kept: S (1 + 1/n) + r a (n + 1)/2 + 2 r T with n = floor((L - T)/a) + 1 steps per flush."""
    check_acceptance(acceptance, spec_len)
    n = max(1, math.floor((window - spec_len) / acceptance) + 1)
    return state * (1 + 1 / n) + row * acceptance * (n + 1) / 2 + 2 * row * spec_len


def ideal_best_window(state: float, row: float) -> float:
    """sqrt(2 S / r), the window at which writing the state and reading the ring cost the same."""
    return math.sqrt(2 * state / row)


# ---- what this package's slot moves ----------------------------------------------------------------------------------


def conventional_step(spec: RecurrenceSpec, conv: ConvSpec) -> StepBytes:
    """One token, state and convolution window read and written: 2 S + 2 (kernel - 1) columns."""
    state, columns = state_bytes(spec), (conv.kernel - 1) * conv_column_bytes(conv)
    return StepBytes(state_read=state, state_write=state, conv_read=columns, conv_write=columns)


def native_step(spec: RecurrenceSpec, conv: ConvSpec) -> StepBytes:
    """spec.spec_len tokens with one state written per token, (1 + T) S; the convolution keeps T - 1 further columns."""
    state, column, spec_len = state_bytes(spec), conv_column_bytes(conv), spec.spec_len
    return StepBytes(
        state_read=state,
        state_write=spec_len * state,
        conv_read=(conv.kernel - 1) * column,
        conv_write=(conv.kernel - 2 + spec_len) * column,
    )


def replay_step(spec: RecurrenceSpec, conv: ConvSpec, acceptance: float = 1.0) -> StepBytes:
    """spec.spec_len tokens of which ``acceptance`` are kept, counted from the slot's own layout.

    With a read copy, steps without a flush read the copy in place of the state; a flush writes both.
    """
    layout = SlotLayout(spec)
    cycle = flush_cycle(spec.window, spec.spec_len, acceptance)
    flushes = 1.0 / cycle.steps
    state = float(state_bytes(spec))
    copy = float(sum(layout[name].nbytes for name in ("read_copy", "read_scale") if name in layout))
    scale = float(layout["state_scale"].nbytes) if "state_scale" in layout else 0.0
    state_read = state * (flushes if copy else 1.0)
    output_row, fold_row, append_row = ring_row_bytes(layout)
    column, conv_cursor = conv_column_bytes(conv), ConvLayout(conv)["cursor"].nbytes
    return StepBytes(
        state_read=state_read,
        state_write=state * flushes,
        copy_read=copy * (1.0 - flushes),
        copy_write=copy * flushes,
        ring_read=output_row * cycle.history,
        fold_read=fold_row * cycle.folded,
        ring_append=float(append_row * spec.spec_len),
        cursors=2.0 * layout["cursor"].nbytes + scale * (1.0 / CURSOR_COPIES + flushes),
        conv_read=float((conv.kernel - 1) * column + conv_cursor),
        conv_write=float((conv.kernel - 1 + spec.spec_len) * column + conv_cursor),
    )


def best_window(spec: RecurrenceSpec, conv: ConvSpec, acceptance: float = 1.0) -> int:
    """The window (1..64) whose replay step moves fewest bytes; the shorter one where two are equal."""
    return min(range(1, MAX_WINDOW + 1), key=lambda w: (replay_step(with_window(spec, w), conv, acceptance).total, w))


def with_window(spec: RecurrenceSpec, window: int) -> RecurrenceSpec:
    """The same spec with another window."""
    return RecurrenceSpec.from_dict({**spec.to_dict(), "window": window})
