"""convert and load_checkpoint: what the directory holds, what TensorRT-LLM reads of it, that failures leave nothing.

Oracle for the weight file: the safetensors library reads what our writer wrote. For the top level of config.json: the
key names that TensorRT-LLM's C++ runtime reads, with the dimensions of the tiny models.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.models import checkpoint
from trtllm_replayssm.models.checkpoint import convert, load_checkpoint, read_checkpoint_config, trtllm_config
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import keeps_float32
from trtllm_replayssm.models.hf import HFWeights, read_hf_config
from trtllm_replayssm.models.weight_files import write_tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory per kind, as transformers saves it. Not to be changed."""
    return {kind: oracles.tiny_hf_dir(kind, tmp_path_factory.mktemp(kind)) for kind in (*oracles.KINDS, "byte")}


@pytest.fixture
def converted(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A bf16 checkpoint directory of the tiny Nemotron-H."""
    convert(saved["nemotron_h"], tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", oracles.KINDS)
def test_round_trip(saved: dict[str, Path], tmp_path: Path, kind: str, dtype: str) -> None:
    out = tmp_path / "new" / "deep" / "checkpoint"
    summary = convert(saved[kind], out, dtype=dtype)
    config, weights = load_checkpoint(out)
    published = read_hf_config(saved[kind])
    assert config == dataclasses.replace(published, dtype=dtype) == read_checkpoint_config(out)
    made = HFWeights(saved[kind], published)
    for name in made:
        kept = torch.float32 if keeps_float32(name) else getattr(torch, dtype)
        assert torch.equal(weights[name], made.make(name, kept)), name
        assert weights[name].dtype == kept
    assert summary["tensors"] == len(weights) == len(list(made))
    assert summary["parameters"] == sum(t.numel() for t in weights.values())
    assert summary["bytes"] == (out / "rank0.safetensors").stat().st_size
    assert (summary["family"], summary["dtype"], summary["output"]) == (kind, dtype, str(out))
    assert summary["copied"] == ["generation_config.json"] and (out / "generation_config.json").is_file()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(out.parent.stat().st_mode)


def test_per_head_parameters_stay_exact_in_bfloat16(saved: dict[str, Path], converted: Path) -> None:
    published = load_file(saved["nemotron_h"] / "model.safetensors")
    _, weights = load_checkpoint(converted)
    for name in ("A_log", "D", "dt_bias"):
        exact = published[f"backbone.layers.0.mixer.{name}"]
        assert torch.equal(weights[f"layers.0.mixer.{name}"], exact)
        assert not torch.equal(exact.bfloat16().float(), exact)


def test_file_is_aligned_and_readable_by_the_library(converted: Path) -> None:
    path = converted / "rank0.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    header.pop("__metadata__")
    assert length % 8 == 0
    for entry in header.values():
        assert entry["data_offsets"][0] % (4 if entry["dtype"] == "F32" else 2) == 0


def test_top_level_is_what_tensorrt_llm_reads(converted: Path) -> None:
    data = json.loads((converted / "config.json").read_text())
    config = read_checkpoint_config(converted)
    assert data["architecture"] == "RecurrentGemmaForCausalLM"
    assert data["layer_types"] == ["recurrent", "recurrent", "attention", "recurrent"]
    expected = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "vocab_size": 97,
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 8,
        # Room for our slots (test_trtllm_budget.py): 6,784 bytes in pools of 192 * state_size and 224 * (kernel - 1).
        "state_size": 36,
        "conv_kernel": 6,
        "rnn_hidden_size": 48,
        "rnn_head_size": 8,
        "rnn_conv_dim_size": 112,
        "state_dtype": "float32",
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    assert {key: data[key] for key in expected} == expected
    assert data["replayssm"] == {"format_version": 1, "window": 16, **config.to_dict()}


def test_attention_free_and_rotary_configs(saved: dict[str, Path]) -> None:
    hybrid = read_hf_config(saved["nemotron_h"])
    no_heads = {"num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": 0}
    plain = dataclasses.replace(hybrid, layers=("mamba2", "mlp"), **no_heads)
    data = trtllm_config(plain)
    assert (data["architecture"], data["layer_types"]) == ("MambaForCausalLM", ["recurrent"])
    assert (data["num_attention_heads"], data["head_size"]) == (1, 32)
    rotary = trtllm_config(read_hf_config(saved["qwen3_5"]), window=5)
    assert (rotary["position_embedding_type"], rotary["rotary_pct"]) == ("rope_gpt_neox", 0.25)
    assert (rotary["rnn_hidden_size"], rotary["rnn_head_size"], rotary["state_size"]) == (32, 8, 39)
    assert rotary["replayssm"]["window"] == 5


def test_load_casts_matrices_alone(converted: Path) -> None:
    config, stored = load_checkpoint(converted)
    same, wide = load_checkpoint(converted, dtype="float32")
    assert same == config and config.dtype == "bfloat16"
    for name, tensor in wide.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[name].float())
    _, double = load_checkpoint(converted, dtype="float64")
    assert double["embedding.weight"].dtype == torch.float64 and double["final_norm.weight"].dtype == torch.float32
    with pytest.raises(ReplayError, match="dtype is 'int8'; it must be one of bfloat16, float16, float32, float64"):
        load_checkpoint(converted, dtype="int8")


def test_progress_and_text_files(saved: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved["byte"], source)
    (source / "tokenizer.json").write_text("{}")
    (source / "unrelated.bin").write_text("x")
    calls: list[tuple[int, int, str]] = []
    summary = convert(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert summary["copied"] == ["generation_config.json", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        ["config.json", "rank0.safetensors", "generation_config.json", "tokenizer.json"]
    )
    count = summary["tensors"]
    assert [done for done, _, _ in calls] == list(range(count + 1))
    assert {total for _, total, _ in calls} == {count} and calls[-1][2] == ""


def test_existing_output(saved: dict[str, Path], tmp_path: Path, converted: Path) -> None:
    with pytest.raises(ReplayError, match=r"exists; choose another directory or overwrite it \(--overwrite\)"):
        convert(saved["qwen3_5"], converted)
    assert read_checkpoint_config(converted).family == "nemotron_h"
    convert(saved["qwen3_5"], converted, overwrite=True)
    assert read_checkpoint_config(converted).family == "qwen3_5"
    (tmp_path / "empty").mkdir()
    convert(saved["qwen3_5"], tmp_path / "empty")
    for other in (saved["qwen3_5"], tmp_path):
        before = sorted(other.iterdir())
        with pytest.raises(ReplayError, match="is not a checkpoint directory of this package; it is not overwritten"):
            convert(saved["qwen3_5"], other, overwrite=True)
        assert sorted(other.iterdir()) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReplayError, match="file exists"):
        convert(saved["qwen3_5"], tmp_path / "file")


def test_failures_leave_nothing(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved["nemotron_h"], source)
    tensors = load_file(source / "model.safetensors")
    tensors["backbone.norm_f.weight"][0] = torch.inf
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ReplayError, match="NaN or infinite"):
        convert(source, tmp_path / "a" / "b" / "out")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(ReplayError, match="out cannot be written: No space left on device"):
        convert(saved["nemotron_h"], tmp_path / "a" / "out")

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(saved["nemotron_h"], tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_an_output_that_holds_the_input_is_not_overwritten(
    saved: dict[str, Path], converted: Path, tmp_path: Path
) -> None:
    """--overwrite removes the old checkpoint: it must not remove what is being read, by whatever name."""
    deep = shutil.copytree(saved["qwen3_5"], converted / "sources" / "hf")
    (tmp_path / "link").symlink_to(deep)
    for source in (deep, tmp_path / "link", converted / "sources" / ".." / "sources" / "hf"):
        with pytest.raises(ReplayError, match=r"holds the input .*; overwriting would delete it"):
            convert(source, converted, overwrite=True)
    assert (deep / "model.safetensors").is_file() and read_checkpoint_config(converted).family == "nemotron_h"


def test_outputs_that_are_no_place_for_a_directory(saved: dict[str, Path], converted: Path, tmp_path: Path) -> None:
    for name, target in (("link", converted), ("dangling", tmp_path / "nowhere")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(ReplayError, match=f"{name} is a symbolic link; give the directory itself"):
            convert(saved["qwen3_5"], tmp_path / name, overwrite=True)
    with pytest.raises(ReplayError, match="has a zero byte in its name"):
        convert(saved["qwen3_5"], f"{tmp_path}/a\0b")
    with pytest.raises(ReplayError, match="/ exists; choose another directory"):
        convert(saved["qwen3_5"], "/")
    assert read_checkpoint_config(converted).family == "nemotron_h" and not (tmp_path / "nowhere").exists()


def test_bad_arguments(saved: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="dtype is 'int8'; it must be one of bfloat16, float16, float32"):
        convert(saved["nemotron_h"], tmp_path / "out", dtype="int8")
    with pytest.raises(ReplayError, match="nowhere is not a directory; give one that holds a downloaded Hugging"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReplayError, match=r"out cannot be made: .*file is not a directory"):
        convert(saved["nemotron_h"], tmp_path / "file" / "out")
    with pytest.raises(ReplayError, match="xxx cannot be written: File name too long"):
        convert(saved["nemotron_h"], tmp_path / "new" / ("x" * 300))
    assert not (tmp_path / "new").exists()


def edit(directory: Path, **changes: Any) -> None:
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**data, **changes}))


def model(directory: Path, **changes: Any) -> dict[str, Any]:
    return {**json.loads((directory / "config.json").read_text())["replayssm"], **changes}


CONFIG_ERRORS = {
    "hidden": (lambda d: {"hidden_size": 64}, "hidden_size is 64; the replayssm object implies 32"),
    "no object": (lambda d: {"replayssm": None}, "has no replayssm object; make a checkpoint directory with"),
    "version": (lambda d: {"replayssm": model(d, format_version=2)}, "format_version is 2; this version reads 1"),
    "window": (lambda d: {"replayssm": model(d, window=65)}, "replayssm: window is 65"),
    "field": (lambda d: {"replayssm": model(d, layers=[])}, "replayssm: layers is empty"),
}


@pytest.mark.parametrize("case", CONFIG_ERRORS)
def test_config_errors(converted: Path, case: str) -> None:
    change, message = CONFIG_ERRORS[case]
    edit(converted, **change(converted))
    with pytest.raises(ReplayError, match=message):
        load_checkpoint(converted)


def test_weight_errors(converted: Path, tmp_path: Path) -> None:
    path = converted / "rank0.safetensors"
    good = load_file(path)
    name = "layers.0.mixer.in_proj.weight"
    cases = [
        ({k: v for k, v in good.items() if k != name}, f"weight {name} is missing"),
        ({**good, "extra": torch.zeros(1)}, "weight extra is not one that the config has"),
        ({**good, name: good[name][1:].contiguous()}, rf"{name} has shape \[165, 32\]; the config implies \[166, 32\]"),
        ({**good, name: good[name].float()}, f"weight {name} is torch.float32; the config implies torch.bfloat16"),
    ]
    for tensors, message in cases:
        save_file(tensors, path)
        with pytest.raises(ReplayError, match=message):
            load_checkpoint(converted)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ReplayError, match=r"rank0\.safetensors is not a whole safetensors file"):
        load_checkpoint(converted)
    path.unlink()
    with pytest.raises(ReplayError, match=r"has no rank0\.safetensors"):
        load_checkpoint(converted)
    (converted / "config.json").unlink()
    with pytest.raises(ReplayError, match=r"has no config\.json"):
        load_checkpoint(converted)
    with pytest.raises(ReplayError, match="gone is not a directory; give one that `trtllm-replayssm convert` made"):
        load_checkpoint(tmp_path / "gone")


def test_writer_refuses_what_was_not_declared(tmp_path: Path) -> None:
    for tensors in ([("b", torch.zeros(2))], [("a", torch.zeros(3))], [("a", torch.zeros(2).half())], []):
        with pytest.raises(ValueError):
            write_tensors(tmp_path / "f", {"a": (2,)}, {"a": "float32"}, tensors)


def test_config_object_is_complete(converted: Path) -> None:
    """Every field of HybridConfig is stored, so that a default that changes later changes no checkpoint."""
    stored = json.loads((converted / "config.json").read_text())["replayssm"]
    assert {f.name for f in dataclasses.fields(HybridConfig)} <= set(stored)


def test_an_object_of_before_a_field_came_has_its_default(converted: Path) -> None:
    """Checkpoints that were written when HybridConfig had no latent attention and one gate load as ever."""
    config, weights = load_checkpoint(converted)
    newer = ("gate", "gate_lower_bound", *(f.name for f in dataclasses.fields(HybridConfig) if "latent" in f.name))
    edit(converted, replayssm={k: v for k, v in model(converted).items() if k not in newer})
    again, same = load_checkpoint(converted)
    assert again == config and set(same) == set(weights)
    assert len(newer) > 4 and not set(newer) & set(model(converted))
