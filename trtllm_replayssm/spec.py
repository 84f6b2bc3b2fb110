"""RecurrenceSpec and ConvSpec: what one state-space layer computes and how its state is kept.

Frozen, validated when made, hashable, one object everywhere: reference, kernels, plugins (whose fields carry the same
names), engine configs. Needs the standard library alone and runs on Python 3.9, since engine builds do.

Symbols (docs/math.md): Mamba-2 has H = nheads, G = ngroups, P = headdim, N = dstate; Gated DeltaNet (GDN) and Kimi
Delta Attention (KDA) have HV = nheads value heads, HK = ngroups key heads, V = headdim, K = dstate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from .errors import ReplayError, require

MAMBA2 = "mamba2"
GATED_DELTA = "gated_delta"
KIMI_DELTA = "kimi_delta"
KINDS = (MAMBA2, GATED_DELTA, KIMI_DELTA)

#: Bytes per element of every dtype a slot can hold. float64 exists for the CPU reference only.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3": 1,
    "int8": 1,
}
STATE_DTYPES = ("float32", "bfloat16", "float16", "float64")
ACT_DTYPES = ("bfloat16", "float16", "float32", "float64")
READ_COPIES = ("none", "bf16", "fp8_e4m3", "int8")
GATES = ("softplus", "bounded")

MAX_WINDOW = 64
MAX_SPEC_LEN = 16
MAX_HEAD_DIM = 256
MAX_HEADS = 1024
#: Head sizes are whole multiples of this: one ring row is then whole 16-byte vectors in every dtype.
HEAD_DIM_STEP = 8


def require_int(name: str, value: Any, low: int, high: int, why: str = "") -> None:
    """Raise unless ``value`` is an int (no bool) with ``low <= value <= high``."""
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(ok, f"{name} is {value!r}; it must be a whole number from {low} to {high}{why}")


def require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``allowed``."""
    require(value in allowed, f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def require_bool(name: str, value: Any) -> None:
    """Raise unless ``value`` is a bool."""
    require(isinstance(value, bool), f"{name} is {value!r}; it must be true or false")


@dataclass(frozen=True)
class RecurrenceSpec:
    """One recurrent layer: its shapes, dtypes, ReplaySSM window and the switches of its formula.

    Attributes:
        kind: ``mamba2``, ``gated_delta`` (scalar gate per head) or ``kimi_delta`` (gate per key channel).
        nheads: H (Mamba-2) or HV (GDN, KDA).
        ngroups: G (Mamba-2: heads that share B and C) or HK (key heads). Divides ``nheads``.
        headdim: P or V. dstate: N or K. Both multiples of 8 up to 256 (the CUDA kernels: multiples of 16).
        state_dtype: of the checkpoint state. act_dtype: of x, B, C / q, k, v and of the ring rows that hold them.
        window: L, the most committed tokens that the ring holds before it is folded, 1..64. 1 is conventional decoding.
        spec_len: T, the most tokens one step may carry (1 + draft tokens), 1..16.
        read_copy: ``none``, or a second, smaller copy of the state from which outputs are read; the fold never uses it.
        stagger: shorten a slot's first window by a phase taken from the slot id, so that rows admitted together do
            not all flush in one step.
        dt_softplus, dt_min, dt_max: Mamba-2 only. dt = clamp(softplus(dt_raw + dt_bias), dt_min, dt_max).
        gate, gate_lower_bound: KDA only. ``softplus``: g = -exp(A_log) softplus(a + dt_bias); ``bounded``:
            g = gate_lower_bound * sigmoid(exp(A_log) (a + dt_bias)), with gate_lower_bound in [-5, 0).
        qk_l2norm: GDN, KDA only. Normalise q and k to length 1 (eps 1e-6 inside the root) before use.

    Raises:
        ReplayError: for every combination that is not allowed, naming the field, its value and what is allowed.
    """

    kind: str
    nheads: int
    ngroups: int
    headdim: int
    dstate: int
    state_dtype: str = "float32"
    act_dtype: str = "bfloat16"
    window: int = 16
    spec_len: int = 1
    read_copy: str = "none"
    stagger: bool = True
    dt_softplus: bool = True
    dt_min: float = 0.0
    dt_max: float = math.inf
    gate: str = "softplus"
    gate_lower_bound: float = -5.0
    qk_l2norm: bool = True

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        require_int("nheads", self.nheads, 1, MAX_HEADS)
        require_int("ngroups", self.ngroups, 1, MAX_HEADS)
        require(
            self.nheads % self.ngroups == 0,
            f"ngroups is {self.ngroups}; it must divide nheads, which is {self.nheads}",
        )
        for name in ("headdim", "dstate"):
            value = getattr(self, name)
            require_int(name, value, HEAD_DIM_STEP, MAX_HEAD_DIM)
            require(
                value % HEAD_DIM_STEP == 0,
                f"{name} is {value}; it must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}",
            )
        require_choice("state_dtype", self.state_dtype, STATE_DTYPES)
        require_choice("act_dtype", self.act_dtype, ACT_DTYPES)
        require(
            (self.state_dtype == "float64") == (self.act_dtype == "float64"),
            f"state_dtype is {self.state_dtype} with act_dtype {self.act_dtype}; float64 (reference only) must be "
            "chosen for both or for neither",
        )
        require_int("window", self.window, 1, MAX_WINDOW, " (1 is conventional decoding)")
        require_int("spec_len", self.spec_len, 1, MAX_SPEC_LEN, " (1 + draft tokens)")
        require_choice("read_copy", self.read_copy, READ_COPIES)
        require(
            self.read_copy == "none"
            or self.state_dtype in ("float32", "float64")
            or self.read_copy in ("fp8_e4m3", "int8"),
            f"read_copy is {self.read_copy} with state_dtype {self.state_dtype}; a 16-bit copy saves nothing over a "
            "16-bit state: use none, fp8_e4m3 or int8",
        )
        require_bool("stagger", self.stagger)
        self._check_formula_switches()

    def _check_formula_switches(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        users = {
            "dt_softplus": (MAMBA2,),
            "dt_min": (MAMBA2,),
            "dt_max": (MAMBA2,),
            "gate": (KIMI_DELTA,),
            "gate_lower_bound": (KIMI_DELTA,),
            "qk_l2norm": (GATED_DELTA, KIMI_DELTA),
        }
        for name, kinds in users.items():
            value = getattr(self, name)
            require(
                self.kind in kinds or value == defaults[name],
                f"{name} is {value!r} for kind {self.kind}; it applies to {', '.join(kinds)} only",
            )
        require_bool("dt_softplus", self.dt_softplus)
        require_bool("qk_l2norm", self.qk_l2norm)
        require_choice("gate", self.gate, GATES)
        for name in ("dt_min", "dt_max", "gate_lower_bound"):
            value = getattr(self, name)
            require(
                isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value),
                f"{name} is {value!r}; it must be a number",
            )
        require(
            0.0 <= self.dt_min <= self.dt_max,
            f"dt_min is {self.dt_min} with dt_max {self.dt_max}; they must satisfy 0 <= dt_min <= dt_max",
        )
        require(math.isfinite(self.dt_min), f"dt_min is {self.dt_min}; it must be finite")
        require(
            -5.0 <= self.gate_lower_bound < 0.0,
            f"gate_lower_bound is {self.gate_lower_bound}; it must be from -5 up to, not including, 0",
        )

    @property
    def heads_per_group(self) -> int:
        """H/G, or HV/HK."""
        return self.nheads // self.ngroups

    @property
    def ring_rows(self) -> int:
        """R: at most max(window, spec_len) committed rows plus one step's tokens: an append never meets a live row."""
        return max(self.window, self.spec_len) + self.spec_len

    @property
    def decay_dtype(self) -> str:
        """dtype of dt, g and beta in the ring: fp32, or float64 in the float64 reference."""
        return "float64" if self.act_dtype == "float64" else "float32"

    @property
    def has_state_scale(self) -> bool:
        """Whether slots keep a scale beside the state (layout.py): fp32 states with one decay a head."""
        return self.state_dtype == "float32" and self.kind != "kimi_delta"

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution in front of the recurrence: x|B|C or q|k|v."""
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate

    def first_limit(self, slot: int) -> int:
        """Length of the first window of ``slot`` (later ones are ``window``): window - slot mod window if staggered."""
        return self.window - slot % self.window if self.stagger else self.window

    def to_dict(self) -> dict[str, Any]:
        """Plain dict; an infinite dt_max is the string ``inf`` so that the JSON stays legal."""
        out = asdict(self)
        if math.isinf(self.dt_max):
            out["dt_max"] = "inf"
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecurrenceSpec:
        """Inverse of :meth:`to_dict`. Raises ReplayError for unknown or missing keys and for bad values."""
        return cls(**_checked_fields(cls, data))


@dataclass(frozen=True)
class ConvSpec:
    """The depthwise causal convolution in front of a recurrence, with rollback of rejected tokens.

    Attributes:
        channels: C, a multiple of 8 up to 65,536. kernel: taps, 2..8. act_dtype: of inputs, outputs and kept columns.
        spec_len: T, the most tokens one step may carry, 1..16. activation: ``silu`` or ``none``.

    Raises:
        ReplayError: as for RecurrenceSpec.
    """

    channels: int
    kernel: int = 4
    act_dtype: str = "bfloat16"
    spec_len: int = 1
    activation: str = "silu"

    def __post_init__(self) -> None:
        require_int("channels", self.channels, 8, 65536)
        require(self.channels % 8 == 0, f"channels is {self.channels}; it must be a multiple of 8")
        require_int("kernel", self.kernel, 2, 8)
        require_choice("act_dtype", self.act_dtype, ACT_DTYPES)
        require_int("spec_len", self.spec_len, 1, MAX_SPEC_LEN, " (1 + draft tokens)")
        require_choice("activation", self.activation, ("silu", "none"))

    @property
    def columns(self) -> int:
        """Columns kept per slot: kernel - 1 of history, then the tokens of the last step."""
        return self.kernel - 1 + self.spec_len

    def to_dict(self) -> dict[str, Any]:
        """Plain dict with the field names."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ConvSpec:
        """Inverse of :meth:`to_dict`. Raises ReplayError for unknown or missing keys and for bad values."""
        return cls(**_checked_fields(cls, data))


def _checked_fields(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``data``, refusing keys that ``cls`` does not have, missing required keys, and decoding ``inf``."""
    if not isinstance(data, Mapping):
        raise ReplayError(f"{cls.__name__} data is {type(data).__name__}; it must be an object with named fields")
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(str(key) for key in set(data) - set(known))
    require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}; its fields are {', '.join(known)}")
    required = [n for n, f in known.items() if f.default is MISSING]
    missing = [n for n in required if n not in data]
    require(not missing, f"{cls.__name__} needs {', '.join(missing)}")
    return {k: (math.inf if v == "inf" else v) for k, v in data.items()}
