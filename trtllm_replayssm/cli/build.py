"""``trtllm-replayssm build CHECKPOINT OUT_DIR``: an engine of TensorRT or of TensorRT-LLM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import require
from ..models.config import MODEL_DTYPES
from ..spec import MAX_SPEC_LEN, MAX_WINDOW
from .common import print_json, progress

AUTO = "auto"
RUNTIMES = ("tensorrt", "trtllm")
PRECISIONS = ("obey", "prefer")
_FROM_CHECKPOINT = "dtypes are those of the checkpoint: choose them with convert --dtype"
_OWN_BUILDER = "builder takes its own: use trtllm-build with trtllm_replayssm/trtllm/model.py"
#: Options of the plain engines that TensorRT-LLM's builder has no use for: default, and what to do instead.
TRTLLM_UNUSED = {
    "dtype": AUTO,
    "state_dtype": None,
    "draft_tokens": 0,
    "workspace": None,
    "timing_cache": None,
    "builder_optimization_level": None,
    "precision": None,
    "tensorrt": AUTO,
    "network": "plugin",
    "exact_scan": False,
    "float32_matmul": False,
    "verbose": False,
}
TRTLLM_INSTEAD = {
    **dict.fromkeys(TRTLLM_UNUSED, _OWN_BUILDER),
    "dtype": _FROM_CHECKPOINT,
    "state_dtype": "state pools are fp32",
    "draft_tokens": "engines of hybrid models decode one token a step",
    "network": "engines have plugins",
    "verbose": "log follows the environment variable TLLM_LOG_LEVEL",
}
IO_NOTE = (
    "network io: the replay operations are inputs and outputs of the engine; it checks the network and cannot generate "
    "text"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``build`` to a parser."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="directory made by: trtllm-replayssm convert")
    add("out_dir", metavar="OUT_DIR", help="engine directory to make")
    add(
        "--runtime",
        choices=RUNTIMES,
        default="tensorrt",
        help="what runs the engine: this package on TensorRT, or TensorRT-LLM (default tensorrt)",
    )
    add("--dtype", choices=(AUTO, *MODEL_DTYPES), default=AUTO, help="of activations (default auto: the checkpoint's)")
    add("--state-dtype", choices=MODEL_DTYPES, help="of the recurrent state (default: the model's)")
    add("--window", type=int, default=16, metavar="L", help=f"ReplaySSM window, 1..{MAX_WINDOW} (default 16)")
    add("--draft-tokens", type=int, default=0, metavar="D", help=f"of one verify, 0..{MAX_SPEC_LEN - 1} (default 0)")
    add("--max-batch", type=int, default=8, metavar="N", help="sequences at once (default 8)")
    add("--max-input-len", type=int, default=1024, metavar="N", help="prompt tokens per call and row (default 1024)")
    add("--max-positions", type=int, metavar="N", help="tokens per sequence (default: the model's limit)")
    add("--workspace", type=float, metavar="GIB", help="scratch memory that a layer may use (default: no limit)")
    add("--timing-cache", metavar="FILE", help="measured kernel times: read where it is there, then written")
    add("--builder-optimization-level", type=int, metavar="K", help="TensorRT's own, 0..5 (default: TensorRT's)")
    add(
        "--precision",
        choices=PRECISIONS,
        help="TensorRT 8.6 and float16 only: dtypes of layers are binding or a wish (default: binding, and a wish "
        "where no kernel keeps to them)",
    )
    add(
        "--tensorrt",
        choices=(AUTO, "tensorrt", "tensorrt_rtx"),
        default=AUTO,
        help="Python module to build with (default auto: tensorrt); tensorrt_rtx takes --network io alone",
    )
    add(
        "--network",
        choices=("plugin", "io"),
        default="plugin",
        help="replay layers as plugins, or as network inputs and outputs for checks without a GPU (default plugin)",
    )
    add("--exact-scan", action="store_true", help="scan prompts token by token, with the bits of decoding")
    add("--float32-matmul", action="store_true", help="matrix products of a 16-bit engine in fp32")
    add("--overwrite", action="store_true", help="replace OUT_DIR if it is an engine directory already")
    add("--verbose", action="store_true", help="TensorRT's log on stderr")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run ``build``. Returns 0. Raises ReplayError for bad input; OUT_DIR is then not there."""
    return _build_trtllm(args) if args.runtime == "trtllm" else _build_tensorrt(args)


def _build_tensorrt(args: argparse.Namespace) -> int:
    from ..build import BuildOptions, build_engine

    options = BuildOptions(
        dtype=None if args.dtype == AUTO else args.dtype,
        state_dtype=args.state_dtype,
        window=args.window,
        draft_tokens=args.draft_tokens,
        max_batch=args.max_batch,
        max_input_len=args.max_input_len,
        max_positions=args.max_positions,
        workspace_gib=args.workspace,
        timing_cache=None if args.timing_cache is None else Path(args.timing_cache),
        optimization_level=args.builder_optimization_level,
        precision=args.precision,
        tensorrt=args.tensorrt,
        network=args.network,
        exact_scan=args.exact_scan,
        float32_matmul=args.float32_matmul,
    )
    with progress("building") as update:
        summary = build_engine(
            args.checkpoint, args.out_dir, options, overwrite=args.overwrite, progress=update, verbose=args.verbose
        )
    _print(args, summary)
    return 0


def _build_trtllm(args: argparse.Namespace) -> int:
    for name, default in TRTLLM_UNUSED.items():
        value = getattr(args, name)
        option = "--" + name.replace("_", "-")
        require(
            value == default,
            f"{option} is {value}; it is for --runtime tensorrt. TensorRT-LLM's {TRTLLM_INSTEAD[name]}",
        )
    from ..trtllm.build import build

    summary = build(
        args.checkpoint,
        args.out_dir,
        overwrite=args.overwrite,
        window=args.window,
        max_batch_size=args.max_batch,
        max_input_len=args.max_input_len if args.max_positions is None else min(args.max_input_len, args.max_positions),
        max_seq_len=args.max_positions,
    )
    _print(args, summary)
    return 0


def _print(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    from .convert import summary_lines

    if args.json:
        print_json(summary)
        return
    print("\n".join([f"engine written to {args.out_dir}", *summary_lines(summary)]))
    if summary.get("network") == "io":
        print(IO_NOTE)
