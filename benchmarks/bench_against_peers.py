"""Times our Mamba-2 kernels beside vLLM's, FlashInfer's and mamba_ssm's in one run on one GPU.

    python -m benchmarks.bench_against_peers                          everything; table and CSV in benchmarks/results
    python -m benchmarks.bench_against_peers --rows 8 --scan-rows 1   every contender checked, one batch timed
    python -m benchmarks.bench_against_peers --minutes 3 --shapes nemotron-3-super --contenders ours vllm-replay

    mixed        T = 1, every row somewhere in its window of 16, so one row in 16 folds: the mean of a full flush cycle
    append       T = 1, 8 tokens in the ring, nothing folded         flush     T = 1, every row folds 16 tokens
    step         T = 1, conventional: read, fold one token, write    verifyT   T tokens, 0..16 tokens in the ring
    scanL        prompts of L tokens, ``rows`` of them

Calls are captured in a CUDA graph, each on slots and tensors of its own that together exceed the L2 cache many times;
medians of 9 replays. Every contender is compared with a float64 recurrence before it is timed; one that is wrong is not
timed. The jobs run in a child process, which is started again behind a job that ended it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import CONTENDERS, contender
from benchmarks.peers.report import commit, read_log, write_reports
from benchmarks.shapes import MODELS

SHAPES = ("nemotron-3-super", "nemotron-3-nano-4b", "nemotron-3-nano-30b")
STATE_DTYPES = ("float32", "bfloat16")
ROWS = (1, 8, 32, 128, 256, 512)
SCAN_ROWS = (1, 8, 64)
SCENARIOS = ("mixed", "append", "flush", "step", "verify4", "verify8", "scan128", "scan2048")
#: Calls in one graph by rows: a millisecond of work on a gigabyte of state.
CALLS = {1: 256, 8: 64, 32: 24, 128: 8, 256: 6, 512: 4}
#: Bytes that one graph's states may take; native verification needs a state per token.
STATE_BUDGET = 40 << 30
#: Bytes of x and y that the prompts of one graph should at least have.
SCAN_BYTES = 256 << 20
#: GPU cycles of waiting in front of a replay, so that the graph is queued before its first kernel starts.
QUEUE_CYCLES = 400_000


@dataclass(frozen=True)
class Job:
    """One measurement."""

    shape: str
    state: str
    contender: str
    scenario: str
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens per row."""
        from benchmarks.peers.base import SCAN_TOKENS, STEP_TOKENS

        return {**STEP_TOKENS, **SCAN_TOKENS}[self.scenario]

    @property
    def is_scan(self) -> bool:
        """Whether rows are prompts."""
        return self.scenario.startswith("scan")


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """All measurements, most wanted first; what is known to end the process comes last."""
    jobs: list[Job] = []
    last: list[Job] = []
    for shape in args.shapes:
        for state in args.state_dtypes:
            for name in args.contenders:
                made = contender(name)
                for scenario in args.scenarios:
                    unwanted = scenario.startswith("scan") and (state != "float32" or shape not in args.scan_shapes)
                    if unwanted or scenario not in made.scenarios:
                        continue
                    for rows in args.scan_rows if scenario.startswith("scan") else args.rows:
                        fragile = made.fragile_rows is not None and rows >= made.fragile_rows
                        (last if fragile else jobs).append(Job(shape, state, name, scenario, rows))
    return jobs + last


class Worker:
    """Runs jobs one after another and writes a line per result."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks.timing import read_bandwidth

        self.args = args
        self.bandwidth = args.bandwidth or read_bandwidth()
        self.out = args.log.open("a")
        self.checked: dict[tuple[object, ...], tuple[float, str]] = {}
        self.tuned: dict[tuple[object, ...], dict[str, str]] = {}
        self.held: tuple[object, ...] = ()
        self.stepper: Any = None
        self.layer: Any = None
        self.slots = 0
        self.order: Any = None

    def emit(self, **record: Any) -> None:
        """Append one JSON line."""
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()

    def run(self, jobs: list[Job]) -> None:
        """The jobs that have no result yet, until the time is up."""
        done = {record["index"] for record in read_log(self.args.log) if record["kind"] == "result"}
        self.emit(kind="machine", bandwidth=self.bandwidth)
        refused: dict[str, str] = {}
        for index, job in enumerate(jobs):
            if index in done:
                continue
            if job.contender not in refused:
                refused[job.contender] = contender(job.contender).unavailable()
            self.emit(kind="begin", index=index)
            began = time.time()
            if began > self.args.deadline:
                result: dict[str, Any] = {"status": "not run", "note": "time box"}
            elif refused[job.contender]:
                result = {"status": "absent", "note": refused[job.contender]}
            else:
                result = self.measure(job, jobs)
            self.emit(kind="result", index=index, seconds=round(time.time() - began, 3), **asdict(job), **result)

    def measure(self, job: Job, jobs: list[Job]) -> dict[str, Any]:
        """Check, then time. A Python exception becomes the job's status; a lost GPU ends the process."""
        import torch

        from benchmarks.peers.base import Layer

        made = contender(job.contender)
        try:
            layer = self.layer
            if layer is None or (layer.shape.name, layer.state_dtype) != (job.shape, job.state):
                self.drop()
                layer = self.layer = Layer(MODELS[job.shape], job.state)
            reason = made.refuses(layer, job.scenario)
            if reason:
                return {"status": "unsupported", "note": reason}
            error, reason = self.check(job, layer)
            if reason:
                return {"status": "wrong", "note": reason, "rel_error": error}
            result = self.time_scan(job, layer) if job.is_scan else self.time_step(job, layer, jobs)
            return {"status": "ok", "rel_error": error, **result}
        except Exception as problem:
            self.drop()
            text = (str(problem).strip() or "no message").splitlines()
            note = f"{type(problem).__name__}: {text[0][:160]}".replace(os.getcwd(), ".")
            try:
                torch.cuda.synchronize()
            except Exception:
                self.emit(kind="lost", note=note)
                os._exit(3)
            return {"status": "failed", "note": note}

    def drop(self) -> None:
        """Free the stepper and its memory."""
        import torch

        self.stepper, self.held = None, ()
        torch.cuda.empty_cache()

    def check(self, job: Job, layer: Any) -> tuple[float, str]:
        """Relative error and, where it is too large, what is wrong; once per operation and layer."""
        from benchmarks.peers.checks import LIMITS, check_scan, check_steps

        key = (job.shape, job.state, job.contender, "scan" if job.is_scan else job.tokens)
        if key not in self.checked:
            made = contender(job.contender)
            if job.is_scan:
                self.settle_scan(made, layer)
                run = check_scan(made, layer, self.args.chunks[0])
            else:
                run = check_steps(made, layer, job.tokens)
            limit = LIMITS[job.state]
            self.checked[key] = (run, "" if run <= limit else f"relative error {run:.2e}, allowed {limit:.1e}")
        return self.checked[key]

    def settle_scan(self, made: Any, layer: Any) -> None:
        """One large scan per chunk size, since Triton's tuning keeps what suits the first call of a layer."""
        self.drop()
        prompts = layer.inputs(max(self.args.scan_rows), 2048)
        for chunk in self.args.chunks:
            made.scan(layer, prompts, chunk).call()

    def calls_of(self, job: Job, layer: Any) -> int:
        """Calls in the graph of a step."""
        states = job.rows * layer.state_bytes * (job.tokens if "conventional" in job.contender else 1)
        return max(2, min(CALLS.get(job.rows, 4), int(STATE_BUDGET // states)))

    def time_step(self, job: Job, layer: Any, jobs: list[Job]) -> dict[str, Any]:
        """Median time of a step, the best launch variant if asked for."""
        import torch

        from benchmarks.peers.base import WRITE_SHARE

        made = contender(job.contender)
        key = (job.shape, job.state, job.contender, job.tokens)
        if key != self.held:
            self.drop()
            alike = [j for j in jobs if (j.shape, j.state, j.contender) == key[:3] and not j.is_scan]
            self.slots = max(j.rows * self.calls_of(j, layer) for j in alike if j.tokens == job.tokens)
            self.stepper, self.held = made.stepper(layer, job.tokens, self.slots), key
            self.stepper.randomize()
            self.order = torch.randperm(self.slots, device=layer.device).int()
        count = self.calls_of(job, layer)
        used = self.order[: job.rows * count]
        values = self.stepper.histories.get(job.scenario)
        if values is not None:
            history = torch.full((self.slots,), values[0], dtype=torch.int32, device=layer.device)
            phases = torch.tensor(list(values), dtype=torch.int32, device=layer.device)
            history[used.long()] = phases[torch.randperm(len(used), device=layer.device) % len(values)]
            self.stepper.set_history(history)
        calls = []
        for i in range(count):
            step = layer.inputs(job.rows, job.tokens)
            calls.append(self.stepper.call(used[i * job.rows : (i + 1) * job.rows], step))
        timing, note = self.best_variant(job, made, calls, self.stepper.restore)
        read = job.rows * layer.state_bytes / self.bandwidth / 1e6
        return {**timing, "read_floor_us": read, "floor_us": read * (1 + WRITE_SHARE[job.scenario]), "note": note}

    def best_variant(self, job: Job, made: Any, calls: list[Any], restore: Any) -> tuple[dict[str, float], str]:
        """Time the contender's default, or with --tune every variant, which append and flush then take over."""
        key = (job.shape, job.state, job.contender, job.tokens, job.rows)
        tuned = job.state in self.args.tune_states and job.shape in self.args.tune_shapes
        choices = [self.tuned[key]] if key in self.tuned else list(made.variants() if tuned else ({},))
        best: tuple[dict[str, float], dict[str, str]] | None = None
        for choice in choices:
            os.environ.update(choice)
            timing = timed(calls, restore)
            for name in choice:
                del os.environ[name]
            if best is None or timing["median_us"] < best[0]["median_us"]:
                best = (timing, choice)
        assert best is not None
        self.tuned[key] = best[1]
        return best[0], " ".join(f"{name}={value}" for name, value in best[1].items())

    def time_scan(self, job: Job, layer: Any) -> dict[str, Any]:
        """Median time of a scan over the chunk sizes; the floor is reading x, B, C, dt, writing y and the states."""
        self.drop()
        s, tokens = layer.shape, job.rows * job.tokens
        moved = tokens * 2 * (2 * s.nheads * s.headdim + 2 * s.ngroups * s.dstate + s.nheads)
        count = max(1, min(16, SCAN_BYTES // moved))
        prompts = [layer.inputs(job.rows, job.tokens) for _ in range(count)]
        best: tuple[dict[str, float], int] | None = None
        for chunk in self.args.chunks if "ours" not in job.contender else self.args.chunks[:1]:
            scans = [contender(job.contender).scan(layer, step, chunk) for step in prompts]
            timing = timed([scan.call for scan in scans], lambda: None)
            if best is None or timing["median_us"] < best[0]["median_us"]:
                best = (timing, chunk)
        assert best is not None
        floor = (moved + job.rows * layer.state_bytes) / self.bandwidth / 1e6
        note = "" if "ours" in job.contender else f"chunk {best[1]}"
        return {**best[0], "read_floor_us": floor, "floor_us": floor, "note": note}


def timed(calls: list[Any], restore: Any) -> dict[str, float]:
    """Median, best and worst microseconds of a call."""
    import torch

    from benchmarks.timing import time_calls

    def before() -> None:
        restore()
        torch.cuda._sleep(QUEUE_CYCLES)

    timing = time_calls(calls, restore=before)
    return {"median_us": timing.median_us, "best_us": timing.best_us, "worst_us": timing.worst_us}


def run_worker(args: argparse.Namespace) -> None:
    """Body of the child process."""
    import torch

    torch.manual_seed(0)
    Worker(args).run(make_jobs(args))


def supervise(args: argparse.Namespace, argv: list[str]) -> list[dict[str, Any]]:
    """Start workers until every job has a result. A job that ended its worker is recorded as crashed, and the jobs of
    that size and more of its contender as not run."""
    jobs = make_jobs(args)
    args.log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.bench_against_peers", *argv, "--worker", "--log", str(args.log)]
    command += ["--deadline", str(args.deadline)]
    while True:
        limit = max(args.deadline - time.time(), 0) + 60
        try:
            end = f"exit status {subprocess.run(command, timeout=limit, check=False).returncode}"
        except subprocess.TimeoutExpired:
            end = "the end of its time"
        records = list(read_log(args.log))
        done = {r["index"]: r for r in records if r["kind"] == "result"}
        if len(done) == len(jobs):
            return [done[index] for index in sorted(done)]
        begun = [r["index"] for r in records if r["kind"] == "begin"]
        if not begun or begun[-1] in done:
            raise SystemExit(f"the worker ended with {end} between two jobs")
        lost = jobs[begun[-1]]
        notes = [r["note"] for r in records if r["kind"] == "lost"]
        with args.log.open("a") as stream:
            for index, job in enumerate(jobs):
                if index == begun[-1]:
                    result = {"status": "crashed", "note": notes[-1] if notes else f"the process ended with {end}"}
                elif index not in done and job.contender == lost.contender and job.rows >= lost.rows:
                    result = {"status": "not run", "note": f"it crashed with {lost.rows} rows before"}
                else:
                    continue
                stream.write(json.dumps({"kind": "result", "index": index, **asdict(job), **result}) + "\n")
        if "--bandwidth" not in command:
            command += ["--bandwidth", *(str(r["bandwidth"]) for r in records if r["kind"] == "machine")]


def describe(args: argparse.Namespace, argv: list[str]) -> list[str]:
    """Header lines of the results."""
    from benchmarks.timing import machine

    at = argv.index("--output") if "--output" in argv else len(argv)
    shown = argv[:at] + argv[at + 2 :]  # without the path, which says nothing elsewhere
    bandwidth = next((r["bandwidth"] for r in read_log(args.log) if r["kind"] == "machine"), float("nan"))
    packages = {}
    for name in args.contenders:
        made = contender(name)
        packages[made.package] = made.version()
    return [
        machine(),
        f"commit {args.commit or commit()}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "command: python -m benchmarks.bench_against_peers " + " ".join(shown),
        "packages: " + ", ".join(f"{name} {version}" for name, version in packages.items()),
        f"read bandwidth {bandwidth:.3f} TB/s (sum of a large fp32 buffer); floor = state bytes moved / that",
        "microseconds per call (time over the floor): median of 9 replays of a CUDA graph, cold L2",
        "activations bf16, window 16",
    ]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--state-dtypes", nargs="+", default=list(STATE_DTYPES), choices=STATE_DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="batch sizes of the steps")
    parser.add_argument("--scan-rows", nargs="+", type=int, default=list(SCAN_ROWS), help="prompts of the scans")
    parser.add_argument("--scan-shapes", nargs="*", default=list(SHAPES), help="shapes of the scans (states fp32)")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument(
        "--chunks", nargs="+", type=int, default=[128, 256], help="chunk sizes that peers' scans may take"
    )
    parser.add_argument("--tune-shapes", nargs="*", default=[], help="try the peers' launch variants on these shapes")
    parser.add_argument("--tune-states", nargs="*", default=["float32"], help="and these state dtypes")
    parser.add_argument("--minutes", type=float, default=60.0, help="jobs not begun by then are left out")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="against_peers", help="stem of the files")
    parser.add_argument("--commit", default="", help="commit to name where the checkout has no .git")
    parser.add_argument("--bandwidth", type=float, help="TB/s of the floor; measured if left out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run everything, write the reports."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.worker:
        run_worker(args)
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    args.log = args.output / f"{args.name}.jsonl"
    args.deadline = time.time() + args.minutes * 60
    results = supervise(args, argv)
    write_reports(results, describe(args, argv), args.output / args.name)
    return 0 if any(row["status"] == "ok" for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
