"""``trtllm-replayssm convert HF_DIR OUT_DIR``."""

from __future__ import annotations

import argparse
from typing import Any

from .common import print_json, progress, report_note

AUTO = "auto"
DTYPES = (AUTO, "bfloat16", "float16", "float32")
_MOST_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``convert`` to a parser."""
    add = parser.add_argument
    add("hf_dir", metavar="HF_DIR", help="directory with config.json and safetensors, as published")
    add("out_dir", metavar="OUT_DIR", help="checkpoint directory to make")
    add(
        "--dtype",
        choices=DTYPES,
        default=AUTO,
        help="of the weights (default auto: as published, or else bfloat16)",
    )
    add("--overwrite", action="store_true", help="replace OUT_DIR if it is a checkpoint already")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run ``convert``. Returns 0. Raises ReplayError for bad input; OUT_DIR is then not there."""
    from ..models.checkpoint import convert

    dtype = _published(args.hf_dir) if args.dtype == AUTO else args.dtype
    with progress("converting") as update:
        summary = convert(args.hf_dir, args.out_dir, dtype=dtype, overwrite=args.overwrite, progress=update)
    if args.json:
        print_json(summary)
    else:
        print(render(args.out_dir, summary))
    return 0


def _published(hf_dir: str) -> str:
    """The dtype that ``auto`` means. A line on stderr where it is not the one that config.json names."""
    from ..models.hf import published_dtype, read_hf_config

    dtype, named = read_hf_config(hf_dir).dtype, published_dtype(hf_dir)
    if named != dtype:
        found = f"dtype {named}, which is none of {', '.join(DTYPES[1:])}" if named else "no dtype"
        report_note(f"config.json names {found}: the weights become {dtype}; --dtype takes another")
    return dtype


def render(out_dir: str, summary: dict[str, Any]) -> str:
    """The summary as lines of text."""
    return "\n".join([f"checkpoint written to {out_dir}", *summary_lines(summary)])


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """One line per entry, names aligned."""
    width = max((len(key) for key in summary), default=0)
    return [f"  {key.replace('_', ' '):{width}}  {_shown(value)}" for key, value in summary.items()]


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        value = [f"{k} {_shown(v)}" for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        more = [f"and {len(value) - _MOST_SHOWN:,} more"] if len(value) > _MOST_SHOWN else []
        return ", ".join([*map(_shown, value[:_MOST_SHOWN]), *more]) or "none"
    return str(value)
