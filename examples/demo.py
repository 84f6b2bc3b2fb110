"""The main job in one go, on any machine: convert a trained hybrid checkpoint, decode with it both ways, plan a server.

Runs the commands that a user would type, printing each before it runs. Stops at the first that fails, with its code.
Needs the ``torch`` extra (``make demo`` installs it); takes seconds on two idle CPU cores.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = '''def read_table(path, sep=","):
    """Read a table of numbers from a text file."""
    rows = []
'''


def commands(out: Path) -> list[tuple[str, list[str]]]:
    """The demo's steps as (what it shows, arguments of ``trtllm-replayssm``)."""
    checkpoint = str(out / "tiny-nemotron-h")
    model = str(Path("examples") / "models" / "tiny-nemotron-h")
    return [
        (
            "A trained Nemotron-H-kind model (HF format) becomes a checkpoint",
            ["convert", model, checkpoint, "--dtype", "float32", "--overwrite"],
        ),
        (
            "Conventional and ReplaySSM decoding side by side, 200 bytes of code",
            ["run", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "200", "--decode", "both", "--window", "16"],
        ),
        (
            "What ReplaySSM would save on a real model: Nemotron-3-Super, 256 sequences on four H200s",
            ["plan", "nemotron-3-super", "--batch", "256", "--window", "16", "--gpu", "h200", "--tp", "4"],
        ),
    ]


def main() -> int:
    """Run the steps; returns the exit code of the first that fails, or 0."""
    out = Path("out") / "demo"
    (ROOT / out).mkdir(parents=True, exist_ok=True)
    for title, arguments in commands(out):
        print(f"\n== {title}\n$ trtllm-replayssm {shlex.join(arguments)}", flush=True)
        done = subprocess.run([sys.executable, "-m", "trtllm_replayssm", *arguments], cwd=ROOT)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
