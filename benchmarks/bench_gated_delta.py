"""Times the GDN and KDA kernels of the native library against the memory floor: steps in every mode, and scans.

    python -m benchmarks.bench_gated_delta --csv table.csv
    python -m benchmarks.bench_gated_delta --shapes kimi-linear-48b --batches 256 --modes mixed --windows 4 8 16
    python -m benchmarks.bench_gated_delta --modes scan scan-exact --prompts 64x2048 1x2048
    python -m benchmarks.bench_gated_delta --peers vllm-packed vllm-gating vllm-chunk fla-recurrent fla-chunk

CUDA graphs; every call of a graph works on slots and tensors of its own, together far larger than the L2 cache; slots
are named in random order, so rows of one batch are at random phases of their windows.

    append        half a window committed, none folded       flush    a whole window committed, all folded
    mixed         steady state of a server: every row somewhere in its window, about one in `window` folds
    conventional  window 1: read, fold one row, write, every step
    verifyT       T tokens, committed rows uniform over 0..window (folds where T more would not fit)
    verifyT_a     T tokens in the steady state where `a` of them stay
    scan          packed prompts, in chunks on tensor cores where the library has a kernel; scan-exact: token by token

A step's floor is the state bytes that it must read and write over the read bandwidth measured in the same run; a scan's
its inputs, outputs and final states. Scans and peers are compared with the float64 recurrence before they are timed.
Peers (peers/delta_*.py) run in the modes conventional, verifyT and scan, on the same shapes, batches and floor.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.delta_base import O_LIMIT, PEERS, DeltaLayer, DeltaPeer, check_scan, check_step, peer
from benchmarks.shapes import MODELS, Shape
from benchmarks.timing import Timing, copy_bandwidth, machine, read_bandwidth, time_calls
from trtllm_replayssm import RecurrenceSpec, SlotLayout, reference
from trtllm_replayssm.kernels import StepTuning, gated_delta_scan, gated_delta_step
from trtllm_replayssm.pool import StatePool

SHAPES = {
    "qwen3.5-35b": MODELS["qwen3.5-35b"],  # and the 4B: HK 16, HV 32
    "qwen3.5-122b": MODELS["qwen3.5-122b"],  # HK 16, HV 64
    "kimi-linear-48b": MODELS["kimi-linear-48b"],  # 32 heads
    "kimi-k3-tp8": MODELS["kimi-k3"].split(8),  # 12 heads of 96
}
#: Calls in one graph by batch: enough to run for milliseconds, on memory several times the L2.
CALLS = {1: 512, 8: 128, 32: 48, 128: 16, 256: 10, 512: 6}
STEP_MODES = ("mixed", "append", "flush", "conventional", "verify4", "verify8", "verify4_3", "verify8_5")
MODES = (*STEP_MODES, "scan", "scan-exact")
PROMPTS = ("64x2048", "8x2048", "1x2048", "64x128")
#: Largest ||got - float64|| / ||float64|| of a scan: one bf16 rounding of o; fp32 roundings of the state.
O_BOUND, STATE_BOUND = 2.5e-3, 2e-6
#: The calls of one scan graph take together about this many bytes, or are a single one.
GRAPH_BYTES = 512 << 20
#: States of a peer's pool at most: at 122B's size 34 GB.
PEER_STATES = 8192


@dataclass(frozen=True)
class Mode:
    """Tokens per step, tokens that stay of the previous step (-1: all), window, cursors before a replay."""

    tokens: int
    accepted: int
    window: int
    committed: str  # "keep": steady state; "uniform": 0..window; or a number


def parse_mode(name: str, window: int) -> Mode:
    """The Mode of one of STEP_MODES."""
    if name.startswith("verify"):
        tokens, _, accepted = name.removeprefix("verify").partition("_")
        return Mode(int(tokens), int(accepted or 0), window, "keep" if accepted else "uniform")
    table = {
        "append": Mode(1, 0, window, str(window // 2)),
        "flush": Mode(1, 0, window, str(window)),
        "mixed": Mode(1, -1, window, "keep"),
        "conventional": Mode(1, -1, 1, "keep"),
    }
    return table[name]


def parameters(spec: RecurrenceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log [HV] and dt_bias [HV] or [HV, K], as models are initialised."""
    channels = (spec.nheads, spec.dstate) if spec.kind == "kimi_delta" else (spec.nheads,)
    step = torch.exp(torch.rand(channels, device="cuda") * 4.6 - 6.9)
    return torch.log(torch.rand(spec.nheads, device="cuda") * 15 + 1), torch.log(torch.expm1(step))


def random_tokens(spec: RecurrenceSpec, *lead: int) -> dict[str, torch.Tensor]:
    """q, k, v, a, b as a model's projections give them: bf16."""

    def act(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, device="cuda", dtype=torch.bfloat16)

    gates = (spec.nheads, spec.dstate) if spec.kind == "kimi_delta" else (spec.nheads,)
    heads = {"q": act(spec.ngroups, spec.dstate), "k": act(spec.ngroups, spec.dstate)}
    return heads | {"v": act(spec.nheads, spec.headdim), "a": act(*gates), "b": act(spec.nheads)}


class StepBench:
    """One pool and its inputs for a (shape, state dtype, mode)."""

    def __init__(self, shape: Shape, state_dtype: str, mode: Mode, slots: int) -> None:
        self.mode = mode
        self.spec = shape.spec(state_dtype=state_dtype, window=mode.window, spec_len=mode.tokens)
        layout = SlotLayout(self.spec)
        self.pool = StatePool(layout, torch.empty(slots, layout.slot_bytes, dtype=torch.uint8, device="cuda"))
        for name in ("state", "ring_k", "ring_v", "ring_d"):
            for part in self.pool[name].split(64):
                part.normal_()
        if "state_scale" in layout:
            self.pool["state_scale"].fill_(1.0)
        self.pool["ring_k_rnorm"].fill_(self.spec.dstate**-0.5)
        self.pool["ring_g"].uniform_(-0.1, -0.001)
        self.pool["ring_beta"].uniform_(0.1, 0.9)
        self.slots = torch.randperm(slots, device="cuda").int()
        self.A_log, self.dt_bias = parameters(self.spec)
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
            phases = max(spec.window - mode.tokens, 0) // step + 1
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

    def run(self, rows: int, tuning: StepTuning) -> Timing:
        """Time this mode at a batch of ``rows``: steps that each have their own slots and tensors."""
        accepted = torch.full((rows,), self.mode.accepted, dtype=torch.int32, device="cuda")
        calls: list[Callable[[], object]] = []
        for i in range(min(CALLS[rows], len(self.slots) // rows)):
            slots = self.slots[i * rows : (i + 1) * rows]
            tokens = random_tokens(self.spec, rows, self.mode.tokens)
            out = torch.empty_like(tokens["v"])

            def call(slots=slots, tokens=tokens, out=out) -> torch.Tensor:  # type: ignore[no-untyped-def]
                parameters: dict[str, Any] = {"A_log": self.A_log, "dt_bias": self.dt_bias, "accepted": accepted}
                return gated_delta_step(self.pool, slots, **tokens, **parameters, out=out, tuning=tuning)

            calls.append(call)
        return time_calls(calls, restore=lambda: self.pool["cursor"].copy_(self.cursor))


class ScanBench:
    """Tensors of one scan: ``rows`` prompts of ``length`` tokens in slots 0 .. rows-1 of a pool of its own."""

    def __init__(self, shape: Shape, state_dtype: str, rows: int, length: int) -> None:
        self.spec = shape.spec(state_dtype=state_dtype)
        self.rows, self.length = rows, length
        self.pool = StatePool.allocate(SlotLayout(self.spec), rows, device="cuda")
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.bounds = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
        self.tokens = random_tokens(self.spec, rows * length)
        self.A_log, self.dt_bias = parameters(self.spec)
        self.o = torch.full_like(self.tokens["v"], float("nan"))

    def call(self, exact: bool) -> Callable[[], torch.Tensor]:
        """The scan of these prompts."""
        arguments: dict[str, Any] = {**self.tokens, "A_log": self.A_log, "dt_bias": self.dt_bias}
        arguments |= {"cu_seqlens": self.bounds, "out": self.o, "exact": exact}
        return lambda: gated_delta_scan(self.pool, self.slots, **arguments)

    def nbytes(self) -> int:
        """Bytes that have to move: inputs, outputs, final states."""
        state = self.pool.layout["state"].nbytes * self.rows
        return sum(v.numel() * v.element_size() for v in (*self.tokens.values(), self.o)) + state

    def check(self, exact: bool) -> tuple[float, float]:
        """Relative errors of o and state against float64; SystemExit above the bounds (state: those of fp32)."""
        o = self.call(exact)()
        spec, lead = self.spec, (self.rows, self.length)
        start = torch.zeros(self.rows, spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64, device="cuda")
        t = {name: value.unflatten(0, lead).double() for name, value in self.tokens.items()}
        g, beta = reference.delta_gates(
            t["a"],
            t["b"],
            self.A_log.double(),
            self.dt_bias.double(),
            gate=spec.gate,
            lower_bound=spec.gate_lower_bound,
        )
        want_o, want_state = reference.gated_delta_recurrence(start, t["q"], t["k"], t["v"], g, beta)
        state_bound = STATE_BOUND if spec.state_dtype == "float32" else 4e-3
        errors = []
        for got, want, bound in (
            (o.unflatten(0, lead), want_o, O_BOUND),
            (self.pool.checkpoint(), want_state, state_bound),
        ):
            errors.append(float((got.double() - want).norm() / want.norm()))
            if not errors[-1] <= bound:
                raise SystemExit(f"{spec.kind} scan: relative error {errors[-1]:.2e}, above {bound:.1e}")
        return errors[0], errors[1]


def row_of(timing: Timing, floor_us: float, **first: object) -> dict[str, object]:
    """One row of the table."""
    keys = ("contender", "shape", "state", "mode", "rows", "window", "heads_per_block", "flags")
    times = {"median_us": timing.median_us, "best_us": timing.best_us, "worst_us": timing.worst_us}
    rounded = {name: round(value, 2) for name, value in times.items()}
    row: dict[str, object] = {key: first.get(key, "") for key in keys}
    return row | rounded | {"floor_us": round(floor_us, 2), "over_floor": round(timing.median_us / floor_us, 3)}


def measure_steps(args: argparse.Namespace, name: str, state: str, mode: str) -> Iterator[dict[str, object]]:
    """All windows, batches and tunings of one mode."""
    slots = max(rows * CALLS[rows] for rows in args.batches)
    for window in args.windows if mode != "conventional" else args.windows[:1]:
        bench = StepBench(SHAPES[name], state, parse_mode(mode, window), slots)
        share = bench.flush_share()
        for rows in args.batches:
            for tuning in (StepTuning(k, f) for k in args.heads_per_block for f in args.flags):
                floor = rows * bench.pool.layout["state"].nbytes * (1 + share) / args.bandwidth / 1e6
                keys = {"contender": "ours", "shape": name, "state": state, "mode": mode, "rows": rows}
                cut = {"window": bench.spec.window, "heads_per_block": tuning.heads_per_block, "flags": tuning.flags}
                row = row_of(bench.run(rows, tuning), floor, **keys, **cut)
                yield row | {"note": f"{share:.3f} of the rows fold"}
        del bench
        torch.cuda.empty_cache()


def measure_scans(args: argparse.Namespace, name: str, state: str, mode: str) -> Iterator[dict[str, object]]:
    """All prompts of one way to scan, and peers'."""
    exact = mode == "scan-exact"
    errors = ScanBench(SHAPES[name], state, 3, 200).check(exact)
    others = {n: p for n, p in args.made.items() if not exact and runs(n, p, SHAPES[name], state, mode, 1)}
    for prompts in args.prompts:
        rows, length = (int(n) for n in prompts.split("x"))
        first = ScanBench(SHAPES[name], state, rows, length)
        count = max(1, min(8, GRAPH_BYTES // first.nbytes()))
        scans = [first, *(ScanBench(SHAPES[name], state, rows, length) for _ in range(count - 1))]
        floor = first.nbytes() / args.bandwidth / 1e6
        keys = {"shape": name, "state": state, "mode": mode, "rows": prompts}
        timing = time_calls([scan.call(exact) for scan in scans], replays=5, warmup=1)
        note = {"note": f"errors: o {errors[0]:.1e}, state {errors[1]:.1e}"}
        yield row_of(timing, floor, contender="ours", **keys) | note
        for other, made in others.items():
            calls = []
            for scan in scans:
                layer = DeltaLayer(scan.spec, scan.A_log, scan.dt_bias)
                tokens = {n: v.unflatten(0, (rows, length)) for n, v in scan.tokens.items()}
                calls.append(made.scan(layer, tokens).call)
            yield row_of(time_calls(calls, replays=5, warmup=1), floor, contender=other, **keys) | {"note": ""}
        del first, scans
        torch.cuda.empty_cache()


def runs(name: str, made: DeltaPeer, shape: Shape, state: str, mode: str, tokens: int) -> bool:
    """Whether a peer can run this and gets it right; prints why not."""
    spec = shape.spec(state_dtype=state)
    layer = DeltaLayer(spec, *parameters(spec))
    what = f"# {name}, {shape.name}, state {state}, {mode}"
    reason = made.refuses(layer, "scan" if mode == "scan" else "step", tokens)
    if not reason:
        if mode == "scan":
            error = check_scan(made, layer, random_tokens(spec, 3, 200))
        else:
            error = check_step(made, layer, random_tokens(spec, 3, tokens))
        if error <= O_LIMIT[state]:
            print(f"{what}: largest relative error {error:.1e}", flush=True)
            return True
        reason = f"relative error {error:.1e}, allowed {O_LIMIT[state]:.1e}"
    print(f"{what}: not timed: {reason}", flush=True)
    return False


def measure_peers(args: argparse.Namespace, name: str, state: str, mode: str) -> Iterator[dict[str, object]]:
    """Peers' steps: conventional, and verification with a state per token."""
    shape, tokens = SHAPES[name], parse_mode(mode, 16).tokens
    if mode != "conventional" and mode not in ("verify4", "verify8"):
        return
    for other, made in args.made.items():
        if not runs(other, made, shape, state, mode, tokens):
            continue
        spec = shape.spec(state_dtype=state)
        layer = DeltaLayer(spec, *parameters(spec))
        sequences = min(max(rows * CALLS[rows] for rows in args.batches), PEER_STATES // tokens)
        states = layer.states(1 + sequences * tokens)
        state_bytes = states[0].numel() * states.element_size()
        share = {"conventional": 1.0, "verify4": 4 / 17, "verify8": 8 / 17}[mode]  # as ours at window 16
        for rows in args.batches:
            order = torch.randperm(sequences // rows, device="cuda").int()
            calls = []
            for i in range(min(CALLS[rows], len(order))):
                slots = order[i] * rows + torch.arange(rows, device="cuda", dtype=torch.int32)
                calls.append(made.step(layer, states, slots, random_tokens(spec, rows, tokens)))
            floor = rows * state_bytes * (1 + share) / args.bandwidth / 1e6
            keys = {"contender": other, "shape": name, "state": state, "mode": mode, "rows": rows}
            yield row_of(time_calls(calls), floor, **keys) | {"note": ""}
        del states, calls
        torch.cuda.empty_cache()


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row of the table per measurement."""
    for name in args.shapes:
        for state in args.state_dtypes:
            for mode in args.modes:
                if mode.startswith("scan"):
                    yield from measure_scans(args, name, state, mode)
                    continue
                yield from measure_steps(args, name, state, mode)
                yield from measure_peers(args, name, state, mode)


def commit() -> str:
    """Of the checkout, if it is one."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--state-dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--windows", nargs="+", type=int, default=[16])
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), metavar="ROWSxTOKENS")
    parser.add_argument("--heads-per-block", nargs="+", type=int, default=[0])
    parser.add_argument("--flags", nargs="+", type=int, default=[0], help="REPLAYSSM_STEP_* of replayssm.h")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PEERS), help="time these packages' kernels too")
    parser.add_argument("--csv", type=Path, help="file to write")
    parser.add_argument("--commit", default="", help="commit to name where the checkout has no .git")
    parser.add_argument("--bandwidth", type=float, help="TB/s of the floor; measured if left out")
    return parser.parse_args()


def main() -> None:
    """Print the table as it fills, write the CSV."""
    args = parse_args()
    torch.manual_seed(0)
    args.made = {name: peer(name) for name in args.peers}
    header = [
        machine(),
        f"commit {args.commit or commit()}",
        "python -m benchmarks.bench_gated_delta " + " ".join(sys.argv[1:]),
    ]
    if args.bandwidth is None:
        args.bandwidth = read_bandwidth()
        header.append(f"read {args.bandwidth:.3f} TB/s, copy {copy_bandwidth():.3f} TB/s")
    lines = [f"# {line}" for line in header]
    print("\n".join(lines), flush=True)
    stream = args.csv.open("w", newline="") if args.csv else None
    if stream is not None:
        stream.write("\n".join(lines) + "\n")
    writer = None
    for row in measure(args):
        if stream is not None:
            if writer is None:
                writer = csv.DictWriter(stream, list(row))
                writer.writeheader()
            writer.writerow(row)
            stream.flush()
        print(" ".join(f"{v!s:>9}" for v in row.values()), flush=True)
    if stream is not None:
        stream.close()


if __name__ == "__main__":
    main()
