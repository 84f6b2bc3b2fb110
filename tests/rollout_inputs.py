"""Inputs that the trained models' recurrences really get, and long rollouts of two decodings over them.

record() runs the first layers of a shipped model (examples/models) over held-out text and keeps what its third
recurrent layer is given: q, k, v behind the convolution and the raw gates. A Rollout decodes them twice, conventionally
(window 1) and with a ring, and compares the two checkpoints bit by bit whenever the ring has been folded, which is when
both hold the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from replay_cases import raw_state

from trtllm_replayssm import RecurrenceSpec, SlotLayout
from trtllm_replayssm.pool import StatePool, torch_dtype

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from tiny import checkpoint, corpus, kimi_linear, scans  # noqa: E402

MODELS = {"gated_delta": "tiny-qwen3_5", "kimi_delta": "tiny-kimi-linear"}
LAYER = 2
#: Bytes that the model sees at once; longer rollouts put such pieces of text one behind the other.
PIECE = 2000


@dataclass(frozen=True)
class Recorded:
    """Inputs of one layer: q, k, v, a, b [rows, tokens, ...] in fp32, A_log, dt_bias; dims as in RecurrenceSpec."""

    kind: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def heads(self, count: int) -> Recorded:
        """The first ``count`` key heads and the value heads that use them."""
        values = count * self.v.shape[2] // self.k.shape[2]
        per_key = {name: getattr(self, name)[:, :, :count] for name in ("q", "k")}
        per_value = {name: getattr(self, name)[:, :, :values] for name in ("v", "a", "b")}
        weights = {name: getattr(self, name)[:values] for name in ("A_log", "dt_bias")}
        return dataclasses.replace(self, **per_key, **per_value, **weights)

    def spec(self, **options: Any) -> RecurrenceSpec:
        """RecurrenceSpec of these dims."""
        (heads, headdim), (groups, dstate) = self.v.shape[2:], self.k.shape[2:]
        return RecurrenceSpec(self.kind, heads, groups, headdim, dstate, **options)


@functools.cache
def record(kind: str, rows: int, tokens: int, device: str = "cpu") -> Recorded:
    """``tokens`` tokens of ``rows`` different places of the held-out text, computed on ``device``."""
    model = checkpoint.load(ROOT / "examples" / "models" / MODELS[kind]).to(device)
    pieces = -(-tokens // PIECE)
    text = corpus.excerpt(corpus.load_corpus().held_out, rows * pieces, PIECE)[:, :PIECE].to(device)
    layers = model.get_submodule("model.layers")
    mixer = layers[LAYER].self_attn if kind == "kimi_delta" else layers[LAYER].linear_attn
    seen: list[tuple[torch.Tensor, ...]] = []
    original = mixer._recurrence

    def capture(qkv: Any, *gates: torch.Tensor) -> torch.Tensor:
        q, k, v = _convolved(mixer, qkv)
        b, a = gates if kind == "gated_delta" else gates[::-1]
        seen.append((q, k, v, a if kind == "gated_delta" else a.unflatten(-1, (v.shape[2], -1)), b))
        return original(qkv, *gates)

    mixer._recurrence = capture
    with torch.no_grad():
        for piece in text:
            x = model.get_submodule("model.embed_tokens")(piece[None])
            for layer in layers[: LAYER + 1]:
                x = layer(x)
    joined = (torch.cat(parts).reshape(rows, -1, *parts[0].shape[2:])[:, :tokens] for parts in zip(*seen, strict=True))
    a_log, dt_bias = mixer.A_log.detach().flatten(), mixer.dt_bias.detach()
    if kind == "kimi_delta":
        dt_bias = dt_bias.view(len(a_log), -1)
    return Recorded(kind, *joined, a_log, dt_bias)


def _convolved(mixer: Any, qkv: Any) -> list[torch.Tensor]:
    """q, k, v [1, tokens, heads, size] behind the short convolution."""
    if isinstance(mixer, kimi_linear.KimiDeltaAttention):
        convs = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
        parts = [scans.causal_conv_silu(x, conv.weight, None) for x, conv in zip(qkv, convs, strict=True)]
        return [part.unflatten(-1, (mixer.heads, mixer.dim)) for part in parts]
    joined = scans.causal_conv_silu(qkv, mixer.conv1d.weight, None)
    q, k, v = joined.split([mixer.keys, mixer.keys, mixer.values], dim=-1)
    sizes = ((mixer.key_heads, mixer.key_dim),) * 2 + ((mixer.value_heads, mixer.value_dim),)
    return [part.unflatten(-1, size) for part, size in zip((q, k, v), sizes, strict=True)]


class Rollout:
    """Window 1 and ``window`` side by side over recorded inputs, one token per step; ``impl`` has the operations.

    Attributes:
        flushes: checkpoints compared, per row. unequal: those whose bits differ, per row. output_gap: largest |o_1 -
            o_window| seen. Tensors on the device, so that a rollout reads nothing back.
    """

    def __init__(self, impl: Any, recorded: Recorded, window: int, act: str, device: torch.device | str) -> None:
        self.impl = impl
        rows = recorded.q.shape[0]
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.pools = [
            StatePool.allocate(SlotLayout(recorded.spec(window=w, act_dtype=act)), rows, device) for w in (1, window)
        ]
        wide, dtype = {"A_log", "dt_bias"}, torch_dtype(act)
        self.inputs = {
            name: getattr(recorded, name).to(device, torch.float32 if name in wide else dtype).contiguous()
            for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")
        }
        for pool in self.pools:
            impl.reset(pool, self.slots)
        self.flushes = torch.zeros(rows, dtype=torch.int64, device=device)
        self.unequal = torch.zeros_like(self.flushes)
        self.output_gap = torch.zeros((), device=device)
        self.outputs: list[torch.Tensor] = []

    def run(self, start: int, stop: int, keep_outputs: bool = False) -> None:
        """Decode tokens ``start`` .. ``stop`` - 1."""
        weights = {name: self.inputs[name] for name in ("A_log", "dt_bias")}
        conventional, replay = self.pools
        for t in range(start, stop):
            token = [self.inputs[name][:, t : t + 1] for name in ("q", "k", "v", "a", "b")]
            outputs = [self.impl.gated_delta_step(pool, self.slots, *token, **weights) for pool in self.pools]
            flushed = replay["cursor"][:, 0, 0, 1] == 0
            equal = torch.eq(*(raw_state(pool, self.slots).view(torch.int32) for pool in (conventional, replay))).all(1)
            self.flushes += flushed
            self.unequal += flushed & ~equal
            gap = (outputs[0].float() - outputs[1].float()).abs().max()
            self.output_gap = torch.maximum(self.output_gap, gap)
            if keep_outputs:
                self.outputs.append(outputs[1])
