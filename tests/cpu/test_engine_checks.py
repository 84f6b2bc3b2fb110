"""The checks of tests/engine, on a stand-in engine: they pass on a right one and find a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_standin import standin_engine
from network_cases import CONFIGS

from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_runner import EngineRunner
from trtllm_replayssm.runtime.torch_session import TorchSession

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
import check_model
import wide_model

STEPS, ROWS = 14, 8


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.py would write, of the stand-in's model."""
    inner: Any = make_engine()._engine
    session = TorchSession((CONFIGS["nemotron_h"], inner.model.weights), max_batch=ROWS, max_positions=32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 37, n).tolist() for n in (3, 1, 9, 4, 2, 5, 7, 6)]
    seqs, logits = session.prefill(prompts)
    kept, tokens = [logits], []
    for _ in range(STEPS):
        tokens.append(kept[-1].argmax(-1))
        kept.append(session.step(seqs, tokens[-1]))
    states = {f"state_{layer}_{seq}": s.numpy() for seq in seqs for layer, s in session.recurrent_state(seq).items()}
    path = tmp_path_factory.mktemp("expected") / "expected.npz"
    np.savez(
        path,
        prompt_ids=np.array([t for p in prompts for t in p], np.int32),
        prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        tokens=torch.stack(tokens, 1).numpy(),
        logits=torch.stack(kept, 1).numpy(),
        **states,
    )
    return path


def make_engine() -> Engine:
    return standin_engine(CONFIGS["nemotron_h"], slots=ROWS, window=5)


def check_of(engine: Engine, expected: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(check_model, "EngineRunner", lambda directory, graphs: EngineRunner(engine))
    monkeypatch.setattr(check_model, "PHASE_STEPS", 3)
    return check_model.Check("", str(expected))


def test_a_right_engine_passes_every_check(expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of(make_engine(), expected, monkeypatch)
    check.generate(STEPS)
    check.phases()
    monkeypatch.setattr(check_model, "PHASE_STEPS", 1)
    check.drafts()
    check.graph_bits(4)
    worst = check.worst
    assert check.graphs == "captured"
    assert worst.failures == [] and worst.differing == 0
    assert worst.positions > ROWS * STEPS + 100 and 0 < worst.logits < 1e-5 and 0 < worst.states < 1e-5


@pytest.mark.parametrize("what", ["logits", "state", "nothing captured", "graph", "nan", "choice"])
def test_a_wrong_engine_is_found(expected: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    check = check_of(engine, expected, monkeypatch)
    memory = engine.memory
    logits, states = memory.host_logits, memory.recurrent_state
    steps, count = STEPS, [0]

    def bent(rows: int, n: int) -> np.ndarray:
        out = logits(rows, n)
        count[0] += 1
        if what == "logits" or (what == "graph" and count[0] == 3):
            out[-1, 0, 5] *= 1.001
        if what == "nan":
            out[0, 0, 0] = np.nan
        if what == "choice":
            out[0] = -out[0]
        return out

    monkeypatch.setattr(memory, "host_logits", bent)
    if what == "state":
        wrong = {layer: state * 1.01 for layer, state in states(0, -1).items()}
        monkeypatch.setattr(memory, "recurrent_state", lambda slot, accepted: wrong)
    if what == "nothing captured":
        monkeypatch.setattr(engine, "_worth_capturing", lambda key: False)
    if what in ("nothing captured", "graph"):
        check.graph_bits(4)
    else:
        check.generate(steps)
    said = " ".join(check.worst.failures)
    assert {
        "logits": "logits differ by",
        "state": "the state differs by",
        "nothing captured": "no step was captured in a graph",
        "graph": "captured steps and eager ones differ",
        "nan": "logits are not finite",
        "choice": "another choice although the best logits are",
    }[what] in said


@pytest.mark.parametrize("gap, fails", [(1e-4, False), (3e-4, True)])
def test_another_choice_is_right_within_rounding_alone(gap: float, fails: bool) -> None:
    worst = check_model.Worst("float32")
    got = np.array([[1.0 - gap, 1.0]], np.float32)
    worst.compare("a row", got, np.array([[1.0, 1.0 - gap]], np.float32))
    assert worst.differing == 1
    assert any("another choice although the best logits are" in said for said in worst.failures) == fails


def test_a_refused_capture_and_no_graphs_are_no_failures(expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    inner: Any = engine._engine
    inner.uncapturable = "[runner.cpp] operation not permitted when stream is capturing"
    check = check_of(engine, expected, monkeypatch)
    with pytest.warns(RuntimeWarning, match="steps run without graphs"):
        check.generate(STEPS)
    check.graph_bits(4)
    assert check.graphs == "refused by TensorRT" and check.worst.failures == []
    off = check_model.Check("", str(expected), graphs=False)
    off.graph_bits(4)
    assert off.graphs == "off" and off.worst.failures == [] and off.runner.free_slots == ROWS


def test_the_table_of_a_refused_capture(
    expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = standin_engine(CONFIGS["nemotron_h"], slots=ROWS, window=5)
    inner: Any = engine._engine
    inner.uncapturable = "[runner.cpp] not while capturing"
    check_of(engine, expected, monkeypatch)
    monkeypatch.setattr(check_model.Check, "drafts", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["check_model.py", "engine", str(expected), str(tmp_path / "out.md")])
    with pytest.warns(RuntimeWarning), pytest.raises(SystemExit) as ended:
        check_model.main()
    assert ended.value.code == 0
    (line,) = (tmp_path / "out.md").read_text().splitlines()
    assert [cell.strip() for cell in line.split("|")[6:10:3]] == ["equal", "refused by TensorRT"]
    assert (
        "not captured: TensorRT refused to run the engine: TensorRT: [runner.cpp] not while" in capsys.readouterr().out
    )


def test_the_wide_model_decodes_and_is_bound_by_its_states(tmp_path: Path) -> None:
    wide_model.main([str(tmp_path / "wide"), "--layers", "1"])
    session = TorchSession(tmp_path / "wide", max_batch=1, max_positions=8)
    seqs, logits = session.prefill([[1, 2, 3]])
    assert torch.isfinite(logits).all() and logits.std() > 0.1
    (state,) = session.recurrent_state(seqs[0]).values()
    assert state.shape == (128, 64, 128) and state.dtype == torch.float32


def run_script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script of tests/engine in a Python that has no TensorRT."""
    path = str(Path(__file__).resolve().parents[1] / "engine" / name)
    code = "import runpy, sys; sys.modules['tensorrt'] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, path, *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench_step.py"], "the following arguments are required: ENGINE, ENGINE_WINDOW_1, OUT.md"),
        (["bench_step.py", "no/engine", "no/other", "{out}"], "engine no/engine is not a directory"),
        (["check_model.py", "no/engine", "no/expected.npz", "{out}"], "engine no/engine is not a directory"),
        (["check_model.py"], "the following arguments are required"),
        (["check_plugins.py"], "tensorrt is not installed"),
        (["check_plugins.py", "{out}"], "tensorrt is not installed"),
    ],
)
def test_scripts_say_what_they_lack(words: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out.md"
    done = run_script(*(word.replace("{out}", str(out)) for word in words))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and done.stdout == "" and not out.exists()
    assert last.startswith(f"{words[0]}: error: ") and message in last and "Traceback" not in done.stderr
