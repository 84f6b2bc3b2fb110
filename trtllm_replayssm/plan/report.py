"""The plan as text: aligned tables for a terminal, from the dict that predict.py makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .predict import MODES
from .presets import GPUS, MODELS

_MIB = 1 << 20
_TITLES = {"conventional": "conventional", "native_speculative": "native spec.", "replay": "ReplaySSM"}
_TRAFFIC_ROWS = (
    ("state read", "state_read"),
    ("state write", "state_write"),
    ("read copy read", "copy_read"),
    ("read copy write", "copy_write"),
    ("ring read by outputs", "ring_read"),
    ("ring read by the fold", "fold_read"),
    ("ring append", "ring_append"),
    ("cursors", "cursors"),
    ("convolution read", "conv_read"),
    ("convolution write", "conv_write"),
)


def align(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ") -> str:
    """Rows of cells as lines; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def bytes_text(value: float) -> str:
    """Whole bytes with thousands separators."""
    return f"{value:,.0f}"


def mib(value: float) -> str:
    """MiB: one decimal, none where it is whole."""
    number = value / _MIB
    return f"{number:,.0f} MiB" if number == int(number) else f"{number:,.1f} MiB"


def render(plan: dict[str, Any]) -> str:
    """All sections of the report."""
    sections = [_head(plan), _memory(plan), _traffic(plan), _windows(plan), _modes(plan), _notes(plan["notes"])]
    return "\n\n".join(section for section in sections if section)


def _head(plan: dict[str, Any]) -> str:
    model, gpu, work = plan["model"], plan["gpu"], plan["workload"]
    copy = "" if work["read_copy"] == "none" else f", {work['read_copy']} read copy"
    drafts, window = work["draft_tokens"], f"window {work['window']}"
    step = f"1 + {drafts} tokens per step, {work['acceptance']:.3g} kept" if drafts else "1 token per step"
    speed = f"{gpu['bandwidth'] / 1e12:.3g} TB/s ({gpu['source']}), {gpu['memory'] / 1e9:.0f} GB"
    weights = f"{_amount(model['weights_bytes'], 'GB', 'MB')} of weights ({model['weights_from']})"
    params, active = (_amount(model[name], "B", "M") for name in ("params", "active_params"))
    params = f"{params} parameters, one token reads {active}"
    rows = [
        ("model", f"{model['name']}: {model['layers']}"),
        ("", f"{params}; {weights}"),
        ("gpu", f"{work['tp']} x {gpu['name']}: {speed}"),
        ("decode", f"batch {work['batch']}, context {work['context']:,}, {window}, {step}"),
        ("dtypes", f"state {work['state_dtype']}{copy}, activations {work['act_dtype']}"),
    ]
    return align(rows, left=2, indent="")


def _amount(value: float, billions: str, millions: str) -> str:
    """``value`` in billions, or in millions where that is below 0.1 of a billion."""
    return f"{value / 1e9:,.1f} {billions}" if value >= 1e8 else f"{value / 1e6:,.1f} {millions}"


def _memory(plan: dict[str, Any]) -> str:
    m, work = plan["memory"], plan["workload"]
    layers, slot = m["recurrent_layers"], m["slot_bytes"] + m["conv_slot_bytes"]
    rows = [
        ("", "published layout", "this slot"),
        ("state B/layer/seq", bytes_text(m["state_bytes_per_layer"]), bytes_text(m["state_bytes_per_layer"])),
        ("conv B/layer/seq", bytes_text(m["conv_bytes_per_layer"]), bytes_text(m["conv_slot_bytes"])),
        ("ring B/token/layer", bytes_text(m["ring_bytes_per_token"]), bytes_text(m["slot_ring_bytes_per_token"])),
        ("ring rows", str(work["window"]), str(m["slot_ring_rows"])),
        ("model state", mib(m["state_bytes"]), mib(m["state_bytes"])),
        ("+ ring", f"+{m['ring_bytes'] / _MIB:.1f} MiB", f"+{layers * m['slot_ring_bytes'] / _MIB:.1f} MiB"),
        ("slots, conv included", "", mib(layers * slot)),
        ("KV cache", mib(m["kv_bytes"]), mib(m["kv_bytes"])),
    ]
    return "memory of one sequence (whole model)\n" + align(rows)


def _traffic(plan: dict[str, Any]) -> str:
    modes = [mode for mode in MODES if mode in plan["traffic"]]
    rows: list[tuple[str, ...]] = [("", *(_TITLES[mode] for mode in modes))]
    for title, key in _TRAFFIC_ROWS:
        values = [plan["traffic"][mode][key] for mode in modes]
        if any(values):
            rows.append((title, *(bytes_text(value) for value in values)))
    rows.append(("total", *(bytes_text(plan["traffic"][mode]["total"]) for mode in modes)))
    kept = plan["workload"]["acceptance"]
    per_token = [plan["traffic"][m]["total"] / (1 if m == "conventional" else kept) for m in modes]
    if kept > 1:
        rows.append(("total per kept token", *(bytes_text(value) for value in per_token)))
    ranks = plan["workload"]["tp"]
    where = f", on one GPU of {ranks}" if ranks > 1 else ""
    text = f"bytes moved per step, one recurrent layer and sequence, mean over steps{where}\n{align(rows)}"
    speed = plan["speedup"]
    lines = [
        text,
        f"  predicted speed-up of the recurrent layers: {speed['recurrence']:.2f}x "
        f"(closed form {speed['ideal']:.2f}x), {speed['layer']:.2f}x with their convolution",
    ]
    if "ideal_vs_native" in speed:
        lines.append(f"  against native speculation: {speed['recurrence_vs_native']:.2f}x "
                     f"(closed form {speed['ideal_vs_native']:.2f}x)")  # fmt: skip
    return "\n".join(lines)


def _windows(plan: dict[str, Any]) -> str:
    best, window, native = plan["best_window"], plan["workload"]["window"], "ideal_vs_native" in plan["speedup"]
    head = ["window", "steps/flush", "slot B/layer", "recurrence", "with conv", "closed form"]
    rows: list[tuple[str, ...]] = [tuple([*head, "vs native"] if native else head)]
    for row in plan["windows"]:
        mark = "*" if row["window"] == best["slot"] else ">" if row["window"] == window else " "
        cells = [f"{mark} {row['window']}", f"{row['steps_per_flush']:.1f}", bytes_text(row["slot_bytes"])]
        cells += [f"{row[key]:.2f}x" for key in ("recurrence", "layer", "ideal")]
        if native:
            cells.append(f"{row['recurrence_vs_native']:.2f}x")
        rows.append(tuple(cells))
    title = (
        f"window: {best['slot']} (*) moves fewest bytes; sqrt(2 S / r), for one token per step, is {best['ideal']:.1f}"
    )
    tail = "" if plan["workload"]["read_copy"] == "none" else "\n  the closed form is that without a read copy"
    return title + "\n" + align(rows, left=0) + tail


def _modes(plan: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [
        ("", "weights", "recurrent", "conv", "KV", "step", "tokens/s", "speed-up", "one sequence", "sequences fit")
    ]
    for mode in MODES:
        if mode not in plan["modes"]:
            continue
        m = plan["modes"][mode]
        keys = ("weight_bytes_read", "recurrent_bytes", "conv_bytes", "kv_bytes")
        cells = [_TITLES[mode], *(f"{m[key] / 1e9:.1f} GB" for key in keys)]
        cells += [f"{m['step_s'] * 1e3:.2f} ms", f"{m['tokens_per_s']:,.0f}", f"{m['speedup']:.2f}x"]
        rows.append((*cells, mib(m["sequence_bytes"]), f"{m['sequences_fit']:,}"))
    bound = {_TITLES[name]: m["weights_bound"] for name, m in plan["modes"].items() if m["weights_bound"] != "memory"}
    tail = f"\n  linear layers bound by arithmetic, not by reading weights: {', '.join(bound)}" if bound else ""
    return "whole step, per GPU: bytes moved, time predicted from them, memory\n" + align(rows) + tail


def _notes(notes: Iterable[str]) -> str:
    return "\n".join(f"note: {note}" for note in notes)


def presets_text() -> str:
    """Tables of the model and GPU presets."""
    models = [("model", "layers", "parameters", "one token reads", "source")]
    for key, m in MODELS.items():
        models.append((key, m.describe(), f"{m.params / 1e9:,.1f} B", f"{m.active_params / 1e9:,.1f} B", m.source))
    gpus = [("gpu", "name", "bandwidth", "memory", "bf16", "source")]
    for key, g in GPUS.items():
        gpus.append((key, g.name, f"{g.bandwidth / 1e12:.3g} TB/s", f"{g.memory / 1e9:.0f} GB",
                     f"{g.flops / 1e12:.0f} TFLOP/s", g.source))  # fmt: skip
    return align(models, left=2, indent="") + "\n\n" + align(gpus, left=2, indent="")
