"""Plot of the plan: traffic speed-up over the window, one curve per way of keeping the state. Needs matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import ReplayError, require
from ..spec import MAX_WINDOW
from . import traffic
from .predict import Workload
from .shapes import ModelShape

FORMATS = (".png", ".svg", ".pdf")
#: (label, state dtype, read copy, colour); the baseline of every curve is conventional decoding with a float32 state.
_CURVES = (
    ("float32 state", "float32", "none", "#1f4e8c"),
    ("float32 state, bf16 read copy", "float32", "bf16", "#2a9d8f"),
    ("float32 state, fp8 read copy", "float32", "fp8_e4m3", "#c44e00"),
    ("bfloat16 state", "bfloat16", "none", "#7a3fa0"),
)


def curves(model: ModelShape, work: Workload) -> list[dict[str, Any]]:
    """For each state dtype and read copy: label, colour, windows, speed-up, best_window, conventional.

    ``speedup`` is per kept token, of the recurrence, against conventional float32 decoding; ``conventional`` is that of
    conventional decoding with the curve's own state dtype.
    """
    recurrent = model.recurrent.shard(work.tp)
    conv = recurrent.conv(work.act_dtype, work.spec_len)
    base = recurrent.spec(state_dtype="float32", act_dtype=work.act_dtype, spec_len=work.spec_len)
    conventional = traffic.conventional_step(base, conv).recurrence * work.kept
    windows = list(range(1, MAX_WINDOW + 1))
    result = []
    for label, state_dtype, copy, colour in _CURVES:
        spec = recurrent.spec(
            state_dtype=state_dtype, act_dtype=work.act_dtype, read_copy=copy, spec_len=work.spec_len, window=1
        )
        steps = [traffic.replay_step(traffic.with_window(spec, w), conv, work.kept) for w in windows]
        values = [conventional / step.recurrence for step in steps]
        plain = conventional / (traffic.conventional_step(spec, conv).recurrence * work.kept)
        best = max(range(len(windows)), key=lambda i: values[i])
        result.append({"label": label, "colour": colour, "windows": windows, "speedup": values,
                       "best_window": windows[best], "conventional": plain})  # fmt: skip
    return result


def write_plot(path: str, model: ModelShape, work: Workload) -> None:
    """Draw :func:`curves` to ``path``; the file appears whole or not at all.

    Raises:
        ReplayError: unknown format, matplotlib missing, unwritable path.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    require(suffix in FORMATS, f"plot is {path!r}; its name must end in {', '.join(FORMATS)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ReplayError("plot needs matplotlib, which is missing: pip install matplotlib") from None
    with matplotlib.rc_context({"svg.hashsalt": "trtllm-replayssm", "font.size": 10}):
        figure = Figure(figsize=(8.0, 4.8), layout="constrained")
        _draw(figure.add_subplot(), model, work)
        partial = target.with_name(f".{target.name}.{os.getpid()}{suffix}")
        try:
            figure.savefig(partial, dpi=144)
            partial.replace(target)
        except OSError as error:
            raise ReplayError(f"plot cannot be written to {path!r}: {error.strerror or error}") from None
        finally:
            partial.unlink(missing_ok=True)


def _draw(axes: Any, model: ModelShape, work: Workload) -> None:
    for curve in curves(model, work):
        windows, values, best = curve["windows"], curve["speedup"], curve["best_window"]
        top = values[best - 1]
        label = f"{curve['label']} (best: {best}, {top:.2f}x)"
        axes.plot(windows, values, color=curve["colour"], linewidth=1.8, label=label)
        axes.plot([best], [top], marker="o", color=curve["colour"], markersize=7)
    axes.axhline(1.0, color="0.45", linewidth=1.0, linestyle="--", label="conventional decoding, float32 state")
    if work.spec_len > 1:
        native = 2 * work.kept / (1 + work.spec_len)
        label = f"native speculation, float32 state ({native:.2f}x)"
        axes.axhline(native, color="0.45", linewidth=1.0, linestyle="-.", label=label)
    chosen = work.window
    if chosen is not None:
        axes.axvline(chosen, color="0.75", linewidth=1.0, linestyle=":", label=f"window {chosen}")
    axes.set_xscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32, 64]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_xlim(1, MAX_WINDOW)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("window L (tokens kept in the ring between folds)")
    axes.set_ylabel("bytes per kept token: conventional / ReplaySSM")
    drafts = f", {work.spec_len} tokens per step, {work.kept:.3g} kept" if work.spec_len > 1 else ""
    axes.set_title(f"{model.name}: traffic of one recurrent layer{drafts}")
    axes.grid(True, color="0.92")
    axes.legend(loc="best", fontsize=8.5, framealpha=0.9)
