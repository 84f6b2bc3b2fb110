"""Results as files: one CSV with everything, one aligned table per shape and state dtype, and our targets beside them.

Needs the standard library alone.
"""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
#: shape, state dtype, scenario, contender, rows
Key = tuple[str, str, str, str, int]
COLUMNS = (
    "shape",
    "state",
    "scenario",
    "contender",
    "rows",
    "status",
    "median_us",
    "best_us",
    "worst_us",
    "read_floor_us",
    "floor_us",
    "over_read_floor",
    "over_floor",
    "rel_error",
    "note",
)
#: What our kernels should reach on an H200: (shape, state dtype, scenario, contender, rows) -> microseconds.
TARGETS = {
    **{
        ("nemotron-3-super", "float32", "mixed", "ours", rows): target
        for rows, target in ((1, 4.2), (8, 11.5), (32, 40.0), (128, 147.0), (256, 285.0), (512, 560.0))
    },
    ("nemotron-3-super", "float32", "flush", "ours", 256): 560.0,
    ("nemotron-3-super", "float32", "step", "ours-conventional", 256): 545.0,
    ("nemotron-3-super", "float32", "verify4", "ours", 256): 345.0,
    ("nemotron-3-super", "float32", "verify8", "ours", 256): 380.0,
    ("nemotron-3-super", "bfloat16", "mixed", "ours", 256): 150.0,
}
#: A scan of this many prompts of 2,048 tokens should take at most this share of the fastest peer's time.
SCAN_TARGET = (64, 1 / 0.8)


def write_reports(results: Sequence[Row], header: Sequence[str], stem: Path) -> None:
    """Write ``stem``.csv and ``stem``.txt, and print the text."""
    rows = [with_ratios(row) for row in results]
    with stem.with_suffix(".csv").open("w", newline="") as stream:
        stream.writelines(f"# {line}\n" for line in header)
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: tidy(row.get(key, "")) for key in COLUMNS} for row in rows)
    text = "\n".join([*header, "", *tables(rows), *targets(rows), *problems(rows)]) + "\n"
    stem.with_suffix(".txt").write_text(text)
    print(text)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The worker's records; a torn last line is left out."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def commit() -> str:
    """Commit of the checkout, with a mark for changed files."""
    query = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    got = subprocess.run(query, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return got.stdout.strip() or "unknown"


def read_csv(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Header lines and rows of a CSV of this module; figures are floats, rows an int."""
    lines = path.read_text().splitlines()
    header = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    rows = []
    for row in csv.DictReader(line for line in lines if not line.startswith("# ")):
        out: dict[str, Any] = dict(row)
        out["rows"] = int(row["rows"])
        for key in COLUMNS[6:14]:
            out[key] = float(row[key]) if row[key] else None
        rows.append(out)
    return header, rows


def with_ratios(row: Row) -> dict[str, Any]:
    """The row with its time over the two floors."""
    out = dict(row)
    if row["status"] == "ok":
        out["over_read_floor"] = row["median_us"] / row["read_floor_us"]
        out["over_floor"] = row["median_us"] / row["floor_us"]
    return out


def tidy(value: Any) -> Any:
    """Floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else value


def tables(rows: Iterable[Row]) -> Iterator[str]:
    """Microseconds and, in brackets, time over the floor; one block per shape and state dtype."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["state"]), []).append(row)
    for (shape, state), members in groups.items():
        for scans in (False, True):
            block = [row for row in members if row["scenario"].startswith("scan") == scans]
            if block:
                yield f"{shape}, state {state}" + (": scan of prompts" if scans else "")
                yield from table(block, "prompts" if scans else "rows")
                yield ""


def table(rows: Sequence[Row], what: str) -> Iterator[str]:
    """One block: a line per scenario and contender, a column per number of rows."""
    sizes = sorted({row["rows"] for row in rows})
    cells = {(row["scenario"], row["contender"], row["rows"]): row for row in rows}
    yield f"{'scenario':<10}{'contender':<25}" + "".join(f"{f'{what} {size}':>18}" for size in sizes)
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        floors = {row["rows"]: row["floor_us"] for row in rows if row["scenario"] == scenario and row["status"] == "ok"}
        yield f"{scenario:<10}{'floor (bytes moved)':<25}" + "".join(
            f"{floors[size]:>11.1f}       " if size in floors else f"{'':>18}" for size in sizes
        )
        for name in dict.fromkeys(row["contender"] for row in rows if row["scenario"] == scenario):
            yield f"{'':<10}{name:<25}" + "".join(cell(cells.get((scenario, name, size))) for size in sizes)


def cell(row: Row | None) -> str:
    """``time (ratio)``, or why there is none."""
    if row is None:
        return f"{'':>18}"
    if row["status"] != "ok":
        return f"{row['status']:>18}"
    return f"{row['median_us']:>11.1f} ({row['over_floor']:4.2f})"


def targets(rows: Sequence[Row]) -> Iterator[str]:
    """Our targets, the time measured, and the fastest peer of the same scenario."""
    times = {
        (r["shape"], r["state"], r["scenario"], r["contender"], r["rows"]): r["median_us"]
        for r in rows
        if r["status"] == "ok"
    }
    lines = []
    for key, target in TARGETS.items():
        if key in times:
            lines.append(target_line(key, times[key], target, fastest_peer(times, key)))
    prompts, share = SCAN_TARGET
    scan: Key = ("nemotron-3-super", "float32", "scan2048", "ours", prompts)
    peer = fastest_peer(times, scan)
    if scan in times and peer:
        lines.append(target_line(scan, times[scan], peer[1] * share, peer))
    if lines:
        yield "targets"
        yield f"{'':<58}{'time':>9}{'target':>9}   {'time/target':<19}fastest peer"
        yield from lines
        yield ""


def target_line(key: Key, time: float, target: float, peer: tuple[str, float] | None) -> str:
    """One line of the targets."""
    shape, state, scenario, name, rows = key
    verdict = "met" if time <= target else "missed"
    beside = f"{peer[0]} {peer[1]:.1f} ({peer[1] / time:.2f}x)" if peer else ""
    what = f"{shape} {state} {scenario} {name} {rows}"
    return f"{what:<58}{time:>9.1f}{target:>9.1f}   {time / target:.3f} {verdict:<13}{beside}"


def fastest_peer(times: Mapping[Key, float], key: Key) -> tuple[str, float] | None:
    """Name and time of the fastest peer at the same work: conventional decoding too where the scenario is mixed."""
    shape, state, scenario, _, rows = key
    names = (scenario, "step") if scenario == "mixed" else (scenario,)
    peers = [
        (time, k[3])
        for k, time in times.items()
        if (k[0], k[1], k[4]) == (shape, state, rows) and k[2] in names and not k[3].startswith("ours")
    ]
    return (min(peers)[1], min(peers)[0]) if peers else None


def problems(rows: Iterable[Row]) -> Iterator[str]:
    """What was not measured, each reason once."""
    seen: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["contender"], row["status"], row.get("note", ""))
            seen[key] = seen.get(key, 0) + 1
    if seen:
        yield "not measured"
        for (name, status, note), count in seen.items():
            yield f"  {name}: {status}, {count} measurements: {note}"
        yield ""
    errors = {(r["contender"], r["state"]): 0.0 for r in rows if r["status"] == "ok"}
    for r in rows:
        if r["status"] == "ok":
            errors[r["contender"], r["state"]] = max(errors[r["contender"], r["state"]], r["rel_error"])
    yield "largest relative error against the float64 recurrence"
    for (name, state), error in errors.items():
        yield f"  {name}, state {state}: {error:.1e}"
