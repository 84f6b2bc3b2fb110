"""Optimisation, held-out measurement and generation."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_replayssm.errors import require

from .corpus import SEPARATOR, cut_windows, random_windows

#: (share of the training after which it starts, divisor of the full context): short windows first.
CONTEXT_STAGES = ((0.0, 4), (0.3, 2), (0.7, 1))
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.02
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class TrainOptions:
    """How long and how to train. ``minutes`` (or None) ends training early and shortens the schedule to fit."""

    steps: int = 3000
    minutes: float | None = None
    batch_tokens: int = 32768
    context: int = 4096
    lr: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"--steps is {self.steps}; it must be at least 1")
        require(self.minutes is None or self.minutes > 0, f"--minutes is {self.minutes}; it must be over 0")
        require(self.context >= 8, f"--context is {self.context}; it must be at least 8")
        require(
            self.batch_tokens >= self.context,
            f"--batch-tokens is {self.batch_tokens}; it must be at least --context, which is {self.context}",
        )
        require(math.isfinite(self.lr) and self.lr > 0, f"--lr is {self.lr}; it must be a number over 0")


@dataclass(frozen=True)
class TrainResult:
    """What happened: steps and tokens done, seconds taken, mean loss of the last progress interval in bits per byte."""

    steps: int
    tokens: int
    seconds: float
    train_bits: float


def lr_share(step: int, progress: float, total_steps: int) -> float:
    """Share of the peak learning rate: linear warm-up by steps, then half a cosine over ``progress`` in [0, 1]."""
    warmup = min(WARMUP_STEPS, max(total_steps // 10, 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, (step + 1) / warmup) * (FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * cosine)


def stage_context(progress: float, context: int) -> int:
    """Window length at ``progress``, at least 8 bytes."""
    divisor = [divisor for start, divisor in CONTEXT_STAGES if progress >= start][-1]
    return max(context // divisor, 8)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; only matrices decay (vectors, convolutions, A_log, dt_bias and D do not)."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    fused = all(p.is_cuda for p in model.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=fused)


def precision(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on a GPU, plain fp32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def window_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of bytes 1.. of windows [b, t + 1] int64 given the bytes before them."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(
    model: nn.Module,
    stream: torch.Tensor,
    options: TrainOptions,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> TrainResult:
    """Train ``model`` in place on windows of ``stream`` [n] uint8 (both on one device)."""
    optimizer = make_optimizer(model, options.lr)
    generator = torch.Generator().manual_seed(options.seed)
    parameters = list(model.parameters())
    limit = math.inf if options.minutes is None else 60.0 * options.minutes
    started = reported = time.monotonic()
    tokens = step = 0
    sums, counted, bits = torch.zeros((), device=stream.device), 0, math.nan
    model.train()
    while True:
        elapsed = time.monotonic() - started
        progress = max(step / options.steps, elapsed / limit)
        if counted and (progress >= 1.0 or time.monotonic() - reported >= PROGRESS_SECONDS):
            bits = sums.item() / counted / math.log(2.0)
            require(math.isfinite(bits), f"the loss became {bits} at step {step}; use a smaller --lr than {options.lr}")
            elapsed, reported = time.monotonic() - started, time.monotonic()
            speed = f"{tokens / elapsed:,.0f} bytes/s  {elapsed:.0f} s"
            log(f"step {step}  {min(progress, 1.0):4.0%}  {bits:.4f} bits per byte  {speed}")
            sums, counted = torch.zeros((), device=stream.device), 0
        if progress >= 1.0:
            return TrainResult(step, tokens, time.monotonic() - started, bits)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * lr_share(step, progress, options.steps)
        length = stage_context(progress, options.context)
        windows = random_windows(stream, options.batch_tokens // length, length, generator)
        with precision(stream.device):
            loss = window_loss(model, windows)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums, counted = sums + loss.detach(), counted + 1
        tokens += windows.shape[0] * length
        step += 1


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: list[torch.Tensor], batch: int = 8) -> float:
    """Mean bits per predicted byte over windows [t + 1] int64, computed in the model's own dtype without autocast."""
    model.eval()
    nats, count = 0.0, 0
    position = 0
    while position < len(windows):
        size = windows[position].numel()
        group = []
        while position < len(windows) and len(group) < batch and windows[position].numel() == size:
            group.append(windows[position])
            position += 1
        stacked = torch.stack(group)
        nats += window_loss(model, stacked).item() * stacked[:, 1:].numel()
        count += stacked[:, 1:].numel()
    return nats / count / math.log(2.0)


def held_out_bits(model: nn.Module, stream: torch.Tensor, context: int) -> float:
    """Bits per byte over the whole of ``stream`` [n], in windows of ``context`` bytes that each start anew."""
    return bits_per_byte(model, cut_windows(stream, context))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, temperature: float = 0.0, seed: int = 0) -> bytes:
    """Up to ``count`` bytes after a separator and ``prompt``, ending before the next separator.

    ``temperature`` 0 takes the most probable byte, else bytes are drawn with ``seed``. The whole sequence is computed
    again for each byte: plain and slow, with no cache that could be wrong.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[SEPARATOR, *prompt]], device=device)
    for _ in range(count):
        logits = model(tokens)[0, -1].double().cpu()
        if temperature > 0.0:
            choice = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            choice = int(logits.argmax())
        if choice == SEPARATOR:
            break
        tokens = torch.cat([tokens, torch.tensor([[choice]], device=device)], dim=1)
    return bytes(tokens[0, 1 + len(prompt) :].tolist())
