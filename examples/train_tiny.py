"""Train a small byte-level hybrid model on Python's standard library and write a Hugging Face checkpoint directory.

    python examples/train_tiny.py --arch nemotron_h --out out/tiny-nemotron-h

Minutes on a GPU. On a CPU use few steps. Needs torch and safetensors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny import card, checkpoint, corpus, training

from trtllm_replayssm.errors import ReplayError, require

#: (prompt, temperature) of the samples on the card.
SAMPLES = (
    ('class Queue:\n    """', 0.0),
    ("    def __repr__(self):\n        return ", 0.0),
    ("def parse_args(argv):\n", 0.7),
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    defaults = training.TrainOptions()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", required=True, choices=sorted(checkpoint.CONFIGS))
    parser.add_argument("--out", required=True, type=Path, help="checkpoint directory to write")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimiser steps, at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=None, help="end training after this time, if steps do not")
    parser.add_argument("--batch-tokens", type=int, default=defaults.batch_tokens, help="bytes a step (%(default)s)")
    parser.add_argument("--context", type=int, default=defaults.context, help="longest window in bytes (%(default)s)")
    parser.add_argument("--lr", type=float, default=defaults.lr, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--device", default=None, help="cuda, cuda:N or cpu (default: cuda where there is one)")
    parser.add_argument("--data", type=Path, default=None, help="folder of .py files (default: this Python's library)")
    parser.add_argument("--data-label", default=None, help="what the card calls the text of --data")
    parser.add_argument("--sample-bytes", type=int, default=200, help="bytes of each sample; 0 for none")
    return parser.parse_args(arguments)


def choose_device(name: str | None) -> torch.device:
    """The torch device of ``--device``. Raises ReplayError when it is not there."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    require(name.split(":")[0] in ("cpu", "cuda"), f"--device is {name!r}; it must be cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ReplayError(f"--device is {name!r}; it cannot be used: {str(error).splitlines()[0]}") from error
    return device


def describe(device: torch.device) -> str:
    """Hardware and software in a few words, without the machine's name."""
    if device.type == "cuda":
        name = f"one {torch.cuda.get_device_name(device)}"
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{name}, PyTorch {torch.__version__}"


def measure(model: torch.nn.Module, held_out: torch.Tensor, context: int, sample_bytes: int) -> card.Measured:
    """Held-out figures (the excerpt: NaN if the text is too short for one) and samples."""
    excerpt_bits = float("nan")
    if held_out.numel() >= card.EXCERPT_PIECES * (card.EXCERPT_LENGTH + 1):
        pieces = corpus.excerpt(held_out, card.EXCERPT_PIECES, card.EXCERPT_LENGTH)
        excerpt_bits = training.bits_per_byte(model, list(pieces))
    samples = []
    for prompt, temperature in SAMPLES if sample_bytes > 0 else ():
        text = training.generate(model, prompt.encode(), sample_bytes, temperature)
        samples.append(card.Sample(prompt, temperature, text.decode("utf-8", "replace")))
    return card.Measured(training.held_out_bits(model, held_out, context), excerpt_bits, tuple(samples))


def run(args: argparse.Namespace) -> None:
    """Train, measure, write. Raises ReplayError for bad input."""
    options = training.TrainOptions(args.steps, args.minutes, args.batch_tokens, args.context, args.lr, args.seed)
    require(args.sample_bytes >= 0, f"--sample-bytes is {args.sample_bytes}; it must be at least 0")
    out = Path(os.path.abspath(args.out))
    checkpoint.check_target(out)
    device = choose_device(args.device)
    text = corpus.load_corpus(args.data)
    default_label = (
        f"standard library of CPython {platform.python_version()}" if args.data is None else "a folder given by --data"
    )
    facts = card.DataFacts(
        label=args.data_label or default_label,
        train_files=len(text.train_files),
        train_bytes=text.train.numel(),
        held_out_files=len(text.held_out_files),
        held_out_bytes=text.held_out.numel(),
        held_out_sha256=hashlib.sha256(text.held_out.numpy().tobytes()).hexdigest(),
    )
    torch.manual_seed(options.seed)
    model = checkpoint.build(checkpoint.CONFIGS[args.arch]).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.arch}: {parameters:,} parameters on {describe(device)}; {facts}", file=sys.stderr, flush=True)
    torch.set_float32_matmul_precision("high")
    result = training.train(model, text.train.to(device), options)
    torch.set_float32_matmul_precision("highest")
    checkpoint.round_weights(model)
    measured = measure(model, text.held_out.to(device), options.context, args.sample_bytes)
    page = card.render(args.arch, parameters, facts, options, result, describe(device), measured)
    checkpoint.save_directory(model, out, page)
    print(f"held-out bits per byte {measured.held_out_bits:.4f}, excerpt {measured.excerpt_bits:.4f}")
    print(card.samples_text(measured.samples), end="")
    print(f"wrote {args.out}")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for bad input."""
    args = parse(arguments)
    try:
        run(args)
    except ReplayError as error:
        print(f"train_tiny: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_tiny: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
