"""Evaluates a recorded network (README.md) with torch: layers by definition, plugins by trtllm_replayssm.reference.

State pools are the memory that TensorRT-LLM would allocate: uint8 [slots, stride], fed in place of the pointer inputs.
A batch is all context or all generation, as its C++ runtime's are. gpt_attention is computed here: rows of keys and
values per layer and sequence, where a sequence is named by its first KV block.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trtllm_replayssm import reference
from trtllm_replayssm.layout import ConvLayout, SlotLayout
from trtllm_replayssm.pool import StatePool
from trtllm_replayssm.spec import ConvSpec, RecurrenceSpec

_ACT = {0: "float32", 1: "float16", 7: "bfloat16"}
_TORCH = {0: torch.float32, 1: torch.float16, 7: torch.bfloat16, 3: torch.int32, 8: torch.int64}


class Interpreter:
    """One network and the keys and values of its sequences."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs by name. ``inputs`` are all network inputs; pool memory stands for the pointers."""
        assert set(inputs) == set(self.network.inputs), set(inputs) ^ set(self.network.inputs)
        values: dict[int, torch.Tensor] = {}
        for name, tensor in self.network.inputs.items():
            values[id(tensor)] = inputs[name]
            if "_state_ptr_" not in name:
                assert inputs[name].dtype == _TORCH[int(tensor.dtype)], name
                want = tensor.shape
                assert len(want) == inputs[name].dim(), name
                assert all(n in (-1, m) for n, m in zip(want, inputs[name].shape, strict=True)), name
        for layer in self.network.layers:
            given = [values[id(tensor)] for tensor in layer.inputs]
            result = getattr(self, f"_{layer.kind}")(given, layer.attributes)
            output = layer.outputs[0]
            assert result.dtype == _TORCH[int(output.dtype)], (layer.kind, result.dtype)
            assert all(n in (-1, m) for n, m in zip(output.shape, result.shape, strict=True)), (
                layer.kind,
                output.shape,
                result.shape,
            )
            values[id(output)] = result
        return {name: values[id(tensor)] for name, tensor in self.network.outputs.items()}

    def _constant(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return a["value"]

    def _elementwise(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        left, right = given if len(given) == 2 else (given[0], a["scalar"])
        return {"add": torch.add, "mul": torch.mul, "div": torch.div}[a["op"]](left, right)

    def _cast(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return given[0].to(_TORCH[a["to"]])

    def _sigmoid(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return torch.sigmoid(given[0])

    def _relu(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return torch.relu(given[0])

    def _exp(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return torch.exp(given[0])

    def _sqrt(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return torch.sqrt(given[0])

    def _mean(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return given[0].mean(-1, keepdim=True)

    def _shuffle(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return given[0].reshape([given[0].shape[i] if n == 0 else n for i, n in enumerate(a["dims"])])

    def _shape(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(given[0].shape[a["dim"]])

    def _sizes(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        dynamic = iter(given)
        return torch.tensor([int(next(dynamic)) if part is None else part for part in a["parts"]])

    def _slice(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        index = tuple(slice(s, s + int(n)) for s, n in zip(a["starts"], given[1], strict=True))
        return given[0][index]

    def _concat(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return torch.cat(given, dim=a["dim"])

    def _matmul(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return given[0] @ given[1].T

    def _embedding(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return given[1][given[0].long()]

    def _gather_last(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        return given[0][given[1].long() - 1]

    def _gpt_attention(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        t = dict(zip(a["names"], given, strict=True))
        heads, kv_heads, size = a["num_heads"], a["num_kv_heads"], a["hidden_size_per_head"]
        qkv = t["qkv"].view(-1, heads + 2 * kv_heads, size)
        context = int(t["host_request_types"][0]) == 0
        lengths = t["host_context_lengths"].tolist() if context else [1] * len(t["host_request_types"])
        starts = [0] * len(lengths) if context else t["host_past_key_value_lengths"].tolist()
        out, first = [], 0
        for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
            q, k, v = qkv[first : first + length].split([heads, kv_heads, kv_heads], dim=1)
            first += length
            if "rotary_cos_sin" in t:
                table = t["rotary_cos_sin"].view(-1, a["rotary_embedding_dim"] // 2, 2)[start : start + length]
                q, k = (_rotated(x, table) for x in (q, k))
            key = (a["layer_idx"], int(t["kv_cache_block_offsets"][0, row, 0, 0]))
            kept = None if context else self.cache[key]
            k, v = (k, v) if kept is None else (torch.cat([kept[0], k]), torch.cat([kept[1], v]))
            assert len(k) == start + length
            self.cache[key] = (k, v)
            out.append(_attend(q, k, v, 1.0 / (a["q_scaling"] * math.sqrt(size))))
        return torch.cat(out).flatten(1)

    def _plugin_v3(self, given: list[torch.Tensor], a: dict[str, Any]) -> torch.Tensor:
        plugin = a["plugin"]
        t = dict(zip(plugin.input_names(), given, strict=True))
        for name, width in plugin.widths().items():
            if name in t:
                t[name] = t[name][:, plugin.offset(name) : plugin.offset(name) + width]
        context = int(t["host_request_types"][0]) == 0
        assert t["host_request_types"].unique().numel() == 1
        rows = len(t["slot_mapping"])
        rows_of: dict[str, Any] = {}
        if context:
            ends = t["last_token_ids"]
            assert ends.tolist() == t["host_context_lengths"].cumsum(0).tolist()
            rows_of["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
        shape = (lambda x, *s: x.reshape(-1, *s)) if context else (lambda x, *s: x.reshape(rows, 1, *s))
        run = getattr(self, f"_{plugin.name}")
        return run(plugin.fields, t, "scan" if context else "step", shape, rows_of).reshape(given[0].shape[0], -1)

    def _ReplayCausalConv(
        self, f: dict[str, Any], t: dict[str, torch.Tensor], phase: str, shape: Any, rows: dict[str, Any]
    ) -> torch.Tensor:
        layout = ConvLayout(ConvSpec(f["channels"], f["kernel"], _ACT[f["type_id"]], f["spec_len"]))
        pool = _pool(layout, t["state"], f["slot_stride"])
        run = getattr(reference, f"conv_{phase}")
        return run(pool, t["slot_mapping"], shape(t["x"], f["channels"]), t["weight"], t.get("bias"), **rows)

    def _ReplayMamba2(
        self, f: dict[str, Any], t: dict[str, torch.Tensor], phase: str, shape: Any, rows: dict[str, Any]
    ) -> torch.Tensor:
        limits = {"dt_min": f["dt_min"], "dt_max": f["dt_max"], "dt_softplus": bool(f["dt_softplus"])}
        pool = _pool(SlotLayout(_spec("mamba2", f, **limits)), t["state"], f["slot_stride"])
        head, group = (f["nheads"], f["headdim"]), (f["ngroups"], f["dstate"])
        z = shape(t["z"], *head) if "z" in t else None
        return getattr(reference, f"mamba2_{phase}")(
            pool, t["slot_mapping"], shape(t["x"], *head), shape(t["dt"], f["nheads"]), t["A"], shape(t["B"], *group),
            shape(t["C"], *group), D=t["D"], z=z, dt_bias=t["dt_bias"], **rows)  # fmt: skip

    def _ReplayGatedDelta(
        self, f: dict[str, Any], t: dict[str, torch.Tensor], phase: str, shape: Any, rows: dict[str, Any]
    ) -> torch.Tensor:
        kind = {2: "gated_delta", 3: "kimi_delta"}[f["kind"]]
        gates = {"gate": "bounded", "gate_lower_bound": f["gate_lower_bound"]} if f["gate_bounded"] else {}
        pool = _pool(SlotLayout(_spec(kind, f, qk_l2norm=bool(f["qk_l2norm"]), **gates)), t["state"], f["slot_stride"])
        key, value = (f["ngroups"], f["dstate"]), (f["nheads"], f["headdim"])
        channels = (f["nheads"], f["dstate"]) if kind == "kimi_delta" else (f["nheads"],)
        return getattr(reference, f"gated_delta_{phase}")(
            pool, t["slot_mapping"], shape(t["q"], *key), shape(t["k"], *key), shape(t["v"], *value),
            shape(t["a"], *channels), shape(t["b"], f["nheads"]), t["A_log"], t["dt_bias"].view(channels),
            scale=f["scale"] or None, **rows)  # fmt: skip


def _spec(kind: str, f: dict[str, Any], **switches: Any) -> RecurrenceSpec:
    return RecurrenceSpec(
        kind, f["nheads"], f["ngroups"], f["headdim"], f["dstate"], state_dtype=_ACT[f["state_type_id"]],
        act_dtype=_ACT[f["type_id"]], window=f["window"], spec_len=f["spec_len"], stagger=bool(f["stagger"]),
        **switches)  # fmt: skip


def _pool(layout: Any, memory: torch.Tensor, stride: int) -> StatePool:
    assert memory.dtype == torch.uint8 and memory.stride(0) == stride, (memory.stride(0), stride)
    return StatePool(layout, memory)


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [n, heads, size] with its first channels turned; table [n, channels / 2, (cos, sin)]."""
    half = table.shape[1]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, heads, size] are the last n positions of k, v [m, kv_heads, size]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    n, m = q.shape[0], k.shape[0]
    seen = torch.arange(m) <= torch.arange(m - n, m)[:, None]
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)
