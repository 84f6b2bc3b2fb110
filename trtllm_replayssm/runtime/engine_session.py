"""EngineSession: a Session over a TensorRT engine, for generation, sampling and the command line.

Logits stay on the GPU where torch sees it, so that sampling runs there; else they come to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..pool import torch_dtype
from .engine import Engine, open_engine
from .engine_memory import LOGITS
from .engine_runner import batch_of, positions_of
from .session import Session


class EngineSession(Session):
    """Sequences of one engine.

    Args:
        engine: an engine directory, or an Engine. max_batch: sequences at once; default and most: the engine's slots.
        max_positions: tokens per sequence; default and most: the engine's.
        device: index of the GPU that a directory is loaded onto. graphs: see Engine.

    Raises:
        ReplayError: see open_engine; max_positions above the engine's limit.
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
        self.config = self.engine.config.model
        self._gpu = self.engine.device if torch.cuda.is_available() else None
        super().__init__(
            vocab_size=self.config.vocab_size,
            max_batch=batch_of(self.engine, max_batch),
            max_positions=positions_of(self.engine, max_positions),
            spec_len=self.engine.config.limits.spec_len,
            keeps_all=self.engine.config.io.get("accepted") is None,
        )

    def _prefill(self, slots: list[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.stack(self.engine.scan(slots, prompts, self._logits))

    def _launch(self, slots: list[int], tokens: torch.Tensor, lengths: list[int], accepted: list[int]) -> torch.Tensor:
        self.engine.step(slots, tokens.numpy(), lengths, accepted)
        return self._logits(len(slots), int(tokens.shape[1]))

    def _recurrent_state(self, slot: int, accepted: int) -> dict[int, torch.Tensor]:
        states = self.engine.recurrent_state(slot, accepted)
        dtype = torch_dtype(self.engine.config.network.state_dtype)
        return {layer: torch.from_numpy(state).to(dtype) for layer, state in states.items()}

    def _logits(self, rows: int, count: int) -> torch.Tensor:
        """Logits [rows, count, vocab] of the call that ran last, a copy."""
        memory = self.engine.memory
        if self._gpu is None:
            return torch.from_numpy(memory.host_logits(rows, count))
        self.engine.stream.synchronize()
        view = _DeviceArray(memory.device_address(LOGITS), (rows, count, self.vocab_size))
        logits: torch.Tensor = torch.as_tensor(view, device=f"cuda:{self._gpu}").clone()
        torch.cuda.current_stream(self._gpu).synchronize()  # the next step writes there again, in its own stream
        return logits


class _DeviceArray:
    """fp32 device memory that torch can look at."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": np.dtype(np.float32).str,
            "data": (address, False),
            "version": 3,
        }
