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

# Whole chunks of 16 tokens, one token more and less, one token, none, more chunks than stages. Sequences alternate
# between an empty start and a slot with a state and ring rows; the third is padding.
RAGGED = "0,1,63,64,65,200,16,129"
SHORT = "65,17,5,129"

# Outputs: error beyond half a step of bf16, over the rms of the head's outputs. In chunks two bf16 terms of what enters
# an output alone leave out 2^-18 of a value (measured 2^-16 of the rms, 2^-15.3 where gates of very different strength
# meet); token by token there is fp32 alone.
OUTPUT_BOUND = {"chunk": 2.0**-15, "exact": 2.0**-20}
# ||state - float64|| / ||state||. All 24 bits of every fp32 operand enter a chunk's products: measured 2^-22. Token by
# token a state that does not decay collects a rounding per token: measured 2^-19.8 after 200 tokens of equal keys.
STATE_BOUND = {"chunk": 2.0**-21, "exact": 2.0**-19}

REGIMES = ("usual", "still", "alike", "forgetful", "bound", "swinging", "wild")
KINDS = ("gdn", "kda", "kda-bounded")
CASES = {
    **{f"chunk-{k}-{r}": {"kind": k, "regime": r} for k in KINDS for r in REGIMES},
    **{f"exact-{r}": {"kernel": "exact-4", "regime": r} for r in REGIMES},
    **{f"exact-kda-{r}": {"kernel": "exact-4", "kind": "kda", "regime": r} for r in ("usual", "wild", "forgetful")},
    **{f"exact-kda-bounded-{r}": {"kernel": "exact-4", "kind": "kda-bounded", "regime": r} for r in ("usual", "bound")},
    **{f"shared-{k}-{r}": {"kernel": "chunk-2", "kind": k, "regime": r} for k in KINDS[1:] for r in REGIMES},
    "two-blocks-a-head": {"headdim": 128},
    "apart": {"kernel": "chunk-apart", "headdim": 128, "warps": 2},
    "apart-uneven": {"kernel": "chunk-apart", "headdim": 80, "dstate": 96, "warps": 2},
    "apart-one-strip-narrow": {"kernel": "chunk-apart", "headdim": 16, "dstate": 16, "warps": 1},
    "padded-columns": {"headdim": 48, "dstate": 96, "warps": 3},
    "two-blocks-uneven": {"headdim": 80, "dstate": 64, "warps": 3},
    "one-strip-narrow": {"headdim": 16, "dstate": 16, "warps": 1},
    "kda-two-blocks-a-head": {"kind": "kda", "headdim": 128},
    "kda-padded-columns": {"kind": "kda", "headdim": 48, "dstate": 112, "warps": 3},
    "kda-two-blocks-uneven": {"kind": "kda", "headdim": 80, "dstate": 48, "warps": 3},
    "kda-one-strip-narrow": {"kind": "kda", "headdim": 16, "dstate": 16, "warps": 1},
    "shared-two-clusters-a-head": {"kernel": "chunk-2", "kind": "kda", "headdim": 128, "warps": 2},
    "shared-padded-columns": {"kernel": "chunk-2", "kind": "kda", "headdim": 48, "dstate": 112, "warps": 2},
    "shared-uneven": {"kernel": "chunk-2", "kind": "kda", "headdim": 80, "dstate": 48, "warps": 3},
    "shared-a-block-without-rows": {"kernel": "chunk-2", "kind": "kda", "headdim": 16, "dstate": 16, "warps": 1},
    "shared-bf16-gates": {"kernel": "chunk-2", "kind": "kda", "gates": "bf16"},
    "shared-gates-one-by-one": {"kernel": "chunk-2", "kind": "kda", "gates": "apart"},
    "kda-gates-one-by-one": {"kind": "kda", "gates": "apart"},
    "kda-bf16-gates": {"kind": "kda", "gates": "bf16"},
    "kda-bf16-gates-one-by-one": {"kind": "kda", "gates": "bf16-apart"},
    "kda-long": {"kind": "kda", "regime": "still", "heads": 1, "headdim": 16, "warps": 1, "lengths": "1000"},
    "exact-any-size": {"kernel": "exact-1", "headdim": 48, "dstate": 96},
    "exact-one-warp": {"kernel": "exact-1", "headdim": 16, "dstate": 16},
    "exact-wide-channels": {"kernel": "exact-1", "kind": "kda", "headdim": 80, "dstate": 256},
}  # fmt: skip


def launch(program: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    options: dict[str, object] = {"kernel": "chunk", "kind": "gdn", "heads": 2, "groups": 1, "headdim": 64}
    options |= {"dstate": 128, "warps": 4, "regime": "usual", "first-warp": "first", "lengths": RAGGED} | changes
    options = {"gates": "pairs"} | options
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
    return str(changes.get("kernel", "chunk")).partition("-")[0]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulator"), "delta_scan_emulator", "gated_delta_replay")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_the_recurrence(program: Path, name: str) -> None:
    changes: dict[str, object] = dict(CASES[name])
    assert faults(launch(program, **changes), way_of(changes)) == []


# Kernels that must agree to the bit, with numbers of warps.
CUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "gdn": {"chunk": (2, 3, 8), "chunk-apart": (2,)},
    "kda": {"chunk": (2, 3, 8), "chunk-2": (2, 3, 4)},
    "exact-gdn": {"exact-1": (4,), "exact-4": (4,)},
}


@pytest.mark.parametrize("kind", CUTS)
def test_bits_depend_neither_on_the_cut_nor_on_which_warp_is_ahead(program: Path, kind: str) -> None:
    outputs = set()
    for kernel, warps in ((kernel, warps) for kernel, most in CUTS[kind].items() for warps in most):
        for first in ("first", "last"):
            options = {"kernel": kernel, "kind": kind.removeprefix("exact-"), "headdim": 128, "lengths": SHORT}
            done = launch(program, warps=warps, **options, **{"first-warp": first})
            assert faults(done, way_of({"kernel": kernel})) == [], (kernel, warps, first)
            outputs.add(done.stdout)
    assert len(outputs) == 1, outputs


# Kind, regime and, unless it is the usual one, kernel of the run; header, text and what replaces it. What each must be
# caught by: the state's bound, the outputs' bound, NaN of memory that nothing has written yet, infinities.
CORRUPTIONS = {
    "a term of the state less where keys ask it": (
        "gdn usual",
        "scan_chunk_fold.cuh",
        "mma_pair(Traits::kChannels ? low : middle, a[2], b);",
        "mma_pair(Traits::kChannels ? low : middle, a[1], b);",
    ),
    "a term of the keys less": (
        "kda usual",
        "scan_chunk_channels.cuh",
        "store_terms<kTerms>(stage + kStage.writes + piece, kStage.tile,",
        "store_terms<kTerms - 1>(stage + kStage.writes + piece, kStage.tile,",
    ),
    "the products' smallest terms left out": (
        "gdn alike",
        "scan_chunk_fold.cuh",
        "(sum[2][i][e] + sum[1][i][e]) + sum[0][i][e]",
        "sum[1][i][e] + sum[0][i][e]",
    ),
    "decays one token off": (
        "gdn usual",
        "scan_chunk_heads.cuh",
        "behind += t > s ? g : 0.0f;",
        "behind += t >= s ? g : 0.0f;",
    ),
    "decays within a group one token off": (
        "kda usual",
        "scan_chunk_channels.cuh",
        "middle[1][e] = exp2_fast(span.g[2][e]);",
        "middle[1][e] = exp2_fast(span.g[1][e]);",
    ),
    "the groups between two others do not decay": (
        "kda usual",
        "scan_chunk_channel_scores.cuh",
        "k[part][i] *= total.value[i];",
        "k[part][i] *= 1.0f;",
    ),
    "decays as quotients": (
        "kda forgetful",
        "scan_chunk_channels.cuh",
        "span.k[j][e] * decays.end[j][e];",
        "span.k[j][e] * (decays.start[kGroup - 1][e] / decays.start[j][e]);",
    ),
    "decays that are read before they are there": (
        "gdn usual",
        "scan_chunk_heads.cuh",
        "__syncwarp(); // decays are there",
        "",
    ),
    "rows that are read before they are there": (
        "kda usual",
        "scan_chunk_channel_scores.cuh",
        "p.meet(); // rows and products within groups are there",
        "",
    ),
    "a stage that is filled while it is in use": (
        "gdn usual",
        "scan_chunk_heads.cuh",
        "w.wait_for_stage(span);",
        "",
    ),
    "a part of a span that another block is not sent": (
        "kda usual chunk-2",
        "scan_chunk_channel_scores.cuh",
        "send_to_others(w, span, stage + rows, w.kStage.filled - rows);",
        "send_to_others(w, span, stage + rows, w.kStage.scores - rows);",
    ),
    "raw rows that are read before they are there": (
        "gdn usual exact-1",
        "scan_kernel.cuh",
        "        wait_for_own_copies();\n        __syncthreads();",
        "        __syncthreads();",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_kernel_is_caught(tmp_path: Path, name: str) -> None:
    case, *corruption = CORRUPTIONS[name]
    corrupted = build(tmp_path, "delta_scan_emulator", "gated_delta_replay", tuple(corruption))
    kind, regime, kernel = [*case.split(), "chunk"][:3]
    changes: dict[str, object] = {"kernel": kernel, "kind": kind, "regime": regime, "first-warp": "last"}
    assert faults(launch(corrupted, **changes), way_of(changes)) != []


# Every kernel of the scans, with several sequences and blocks a grid.
WATCHED: dict[str, dict[str, object]] = {
    "chunk-gdn": {"kind": "gdn"},
    "chunk-kda": {"kind": "kda"},
    "chunk-kda-narrow": {"kind": "kda-bounded", "dstate": 64},
    "apart-gdn": {"kernel": "chunk-apart", "kind": "gdn"},
    "shared-kda": {"kernel": "chunk-2", "kind": "kda", "warps": 1},
    "shared-kda-narrow": {"kernel": "chunk-2", "kind": "kda-bounded", "dstate": 64, "warps": 1},
    "exact-4-kda": {"kernel": "exact-4", "kind": "kda"},
    "exact-1": {"kernel": "exact-1", "dstate": 96},
}
# Barriers whose absence no value shows here, since warps run one after another.
RACES: dict[str, tuple[dict[str, object], tuple[str, str, str]]] = {
    "a stage that is filled while it is in use": (
        {"kind": "kda"},
        ("scan_chunk_channel_scores.cuh", "            w.wait_for_stage(i);\n", ""),
    ),
    "a stage that is used before it is filled": (
        {"kind": "kda"},
        (
            "scan_chunk_channel_scores.cuh",
            "% Traits::kProducers ? span - 1 : span;",
            "% Traits::kProducers ? span : span;",
        ),
    ),
    "rows that the last span's scores still read": (
        {"kind": "kda"},
        (
            "scan_chunk_channel_scores.cuh",
            "        p.meet(); // sums and squares are there; the last span's rows have been used\n",
            "",
        ),
    ),
    "a stage that is filled while another block uses it": (
        {"kernel": "chunk-2", "kind": "kda", "warps": 1},
        ("scan_chunk_channel_scores.cuh", "            w.wait_for_stage(i);\n", ""),
    ),
    "rows that are sent before they are there": (
        {"kernel": "chunk-2", "kind": "kda", "warps": 1},
        ("scan_chunk_channel_scores.cuh", "        w.wait_until_spread(span);\n", ""),
    ),
    "a block that is inverted before it is there": (
        {"kernel": "chunk-2", "kind": "kda", "warps": 1},
        ("scan_chunk_channel_scores.cuh", "        w.wait_until_scored(span);\n", ""),
    ),
    "rows of a batch that are replaced while they are used": (
        {"kernel": "exact-1"},
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
    options: dict[str, object] = {"kernel": "chunk", "kind": "gdn", "heads": 1, "groups": 1, "headdim": 32}
    options |= {"dstate": 128, "warps": 2, "regime": "usual", "first-warp": "first", "lengths": SHORT} | changes
    options = {"gates": "pairs"} | options
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
    changes, corruption = RACES[name]
    assert count_races(watched(tmp_path, corruption), **changes) > 0
