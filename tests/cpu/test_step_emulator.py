"""The Mamba-2 step kernels and materialize, their own CUDA source, run on the CPU and compared with the recurrence.

Oracle: the fold's own operations for the checkpoint and its scale (equal bits), double precision for outputs.
tests/emulator stands in for the GPU: threads as fibers, products as the PTX manual describes them. Not seen here:
fences, copies in flight, and what the compiler for GPUs makes of the source; tests/gpu is for that.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from emulator_build import build

COPIES = "bulk_copy_host.cuh"

# Row 1 of three and more is padding, its inputs NaN. Every row has one committed row more than its history; those that
# then lack room for the step's tokens in the window fold.
HISTORIES = "0,5,11,15"
LONG = "58,1,33,31"

# Error beyond half a step of bf16, over the sum of the terms' absolute values. Two bf16 terms of the state and of the
# weights leave out 2^-18 of a value; fp32 sums and decays add less than that.
OUTPUT_BOUND = 2.0**-17

LONG_WINDOW = {"window": 64, "histories": LONG}
FAR = {"slot-gap": 2**31 + 4096}
# Every row but the padding folds 32 rows or more.
WILD = {"decays": "wild", "window": 64, "histories": "62,1,63,31,60"}
CASES = {
    **{f"tokens-{tokens}": {"tokens": tokens} for tokens in (1, 2, 3, 4, 5, 8)},
    "one-token-long-window": {"tokens": 1, "window": 64, "histories": LONG},
    "long-window": LONG_WINDOW,
    "thirteen-tokens": {"tokens": 13, "window": 40, "histories": "0,3,20,39"},
    "sixteen-tokens": {"tokens": 16, "window": 64, "histories": "30,1,45,63"},
    "narrow": {"dstate": 64},
    "narrow-one-token": {"dstate": 64, "tokens": 1},
    "wide": {"dstate": 256, "tokens": 7, "heads": 2},
    "wide-one-token": {"dstate": 256, "tokens": 1, "heads": 2},
    "one-warp": {"headdim": 16, "tokens": 9, "heads": 8, "groups": 1, "heads-per-block": 8},
    "five-warps": {"headdim": 80},
    "eight-warps": {"headdim": 128, "tokens": 6},
    "no-gate": {"gate": 0},
    "conventional": {"window": 1, "tokens": 1, "histories": "0,0,0"},
    "three-heads-a-group": {"heads": 6, "heads-per-block": 3},
    "fourteen-heads-a-group": {"heads": 14, "groups": 1, "heads-per-block": 7, "tokens": 1},
    "fourteen-heads-a-group-several-tokens": {"heads": 14, "groups": 1, "heads-per-block": 2},
    "one-group-each-and-many-rows": {"heads": 8, "groups": 8, "heads-per-block": 1, "histories": "3,0,9,15,0,11,15"},
    "growing": {"decays": "growing"},
    "growing-one-token": {"decays": "growing", "tokens": 1, "window": 64, "histories": "63,1,63"},
    "wild": {"decays": "wild"},
    "wild-one-token": {"decays": "wild", "tokens": 1, "histories": "0,5,15,15,13"},
    "wild-long-window": {"tokens": 5, **WILD},
    "wild-wide-one-token": {"decays": "wild", "dstate": 256, "tokens": 1, "heads": 2},
    "wild-conventional": {"decays": "wild", "window": 1, "tokens": 1, "histories": "0,0,0,0,0"},
    "wild-generic": {
        "decays": "wild",
        "generic": 1,
        "headdim": 48,
        "dstate": 96,
        "tokens": 1,
        "histories": "5,5,15,15",
    },
    "wild-generic-five-tokens": {"generic": 1, "tokens": 5, **WILD},
    "slots-past-4-gib": FAR,
    "slots-past-4-gib-one-token": {**FAR, "tokens": 1},
    "generic": {"generic": 1},
    "generic-one-token": {"generic": 1, "tokens": 1, "dstate": 96, "headdim": 48},
    "generic-thirteen-tokens": {"generic": 1, "tokens": 13, "window": 40, "histories": "0,3,20,39", "dstate": 16},
    "generic-wide": {"generic": 1, "tokens": 5, "dstate": 256, "headdim": 128, "heads": 2, **LONG_WINDOW},
    "generic-conventional": {"generic": 1, "window": 1, "tokens": 1, "histories": "0,0,0", "headdim": 16, "dstate": 24},
    "more-heads-than-warps-hold": {"tokens": 1, "heads": 12, "groups": 1, "heads-per-block": 12},
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulator"), "step_emulator", "mamba2_replay", copies=COPIES)


def launch(program: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    options: dict[str, object] = {"heads": 4, "groups": 2, "headdim": 64, "dstate": 128, "heads-per-block": 2}
    options |= {"tokens": 4, "window": 16, "state": "fp32", "gate": 1, "first-warp": "first", "histories": HISTORIES}
    options |= {"decays": "usual", "slot-gap": 0, "generic": 0}
    options |= changes
    if options["heads"] == 2:
        options |= {"groups": 1}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)


def faults(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is wrong with a run; empty for one that is in order."""
    if done.returncode != 0:
        return [done.stderr or f"ended with {done.returncode}"]
    measures = dict(line.split() for line in done.stdout.splitlines())
    exact = ("not_finite", "states", "scales", "cursors", "rings", "touched", "materialized")
    found = [f"{name} {measures[name]}" for name in exact if measures[name] != "0"]
    if not float(measures["output"]) <= OUTPUT_BOUND:
        found.append(f"output {measures['output']} > {OUTPUT_BOUND:.3e}")
    return found


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_step_agrees_with_the_recurrence(program: Path, case: dict[str, object], state: str) -> None:
    for first in ("first", "last"):
        assert faults(launch(program, **{"state": state, "first-warp": first, **case})) == []


@pytest.mark.parametrize(
    "header, old, new, changes",
    [
        ("step_tensor.cuh", "if (j > t0 + 4 * f + lane.sum_token + (i & 1)) continue;", "", {}),
        ("step_tensor.cuh", "if (j < count) rows[i] =", "rows[i] =", {}),
        ("tensor_tile.cuh", "token_half(lane >> 4)", "token_half(0)", {}),
        ("step_weigh.cuh", "at[2] = __float2bfloat16_rn(value - __bfloat162float(first));", "at[2] = first;", {}),
        ("step_kernel.cuh", "slot * p.pool.stride_bytes", "static_cast<int>(slot * p.pool.stride_bytes)", FAR),
        ("step_kernel.cuh", "if (b.slot != base) {", "if (b.slot == nullptr) {", {}),
        ("step_parts.cuh", "if (!kOneToken && j > t0 + u && j < tokens) continue;", "", {"generic": 1}),
        ("materialize_kernel.cuh", "clamp_count(count,", "clamp_count(-1,", {}),
        ("ring_fold.cuh", "ring_row(origin, base, pool.ring_rows)", "origin", LONG_WINDOW),
        ("ring_fold.cuh", "[quarter] = scale.exact;", "[0] = scale.exact;", {}),
        ("fold.cuh", "multiply(source.row->renew);", "", WILD),
        (
            "step_weigh.cuh",
            "rows[b.plan.committed].renew = static_cast<float>(scale);",
            "rows[b.plan.committed].renew = 1;",
            {"state": "bf16"},
        ),
        ("head_scale.cuh", "if (leaves == 0) break;", "break;", WILD),
        ("head_scale.cuh", "if (lane < row) end = min(end, row);", "", WILD),
        (
            "step_weigh.cuh",
            "scale = kScaled ? scalars.scale : 1.0;\n#pragma",
            "scale = 1.0;\n#pragma",
            {},
        ),
        ("step_weigh.cuh", "behind * up_to * scale :", "behind * up_to :", {}),
        ("step_weigh.cuh", "b.split * kCopies + lane", "b.split * kCopies", {}),
        ("state_scale.cuh", "next >= kLeastScale", "next > 0.0", WILD),
        ("state_scale.cuh", "next <= kMostScale", "next <= 2.0 * kMostScale", {**WILD, "decays": "growing"}),
    ],
    ids=[
        *("later-tokens", "dead-rows", "halves", "second-term", "32-bit-slots"),
        *("guessed-slot", "later-tokens-generic", "materialized-count", "later-batches"),
        *("other-copies-batch", "renewal", "end-of-a-16-bit-fold"),
        *("rows-that-renew", "runs-of-rows", "scale-of-the-slot", "scale-of-the-outputs", "other-copies"),
        *("least-scale", "most-scale"),
    ],
)
def test_teeth(tmp_path: Path, header: str, old: str, new: str, changes: dict[str, object]) -> None:
    """A kernel with one mistake is found out."""
    assert faults(launch(build(tmp_path, "step_emulator", "mamba2_replay", (header, old, new), COPIES), **changes))
