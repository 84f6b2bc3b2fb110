"""What the checks on a GPU compare with: checkpoints of the tiny trained model, its tokens, logits, states in torch.

usage: python tests/engine/prepare.py OUT [--model HF_DIR] [--dtypes float32 float16] [--device cpu]
           [--checkpoints-only]

Needs torch; runs on a CPU (some minutes). For fp32 and fp16 it writes OUT/checkpoint-DTYPE and
OUT/expected-DTYPE.npz: prompts (packed ids and lengths), the greedy tokens of the torch backend with window 16, the
logits in front of each, and every recurrent layer's state at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trtllm_replayssm.models.checkpoint import convert  # noqa: E402
from trtllm_replayssm.runtime.torch_session import TorchSession  # noqa: E402

NEW_TOKENS = 512
ROWS = 8
LONG_PROMPT = 200  # longer than a call of the engine takes
DTYPES = ("float32", "float16")


def prompts() -> list[list[int]]:
    """Seven prompts of the examples and one long one, as bytes."""
    lines = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[: ROWS - 1]]
    source = (ROOT / "trtllm_replayssm" / "spec.py").read_text(encoding="utf-8")
    return [list(text.encode()) for text in (*texts, source[:LONG_PROMPT])]


def expected(checkpoint: Path, device: str) -> dict[str, np.ndarray]:
    """Greedy continuation of the prompts in torch."""
    rows = prompts()
    session = TorchSession(checkpoint, max_batch=ROWS, max_positions=1024, device=device)
    seqs, logits = session.prefill(rows)
    kept, tokens = [logits.cpu()], []
    for _ in range(NEW_TOKENS):
        tokens.append(kept[-1].argmax(-1))
        kept.append(session.step(seqs, tokens[-1]).cpu())
    states = {f"state_{layer}_{seq}": s.float().cpu().numpy() for seq in seqs for layer, s in
              session.recurrent_state(seq).items()}  # fmt: skip
    return {
        "prompt_ids": np.array([t for row in rows for t in row], np.int32),
        "prompt_lengths": np.array([len(row) for row in rows], np.int32),
        "tokens": torch.stack(tokens, 1).numpy().astype(np.int32),
        "logits": torch.stack(kept, 1).float().numpy(),
        **states,
    }


def main() -> None:
    """Write everything for the dtypes asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoints-only", action="store_true", help="the expected values are there already")
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "models" / "tiny-nemotron-h")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for dtype in args.dtypes:
        checkpoint = args.out / f"checkpoint-{dtype}"
        convert(args.model, checkpoint, dtype=dtype, overwrite=True)
        if args.checkpoints_only:
            continue
        data = expected(checkpoint, args.device)
        np.savez_compressed(args.out / f"expected-{dtype}.npz", **data)
        text = bytes(data["tokens"][0].astype(np.uint8)).decode("utf-8", "replace")
        print(f"{dtype}: {NEW_TOKENS} tokens for {ROWS} prompts; the first begins {text[:60]!r}", flush=True)


if __name__ == "__main__":
    main()
