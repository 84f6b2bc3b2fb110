"""ModelShape and Gpu: what the planner needs to know of a model and of a machine. Sizes alone, no tensors.

A shape comes from a preset (presets.py) or from a config.json (from_config.py). Parameter counts are estimates unless
they were read from weight files; every output of the planner that rests on them says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import require
from ..spec import GATED_DELTA, KIMI_DELTA, MAMBA2, ConvSpec, RecurrenceSpec

KIND_TITLES = {MAMBA2: "Mamba-2", GATED_DELTA: "Gated DeltaNet", KIMI_DELTA: "Kimi Delta Attention"}


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a model: how many, of which kind and size (symbols of docs/math.md section 1)."""

    kind: str
    layers: int
    nheads: int
    ngroups: int
    headdim: int
    dstate: int
    conv_kernel: int = 4

    def spec(self, **options: Any) -> RecurrenceSpec:
        """RecurrenceSpec of one layer; ``options`` are its remaining fields (window, spec_len, dtypes, read_copy)."""
        return RecurrenceSpec(self.kind, self.nheads, self.ngroups, self.headdim, self.dstate, **options)

    def conv(self, act_dtype: str, spec_len: int = 1) -> ConvSpec:
        """ConvSpec of the convolution(s) in front of one layer, all channels together."""
        channels = self.nheads * self.headdim + 2 * self.ngroups * self.dstate
        return ConvSpec(channels, kernel=self.conv_kernel, act_dtype=act_dtype, spec_len=spec_len)

    def shard(self, tp: int) -> Recurrent:
        """One rank's part: heads are divided; fewer groups than ranks are repeated on the ranks that need them.

        Raises:
            ReplayError: the heads, or the groups, cannot be divided evenly.
        """
        require(self.nheads % tp == 0, f"tp is {tp}; it must divide the {self.nheads} heads of the recurrent layers")
        even = self.ngroups % tp == 0 or tp % self.ngroups == 0
        require(even, f"tp is {tp}; it must divide, or be a multiple of, the {self.ngroups} groups of those layers")
        groups = max(1, self.ngroups // tp)
        return Recurrent(self.kind, self.layers, self.nheads // tp, groups, self.headdim, self.dstate, self.conv_kernel)


@dataclass(frozen=True)
class Attention:
    """The attention layers. ``latent`` elements per token (MLA) replace keys and values when not zero."""

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0

    def elements_per_token(self, tp: int) -> int:
        """Cached elements per token, layer and rank. Few KV heads, and a latent, are repeated on every rank."""
        if self.latent:
            return self.latent
        return 2 * -(-self.kv_heads // tp) * self.head_dim


@dataclass(frozen=True)
class Experts:
    """Routed experts: ``layers`` MoE layers of ``count`` experts, ``top_k`` used per token, ``params`` in each."""

    layers: int
    count: int
    top_k: int
    params: int

    @property
    def total(self) -> int:
        """Parameters of all routed experts."""
        return self.layers * self.count * self.params

    def distinct(self, tokens: int) -> float:
        """Expected experts that ``tokens`` tokens use in one layer, if each chooses at random: E (1 - (1 - k/E)^n)."""
        return self.count * (1.0 - (1.0 - self.top_k / self.count) ** tokens)


@dataclass(frozen=True)
class ModelShape:
    """One model.

    Attributes:
        params: all parameters. lookup_params: rows of them that a step only looks up (an untied input embedding).
        params_from: where ``params`` comes from. weights_bytes: of the weight files where there are any.
    """

    name: str
    recurrent: Recurrent
    attention: Attention
    ffn: str
    params: int
    lookup_params: int
    params_from: str
    source: str
    experts: Experts | None = None
    weights_bytes: int | None = None

    @property
    def active_params(self) -> float:
        """Parameters that one token uses (lookups not counted)."""
        return self.read_params(1)

    def read_params(self, tokens: int) -> float:
        """Parameters read by a step of ``tokens`` tokens: everything but lookups and the experts that nobody chose."""
        read = float(self.params - self.lookup_params)
        if self.experts is not None:
            read -= self.experts.layers * self.experts.params * (self.experts.count - self.experts.distinct(tokens))
        return read

    def describe(self) -> str:
        """One line: layers of each kind."""
        r = self.recurrent
        parts = [f"{r.layers} {KIND_TITLES[r.kind]}", f"{self.attention.layers} attention"]
        return " + ".join(parts) + f" layers, {self.ffn}"


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory bandwidth in bytes/s (measured copy where there is one), memory in bytes, dense bf16 flop/s."""

    name: str
    bandwidth: float
    memory: float
    flops: float
    source: str
