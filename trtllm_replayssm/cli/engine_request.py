"""What ``run`` was asked for where CHECKPOINT is an engine directory; the same questions as request.Request answers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import require
from . import prompts as prompt_sources
from .request import DEFAULT_WINDOW, check_numbers, check_sampling, end_tokens, position_limit

if TYPE_CHECKING:
    from ..build.directory import EngineConfig
    from ..runtime.compare import Rounding
    from ..runtime.sampling import SamplingParams
    from ..runtime.session import Session
    from ..runtime.tokenizer import Tokenizer

#: Options that an engine has settled when it was built, with their values where they are not given.
_SETTLED = {"window": None, "read_copy": "none", "dtype": None, "state_dtype": None}


@dataclass(frozen=True)
class EngineRequest:
    """A request to an engine that is known to be possible.

    Attributes:
        args, texts, ids, eos, sampling, positions, tokenizer: as Request.
        engine: what the directory says of itself. against: that of --against, or None. gpu: index of the GPU.
    """

    args: argparse.Namespace
    texts: list[str]
    ids: list[list[int]]
    eos: list[int]
    sampling: SamplingParams
    positions: int
    tokenizer: Tokenizer
    engine: EngineConfig
    against: EngineConfig | None
    gpu: int

    @property
    def family(self) -> str:
        """Family of the model."""
        return self.engine.model.family

    def session(self) -> Session:
        """The engine's session, for as many prompts at once as --max-batch and the engine allow."""
        return self._session(Path(self.args.checkpoint), self.engine)

    def pair(self) -> tuple[Session, Session, Rounding]:
        """Sessions of the engine of window 1 and of the engine, and what rounding can explain between them."""
        from ..runtime.compare import Rounding

        assert self.against is not None
        conventional = self._session(Path(self.args.against), self.against)
        options = self.engine.network
        return conventional, self.session(), Rounding.of(options.dtype, options.state_dtype)

    def described(self, session: Session) -> dict[str, Any]:
        """The settings of the engine, as plain values."""
        options = self.engine.network
        return {
            "engine": str(self.args.checkpoint),
            "against": self.args.against,
            "family": self.family,
            "decode": self.args.decode,
            "window": options.window,
            "draft_tokens": self.args.draft_tokens,
            "read_copy": "none",
            "dtype": options.dtype,
            "state_dtype": options.state_dtype,
            "device": f"cuda:{self.gpu}",
            "max_batch": session.free_slots,
        }

    def _session(self, directory: Path, config: EngineConfig) -> Session:
        from ..runtime.engine_session import EngineSession

        rows = min(self.args.max_batch, len(self.ids), config.limits.slots)
        return EngineSession(directory, max_batch=rows, max_positions=self.positions, device=self.gpu)


def is_engine(path: Path) -> bool:
    """Whether ``path`` is an engine directory of this package."""
    from ..build.directory import is_engine_directory

    return is_engine_directory(path)


def load_engine(args: argparse.Namespace) -> EngineRequest:
    """Check ``args``, read prompts, the engine's config and tokenizer. Engines are loaded by session() and pair().

    Raises:
        ReplayError: anything that is wrong with them.
    """
    directory = Path(args.checkpoint)
    for name, absent in _SETTLED.items():
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        require(value == absent, f"{option} is {value}; it is settled when an engine is built: leave it out")
    args.window = DEFAULT_WINDOW
    check_numbers(args)
    from ..build.directory import read_engine_config
    from ..runtime.sampling import SamplingParams
    from ..runtime.tokenizer import load_tokenizer

    engine = read_engine_config(directory)
    require(
        engine.network.replay == "plugin",
        f"engine {directory} has the replay operations as inputs and outputs (network io); it cannot generate text",
    )
    drafts = engine.network.spec_len - 1
    require(
        args.draft_tokens <= drafts,
        f"--draft-tokens is {args.draft_tokens}; the engine was built for at most {drafts} (build --draft-tokens)",
    )
    against = _against(args, engine)
    texts = prompt_sources.collect(args.prompt, args.prompt_file)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    check_sampling(args)
    tokenizer = load_tokenizer(directory, engine.model.vocab_size)
    ids = [tokenizer.encode_chat(t) if args.chat else tokenizer.encode(t) for t in texts]
    most = min(one.limits.max_positions for one in (engine, against) if one is not None)
    positions = position_limit(ids, args.max_new_tokens + args.draft_tokens, most)
    eos = [] if args.ignore_eos else end_tokens(directory, engine.model.eos_token_ids)
    gpu = _gpu_index(args.device)
    return EngineRequest(args, texts, ids, eos, sampling, positions, tokenizer, engine, against, gpu)


def _against(args: argparse.Namespace, engine: EngineConfig) -> EngineConfig | None:
    """The engine of --against, which --decode both needs."""
    window = engine.network.window
    require(
        args.decode != "conventional" or window == 1,
        f"--decode is conventional; the engine has window {window}: give one built with --window 1",
    )
    if args.decode != "both":
        require(args.against is None, "--against is for --decode both")
        return None
    require(
        window > 1,
        "--decode is both; the engine has window 1: that is conventional decoding against itself; give an engine built "
        "with a window of 2 or more, and this one with --against",
    )
    require(
        args.against is not None,
        "--decode is both; an engine has one window: name another one, built with --window 1, with --against",
    )
    from ..build.directory import read_engine_config

    other = read_engine_config(Path(args.against))
    require(other.network.window == 1, f"--against has window {other.network.window}; it must be built with --window 1")
    require(
        other.model == engine.model and other.weights_sha256 == engine.weights_sha256,
        f"--against {args.against} is of another model or other weights than {args.checkpoint}",
    )
    for name in ("dtype", "state_dtype"):
        mine, theirs = getattr(engine.network, name), getattr(other.network, name)
        require(mine == theirs, f"--against has {name} {theirs}; {args.checkpoint} has {mine}")
    return other


def _gpu_index(device: str) -> int:
    """Index in ``auto``, ``cuda`` or ``cuda:N``."""
    name, _, index = device.partition(":")
    known = device in ("auto", "cuda") or (name == "cuda" and index.isdigit())
    require(known, f"device is {device!r}; engines run on auto, cuda or cuda:N")
    return int(index or 0)
