"""``trtllm-replayssm run CHECKPOINT``: text from prompts; ``--decode both``: the two decodings compared.

CHECKPOINT may be an engine directory too; its config.json says which of the two it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..spec import MAX_SPEC_LEN, MAX_WINDOW, READ_COPIES
from .common import EXIT_DIFFERS, PROG, ProgressCallback, print_json, progress
from .output import Printer, comparison_lines, completion_json, speed_line
from .request import Request, load

if TYPE_CHECKING:
    from .engine_request import EngineRequest

DECODE = ("replay", "conventional", "both")
DTYPES = ("float32", "bfloat16", "float16")
MAX_BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run`` to a parser."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=f"directory made by: {PROG} convert, or by: {PROG} build")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated; without any: stdin")
    add(
        "--prompt-file", action="append", default=[], metavar="FILE", help="one prompt (.jsonl: one per line); -: stdin"
    )
    add("--chat", action="store_true", help="put each prompt into the checkpoint's chat template")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default 128)")
    add("--ignore-eos", action="store_true", help="go on after the end token")
    add("--temperature", type=float, default=0.0, metavar="T", help="0..100; 0 takes the best token (default 0)")
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K best tokens; 0: all (default 0)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="choose among the best, of probability P in all (default 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the first prompt; the next has N+1 and so on (default 0)")
    add(
        "--decode",
        choices=DECODE,
        default="replay",
        help="both: side by side, compared; exit code 1 if they differ by more than rounding",
    )
    add("--against", metavar="ENGINE", help="with an engine and --decode both: an engine of window 1 to compare with")
    add("--window", type=int, metavar="L", help=f"ReplaySSM window, 1..{MAX_WINDOW} (default 16; 1: conventional)")
    add(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="D",
        help=f"prompt-lookup drafts, 0..{MAX_SPEC_LEN - 1} (default 0); the same text up to rounding",
    )
    add("--read-copy", choices=READ_COPIES, default="none", help="smaller copy of the state for reads (default none)")
    add("--dtype", choices=DTYPES, help="of activations and weights (default: the checkpoint's)")
    add("--state-dtype", choices=DTYPES, help="of the recurrent state (default: the model's)")
    add("--device", default="auto", metavar="DEV", help="auto, cpu, cuda or cuda:N (default auto)")
    add("--max-batch", type=int, default=MAX_BATCH, metavar="N", help=f"prompts at once (default {MAX_BATCH})")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run ``run``. Returns 0, or 1 where the comparison failed. Raises ReplayError for bad input."""
    start = time.perf_counter()
    request = _load(args)
    loaded = time.perf_counter() - start
    return _compare(request, loaded) if args.decode == "both" else _generate(request, loaded)


def _load(args: argparse.Namespace) -> Request | EngineRequest:
    from pathlib import Path

    from .engine_request import is_engine, load_engine

    return load_engine(args) if is_engine(Path(args.checkpoint)) else load(args)


def _generate(request: Request | EngineRequest, loaded: float) -> int:
    from ..runtime.generate import generate

    args = request.args
    session = request.session()
    printer = None if args.json else Printer(request.tokenizer, request.texts, request.ids)
    quiet = printer is not None and printer.terminal  # text on a terminal shows the progress, a bar would cut it
    start = time.perf_counter()
    with nullcontext(_ignore) if quiet else progress("generating") as update:
        counter = _Counter(update, len(request.ids) * args.max_new_tokens)

        def on_tokens(index: int, tokens: list[int]) -> None:
            counter.add(len(tokens))
            if printer:
                printer.tokens(index, tokens)

        done = generate(
            session,
            request.ids,
            max_new_tokens=args.max_new_tokens,
            sampling=request.sampling,
            eos_ids=request.eos,
            draft_tokens=args.draft_tokens,
            on_tokens=on_tokens,
            on_done=None if printer is None else lambda index, _: printer.done(index),
        )
    seconds = time.perf_counter() - start
    if printer:
        print(speed_line(done, seconds), file=sys.stderr)
        return 0
    rows = [
        completion_json(
            i, request.texts[i], len(request.ids[i]), request.tokenizer.continuation(request.ids[i], row.tokens), row
        )
        for i, row in enumerate(done)
    ]
    print_json(request.described(session) | {"completions": rows, "seconds": {"load": loaded, "generate": seconds}})
    return 0


def _compare(request: Request | EngineRequest, loaded: float) -> int:
    from ..runtime.compare import compare

    args = request.args
    conventional, replay, rounding = request.pair()
    start = time.perf_counter()
    with progress("comparing") as update:
        counter = _Counter(update, len(request.ids) * args.max_new_tokens)
        result = compare(
            conventional,
            replay,
            request.ids,
            max_new_tokens=args.max_new_tokens,
            rounding=rounding,
            sampling=request.sampling,
            eos_ids=request.eos,
            draft_tokens=args.draft_tokens,
            on_tokens=lambda _, tokens: counter.add(len(tokens)),
        )
    seconds = time.perf_counter() - start
    if args.json:
        comparison = result.to_dict()
        for i, row in enumerate(comparison["rows"]):
            text = request.tokenizer.continuation(request.ids[i], row["tokens"])
            row |= {"index": i, "prompt": request.texts[i], "text": text}
        timing = {"load": loaded, "compare": seconds}
        print_json(request.described(replay) | {"comparison": comparison, "seconds": timing})
    else:
        printer = Printer(request.tokenizer, request.texts, request.ids)
        for i, compared in enumerate(result.rows):
            printer.tokens(i, compared.tokens)
            printer.done(i)
        print("\n".join(["", *comparison_lines(result, request.tokenizer)]))
    return 0 if result.ok else EXIT_DIFFERS


class _Counter:
    """Counts tokens into a progress bar."""

    def __init__(self, update: ProgressCallback, total: int) -> None:
        self._update, self._total, self._done = update, total, 0

    def add(self, tokens: int) -> None:
        self._done += tokens
        self._update(self._done, self._total, "tokens")


def _ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody sees."""
