"""Engine builds: a real one with tensorrt_rtx (network io, no GPU), and what a build says where it cannot be done.

What only a TensorRT with plugins can show (engines that run) is in tests/engine; here its place is taken by a stand-in
that builds nothing (tests/build_standin.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_standin import StandInBuild
from cli_cases import call, refused
from oracles import tiny_hf_dir

from trtllm_replayssm import ReplayError, __version__
from trtllm_replayssm.build import BuildOptions, backend, build_engine, directory, engine
from trtllm_replayssm.build.directory import EngineConfig, read_engine_config
from trtllm_replayssm.directories import sha256_of, written_directory
from trtllm_replayssm.models.checkpoint import convert
from trtllm_replayssm.models.host_weights import load_host_checkpoint

IO = ["--tensorrt", "tensorrt_rtx", "--network", "io", "--max-batch", "3", "--max-input-len", "8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of a byte-level model with random weights."""
    folder = tmp_path_factory.mktemp("build")
    hf = tiny_hf_dir("byte", folder / "hf")
    (hf / "generation_config.json").write_text('{"eos_token_id": 0}')
    convert(hf, folder / "checkpoint", dtype="float32")
    return folder / "checkpoint"


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandInBuild:
    """TensorRT 8.6's API with a builder that builds nothing; plugins count as registered."""
    return use(StandInBuild("8.6"), monkeypatch)


def use(build: StandInBuild, monkeypatch: pytest.MonkeyPatch) -> StandInBuild:
    monkeypatch.setattr(engine, "find_tensorrt", lambda *asked: build.trt)
    monkeypatch.setattr(engine, "_register_plugins", lambda: ("9.9", "ab" * 32))
    return build


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_real_build_without_a_gpu(
    checkpoint: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """tensorrt_rtx builds the network; the directory says what it is, and that it cannot generate text."""
    out = tmp_path / "deep" / "engine"
    assert call(["build", checkpoint, out, *IO, "--dtype", dtype, "--window", 4]) == 0
    shown = capsys.readouterr()
    assert f"engine written to {out}" in shown.out and "cannot generate text" in shown.out and shown.err == ""
    files = {p.name for p in out.iterdir()}
    assert files == {"config.json", "decay.npz", "rank0.engine", "generation_config.json"}
    assert [p.name for p in out.parent.iterdir()] == ["engine"]
    config = read_engine_config(out)
    import tensorrt_rtx

    assert config.tensorrt == ("tensorrt_rtx", tensorrt_rtx.__version__) and config.package_version == __version__
    assert config.network.dtype == ("float32" if dtype == "auto" else dtype) and config.network.window == 4
    assert config.limits.max_batch == 3 and config.limits.max_input_len == 8
    assert config.engine_sha256 == sha256_of(out / "rank0.engine")
    assert config.engine_bytes == (out / "rank0.engine").stat().st_size > 10_000
    assert config.weights_sha256 == sha256_of(checkpoint / "rank0.safetensors")
    assert (config.library_version, config.library_sha256, config.layout_sha256) == ("", "", "")
    assert config.profiles == ("context", "generation")
    assert config.io.get("logits").shape == ("rows", "logits", 256)  # type: ignore[union-attr]
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ReplayError, match="cannot generate text"):
        directory.check_tensorrt(config, *config.tensorrt)
    assert "network io" in refused(["run", out, "--prompt", "a"], capsys)


def test_json_and_overwrite(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine"
    assert call(["build", checkpoint, out, *IO, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["window"] == 16 and summary["network"] == "io" and summary["copied"] == ["generation_config.json"]
    assert summary["engine"] == str(out)
    before = sha256_of(out / "config.json")
    assert "exists; choose another directory or overwrite it" in refused(["build", checkpoint, out, *IO], capsys)
    assert sha256_of(out / "config.json") == before
    assert call(["build", checkpoint, out, *IO, "--window", 2, "--overwrite"]) == 0
    assert read_engine_config(out).network.window == 2
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    message = refused(["build", checkpoint, mine, *IO, "--overwrite"], capsys)
    assert "is not an engine directory of this package; it is not overwritten" in message
    assert (mine / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--window", 0], "window is 0; it must be a whole number from 1 to 64"),
        (["--draft-tokens", 16], "draft_tokens is 16; it must be a whole number from 0 to 15"),
        (["--max-batch", 0], "max_batch is 0"),
        (["--max-input-len", 0], "max_input_len is 0"),
        (["--max-positions", 99999], "(the model's position limit)"),
        (["--workspace", 0], "workspace is 0.0; it must be above 0 and at most 4096 GiB"),
        (["--workspace", "nan"], "workspace is nan"),
        (["--builder-optimization-level", 6], "optimization_level is 6; it must be a whole number from 0 to 5"),
        (["--tensorrt", "tensorrt_rtx"], "TensorRT-RTX takes no plugins. It builds network io (--network io)"),
        ([], "building needs a GPU (without one: --tensorrt tensorrt_rtx --network io)"),
        (["--network", "io"], "tensorrt>=10,<12'; building needs a GPU (without one: --tensorrt tensorrt_rtx)"),
        (["--runtime", "trtllm"], "tensorrt_llm cannot be imported"),
        (["--runtime", "trtllm", "--network", "io"], "--network is io; it is for --runtime tensorrt"),
        (["--runtime", "trtllm", "--dtype", "float16"], "dtypes are those of the checkpoint"),
        (["--runtime", "trtllm", "--verbose"], "TensorRT-LLM's log follows the environment variable"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_made(
    checkpoint: Path, tmp_path: Path, options: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert message in refused(["build", checkpoint, tmp_path / "out", *options], capsys)
    assert not (tmp_path / "out").exists()


def test_bad_places(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for target, message in (
        (file, "exists; choose another directory"),
        (file / "below", "is not a directory"),
        (link, "is a symbolic link"),
    ):
        assert message in refused(["build", checkpoint, target, *IO], capsys)
    assert "is not a directory" in refused(["build", tmp_path / "none", tmp_path / "out", *IO], capsys)
    assert file.read_text() == "x"


def test_a_target_that_holds_the_input_is_kept(tmp_path: Path) -> None:
    inner = tmp_path / "out" / "checkpoint"
    inner.mkdir(parents=True)
    with pytest.raises(ReplayError, match="holds the input"), written_directory(tmp_path / "out", inputs=[inner]):
        raise AssertionError("the block must not run")
    assert inner.is_dir()


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="stop"), written_directory(target) as part:
        (part / "file").write_text("x")
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    with written_directory(target) as part:
        (part / "file").write_text("y")
    assert (target / "file").read_text() == "y" and list(target.parent.iterdir()) == [target]


def test_what_the_builder_is_told(checkpoint: Path, tmp_path: Path, standin: StandInBuild) -> None:
    cache = tmp_path / "cache"
    options = BuildOptions(dtype="float16", workspace_gib=0.5, timing_cache=cache, optimization_level=1)
    steps: list[tuple[int, int, str]] = []
    standin.messages = [(3, "Graph optimization time: 0.1 seconds."), (3, "Engine generation completed in 3 seconds.")]
    summary = build_engine(checkpoint, tmp_path / "out", options, progress=lambda *step: steps.append(step))
    told = standin.settings.told
    assert ("limit", "WORKSPACE", 1 << 29) in told and ("clear", "TF32") in told and ("set", "FP16") in told
    assert ("tactics", 0) in told and ("preview", "sharing", True) in told and ("cache", b"") in told
    assert standin.settings.builder_optimization_level == 1
    assert cache.read_bytes() == b"measured"
    assert steps == [(0, 1, "network"), (1, 4, "choosing kernels"), (4, 4, "serialising")]
    assert summary["tensorrt"] == "tensorrt 8.6.0" and summary["engine_bytes"] == len(b"engine of the stand-in")
    config, weights = load_host_checkpoint(checkpoint)
    written = read_engine_config(tmp_path / "out")
    assert (written.library_version, written.library_sha256) == ("9.9", "ab" * 32)
    rates = directory.read_decay(tmp_path / "out", written)
    assert list(rates) == list(config.recurrent_layers)
    for layer, rate in directory.decay_rates(config, weights).items():
        assert np.array_equal(rates[layer], rate) and (rate < 0).all()


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([(1, "Could not find any implementation for node X due to insufficient workspace.")],
         "a layer needs more scratch memory than --workspace allows; raise it or leave it out"),
        ([(1, "[defaultAllocator.cpp] Error Code 1: Cuda Runtime (out of memory)")], "the GPU is out of memory"),
        ([(1, "getPluginCreator could not find plugin ReplayMamba2 version 1")], "is not registered with TensorRT"),
        ([(1, "Could not find any implementation for node {ForeignNode[a...b]}.")], "TensorRT has no kernel for one"),
        ([(2, "a warning"), (0, "first"), (1, "second   line\nof it")], "TensorRT: first; second line of it"),
        ([(2, "only a warning")], "TensorRT: only a warning"),
        ([], "TensorRT gave no reason in its log"),
    ],
)  # fmt: skip
def test_a_build_that_gives_nothing_says_why(
    checkpoint: Path, tmp_path: Path, standin: StandInBuild, messages: list[tuple[int, str]], reason: str
) -> None:
    standin.messages, standin.result = messages, None
    with pytest.raises(ReplayError) as caught:
        build_engine(checkpoint, tmp_path / "out")
    assert str(caught.value).startswith("TensorRT 8.6.0 gave no engine: ") and reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_gpu(checkpoint: Path, tmp_path: Path, standin: StandInBuild) -> None:
    standin.no_builder = True
    with pytest.raises(ReplayError, match="cannot start a build: TensorRT finds no usable GPU; engines are built on"):
        build_engine(checkpoint, tmp_path / "out")


def test_a_dtype_that_this_tensorrt_lacks(checkpoint: Path, tmp_path: Path, standin: StandInBuild) -> None:
    with pytest.raises(ReplayError, match=r"dtype is bfloat16; tensorrt 8\.6\.0 has float32, float16 only"):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(dtype="bfloat16"))


def test_no_plugin_library(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_tensorrt", lambda *asked: StandInBuild("10").trt)
    monkeypatch.setenv("TRTLLM_REPLAYSSM_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(ReplayError, match=r"none\.so does not exist; build it with `make lib`"):
        build_engine(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    "data, message", [(b"of another GPU", "is of another TensorRT or GPU"), (None, "is a directory")]
)
def test_a_timing_cache_that_is_no_use(
    checkpoint: Path, tmp_path: Path, standin: StandInBuild, data: bytes | None, message: str
) -> None:
    cache = tmp_path / "cache"
    if data is None:
        cache.mkdir()
    else:
        cache.write_bytes(data)
    with pytest.raises(ReplayError, match=message):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(timing_cache=cache))
    assert not (tmp_path / "out").exists()


def test_a_timing_cache_that_cannot_be_written_is_said_before_the_build(
    checkpoint: Path, tmp_path: Path, standin: StandInBuild
) -> None:
    def build(*arguments: Any) -> None:
        raise AssertionError("the builder must not run")

    standin.trt.Builder.build_serialized_network = build
    with pytest.raises(ReplayError, match=r"timing cache .* cannot be written: .*none is no directory that may be wri"):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(timing_cache=tmp_path / "none" / "cache"))
    assert not (tmp_path / "out").exists()


def test_progress_of_a_newer_tensorrt(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = use(StandInBuild("10"), monkeypatch)
    build.phases = [
        ("phase_start", "Building Engine", None, 2),
        ("phase_start", "Tactics", "Building Engine", 5),
        ("step_complete", "Tactics", 3),
        ("phase_finish", "Tactics"),
        ("step_complete", "Building Engine", 0),
        ("phase_finish", "Building Engine"),
    ]
    build.messages = [(3, "Graph optimization time: 0.1 seconds.")]
    steps: list[tuple[int, int, str]] = []
    build_engine(checkpoint, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert steps == [(0, 1, "network"), (0, 2, "Building Engine"), (1, 2, "Building Engine"), (2, 2, "Building Engine")]
    assert build.continued == [None, None, True, None, True, None]


@pytest.mark.parametrize("progress", [None, lambda *step: None], ids=["no progress", "progress"])
def test_ctrl_c_stops_a_build_at_its_next_step(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Any
) -> None:
    build = use(StandInBuild("10"), monkeypatch)
    build.result = None
    original = backend.make_monitor

    def monitor(trt: Any, log: Any, progress: Any) -> Any:
        made = original(trt, log, progress)
        start = made.phase_start
        made.phase_start = lambda *a: (start(*a), os.kill(os.getpid(), signal.SIGINT))[0]
        return made

    monkeypatch.setattr(engine, "make_monitor", monitor)
    build.phases = [("phase_start", "A", None, 3), ("step_complete", "A", 0)]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, tmp_path / "out", progress=progress)
    assert build.continued[-1] is False
    assert signal.getsignal(signal.SIGINT) is before and list(tmp_path.iterdir()) == []


def test_builds_and_runners_need_neither_torch_nor_tensorrt_to_be_imported() -> None:
    """They run where TensorRT 8.6 lives: numpy is all there is beside it."""
    from test_import_light import child

    code = "import trtllm_replayssm.build, trtllm_replayssm.plugins, trtllm_replayssm.models.host_weights\n"
    code += "import trtllm_replayssm.runtime.engine_runner, trtllm_replayssm.ops.tensorrt_network\n"
    code += "from trtllm_replayssm.cli import main\nmain(['build', '--help'])"
    done = child(code)
    assert done.returncode == 0 and "--builder-optimization-level" in done.stdout, done.stderr


def test_a_logger_raises_nothing_into_tensorrt() -> None:
    def broken(*step: Any) -> None:
        raise RuntimeError("in a callback")

    log = backend.BuildLog(broken)
    log.add(3, "Graph optimization time: 1")
    assert log.interrupted


@pytest.mark.parametrize("script", ["build_engine.py", "convert_checkpoint.py"])
def test_build_scripts_are_the_commands(script: str) -> None:
    import subprocess
    import sys

    path = Path(__file__).resolve().parents[2] / "build_scripts" / script
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: trtllm-replayssm {script.split('_')[0]} ")


NO_KERNEL = "10: Could not find any implementation for node {ForeignNode[attention/constant.1...in_proj/matmul]}."


@pytest.mark.parametrize("asked, precision, builds", [(None, "preferred", 2), ("prefer", "preferred", 1)])
def test_precisions_that_no_kernel_keeps_to_become_a_wish(
    checkpoint: Path, tmp_path: Path, standin: StandInBuild, asked: str | None, precision: str, builds: int
) -> None:
    standin.obeying = NO_KERNEL
    summary = build_engine(checkpoint, tmp_path / "out", BuildOptions(dtype="float16", precision=asked))
    assert summary["precision"] == precision and standin.builds == builds
    assert read_engine_config(tmp_path / "out").precision == precision
    data = json.loads((tmp_path / "out" / "config.json").read_text())["replayssm_engine"]
    assert data["precision"] == precision
    told = [entry for entry in standin.settings.told if "CONSTRAINTS" in str(entry[1])]
    assert told == [
        ("set", "OBEY_PRECISION_CONSTRAINTS"),
        ("clear", "OBEY_PRECISION_CONSTRAINTS"),
        ("set", "PREFER_PRECISION_CONSTRAINTS"),
    ]


@pytest.mark.parametrize(
    "options, message, builds",
    [
        ({"dtype": "float16", "precision": "obey"}, NO_KERNEL, 1),
        ({"dtype": "float16"}, "Could not find any implementation for node X due to insufficient workspace.", 1),
        ({"dtype": "float16"}, "another error", 1),
        ({"dtype": "float32"}, "", 1),
    ],
)
def test_builds_that_are_not_tried_again(
    checkpoint: Path, tmp_path: Path, standin: StandInBuild, options: dict[str, str], message: str, builds: int
) -> None:
    standin.obeying = message
    if not message:
        standin.messages, standin.result = [(1, NO_KERNEL)], None
    with pytest.raises(ReplayError, match="gave no engine"):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(**options))  # type: ignore[arg-type]
    assert standin.builds == builds
    standin.obeying, standin.messages, standin.result = "", [], b"engine"
    assert build_engine(checkpoint, tmp_path / "out")["precision"] == "obeyed"


@pytest.mark.parametrize("precision", ["obey", "prefer"])
@pytest.mark.parametrize("version, dtype", [("8.6", "float32"), ("10", "float16"), ("10", "bfloat16")])
def test_a_precision_that_has_no_effect_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, dtype: str, precision: str
) -> None:
    build = use(StandInBuild(version), monkeypatch)
    message = (
        f"precision is {precision} for a {dtype} network of tensorrt {version}.*; it applies to TensorRT 8.6 and flo"
    )
    with pytest.raises(ReplayError, match=message):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(dtype=dtype, precision=precision))
    assert build.builds == 0 and not any(tmp_path.iterdir())
    assert build_engine(checkpoint, tmp_path / "out", BuildOptions(dtype=dtype))["precision"] == "obeyed"


def test_a_precision_is_refused_by_the_command(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(["build", checkpoint, tmp_path / "out", *IO, "--dtype", "float16", "--precision", "obey"], capsys)
    assert "precision is obey for a float16 network of tensorrt_rtx" in message and "leave it out" in message


def test_directories_that_are_no_checkpoints_are_told_what_to_do(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = checkpoint.parent / "hf"
    message = refused(["build", hf, tmp_path / "out", *IO], capsys)
    assert message == (
        f"{hf} is a Hugging Face checkpoint; convert it first with: trtllm-replayssm convert {hf} OUT_DIR"
    )
    made, target = tmp_path / "engine", tmp_path / "out"
    assert call(["build", checkpoint, made, *IO]) == 0
    for argv, instead in (
        (["build", made, target, *IO], "the checkpoint that it was built from"),
        (["convert", made, target], "the Hugging Face directory that its checkpoint was converted from"),
        (["plan", made], "the checkpoint that it was built from, or the Hugging Face directory"),
        (["plan", made / "config.json"], "the checkpoint that it was built from, or the Hugging Face directory"),
    ):
        assert refused(argv, capsys) == f"{made} is an engine directory; give {instead}"
    (made / "config.json").write_text('{"pretrained_config": {}, "build_config": {}}')
    assert "is an engine directory; give the checkpoint" in refused(["plan", made], capsys)
    assert "is a checkpoint of this package already" in refused(["convert", checkpoint, target], capsys)
    (made / "config.json").write_text("{}")
    assert "has no replayssm object" in refused(["build", made, target, *IO], capsys)
    assert not target.exists()


def test_a_build_that_was_stopped_is_not_tried_again(checkpoint: Path, tmp_path: Path, standin: StandInBuild) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if what == "choosing kernels":
            raise KeyboardInterrupt

    standin.obeying = f"Graph optimization time: 1 s. {NO_KERNEL}"
    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(dtype="float16"), progress=stop)
    assert standin.builds == 1 and not any(tmp_path.iterdir())


def test_options_follow_the_model(checkpoint: Path) -> None:
    config, _ = load_host_checkpoint(checkpoint)
    options = BuildOptions(max_positions=16, state_dtype="float16", workspace_gib=1.5, draft_tokens=2, max_batch=3)
    limits = options.profile_limits(config)
    assert (limits.max_input_len, limits.max_positions, limits.slots, limits.spec_len) == (16, 16, 3, 3)
    assert options.workspace_bytes == 3 << 29
    network = options.network_options(config)
    assert (network.state_dtype, network.dtype, network.spec_len) == ("float16", config.dtype, 3)
    assert BuildOptions().network_options(config).state_dtype == config.state_dtype == "float32"


def test_more_prompt_tokens_in_a_call_than_the_plugins_take(checkpoint: Path) -> None:
    config = dataclasses.replace(load_host_checkpoint(checkpoint)[0], max_positions=4096)
    with pytest.raises(ReplayError) as caught:
        BuildOptions(max_batch=4096).profile_limits(config)
    assert str(caught.value) == (
        "max_batch is 4096 with max_input_len 1024: 4,194,304 prompt tokens in one call; ReplayCausalConv takes at "
        "most 2,097,120: give max_input_len 511 or less (longer prompts run in pieces) or a smaller max_batch"
    )
    assert BuildOptions(max_batch=4096, max_input_len=511).profile_limits(config).max_input_len == 511
    assert BuildOptions(max_batch=4096, max_positions=64).profile_limits(config).max_input_len == 64
    assert BuildOptions(max_batch=4096, network="io").profile_limits(config).max_input_len == 1024


def test_the_last_words_of_tensorrt_are_said() -> None:
    log = backend.BuildLog()
    for i in range(12):
        log.add(backend.WARNING, f"warning {i}")
    assert log.said() == "TensorRT: warning 9; warning 10; warning 11"
    for i in range(12):
        log.add(backend.ERROR, f"error\n{i}")
    assert log.said() == log.reason() == "TensorRT: error 9; error 10; error 11"


def test_a_timing_cache_that_cannot_be_written_loses_no_engine(
    checkpoint: Path, tmp_path: Path, standin: StandInBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="timing cache .*cache was not written: No space left on device"):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(timing_cache=tmp_path / "cache"))
    assert read_engine_config(tmp_path / "out").engine_bytes == len(b"engine of the stand-in")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_writers_of_one_directory_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with written_directory(target) as first:
        (first / "file").write_text("first")
        with written_directory(target) as second:
            assert second != first and second.parent == first.parent == tmp_path
            (second / "file").write_text("second")
        assert (target / "file").read_text() == "second" and (first / "file").read_text() == "first"
    assert (target / "file").read_text() == "first" and list(tmp_path.iterdir()) == [target]
