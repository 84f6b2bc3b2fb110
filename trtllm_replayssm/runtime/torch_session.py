"""TorchSession: a Session over TorchOps, on CPU or CUDA tensors. Window 1 is conventional decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ReplayError, require
from ..models.config import HybridConfig
from ..models.decoder import HybridDecoder
from ..ops.torch_ops import TorchOps
from ..pool import torch_dtype
from ..spec import require_choice, require_int
from .session import Session
from .state import Batch, ModelState

DTYPES = ("float32", "bfloat16", "float16", "float64")
PREFILL_TOKENS = 8192


class TorchSession(Session):
    """Sequences of one model, computed with torch.

    Args:
        model: a checkpoint directory, or (HybridConfig, weights by name as load_checkpoint returns them).
        max_batch: sequences that live at once. max_positions: tokens per sequence; default and most: the model's own.
        window, spec_len, read_copy, stagger: of the RecurrenceSpec (spec.py). state_dtype: default the model's own.
        dtype: of activations and weights; default that of the weights. device: a torch device.
        prefill_tokens: most prompt tokens per scan; longer prompts are scanned in pieces.
        impl: module with the stateful operations (default: the CUDA library's where there is one, else the reference).

    Raises:
        ReplayError: a checkpoint that cannot be read, an argument out of range, a device that is not there.
    """

    def __init__(
        self,
        model: str | Path | tuple[HybridConfig, Mapping[str, torch.Tensor]],
        *,
        max_batch: int = 8,
        max_positions: int | None = None,
        window: int = 16,
        spec_len: int = 1,
        read_copy: str = "none",
        stagger: bool = True,
        state_dtype: str | None = None,
        dtype: str | None = None,
        device: str | torch.device = "cpu",
        prefill_tokens: int = PREFILL_TOKENS,
        impl: Any = None,
    ) -> None:
        require_int("prefill_tokens", prefill_tokens, 1, 1 << 24)
        self.device = find_device(device)
        config, weights = load_model(model, dtype=dtype, device=self.device)
        limit = config.max_positions if max_positions is None else max_positions
        require_int("max_positions", limit, 1, config.max_positions, " (the model's position limit)")
        super().__init__(vocab_size=config.vocab_size, max_batch=max_batch, max_positions=limit, spec_len=spec_len)
        self.config = config
        self._prefill_tokens = prefill_tokens
        self._weights = weights
        self._decoder = HybridDecoder(config)
        self.state = ModelState(
            config,
            slots=max_batch,
            max_positions=limit,
            window=window,
            spec_len=spec_len,
            read_copy=read_copy,
            state_dtype=state_dtype or config.state_dtype,
            stagger=stagger,
            device=self.device,
            dtype=weights_dtype(weights),
            impl=impl,
        )

    def _prefill(self, slots: list[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        logits: dict[int, torch.Tensor] = {}
        for piece in pieces([len(p) for p in prompts], self._prefill_tokens):
            ids = [t for row, start, count in piece for t in prompts[row][start : start + count]]
            batch = Batch.scan(
                [slots[row] for row, _, _ in piece],
                [count for _, _, count in piece],
                starts=[start for _, start, _ in piece],
                device=self.device,
            )
            out = self._forward(batch, torch.tensor(ids, dtype=torch.int64))
            for i, (row, start, count) in enumerate(piece):
                if start + count == len(prompts[row]):
                    logits[row] = out[i]
        return torch.stack([logits[row] for row in range(len(slots))])

    def _launch(self, slots: list[int], tokens: torch.Tensor, lengths: list[int], accepted: list[int]) -> torch.Tensor:
        steps = int(tokens.shape[1])
        batch = Batch.step(slots, lengths, steps, accepted=accepted, device=self.device)
        return self._forward(batch, tokens.flatten()).view(len(slots), steps, self.vocab_size)

    def _recurrent_state(self, slot: int, accepted: int) -> dict[int, torch.Tensor]:
        states = self.state.materialized([slot], [accepted])
        return {layer: state[0] for layer, state in states.items()}

    def _forward(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self._decoder.forward(TorchOps(self._weights, self.state, batch), ids.to(self.device))


def pieces(lengths: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Prompts cut into scans of at most ``most`` tokens.

    Returns:
        per scan the (row, first token, tokens) that it takes; a row's pieces come in order, one per scan.
    """
    scans: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                scans.append([])
                room = most
            count = min(room, length - start)
            scans[-1].append((row, start, count))
            start, room = start + count, room - count
    return scans


def find_device(device: str | torch.device) -> torch.device:
    """The torch device called ``device``; ``auto`` is a CUDA GPU where there is one.

    Raises:
        ReplayError: another kind of device, or one that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # torch's own words list every kind of device that it has a name for
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ReplayError(f"device is {str(device)!r}; it must be auto, cpu, cuda or cuda:N")
    require(found.type == "cuda" or not found.index, f"device is {str(device)!r}; there is one cpu")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require((found.index or 0) < count, f"device is {str(device)!r}; torch finds {count} CUDA devices here")
    return found


def load_model(
    model: str | Path | tuple[HybridConfig, Mapping[str, torch.Tensor]], *, dtype: str | None, device: torch.device
) -> tuple[HybridConfig, dict[str, torch.Tensor]]:
    """Config and weights on ``device``, cast to ``dtype`` where it is given (weights that stay fp32 do).

    Raises:
        ReplayError: the directory is no checkpoint, or dtype is unknown.
    """
    from ..models.checkpoint import load_checkpoint
    from ..models.decoder import keeps_float32

    if dtype is not None:
        require_choice("dtype", dtype, DTYPES)
    if isinstance(model, (str, Path)):
        return load_checkpoint(model, device=str(device), dtype=dtype)
    config, weights = model
    cast = None if dtype is None else torch_dtype(dtype)
    return config, {n: t.to(device, None if keeps_float32(n) else cast) for n, t in weights.items()}


def weights_dtype(weights: Mapping[str, torch.Tensor]) -> str:
    """Name of the dtype of the matrices, which is that of the activations."""
    from ..models.decoder import EMBEDDING

    require(EMBEDDING in weights, f"weight {EMBEDDING} is missing")
    return str(weights[EMBEDDING].dtype).removeprefix("torch.")
