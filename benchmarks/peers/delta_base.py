"""What bench_gated_delta's contenders of other packages offer: conventional steps and scans of GDN and KDA layers.

None of the packages named here has a replay kernel of GDN or KDA that runs from Triton alone, so their steps read and
write the state in every step; a verification of T tokens writes T states, one per token, and may go back to any.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtllm_replayssm import RecurrenceSpec, reference
from trtllm_replayssm.errors import require
from trtllm_replayssm.pool import torch_dtype

Tokens = dict[str, torch.Tensor]
#: Largest ||got - float64|| / ||float64|| of outputs and states, by state dtype: outputs and the operands of scans are
#: rounded to bf16, and so is a bf16 state in every step.
O_LIMIT = {"float32": 1.5e-2, "bfloat16": 4e-2}
ROWS = 3
#: Name in the table -> (module of this package, class).
PEERS = {
    "vllm-packed": ("delta_vllm", "VllmPacked"),
    "vllm-gating": ("delta_vllm", "VllmGating"),
    "vllm-chunk": ("delta_vllm", "VllmChunk"),
    "fla-recurrent": ("delta_fla", "FlaRecurrent"),
    "fla-chunk": ("delta_fla", "FlaChunk"),
}


@dataclass(frozen=True)
class DeltaLayer:
    """Parameters of one layer on the GPU: A_log fp32 [HV], dt_bias fp32 [HV] or [HV, K]."""

    spec: RecurrenceSpec
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def gates(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """g [..., HV] or [..., HV, K] and beta [..., HV] of raw a and b."""
        a, b, A_log, bias = (v.to(dtype) for v in (tokens["a"], tokens["b"], self.A_log, self.dt_bias))
        limits = {"gate": self.spec.gate, "lower_bound": self.spec.gate_lower_bound}
        return reference.delta_gates(a, b, A_log, bias, **limits)

    def states(self, count: int) -> torch.Tensor:
        """Random states [count, HV, V, K] of the spec's state dtype."""
        s, device = self.spec, self.A_log.device
        shape = (count, s.nheads, s.headdim, s.dstate)
        state = torch.empty(shape, device=device, dtype=torch_dtype(s.state_dtype))
        for part in state.split(64):
            part.normal_()
        return state

    def recur(self, state: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 outputs [rows, T, HV, V] and states behind the tokens [rows, T, ...]."""
        g, beta = self.gates(tokens, torch.float64)
        q, k, v = (tokens[name].double() for name in ("q", "k", "v"))
        return reference.gated_delta_recurrence(state.double(), q, k, v, g, beta)


@dataclass(frozen=True)
class PeerScan:
    """A scan ready to be captured. A call returns o [prompts, length, HV, V] and states [prompts, HV, V, K]."""

    call: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    note: str = ""


class DeltaPeer(abc.ABC):
    """One implementation. modules: what it imports. kinds, most_tokens, scans: what it can run."""

    modules: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("gated_delta",)
    most_tokens = 1
    scans = False

    def module(self, index: int = 0) -> object:
        """An imported module. Raises what the import raises."""
        return importlib.import_module(self.modules[index])

    def refuses(self, layer: DeltaLayer, mode: str, tokens: int) -> str:
        """Why it cannot run this; empty if it can. mode: step or scan."""
        try:
            for index in range(len(self.modules)):
                self.module(index)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        if layer.spec.kind not in self.kinds:
            return f"no {layer.spec.kind}"
        if mode == "scan":
            return "" if self.scans and layer.spec.state_dtype == "float32" else "no such scan"
        return "" if tokens <= self.most_tokens else f"at most {self.most_tokens} tokens a step"

    @abc.abstractmethod
    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        """A step of tokens [rows, T, ...]; state [1 + T * sequences, HV, V, K]: slot s has blocks 1 + T s + t, of which
        the step reads the first and writes token t's. The call returns o, any shape of rows * T * HV * V elements."""

    def scan(self, layer: DeltaLayer, tokens: Tokens) -> PeerScan:
        """A scan of prompts [prompts, length, ...] from zero states."""
        raise NotImplementedError(type(self).__name__)


def peer(name: str) -> DeltaPeer:
    """The contender of that name. Raises ReplayError for another name."""
    require(name in PEERS, f"peer is {name!r}; it must be one of {', '.join(PEERS)}")
    module, kind = PEERS[name]
    made = getattr(importlib.import_module(f"benchmarks.peers.{module}"), kind)()
    assert isinstance(made, DeltaPeer)
    return made


def blocks_of(slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """State blocks int32 [rows, T] of a step."""
    return 1 + slots[:, None] * tokens + torch.arange(tokens, device=slots.device, dtype=torch.int32)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; infinite if anything is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double().reshape(want.shape) - want).norm() / want.norm())


def check_step(peer: DeltaPeer, layer: DeltaLayer, tokens: Tokens) -> float:
    """Worst relative error of o and, token by token, of the states that one step of ROWS rows leaves."""
    count = tokens["q"].shape[1]
    state = layer.states(1 + 5 * count)
    slots = torch.tensor([3, 0, 4], dtype=torch.int32, device=state.device)
    blocks = blocks_of(slots, count).long()
    before = state[blocks[:, 0]].clone()
    o = peer.step(layer, state, slots, tokens)()
    assert isinstance(o, torch.Tensor)
    errors = [relative_error(o, layer.recur(before, tokens)[0])]
    for t in range(count):
        want = layer.recur(before, {name: value[:, : t + 1] for name, value in tokens.items()})[1]
        errors.append(relative_error(state[blocks[:, t]], want))
    return max(errors)


def check_scan(peer: DeltaPeer, layer: DeltaLayer, tokens: Tokens) -> float:
    """Worst relative error of o and of the final states over prompts."""
    o, state = peer.scan(layer, tokens).call()
    want_o, want_state = layer.recur(torch.zeros_like(state), tokens)
    return max(relative_error(o, want_o), relative_error(state, want_state))
