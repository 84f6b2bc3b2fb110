"""A built engine against the torch backend's tokens, logits and states (prepare.py).

usage: python3.9 tests/engine/check_model.py ENGINE EXPECTED.npz OUT.md [--no-graphs]       (needs a GPU)

The engine is fed the expected tokens, so that every position is compared whatever happens at one of them; where its own
choice is the expected token everywhere, free-running text is identical. Where TensorRT refuses to be captured in a CUDA
graph, the steps run without and the table says so. Expected error: sums in another order, and in
fp16 roundings that fall the other way. A choice may differ only where the two best logits lie closer than that.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.runtime.engine_runner import EngineRunner

#: Largest difference of logits over the largest logit of the position; of states over their norm.
LOGITS = {"float32": 1e-4, "float16": 2e-2}
STATES = {"float32": 1e-4, "float16": 2e-2}
PHASE_STEPS = 24


class Worst:
    """The largest differences so far, and the choices that differ."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.logits = self.states = 0.0
        self.positions = self.differing = 0
        self.failures: list[str] = []

    def compare(self, what: str, got: np.ndarray, want: np.ndarray) -> None:
        """Logits [n, vocab] of n positions."""
        if not np.isfinite(got).all():
            self.failures.append(f"{what}: logits are not finite")
            return
        scale = np.maximum(1.0, np.abs(want).max(-1))
        difference = np.abs(got - want).max(-1)
        self.logits = max(self.logits, float((difference / scale).max()))
        self.positions += len(got)
        for i in np.flatnonzero(got.argmax(-1) != want.argmax(-1)):
            self.differing += 1
            best = np.sort(want[i])[-2:]
            gap = float(best[1] - best[0])
            if gap > 2 * LOGITS[self.dtype] * scale[i]:
                self.failures.append(f"{what}, row {i}: another choice although the best logits are {gap:.2e} apart")
        if self.logits > LOGITS[self.dtype]:
            self.failures.append(f"{what}: logits differ by {self.logits:.2e} of the largest")

    def compare_state(self, what: str, got: np.ndarray, want: np.ndarray) -> None:
        """One layer's state."""
        error = float(np.linalg.norm(got.astype(np.float64) - want) / max(np.linalg.norm(want), 1e-30))
        self.states = max(self.states, error)
        if not error <= STATES[self.dtype]:
            self.failures.append(f"{what}: the state differs by {error:.2e} of its norm")


class Check:
    """One engine and what is expected of it."""

    def __init__(self, directory: str, expected: str, *, graphs: bool = True) -> None:
        self.runner = EngineRunner(directory, graphs=graphs)
        self.graphs = "not tried" if graphs else "off"
        self.config = self.runner.engine.config
        self.worst = Worst(self.config.network.dtype)
        with np.load(expected) as data:
            self.data = {name: data[name] for name in data.files}
        ends = np.cumsum(self.data["prompt_lengths"])
        self.prompts = [ids.tolist() for ids in np.split(self.data["prompt_ids"], ends[:-1])]
        self.tokens, self.logits = self.data["tokens"], self.data["logits"]

    def generate(self, steps: int) -> float:
        """All prompts, ``steps`` tokens; seconds of the steps. Compares the states where all steps were done."""
        seqs, logits = self.runner.prefill(self.prompts)
        self.worst.compare("prompt", logits, self.logits[:, 0])
        started = time.monotonic()
        for i in range(steps):
            logits = self.runner.step(seqs, self.tokens[:, i])
            self.worst.compare(f"token {i}", logits, self.logits[:, i + 1])
        seconds = time.monotonic() - started
        if steps == self.tokens.shape[1]:
            for row, seq in enumerate(seqs):
                for layer, state in self.runner.recurrent_state(seq).items():
                    self.worst.compare_state(f"row {row}, layer {layer}", state, self.data[f"state_{layer}_{row}"])
        self.runner.release(seqs)
        return seconds

    def phases(self) -> None:
        """Rows that start while others run, and slots that are given to new prompts."""
        at: dict[int, list[int]] = {}  # sequence -> [row of the expected data, tokens fed]

        def start(rows: Any) -> None:
            seqs, logits = self.runner.prefill([self.prompts[r] for r in rows])
            self.worst.compare("new rows", logits, self.logits[list(rows), 0])
            at.update({seq: [row, 0] for seq, row in zip(seqs, rows)})

        def advance(steps: int) -> None:
            for _ in range(steps):
                seqs = list(at)
                logits = self.runner.step(seqs, [self.tokens[row, fed] for row, fed in at.values()])
                want = np.stack([self.logits[row, fed + 1] for row, fed in at.values()])
                self.worst.compare("mixed rows", logits, want)
                for entry in at.values():
                    entry[1] += 1

        start(range(3))
        advance(PHASE_STEPS)
        start(range(3, 8))
        advance(PHASE_STEPS)
        gone = [seq for seq in at if at[seq][0] in (0, 2, 5)]
        self.runner.release(gone)
        for seq in gone:
            del at[seq]
        start((0, 2, 5))
        assert set(gone) <= set(at), "the slots were not used again"
        advance(PHASE_STEPS)
        self.runner.release(list(at))

    def drafts(self) -> None:
        """Verifies whose last tokens are wrong, committed as far as they are right; the logits of those compare."""
        width = self.runner.spec_len
        seqs, _ = self.runner.prefill(self.prompts)
        fed = np.zeros(len(seqs), int)
        for turn in range(3 * PHASE_STEPS):
            right = [1 + (turn + row) % width for row in range(len(seqs))]
            rows = np.stack([self.tokens[r, f : f + width] for r, f in enumerate(fed)])
            for row, count in enumerate(right):
                rows[row, count:] = (rows[row, count:] + 1) % self.runner.vocab_size
            logits = self.runner.verify(seqs, rows)
            for row, count in enumerate(right):
                first = fed[row] + 1
                self.worst.compare(f"draft {turn}", logits[row, :count], self.logits[row, first : first + count])
            self.runner.commit(seqs, right)
            fed += right
        self.runner.release(seqs)

    def graph_bits(self, steps: int) -> None:
        """The same steps captured and eager, at the same shapes and in the same slots: equal bits.

        Sets ``graphs``: captured, refused by TensorRT, or off.
        """
        engine: Any = self.runner.engine
        if self.graphs == "off":
            return
        results = []
        for capture in (True, False):
            if not capture:
                engine._graphs.clear()
                engine._worth_capturing = lambda key: False
            seqs, _ = self.runner.prefill(self.prompts)
            results.append([np.array(seqs)] + [self.runner.step(seqs, self.tokens[:, i]) for i in range(steps)])
            self.runner.release(seqs[::-1])  # so that the next prompts get the same slots, whose windows are staggered
            if capture and engine.refusal:
                self.graphs = "refused by TensorRT"
                return
            if capture and not engine.graphs:
                self.worst.failures.append("no step was captured in a graph")
        self.graphs = "captured"
        if not all(np.array_equal(a, b) for a, b in zip(*results)):
            self.worst.failures.append("captured steps and eager ones differ")


def main() -> None:
    """Run the checks; append a line to the table; exit code 1 where one failed, 2 for bad input."""
    parser = argparse.ArgumentParser(description="a built engine against the torch backend")
    for name in ("engine", "expected", "out"):
        parser.add_argument(name)
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        check = Check(args.engine, args.expected, graphs=not args.no_graphs)
    except (OSError, ReplayError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    loaded = time.monotonic() - started
    steps = check.tokens.shape[1]
    seconds = check.generate(steps)
    check.phases()
    if check.runner.spec_len > 1:
        check.drafts()
    check.graph_bits(PHASE_STEPS)
    worst, network = check.worst, check.config.network
    verdict = "FAILED" if worst.failures else "equal" if not worst.differing else f"{worst.differing} within rounding"
    line = (
        f"| {network.dtype} | {network.window} | {network.spec_len} | {len(check.prompts)} x {steps} | "
        f"{worst.positions:,} | "
        f"{verdict} | {worst.logits:.1e} | {worst.states:.1e} | {check.graphs} | "
        f"{loaded:.1f} | {1e6 * seconds / steps:.0f} |"
    )
    print(line, flush=True)
    if check.runner.engine.refusal:
        print("   not captured:", check.runner.engine.refusal, flush=True)
    for failure in worst.failures[:20]:
        print("  ", failure, flush=True)
    with open(args.out, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    sys.exit(int(bool(worst.failures)))


if __name__ == "__main__":
    main()
