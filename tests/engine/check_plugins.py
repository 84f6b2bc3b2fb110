"""Every plugin alone in a TensorRT engine against the library called directly with the same inputs.

usage: python3.9 tests/engine/check_plugins.py OUT.md        (needs a GPU; Python 3.9 where TensorRT is 8.6)

Compared after every call: the outputs of all live rows, and every byte of the whole pool (slots that took no part
included). Calls: prompts of three lengths, one continued; steps over several flushes with a pad row; drafts with
rejections; a reused slot; with packed input a batch of context and generation rows; steps as a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

try:
    import tensorrt as trt
except ModuleNotFoundError:
    print(
        f"{Path(__file__).name}: error: tensorrt is not installed; these checks build engines with it", file=sys.stderr
    )
    sys.exit(2)
from engine_cases import NUMPY, SLOTS, Case, Direct, PluginEngine, Row

from trtllm_replayssm import plugins

KINDS = ("conv", "mamba2", "gated_delta", "kimi_delta")
CONTEXT_CALLS = [
    [Row(4, 5, True), Row(1, 1, True), Row(2, 9, True)],
    [Row(1, 3, True, has_initial=1)],
]
STEP_CALLS = [
    *[[Row(1, 1), Row(4, 1), Row(-1, 1), Row(2, 1)]] * 6,
    [Row(2, 4), Row(4, 4)],
    [Row(4, 4, accepted=0), Row(2, 4, accepted=3)],
    [Row(1, 2), Row(2, 2, accepted=4)],
]
MIXED_CALLS = [[Row(0, 7, True), Row(3, 2, True), Row(1, 1, accepted=1), Row(4, 1, accepted=2)]]
REUSE_CALLS = [[Row(2, 2, True)], [Row(2, 1), Row(0, 1)]]
GRAPH_STEPS = 7


class Comparison:
    """One case in one form of input: an engine and the direct calls, kept in step."""

    def __init__(self, kind: str, dtype: str, packed: bool) -> None:
        self.case = Case(kind, dtype)
        started = time.monotonic()
        self.engine = PluginEngine(self.case, packed=packed)
        self.seconds = time.monotonic() - started
        self.direct = Direct(self.case)
        self.rng = np.random.default_rng(7)
        self.calls = 0

    def pools(self) -> tuple[np.ndarray, np.ndarray]:
        """Both pools' bytes."""
        shape = (SLOTS, self.case.layout.slot_bytes)
        return tuple(side.memory.take("pool", shape, np.uint8) for side in (self.engine, self.direct))

    def check(self, rows: list[Row], y: np.ndarray, want: np.ndarray) -> None:
        """Outputs of live rows and all bytes of the pools."""
        start = 0
        for row in rows:
            mine, theirs = y[start : start + row.tokens], want[start : start + row.tokens]
            start += row.tokens
            assert np.isfinite(mine.astype(np.float32)).all(), f"call {self.calls}: slot {row.slot} is not finite"
            assert np.array_equal(mine, theirs), f"call {self.calls}: outputs of slot {row.slot} differ"
        a, b = self.pools()
        differing = sorted({int(i) for i in np.argwhere(a != b)[:, 0]})
        assert not differing, f"call {self.calls}: the bytes of slots {differing} differ"

    def call(self, rows: list[Row]) -> None:
        """One call both ways."""
        operands = self.case.operands(sum(row.tokens for row in rows), self.rng)
        self.check(rows, self.engine.run(rows, operands), self.direct.run(rows, operands))
        self.calls += 1

    def graph(self) -> None:
        """Steps replayed from one captured graph, against direct calls."""
        rows = [Row(4, 1), Row(1, 1)]
        operands = self.case.operands(2, self.rng)
        y = self.engine.run(rows, operands)
        want = self.direct.run(rows, operands)
        captured = self.engine.memory.stream.capture(self.engine.enqueue)
        for _ in range(GRAPH_STEPS):
            captured.launch(self.engine.memory.stream.handle)
            want = self.direct.run(rows, operands)
        y = self.engine.memory.take("y", (2, self.case.output), NUMPY[self.case.dtype])
        self.check(rows, y, want)
        self.calls += 1 + GRAPH_STEPS


def run(kind: str, dtype: str, packed: bool) -> str:
    """All calls of a case; a line of the table."""
    both = Comparison(kind, dtype, packed)
    for rows in (*CONTEXT_CALLS, *STEP_CALLS, *(MIXED_CALLS if packed else []), *REUSE_CALLS):
        both.call(rows)
    both.graph()
    form = "packed" if packed else "padded"
    return f"| {both.case.plugin} ({kind}) | {dtype} | {form} | {both.calls} | equal | equal | {both.seconds:.1f} |"


def teeth() -> None:
    """A changed byte, and a changed output, must be found."""
    both = Comparison("mamba2", "float32", True)
    rows = CONTEXT_CALLS[0]
    operands = both.case.operands(15, both.rng)
    y, want = both.engine.run(rows, operands), both.direct.run(rows, operands)
    for damage in ("output", "pool"):
        wrong = y.copy()
        if damage == "output":
            wrong[3, 5] = np.nextafter(wrong[3, 5], np.float32(9))
        else:
            both.engine.memory.device["pool"].fill(1, both.engine.memory.stream.handle)
        try:
            both.check(rows, wrong, want)
        except AssertionError:
            continue
        raise SystemExit(f"a damaged {damage} was not found")


def main() -> None:
    """Run every case, print and write the table; exit code 1 where anything differs, 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="OUT.md", type=Path, help="file to write the table to")
    out: Path = parser.parse_args().out
    print("\n".join(plugins.register()), flush=True)
    lines = [
        f"TensorRT {trt.__version__}, one plugin per engine, against the C interface:",
        "",
        "| plugin | dtype | input | calls | outputs | pool bytes | build s |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = False
    for kind in KINDS:
        for dtype in NUMPY:
            for packed in (False, True):
                try:
                    line = run(kind, dtype, packed)
                except (AssertionError, RuntimeError, ValueError) as error:
                    failed = True
                    line = f"| {kind} | {dtype} | {'packed' if packed else 'padded'} | {error} | FAILED | | |"
                print(line, flush=True)
                lines.append(line)
    teeth()
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
