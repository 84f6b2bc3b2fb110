"""What every contender offers: availability, a stepper (state, ring, one step), and a scan of prompts.

A stepper owns the tensors in the form that its package wants. ``history`` is the number of committed tokens that a slot
has not folded into its state before the step; a conventional contender has none.
"""

from __future__ import annotations

import abc
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.shapes import Shape
from trtllm_replayssm.pool import torch_dtype

#: Ring window of every replay contender.
WINDOW = 16
#: Tokens per step of each scenario; the scan scenarios have tokens per prompt.
STEP_TOKENS = {"append": 1, "flush": 1, "mixed": 1, "step": 1, "verify4": 4, "verify8": 8}
SCAN_TOKENS = {"scan128": 128, "scan2048": 2048}
REPLAY_SCENARIOS = ("mixed", "append", "flush", "verify4", "verify8")
CONVENTIONAL_SCENARIOS = ("step", "verify4", "verify8")

#: Histories of the steady state at window 16: a T=1 row meets 1..16, and folds all of them at 16.
REPLAY_HISTORIES: dict[str, Sequence[int]] = {
    "append": (8,),
    "flush": (WINDOW,),
    "mixed": range(1, WINDOW + 1),
    "verify4": range(WINDOW + 1),
    "verify8": range(WINDOW + 1),
}
#: Share of rows that write their state in one step, hence the bytes that have to move.
WRITE_SHARE = {"append": 0.0, "flush": 1.0, "mixed": 1 / WINDOW, "verify4": 4 / 17, "verify8": 8 / 17, "step": 1.0}

Call = Callable[[], object]


@dataclass(frozen=True)
class Step:
    """Inputs and output of one step: x, y [rows, T, H, P], dt [rows, T, H], B, C [rows, T, G, N], all bf16."""

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    y: torch.Tensor

    def part(self, begin: int, end: int) -> Step:
        """Tokens begin..end-1 of every row, as tensors of their own; y is filled with NaN."""
        x, dt, B, C = (value[:, begin:end].contiguous() for value in (self.x, self.dt, self.B, self.C))
        return Step(x, dt, B, C, torch.full_like(x, float("nan")))


class Layer:
    """One Mamba-2 layer on the GPU: A, D, dt_bias fp32 [H]; D and dt_bias hold values that bf16 represents."""

    def __init__(self, shape: Shape, state_dtype: str, device: str = "cuda") -> None:
        self.shape, self.state_dtype, self.device = shape, state_dtype, device
        generator = torch.Generator(device=device).manual_seed(shape.nheads)
        heads = (shape.nheads,)
        self.A = -torch.empty(heads, device=device).uniform_(1, 16, generator=generator)
        self.D = torch.randn(heads, device=device, generator=generator).bfloat16().float()
        self.dt_bias = (torch.randn(heads, device=device, generator=generator) - 4.0).bfloat16().float()

    @property
    def torch_state_dtype(self) -> torch.dtype:
        """dtype of the state tensors."""
        return torch_dtype(self.state_dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        s = self.shape
        return s.nheads * s.headdim * s.dstate * self.torch_state_dtype.itemsize

    def inputs(self, rows: int, tokens: int) -> Step:
        """Random tokens."""
        s = self.shape

        def normal(*axes: int) -> torch.Tensor:
            return torch.randn(rows, tokens, *axes, device=self.device, dtype=torch.bfloat16)

        x, dt = normal(s.nheads, s.headdim), normal(s.nheads)
        B, C = normal(s.ngroups, s.dstate), normal(s.ngroups, s.dstate)
        return Step(x, dt, B, C, torch.empty_like(x))

    def state_tensor(self, slots: int) -> torch.Tensor:
        """Uninitialised [slots, H, P, N] of the state dtype."""
        s = self.shape
        return torch.empty(slots, s.nheads, s.headdim, s.dstate, device=self.device, dtype=self.torch_state_dtype)

    def tied(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A [H, P, N], D [H, P] and dt_bias [H, P] as views with stride 0, the form that peers take them in."""
        s = self.shape
        A = self.A[:, None, None].expand(s.nheads, s.headdim, s.dstate)
        return A, self.D[:, None].expand(-1, s.headdim), self.dt_bias[:, None].expand(-1, s.headdim)


class Stepper(abc.ABC):
    """State of ``slots`` sequences of a layer, and steps of ``tokens`` tokens on them."""

    #: Histories in each scenario, all equally likely; scenarios that are absent have none.
    histories: dict[str, Sequence[int]] = {}

    @abc.abstractmethod
    def randomize(self) -> None:
        """Fill state and ring with random values."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Zero states, empty rings."""

    @abc.abstractmethod
    def call(self, slots: torch.Tensor, step: Step) -> Call:
        """One step of the rows whose slots are int32 [rows], ready to be captured; it writes step.y."""

    def set_history(self, history: torch.Tensor) -> None:  # noqa: B027
        """Give every slot its history, int32 [slots]; a conventional contender has nothing to do."""

    def accept(self, slots: torch.Tensor, counts: torch.Tensor) -> None:  # noqa: B027
        """After a step: int32 [rows] tokens of it stay. What a serving loop does between two steps; not timed."""

    def restore(self) -> None:  # noqa: B027
        """Undo what a timed call changed in the cursors."""


@dataclass(frozen=True)
class Scan:
    """A scan of prompts, ready to be captured: y [prompts, length, H, P] and state [prompts, H, P, N] after a call."""

    call: Call
    result: Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Contender(abc.ABC):
    """One implementation. ``scenarios``: what it can run."""

    package = ""
    scenarios: tuple[str, ...] = ()
    #: Rows from which the contender is known to fail; such jobs come last.
    fragile_rows: int | None = None

    def unavailable(self) -> str:
        """Why it cannot run here; empty if it can."""
        try:
            self.load()
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return ""

    @abc.abstractmethod
    def load(self) -> None:
        """Import what is needed. Raises what the import raises."""

    def version(self) -> str:
        """Version of the installed package."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown version"

    def refuses(self, layer: Layer, scenario: str) -> str:
        """Why this layer and scenario are not supported; empty if they are."""
        return "" if scenario in self.scenarios else "no such operation"

    def stepper(self, layer: Layer, tokens: int, slots: int) -> Stepper:
        """State for steps of ``tokens`` tokens."""
        raise NotImplementedError(f"{self.package} has no step here")

    def scan(self, layer: Layer, prompts: Step, chunk: int) -> Scan:
        """A scan of prompts of equal length [prompts, length, ...]; ``chunk``: tokens per chunk, if it has any."""
        raise NotImplementedError(f"{self.package} has no scan here")

    def variants(self) -> tuple[dict[str, str], ...]:
        """Launch variants worth trying: environment variables each; the first is the default."""
        return ({},)


def tied_dt(dt: torch.Tensor, headdim: int) -> torch.Tensor:
    """dt [..., H] as a view [..., H, P] with stride 0."""
    return dt.unsqueeze(-1).expand(*dt.shape, headdim)


def fill_normal(tensor: torch.Tensor) -> None:
    """Random values in place, in parts, since a large half-precision fill needs no second buffer."""
    for part in tensor.split(64):
        part.normal_()
