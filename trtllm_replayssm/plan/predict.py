"""From a model, a GPU and a workload to memory, traffic, step time and sequences that fit, as one JSON-ready dict.

The step time is a roofline: the larger of reading the weights and of their arithmetic, plus the bytes of recurrent
layers, convolutions and KV cache over the bandwidth. Communication between ranks, a draft model, sampling and launch
gaps are not in it, so it compares forms of decoding and does not predict latency.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import require
from ..layout import ConvLayout, SlotLayout
from ..spec import (
    ACT_DTYPES,
    DTYPE_BYTES,
    MAX_SPEC_LEN,
    MAX_WINDOW,
    STATE_DTYPES,
    ConvSpec,
    RecurrenceSpec,
    require_choice,
    require_int,
)
from . import traffic
from .shapes import Gpu, ModelShape, Recurrent

#: Bytes per parameter; fp4 is 4 bits plus one 8-bit scale per 16 values.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
DEFAULT_WEIGHTS = "bf16"
MODES = ("conventional", "native_speculative", "replay")
_TABLE_WINDOWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Workload:
    """How the model is decoded.

    Attributes:
        batch: sequences per step. context: tokens of each in the KV cache. tp: tensor-parallel ranks.
        window: L, or None for the best one. draft_tokens: T - 1. acceptance: tokens kept per step, the model's own
            included, 1..T; None takes 1 + 2/3 of the drafts.
        state_dtype, act_dtype, read_copy: as in RecurrenceSpec. weights_dtype: a key of WEIGHT_BYTES, or None for the
            dtype of the weight files where there are any, else bf16.
        weights_bytes: all weights, in place of parameters x bytes. reserve: share of the GPU's memory kept free.

    Raises:
        ReplayError: a value outside its range.
    """

    batch: int = 1
    context: int = 4096
    tp: int = 1
    window: int | None = None
    draft_tokens: int = 0
    acceptance: float | None = None
    state_dtype: str = "float32"
    act_dtype: str = "bfloat16"
    read_copy: str = "none"
    weights_dtype: str | None = None
    weights_bytes: float | None = None
    reserve: float = 0.1

    def __post_init__(self) -> None:
        require_int("batch", self.batch, 1, 1 << 20)
        require_int("context", self.context, 0, 1 << 24)
        require_int("tp", self.tp, 1, 1024)
        require_int("draft_tokens", self.draft_tokens, 0, MAX_SPEC_LEN - 1)
        if self.window is not None:
            require_int("window", self.window, 1, MAX_WINDOW, " (1 is conventional decoding)")
        require_choice("state_dtype", self.state_dtype, STATE_DTYPES[:3])
        require_choice("act_dtype", self.act_dtype, ACT_DTYPES[:3])
        if self.weights_dtype is not None:
            require_choice("weights_dtype", self.weights_dtype, tuple(WEIGHT_BYTES))
        ok = math.isfinite(self.reserve) and 0 <= self.reserve < 1
        require(ok, f"reserve is {self.reserve}; it must be at least 0 and below 1")
        if self.weights_bytes is not None:
            ok = math.isfinite(self.weights_bytes) and self.weights_bytes > 0
            require(ok, f"weights_bytes is {self.weights_bytes}; it must be a positive number of bytes")
        traffic.check_acceptance(self.kept, self.spec_len)

    @property
    def spec_len(self) -> int:
        """T: tokens per step."""
        return 1 + self.draft_tokens

    @property
    def kept(self) -> float:
        """Tokens kept per step."""
        return 1 + self.draft_tokens * 2 / 3 if self.acceptance is None else self.acceptance


@dataclass(frozen=True)
class _Layer:
    """One recurrent layer of one rank under a workload, every spec resolved."""

    spec: RecurrenceSpec
    conv: ConvSpec
    plain: RecurrenceSpec  # no read copy: what conventional and native decoding keep
    count: int

    @classmethod
    def of(cls, recurrent: Recurrent, work: Workload, window: int | None) -> _Layer:
        options: dict[str, Any] = {k: getattr(work, k) for k in ("state_dtype", "act_dtype", "spec_len")}
        spec = recurrent.spec(**options, read_copy=work.read_copy, window=window or 1)
        conv = recurrent.conv(work.act_dtype, work.spec_len)
        if window is None:
            spec = traffic.with_window(spec, traffic.best_window(spec, conv, work.kept))
        return cls(spec, conv, recurrent.spec(**options, window=spec.window), recurrent.layers)

    def step(self, mode: str, kept: float) -> traffic.StepBytes:
        """Bytes of one sequence in this layer."""
        if mode == "conventional":
            return traffic.conventional_step(self.plain, self.conv)
        if mode == "native_speculative":
            return traffic.native_step(self.plain, self.conv)
        return traffic.replay_step(self.spec, self.conv, kept)

    def memory(self, mode: str) -> int:
        """Bytes that one sequence holds in this layer: state(s), ring, convolution."""
        state, column = traffic.state_bytes(self.plain), traffic.conv_column_bytes(self.conv)
        if mode == "conventional":
            return state + (self.conv.kernel - 1) * column
        if mode == "native_speculative":
            return self.spec.spec_len * state + (self.conv.kernel - 2 + self.spec.spec_len) * column
        return SlotLayout(self.spec).slot_bytes + ConvLayout(self.conv).slot_bytes


def predict(model: ModelShape, gpu: Gpu, work: Workload) -> dict[str, Any]:
    """The whole plan: workload, memory, traffic, windows, modes, notes. Bytes are per rank from ``traffic`` on.

    Raises:
        ReplayError: dtypes or read copy that RecurrenceSpec refuses; tp that the heads cannot be divided by.
    """
    layer = _Layer.of(model.recurrent.shard(work.tp), work, work.window)
    whole = _Layer.of(model.recurrent, work, layer.spec.window)
    steps = {mode: layer.step(mode, work.kept) for mode in _modes(work)}
    result: dict[str, Any] = {
        "model": {
            "name": model.name,
            "layers": model.describe(),
            "kind": model.recurrent.kind,
            "params": model.params,
            "active_params": round(model.active_params),
            "params_from": model.params_from,
            "weights_bytes": total_weights(model, work),
            "weights_from": _weights_from(model, work),
            "source": model.source,
        },
        "gpu": asdict(gpu),
        "workload": {**asdict(work), "acceptance": work.kept, "window": layer.spec.window, "spec_len": work.spec_len},
        "memory": _memory(whole, model, work),
        "traffic": {mode: {**asdict(step), "total": step.total} for mode, step in steps.items()},
    }
    result["windows"], result["best_window"] = _windows(layer, work), _best(layer, work)
    result["speedup"] = _speedups(layer, work)
    result["modes"] = {mode: _mode(mode, step, layer, model, gpu, work) for mode, step in steps.items()}
    base = result["modes"]["conventional"]["tokens_per_s"]
    for mode in result["modes"].values():
        mode["speedup"] = mode["tokens_per_s"] / base
    result["notes"] = _notes(result, model, work)
    return result


def _modes(work: Workload) -> tuple[str, ...]:
    return MODES if work.draft_tokens else ("conventional", "replay")


def _memory(whole: _Layer, model: ModelShape, work: Workload) -> dict[str, Any]:
    """Sizes of one sequence in the whole model (all ranks, nothing repeated)."""
    spec, layout = whole.spec, SlotLayout(whole.spec)
    ring = sum(r.nbytes for r in layout.regions if r.name.startswith("ring_"))
    state = traffic.state_bytes(spec)
    token = model.attention.layers * model.attention.elements_per_token(1) * DTYPE_BYTES[work.act_dtype]
    published = traffic.published_row_bytes(spec)
    return {
        "state_bytes_per_layer": state,
        "conv_bytes_per_layer": (whole.conv.kernel - 1) * traffic.conv_column_bytes(whole.conv),
        "ring_bytes_per_token": published,
        "slot_ring_bytes_per_token": traffic.ring_row_bytes(layout)[2],
        "slot_ring_bytes": ring,
        "slot_ring_rows": spec.ring_rows,
        "slot_bytes": layout.slot_bytes,
        "conv_slot_bytes": ConvLayout(whole.conv).slot_bytes,
        "recurrent_layers": whole.count,
        "state_bytes": whole.count * state,
        "ring_bytes": whole.count * published * spec.window,
        "slot_total_bytes": whole.count * whole.memory("replay"),
        "kv_bytes_per_token": token,
        "kv_bytes": token * work.context,
    }


def _best(layer: _Layer, work: Workload) -> dict[str, Any]:
    window = traffic.best_window(layer.spec, layer.conv, work.kept)
    ideal = traffic.ideal_best_window(traffic.state_bytes(layer.spec), traffic.published_row_bytes(layer.spec))
    return {"slot": window, "ideal": ideal}


def _windows(layer: _Layer, work: Workload) -> list[dict[str, Any]]:
    chosen = {*_TABLE_WINDOWS, layer.spec.window, _best(layer, work)["slot"]}
    rows = []
    for window in sorted(chosen):
        one = _Layer(traffic.with_window(layer.spec, window), layer.conv, layer.plain, layer.count)
        cycle = traffic.flush_cycle(window, work.spec_len, work.kept)
        slot = SlotLayout(one.spec).slot_bytes
        rows.append({"window": window, "steps_per_flush": cycle.steps, "slot_bytes": slot, **_speedups(one, work)})
    return rows


def _speedups(layer: _Layer, work: Workload) -> dict[str, float]:
    """Traffic ratios per token of the recurrent layers: slot model (with and without convolution) and closed form."""
    spec, kept, spec_len = layer.spec, work.kept, work.spec_len
    state, row = traffic.state_bytes(spec), traffic.published_row_bytes(spec)
    conventional, replay = layer.step("conventional", kept), layer.step("replay", kept)
    out = {
        "recurrence": conventional.recurrence * kept / replay.recurrence,
        "layer": conventional.total * kept / replay.total,
        "ideal": 2 * state / traffic.ideal_replay(state, row, spec.window),
    }
    if spec_len > 1:
        ideal = traffic.ideal_verify(state, row, spec.window, spec_len, kept)
        out["ideal"] = 2 * state * kept / ideal
        out["ideal_vs_native"] = traffic.ideal_native(state, spec_len) / ideal
        out["recurrence_vs_native"] = layer.step("native_speculative", kept).recurrence / replay.recurrence
    return out


def total_weights(model: ModelShape, work: Workload) -> float:
    """Bytes of all weights: given, parameters times bytes of the dtype asked for, read from files, or bf16."""
    if work.weights_bytes is not None:
        return float(work.weights_bytes)
    if model.weights_bytes is not None and work.weights_dtype is None:
        return float(model.weights_bytes)
    return model.params * WEIGHT_BYTES[work.weights_dtype or DEFAULT_WEIGHTS]


def _weights_from(model: ModelShape, work: Workload) -> str:
    if work.weights_bytes is not None:
        return "given"
    if model.weights_bytes is not None and work.weights_dtype is None:
        return "files"
    return f"parameters in {work.weights_dtype or DEFAULT_WEIGHTS}"


def _mode(
    mode: str, step: traffic.StepBytes, layer: _Layer, model: ModelShape, gpu: Gpu, work: Workload
) -> dict[str, Any]:
    """Step time, tokens per second and memory of one form of decoding, per rank."""
    tokens = 1 if mode == "conventional" else work.spec_len
    kept = 1.0 if mode == "conventional" else work.kept
    weights = total_weights(model, work) / work.tp
    read = model.read_params(work.batch * tokens)
    weight_read = weights * read / model.params
    flops = 2 * model.active_params * work.batch * tokens / work.tp
    token_kv = model.attention.layers * model.attention.elements_per_token(work.tp) * DTYPE_BYTES[work.act_dtype]
    recurrent = work.batch * layer.count * step.recurrence
    conv = work.batch * layer.count * (step.total - step.recurrence)
    kv = work.batch * token_kv * (work.context + tokens)
    weight_s = max(weight_read / gpu.bandwidth, flops / gpu.flops)
    step_s = weight_s + (recurrent + conv + kv) / gpu.bandwidth
    sequence = layer.count * layer.memory(mode) + token_kv * work.context
    free = gpu.memory * (1 - work.reserve) - weights
    return {
        "tokens_per_step": kept,
        "recurrent_bytes": recurrent,
        "conv_bytes": conv,
        "kv_bytes": kv,
        "weight_bytes_read": weight_read,
        "weights_s": weight_s,
        "weights_bound": "memory" if weight_read / gpu.bandwidth >= flops / gpu.flops else "arithmetic",
        "recurrent_s": recurrent / gpu.bandwidth,
        "step_s": step_s,
        "tokens_per_s": work.batch * kept / step_s,
        "sequence_bytes": sequence,
        "sequences_fit": max(0, int(free // sequence)),
        "weights_bytes": weights,
    }


def _notes(result: dict[str, Any], model: ModelShape, work: Workload) -> list[str]:
    notes = []
    gpu_memory, weights = result["gpu"]["memory"], result["modes"]["replay"]["weights_bytes"]
    room = gpu_memory * (1 - work.reserve)
    if weights > room:
        least = work.tp * math.ceil(weights / room)
        heads, groups = model.recurrent.nheads, model.recurrent.ngroups
        possible = (n for n in range(least, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0))
        ranks = next(possible, None)
        need = f"weights need {weights / 1e9:.0f} GB per GPU of {gpu_memory / 1e9:.0f} GB"
        more = f"--tp {ranks} or more, or " if ranks else ""
        notes.append(f"{need}: use {more}a smaller --weights-dtype")
    else:
        fit = {m: v["sequences_fit"] for m, v in result["modes"].items() if v["sequences_fit"] < work.batch}
        for mode, number in fit.items():
            form = mode.replace("_", " ")
            notes.append(f"batch {work.batch} does not fit with {form} decoding: {number} sequences do")
    if work.acceptance is None and work.draft_tokens:
        notes.append(f"acceptance assumed: {work.kept:.2f} tokens kept per step of {work.spec_len}; give --acceptance")
    if model.experts is not None:
        notes.append("weights read: estimate, experts chosen at random and independently by the tokens of the batch")
    notes.append(f"parameters: {model.params_from}; arithmetic at the dense bf16 rate")
    notes.append("times are bytes over bandwidth: bounds to compare with, not measurements")
    return notes
