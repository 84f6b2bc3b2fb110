"""Time of one decode step of an engine with ReplaySSM against the same engine with window 1.

usage: python3.9 tests/engine/bench_step.py ENGINE ENGINE_WINDOW_1 OUT.md        (needs a GPU)

A step is one launch of its CUDA graph: inputs, network, append to the caches. Where TensorRT refused to be captured, it
is one enqueue, whose time on the host counts, and the table says so. Launches follow each other without a gap;
their number is a multiple of the window, so that flushes are in the mean. Rows stand at different places of their
windows (stagger). Median of REPEATS means.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.runtime.cuda import Event, cuda
from trtllm_replayssm.runtime.engine import GENERATION
from trtllm_replayssm.runtime.engine_runner import EngineRunner

BATCHES = (8, 64, 256, 512)
LAUNCHES, REPEATS, PROMPT = 64, 7, 16


def step_time(runner: EngineRunner, batch: int) -> float:
    """Microseconds of a step with ``batch`` rows."""
    engine: Any = runner.engine
    rng = np.random.default_rng(0)
    seqs, _ = runner.prefill(rng.integers(1, runner.vocab_size, (batch, PROMPT)).tolist())
    for _ in range(3):
        runner.step(seqs, rng.integers(1, runner.vocab_size, batch))
    graphs = [graph for key, (_, graph) in engine._graphs.items() if key[0] == batch]

    def launch() -> None:
        if graphs:
            graphs[0].launch(engine.stream.handle)
        else:
            engine._enqueue(engine._eager[GENERATION], batch, 1)

    begin, end = Event(cuda()), Event(cuda())
    means = []
    for _ in range(REPEATS):
        begin.record(engine.stream.handle)
        for _ in range(LAUNCHES):
            launch()
        end.record(engine.stream.handle)
        means.append(1000 * end.milliseconds_since(begin) / LAUNCHES)
    runner.release(seqs)
    return float(np.median(means))


def main() -> None:
    """Time both engines at every batch that they hold, print and append the table; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", metavar="ENGINE", help="directory of the engine with ReplaySSM")
    parser.add_argument("conventional", metavar="ENGINE_WINDOW_1", help="directory of the same engine with window 1")
    parser.add_argument("out", metavar="OUT.md", help="file to append the table to")
    args = parser.parse_args()
    try:
        bench((args.engine, args.conventional), args.out)
    except ReplayError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def bench(engines: tuple[str, str], out: str) -> None:
    """The table of two engine directories, printed and appended to the file ``out``."""
    times: list[dict[int, float]] = []
    windows, dtypes, modes = [], set(), set()
    for directory in engines:
        runner = EngineRunner(directory)
        windows.append(runner.engine.config.network.window)
        times.append({batch: step_time(runner, batch) for batch in BATCHES if batch <= runner.free_slots})
        dtypes.add(runner.engine.config.network.dtype)
        modes.add("one graph" if runner.engine.graphs else "no graphs, host included")
        memory = runner.engine.memory.nbytes / (1 << 30)
        print(f"window {windows[-1]}: {memory:.1f} GiB of device memory", flush=True)
        runner.engine.close()
    lines = [
        f"{', '.join(sorted(dtypes))}; a step is {' or '.join(sorted(modes))}:",
        "",
        f"| batch | window {windows[0]}, us | window {windows[1]}, us | ratio |",
        "|---|---|---|---|",
        *(f"| {b} | {times[0][b]:.1f} | {t:.1f} | {t / times[0][b]:.2f} |" for b, t in times[1].items()),
    ]
    print("\n".join(lines), flush=True)
    with open(out, "a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
