"""The scans of GDN and KDA, their own CUDA source, run on the CPU and compared with the recurrence in float64.

tests/emulator stands in for the GPU: threads as fibers, warp and warpgroup instructions as the PTX manual describes
them. ThreadSanitizer watches the same source for accesses of different warps that no barrier orders. Not seen here:
fences, products in flight, and what the compiler for GPUs makes of the source; tests/gpu is for that.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from emulator_build import build

# Whole chunks of 64 tokens, one token more and less, one token, none, several chunks. Sequences alternate between an
# empty start and a slot with a state and ring rows; the third is padding.
RAGGED = "0,1,63,64,65,200,16,129"
SHORT = "65,17,5,129"

# Outputs: error beyond half a step of bf16, over the rms of the head's outputs. In chunks two bf16 terms of what enters
# an output alone leave out 2^-18 of a value (measured 2^-16 of the rms); token by token there is fp32 alone.
OUTPUT_BOUND = {"chunk": 2.0**-15, "exact": 2.0**-20}
# ||state - float64|| / ||state||. All 24 bits of every fp32 operand enter a chunk's products: measured 2^-22. Token by
# token a state that does not decay collects a rounding per token: measured 2^-19.8 after 200 tokens of equal keys.
STATE_BOUND = {"chunk": 2.0**-21, "exact": 2.0**-19}

REGIMES = ("usual", "still", "alike", "forgetful", "bound", "swinging")
CASES = {
    **{f"{k}-{r}": {"kernel": k, "regime": r} for k in ("chunk-warp", "chunk-warpgroup", "exact-4") for r in REGIMES},
    **{f"kda-{r}": {"kernel": "exact-4", "kind": "kda", "regime": r} for r in ("usual", "swinging", "forgetful")},
    **{f"kda-bounded-{r}": {"kernel": "exact-4", "kind": "kda-bounded", "regime": r} for r in ("usual", "bound")},
    "warpgroup-two-groups-a-head": {"kernel": "chunk-warpgroup", "headdim": 128, "warps": 8},
    "warpgroup-two-blocks-a-head": {"kernel": "chunk-warpgroup", "headdim": 128},
    "warpgroup-spare-warps": {"kernel": "chunk-warpgroup", "headdim": 80, "warps": 8, "dstate": 112},
    "warpgroup-narrow": {"kernel": "chunk-warpgroup", "dstate": 64},
    "warp-three-warps-padded-columns": {"headdim": 48, "dstate": 96, "warps": 3},
    "warp-two-blocks-uneven": {"headdim": 80, "dstate": 64, "warps": 3},
    "warp-one-strip-narrow": {"headdim": 16, "dstate": 16, "warps": 2},
    "warp-eight-warps": {"headdim": 128, "warps": 8},
    "exact-any-size": {"kernel": "exact-1", "headdim": 48, "dstate": 96},
    "exact-one-warp": {"kernel": "exact-1", "headdim": 16, "dstate": 16},
    "exact-wide-channels": {"kernel": "exact-1", "kind": "kda", "headdim": 80, "dstate": 256},
}  # fmt: skip


def launch(program: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    options: dict[str, object] = {"kernel": "chunk-warp", "kind": "gdn", "heads": 2, "groups": 1, "headdim": 64}
    options |= {"dstate": 128, "warps": 4, "regime": "usual", "first-warp": "first", "lengths": RAGGED} | changes
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)


def faults(done: subprocess.CompletedProcess[str], way: str) -> list[str]:
    """What is wrong with a run; empty for one that is in order."""
    if done.returncode != 0:
        return [done.stderr or f"ended with {done.returncode}"]
    measures = dict(line.split() for line in done.stdout.splitlines())
    found = [f"{name} {measures[name]}" for name in ("not_finite", "cursors", "touched") if measures[name] != "0"]
    for name, bound in (("output", OUTPUT_BOUND[way]), ("state", STATE_BOUND[way])):
        if not float(measures[name]) <= bound:
            found.append(f"{name} {measures[name]} > {bound:.3e}")
    return found


def way_of(changes: dict[str, object]) -> str:
    return str(changes.get("kernel", "chunk-warp")).partition("-")[0]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulator"), "delta_scan_emulator", "gated_delta_replay")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_the_recurrence(program: Path, name: str) -> None:
    changes: dict[str, object] = dict(CASES[name])
    assert faults(launch(program, **changes), way_of(changes)) == []


@pytest.mark.parametrize("kernel", ["chunk-warp", "chunk-warpgroup", "exact-1"])
def test_bits_depend_neither_on_the_cut_nor_on_which_warp_is_ahead(program: Path, kernel: str) -> None:
    cuts = {"chunk-warp": (2, 3, 8), "chunk-warpgroup": (4, 8), "exact-1": (4,)}[kernel]
    outputs = set()
    for warps in cuts:
        for first in ("first", "last"):
            done = launch(program, kernel=kernel, headdim=128, lengths=SHORT, warps=warps, **{"first-warp": first})
            assert faults(done, way_of({"kernel": kernel})) == [], (warps, first)
            outputs.add(done.stdout)
    if kernel == "exact-1":
        outputs.add(launch(program, kernel="exact-4", headdim=128, lengths=SHORT).stdout)
    assert len(outputs) == 1, outputs


# What each must be caught by: the state's bound, the outputs' bound, NaN of memory that nothing has written yet.
CORRUPTIONS = {
    "a term of the state less where keys ask it": (
        "scan_chunk_products.cuh",
        "warpgroup_mma<0, 0>(low, a[2], of_keys);",
        "warpgroup_mma<0, 0>(low, a[1], of_keys);",
    ),
    "the products' smallest terms left out": (
        "scan_chunk_products.cuh",
        "for (int level = 0; level < kTerms - term; ++level)",
        "for (int level = 0; level < kTerms - 1 - term; ++level)",
    ),
    "decays of the diagonal one token off": (
        "scan_chunk_tile.cuh",
        "behind += t > s ? g[t] : 0.0f;",
        "behind += t > s ? g[t - 1] : 0.0f;",
    ),
    "scores that are read before they are there": (
        "scan_chunk_kernel.cuh",
        "__syncthreads(); // A, its inverses and q k^T are there",
        "",
    ),
    "raw rows that are read before they are there": (
        "scan_kernel.cuh",
        "        wait_for_own_copies();\n        __syncthreads();",
        "        __syncthreads();",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_kernel_is_caught(tmp_path: Path, name: str) -> None:
    corrupted = build(tmp_path, "delta_scan_emulator", "gated_delta_replay", CORRUPTIONS[name])
    kernel = {"scan_kernel.cuh": "exact-1"}.get(CORRUPTIONS[name][0], "chunk-warpgroup")
    changes: dict[str, object] = {"kernel": kernel, "regime": "alike" if "left out" in name else "usual"}
    assert faults(launch(corrupted, **changes), way_of(changes)) != []


# Every kernel of the scans, with several sequences and blocks a grid. Reads by warpgroup products are not watched.
WATCHED: dict[str, dict[str, object]] = {
    "chunk-warp": {"kernel": "chunk-warp"},
    "chunk-warpgroup": {"kernel": "chunk-warpgroup"},
    "exact-4-kda": {"kernel": "exact-4", "kind": "kda"},
    "exact-1": {"kernel": "exact-1", "dstate": 96},
}
# Barriers whose absence no value shows here, since warps run one after another.
RACES: dict[str, tuple[str, tuple[str, str, str]]] = {
    "tiles that are loaded over those in use": (
        "chunk-warp",
        (
            "scan_chunk_kernel.cuh",
            "        __syncthreads(); // tiles have arrived; nobody reads the last chunk's any more\n",
            "",
        ),
    ),
    "rows of a batch that are replaced while they are used": (
        "exact-1",
        (
            "scan_kernel.cuh",
            "        wait_for_own_copies();\n        __syncthreads();",
            "        wait_for_own_copies();",
        ),
    ),
}


def watched(folder: Path, corruption: tuple[str, str, str] | None = None) -> Path:
    return build(folder, "delta_scan_emulator", "gated_delta_replay", corruption, flags=("-g", "-fsanitize=thread"))


def count_races(program: Path, **changes: object) -> int:
    """Reports of ThreadSanitizer, which wants the usual places of programs in memory."""
    options: dict[str, object] = {"kernel": "chunk-warp", "kind": "gdn", "heads": 1, "groups": 1, "headdim": 32}
    options |= {"dstate": 128, "warps": 2, "regime": "usual", "first-warp": "first", "lengths": SHORT} | changes
    if options["kernel"] == "chunk-warpgroup":
        options |= {"headdim": 64, "warps": 4}
    arguments = [str(program), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    environment = os.environ | {"TSAN_OPTIONS": "history_size=4"}
    for prefix in ([], ["setarch", "-R"]):
        done = subprocess.run([*prefix, *arguments], capture_output=True, text=True, timeout=120, env=environment)
        if "unexpected memory mapping" not in done.stderr:
            break
    assert "\nhash " in done.stdout, done.stderr[-2000:]
    return done.stderr.count("WARNING: ThreadSanitizer")


@pytest.fixture(scope="module")
def watched_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched(tmp_path_factory.mktemp("watched"))


@pytest.mark.parametrize("first", ["first", "last"])
@pytest.mark.parametrize("name", WATCHED)
def test_barriers_order_all_accesses_of_different_warps(watched_program: Path, name: str, first: str) -> None:
    changes = WATCHED[name] | {"first-warp": first}
    assert count_races(watched_program, **changes) == 0


@pytest.mark.parametrize("name", RACES)
def test_a_missing_barrier_is_seen(tmp_path: Path, name: str) -> None:
    kernel, corruption = RACES[name]
    assert count_races(watched(tmp_path, corruption), kernel=kernel) > 0
