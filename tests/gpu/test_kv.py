"""The append to a KV cache on a GPU. Oracle: the same assignment in torch, one token at a time; bytes must be equal."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import DEVICE

from trtllm_replayssm import ReplayError
from trtllm_replayssm.kernels.kv import kv_append

SLOTS, POSITIONS = 6, 21
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected(
    cache: torch.Tensor, new: torch.Tensor, slots: list[int], places: list[list[int]], counts: list[int]
) -> torch.Tensor:
    """The cache after the append."""
    out = cache.clone()
    for i, slot in enumerate(slots):
        for t, place in enumerate(places[i][: counts[i]]):
            if 0 <= slot < SLOTS and 0 <= place < POSITIONS:
                out[slot, :, :, place] = new[i, t]
    return out


@pytest.mark.parametrize("bits", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "parts, heads, size", [(2, 2, 64), (2, 8, 128), (1, 1, 576), (2, 3, 4), (2, 1, 5), (1, 2, 2)], ids=str
)
def test_bytes_arrive_where_they_belong(
    parts: int, heads: int, size: int, dtype: torch.dtype, bits: torch.dtype
) -> None:
    """Every unit of copying (16 down to 2 bytes), pad rows, slots and positions outside the cache, counts."""
    cache = torch.randn(SLOTS, parts, heads, POSITIONS, size, device=DEVICE).to(dtype)
    new = torch.randn(5, 3, parts, heads, size, device=DEVICE).to(dtype)
    slots, counts = [4, -1, 0, SLOTS, 2], [3, 3, 0, 3, 2]
    places = [[7, 8, 9], [1, 2, 3], [0, 1, 2], [4, 5, 6], [POSITIONS - 1, POSITIONS, -1]]
    index = [torch.tensor(x, dtype=bits, device=DEVICE) for x in (slots, places, counts)]
    for given in (counts, None):
        want = expected(cache, new, slots, places, [3] * 5 if given is None else counts)
        mine = cache.clone()
        kv_append(mine, new, index[0], index[1], None if given is None else index[2])
        assert torch.equal(mine, want)
        assert not torch.equal(mine, cache)


def test_a_view_that_starts_off_16_bytes() -> None:
    """Base addresses decide the unit too."""
    flat = torch.zeros(SLOTS * 2 * POSITIONS * 8 + 1, dtype=torch.float16, device=DEVICE)
    cache = flat[1:].view(SLOTS, 2, 1, POSITIONS, 8)
    new = torch.randn(1, 2, 2, 1, 8, device=DEVICE).half()
    kv_append(cache, new, torch.tensor([3], device=DEVICE), torch.tensor([[5, 6]], device=DEVICE))
    assert torch.equal(cache[3, :, :, 5:7], new[0].permute(1, 2, 0, 3)) and flat[0] == 0


def test_it_can_be_captured() -> None:
    cache = torch.zeros(SLOTS, 2, 2, POSITIONS, 16, dtype=torch.bfloat16, device=DEVICE)
    new = torch.randn(2, 1, 2, 2, 16, device=DEVICE).bfloat16()
    slots, places = torch.tensor([1, 5], device=DEVICE), torch.tensor([[0], [4]], device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    kv_append(cache, new, slots, places)
    cache.zero_()
    with torch.cuda.graph(graph):
        kv_append(cache, new, slots, places)
    assert not cache.any()
    for step in range(3):
        graph.replay()
        assert torch.equal(cache, expected(cache, new, [1, 5], places.tolist(), [1, 1]))
        assert torch.equal(cache[5, :, :, 4 + step], new[1, 0])
        places += 1


def test_wrong_tensors_are_refused() -> None:
    cache = torch.zeros(SLOTS, 2, 1, POSITIONS, 8, device=DEVICE)
    new, slots = torch.zeros(1, 2, 2, 1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    places = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    for arguments, message in (
        ((cache, new[0], slots, places), "new_kv has shape"),
        ((cache, new.half(), slots, places), "new_kv is torch.float16; it must be torch.float32"),
        ((cache.transpose(2, 3), new, slots, places), "new_kv has shape|cache has strides"),
        ((cache, new, slots.cpu(), places), "slots is on cpu"),
        ((cache, new, slots, places.float()), "positions is torch.float32; it must be int32 or int64"),
        ((cache, new, slots, places[:, :1]), "positions has shape"),
    ):
        with pytest.raises(ReplayError, match=message):
            kv_append(*arguments)
