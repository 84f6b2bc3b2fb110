"""EngineRunner: sequences on a TensorRT engine, in numpy. The same operations and books as a Session.

Python 3.9 with numpy alone, which is where TensorRT 8.6 lives; EngineSession (engine_session.py) is the same for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ReplayError, require
from ..spec import require_int
from .books import SequenceBooks
from .engine import Engine, open_engine


class EngineRunner(SequenceBooks):
    """Sequences of one engine.

    Args:
        engine: an engine directory, or an Engine. max_batch: sequences at once; default and most: the engine's slots.
        max_positions: tokens per sequence; default and most: the engine's.
        device: see open_engine. graphs: see Engine.

    Every method raises ReplayError for arguments that are wrong, and then has changed nothing.
    """

    def __init__(
        self,
        engine: str | Path | Engine,
        *,
        max_batch: int | None = None,
        max_positions: int | None = None,
        device: int = 0,
        graphs: bool | str = True,
    ) -> None:
        self.engine = engine if isinstance(engine, Engine) else open_engine(engine, device=device, graphs=graphs)
        config = self.engine.config
        super().__init__(
            vocab_size=config.model.vocab_size,
            max_batch=batch_of(self.engine, max_batch),
            max_positions=positions_of(self.engine, max_positions),
            spec_len=config.limits.spec_len,
            keeps_all=config.io.get("accepted") is None,
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], np.ndarray]:
        """Start a sequence for each of ``prompts``. Returns (handles, logits [n, vocab] fp32 after the last tokens)."""
        self._check_prompts(prompts)
        for i, prompt in enumerate(prompts):
            self._check_ids(_grid(f"prompt {i}", prompt), f"prompt {i}", 1)
        slots = self._take_slots(len(prompts))
        try:
            logits = self.engine.scan(slots, prompts, self.engine.memory.host_logits)
        except BaseException:
            self._give_back(slots)
            raise
        self._start(slots, [len(prompt) for prompt in prompts])
        return slots, np.stack(logits)

    def step(self, seqs: Sequence[int], tokens: Any) -> np.ndarray:
        """Append one token to each of ``seqs`` and commit it. tokens [n] -> logits [n, vocab] fp32."""
        grid = _grid("tokens", tokens)
        require(grid.ndim == 1, f"tokens has shape {grid.shape}; it must be [n]")
        logits = self._decode(seqs, grid[:, None])
        self._stepped(seqs)
        return logits[:, 0]

    def verify(self, seqs: Sequence[int], tokens: Any) -> np.ndarray:
        """Run T tokens of each of ``seqs`` without committing them. tokens [n, T] -> logits [n, T, vocab] fp32."""
        grid = _grid("tokens", tokens)
        require(grid.ndim == 2, f"tokens has shape {grid.shape}; it must be [n, T]")
        self._check_steps(grid.shape[1])
        logits = self._decode(seqs, grid)
        self._verified(seqs, grid.shape[1])
        return logits

    def commit(self, seqs: Sequence[int], accepted: Any) -> None:
        """Keep the first ``accepted`` [n] tokens of the last verify of ``seqs``; forget the others."""
        counts = _grid("accepted", accepted).reshape(-1)
        require(
            counts.dtype.kind in "iu" or not counts.size, f"accepted is {counts.dtype}; counts must be whole numbers"
        )
        self._commit(seqs, counts.tolist())

    def recurrent_state(self, seq: int) -> dict[int, np.ndarray]:
        """State [heads, ...] of every recurrent layer after the committed tokens of ``seq``; nothing changes."""
        return self.engine.recurrent_state(seq, self._settled(seq))

    def _decode(self, seqs: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        rows, steps = tokens.shape
        lengths, accepted = self._check_decode(seqs, rows, steps)
        self._check_ids(tokens, "tokens", 2)
        self.engine.step(list(seqs), tokens, lengths, accepted)
        return self.engine.memory.host_logits(rows, steps)

    def _check_ids(self, ids: np.ndarray, name: str, rank: int) -> None:
        require(ids.dtype.kind in "iu", f"{name} has dtype {ids.dtype}; token ids must be whole numbers")
        require(ids.ndim == rank, f"{name} has shape {ids.shape}; it must have {rank} axes")
        self._check_range(int(ids.min()), int(ids.max()), name)


def _grid(name: str, values: Any) -> np.ndarray:
    """``values`` as an array. Raises ReplayError for rows of several lengths."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ReplayError(f"{name} is no array: {error}") from None


def batch_of(engine: Engine, max_batch: int | None) -> int:
    """Sequences at once, within the engine's slots. Raises ReplayError for more."""
    slots = engine.config.limits.slots
    if max_batch is None:
        return slots
    require_int("max_batch", max_batch, 1, slots, " (the engine's slots)")
    return max_batch


def positions_of(engine: Engine, max_positions: int | None) -> int:
    """Tokens per sequence, within the engine's limit. Raises ReplayError for more."""
    limit = engine.config.limits.max_positions
    if max_positions is None:
        return limit
    require_int("max_positions", max_positions, 1, limit, " (the engine's limit)")
    return max_positions
