"""Times the Mamba-2 step of the native library: append, flush, mixed, conventional and verify steps, against the floor.

    python -m benchmarks.bench_mamba2 --csv table.csv
    python -m benchmarks.bench_mamba2 --shapes super --batches 256 --modes mixed flush --heads-per-block 2 4 8

CUDA graphs; every call of a graph works on slots of its own, together far larger than the L2 cache; slots are named in
random order, so rows of one batch are at random phases of their windows.

    append        8 committed rows, none folded        flush    16 committed rows, all folded
    mixed         steady state of a server: every row somewhere in its window, about one in 16 folds
    conventional  window 1: read, fold one row, write, every step
    verifyT       T tokens, committed rows uniform over 0..16 (folds where T more would not fit)
    verifyT_a     T tokens in the steady state where `a` of them stay
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.timing import Timing, copy_bandwidth, machine, read_bandwidth, time_calls
from trtllm_replayssm import RecurrenceSpec, SlotLayout
from trtllm_replayssm.kernels import StepTuning, mamba2_step
from trtllm_replayssm.pool import StatePool

SHAPES = {  # nheads, headdim, ngroups, dstate
    "super": (128, 64, 8, 128),  # Nemotron-3-Super
    "nano4b": (96, 80, 8, 128),  # Nemotron-Nano-4B
    "nano30b": (64, 64, 8, 128),  # Nemotron-3-Nano-30B
}
WINDOW = 16
#: Calls in one graph by batch: enough to run for milliseconds, on memory several times the L2.
CALLS = {1: 512, 8: 128, 32: 48, 128: 16, 256: 10, 512: 6}
MODES = ("append", "flush", "mixed", "conventional", "verify4", "verify8", "verify4_3", "verify8_5")


@dataclass(frozen=True)
class Mode:
    """Tokens per step, tokens that stay of the previous step (-1: all), window, cursors before a replay."""

    tokens: int
    accepted: int
    window: int
    committed: str  # "keep": steady state; "uniform": 0..window; or a number


def parse_mode(name: str) -> Mode:
    """The Mode of one of MODES."""
    if name.startswith("verify"):
        tokens, _, accepted = name.removeprefix("verify").partition("_")
        return Mode(int(tokens), int(accepted or 0), WINDOW, "keep" if accepted else "uniform")
    table = {
        "append": Mode(1, 0, WINDOW, "8"),
        "flush": Mode(1, 0, WINDOW, "16"),
        "mixed": Mode(1, -1, WINDOW, "keep"),
        "conventional": Mode(1, -1, 1, "keep"),
    }
    return table[name]


class Bench:
    """One pool and its inputs for a (shape, state dtype, mode)."""

    def __init__(self, shape: str, state_dtype: str, mode: str, slots: int) -> None:
        nheads, headdim, ngroups, dstate = SHAPES[shape]
        self.mode = parse_mode(mode)
        self.spec = RecurrenceSpec(
            "mamba2", nheads, ngroups, headdim, dstate, state_dtype, window=self.mode.window, spec_len=self.mode.tokens
        )
        layout = SlotLayout(self.spec)
        memory = torch.empty(slots, layout.slot_bytes, dtype=torch.uint8, device="cuda")
        self.pool = StatePool(layout, memory)
        for name in ("state", "ring_x", "ring_b"):
            for part in self.pool[name].split(64):
                part.normal_()
        if "state_scale" in layout:
            self.pool["state_scale"].fill_(1.0)
        self.pool["ring_dt"].uniform_(0.001, 0.1)
        self.slots = torch.randperm(slots, device="cuda").int()
        self.A = -torch.empty(nheads, device="cuda").uniform_(1, 16)
        self.D = torch.randn(nheads, device="cuda")
        self.dt_bias = torch.randn(nheads, device="cuda") - 4.0
        self.cursor = self._cursors(slots)
        self.pool["cursor"].copy_(self.cursor)

    def _cursors(self, slots: int) -> torch.Tensor:
        spec, mode = self.spec, self.mode
        cursor = torch.zeros(slots, 4, dtype=torch.int16, device="cuda")
        cursor[:, 0] = torch.randint(0, spec.ring_rows, (slots,), device="cuda")
        cursor[:, 3] = spec.window
        if mode.committed == "uniform":
            cursor[:, 1] = torch.randint(0, spec.window + 1, (slots,), device="cuda")
        elif mode.committed == "keep":
            # A row that keeps `a` tokens a step meets histories 0, a, 2a, ... until T more would not fit.
            step = mode.tokens if mode.accepted < 0 else mode.accepted
            phases = (spec.window - mode.tokens) // step + 1
            cursor[:, 1] = torch.randint(0, phases, (slots,), device="cuda") * step
            cursor[:, 2] = mode.tokens
        else:
            cursor[:, 1] = int(mode.committed)
        return cursor[:, None, None, :].expand_as(self.pool["cursor"]).contiguous()

    def flush_share(self) -> float:
        """Share of rows that fold in one step, and by it the state bytes written."""
        history, pending = self.cursor[:, 0, 0, 1].float(), self.cursor[:, 0, 0, 2].float()
        stay = pending if self.mode.accepted < 0 else pending.clamp(max=self.mode.accepted)
        committed = history + stay
        return float(((committed > 0) & (committed + self.mode.tokens > self.spec.window)).float().mean())

    def calls(self, rows: int, count: int, tuning: StepTuning) -> list[Callable[[], object]]:
        """``count`` steps of ``rows`` rows, each on its own slots and tensors."""
        spec, T = self.spec, self.mode.tokens

        def act(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        out = []
        accepted = torch.full((rows,), self.mode.accepted, dtype=torch.int32, device="cuda")
        for i in range(count):
            slots = self.slots[i * rows : (i + 1) * rows]
            x = act(rows, T, spec.nheads, spec.headdim)
            B, C = (act(rows, T, spec.ngroups, spec.dstate) for _ in "BC")
            dt, y = act(rows, T, spec.nheads), torch.empty_like(x)

            def call(slots=slots, x=x, dt=dt, B=B, C=C, y=y) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return mamba2_step(
                    self.pool,
                    slots,
                    x,
                    dt,
                    self.A,
                    B,
                    C,
                    D=self.D,
                    dt_bias=self.dt_bias,
                    accepted=accepted,
                    out=y,
                    tuning=tuning,
                )

            out.append(call)
        return out

    def run(self, rows: int, tuning: StepTuning) -> Timing:
        """Time this mode at a batch of ``rows``."""
        count = min(CALLS[rows], len(self.slots) // rows)
        calls = self.calls(rows, count, tuning)
        return time_calls(calls, restore=lambda: self.pool["cursor"].copy_(self.cursor))


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row of the table per measurement."""
    tunings = [StepTuning(k, f) for k in args.heads_per_block for f in args.flags]
    slots = max(rows * CALLS[rows] for rows in args.batches)
    for shape in args.shapes:
        for state_dtype in args.state_dtypes:
            for mode in args.modes:
                bench = Bench(shape, state_dtype, mode, slots)
                for rows in args.batches:
                    for tuning in tunings:
                        timing = bench.run(rows, tuning)
                        state_bytes = rows * bench.pool.layout["state"].nbytes
                        share = bench.flush_share()
                        floor = state_bytes * (1 + share) / args.bandwidth / 1e6
                        yield {
                            "shape": shape,
                            "state": state_dtype,
                            "mode": mode,
                            "rows": rows,
                            "heads_per_block": tuning.heads_per_block,
                            "flags": tuning.flags,
                            "median_us": round(timing.median_us, 2),
                            "best_us": round(timing.best_us, 2),
                            "worst_us": round(timing.worst_us, 2),
                            "flush_share": round(share, 4),
                            "floor_us": round(floor, 2),
                            "over_floor": round(timing.median_us / floor, 3),
                        }
                del bench
                torch.cuda.empty_cache()


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["super"], choices=list(SHAPES))
    parser.add_argument("--state-dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--heads-per-block", nargs="+", type=int, default=[0])
    parser.add_argument("--flags", nargs="+", type=int, default=[0], help="REPLAYSSM_STEP_* of replayssm.h")
    parser.add_argument("--csv", type=Path, help="file to write")
    parser.add_argument("--bandwidth", type=float, help="TB/s of the floor; measured if left out")
    return parser.parse_args()


def main() -> None:
    """Print the table as it fills, write the CSV."""
    args = parse_args()
    torch.manual_seed(0)
    print("#", machine())
    if args.bandwidth is None:
        args.bandwidth = read_bandwidth()
        print(
            f"# read {args.bandwidth:.3f} TB/s, copy {copy_bandwidth():.3f} TB/s; floor = state bytes moved / read rate"
        )
    writer = None
    stream = args.csv.open("w", newline="") if args.csv else None
    for row in measure(args):
        if stream is not None:
            writer = writer or csv.DictWriter(stream, list(row))
            writer.writerow(dict(zip(row, row, strict=True))) if stream.tell() == 0 else None
            writer.writerow(row)
            stream.flush()
        print(" ".join(f"{v!s:>9}" for v in row.values()), flush=True)
    if stream is not None:
        stream.close()


if __name__ == "__main__":
    sys.exit(main())
