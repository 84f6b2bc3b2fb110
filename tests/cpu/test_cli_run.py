"""`run`: text against a plain loop over transformers' own model, every source of prompts, `--decode both`, refusals."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import call, refused
from oracles import hf_model, tiny_hf_dir
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trtllm_replayssm.cli import request
from trtllm_replayssm.runtime import compare, torch_session

PROMPT = "import os\n"
OPTIONS = ("--max-new-tokens", 12, "--ignore-eos")


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_dir("byte", tmp_path_factory.mktemp("hf"), max_position_embeddings=64)


@pytest.fixture(scope="module")
def checkpoint(hf_dir: Path) -> Path:
    out = hf_dir.parent / "checkpoint"
    assert call(["convert", hf_dir, out, "--json"]) == 0
    return out


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


BOS = 1


def greedy_bytes(prompt: str, count: int, first: tuple[int, ...] = (BOS,)) -> bytes:
    """What transformers' model goes on with."""
    model, tokens = hf_model("byte", max_position_embeddings=64), [*first, *prompt.encode()]
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return bytes(tokens[-count:])


def run_json(argv: list[object], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert call(["run", *argv, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    data = json.loads(out)
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("decode", ["replay", "conventional"])
def test_text_is_the_models(checkpoint: Path, decode: str, capsys: pytest.CaptureFixture[str]) -> None:
    want = greedy_bytes(PROMPT, 12)
    assert call(["run", checkpoint, "--prompt", PROMPT, "--decode", decode, *OPTIONS]) == 0
    out, err = capsys.readouterr()
    assert out == want.decode("utf-8", "replace") + "\n"
    assert err.startswith("12 tokens in ") and err.count("\n") == 1
    data = run_json([checkpoint, "--prompt", PROMPT, "--decode", decode, *OPTIONS], capsys)
    (row,) = data["completions"]
    assert bytes(row["tokens"]) == want and row["finish_reason"] == "length" and row["prompt_tokens"] == 1 + len(PROMPT)
    assert data["window"] == (16 if decode == "replay" else 1) and data["dtype"] == data["state_dtype"] == "float32"
    assert row["text"] == want.decode("utf-8", "replace")


def test_several_prompts_in_batches(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["a", "import", "x = 1\n", "日本", "\x1b[2J"]
    argv = [checkpoint, *(word for p in prompts for word in ("--prompt", p)), *OPTIONS]
    rows = run_json([*argv, "--max-batch", 2], capsys)["completions"]
    for prompt, row in zip(prompts, rows, strict=True):
        assert row["prompt"] == prompt and bytes(row["tokens"]) == greedy_bytes(prompt, 12)
    assert call(["run", *argv]) == 0
    out = capsys.readouterr().out
    assert sorted(line for line in out.splitlines() if line.startswith("["))[:2] == ["[0] 'a'", "[1] 'import'"]
    assert "[4] '\\x1b[2J'" in out
    assert all(row["text"] in out for row in rows)


def test_prompts_from_files_and_stdin(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_bytes("é\n\nx\n".encode())
    (tmp_path / "many.jsonl").write_bytes('"b\\n"\r\n\r\n{"prompt": "c\u2028\x85"}\n'.encode())  # one line to JSON

    def stdin(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    def prompts(*argv: object) -> list[str]:
        rows = run_json([checkpoint, *argv, "--max-new-tokens", 1], capsys)["completions"]
        return [row["prompt"] for row in rows]

    stdin("ü\n".encode())
    files = ("--prompt-file", tmp_path / "one.txt", "--prompt-file", tmp_path / "many.jsonl", "--prompt-file", "-")
    assert prompts(*files, "--prompt", "a") == ["a", "é\n\nx\n", "b\n", "c\u2028\x85", "ü\n"]
    stdin(b"piped")
    assert prompts() == ["piped"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("no bytes below"))
    assert prompts() == ["no bytes below"]
    for argv in ([], ["--prompt-file", "-"], ["--prompt", "a", "--prompt-file", "-"]):
        stdin(b"")
        message = refused(["run", checkpoint, *argv], capsys)
        assert message == "the prompt on stdin is empty; write it there, or give --prompt TEXT or --prompt-file FILE"


def test_sampling_is_repeatable_and_follows_the_seed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*argv: object, rows: int = 1) -> list[list[int]]:
        prompts = ("--prompt", PROMPT) * rows
        data = run_json([checkpoint, *prompts, *OPTIONS, "--temperature", 1.5, *argv], capsys)
        return [row["tokens"] for row in data["completions"]]

    assert text("--seed", 5) == text("--seed", 5) != text("--seed", 6)
    assert text("--seed", 5, rows=2) == text("--seed", 5) + text("--seed", 6)
    assert text("--seed", 5, "--draft-tokens", 4) == text("--seed", 5)
    greedy = [list(greedy_bytes(PROMPT, 12))]
    assert text("--top-k", 1) == text("--top-p", 1e-9) == greedy != text("--top-k", 50, "--top-p", 0.99)


def test_drafts_change_no_text_and_are_counted(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv: list[object] = [checkpoint, "--prompt", "ab" * 9, "--max-new-tokens", 40, "--ignore-eos"]
    plain, fast = run_json(argv, capsys), run_json([*argv, "--draft-tokens", 3], capsys)
    (a,), (b,) = plain["completions"], fast["completions"]
    assert a["tokens"] == b["tokens"] and b["drafted"] > 0 and (a["drafted"], fast["draft_tokens"]) == (0, 3)
    assert call(["run", *argv, "--draft-tokens", 3]) == 0
    assert f"{b['accepted']} of {b['drafted']} draft tokens kept" in capsys.readouterr().err


@pytest.mark.parametrize("eos", ["none", "number", "list"])
def test_stops_at_the_end_token(copy: Path, eos: str, capsys: pytest.CaptureFixture[str]) -> None:
    want = list(greedy_bytes(PROMPT, 12, first=()))  # what is written below names no token to begin with
    first = want[4]
    path = copy / "generation_config.json"
    if eos == "none":
        path.unlink()  # then the model's own end token counts, which is 2
        assert 2 not in want
        expected = want
    else:
        path.write_text(json.dumps({"eos_token_id": first if eos == "number" else [255, first]}))
        expected = want[: want.index(first)]
    (row,) = run_json([copy, "--prompt", PROMPT, "--max-new-tokens", 12], capsys)["completions"]
    assert row["tokens"] == expected and row["finish_reason"] == ("length" if eos == "none" else "eos")


def test_stops_at_the_position_limit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [checkpoint, "--prompt", "x" * 59, "--max-new-tokens", 50, "--ignore-eos", "--draft-tokens", 2]
    (row,) = run_json(argv, capsys)["completions"]
    assert (len(row["tokens"]), row["finish_reason"]) == (4, "positions")
    assert call(["run", *argv]) == 0
    assert "; 1 text ended at the position limit" in capsys.readouterr().err


@pytest.mark.parametrize("drafts", [0, 3])
def test_both_agree(checkpoint: Path, drafts: int, capsys: pytest.CaptureFixture[str]) -> None:
    argv: list[object] = [checkpoint, "--prompt", PROMPT, "--prompt", "ab" * 9, "--decode", "both", *OPTIONS]
    argv += ["--draft-tokens", drafts, "--window", 5]
    data = run_json(argv, capsys)
    result = data["comparison"]
    assert result["ok"] and result["identical"] and len(result["rows"]) == 2
    assert bytes(result["rows"][0]["tokens"]) == greedy_bytes(PROMPT, 12)
    assert 0 < result["rows"][0]["state_difference"] < 1e-5
    assert call(["run", *argv]) == 0
    out, err = capsys.readouterr()
    assert "2 of 2 texts identical; every difference is rounding" in out and err == ""
    assert "[0] 12 tokens: texts identical; logits differ by at most" in out


def test_both_fails_where_rounding_does_not_explain(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[int] = []

    class Wrong(torch_session.TorchSession):
        """The second session of a comparison has other weights."""

        def __init__(self, model: Any, **options: Any) -> None:
            made.append(options["window"])
            config, weights = model
            scale = 1.0 if options["window"] == 1 else -0.5
            super().__init__((config, weights | {"lm_head.weight": weights["lm_head.weight"] * scale}), **options)

    monkeypatch.setattr(torch_session, "TorchSession", Wrong)
    argv: list[object] = [checkpoint, "--prompt", PROMPT, "--decode", "both", *OPTIONS]
    result = run_json(argv, capsys, code=1)["comparison"]
    (row,) = result["rows"]
    assert made == [1, 16] and not result["ok"] and not row["within_rounding"]
    assert bytes(row["tokens"]) == greedy_bytes(PROMPT, 12) and row["compared"] == 12
    assert row["first"]["position"] == 0 and row["first"]["conventional"] == row["tokens"][0]
    assert call(["run", *argv]) == 1
    out = capsys.readouterr().out
    assert "0 of 1 text identical; DIFFERENT beyond rounding" in out
    assert "first at token 0: conventional " in out and "NOT rounding" in out


def test_both_says_when_it_is_rounding(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.Rounding, "of", lambda *names: compare.Rounding(100.0, 100.0))
    original = torch_session.TorchSession._launch

    def noisy(self: Any, *args: Any) -> torch.Tensor:
        logits = original(self, *args)
        return logits + 3 * torch.randn(logits.shape) if self.state.spec.window > 1 else logits

    monkeypatch.setattr(torch_session.TorchSession, "_launch", noisy)
    argv: list[object] = [checkpoint, "--prompt", PROMPT, "--decode", "both", *OPTIONS]
    assert call(["run", *argv]) == 0
    out = capsys.readouterr().out
    assert "texts differ" in out and ": rounding;" in out and "every difference is rounding" in out
    assert call(["run", *argv, "--temperature", 1]) == 0
    assert ": rounding" not in capsys.readouterr().out  # of a draw, the gap of two logits says nothing


def test_a_terminal_gets_no_control_characters(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert call(["run", checkpoint, "--prompt", "q", "--temperature", 9, "--max-new-tokens", 60, "--ignore-eos"]) == 0
    out = capsys.readouterr().out
    assert len(out) > 20 and not any(ord(c) < 32 and c not in "\t\n" for c in out)


def with_tokenizer(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    return folder


def test_tokenizer_and_chat(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokenizer(copy)
    plain = run_json([copy, "--prompt", "<hi>", *OPTIONS], capsys)["completions"]
    chat = run_json([copy, "--prompt", "hi", "--chat", *OPTIONS], capsys)["completions"]
    assert plain[0]["tokens"] == chat[0]["tokens"] and (plain[0]["prompt_tokens"], chat[0]["prompt"]) == (4, "hi")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", 0], "--window is 0; it must be a whole number from 1 to 64"),
        (["--window", 65], "--window is 65"),
        (["--draft-tokens", 16], "--draft-tokens is 16; it must be a whole number from 0 to 15"),
        (["--draft-tokens", 17], "--draft-tokens is 17"),
        (["--draft-tokens", -1], "--draft-tokens is -1"),
        (["--max-new-tokens", 0], "--max-new-tokens is 0"),
        (["--max-batch", 0], "--max-batch is 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "inf"], "temperature is inf"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "nan"], "top_p is nan"),
        (["--top-p", 0], "top_p is 0.0"),
        (["--top-k", -1], "top_k is -1"),
        (["--seed", -1], "seed is -1"),
        (["--seed", 7], "--seed is 7 with --temperature 0, which takes the best token"),
        (["--top-k", 5], "--top-k is 5 with --temperature 0"),
        (["--top-p", 0.5], "--top-p is 0.5 with --temperature 0"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--device", "cuda:77"], "device is 'cuda:77'"),
        (["--state-dtype", "bfloat16", "--read-copy", "bf16"], "read_copy is bf16 with state_dtype bfloat16"),
        (["--chat"], "no chat template"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt", "x" * 63], "prompt 1 has 64 tokens; the model's position limit is 64"),
        (["--prompt-file", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["--prompt-file", "/proc"], "cannot read /proc: Is a directory"),
        (["--prompt-file", "a\0b"], "cannot read 'a\\x00b'"),
        (["--prompt-file", "{tmp}/deep.jsonl"], "deep.jsonl line 1 is no JSON"),
        (["--prompt-file", "/proc/self/mem"], "cannot read /proc/self/mem"),
        (["--prompt-file", "{tmp}/latin1"], "latin1 is not UTF-8: invalid continuation byte at byte 1"),
        (["--prompt-file", "{tmp}/empty"], "/empty is empty; it must hold a prompt"),
        (["--prompt-file", "{tmp}/lines.jsonl"], "lines.jsonl has no prompt; it must have one per line"),
        (["--prompt-file", "{tmp}/nothing.jsonl"], "nothing.jsonl line 2 is an empty prompt"),
        (["--prompt-file", "{tmp}/bad.jsonl"], "bad.jsonl line 2 is no JSON"),
        (["--prompt-file", "{tmp}/number.jsonl"], "number.jsonl line 1 has no prompt"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_bad_options_are_refused(
    checkpoint: Path, options: list[object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "deep.jsonl": b"[" * 100_000,
        "latin1": b"a\xe9b",
        "empty": b"",
        "lines.jsonl": b"\n",
        "nothing.jsonl": b'"a"\n{"prompt": ""}\n',
        "bad.jsonl": b'"a"\n{\n',
        "number.jsonl": b"3\n",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    argv = ["run", checkpoint, "--prompt", "a", *(str(o).replace("{tmp}", str(tmp_path)) for o in options)]
    for more in ([], ["--json"], ["--decode", "both"]):
        assert message in refused([*argv, *more], capsys)


@pytest.mark.parametrize("device", ["tpu", "xpu", "cuda:x", "meta"])
def test_a_refused_device_is_one_short_line(checkpoint: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["run", checkpoint, "--prompt", "a", "--device", device], capsys)
    assert message == f"device is '{device}'; it must be auto, cpu, cuda or cuda:N"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["conventional", "--window", 16], "--window is 16 with --decode conventional, which is window 1"),
        (["conventional", "--read-copy", "int8"], "--read-copy is int8 with --decode conventional, which reads the st"),
        (["both", "--window", 1], "--window is 1 with --decode both; that is conventional decoding against itself"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "/nowhere", "--prompt", "a", "--decode", *options]  # before anything is read
    for more in ([], ["--json"]):
        assert message in refused([*argv, *more], capsys)


def test_conventional_takes_options_that_agree_with_it(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv: list[object] = [checkpoint, "--prompt", PROMPT, "--decode", "conventional", *OPTIONS]
    bare, said = run_json(argv, capsys), run_json([*argv, "--window", 1, "--read-copy", "none"], capsys)
    assert bare["completions"] == said["completions"]
    assert (bare["window"], said["window"], said["read_copy"]) == (1, 1, "none")


def rewritten(name: str, **changes: object) -> Callable[[Path], Path]:
    def rewrite(folder: Path) -> Path:
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
        return folder

    return rewrite


def overwritten(name: str, data: bytes) -> Callable[[Path], Path]:
    def overwrite(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder

    return overwrite


def without(name: str) -> Callable[[Path], Path]:
    def remove(folder: Path) -> Path:
        (folder / name).unlink()
        return folder

    return remove


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d / "nowhere", "does not exist; make one with: trtllm-replayssm convert"),
        (lambda d: d / "config.json", "is not a directory"),
        (without("config.json"), "has no config.json"),
        (without("rank0.safetensors"), "rank0.safetensors"),
        (overwritten("config.json", b"{"), "config.json"),
        (overwritten("config.json", b"[]"), "config.json holds a list"),
        (overwritten("config.json", b"[" * 100_000), "config.json"),
        (overwritten("rank0.safetensors", b"\x10"), "rank0.safetensors"),
        (rewritten("config.json", vocab_size=99), "vocab_size"),
        (rewritten("generation_config.json", eos_token_id="stop"), "eos_token_id in"),
        (overwritten("generation_config.json", b"{"), "generation_config.json"),
        (overwritten("tokenizer.json", b"{"), "tokenizer.json"),
    ],
)
def test_bad_checkpoints_are_refused(
    copy: Path, damage: Callable[[Path], Path], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(["run", damage(copy), "--prompt", "a"], capsys)


def test_a_published_directory_is_told_to_convert(hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["run", hf_dir, "--prompt", "a"], capsys)
    assert f"convert it first with: trtllm-replayssm convert {hf_dir} OUT_DIR" in message


def test_no_prompt_on_a_terminal(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "no prompt; give --prompt, --prompt-file or text on stdin" in refused(["run", checkpoint], capsys)


def test_numbers_are_checked_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--window is 0" in refused(["run", "/nowhere", "--window", 0], capsys)
    assert request.position_limit([[1] * 5, [2] * 9], 10, 100) == 19
    assert request.position_limit([[1] * 5, [2] * 9], 10, 15) == 15
