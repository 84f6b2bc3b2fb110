"""``trtllm-replayssm plan``: arguments, and the way from them to the report."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict

from ..errors import ReplayError, require
from ..spec import ACT_DTYPES, READ_COPIES, STATE_DTYPES
from .from_config import shape_from_path
from .plot import write_plot
from .predict import WEIGHT_BYTES, Workload, predict
from .presets import GPUS, MODELS, gpu_preset, model_preset
from .report import presets_text, render
from .shapes import Gpu, ModelShape

DEFAULT_GPU = "h200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan`` to a parser."""
    add = parser.add_argument
    add("model", nargs="?", help=f"preset ({', '.join(MODELS)}), or a config.json, or the directory that holds one")
    add("--list", action="store_true", help="list model and GPU presets")
    add("--gpu", default=None, help=f"GPU preset (default {DEFAULT_GPU})")
    add("--bandwidth", type=float, metavar="TB/S", help="memory bandwidth of one GPU, in place of the preset's")
    add("--memory", type=float, metavar="GB", help="memory of one GPU, in place of the preset's")
    add("--tflops", type=float, metavar="TFLOP/S", help="dense arithmetic rate of one GPU, in place of the preset's")
    add("--batch", type=int, default=1, help="sequences per step (default 1)")
    add("--context", type=int, default=4096, help="tokens of each sequence in the KV cache (default 4096)")
    add("--tp", type=int, default=1, help="tensor-parallel GPUs (default 1)")
    add("--window", default="auto", help="1..64, or auto: the window that moves fewest bytes (default auto)")
    add("--draft-tokens", type=int, default=0, help="draft tokens per step, 0..15 (default 0)")
    add("--acceptance", type=float, help="tokens kept per step, the model's own included: 1 .. 1 + draft tokens")
    add("--state-dtype", default="float32", help=f"{', '.join(STATE_DTYPES[:3])} (default float32)")
    add("--act-dtype", default="bfloat16", help=f"{', '.join(ACT_DTYPES[:3])} (default bfloat16)")
    add("--read-copy", default="none", help=f"{', '.join(READ_COPIES)} (default none)")
    add("--weights-dtype", help=f"{', '.join(WEIGHT_BYTES)} (default: that of weight files, else bf16)")
    add("--weights-bytes", type=float, metavar="BYTES", help="bytes of all weights, in place of parameters x dtype")
    add("--reserve", type=float, default=0.1, help="share of GPU memory kept free (default 0.1)")
    add("--plot", metavar="FILE", help="write speed-up over window as .png, .svg or .pdf")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run ``plan``. Returns 0. Raises ReplayError for bad input."""
    if args.list:
        require(args.model is None, f"a model ({args.model}) is given with --list, which prints the presets alone")
        print(_presets_json() if args.json else presets_text())
        return 0
    require(args.model is not None, f"model is missing; give a path to a config.json or one of {', '.join(MODELS)}")
    model, work = find_model(args.model), _workload(args)
    plan = predict(model, _gpu(args), work)
    if args.plot:
        write_plot(args.plot, model, work)
        plan["plot"] = args.plot
    print(json.dumps(plan, indent=1, allow_nan=False) if args.json else render(plan))
    if args.plot and not args.json:
        print(f"plot written to {args.plot}")
    return 0


def find_model(text: str) -> ModelShape:
    """Preset name, or path of a config.json or of a directory with one."""
    looks_like_path = os.sep in text or text.endswith(".json") or text in (".", "..")
    if looks_like_path or (os.path.exists(text) and text.lower() not in MODELS):
        return shape_from_path(text)
    return model_preset(text)


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        batch=args.batch,
        context=args.context,
        tp=args.tp,
        window=_window(args.window),
        draft_tokens=args.draft_tokens,
        acceptance=args.acceptance,
        state_dtype=args.state_dtype,
        act_dtype=args.act_dtype,
        read_copy=args.read_copy,
        weights_dtype=args.weights_dtype,
        weights_bytes=args.weights_bytes,
        reserve=args.reserve,
    )


def _window(text: str) -> int | None:
    if str(text).lower() == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ReplayError(f"window is {text!r}; it must be a whole number from 1 to 64, or auto") from None


def _gpu(args: argparse.Namespace) -> Gpu:
    """The preset with what the options replace; --bandwidth and --memory without --gpu describe a GPU of its own."""
    given = {"bandwidth": args.bandwidth, "memory": args.memory, "tflops": args.tflops}
    for name, value in given.items():
        if value is not None:
            require(math.isfinite(value) and value > 0, f"{name} is {value}; it must be a positive number")
    base = gpu_preset(args.gpu or DEFAULT_GPU)
    if all(value is None for value in given.values()):
        return base
    own = args.gpu is None and args.bandwidth is not None and args.memory is not None
    return Gpu(
        name="GPU" if own else base.name,
        bandwidth=base.bandwidth if args.bandwidth is None else args.bandwidth * 1e12,
        memory=base.memory if args.memory is None else args.memory * 1e9,
        flops=base.flops if args.tflops is None else args.tflops * 1e12,
        source="given" if args.bandwidth is not None else base.source,
    )


def _presets_json() -> str:
    data = {"models": {k: asdict(m) for k, m in MODELS.items()}, "gpus": {k: asdict(g) for k, g in GPUS.items()}}
    return json.dumps(data, indent=1, allow_nan=False)
