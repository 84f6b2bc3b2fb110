"""What goes into and comes out of an emitted network, as data: options, tensors with their roles, profile limits.

Needs the standard library alone and runs on Python 3.9; engine directories carry these objects as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Union

from ..errors import ReplayError, require
from ..models.config import MODEL_DTYPES, HybridConfig
from ..spec import MAX_SPEC_LEN, RecurrenceSpec, require_bool, require_choice, require_int

PLUGIN = "plugin"
IO = "io"
CONTEXT = "context"
GENERATION = "generation"
PHASES = (CONTEXT, GENERATION)

#: Axes whose length is chosen at run time.
ROWS, TOKENS, SLOTS, BOUND, LOGITS = "rows", "tokens", "slots", "bound", "logits"
DYNAMIC_AXES = (ROWS, TOKENS, SLOTS, BOUND, LOGITS)
_TENSOR_DTYPES = ("int32", "int64", *MODEL_DTYPES)
_MAX_POSITIONS = 1 << 24
_MAX_BATCH = 1 << 16

Axis = Union[int, str]


@dataclass(frozen=True)
class NetworkOptions:
    """How a network is emitted.

    Attributes:
        dtype: of activations, matrices and KV caches: float32, float16 or bfloat16.
        max_positions: tokens per sequence: length of the KV caches and of the rotation table.
        replay: ``plugin``: recurrences and convolutions are this package's plugins. ``io``: their operands are network
            outputs and their results network inputs, for a TensorRT whose networks take no plugins.
        window, spec_len, stagger, state_dtype: of the RecurrenceSpec of every recurrent layer.
        has_initial: the network has the input ``has_initial``, so that prompts can be scanned in pieces.
        exact_scan: prompts are scanned token by token, with the bits of decoding.
        float32_matmul: matrix products in fp32 with one rounding behind them, for 16-bit engines.

    Raises:
        ReplayError: a value that is not allowed.
    """

    dtype: str
    max_positions: int
    replay: str = PLUGIN
    window: int = 16
    spec_len: int = 1
    stagger: bool = True
    state_dtype: str = "float32"
    has_initial: bool = True
    exact_scan: bool = False
    float32_matmul: bool = False

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, MODEL_DTYPES)
        require_choice("replay", self.replay, (PLUGIN, IO))
        require_choice("state_dtype", self.state_dtype, MODEL_DTYPES)
        require_int("max_positions", self.max_positions, 1, _MAX_POSITIONS)
        for name in ("stagger", "has_initial", "exact_scan", "float32_matmul"):
            require_bool(name, getattr(self, name))
        # window and spec_len are checked by the RecurrenceSpec.

    def recurrence_spec(self, config: HybridConfig) -> RecurrenceSpec:
        """The RecurrenceSpec of every recurrent layer of ``config``."""
        return config.recurrence_spec(
            window=self.window,
            spec_len=self.spec_len,
            state_dtype=self.state_dtype,
            act_dtype=self.dtype,
            stagger=self.stagger,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dict with the field names."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NetworkOptions:
        """Inverse of :meth:`to_dict`. Raises ReplayError for unknown or missing keys and bad values."""
        return cls(**_known(cls, data, ("dtype", "max_positions")))


@dataclass(frozen=True)
class IOTensor:
    """One network input or output.

    Attributes:
        name: of the tensor. role: what it is (docs of ops/tensorrt_network.py). dtype: int32 or a float dtype.
        shape: lengths, or names of DYNAMIC_AXES. is_input: else an output.
        location: ``device``, or ``host`` for inputs that only plugins read, in host memory.
        layer: stateful layer that it belongs to, or None.

    Raises:
        ReplayError: an attribute of another kind.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[Axis, ...]
    is_input: bool
    location: str = "device"
    layer: int | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and bool(self.name), f"tensor name is {self.name!r}; it must be a name")
        require(isinstance(self.role, str), f"role of {self.name} is {self.role!r}; it must be a name")
        require_choice(f"dtype of {self.name}", self.dtype, _TENSOR_DTYPES)
        for axis in self.shape:
            known = axis in DYNAMIC_AXES if isinstance(axis, str) else type(axis) is int and axis > 0
            axes = ", ".join(DYNAMIC_AXES)
            require(known, f"shape of {self.name} has {axis!r}; an axis must be a length or one of {axes}")
        require_bool(f"is_input of {self.name}", self.is_input)
        require_choice(f"location of {self.name}", self.location, ("device", "host"))
        if self.layer is not None:
            require_int(f"layer of {self.name}", self.layer, 0, 1 << 16)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape with -1 for axes chosen at run time."""
        return tuple(-1 if isinstance(axis, str) else axis for axis in self.shape)


@dataclass(frozen=True)
class NetworkIO:
    """All inputs and outputs of a network, in the order in which they were made.

    ``keep`` are the arrays that the network's constants refer to: hold the object until the engine is built. It takes
    no part in comparisons and is not written.
    """

    tensors: tuple[IOTensor, ...]
    keep: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def inputs(self) -> tuple[IOTensor, ...]:
        """The inputs."""
        return tuple(t for t in self.tensors if t.is_input)

    @property
    def outputs(self) -> tuple[IOTensor, ...]:
        """The outputs."""
        return tuple(t for t in self.tensors if not t.is_input)

    def by_role(self, role: str) -> tuple[IOTensor, ...]:
        """The tensors of one role."""
        return tuple(t for t in self.tensors if t.role == role)

    def get(self, name: str) -> IOTensor | None:
        """The tensor called ``name``, or None."""
        return next((t for t in self.tensors if t.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of JSON values."""
        return {"tensors": [{**asdict(t), "shape": list(t.shape)} for t in self.tensors]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NetworkIO:
        """Inverse of :meth:`to_dict`. Raises ReplayError for unknown or missing keys."""
        entries = data.get("tensors") if isinstance(data, Mapping) else None
        if not isinstance(entries, (list, tuple)):
            raise ReplayError("NetworkIO data must be an object with a list named tensors")
        tensors = []
        for entry in entries:
            values = _known(IOTensor, entry, ("name", "role", "dtype", "shape", "is_input"))
            tensors.append(IOTensor(**{**values, "shape": tuple(values["shape"])}))
        return cls(tuple(tensors))


@dataclass(frozen=True)
class ProfileLimits:
    """Sizes that an engine is built for. What it is tuned for is ``opt_``; the default is the most, or for prompts and
    cached positions half of it.

    Attributes:
        max_batch: rows. max_input_len: longest prompt piece. max_positions: of the NetworkOptions, or less.
        slots: rows of the pools and KV caches. spec_len: most tokens of a row in a generation step.
        context_logits: most tokens of a row whose logits a context call gives.

    Raises:
        ReplayError: a size out of range.
    """

    max_batch: int
    max_input_len: int
    max_positions: int
    slots: int
    spec_len: int = 1
    context_logits: int = 1
    opt_batch: int | None = None
    opt_input_len: int | None = None
    opt_positions: int | None = None

    def __post_init__(self) -> None:
        require_int("max_batch", self.max_batch, 1, _MAX_BATCH)
        require_int("max_positions", self.max_positions, 1, _MAX_POSITIONS)
        require_int("max_input_len", self.max_input_len, 1, self.max_positions, " (max_positions)")
        require_int("slots", self.slots, self.max_batch, 1 << 24, " (at least max_batch)")
        require_int("spec_len", self.spec_len, 1, MAX_SPEC_LEN)
        require_int("context_logits", self.context_logits, 1, self.max_input_len, " (max_input_len)")
        for name, top in (
            ("batch", self.max_batch),
            ("input_len", self.max_input_len),
            ("positions", self.max_positions),
        ):
            value = getattr(self, f"opt_{name}")
            if value is not None:
                require_int(f"opt_{name}", value, 1, top, f" (max_{name})")

    def ranges(self, phase: str, *, continues: bool = True) -> dict[str, tuple[int, int, int]]:
        """Least, usual and largest length of every dynamic axis in a phase.

        Args:
            phase: ``context`` or ``generation``. continues: a context call may follow earlier ones of its sequence.
        """
        require_choice("phase", phase, PHASES)
        rows = (1, self.opt_batch or self.max_batch, self.max_batch)
        slots = (1, self.slots, self.slots)
        usual = self.opt_positions or max(1, self.max_positions // 2)
        if phase == GENERATION:
            tokens = (1, self.spec_len, self.spec_len)
            return {ROWS: rows, TOKENS: tokens, SLOTS: slots, BOUND: (1, usual, self.max_positions), LOGITS: tokens}
        prompt = self.opt_input_len or max(1, self.max_input_len // 2)
        bound = (1, 1, self.max_positions if continues else 1)
        tokens = (1, prompt, self.max_input_len)
        return {ROWS: rows, TOKENS: tokens, SLOTS: slots, BOUND: bound, LOGITS: (1, 1, self.context_logits)}


def _known(cls: Any, data: Any, required: tuple[str, ...]) -> dict[str, Any]:
    """``data`` as keyword arguments of the dataclass ``cls``."""
    if not isinstance(data, Mapping):
        raise ReplayError(f"{cls.__name__} data is {type(data).__name__}; it must be an object with named fields")
    unknown = sorted(str(key) for key in set(data) - {f.name for f in fields(cls)})
    require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}")
    missing = [name for name in required if name not in data]
    require(not missing, f"{cls.__name__} needs {', '.join(missing)}")
    return dict(data)
