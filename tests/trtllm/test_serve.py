"""trtllm-serve over an engine directory, plugins preloaded, and one HTTP completion per request."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
from trtllm_cases import VOCAB_SIZE

from trtllm_replayssm.trtllm import load

START_SECONDS = 300


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer directory whose words are the numbers 0 .. VOCAB_SIZE - 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="2", pad_token="0", unk_token="0").save_pretrained(
        path
    )
    return path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ask(port: int, route: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, f"trtllm-serve ended with {server.returncode}:\n{log.read_text()[-3000:]}"
        try:
            ask(port, "/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise AssertionError(f"trtllm-serve was not up after {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def test_completions(engines: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    _, engine = engines("nemotron_h")
    options, log, port = tmp_path / "options.yaml", tmp_path / "log", free_port()
    options.write_text(load.extra_llm_options())
    command = ["trtllm-serve", str(engine), "--backend", "tensorrt", "--tokenizer", str(write_tokenizer(tmp_path)),
               "--port", str(port), "--extra_llm_api_options", str(options)]  # fmt: skip
    with open(log, "wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=load.preload_environment())
    try:
        wait_until_up(server, port, log)
        prompt = oracles.sequence(9, 1, VOCAB_SIZE)
        body = {"model": engine.name, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        first, second = (ask(port, "/v1/completions", body) for _ in range(2))
        assert first["usage"]["completion_tokens"] == 40
        assert first["choices"][0]["text"] == second["choices"][0]["text"] != ""
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
