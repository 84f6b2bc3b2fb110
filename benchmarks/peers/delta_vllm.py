"""vLLM's Triton kernels of GDN and KDA: packed decoding, decoding with gates in the kernel, chunked scan.

State block 0 is vLLM's null block, so slot s is block s + 1 (T blocks a slot in verification).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .delta_base import DeltaLayer, DeltaPeer, PeerScan, Tokens, blocks_of

_OPS = "vllm.third_party.flash_linear_attention.ops"


class VllmPacked(DeltaPeer):
    """fused_recurrent_gated_delta_rule_packed_decode: one launch from the convolution's output; T = 1."""

    modules = (f"{_OPS}.fused_recurrent",)

    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        decode: Any = self.module()
        parts = [tokens[name].flatten(1) for name in ("q", "k", "v")]
        mixed, a, b = torch.cat(parts, dim=1), tokens["a"][:, 0], tokens["b"][:, 0]
        blocks, out, scale = slots + 1, torch.empty_like(tokens["v"]), layer.spec.dstate**-0.5

        def run() -> object:
            decode.fused_recurrent_gated_delta_rule_packed_decode(
                mixed, a, b, layer.A_log, layer.dt_bias, scale, state, out, blocks, use_qk_l2norm_in_kernel=True
            )
            return out

        return run


class VllmGating(DeltaPeer):
    """fused_sigmoid_gating_delta_rule_update: decoding and verification of GDN, decoding of KDA's softplus gate."""

    modules = (f"{_OPS}.fused_sigmoid_gating", f"{_OPS}.chunk")
    kinds = ("gated_delta", "kimi_delta")
    most_tokens = 8

    def refuses(self, layer: DeltaLayer, mode: str, tokens: int) -> str:
        reason = super().refuses(layer, mode, tokens)
        if not reason and layer.spec.kind == "kimi_delta" and (tokens > 1 or mode == "scan"):
            return "its KDA pointers advance by one token of GDN"
        return reason or ("softplus gate alone" if layer.spec.gate == "bounded" else "")

    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        update: Any = self.module()
        rows, count = tokens["q"].shape[:2]
        blocks = blocks_of(slots, count)
        flat = {name: tokens[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
        a, b = (tokens[name].flatten(0, 1).flatten(1) for name in ("a", "b"))
        options: dict[str, Any] = {
            "cu_seqlens": torch.arange(rows + 1, device=slots.device, dtype=torch.int32) * count,
            "ssm_state_indices": blocks if count > 1 else blocks[:, 0].contiguous(),
            "is_kda": layer.spec.kind == "kimi_delta",
        }
        if count > 1:
            options["num_accepted_tokens"] = torch.ones(rows, device=slots.device, dtype=torch.int32)

        def run() -> object:
            return update.fused_sigmoid_gating_delta_rule_update(
                layer.A_log,
                a,
                b,
                layer.dt_bias,
                **flat,
                initial_state=state,
                use_qk_l2norm_in_kernel=True,
                **options,
            )[0]

        return run


class VllmChunk(DeltaPeer):
    """chunk_gated_delta_rule; g and beta come ready, which nobody times."""

    modules = (f"{_OPS}.chunk",)
    most_tokens = 0
    scans = True

    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        raise NotImplementedError("a scan alone")

    def scan(self, layer: DeltaLayer, tokens: Tokens) -> PeerScan:
        chunk: Any = self.module()
        g, beta = layer.gates(tokens)
        rows, length = tokens["q"].shape[:2]
        s, device = layer.spec, g.device
        start = torch.zeros(rows, s.nheads, s.headdim, s.dstate, device=device)
        flat = [v.flatten(0, 1)[None] for v in (tokens["q"], tokens["k"], tokens["v"], g, beta)]
        chunks = -(-length // 64)
        prompt = torch.arange(rows, device=device, dtype=torch.int32)
        options = {
            "cu_seqlens": torch.arange(rows + 1, device=device, dtype=torch.int32) * length,
            "chunk_indices": torch.stack(
                [prompt.repeat_interleave(chunks), prompt.new_tensor(range(chunks)).repeat(rows)], 1
            ),
            "chunk_offsets": torch.arange(rows + 1, device=device, dtype=torch.int32) * chunks,
        }

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            o, state = chunk.chunk_gated_delta_rule(
                *flat, initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True, **options
            )
            return o, state

        return PeerScan(run, "chunks of 64")
