"""flash-linear-attention's Triton kernels: fused_recurrent_gated_delta_rule, fused_recurrent_kda, the chunked scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .delta_base import DeltaLayer, DeltaPeer, PeerScan, Tokens, blocks_of


def _bound(layer: DeltaLayer) -> dict[str, Any]:
    return {"lower_bound": layer.spec.gate_lower_bound} if layer.spec.gate == "bounded" else {}


class FlaRecurrent(DeltaPeer):
    """One launch with norms and gates in the kernel. GDN's takes no slot numbers: its states are those of the slots in
    order, and the new ones go to memory of their own. KDA's works on slots in place, verification included."""

    modules = ("fla.ops.gated_delta_rule.fused_recurrent", "fla.ops.kda.fused_recurrent")
    kinds = ("gated_delta", "kimi_delta")
    most_tokens = 8

    def refuses(self, layer: DeltaLayer, mode: str, tokens: int) -> str:
        reason = super().refuses(layer, mode, tokens)
        if not reason and layer.spec.kind == "gated_delta" and (tokens > 1 or layer.spec.state_dtype != "float32"):
            return "GDN: fp32 states and no state per token"
        return reason

    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        return (self._kda if layer.spec.kind == "kimi_delta" else self._gdn)(layer, state, slots, tokens)

    def _gdn(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        recurrent: Any = self.module(0)
        blocks = (slots + 1).long()
        in_order = bool((blocks[1:] - blocks[:-1] == 1).all())
        first = int(blocks[0])
        view = state[first : first + len(blocks)]

        def run() -> object:
            with torch.no_grad():
                o, new = recurrent.fused_recurrent_gated_delta_rule(
                    tokens["q"],
                    tokens["k"],
                    tokens["v"],
                    g=tokens["a"],
                    beta=tokens["b"],
                    initial_state=view if in_order else state[blocks],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    use_gate_in_kernel=True,
                    A_log=layer.A_log,
                    dt_bias=layer.dt_bias,
                    use_beta_sigmoid_in_kernel=True,
                    state_v_first=True,
                )
            if not in_order:  # the check's slots; what is timed has them in order
                state[blocks] = new
            return o

        return run

    def _kda(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        recurrent: Any = self.module(1)
        rows, count = tokens["q"].shape[:2]
        blocks = blocks_of(slots, count)
        flat = {name: tokens[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
        g, beta = (tokens[name].flatten(0, 1)[None] for name in ("a", "b"))
        out = torch.empty_like(flat["v"])
        options: dict[str, Any] = {
            "cu_seqlens": torch.arange(rows + 1, device=slots.device, dtype=torch.int32) * count,
            "ssm_state_indices": blocks if count > 1 else blocks[:, 0].contiguous(),
            **_bound(layer),
        }
        if count > 1:
            options["num_accepted_tokens"] = torch.ones(rows, device=slots.device, dtype=torch.int32)

        def run() -> object:
            recurrent.fused_recurrent_kda_fwd(
                **flat,
                g=g,
                beta=beta,
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                initial_state=state,
                inplace_final_state=True,
                state_v_first=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                out=out,
                **options,
            )
            return out

        return run


class FlaChunk(DeltaPeer):
    """chunk_gated_delta_rule and chunk_kda on prompts of equal length; g and beta come ready, which nobody times."""

    modules = ("fla.ops.gated_delta_rule.chunk", "fla.ops.kda.chunk")
    kinds = ("gated_delta", "kimi_delta")
    most_tokens = 0
    scans = True

    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        raise NotImplementedError("a scan alone")

    def scan(self, layer: DeltaLayer, tokens: Tokens) -> PeerScan:
        kda = layer.spec.kind == "kimi_delta"
        module: Any = self.module(1 if kda else 0)
        chunk = module.chunk_kda if kda else module.chunk_gated_delta_rule
        g, beta = layer.gates(tokens)
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True}

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                o, state = chunk(tokens["q"], tokens["k"], tokens["v"], g, beta.bfloat16() if kda else beta, **options)
            return o, state

        return PeerScan(run, "chunks of 64")
