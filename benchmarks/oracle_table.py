"""Print how far our decoder's logits are from transformers' own model classes, per family, scenario and window.

    python benchmarks/oracle_table.py [--json]

Tiny random models (tests/oracles.py), fp32, logits of std about 1. A figure is max |difference| over all logits of the
scenario; the tests ask for less than the tolerance in the heading. Exit code 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = (1, 5, 16)


def measure() -> dict[str, dict[int, dict[str, float]]]:
    """max |logit difference| by family, window and scenario."""
    try:
        import oracles
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed; the oracles need the test extra: pip install '.[test]'")
    return {
        kind: {
            window: {name: scenario(oracles.make_oracle(kind), window) for name, scenario in oracles.SCENARIOS.items()}
            for window in WINDOWS
        }
        for kind in oracles.KINDS
    }


def table(results: dict[str, dict[int, dict[str, float]]]) -> str:
    """The results as aligned text."""
    import oracles

    lines = [f"{'family':<12}{'window':>8}" + "".join(f"{name:>11}" for name in oracles.SCENARIOS)]
    for kind, by_window in results.items():
        for window, errors in by_window.items():
            lines.append(f"{kind:<12}{window:>8}" + "".join(f"{error:>11.1e}" for error in errors.values()))
    return "\n".join(lines)


def main() -> int:
    """Measure and print. Returns 0 where every figure is under the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import oracles
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results = measure()
    if args.json:
        print(json.dumps({"tolerance": oracles.TOLERANCE, "max_abs_difference": results}))
    else:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"max |logits - transformers'|, fp32, tolerance {oracles.TOLERANCE:.0e} ({versions})\n{table(results)}")
    worst = max(error for windows in results.values() for errors in windows.values() for error in errors.values())
    return 0 if worst < oracles.TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
