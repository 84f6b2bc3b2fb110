"""build and load for TensorRT-LLM, against the recorded stand-in (tests/recorded_trtllm/README.md).

What build asks of tensorrt_llm's builder, the engine directory that it leaves, what load asks of its runners; every
message for what is missing or wrong; that nothing here needs tensorrt_llm before it is used.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from recorded_trtllm import recorded
from trtllm_cases import make_config, write_checkpoint

from trtllm_replayssm import plugins, trtllm
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.kernels import library
from trtllm_replayssm.trtllm import budget, build, load, requirement

LIBRARY = {"version": "9.9.9", "sha256": "ab" * 32}
REAL_LIBRARY_FACTS = build.library_facts
MODEL_FILE = Path(trtllm.__file__).parent / trtllm.MODEL_CLS_FILE


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with recorded.installed() as found:
        yield found


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what the code under test registered; the library's version is fixed."""
    calls: list[str] = []
    monkeypatch.setattr(plugins, "register", lambda *args, **kwargs: calls.append("register"))
    for module in (build, load):
        monkeypatch.setattr(module, "library_facts", lambda: dict(LIBRARY))
    return calls


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "checkpoint", make_config("nemotron_h", "bfloat16"))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def engine_dir(llm: Any, checkpoint: Path, tmp_path: Path) -> Path:
    build.build(checkpoint, tmp_path / "engine", max_input_len=32)
    return tmp_path / "engine"


def edit(file: Path, change: Any) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_build(llm: Any, checkpoint: Path, tmp_path: Path, registered: list[str]) -> None:
    done = build.build(checkpoint, tmp_path / "engine", max_batch_size=3, max_input_len=32, max_seq_len=64)
    assert registered == ["register"]
    out = tmp_path / "engine"
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "rank0.engine", "tokenizer.json"]
    data = json.loads((out / "config.json").read_text())
    made, options = data["pretrained_config"], data["build_config"]
    pools = budget.needed(make_config("nemotron_h", "bfloat16"), 16)
    assert (made["architecture"], made["state_size"]) == ("RecurrentGemmaForCausalLM", pools.state_size)
    assert made["replayssm"]["window"] == 16 and made["replayssm"]["ssm_state_size"] == 16
    assert (options["max_batch_size"], options["max_input_len"], options["max_seq_len"]) == (3, 32, 64)
    assert (options["max_beam_width"], options["kv_cache_type"]) == (1, "PAGED")
    flags = options["plugin_config"]
    assert flags["paged_state"] and flags["paged_kv_cache"] and flags["remove_input_padding"]
    assert (flags["gemm_plugin"], flags["mamba_conv1d_plugin"], flags["context_fmha"]) == ("auto", "auto", True)
    recorded_facts = data[build.ENGINE_KEY]
    assert recorded_facts["library"] == LIBRARY and recorded_facts["pools"]["state_bytes"] == pools.state_bytes
    assert recorded_facts["tensorrt_llm"].startswith("1.2.1") and len(recorded_facts["checkpoint_config_sha256"]) == 64
    assert {**recorded_facts, "output": str(out)}.items() <= done.items()
    assert done["bytes"] == (out / "rank0.engine").stat().st_size and done["seconds"] >= 0
    assert not list(tmp_path.glob(".*"))


def test_command_line(llm: Any, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["build", str(checkpoint), str(tmp_path / "engine"), "--runtime", "trtllm", "--max-batch", "2"]
    assert main([*words, "--max-input-len", "32", "--window", "4"]) == 0
    out = capsys.readouterr()
    assert f"engine written to {tmp_path / 'engine'}" in out.out and out.err == ""
    assert load.check_engine(tmp_path / "engine")["window"] == 4
    assert main([*words, "--overwrite", "--max-positions", "16"]) == 0
    assert json.loads((tmp_path / "engine" / "config.json").read_text())["build_config"]["max_input_len"] == 16
    capsys.readouterr()
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["window"] == 16
    assert main(words) == 2
    assert "exists; choose another directory or overwrite it" in capsys.readouterr().err


@pytest.mark.parametrize("window", [1, 4, 33])
def test_another_window_gets_pools_of_its_own(llm: Any, checkpoint: Path, tmp_path: Path, window: int) -> None:
    done = build.build(checkpoint, tmp_path / "engine", window=window, max_input_len=32)
    pools = budget.needed(make_config("nemotron_h", "bfloat16"), window)
    made = json.loads((tmp_path / "engine" / "config.json").read_text())["pretrained_config"]
    assert (made["replayssm"]["window"], made["state_size"]) == (window, pools.state_size)
    assert done["window"] == window and done["pools"]["state_stride"] == pools.state_stride
    assert load.check_engine(tmp_path / "engine")["window"] == window


def test_float32_and_own_products(llm: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", make_config("qwen3_5"))
    build.build(path, tmp_path / "engine", gemm_plugin="none", max_input_len=8)
    flags = json.loads((tmp_path / "engine" / "config.json").read_text())["build_config"]["plugin_config"]
    assert flags["gemm_plugin"] is None and flags["context_fmha"] is False


def test_attention_free_config_class(llm: Any, tmp_path: Path) -> None:
    """The stock config class of the architecture string takes our config.json and writes it back."""
    path = write_checkpoint(tmp_path / "checkpoint", make_config("mamba2", "bfloat16"))
    build.build(path, tmp_path / "engine", max_input_len=8)
    data = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert data["pretrained_config"]["architecture"] == "MambaForCausalLM"
    assert data["pretrained_config"]["residual_in_fp32"] is True
    assert data["build_config"]["plugin_config"]["paged_kv_cache"] is False
    from tensorrt_llm.models import PretrainedConfig

    again = PretrainedConfig.from_dict(data["pretrained_config"])
    assert llm.model_class(again).window == 16


def test_overwrite(llm: Any, checkpoint: Path, engine_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="exists; choose another directory or overwrite it"):
        build.build(checkpoint, engine_dir)
    (engine_dir / "old").touch()
    build.build(checkpoint, engine_dir, overwrite=True, max_input_len=32)
    assert not (engine_dir / "old").exists()
    with pytest.raises(ReplayError, match="is not an engine directory of this package; it is not overwritten"):
        build.build(tmp_path / "checkpoint", checkpoint, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReplayError, match=r"cannot be made: .*file is not a directory"):
        build.build(checkpoint, tmp_path / "file" / "engine")
    inner = shutil.copytree(checkpoint, engine_dir / "checkpoint")
    with pytest.raises(ReplayError, match=r"holds the input .*; overwriting would delete it"):
        build.build(inner, engine_dir, overwrite=True)
    assert (inner / "config.json").is_file()
    build.build(checkpoint, tmp_path / "none" / "engine", max_input_len=32)
    assert (tmp_path / "none" / "engine" / "rank0.engine").is_file()


BAD_OPTIONS = [
    ({"window": 65}, "window is 65; it must be a whole number from 1 to 64"),
    ({"max_batch_size": 0}, "max_batch_size is 0; it must be a whole number"),
    ({"max_batch_size": 32768}, r"max_batch_size is 32768; it must be .* from 1 to 32767 \(rows that a plugin takes\)"),
    ({"max_num_tokens": 2097121}, "max_num_tokens is 2097121; it must be a whole number from 1 to 2097120"),
    ({"max_seq_len": 8}, r"max_seq_len is 8; .* from 1024 .*\(max_input_len or more\)"),
    ({"gemm_plugin": "fp8"}, "gemm_plugin is 'fp8'; it must be one of auto, none"),
    ({"logits_dtype": "bfloat16"}, "logits_dtype is 'bfloat16'; it must be one of float32, float16"),
    ({"gather_context_logits": 1}, "gather_context_logits is 1; it must be true or false"),
    ({"beams": 2}, "build has no option beams; it has gather_context_logits, gemm_plugin"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options(llm: Any, checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        build.build(checkpoint, tmp_path / "engine", **options)
    assert not (tmp_path / "engine").exists()


def test_slot_that_does_not_fit(llm: Any, checkpoint: Path, tmp_path: Path) -> None:
    edit(checkpoint / "config.json", lambda data: data.update(state_size=20))
    with pytest.raises(ReplayError, match=r"state_size is 20: .* window 16 needs .*; window [0-9]+ would fit, or set"):
        build.build(checkpoint, tmp_path / "engine")
    assert not list(tmp_path.glob("*engine*"))


def test_no_engine_and_no_weights(llm: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm.builder

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.builder, "build", lambda model, options: None)
        with pytest.raises(ReplayError, match="TensorRT built no engine; its log above says why"):
            build.build(checkpoint, tmp_path / "engine")
    (checkpoint / "rank0.safetensors").unlink()
    with pytest.raises(ReplayError, match=r"has no rank0\.safetensors"):
        build.build(checkpoint, tmp_path / "engine")


def test_model_cls_file_as_trtllm_build_loads_it(llm: Any, registered: list[str]) -> None:
    """Under the module name ``models``, outside the package; the class stays importable, so that workers find it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = SourceFileLoader("models", str(MODEL_FILE)).load_module()
        cls = getattr(module, trtllm.MODEL_CLS_NAME)
        assert registered == ["register"] and cls is llm.model_class is trtllm.ReplayHybridForCausalLM
        assert getattr(sys.modules[cls.__module__], cls.__qualname__) is cls
    finally:
        sys.modules.pop("models", None)


def test_runners(llm: Any, engine_dir: Path, registered: list[str]) -> None:
    registered.clear()
    cpp = load.model_runner_cpp(engine_dir, max_batch_size=2)
    assert cpp.arguments == {
        "engine_dir": str(engine_dir),
        "max_batch_size": 2,
        "kv_cache_enable_block_reuse": False,
        "enable_chunked_context": False,
    }
    python = load.generation_session(engine_dir, debug_mode=True)
    assert python.arguments["engine_dir"] == str(engine_dir) and python.arguments["debug_mode"] is True
    assert registered == ["register", "register"]


def test_llm(llm: Any, engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm.llmapi import KvCacheConfig

    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS", raising=False)
    monkeypatch.setenv("LD_PRELOAD", f"/x/{plugins.library_path().name}")
    made = load.llm(engine_dir, tokenizer="tok", seed=1)
    assert made.arguments["model"] == str(engine_dir) and made.arguments["seed"] == 1
    assert made.arguments["kv_cache_config"].enable_block_reuse is False
    assert "TLLM_WORKER_USE_SINGLE_PROCESS" not in load.os.environ
    monkeypatch.delenv("LD_PRELOAD")
    load.llm(engine_dir, tokenizer="tok", kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    assert load.os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] == "1"
    with pytest.raises(ReplayError, match="enable_block_reuse is on; recurrent layers would miss the tokens"):
        load.llm(engine_dir, tokenizer="tok", kv_cache_config=KvCacheConfig())
    assert "enable_block_reuse: false" in load.extra_llm_options()


@pytest.mark.parametrize(
    ("option", "value"),
    [("kv_cache_enable_block_reuse", True), ("enable_chunked_context", True), ("max_beam_width", 4)],
)
def test_runner_options_that_are_refused(llm: Any, engine_dir: Path, option: str, value: Any) -> None:
    with pytest.raises(ReplayError, match=f"{option} is .*; engines with recurrent layers take"):
        load.model_runner_cpp(engine_dir, **{option: value})


def test_check_engine(llm: Any, engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = engine_dir / "config.json"
    good = file.read_text()
    assert load.check_engine(engine_dir)["library"] == LIBRARY
    with monkeypatch.context() as patch:
        patch.setattr(load, "library_facts", lambda: {**LIBRARY, "version": "9.9.8"})
        with pytest.raises(ReplayError, match=r"built with plugin library version 9\.9\.9; this one is 9\.9\.8: build"):
            load.check_engine(engine_dir)
        patch.setattr(load, "library_facts", lambda: {**LIBRARY, "sha256": "0"})
        with pytest.warns(UserWarning, match="another build of the plugin library"):
            load.check_engine(engine_dir)
    edit(file, lambda data: data["pretrained_config"].update(state_size=16))
    with pytest.raises(ReplayError, match=r"config\.json: state_size is 16: .* no window would fit"):
        load.check_engine(engine_dir)
    file.write_text(good)
    edit(file, lambda data: data.pop(build.ENGINE_KEY))
    with pytest.raises(ReplayError, match="was not written by `trtllm-replayssm build --runtime trtllm`"):
        load.check_engine(engine_dir)
    with pytest.raises(ReplayError, match=r"is no engine directory: it has no config\.json"):
        load.check_engine(tmp_path)
    (engine_dir / "rank0.engine").unlink()
    with pytest.raises(ReplayError, match=r"is no engine directory: it has no rank0\.engine"):
        load.check_engine(engine_dir)


def test_library_facts() -> None:
    facts = REAL_LIBRARY_FACTS()
    assert facts["version"] == library.info()["version"] and len(facts["sha256"]) == 64


def test_preload_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib.so"
    monkeypatch.setenv("TRTLLM_REPLAYSSM_LIBRARY", str(library))
    with pytest.raises(ReplayError, match=r"lib\.so does not exist; build it with `make lib`"):
        load.preload_environment()
    library.touch()
    given = {"LD_PRELOAD": f"/a.so {library}:/b.so", "HOME": "/h"}
    assert load.preload_environment(given) == {"LD_PRELOAD": f"{library}:/a.so:/b.so", "HOME": "/h"}
    assert load.preload_environment({})["LD_PRELOAD"] == str(library) and given["HOME"] == "/h"


def test_without_tensorrt_llm(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry says what to install."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("tensorrt_llm", "tensorrt")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("tensorrt_llm", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "trtllm_replayssm.trtllm.hybrid", raising=False)
    message = r"tensorrt_llm cannot be imported .*; install it with `pip install tensorrt_llm==1\.2\.1` \(Linux"
    entries: list[Any] = [
        lambda: build.build(checkpoint, tmp_path / "engine"),
        lambda: trtllm.ReplayHybridForCausalLM,
        lambda: SourceFileLoader("models", str(MODEL_FILE)).load_module(),
        lambda: requirement.module("functional"),
    ]
    for entry in entries:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(ReplayError, match=message):
                entry()
    with pytest.raises(ReplayError, match=r"tensorrt cannot be imported .*; it comes with tensorrt_llm: install it"):
        requirement.tensorrt()
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        trtllm.Other  # noqa: B018


def test_loading_without_tensorrt_llm(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    for entry in (load.model_runner_cpp, load.generation_session):
        with pytest.raises(ReplayError, match=r"pip install tensorrt_llm==1\.2\.1"):
            entry(engine_dir)
    with pytest.raises(ReplayError, match=r"pip install tensorrt_llm==1\.2\.1"):
        load.llm(engine_dir, tokenizer="x")


@pytest.mark.parametrize("version", ["1.3.0rc21", "0.21.0", "1.1.0"])
def test_another_release(llm: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(llm.llm, "__version__", version)
    with pytest.raises(ReplayError, match=rf"tensorrt_llm is {version}; the TensorRT backend of 1\.2\.1 is needed"):
        requirement.tensorrt_llm()


def test_release_without_the_backend(llm: Any) -> None:
    with pytest.raises(ReplayError, match=r"has no usable module graph_rewriting .*; the TensorRT backend of 1\.2\.1"):
        requirement.module("graph_rewriting")
