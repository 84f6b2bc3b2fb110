"""The command line's frame: exit codes, one-line errors, what is imported when, progress bars, pipes, interrupts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cli_cases import PREFIX, call, refused

from trtllm_replayssm import ReplayError, __version__, cli
from trtllm_replayssm.cli import common


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A command ``probe`` whose main raises what its attribute ``error`` says."""
    module = ModuleType("probe_command")
    module.error = None  # type: ignore[attr-defined]

    def run(args: object) -> int:
        if module.error is not None:
            raise module.error
        return 7

    module.add_arguments = lambda parser: parser.add_argument("--json", action="store_true")  # type: ignore[attr-defined]
    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "a probe"))
    yield module


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, text) in cli.COMMANDS.items():
        assert name in shown
        assert call([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, name
        assert text == text.strip()
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"trtllm-replayssm {__version__}\n"


def test_module_and_console_script_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "trtllm_replayssm", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"trtllm-replayssm {__version__}\n", "")


def test_parsers_load_no_torch() -> None:
    code = (
        "import sys, trtllm_replayssm.cli as c\n"
        "[c.build_parser(name) for name in (None, *c.COMMANDS)]\n"
        "print([m for m in ('torch', 'rich', 'tokenizers', 'jinja2', 'matplotlib', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND; see trtllm-replayssm --help"),
        (["fly"], "invalid choice: 'fly'"),
        (["--fly"], "the following arguments are required"),
        (["run"], "the following arguments are required: CHECKPOINT; see trtllm-replayssm run --help"),
        (["run", "x", "-"], "unrecognized arguments: - (a prompt is given as --prompt TEXT, or on stdin without it)"),
        (["run", "x", "def f("], "def f( (a prompt is given as --prompt TEXT, or on stdin without it); see "),
        (["run", "x", "--window", "wide"], "argument --window: invalid int value: 'wide'"),
        (["run", "x", "--decode", "all"], "argument --decode: invalid choice: 'all'"),
        (["run", "x", "--wind", "3"], "unrecognized arguments: --wind 3; see trtllm-replayssm run --help"),
        (["convert", "x"], "the following arguments are required: OUT_DIR"),
        (["convert", "x", "y", "--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (["plan", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_command_lines(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(argv, capsys)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ReplayError("two\nlines  and\tblanks"), "two lines and blanks"),
        (ReplayError("x" * 5000), "x" * 597 + "..."),
        (PermissionError(13, "Permission denied", "/p"), "[Errno 13] Permission denied: '/p'"),
        (MemoryError(), "out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"),
            "out of memory; use a smaller --max-batch",
        ),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), "out of memory; use a smaller --max-batch"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_one_line(
    command: ModuleType, error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command.error = error  # type: ignore[attr-defined]
    assert refused(["probe"], capsys).startswith(message)


def test_other_exit_codes(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["probe"]) == 7
    command.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    assert call(["probe"]) == 130
    assert capsys.readouterr() == ("", "")
    command.error = RuntimeError("a bug")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a bug"):
        call(["probe"])


def test_a_reader_that_went_away(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    command.error = BrokenPipeError()  # type: ignore[attr-defined]
    assert call(["probe"]) == 141
    process = subprocess.Popen(
        [sys.executable, "-m", "trtllm_replayssm", "plan", "--list", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


def test_interrupt_while_waiting_for_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "RecurrentGemmaForCausalLM"}')
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    argv = [sys.executable, "-m", "trtllm_replayssm", "run", str(tmp_path), "--prompt-file", str(fifo)]
    # A background job of a script starts with the signal ignored; the command is tested as a terminal starts it.
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with open(fifo, "wb"):  # opens once the command reads
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_json_is_legal_whatever_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"a": float("nan"), "b": [1.5, float("-inf"), (2, "é\ud800")], 3: None})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"a": "nan", "b": [1.5, "-inf", [2, "é\ud800"]], "3": None}


@pytest.mark.parametrize("rich", [True, False])
def test_progress_on_a_terminal(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with common.progress("converting") as update:
        for done in range(4):
            update(done, 3, f"weight {done}")
            print("[b]result[/b] " * 20)
    assert capsys.readouterr().out == ("[b]result[/b] " * 20 + "\n") * 4  # whatever the bar does, stdout is stdout
    shown = terminal.getvalue()
    assert "converting" in shown and "weight 3" in shown
    assert ("\x1b[" in shown) == rich  # rich draws with escape sequences, the plain bar with carriage returns
    assert rich or shown.endswith("\r")


def test_no_progress_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with common.progress("converting") as update:
        update(1, 2, "x")
    assert capsys.readouterr() == ("", "")


def test_errors_keep_their_prefix() -> None:
    assert f"{common.PROG}: error: " == PREFIX
    assert common.one_line(" a \r\n b ") == "a b"


def test_streams_that_are_closed(tmp_path: Path) -> None:
    """Python starts with sys.stdin, sys.stdout or sys.stderr None where the shell closed them."""

    def run(redirect: str, *words: str) -> tuple[int, str, str]:
        line = " ".join([sys.executable, "-m", "trtllm_replayssm", *words, redirect])
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    (tmp_path / "config.json").write_text('{"architecture": "RecurrentGemmaForCausalLM"}')
    assert run(">&-", "plan", "--list") == (0, "", "")
    assert run("2>&-", "plan", "no-such-model") == (2, "", "")
    for words in ([], ["--prompt-file", "-"]):
        code, out, err = run("<&-", "run", str(tmp_path), *words)
        assert (code, out, err.count("\n")) == (2, "", 1) and "give --prompt" in err
