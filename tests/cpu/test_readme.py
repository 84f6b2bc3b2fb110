"""What README.md, the Makefile and docs/ claim: the example runs, the commands parse, the links and targets exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """Fenced blocks of README.md in ``language`` ("" for the shell ones)."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_python_example_runs_and_agrees_with_the_recurrence() -> None:
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    error = float(re.search(r"tensor\(([^,)]+)", done.stdout.splitlines()[-1]).group(1))
    assert 0 < error < 1e-6


def command_lines() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if line.startswith("trtllm-replayssm ")]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_is_one_that_the_parser_takes(line: str) -> None:
    from trtllm_replayssm.cli import COMMANDS

    words = shlex.split(line)[1:]
    assert words[0] in COMMANDS
    helped = subprocess.run(
        [sys.executable, "-m", "trtllm_replayssm", words[0], "--help"], capture_output=True, text=True, timeout=60
    )
    assert helped.returncode == 0
    for word in words[1:]:
        if word.startswith("--"):
            assert word in helped.stdout


def test_make_targets_of_the_first_screen_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, re.M)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert README[: README.index("make test")].count("\n") < 20  # the first screen


def test_every_document_is_linked() -> None:
    assert [path.name for path in DOCUMENTS[1:] if f"](docs/{path.name})" not in README] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        if not re.match(r"[a-z]+://", target):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
