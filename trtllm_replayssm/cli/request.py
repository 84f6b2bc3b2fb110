"""What ``run`` was asked for, checked and loaded: prompts as token ids, sampling, end tokens, model, tokenizer.

Everything that can be refused without reading weights, or an engine, is refused before any is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..directories import refuse_published
from ..errors import require
from ..runtime.tokenizer import read_json_object
from ..spec import MAX_SPEC_LEN, MAX_WINDOW, require_int
from . import prompts as prompt_sources
from .common import PROG

if TYPE_CHECKING:
    import torch

    from ..models.config import HybridConfig
    from ..runtime.compare import Rounding
    from ..runtime.sampling import SamplingParams
    from ..runtime.session import Session
    from ..runtime.tokenizer import Tokenizer
    from ..runtime.torch_session import TorchSession

DEFAULT_WINDOW = 16


@dataclass(frozen=True)
class Request:
    """A request to a checkpoint that is known to be possible.

    Attributes:
        args: the options. texts: prompts as given. ids: their token ids. eos: end tokens.
        sampling: of the first prompt. positions: to reserve per sequence.
        tokenizer, config, weights, device: the model.
    """

    args: argparse.Namespace
    texts: list[str]
    ids: list[list[int]]
    eos: list[int]
    sampling: SamplingParams
    positions: int
    tokenizer: Tokenizer
    config: HybridConfig
    weights: dict[str, torch.Tensor]
    device: torch.device

    @property
    def family(self) -> str:
        """Family of the model."""
        return self.config.family

    def session(self) -> Session:
        """The session that --decode asks for, for as many prompts at once as --max-batch allows."""
        args = self.args
        return self._session(window=args.window, draft_tokens=args.draft_tokens, read_copy=args.read_copy)

    def pair(self) -> tuple[Session, Session, Rounding]:
        """Sessions for conventional and for ReplaySSM decoding, and what rounding can explain between them."""
        from ..runtime.compare import Rounding

        args = self.args
        conventional = self._session(window=1, draft_tokens=0, read_copy="none")
        replay = self._session(window=args.window, draft_tokens=args.draft_tokens, read_copy=args.read_copy)
        spec = replay.state.spec
        return conventional, replay, Rounding.of(replay.state.dtype, spec.state_dtype, spec.read_copy)

    def described(self, session: Session) -> dict[str, Any]:
        """The settings that took effect in one of this request's sessions, as plain values."""
        from ..runtime.torch_session import TorchSession

        assert isinstance(session, TorchSession)
        spec = session.state.spec
        return {
            "checkpoint": str(self.args.checkpoint),
            "family": self.family,
            "decode": self.args.decode,
            "window": spec.window,
            "draft_tokens": spec.spec_len - 1,
            "read_copy": spec.read_copy,
            "dtype": session.state.dtype,
            "state_dtype": spec.state_dtype,
            "device": str(session.device),
            "max_batch": session.free_slots,
        }

    def _session(self, *, window: int, draft_tokens: int, read_copy: str) -> TorchSession:
        from ..runtime.torch_session import TorchSession

        return TorchSession(
            (self.config, self.weights),
            max_batch=min(self.args.max_batch, len(self.ids)),
            max_positions=self.positions,
            window=window,
            spec_len=1 + draft_tokens,
            read_copy=read_copy,
            state_dtype=self.args.state_dtype,
            device=self.device,
        )


def load(args: argparse.Namespace) -> Request:
    """Check ``args``, read prompts, checkpoint and tokenizer.

    Raises:
        ReplayError: anything that is wrong with them.
    """
    if args.window is None:
        args.window = 1 if args.decode == "conventional" else DEFAULT_WINDOW
    check_numbers(args)
    check_decode(args)
    require(args.against is None, "--against is for engine directories; a checkpoint decodes both ways by itself")
    directory = Path(args.checkpoint)
    check_checkpoint(directory)
    texts = prompt_sources.collect(args.prompt, args.prompt_file)
    from ..models.checkpoint import read_checkpoint_config
    from ..runtime.sampling import SamplingParams
    from ..runtime.tokenizer import load_tokenizer
    from ..runtime.torch_session import find_device, load_model

    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    check_sampling(args)
    device = find_device(args.device)
    config = read_checkpoint_config(directory)
    tokenizer = load_tokenizer(directory, config.vocab_size)
    ids = [tokenizer.encode_chat(t) if args.chat else tokenizer.encode(t) for t in texts]
    positions = position_limit(ids, args.max_new_tokens + args.draft_tokens, config.max_positions)
    eos = [] if args.ignore_eos else end_tokens(directory, config.eos_token_ids)
    config, weights = load_model(directory, dtype=args.dtype, device=device)
    return Request(args, texts, ids, eos, sampling, positions, tokenizer, config, weights, device)


def check_sampling(args: argparse.Namespace) -> None:
    """Raise ReplayError for sampling options that temperature 0 makes nothing of."""
    for option, value, default in (("--top-k", args.top_k, 0), ("--top-p", args.top_p, 1.0), ("--seed", args.seed, 0)):
        require(
            args.temperature > 0 or value == default,
            f"{option} is {value} with --temperature 0, which takes the best token; give a --temperature above 0",
        )


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ReplayError for whole numbers out of range (sampling parameters check themselves)."""
    require_int("--max-new-tokens", args.max_new_tokens, 1, 1 << 24)
    require_int("--window", args.window, 1, MAX_WINDOW, " (1 is conventional decoding)")
    why = f" (a step carries the token itself and its drafts, {MAX_SPEC_LEN} at most)"
    require_int("--draft-tokens", args.draft_tokens, 0, MAX_SPEC_LEN - 1, why)
    require_int("--max-batch", args.max_batch, 1, 65536)


def check_decode(args: argparse.Namespace) -> None:
    """Raise ReplayError for a window or a read copy that --decode has no use for."""
    if args.decode == "conventional":
        require(
            args.window == 1,
            f"--window is {args.window} with --decode conventional, which is window 1: leave one of them out",
        )
        require(
            args.read_copy == "none",
            f"--read-copy is {args.read_copy} with --decode conventional, which reads the state itself: leave one of "
            "them out",
        )
    require(
        args.decode != "both" or args.window > 1,
        f"--window is 1 with --decode both; that is conventional decoding against itself: give 2 to {MAX_WINDOW}",
    )


def check_checkpoint(path: Path) -> None:
    """Raise ReplayError unless ``path`` looks like a directory that `convert` made."""
    engine = f"(an engine: {PROG} build CHECKPOINT {path})"
    require(path.exists(), f"checkpoint {path} does not exist; make one with: {PROG} convert HF_DIR {path} {engine}")
    require(path.is_dir(), f"checkpoint {path} is not a directory; give the one that `{PROG} convert` made")
    config_path = path / "config.json"
    require(config_path.exists(), f"checkpoint {path} has no config.json; it must be made by: {PROG} convert")
    refuse_published(path, read_json_object(config_path))


def end_tokens(checkpoint: Path, default: Sequence[int]) -> list[int]:
    """eos_token_id of generation_config.json, where it names any, else ``default``."""
    path = checkpoint / "generation_config.json"
    value = read_json_object(path).get("eos_token_id") if path.is_file() else None
    ids = list(default) if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        require_int(f"eos_token_id in {path}", token, 0, 1 << 24)
    return ids


def position_limit(prompts: Sequence[Sequence[int]], new_tokens: int, most: int) -> int:
    """Positions to reserve per sequence: what the longest prompt can need, within the model's limit ``most``."""
    for i, prompt in enumerate(prompts):
        require(len(prompt) > 0, f"prompt {i} is empty; it must have at least one token")
        require(
            len(prompt) < most,
            f"prompt {i} has {len(prompt)} tokens; the model's position limit is {most}, of which one must be left",
        )
    return min(most, max(len(p) for p in prompts) + new_tokens)
