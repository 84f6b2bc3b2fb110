"""Training parts of examples/tiny: scans, optimisation, corpus, checkpoint directories and the command line.

Oracle of the scans: the recurrence taken one token at a time, in float64, values and every gradient; the two differ by
the order of summation alone, expected 1e-14 relative, allowed 1e-10. The models themselves are compared with
transformers in test_trained_models.py.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trtllm_replayssm.errors import ReplayError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny import blocks, checkpoint, corpus, kimi_linear, nemotron_h, qwen3_5, scans, training  # noqa: E402

train_tiny = importlib.import_module("train_tiny")

SMALL: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        **kimi_linear.CONFIG,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "intermediate_size": 48,
        "first_k_dense_replace": 2,
    },
    "nemotron_h": {
        **nemotron_h.CONFIG,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
    },
    "qwen3_5": {
        **qwen3_5.CONFIG,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
    },
}


def random_leaf(*shape: int, seed: int) -> torch.Tensor:
    """Normal float64 leaf that asks for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def mamba2_inputs(tokens: int, decay: float) -> list[torch.Tensor]:
    """x, dt, A, B, C, D with 6 heads in 2 groups; dt A reaches about -decay."""
    x, B, C = (random_leaf(2, tokens, n, p, seed=i) for i, (n, p) in enumerate([(6, 8), (2, 16), (2, 16)]))
    dt = (random_leaf(2, tokens, 6, seed=3).detach().abs() * 0.5).requires_grad_()
    A = (-decay * random_leaf(6, seed=4).detach().abs() - 0.1).requires_grad_()
    return [x, dt, A, B, C, random_leaf(6, seed=5)]


def delta_inputs(tokens: int, decay: float, same_key: bool) -> list[torch.Tensor]:
    """q, k (length 1), v, g, beta with 3 heads; ``same_key`` repeats one key with beta near 1, the hardest system."""
    q, v = random_leaf(2, tokens, 3, 16, seed=0), random_leaf(2, tokens, 3, 8, seed=1)
    k = random_leaf(2, tokens, 3, 16, seed=2).detach()
    if same_key:
        k = k[:, :1].expand_as(k) + 1e-3 * k
    k = blocks.l2_normalise(k).requires_grad_()
    g = (-decay * random_leaf(2, tokens, 3, seed=3).detach().abs()).requires_grad_()
    beta = (random_leaf(2, tokens, 3, seed=4).detach() + (4.0 if same_key else 0.0)).sigmoid().requires_grad_()
    return [q, k, v, g, beta]


def assert_same_function(first: torch.Tensor, second: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Values and gradients of a random weighted sum agree to 1e-10 relative."""
    weights = random_leaf(*first.shape, seed=9).detach()
    pairs = [(first, second)]
    pairs += zip(
        torch.autograd.grad((first * weights).sum(), inputs),
        torch.autograd.grad((second * weights).sum(), inputs),
        strict=True,
    )
    for a, b in pairs:
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= 1e-10 * b.norm().clamp(min=1e-3)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 8), (8, 8), (37, 8), (130, 64)])
@pytest.mark.parametrize("decay", [0.0, 1.0, 200.0], ids=["none", "usual", "strong"])
def test_mamba2_chunked_is_the_recurrence(tokens: int, chunk: int, decay: float) -> None:
    inputs = mamba2_inputs(tokens, decay)
    assert_same_function(scans.mamba2_chunked(*inputs, chunk), scans.mamba2_sequential(*inputs), inputs)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 8), (8, 8), (37, 8), (130, 64)])
@pytest.mark.parametrize("decay", [0.0, 1.0, 200.0], ids=["none", "usual", "strong"])
@pytest.mark.parametrize("same_key", [False, True])
def test_gated_delta_chunked_is_the_recurrence(tokens: int, chunk: int, decay: float, same_key: bool) -> None:
    inputs = delta_inputs(tokens, decay, same_key)
    assert_same_function(scans.gated_delta_chunked(*inputs, chunk), scans.gated_delta_sequential(*inputs), inputs)


@pytest.mark.parametrize(("tokens", "chunk", "block"), [(1, 8, 8), (8, 8, 4), (37, 8, 2), (130, 64, 8)])
@pytest.mark.parametrize("decay", [0.0, 1.0, 200.0], ids=["none", "usual", "strong"])
@pytest.mark.parametrize("same_key", [False, True])
def test_kimi_delta_chunked_is_the_recurrence(
    tokens: int, chunk: int, block: int, decay: float, same_key: bool
) -> None:
    inputs = delta_inputs(tokens, decay, same_key)
    inputs[3] = (-decay * random_leaf(2, tokens, 3, 16, seed=3).detach().abs()).requires_grad_()
    got = scans.kimi_delta_chunked(*inputs, chunk, block)
    assert_same_function(got, scans.gated_delta_sequential(*inputs), inputs)


def test_scan_comparison_has_teeth() -> None:
    inputs = delta_inputs(37, 1.0, False)
    good = scans.gated_delta_sequential(*inputs)
    changed = [value.clone() for value in inputs]
    changed[3] = changed[3] - torch.eye(37, dtype=torch.float64)[20].view(1, 37, 1) * 1e-6
    with pytest.raises(AssertionError):
        assert_same_function(scans.gated_delta_chunked(*changed, 8), good, inputs)


def test_conv_matches_torch() -> None:
    x, weight, bias = random_leaf(2, 9, 5, seed=0), random_leaf(5, 1, 4, seed=1), random_leaf(5, seed=2)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    for b in (bias, None):
        want = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight, b, groups=5)).transpose(1, 2)
        assert torch.allclose(scans.causal_conv_silu(x, weight, b), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", sorted(SMALL))
def test_training_reduces_loss(arch: str) -> None:
    torch.manual_seed(0)
    model = checkpoint.build(SMALL[arch])
    text = torch.tensor(list(b"def area(width, height):\n    return width * height\n\n" * 40), dtype=torch.uint8)
    windows = corpus.random_windows(text, 4, 64, torch.Generator().manual_seed(1))
    optimizer = training.make_optimizer(model, 3e-3)
    first = training.window_loss(model, windows)
    first.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []
    optimizer.step()
    assert training.window_loss(model, windows).item() < first.item() - 1e-3
    lines: list[str] = []
    options = training.TrainOptions(steps=40, batch_tokens=256, context=64, lr=1e-2)
    result = training.train(model, text, options, lines.append)
    assert (result.steps, result.tokens) == (40, 40 * 256)
    assert result.train_bits < 0.8 * first.item() / 0.6931
    assert training.held_out_bits(model, text, 64) < 3.0
    assert lines and "bits per byte" in lines[-1]


def test_minutes_end_training() -> None:
    model = checkpoint.build(SMALL["qwen3_5"])
    text = torch.arange(2000, dtype=torch.int64).remainder(200).to(torch.uint8)
    options = training.TrainOptions(steps=10**6, minutes=0.02, batch_tokens=64, context=64)
    result = training.train(model, text, options, lambda line: None)
    assert 0 < result.steps < 10**6
    assert result.seconds < 20


def test_schedules() -> None:
    shares = [training.lr_share(step, step / 1000, 1000) for step in range(1001)]
    assert shares[0] < 0.02 and max(shares) > 0.95 and abs(shares[-1] - training.FINAL_LR_SHARE) < 1e-9
    assert all(a > b for a, b in itertools.pairwise(shares[100:]))
    assert [training.stage_context(p, 4096) for p in (0.0, 0.29, 0.3, 0.7, 1.0)] == [1024, 1024, 2048, 4096, 4096]


def test_corpus_split(tmp_path: Path) -> None:
    names = [f"pkg/m{i}.py" for i in range(64)]
    for name in [*names, "test/a.py", "pkg/tests/b.py", "site-packages/c.py", "_sysconfigdata_x.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "pkg/zero.py").write_bytes(b"a\0b")
    (tmp_path / "pkg/notes.txt").write_text("no")
    text = corpus.load_corpus(tmp_path)
    assert sorted(text.train_files + text.held_out_files) == sorted(names)
    assert text.held_out_files and all(corpus.is_held_out(name) for name in text.held_out_files)
    stream = bytes(text.held_out.tolist())
    assert stream == b"".join(f"# {name}\n".encode() + b"\0" for name in text.held_out_files)
    # The side depends on the path alone, so these are on the same side in every Python version.
    assert corpus.is_held_out("json/decoder.py") is False and corpus.is_held_out("json/tool.py") is True


def test_windows_cover_the_text_once() -> None:
    stream = torch.arange(100, dtype=torch.uint8)
    cut = corpus.cut_windows(stream, 16)
    assert torch.cat([window[1:] for window in cut]).tolist() == list(range(1, 100))
    pieces = corpus.excerpt(stream, 4, 9)
    assert pieces.shape == (4, 10) and pieces[0, 0] == 0 and pieces[-1, -1] == 99


def test_bits_per_byte_of_a_uniform_model() -> None:
    model = checkpoint.build(SMALL["nemotron_h"])
    torch.nn.init.zeros_(model.get_parameter("lm_head.weight"))
    stream = torch.arange(100, dtype=torch.uint8)
    assert training.held_out_bits(model, stream, 16) == pytest.approx(8.0, abs=1e-5)


def test_generation_stops_at_a_separator() -> None:
    class Next(torch.nn.Module):
        """Says that byte n is followed by n + 1, and byte 104 by a separator."""

        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.where(tokens == 104, 0, tokens + 1), 256).float()

    assert training.generate(Next(), b"a", 3) == b"bcd"
    assert training.generate(Next(), b"a", 50) == b"bcdefgh"
    drawn = [training.generate(Next(), b"a", 8, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("arch", sorted(SMALL))
def test_directory_round_trip(arch: str, tmp_path: Path) -> None:
    model = checkpoint.build(SMALL[arch])
    checkpoint.round_weights(model)
    target = tmp_path / "m"
    for _ in range(2):  # the second time replaces the first
        checkpoint.check_target(target)
        checkpoint.save_directory(model, target, "card\n")
    assert sorted(path.name for path in target.iterdir()) == sorted(checkpoint.FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    again = checkpoint.load(target)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert json.loads((target / "config.json").read_text()) == SMALL[arch]


def test_directory_errors(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="model_type is 'gpt2'; it must be one of nemotron_h, qwen3_5_text"):
        checkpoint.build({"model_type": "gpt2"})
    with pytest.raises(ReplayError, match="cannot be read"):
        checkpoint.load(tmp_path)
    model = checkpoint.build(SMALL["qwen3_5"])
    target = tmp_path / "m"
    checkpoint.save_directory(model, target, "card\n")
    changed = copy.deepcopy(SMALL["qwen3_5"]) | {"intermediate_size": 64}
    (target / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ReplayError, match=r"does not match its config\.json"):
        checkpoint.load(target)
    weights = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ReplayError, match="cannot be read"):
        checkpoint.load(target)
    (target / "mine.txt").write_text("keep")
    with pytest.raises(ReplayError, match=r"which holds 'mine\.txt'"):
        checkpoint.check_target(target)


@pytest.fixture
def folder_of_sources(tmp_path: Path) -> Path:
    """64 small files, some on each side of the split."""
    folder = tmp_path / "src"
    folder.mkdir()
    for i in range(64):
        (folder / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    return folder


@pytest.mark.parametrize("arch", sorted(SMALL))
def test_command_writes_a_checkpoint(
    arch: str, tmp_path: Path, folder_of_sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(checkpoint.CONFIGS, arch, SMALL[arch])
    arguments = ["--arch", arch, "--out", str(tmp_path / "m"), "--data", str(folder_of_sources), "--device", "cpu"]
    arguments += ["--steps", "3", "--batch-tokens", "256", "--context", "64", "--sample-bytes", "4"]
    assert train_tiny.main(arguments) == 0
    first = (tmp_path / "m" / "model.safetensors").read_bytes()
    shown = capsys.readouterr()
    page = (tmp_path / "m" / "README.md").read_text()
    for part in (
        "| optimiser steps | 3 |",
        "| bytes trained on | 768 (",
        "held-out bits per byte, all of it",
        f"--arch {arch} --steps 3 --seed 0 --batch-tokens 256 --context 64 --out",
    ):
        assert part in page
    assert "held-out bits per byte" in shown.out and "step 3" in shown.err
    assert train_tiny.main(arguments) == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == first, "the same seed must give the same weights"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--minutes", "-1"], "--minutes is -1.0; it must be over 0"),
        (["--context", "4"], "--context is 4; it must be at least 8"),
        (["--batch-tokens", "16"], "--batch-tokens is 16; it must be at least --context"),
        (["--lr", "nan"], "--lr is nan; it must be a number over 0"),
        (["--device", "abacus"], "--device is 'abacus'; it must be cpu, cuda or cuda:N"),
        (["--sample-bytes", "-1"], "--sample-bytes is -1; it must be at least 0"),
        (["--data", "no-such-folder"], "--data is 'no-such-folder'; it must be a folder of .py files"),
        (["--lr", "1e30"], "use a smaller --lr"),
    ],
)
def test_command_refuses(
    extra: list[str],
    message: str,
    tmp_path: Path,
    folder_of_sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setitem(checkpoint.CONFIGS, "qwen3_5", SMALL["qwen3_5"])
    base = ["--arch", "qwen3_5", "--out", str(tmp_path / "m"), "--data", str(folder_of_sources), "--device", "cpu"]
    base += ["--steps", "5", "--batch-tokens", "256", "--context", "64", "--sample-bytes", "0"]
    assert train_tiny.main(base + extra) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("train_tiny: error: ") and message in error
    assert not (tmp_path / "m").exists()


def test_command_refuses_an_empty_text_and_a_file_as_target(
    tmp_path: Path, folder_of_sources: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    base = ["--arch", "qwen3_5", "--device", "cpu"]
    assert train_tiny.main([*base, "--out", str(tmp_path / "m"), "--data", str(tmp_path / "empty")]) == 2
    assert "0 training and 0 held-out files" in capsys.readouterr().err
    assert train_tiny.main([*base, "--out", str(tmp_path / "file"), "--data", str(folder_of_sources)]) == 2
    assert "a file; it must be a folder to write" in capsys.readouterr().err
