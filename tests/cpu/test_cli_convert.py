"""`convert`: what it writes, what it prints, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import call, refused
from oracles import tiny_hf_dir
from safetensors.torch import load_file, save_file

from trtllm_replayssm.models.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_dir("byte", tmp_path_factory.mktemp("hf"))


@pytest.fixture
def hf_dir(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage, alone in its directory."""
    return shutil.copytree(published, tmp_path / "hf")


def changed_config(hf_dir: Path, **changes: object) -> Path:
    path = hf_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return hf_dir


def changed_tensors(hf_dir: Path, **changes: torch.Tensor | None) -> Path:
    """Replace tensors (None: leave out); ``__`` in a name stands for a dot."""
    path = hf_dir / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    return hf_dir


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_makes_a_checkpoint(hf_dir: Path, dtype: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    out = hf_dir.parent / "deep" / "out"
    assert call(["convert", hf_dir, out, *([] if dtype is None else ["--dtype", dtype])]) == 0
    shown = capsys.readouterr()
    assert f"checkpoint written to {out}" in shown.out and "nemotron_h" in shown.out and shown.err == ""
    assert {p.name for p in out.iterdir()} >= {"config.json", "rank0.safetensors"}
    config, weights = load_checkpoint(out)
    assert config.dtype == (dtype or "float32")  # as published
    assert str(weights["embedding.weight"].dtype) == f"torch.{config.dtype}"
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("named", "options", "note"),
    [
        (
            "float64",
            [],
            "config.json names dtype float64, which is none of bfloat16, float16, float32: the weights become",
        ),
        ("torch.float8_e4m3fn", ["--json"], "config.json names dtype float8_e4m3fn, which is none of "),
        (None, [], "config.json names no dtype: the weights become bfloat16; --dtype takes another"),
        ("float64", ["--dtype", "float32"], ""),
        ("float16", [], ""),
    ],
)
def test_a_dtype_that_is_not_kept_is_said(
    hf_dir: Path, named: str | None, options: list[str], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_config(hf_dir, torch_dtype=named, dtype=None)
    assert call(["convert", hf_dir, hf_dir.parent / "out", *options]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"trtllm-replayssm: note: {note}") if note else err == ""
    assert err.count("\n") == bool(note)


def test_json(hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = hf_dir.parent / "out"
    assert call(["convert", hf_dir, out, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["family"] == "nemotron_h" and summary["output"] == str(out)
    assert summary["layers"] == {"mamba2": 3, "mlp": 2, "attention": 1} and summary["parameters"] > 10_000


def test_overwrite_only_when_asked(hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = hf_dir.parent / "out"
    assert call(["convert", hf_dir, out]) == 0
    before = (out / "config.json").read_bytes()
    assert "exists" in refused(["convert", hf_dir, out, "--dtype", "bfloat16"], capsys)
    assert (out / "config.json").read_bytes() == before
    assert call(["convert", hf_dir, out, "--dtype", "bfloat16", "--overwrite"]) == 0
    assert load_checkpoint(out)[0].dtype == "bfloat16"
    other = hf_dir.parent / "notes"
    other.mkdir()
    (other / "diary.txt").write_text("keep me")
    refused(["convert", hf_dir, other, "--overwrite"], capsys)
    assert (other / "diary.txt").read_text() == "keep me"


def truncated(hf_dir: Path) -> Path:
    path = hf_dir / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    return hf_dir


def emptied(hf_dir: Path) -> Path:
    (hf_dir / "model.safetensors").write_bytes(b"")
    return hf_dir


def garbled(hf_dir: Path) -> Path:
    (hf_dir / "config.json").write_text("{")
    return hf_dir


def stripped(hf_dir: Path) -> Path:
    (hf_dir / "model.safetensors").unlink()
    return hf_dir


NORM = "backbone__norm_f__weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: changed_config(d, architectures=["LlamaForCausalLM"], model_type="llama"), "llama"),
        (lambda d: changed_config(d, hidden_size=48), "shape"),
        (lambda d: changed_config(d, vocab_size="many"), "vocab_size"),
        (garbled, "config.json"),
        (truncated, "model.safetensors"),
        (emptied, "model.safetensors"),
        (stripped, "safetensors"),
        (lambda d: changed_tensors(d, **{NORM: None}), "norm_f.weight"),
        (lambda d: changed_tensors(d, **{NORM: torch.ones(31)}), "norm_f.weight"),
        (lambda d: changed_tensors(d, backbone__layers__0__mixer__surprise=torch.ones(3)), "surprise"),
        (lambda d: d / "nowhere", "nowhere"),
        (lambda d: d / "config.json", "config.json"),
        (lambda d: d / "config.json" / "below", "below"),
    ],
    ids=[
        "unknown architecture",
        "config against tensors",
        "config value",
        "config is no JSON",
        "truncated safetensors",
        "empty safetensors",
        "no safetensors",
        "missing tensor",
        "misshapen tensor",
        "surplus tensor",
        "no such directory",
        "a file",
        "below a file",
    ],
)
def test_bad_input_leaves_nothing(
    hf_dir: Path, damage: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = damage(hf_dir)  # type: ignore[operator]
    out = hf_dir.parent / "new" / "out"
    for options in ([], ["--json"]):
        assert message in refused(["convert", source, out, *options], capsys)
    assert sorted(p.name for p in hf_dir.parent.iterdir()) == ["hf"]


@pytest.mark.parametrize("place", ["config.json/out", "/proc/replayssm-out", "/proc/1/replayssm/out"])
def test_places_that_cannot_be_written(hf_dir: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path(place) if place.startswith("/") else hf_dir / place
    assert out.name in refused(["convert", hf_dir, out], capsys) or "config.json" in place
    assert not out.exists()


def test_interrupt_leaves_nothing(hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_replayssm.models import checkpoint

    made = []

    def interrupted(self: object, name: str, dtype: torch.dtype) -> torch.Tensor:
        made.append(name)
        if len(made) == 5:
            raise KeyboardInterrupt
        return original(self, name, dtype)

    original = checkpoint.HFWeights.make
    monkeypatch.setattr(checkpoint.HFWeights, "make", interrupted)
    assert call(["convert", hf_dir, hf_dir.parent / "new" / "out"]) == 130
    assert len(made) == 5 and sorted(p.name for p in hf_dir.parent.iterdir()) == ["hf"]
