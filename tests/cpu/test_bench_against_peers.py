"""The benchmark against peers, without a GPU: jobs, crashed workers, reports, our adapter, kernel-only folders."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_against_peers as bench
from benchmarks.peers import CONTENDERS, base, checks, contender, kernel_only, report
from benchmarks.plot_roofline import plot
from benchmarks.shapes import Shape
from trtllm_replayssm.errors import ReplayError

TINY = Shape("tiny", "mamba2", 4, 2, 16, 16, 1)


def small_args(tmp_path: Path, *more: str) -> Any:
    args = bench.parse_args(["--shapes", "nemotron-3-super", "--state-dtypes", "float32", *more])
    args.log, args.deadline = tmp_path / "log.jsonl", time.time() + 60
    return args


def result(job: bench.Job, time_us: float = 150.0) -> dict[str, Any]:
    return {**asdict(job), "status": "ok", "median_us": time_us, "best_us": 1.0, "worst_us": 200.0, "note": "",
            "read_floor_us": 100.0, "floor_us": 120.0, "rel_error": 2e-3}  # fmt: skip


def test_jobs_are_those_that_a_contender_has_and_fragile_ones_come_last(tmp_path: Path) -> None:
    jobs = bench.make_jobs(small_args(tmp_path))
    assert len(jobs) == len(set(jobs))
    assert {job.contender for job in jobs} == set(CONTENDERS)
    assert all(job.scenario in contender(job.contender).scenarios for job in jobs)
    fragile = [job.contender == "flashinfer-replay" and job.rows == 512 for job in jobs]
    assert fragile == sorted(fragile) and any(fragile)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_our_adapter_passes_the_check_and_a_wrong_one_does_not(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = base.Layer(TINY, state, "cpu")
    ours = contender("ours")
    for tokens in (1, 4):
        assert checks.check_steps(ours, layer, tokens) < checks.LIMITS[state]
    assert checks.check_scan(ours, layer, 128) < checks.LIMITS[state]
    assert checks.check_steps(contender("ours-conventional"), layer, 1) < checks.LIMITS[state]
    monkeypatch.setattr(type(ours.stepper(layer, 4, 1)), "accept", lambda self, slots, counts: None)
    assert checks.check_steps(ours, layer, 4) > checks.LIMITS[state]


def test_restore_and_history_of_our_adapter() -> None:
    stepper = contender("ours").stepper(base.Layer(TINY, "float32", "cpu"), 1, 32)
    stepper.randomize()
    stepper.set_history(torch.arange(32, dtype=torch.int32) % 17)
    before = stepper.pool["cursor"].clone()  # type: ignore[attr-defined]
    step = base.Layer(TINY, "float32", "cpu").inputs(17, 1)
    stepper.call(torch.arange(17, dtype=torch.int32), step)()
    after = stepper.pool["cursor"]  # type: ignore[attr-defined]
    assert after[16, 0, 0, 1] == 0 and after[15, 0, 0, 1] == 15  # 16 rows fold, 15 stay
    stepper.restore()
    assert torch.equal(after, before)


def test_a_crash_ends_neither_the_run_nor_the_other_contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = small_args(tmp_path)
    commands = []

    def worker(command: list[str], timeout: float, check: bool) -> Any:
        commands.append(command)
        done = {r["index"] for r in report.read_log(args.log) if r["kind"] == "result"}
        with args.log.open("a") as stream:
            stream.write(json.dumps({"kind": "machine", "bandwidth": 4.3}) + "\n")
            for index, job in enumerate(bench.make_jobs(args)):
                if index not in done:
                    stream.write(json.dumps({"kind": "begin", "index": index}) + "\n")
                    if job.contender == "flashinfer-replay" and job.rows == 256:
                        break
                    stream.write(json.dumps({"kind": "result", "index": index, **result(job)}) + "\n")
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(bench.subprocess, "run", worker)
    rows = bench.supervise(args, [])
    assert len(rows) == len(bench.make_jobs(args)) and len(commands) == 2
    bad = {(row["contender"], row["rows"]): row["status"] for row in rows if row["status"] != "ok"}
    assert {name for name, _ in bad} == {"flashinfer-replay"} and {size for _, size in bad} == {256, 512}
    assert sum(row["status"] == "crashed" for row in rows) == 1
    assert commands[1][-2:] == ["--bandwidth", "4.3"]


def test_reports_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = bench.make_jobs(small_args(tmp_path))
    rows = [result(job, 284.0 if job.contender == "ours" else 300.0) for job in jobs]
    rows[-1] = {**asdict(jobs[-1]), "status": "failed", "note": "reason of the failure"}
    report.write_reports(rows, ["a GPU", "a commit"], tmp_path / "out")
    text = capsys.readouterr().out
    assert "reason of the failure" in text and "2.0e-03" in text
    line = next(line for line in text.splitlines() if line.startswith("nemotron-3-super float32 mixed ours 256"))
    assert line.split()[5:8] == ["284.0", "285.0", "0.996"] and " met " in line and "(1.06x)" in line
    header, read = report.read_csv(tmp_path / "out.csv")
    assert header == ["a GPU", "a commit"] and len(read) == len(jobs)
    assert read[0]["over_floor"] == pytest.approx(284 / 120, rel=1e-3) and read[-1]["median_us"] is None
    plot(tmp_path / "out.csv", tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def fake_wheel(path: Path, without: str = "") -> None:
    """A wheel with every file that is wanted from vLLM, and some that are not."""
    with zipfile.ZipFile(path, "w") as wheel:
        for pattern in kernel_only.WANTED["vllm-*.whl"]:
            name = pattern.replace("[bcs]*", "bmm").replace("*", "x")
            if name != without:
                wheel.writestr(name, f"# {name}\n")
        wheel.writestr("vllm/__init__.py", "raise ImportError('the whole package')\n")
        wheel.writestr("vllm/engine.py", "")


def test_kernel_only_takes_the_kernels_and_nothing_else(tmp_path: Path) -> None:
    fake_wheel(tmp_path / "vllm-1.0.whl")
    kernel_only.build(tmp_path, tmp_path / "out", headers=False)
    assert (tmp_path / "out/vllm/__init__.py").read_text() == ""
    assert not (tmp_path / "out/vllm/engine.py").exists()
    ops = tmp_path / "out/vllm/model_executor/layers/mamba/ops"
    assert (ops / "ssd_bmm.py").read_text().startswith("# vllm") and (ops / "__init__.py").exists()
    assert "NULL_BLOCK_ID = 0" in (tmp_path / "out/vllm/v1/attention/backends/utils.py").read_text()


def test_kernel_only_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="holds none of"):
        kernel_only.build(tmp_path, tmp_path / "out", headers=False)
    lost = "vllm/model_executor/layers/mamba/ops/mamba_ssm.py"
    fake_wheel(tmp_path / "vllm-1.0.whl", without=lost)
    with pytest.raises(ReplayError, match=rf"has no file {lost}"):
        kernel_only.build(tmp_path, tmp_path / "out", headers=False)


def test_absent_packages_are_named_and_bad_names_refused() -> None:
    reason = contender("vllm-replay").unavailable()
    assert reason == "" or "vllm" in reason or "triton" in reason
    with pytest.raises(ReplayError, match="contender is 'nobody'"):
        contender("nobody")
