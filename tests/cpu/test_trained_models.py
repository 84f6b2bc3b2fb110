"""The shipped trained checkpoints under examples/models.

Oracles: transformers' own classes in fp32 (logits of held-out text, and greedy bytes decoded with their cache), and
the figures of each model card. Weights are bf16 values in every comparison, so differences come from fp32 summation
order alone: logits of spread 6 differ by about 2e-5; allowed 5e-4. The held-out text is that of the running Python;
where it is the card's text (same digest) the card's bits per byte must come out to 0.001, else within 15 %.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from tiny import card, checkpoint, corpus, training  # noqa: E402

MODELS = {"kimi_linear": "tiny-kimi-linear", "nemotron_h": "tiny-nemotron-h", "qwen3_5": "tiny-qwen3_5"}
MAX_BYTES = 12_000_000
MAX_TOTAL_BYTES = 36_000_000
LOGIT_TOLERANCE = 5e-4
SAME_TEXT_BITS = 1e-3
OTHER_TEXT_SHARE = 0.15
#: Untrained: 8. One byte predicted from the two before it: about 3.
MAX_BITS = 1.1
KIMI_DELTA = {"A_log", "dt_bias", "o_norm.weight"} | {
    f"{part}.weight"
    for part in (
        *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "o_proj"),
        *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj"),
    )
}
MAMBA2 = {"A_log", "D", "conv1d.bias", "conv1d.weight", "dt_bias", "in_proj.weight", "norm.weight", "out_proj.weight"}


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    """The running Python's standard library."""
    return corpus.load_corpus()


@pytest.fixture(scope="module")
def pieces(text: corpus.Corpus) -> list[torch.Tensor]:
    """The excerpt that the card gives a figure for."""
    return list(corpus.excerpt(text.held_out, card.EXCERPT_PIECES, card.EXCERPT_LENGTH))


def folder(arch: str) -> Path:
    """Checkpoint directory of an architecture."""
    return ROOT / "examples" / "models" / MODELS[arch]


def card_row(arch: str, name: str) -> str:
    """Value of one row of the model card's table."""
    page = (folder(arch) / "README.md").read_text(encoding="utf-8")
    match = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", page, re.MULTILINE)
    assert match, f"the card of {MODELS[arch]} has no row {name!r}"
    return match.group(1)


def tensors_of(arch: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    with safe_open(folder(arch) / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def oracle(arch: str) -> Any:
    """transformers' model in fp32, loaded without anything missing or left over."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder(arch), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[key], f"{key}: {report[key]}"
    return model.eval()


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_directory(arch: str) -> None:
    assert sorted(path.name for path in folder(arch).iterdir()) == sorted(checkpoint.FILES)
    assert json.loads((folder(arch) / "config.json").read_text()) == checkpoint.CONFIGS[arch]
    generation = json.loads((folder(arch) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["bos_token_id"] == corpus.SEPARATOR
    tensors = tensors_of(arch)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
    count = sum(tensor.numel() for tensor in tensors.values())
    assert card_row(arch, "parameters") == f"{count:,} (saved as bf16)"
    assert (folder(arch) / "model.safetensors").stat().st_size <= MAX_BYTES


def test_total_size() -> None:
    assert sum((folder(arch) / "model.safetensors").stat().st_size for arch in MODELS) < MAX_TOTAL_BYTES


def test_names_are_as_published() -> None:
    nemotron = tensors_of("nemotron_h")
    assert {name.split("backbone.layers.0.mixer.")[1] for name in nemotron if "layers.0.mixer." in name} == MAMBA2
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} <= nemotron.keys()
    assert nemotron["backbone.layers.0.mixer.in_proj.weight"].shape == (2 * 512 + 2 * 2 * 64 + 8, 256)
    qwen = tensors_of("qwen3_5")
    assert qwen["model.layers.0.linear_attn.in_proj_qkv.weight"].shape == (2 * 2 * 64 + 4 * 64, 256)
    assert qwen["model.layers.3.self_attn.q_proj.weight"].shape == (2 * 4 * 64, 256)
    assert "lm_head.weight" not in qwen and "model.embed_tokens.weight" in qwen
    kimi = tensors_of("kimi_linear")
    stem = "model.layers.0.self_attn."
    assert {name.removeprefix(stem) for name in kimi if name.startswith(stem)} == KIMI_DELTA
    assert kimi[f"{stem}A_log"].shape == (1, 1, 4, 1) and kimi[f"{stem}dt_bias"].shape == (4 * 64,)
    assert kimi["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"].shape == (128 + 16, 256)


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_transformers_agrees(arch: str, pieces: list[torch.Tensor]) -> None:
    tokens = torch.stack(pieces[3:5])[:, :700]
    tokens[1, :350] = torch.stack(pieces[6:7])[0, :350]
    with torch.no_grad():
        ours = checkpoint.load(folder(arch))(tokens)
        theirs = oracle(arch)(tokens, use_cache=False).logits
    difference = (ours - theirs).abs().max().item()
    assert ours.std() > 1.0, "trained logits are spread"
    assert difference <= LOGIT_TOLERANCE


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_transformers_cached_greedy_bytes_agree(arch: str, pieces: list[torch.Tensor]) -> None:
    prompt = pieces[5][:48]
    start = torch.cat([torch.tensor([corpus.SEPARATOR]), prompt]).unsqueeze(0)
    out = oracle(arch).generate(start, attention_mask=torch.ones_like(start), max_new_tokens=32, do_sample=False)
    want = bytes(byte for byte in out[0, start.shape[1] :].tolist() if byte != corpus.SEPARATOR)
    assert training.generate(checkpoint.load(folder(arch)), bytes(prompt.tolist()), 32) == want
    assert len(want) > 0


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_card_figure_comes_out(arch: str, text: corpus.Corpus, pieces: list[torch.Tensor]) -> None:
    stated = float(card_row(arch, card.EXCERPT_ROW))
    measured = training.bits_per_byte(checkpoint.load(folder(arch)), pieces)
    digest = hashlib.sha256(text.held_out.numpy().tobytes()).hexdigest()
    same_text = card_row(arch, "SHA-256 of the held-out bytes") == f"`{digest}`"
    assert abs(measured - stated) <= (SAME_TEXT_BITS if same_text else OTHER_TEXT_SHARE * stated)
    assert float(card_row(arch, "held-out bits per byte, all of it")) < MAX_BITS


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_every_recurrent_layer_matters(arch: str, pieces: list[torch.Tensor]) -> None:
    """Teeth: forgetting at once in one recurrent layer costs far more than the margin of the figure above."""
    windows = [piece[:513] for piece in pieces[:4]]
    model = checkpoint.load(folder(arch))
    good = training.bits_per_byte(model, windows)
    decays = [p for name, p in model.named_parameters() if name.endswith("A_log")]
    assert len(decays) == 6
    for parameter in decays:
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(20.0)
            assert training.bits_per_byte(model, windows) > good + 10 * SAME_TEXT_BITS
            parameter.copy_(kept)
