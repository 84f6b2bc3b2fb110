"""GDN and KDA over the inputs that trained layers get on real text (rollout_inputs.py), and greedy text that must not
start to loop because of replaying.

Contract 1: whenever the ring has been folded the checkpoint has the bits of conventional decoding (window 1). Outputs
are read in two ways, so they differ by rounding: bf16 activations store d rows in 16 bits, which a read sees. The state
is also held against float64: fp32 folds round it a few times per token, and forgetting keeps the sum of those small.

`python tests/cpu/test_gated_delta_rollout.py [TOKENS]` runs the long form, 20,000 tokens; tests/gpu has it for kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from rollout_inputs import MODELS, ROOT, Recorded, Rollout, record

from trtllm_replayssm import reference
from trtllm_replayssm.models.checkpoint import convert, load_checkpoint
from trtllm_replayssm.reference.recurrence import delta_gates, gated_delta_recurrence
from trtllm_replayssm.runtime.compare import Rounding, compare
from trtllm_replayssm.runtime.generate import generate
from trtllm_replayssm.runtime.torch_session import TorchSession

TOKENS = 1200
LONG = 20_000
WINDOW = 16
#: ||S - S_64|| / ||S_64||; about 1e-7 was seen.
STATE_BOUND = 1e-6
#: |o_1 - o_16| over the largest |o|: d rows are stored with 8 or 24 bits, and a read sums up to 15 of them.
OUTPUT_BOUND = {"float32": 2e-5, "bfloat16": 2.0**-6}


def exact_state(recorded: Recorded, act: str, tokens: int) -> torch.Tensor:
    """S [rows, HV, V, K] after ``tokens`` tokens by the plain recurrence in float64, inputs rounded to ``act``."""
    dtype = getattr(torch, act)
    q, k, v, a, b = (getattr(recorded, name)[:, :tokens].to(dtype).double() for name in ("q", "k", "v", "a", "b"))
    g, beta = delta_gates(a, b, recorded.A_log.double(), recorded.dt_bias.double())
    rows, heads = v.shape[0], v.shape[2]
    zero = torch.zeros(rows, heads, v.shape[3], k.shape[3], dtype=torch.float64)
    return gated_delta_recurrence(zero, q, k, v, g, beta)[1]


def check_rollout(kind: str, act: str, tokens: int, heads: int = 1) -> str:
    """Decode, assert, and say in a line what was seen."""
    recorded = record(kind, 1, tokens).heads(heads)
    rollout = Rollout(reference, recorded, WINDOW, act, "cpu")
    errors = []
    for stop in (tokens // 3, tokens):
        rollout.run(0 if not errors else tokens // 3, stop, keep_outputs=True)
        # Token stop - 1 is pending in both: the window-1 checkpoint holds the tokens before it.
        exact = exact_state(recorded, act, stop - 1)
        errors.append(float((rollout.pools[0]["state"].double() - exact).norm() / exact.norm()))
    flushes, unequal = int(rollout.flushes), int(rollout.unequal)
    assert flushes >= tokens // WINDOW
    assert unequal == 0, f"{unequal} of {flushes} checkpoints differ from conventional decoding"
    assert max(errors) <= STATE_BOUND and errors[1] <= 3 * errors[0] + 1e-7
    largest = float(torch.cat(rollout.outputs).abs().max())
    gap = float(rollout.output_gap) / largest
    assert gap <= OUTPUT_BOUND[act]
    return (
        f"{flushes} checkpoints equal, state errors {errors[0]:.1e} {errors[1]:.1e}, outputs {gap:.1e} of the largest"
    )


@pytest.mark.parametrize("act", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_of_a_rollout_have_the_bits_of_conventional_decoding(kind: str, act: str) -> None:
    check_rollout(kind, act, TOKENS)


@pytest.mark.parametrize("kind", MODELS)
def test_recorded_inputs_are_those_of_a_trained_layer(kind: str) -> None:
    """Gates that remember and gates that forget, betas on both sides, keys that repeat: what random inputs lack."""
    recorded = record(kind, 1, TOKENS)
    g, beta = delta_gates(recorded.a, recorded.b, recorded.A_log, recorded.dt_bias)
    assert float(g.min()) < -2.0 and float(g.max()) > -0.05 and float(g.max()) < 0.0
    assert float(beta.min()) < 0.2 and float(beta.max()) > 0.7
    k = torch.nn.functional.normalize(recorded.k[0, :200, 0], dim=-1)
    assert float((k @ k.T).triu(1).max()) > 0.95


@pytest.mark.parametrize("kind", MODELS)
def test_one_wrong_bit_in_the_ring_is_seen(kind: str) -> None:
    """Teeth: flipping the lowest bit of one stored v breaks the next checkpoint, and only v's head."""
    rollout = Rollout(reference, record(kind, 1, TOKENS).heads(1), WINDOW, "bfloat16", "cpu")
    rollout.run(0, 40)
    assert int(rollout.unequal) == 0
    origin = int(rollout.pools[1]["cursor"][0, 0, 0, 0])
    rollout.pools[1]["ring_v"].view(torch.int16)[0, 0, origin, 3] ^= 1
    rollout.run(40, 40 + WINDOW)
    assert int(rollout.unequal) >= 1


def loops(tokens: list[int], longest: int = 64, repeats: int = 4) -> bool:
    """Whether the end of the text is one piece of at most ``longest`` tokens, ``repeats`` times."""
    for period in range(1, longest + 1):
        tail = tokens[-period * repeats :]
        if len(tail) == period * repeats and tail == tail[:period] * repeats:
            return True
    return False


def test_loops() -> None:
    assert loops([9, 8] + [1, 2, 3] * 4) and loops([5] * 4) and not loops([5] * 3)
    assert not loops([1, 2, 3] * 4 + [4]) and not loops(list(range(200)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The trained models, converted to fp32."""
    folder = tmp_path_factory.mktemp("models")
    out = {}
    for kind, name in MODELS.items():
        convert(ROOT / "examples" / "models" / name, folder / name, dtype="float32")
        out[kind] = load_checkpoint(folder / name)
    return out


PROMPTS = [[0, *b'class Queue:\n    """'], [0, *b"    def __repr__(self):\n        return "]]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_text_is_that_of_conventional_decoding(models: dict[str, Any], kind: str, drafts: int) -> None:
    """Same text, so it loops only where conventional decoding loops."""
    count = 96
    options: dict[str, Any] = {"max_batch": 2, "max_positions": 256}
    conventional = TorchSession(models[kind], window=1, **options)
    replay = TorchSession(models[kind], window=WINDOW, spec_len=1 + drafts, **options)
    rounding = Rounding.of("float32", "float32")
    result = compare(conventional, replay, PROMPTS, max_new_tokens=count, rounding=rounding, draft_tokens=drafts)
    assert result.ok and result.identical
    texts = generate(replay, PROMPTS, max_new_tokens=count, draft_tokens=drafts)
    for text, row in zip(texts, result.rows, strict=True):
        assert text.tokens == row.tokens and len(text.tokens) == count
        assert not loops(text.tokens) or loops(row.tokens)
    assert (sum(row.accepted for row in result.rows) > 0) == (drafts > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else LONG
    for kind in MODELS:
        for act in OUTPUT_BOUND:
            print(f"{kind} {act}, {steps} tokens: {check_rollout(kind, act, steps)}", flush=True)
