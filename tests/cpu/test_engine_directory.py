"""Engine directories that do not fit, each with its message; and ``run`` on an engine directory (stand-in engine)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_cases import call, refused
from engine_standin import StandInEngine, engine_config, standin_engine
from network_cases import CONFIGS

from trtllm_replayssm import ReplayError, plugins
from trtllm_replayssm.build import backend, directory
from trtllm_replayssm.build.directory import EngineConfig, is_engine_directory, read_engine_config
from trtllm_replayssm.cli import engine_request
from trtllm_replayssm.directories import sha256_of
from trtllm_replayssm.kernels import library
from trtllm_replayssm.runtime import cuda, engine, engine_session
from trtllm_replayssm.runtime.engine import Engine, open_engine

BYTES = dataclasses.replace(CONFIGS["nemotron_h"], vocab_size=256)
DATA = b"a serialised engine"


def write(path: Path, made: Engine, **changes: Any) -> EngineConfig:
    """An engine directory of a stand-in engine."""
    path.mkdir(parents=True, exist_ok=True)
    inner: Any = made._engine
    (path / "rank0.engine").write_bytes(DATA)
    values = {"engine_sha256": sha256_of(path / "rank0.engine"), "engine_bytes": len(DATA), **changes}
    config = engine_config(inner.model, made.config.limits, **values)
    directory.write_engine_config(path, config)
    rates = {layer: -np.ones(4, np.float32) for layer in made.config.model.recurrent_layers}
    directory.write_decay(path, rates)
    return config


@pytest.fixture(scope="module")
def made() -> Engine:
    return standin_engine(BYTES)


@pytest.fixture
def here(made: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine directory that fits this 'machine': TensorRT 8.6.0, library 0.1.0, one GPU of 9.0."""
    file = tmp_path / "library.so"
    file.write_bytes(b"library")
    trt = SimpleNamespace(__name__="tensorrt", __version__="8.6.0", ILogger=type("ILogger", (), {}))
    trt.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda data: made._engine)
    inner: StandInEngine = made._engine  # type: ignore[assignment]
    monkeypatch.setattr(backend, "find_tensorrt", lambda name: trt)
    monkeypatch.setattr(plugins, "library_path", lambda: file)
    monkeypatch.setattr(plugins, "register", list)
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(replayssm_version=lambda: b"0.1.0"))
    api = SimpleNamespace(device_count=lambda: 1, compute_capability=lambda i: "90", set_device=lambda i: None)
    monkeypatch.setattr(cuda, "cuda", lambda: api)
    monkeypatch.setattr(
        engine, "Engine", lambda config, trt, loaded, **_: SimpleNamespace(config=config, loaded=loaded)
    )
    assert inner is not None
    write(tmp_path / "engine", made, library_sha256=sha256_of(file))
    return tmp_path / "engine"


def test_an_engine_that_fits_is_opened(here: Path, made: Engine) -> None:
    opened: Any = open_engine(here)
    assert opened.loaded is made._engine and opened.config == read_engine_config(here) and len(opened.keep) == 2


def change(path: Path, key: str, value: Any) -> None:
    """Set one entry of config.json, ``a.b`` for nested ones."""
    file = path / "config.json"
    data = json.loads(file.read_text())
    at = data["replayssm_engine"]
    *outer, last = key.split(".")
    for name in outer:
        at = at[name]
    at[last] = value
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("tensorrt.version", "10.14.1", r"with tensorrt 10\.14\.1; here is tensorrt 8\.6\.0.*install tensorrt==10"),
        ("tensorrt.module", "tensorrt_rtx", r"built with tensorrt_rtx 8\.6\.0; here is tensorrt 8\.6\.0"),
        ("compute_capability", "80", "GPU of compute capability 80; this one has 90: build it again here"),
        ("plugin_library.version", "0.0.9", r"built with plugin library 0\.0\.9; .*library\.so is version 0\.1\.0"),
        ("plugin_library.sha256", "00", "another build of plugin library 0.1.0 .*SHA-256 differs.*_LIBRARY"),
        ("layout_sha256", "00", r"lays slots out otherwise than the one that built the engine \(0\.1\.0\)"),
        ("engine.bytes", 5, "has 19 bytes; config.json says 5: it is cut off"),
        ("engine.sha256", "00", "is not the engine that config.json was written for"),
        ("network.replay", "io", "has network io: it cannot generate text"),
        ("format_version", 1, r"format_version is 1; this version .* engines of format 2: build the engine again"),
        ("format_version", 7, "format_version is 7; this version .* engines of format 2"),
        ("network.window", 99, "window is 99"),
        ("network.colour", 1, "NetworkOptions has no field colour"),
        ("limits.max_batch", 0, "max_batch is 0"),
        ("limits.colour", 1, "colour"),
        ("model.vocab_size", 0, "vocab_size is 0"),
        ("network.spec_len", None, "spec_len is None"),
        ("network.max_positions", 10**6, "network's max_positions is 1000000; the model's is "),
        ("limits.max_positions", 33, "limits' max_positions is 33; the network's is 32"),
        ("limits.spec_len", 2, "limits' spec_len is 2; the network's is 4"),
        ("model.vocab_size", 255, "io has no output logits of the model's 255 tokens"),
        ("profiles", ["context", "x"], r"profiles is \['context', 'x'\]; it must be \['context', 'generation'\]"),
        ("engine.bytes", float("inf"), "infinity"),
        ("io.tensors", 5, "NetworkIO data must be an object with a list named tensors"),
        ("io.tensors", [], "io has no output logits"),
        ("tensorrt", None, "NoneType"),
        ("tensorrt.module", "json", "tensorrt module is 'json'; it must be one of tensorrt, tensorrt_rtx"),
        ("engine.bytes", "many", "invalid literal"),
        ("tensorrt_llm", "1.2.1", "it is an engine of TensorRT-LLM"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_fit_is_refused(here: Path, key: str, value: Any, message: str) -> None:
    change(here, key, value)
    with pytest.raises(ReplayError, match=message):
        open_engine(here)


@pytest.mark.parametrize("key", ["model", "io", "profiles", "layout_sha256", "weights"])
def test_missing_entries_are_named(here: Path, key: str) -> None:
    file = here / "config.json"
    data = json.loads(file.read_text())
    del data["replayssm_engine"][key]
    file.write_text(json.dumps(data))
    with pytest.raises(ReplayError, match=rf"config\.json: replayssm_engine lacks '{key}'"):
        open_engine(here)


@pytest.mark.parametrize("name, axis", [("token_index", "tokens"), ("kv_index", "bound")])
def test_an_engine_whose_attention_has_other_inputs_is_refused(here: Path, name: str, axis: str) -> None:
    """Its network would read what the runner does not stage."""
    file = here / "config.json"
    data = json.loads(file.read_text())
    io = data["replayssm_engine"]["io"]
    (tensor,) = [t for t in io["tensors"] if t["name"] == name]
    message = rf"config\.json: io has KV caches but no input {name} int32 \[{axis}\]; build the engine again"
    for change_of in ({"shape": ["rows"]}, {"dtype": "float32"}, {"is_input": False}, {"name": "other"}):
        kept = dict(tensor)
        tensor.update(change_of)
        file.write_text(json.dumps(data))
        with pytest.raises(ReplayError, match=message):
            open_engine(here)
        tensor.update(kept)


def test_what_the_layout_digest_covers(made: Engine) -> None:
    model, options = made.config.model, made.config.network
    digests = {
        directory.layout_digest(dataclasses.replace(model, **change), dataclasses.replace(options, **other))
        for change, other in (({}, {}), ({"conv_kernel": 2}, {}), ({}, {"window": 3}), ({}, {"spec_len": 1}))
    }
    assert len(digests) == 4


def test_capabilities_that_are_not_known_are_not_compared(made: Engine) -> None:
    for built, here in (("", "90"), ("90", ""), ("90", "90")):
        directory.check_compute_capability(dataclasses.replace(made.config, compute_capability=built), here)


def test_missing_files_are_named(here: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"none is not a directory; make one with: trtllm-replayssm build"):
        open_engine(tmp_path / "none")
    whole = (here / "decay.npz").read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    bent = whole[:200] + b"\xff" * 8 + whole[208:]
    for damaged in (b"PK damaged", b"", whole[:-30], bent, (tmp_path / "one.npy").read_bytes()):
        (here / "decay.npz").write_bytes(damaged)
        with pytest.raises(ReplayError, match=r"decay\.npz cannot be used: .*build the engine again"):
            open_engine(here)
    directory.write_decay(here, {0: np.ones(4, np.float32)})
    with pytest.raises(ReplayError, match=r"decay\.npz cannot be used"):
        open_engine(here)
    directory.write_decay(here, {0: np.ones(3, np.float32), 2: np.ones(4, np.float32)})
    with pytest.raises(ReplayError, match=r"layer 0 is float32 \[3\]; it must be float32 \[4\]"):
        open_engine(here)
    (here / "rank0.engine").unlink()
    with pytest.raises(ReplayError, match=r"has no rank0\.engine; build it again"):
        open_engine(here)
    (here / "config.json").write_text("{}")
    assert not is_engine_directory(here)
    with pytest.raises(ReplayError, match="there is no replayssm_engine object"):
        open_engine(here)
    (here / "config.json").unlink()
    with pytest.raises(ReplayError, match=r"has no config\.json"):
        open_engine(here)


def test_an_engine_that_tensorrt_does_not_load(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = backend.find_tensorrt("tensorrt")

    def runtime(logger: Any) -> Any:
        logger.log(1, "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed")
        return SimpleNamespace(deserialize_cuda_engine=lambda data: None)

    found.Runtime = runtime
    with pytest.raises(ReplayError, match="does not load: TensorRT: Serialization assertion"):
        open_engine(here)


def test_no_gpu_is_said(here: Path) -> None:
    with pytest.raises(ReplayError, match="device is 1; this machine has 1 usable GPUs"):
        open_engine(here, device=1)


def test_tensors_and_profiles_are_those_of_the_config(made: Engine) -> None:
    inner: Any = made._engine
    few = dataclasses.replace(made.config, io=type(made.config.io)(made.config.io.tensors[1:]))
    with pytest.raises(ReplayError, match=r"tensors that config\.json does not name \(\w+\) or lacks some \(none\)"):
        engine._check_tensors(few, inner)
    tensors = list(made.config.io.tensors)
    at = next(i for i, t in enumerate(tensors) if t.name == "logits")
    tensors[at] = dataclasses.replace(tensors[at], shape=("rows", "logits", 3))
    narrow = dataclasses.replace(made.config, io=type(made.config.io)(tuple(tensors)))
    with pytest.raises(ReplayError, match=r"tensor logits is \[-1, -1, 256\]; config\.json says \[-1, -1, 3\]"):
        engine._check_tensors(narrow, inner)
    one = dataclasses.replace(made.config, profiles=("context",))
    with pytest.raises(ReplayError, match=r"has 2 profiles; config\.json names 1"):
        engine._check_tensors(one, inner)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Directories of engines with windows 5 and 1, which `run` opens as stand-ins of the same weights."""
    paths = {}
    for window in (5, 1):
        path = paths[f"w{window}"] = tmp_path / f"w{window}"
        write(path, standin_engine(BYTES, window=window))
        (path / "generation_config.json").write_text('{"eos_token_id": 255}')

    def open_standin(path: Path, *, device: int, graphs: bool) -> Engine:
        return standin_engine(BYTES, window=read_engine_config(path).network.window, graphs=graphs)

    monkeypatch.setattr(engine_session, "open_engine", open_standin)
    return paths


OPTIONS = ["--prompt", "abc", "--prompt", "de", "--max-new-tokens", 9, "--ignore-eos"]


def test_run_generates_from_an_engine(engines: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in ([], ["--draft-tokens", 3], ["--device", "cuda:0", "--max-batch", 1]):
        assert call(["run", engines["w5"], *OPTIONS, *options, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["window"] == 5 and data["dtype"] == "float32" and data["device"] == "cuda:0"
        assert data["max_batch"] == (1 if "--max-batch" in options else 2)
        texts.append([row["tokens"] for row in data["completions"]])
        assert all(len(tokens) == 9 for tokens in texts[-1])
    assert texts[0] == texts[1] == texts[2]
    assert call(["run", engines["w5"], *OPTIONS]) == 0
    assert "[0] 'abc'" in capsys.readouterr().out


def test_run_compares_two_engines(engines: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", engines["w5"], *OPTIONS, "--decode", "both", "--against", engines["w1"]]
    assert call(argv) == 0
    assert "every difference is rounding" in capsys.readouterr().out
    assert call([*argv, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["against"] == str(engines["w1"]) and data["comparison"]["ok"] is True


@pytest.mark.parametrize(
    "options, message",
    [
        (["--window", 16], "--window is 16; it is settled when an engine is built: leave it out"),
        (["--dtype", "float16"], "--dtype is float16; it is settled"),
        (["--state-dtype", "float32"], "--state-dtype is float32; it is settled"),
        (["--read-copy", "int8"], "--read-copy is int8; it is settled"),
        (["--draft-tokens", 4], "--draft-tokens is 4; the engine was built for at most 3"),
        (["--decode", "both"], "name another one, built with --window 1, with --against"),
        (["--decode", "conventional"], "the engine has window 5: give one built with --window 1"),
        (["--against", "x"], "--against is for --decode both"),
        (["--decode", "both", "--against", "SELF"], "--against has window 5; it must be built with --window 1"),
        (["--device", "cpu"], "device is 'cpu'; engines run on auto, cuda or cuda:N"),
        (["--max-batch", 0], "--max-batch is 0"),
        (["--temperature", -1], "temperature"),
    ],
)
def test_run_refuses(
    engines: dict[str, Path], options: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", engines["w5"], *OPTIONS, *(engines["w5"] if o == "SELF" else o for o in options)]
    assert message in refused(argv, capsys)


@pytest.mark.parametrize("against", [[], ["--against", "w1"]], ids=["alone", "itself"])
def test_window_1_against_itself_is_no_comparison(
    engines: dict[str, Path], against: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", engines["w1"], *OPTIONS, "--decode", "both", *(engines.get(word, word) for word in against)]
    assert "the engine has window 1: that is conventional decoding against itself" in refused(argv, capsys)


def test_another_model_is_no_comparison(engines: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    change(engines["w1"], "weights.sha256", "ff")
    argv = ["run", engines["w5"], *OPTIONS, "--decode", "both", "--against", engines["w1"]]
    assert "is of another model or other weights" in refused(argv, capsys)


@pytest.mark.parametrize("name", ["dtype", "state_dtype"])
def test_another_dtype_is_no_comparison(
    engines: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(engines["w1"], f"network.{name}", "float16")
    argv = ["run", engines["w5"], *OPTIONS, "--decode", "both", "--against", engines["w1"]]
    assert f"--against has {name} float16; {engines['w5']} has float32" in refused(argv, capsys)


def test_positions_are_those_that_both_engines_have(
    engines: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", engines["w5"], "--prompt", "a" * 11, "--max-new-tokens", 9, "--ignore-eos"]
    both = [*argv, "--decode", "both", "--against", engines["w1"], "--json"]
    for limit, tokens in ((32, 9), (13, 2)):
        change(engines["w1"], "limits.max_positions", limit)
        assert call(both) == 0
        (row,) = json.loads(capsys.readouterr().out)["comparison"]["rows"]
        assert len(row["tokens"]) == tokens
    change(engines["w5"], "limits.max_positions", 11)
    assert "prompt 0 has 11 tokens; the model's position limit is 11" in refused(argv, capsys)


@pytest.mark.parametrize("device, index", [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), ("cuda:12", 12)])
def test_the_gpu_that_is_asked_for(device: str, index: int) -> None:
    assert engine_request._gpu_index(device) == index
    for wrong in ("cuda:", "cuda:-1", "cuda:x", "gpu:0", "0"):
        with pytest.raises(ReplayError, match="engines run on auto, cuda or cuda:N"):
            engine_request._gpu_index(wrong)


def test_against_is_for_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--against is for engine directories" in refused(
        ["run", tmp_path, "--prompt", "a", "--against", "x"], capsys
    )


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("name", "", "tensor name is ''"),
        ("name", "positions", "io has two tensors of one name"),
        ("role", 3, "role of input_ids is 3"),
        ("dtype", "int8", "dtype of input_ids is 'int8'; it must be one of int32"),
        (
            "shape",
            ["rows", "colour"],
            "shape of input_ids has 'colour'; an axis must be a length or one of rows, tokens",
        ),
        ("shape", ["rows", 0], "shape of input_ids has 0"),
        ("shape", 5, "not iterable"),
        ("is_input", "yes", "is_input of input_ids is 'yes'"),
        ("location", "moon", "location of input_ids is 'moon'; it must be one of device, host"),
        ("layer", -1, "layer of input_ids is -1"),
    ],
)
def test_a_malformed_tensor_is_named(here: Path, key: str, value: Any, message: str) -> None:
    file = here / "config.json"
    data = json.loads(file.read_text())
    tensor = data["replayssm_engine"]["io"]["tensors"][0]
    assert tensor["name"] == "input_ids"
    tensor[key] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ReplayError, match=message):
        open_engine(here)
