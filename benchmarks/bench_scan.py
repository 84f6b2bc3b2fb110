"""Times the Mamba-2 scan of the native library: tensor cores and token by token, against the memory floor.

    python -m benchmarks.bench_scan                                      all shapes and prompts, table + CSV
    python -m benchmarks.bench_scan --shapes nemotron-3-super --prompts 64x2048 --gate

CUDA graphs; the calls of a graph have tensors and slots of their own, together larger than the L2 cache. bf16
activations and dt, fp32 state, D and dt bias, softplus, no initial states. Before it is timed, each shape scans three
short prompts and is compared with the float64 recurrence. Floor: inputs read, outputs and final states written once,
over the measured read bandwidth. FLOP: of the matrix products, every bf16 term counted (scan_mma_kernel.cuh).
bench_against_peers times other packages' scans beside this one.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.shapes import MODELS, Shape
from benchmarks.timing import machine, read_bandwidth, time_calls
from trtllm_replayssm import SlotLayout
from trtllm_replayssm.kernels import mamba2_scan
from trtllm_replayssm.pool import StatePool
from trtllm_replayssm.reference import mamba2_recurrence

SHAPES = [name for name, shape in MODELS.items() if shape.kind == "mamba2"]
PROMPTS = ("64x2048", "8x2048", "1x2048", "64x128", "1x16384")
#: Largest ||got - float64|| / ||float64||: one bf16 rounding of y; a few fp32 roundings of the state.
Y_BOUND, STATE_BOUND = 2.5e-3, 5e-7
#: The calls of one graph take together about this many bytes, or are a single one.
GRAPH_BYTES = 512 << 20


class Scan:
    """Tensors of one call: ``rows`` prompts of ``length`` tokens in slots 0 .. rows-1 of a pool of its own."""

    def __init__(self, shape: Shape, rows: int, length: int, gate: bool) -> None:
        H, G, P, N = shape.nheads, shape.ngroups, shape.headdim, shape.dstate
        tokens = rows * length
        self.pool = StatePool.allocate(SlotLayout(shape.spec()), rows, device="cuda")
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.bounds = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.tokens = {
            "x": torch.randn(tokens, H, P, **bf16),
            "dt": torch.randn(tokens, H, **bf16),
            "B": torch.randn(tokens, G, N, **bf16),
            "C": torch.randn(tokens, G, N, **bf16),
        }
        if gate:
            self.tokens["z"] = torch.randn(tokens, H, P, **bf16)
        rate = torch.rand(H, device="cuda") * 15 + 1
        step = torch.exp(torch.rand(H, device="cuda") * 4.6 - 6.9)  # 0.001 .. 0.1, as models are initialised
        self.params = {"A": -rate, "D": torch.randn(H, device="cuda"), "dt_bias": torch.log(torch.expm1(step))}
        self.y = torch.full((tokens, H, P), float("nan"), **bf16)

    def call(self, exact: bool) -> Callable[[], torch.Tensor]:
        """The scan of these prompts."""
        options = {"cu_seqlens": self.bounds, "out": self.y, "exact": exact}
        return lambda: mamba2_scan(self.pool, self.slots, **self.tokens, **self.params, **options)

    def nbytes(self) -> int:
        """Bytes that have to move: inputs, outputs, final states."""
        state = self.pool.layout["state"].nbytes * len(self.slots)
        return sum(v.numel() * v.element_size() for v in (*self.tokens.values(), self.y)) + state


def flop(shape: Shape, tokens: int) -> float:
    """Of the products for ``tokens`` tokens, blocks of four heads."""
    H, P, N = shape.nheads, shape.headdim, shape.dstate
    return tokens * H * (2 * P * N * (2 + 3) + 2 * P * 40 * 2 + 2 * N * 64 / 4)


def check(shape: Shape, gate: bool, exact: bool) -> tuple[float, float]:
    """Relative errors of y and state on three prompts of 200 tokens against float64; SystemExit above the bounds."""
    scan = Scan(shape, 3, 200, gate)
    y = scan.call(exact)()
    start = torch.zeros(3, shape.nheads, shape.headdim, shape.dstate, dtype=torch.float64, device="cuda")
    tokens = {n: v.unflatten(0, (3, 200)).double() for n, v in scan.tokens.items()}
    params = {n: v.double() for n, v in scan.params.items()}
    want_y, want_state = mamba2_recurrence(start, **tokens, **params)
    pairs = ((y.unflatten(0, (3, 200)), want_y, Y_BOUND), (scan.pool.checkpoint(), want_state, STATE_BOUND))
    errors = []
    for got, want, bound in pairs:
        error = float((got.double() - want).norm() / want.norm())
        if not error <= bound:
            raise SystemExit(f"{shape.name}: relative error {error:.2e}, above {bound:.1e}")
        errors.append(error)
    return errors[0], errors[1]


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row of the table per measurement."""
    for name in args.shapes:
        shape = MODELS[name]
        for exact in (False, True) if args.exact else (False,):
            y_error, state_error = check(shape, args.gate, exact)
            for prompts in args.prompts:
                rows, length = (int(n) for n in prompts.split("x"))
                first = Scan(shape, rows, length, args.gate)
                count = max(1, min(16, GRAPH_BYTES // first.nbytes()))
                scans = [first, *(Scan(shape, rows, length, args.gate) for _ in range(count - 1))]
                timing = time_calls([scan.call(exact) for scan in scans], replays=3 if exact else 9)
                floor = first.nbytes() / args.bandwidth / 1e6
                yield {
                    "shape": name,
                    "kernel": "exact" if exact else "fast",
                    "prompts": prompts,
                    "gate": args.gate,
                    "median_us": round(timing.median_us, 1),
                    "best_us": round(timing.best_us, 1),
                    "worst_us": round(timing.worst_us, 1),
                    "floor_us": round(floor, 1),
                    "over_floor": round(timing.median_us / floor, 2),
                    "tflops": "" if exact else round(flop(shape, rows * length) / timing.median_us / 1e6, 1),
                    "y_error": f"{y_error:.1e}",
                    "state_error": f"{state_error:.1e}",
                }
                del first, scans


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES, metavar="MODEL")
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), metavar="ROWSxTOKENS")
    parser.add_argument("--gate", action="store_true", help="with z")
    parser.add_argument("--exact", action="store_true", help="time the token-by-token kernel too")
    parser.add_argument("--bandwidth", type=float, help="TB/s of the floor; measured if left out")
    parser.add_argument("--csv", type=Path, help="file to write")
    return parser.parse_args()


def main() -> None:
    """Print the table as it fills, write the CSV."""
    args = parse_args()
    torch.manual_seed(0)
    print("#", machine())
    if args.bandwidth is None:
        args.bandwidth = read_bandwidth()
        print(f"# read {args.bandwidth:.3f} TB/s")
    rows: list[dict[str, object]] = []
    for row in measure(args):
        if not rows:
            print(" ".join(f"{name:>11}" for name in row))
        rows.append(row)
        print(" ".join(f"{value!s:>11}" for value in row.values()), flush=True)
    if args.csv is not None and rows:
        with args.csv.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
