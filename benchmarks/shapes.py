"""Shapes as data: the recurrent layers of published models, and odd ones. Tests and benchmarks share them.

Sizes are those of one GPU without tensor parallelism; ``shape.split(n)`` gives one rank's share. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trtllm_replayssm import ConvSpec, RecurrenceSpec
from trtllm_replayssm.errors import require


@dataclass(frozen=True)
class Shape:
    """One model's recurrent layer.

    Attributes:
        name: model name. kind, nheads, ngroups, headdim, dstate: as in RecurrenceSpec. layers: recurrent layers of the
            model. gate: KDA's gate form. kernel: taps of the short convolution.
    """

    name: str
    kind: str
    nheads: int
    ngroups: int
    headdim: int
    dstate: int
    layers: int
    gate: str = "softplus"
    kernel: int = 4

    def spec(self, **options: Any) -> RecurrenceSpec:
        """The RecurrenceSpec with ``options`` (window, spec_len, dtypes, read_copy ...) over its defaults."""
        return RecurrenceSpec(
            self.kind, self.nheads, self.ngroups, self.headdim, self.dstate, **{"gate": self.gate, **options}
        )

    def conv_spec(self, **options: Any) -> ConvSpec:
        """The ConvSpec of the convolution in front."""
        return ConvSpec(self.spec().conv_channels, self.kernel, **options)

    def split(self, ranks: int) -> Shape:
        """One rank's share under tensor parallelism: heads and groups divided; each rank keeps at least one group."""
        require(
            ranks >= 1 and self.nheads % ranks == 0,
            f"ranks is {ranks}; it must divide {self.name}'s {self.nheads} heads",
        )
        require(
            self.ngroups % ranks == 0 or ranks % self.ngroups == 0,
            f"ranks is {ranks}; it must divide {self.name}'s {self.ngroups} groups, or be a multiple of them",
        )
        groups = max(self.ngroups // ranks, 1)
        name = self.name if ranks == 1 else f"{self.name}-tp{ranks}"
        return replace(self, name=name, nheads=self.nheads // ranks, ngroups=groups)


NEMOTRON = (
    Shape("nemotron-3-nano-4b", "mamba2", 96, 8, 80, 128, 21),
    Shape("nemotron-3-nano-30b", "mamba2", 64, 8, 64, 128, 23),
    Shape("nemotron-3-super", "mamba2", 128, 8, 64, 128, 40),
    Shape("nemotron-3-ultra", "mamba2", 256, 8, 64, 128, 48),
    Shape("nemotron-nano-9b-v2", "mamba2", 128, 8, 80, 128, 27),
    Shape("nemotron-h-56b", "mamba2", 256, 8, 64, 256, 54),
)
QWEN = (
    Shape("qwen3-next-80b", "gated_delta", 32, 16, 128, 128, 36),
    Shape("qwen3.5-4b", "gated_delta", 32, 16, 128, 128, 24),
    Shape("qwen3.5-27b", "gated_delta", 48, 16, 128, 128, 48),
    Shape("qwen3.5-35b", "gated_delta", 32, 16, 128, 128, 30),
    Shape("qwen3.5-122b", "gated_delta", 64, 16, 128, 128, 36),
    Shape("qwen3.5-397b", "gated_delta", 64, 16, 128, 128, 45),
)
KIMI = (
    Shape("kimi-linear-48b", "kimi_delta", 32, 32, 128, 128, 20),
    Shape("kimi-k3", "kimi_delta", 96, 96, 128, 128, 69, gate="bounded"),
    Shape("glm-5.3-flash", "kimi_delta", 64, 64, 128, 128, 34, gate="bounded"),
    Shape("ling-3.0-flash", "kimi_delta", 32, 32, 128, 128, 35, gate="bounded"),
)
MODELS = {shape.name: shape for shape in NEMOTRON + QWEN + KIMI}

#: Small shapes that are awkward on purpose: 3 and 14 heads per group, sizes that are no power of two, one group.
ODD = (
    Shape("mamba2-hpg3", "mamba2", 6, 2, 48, 96, 1),
    Shape("mamba2-hpg14", "mamba2", 14, 1, 80, 16, 1),
    Shape("mamba2-8x8", "mamba2", 4, 4, 8, 8, 1),
    Shape("gdn-hpg3", "gated_delta", 6, 2, 48, 96, 1),
    Shape("gdn-hpg14", "gated_delta", 14, 1, 80, 16, 1),
    Shape("gdn-8x8", "gated_delta", 4, 4, 8, 8, 1),
    Shape("kda-softplus", "kimi_delta", 3, 3, 48, 96, 1),
    Shape("kda-bounded-hpg2", "kimi_delta", 4, 2, 80, 16, 1, gate="bounded"),
    Shape("kda-8x8", "kimi_delta", 2, 2, 8, 8, 1, gate="bounded"),
)
