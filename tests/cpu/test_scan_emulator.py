"""The tensor-core Mamba-2 scan, its own CUDA source, run on the CPU and compared with the recurrence in float64.

tests/emulator stands in for the GPU: threads as fibers, warp and warpgroup instructions as the PTX manual describes
them. Not seen here: fences, products in flight, and what the compiler for GPUs makes of the source; tests/gpu is for
that.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from emulator_build import build, cuda_include

# Whole chunks of 64 tokens, one token more and less, one token, none, several chunks. Sequences alternate between an
# empty start and a slot with a state and ring rows; the third is padding.
RAGGED = "0,1,63,64,65,200,16,129"
SHORT = "65,17,5,129"

# Errors as a share of the sum of the terms' absolute values.
# Outputs, beyond half a step of bf16: the state and the decayed scores enter products as two bf16 terms, which leaves
# out 2^-18 of a value at most; exponentials and fp32 sums add less than that.
OUTPUT_BOUND = 2.0**-17
# States: all 24 bits of the fp32 operand enter, so what is left is the rounding of dt, of exponentials, of every
# chunk's sum and of the state, each 2^-24 or, cut in a product, 2^-23; measured 2^-21. A term less leaves out 2^-18.
STATE_BOUND = 2.0**-20

CASES = {
    **{
        f"{product}-{regime}": {"product": product, "regime": regime}
        for product in ("warp", "warpgroup")
        for regime in ("usual", "still", "forgetful", "slow", "swinging")
    },
    "warpgroup-spare-place": {"product": "warpgroup", "heads": 3, "groups": 1},
    "warpgroup-two-a-head": {"product": "warpgroup", "heads": 2, "groups": 1, "headdim": 128, "heads-per-block": 1},
    "warpgroup-no-gate": {"product": "warpgroup", "gate": 0},
    "warp-three-warps-padded-columns": {"heads": 6, "headdim": 48, "dstate": 96},
    "warp-five-warps-narrow": {"heads": 7, "groups": 1, "headdim": 80, "dstate": 16, "heads-per-block": 3},
    "warp-one-warp": {"groups": 1, "headdim": 16, "dstate": 16, "heads-per-block": 4},
    "warp-wide": {"heads": 2, "groups": 1, "dstate": 256},
    "warp-no-gate": {"gate": 0},
}


def launch(program: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    options: dict[str, object] = {"heads": 4, "groups": 2, "headdim": 64, "dstate": 128, "heads-per-block": 2}
    options |= {"product": "warp", "regime": "usual", "gate": 1, "first-warp": "first", "lengths": RAGGED} | changes
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)


def faults(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is wrong with a run; empty for one that is in order."""
    if done.returncode != 0:
        return [done.stderr or f"ended with {done.returncode}"]
    measures = dict(line.split() for line in done.stdout.splitlines())
    found = [
        f"{name} {measures[name]}" for name in ("not_finite", "cursors", "scales", "touched") if measures[name] != "0"
    ]
    for name, bound in (("output", OUTPUT_BOUND), ("state", STATE_BOUND)):
        if not float(measures[name]) <= bound:
            found.append(f"{name} {measures[name]} > {bound:.3e}")
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulator"), "scan_emulator", "mamba2_replay")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_the_recurrence(program: Path, name: str) -> None:
    changes: dict[str, object] = dict(CASES[name])
    assert faults(launch(program, **changes)) == []


@pytest.mark.parametrize("product", ["warp", "warpgroup"])
def test_bits_depend_neither_on_heads_per_block_nor_on_which_warp_is_ahead(program: Path, product: str) -> None:
    outputs = {}
    for heads, first in ((1, "first"), (2, "first"), (3, "first"), (4, "first"), (1, "last"), (4, "last")):
        changes = {"heads-per-block": heads, "first-warp": first}
        done = launch(program, product=product, groups=1, lengths=SHORT, **changes)
        assert faults(done) == [], changes
        outputs[heads, first] = done.stdout
    assert len(set(outputs.values())) == 1, outputs


# What each must be caught by: the state's bound, the banks of a matrix access, both bounds, NaN of unwritten memory,
# both bounds, the scales.
CORRUPTIONS = {
    "a bf16 term of the state's input less": (
        "tensor_core.cuh",
        "out[term] = pack_bf16(low, high);",
        "out[term] = term == 2 ? 0 : pack_bf16(low, high);",
    ),
    "tiles that are swizzled otherwise": ("chunk_tile.cuh", "(piece & 7) ^ (row & 7)", "(piece & 7) ^ (row & 3)"),
    "groups of rows that a product seeks elsewhere": (
        "tensor_core.cuh",
        "kGroupOfRows = 128 * 8 / 16",
        "kGroupOfRows = 128 * 4 / 16",
    ),
    "scores that are read before they are there": (
        "scan_mma_kernel.cuh",
        "self().meet();  // decayed scores are there",
        "",
    ),
    "an initial state without its scale": ("scan_mma_state.cuh", "    multiply(static_cast<float>(scale));\n", ""),
    "a scale that stays": ("scan_mma_state.cuh", "[w.lane()] = 1.0;", "[w.lane()];"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_kernel_is_caught(tmp_path: Path, name: str) -> None:
    corrupted = build(tmp_path, "scan_emulator", "mamba2_replay", CORRUPTIONS[name])
    product = "warpgroup" if "product" in name else "warp"
    found = faults(launch(corrupted, product=product, groups=1, lengths=SHORT))
    assert found != []


def test_a_machine_without_the_headers_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    with pytest.raises(pytest.fail.Exception, match="run `make lib`"):
        cuda_include()
