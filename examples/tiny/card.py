"""The model card (README.md) of a trained checkpoint, filled with the figures of the run that made it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from .corpus import HELD_OUT_ONE_IN
from .training import CONTEXT_STAGES, TrainOptions, TrainResult

#: The excerpt whose figure a test can check in seconds: evenly spaced pieces of the held-out text.
EXCERPT_PIECES = 16
EXCERPT_LENGTH = 1024
EXCERPT_ROW = f"held-out bits per byte, excerpt of {EXCERPT_PIECES} x {EXCERPT_LENGTH} bytes"

TITLES = {
    "kimi_linear": "Tiny Kimi-Linear: Kimi Delta Attention and latent attention",
    "nemotron_h": "Tiny Nemotron-H: Mamba-2, attention and squared-ReLU MLP",
    "qwen3_5": "Tiny Qwen3.5: Gated DeltaNet and gated attention",
}
SHAPES = {
    "kimi_linear": (
        "8 layers, three Kimi Delta Attention then one latent attention, twice; hidden size 256. Kimi Delta Attention: "
        "4 heads of 64 (state 64 x 64) with a decay per key channel (softplus gate), 4-tap convolutions. Latent "
        "attention: 4 heads, keys of 48 channels of their own and 16 shared ones, values of 64, latent size 128, no "
        "position encoding. Every layer has a SwiGLU MLP of 512 where the published model has experts. Embedding and "
        "output matrix are separate."
    ),
    "nemotron_h": (
        "14 layers in the pattern `M-M-M*-M-M-M*-` (M Mamba-2, * attention, - MLP), hidden size 256. Mamba-2: 8 heads "
        "of 64, state size 64, 2 groups, 4-tap convolution. Attention: 4 query and 2 key/value heads of 64, no "
        "position encoding. MLP: 768, squared ReLU. Embedding and output matrix are separate."
    ),
    "qwen3_5": (
        "8 layers, three Gated DeltaNet then one gated attention, twice; hidden size 256. Gated DeltaNet: 2 key heads "
        "and 4 value heads of 64 (state 64 x 64), 4-tap convolution. Attention: 4 query and 2 key/value heads of 64, "
        "output gate, rotary embedding on the first 16 channels (theta 10000). Every layer has a SwiGLU MLP of 512. "
        "The output matrix is the embedding."
    ),
}


@dataclass(frozen=True)
class Sample:
    """A continuation of ``prompt``; ``temperature`` 0 is greedy."""

    prompt: str
    temperature: float
    text: str


@dataclass(frozen=True)
class Measured:
    """Held-out figures in bits per byte, and samples."""

    held_out_bits: float
    excerpt_bits: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class DataFacts:
    """The text: a label such as ``CPython 3.11.7``, files and bytes of both sides, digest of the held-out bytes."""

    label: str
    train_files: int
    train_bytes: int
    held_out_files: int
    held_out_bytes: int
    held_out_sha256: str


def samples_text(samples: tuple[Sample, ...]) -> str:
    """Markdown of the samples, prompts included; empty without any."""
    blocks = []
    for sample in samples:
        how = f"temperature {sample.temperature:g}" if sample.temperature else "greedy"
        blocks.append(f"Prompt `{sample.prompt!r}`, {how}:\n\n~~~python\n{sample.prompt}{sample.text}\n~~~\n")
    return "## Samples\n\n" + "\n".join(blocks) + "\n" if blocks else ""


def _figures(
    data: DataFacts, options: TrainOptions, result: TrainResult, parameters: int, hardware: str, measured: Measured
) -> str:
    """Rows of the table of figures, in Markdown."""
    ended = f"; ended by the clock (--minutes {options.minutes:g})" if options.minutes is not None else ""
    stages = ", then ".join(f"{options.context // divisor} from {start:.0%}" for start, divisor in CONTEXT_STAGES)
    rows = [
        ("parameters", f"{parameters:,} (saved as bf16)"),
        ("training text", f"{data.train_bytes:,} bytes, {data.train_files:,} files"),
        ("held-out text", f"{data.held_out_bytes:,} bytes, {data.held_out_files:,} files"),
        ("SHA-256 of the held-out bytes", f"`{data.held_out_sha256}`"),
        ("optimiser steps", f"{result.steps:,}{ended}"),
        ("bytes trained on", f"{result.tokens:,} ({result.tokens / max(data.train_bytes, 1):.1f} passes)"),
        ("batch", f"{options.batch_tokens:,} bytes a step; window {stages} of the training"),
        ("optimiser", f"AdamW, peak learning rate {options.lr:g}, warm-up, cosine; seed {options.seed}"),
        ("hardware", hardware),
        ("training time", f"{result.seconds:,.0f} s"),
        ("training bits per byte, last seconds", f"{result.train_bits:.4f}"),
        ("held-out bits per byte, all of it", f"{measured.held_out_bits:.4f}"),
        (EXCERPT_ROW, f"{measured.excerpt_bits:.4f}"),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def render(
    arch: str,
    parameters: int,
    data: DataFacts,
    options: TrainOptions,
    result: TrainResult,
    hardware: str,
    measured: Measured,
) -> str:
    """The card as Markdown."""
    shape = textwrap.fill(SHAPES[arch], 118, break_on_hyphens=False)
    repeated = f"--arch {arch} --steps {result.steps} --seed {options.seed}"
    default = TrainOptions()
    for name in ("batch_tokens", "context", "lr"):
        value = getattr(options, name)
        if value != getattr(default, name):
            repeated += f" --{name.replace('_', '-')} {value:g}"
    return f"""---
license: apache-2.0
library_name: transformers
tags: [byte-level, hybrid, state-space-model, test-model]
---
# {TITLES[arch]}

A small hybrid language model over bytes, trained on the source of Python's standard library. It exists so that
accuracy tests and demonstrations of ReplaySSM decoding have real, trained weights: decays, gates and norms with the
spread that training gives them. It writes text that looks like Python. It is not an assistant and knows nothing.

## Architecture

{shape}

Vocabulary: the 256 byte values; no tokenizer. Byte 0 separates documents and is the bos, eos and pad token: put one
byte 0 in front of a prompt. Trained on windows of up to {options.context} bytes.

## Data and licence

Text: {data.label}, its `.py` files without tests, `encodings`, `pydoc_data` and
installed packages, as they are, each followed by byte 0. One file in {HELD_OUT_ONE_IN}, chosen by a hash of its path,
is held out. Python's standard library is under the Python Software Foundation License Version 2; no text of it is
shipped with the weights. The weights are under this project's licence, Apache-2.0.

## Training

| | |
| --- | --- |
{_figures(data, options, result, parameters, hardware, measured)}

Bits per byte: mean over every predicted byte, fp32 arithmetic with the bf16 weights that are shipped; the context
starts anew in each window ({options.context} bytes for the whole text, {EXCERPT_LENGTH} for the excerpt).

Training forward: chunked scans in plain PyTorch (`examples/tiny/scans.py`), bf16 autocast on a GPU, recurrences,
norms and residual stream in fp32. Repeat it with

    python examples/train_tiny.py {repeated} --out my-model

The text is that of the Python that runs the command. Figures differ a little from machine to machine, and where the
clock ended the training: the learning rate then followed the time, not the steps.

{samples_text(measured.samples)}## Use

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("<this folder>")

or `trtllm-replayssm convert` and `trtllm-replayssm run`; see the project's README.
"""
