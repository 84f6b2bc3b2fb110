"""The package, its command line and the planner work where numpy is the only other package, on every import path.

A child process refuses the import of everything else before it imports anything; the last test shows that it does.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from published_configs import NANO

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = ("torch", "safetensors", "tokenizers", "jinja2", "matplotlib", "rich", "transformers", "tensorrt",
           "tensorrt_rtx", "tensorrt_llm", "triton")  # fmt: skip
PRELUDE = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(ROOT)!r})
"""


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120, check=False
    )


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return child(f"from trtllm_replayssm.cli import main\nsys.exit(main({list(words)!r}))")


def test_import_takes_nothing_else() -> None:
    code = "import trtllm_replayssm\nprint(sorted({m.split('.')[0] for m in sys.modules} & {'numpy', 'torch'}))"
    done = child(code)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["doctor", "--help"]])
def test_help(words: list[str]) -> None:
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert "trtllm-replayssm" in done.stdout


def test_plan_of_a_preset() -> None:
    done = command("plan", "nemotron-3-super", "--batch", "256", "--window", "16", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["memory"]["ring_bytes_per_token"] == 18_944


@pytest.mark.parametrize("kind", ["published", "converted"])
def test_plan_of_a_config(kind: str, tmp_path: Path) -> None:
    config = NANO
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if kind == "converted":
        from trtllm_replayssm.models.checkpoint import trtllm_config
        from trtllm_replayssm.models.hf import read_hf_config

        (tmp_path / "config.json").write_text(json.dumps(trtllm_config(read_hf_config(tmp_path))), encoding="utf-8")
    done = command("plan", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"]["params"] == 3_973_556_832


def test_plot_says_what_is_missing(tmp_path: Path) -> None:
    done = command("plan", "qwen3.5-4b", "--plot", str(tmp_path / "a.png"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "pip install matplotlib" in done.stderr


def test_a_command_that_needs_torch_is_refused_here() -> None:
    """Teeth: the block works, so the tests above mean what they say."""
    assert child("import torch").returncode != 0


def test_a_command_that_needs_torch_says_so(tmp_path: Path) -> None:
    """One line and exit code 2 where safetensors or torch is missing; any other missing module is a bug and shows."""
    tiny = ROOT / "examples" / "models" / "tiny-nemotron-h"
    done = command("convert", str(tiny), str(tmp_path / "out"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "is not installed; install it with: pip install torch safetensors" in done.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "config.json").write_text('{"architecture": "RecurrentGemmaForCausalLM"}')
    done = command("run", str(tmp_path), "--prompt", "a")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "torch is not installed" in done.stderr
    bug = child(
        "import trtllm_replayssm.plan as plan\nimport trtllm_replayssm.cli as cli\n"
        "def main(args): import triton\nplan.main = main\ncli.main(['plan', '--list'])"
    )
    assert bug.returncode == 1 and "No module named 'triton'" in bug.stderr


def python39_files() -> list[Path]:
    """The files that pyproject.toml has ruff read as Python 3.9."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[tool.ruff.per-file-target-version]\n")[1].split("\n[")[0]
    files = set()
    for pattern in re.findall(r'^"(.+)" = "py39"$', table, re.MULTILINE):
        choices = [part.split(",") for part in re.split(r"[{}]", pattern)]
        files |= {path for parts in itertools.product(*choices) for path in ROOT.glob("".join(parts))}
    return sorted(files)


#: Keyword arguments that came with Python 3.10, by function.
NEWER = {"zip": {"strict"}, "dataclass": {"slots", "kw_only"}}


def test_files_that_run_on_python_39_call_nothing_newer() -> None:
    """ruff checks their syntax; this their calls: NEWER, and isinstance(x, X | Y)."""
    files = python39_files()
    some = ("plugins.py", "build/engine.py", "ops/tensorrt_ops.py", "runtime/books.py")
    assert {ROOT / "trtllm_replayssm" / name for name in some} < set(files)
    bad = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if not isinstance(node, ast.Call) or not name:
                continue
            union = name in ("isinstance", "issubclass") and isinstance(node.args[-1], ast.BinOp)
            if union or {keyword.arg for keyword in node.keywords} & NEWER.get(name, set()):
                bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    # Writing a checkpoint takes torch, which is not there on 3.9.
    assert [place for place in bad if "weight_files.py" not in place] == []
