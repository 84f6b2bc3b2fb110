"""Plots a CSV of bench_against_peers as time over the floor: 1 is the memory limit.

python -m benchmarks.plot_roofline benchmarks/results/against_peers.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import CONTENDERS
from benchmarks.peers.report import read_csv

#: Scenario -> title of its panel.
PANELS = {
    "mixed": "T=1, full flush cycle",
    "append": "T=1, append only",
    "flush": "T=1, flush only",
    "verify4": "verify, T=4",
    "verify8": "verify, T=8",
}
COLORS = {
    "ours": "#111111",
    "ours-conventional": "#8a8a8a",
    "vllm-replay": "#1f77b4",
    "vllm-conventional": "#9ecae1",
    "flashinfer-replay": "#2ca02c",
    "flashinfer-conventional": "#a1d99b",
    "mamba-ssm": "#ff7f0e",
}


def series(rows: Sequence[dict[str, Any]], scenario: str, name: str) -> list[tuple[int, float]]:
    """(rows, time over the floor) of one contender. In the mixed panel conventional decoding stands beside replay."""
    wanted = [scenario]
    if scenario == "mixed":
        wanted.append("step")
    floors = {row["rows"]: row["floor_us"] for row in rows if row["scenario"] == scenario and row["floor_us"]}
    return sorted(
        (row["rows"], row["median_us"] / floors[row["rows"]])
        for row in rows
        if row["contender"] == name and row["scenario"] in wanted and row["status"] == "ok" and row["rows"] in floors
    )


def plot(path: Path, out: Path) -> None:
    """One row of panels per shape and state dtype."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    header, rows = read_csv(path)
    groups = list(dict.fromkeys((row["shape"], row["state"]) for row in rows if row["status"] == "ok"))
    present = {row["scenario"] for row in rows if row["status"] == "ok"}
    panels = [name for name in PANELS if name in present]
    figure, axes = plt.subplots(
        len(groups), len(panels), figsize=(3.3 * len(panels), 2.8 * len(groups)), squeeze=False, sharey="row"
    )
    for line, (shape, state) in enumerate(groups):
        members = [row for row in rows if (row["shape"], row["state"]) == (shape, state)]
        for column, scenario in enumerate(panels):
            axis = axes[line][column]
            for name in CONTENDERS:
                points = series(members, scenario, name)
                if points:
                    style = "-o" if name.startswith("ours") else "--s"
                    axis.plot(
                        *zip(*points, strict=True), style, color=COLORS[name], label=name, markersize=3, linewidth=1.2
                    )
            axis.axhline(1.0, color="#d62728", linewidth=0.8)
            axis.set_xscale("log", base=2)
            sizes = sorted({row["rows"] for row in members if row["scenario"] == scenario})
            axis.set_xticks(sizes, labels=[str(size) for size in sizes], fontsize=7)
            axis.set_ylim(0.9, 6.0)
            axis.set_yscale("log")
            axis.set_yticks([1, 1.5, 2, 3, 4, 6], labels=["1", "1.5", "2", "3", "4", "6"])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            if line == 0:
                axis.set_title(PANELS[scenario], fontsize=9)
            if line == len(groups) - 1:
                axis.set_xlabel("rows", fontsize=8)
        axes[line][0].set_ylabel(f"{shape}\n{state}\ntime / floor", fontsize=8)
    names: dict[str, Any] = {}
    for axis in axes.flat:
        names.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)})
    figure.legend(names.values(), names.keys(), loc="lower center", ncols=len(names), fontsize=8)
    figure.suptitle("Time over the memory floor (red line). " + "; ".join(header[:2]), fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 0.99))
    figure.savefig(out, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--output", type=Path, help="PNG to write; beside the CSV if left out")
    args = parser.parse_args()
    plot(args.csv, args.output or args.csv.with_suffix(".png"))


if __name__ == "__main__":
    main()
