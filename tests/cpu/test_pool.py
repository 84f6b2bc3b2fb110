"""StatePool: views of a layout's regions in uint8 memory, of any stride, and the memory that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import ODD
from trtllm_replayssm import ConvLayout, ConvSpec, RecurrenceSpec, ReplayError, SlotLayout
from trtllm_replayssm.pool import MAX_SLOTS, StatePool, torch_dtype
from trtllm_replayssm.spec import DTYPE_BYTES

LAYOUTS = [
    SlotLayout(ODD[0].spec(window=3, read_copy="fp8_e4m3")),
    SlotLayout(ODD[3].spec(window=2, spec_len=2, read_copy="int8", state_dtype="bfloat16")),
    SlotLayout(ODD[6].spec(read_copy="bf16", act_dtype="float16")),
    SlotLayout(ODD[8].spec(act_dtype="float64", state_dtype="float64")),
    ConvLayout(ConvSpec(72, spec_len=3)),
]


@pytest.mark.parametrize("extra", [0, 16, 4096])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: getattr(x.spec, "kind", "conv"))
def test_views_are_the_bytes_of_the_slot(layout: SlotLayout | ConvLayout, extra: int) -> None:
    """Writing a region's view changes exactly the bytes that the layout gives it, in every slot."""
    memory = torch.zeros(3, layout.slot_bytes + extra, dtype=torch.uint8)
    pool = StatePool(layout, memory)
    for region in layout.regions:
        view = pool[region.name]
        assert view.shape == (3, *region.shape) and view.dtype == torch_dtype(region.dtype)
        assert view.stride()[1:] == region.strides
        memory.zero_()
        pattern = torch.randint(1, 100, view.shape, generator=torch.Generator().manual_seed(1)).to(view.dtype)
        view.copy_(pattern)
        assert torch.equal(pool[region.name].float(), pattern.float())
        assert (memory[:, : region.offset] == 0).all() and (memory[:, region.end :] == 0).all()
        # The same elements, found by hand from offset and strides.
        size = DTYPE_BYTES[region.dtype]
        for slot in range(3):
            for index in ([0] * len(region.shape), [n - 1 for n in region.shape], [n // 2 for n in region.shape]):
                first = region.offset + size * sum(i * s for i, s in zip(index, region.strides, strict=True))
                value = pattern[(slot, *index)].reshape(1).view(torch.uint8)
                assert torch.equal(memory[slot, first : first + size], value)


def test_allocated_slots_are_reset() -> None:
    pool = StatePool.allocate(LAYOUTS[0], 5)
    assert pool.slots == 5 and pool.memory.shape == (5, LAYOUTS[0].slot_bytes)
    words = pool["cursor"].numpy()
    assert np.all(words[..., :3] == 0)
    assert [set(words[slot, ..., 3].flat) for slot in range(5)] == [{3}, {2}, {1}, {3}, {2}]
    assert (pool["state"] == 0).all() and (pool["read_copy"].float() == 0).all() and (pool["read_scale"] == 1).all()
    conv = StatePool.allocate(LAYOUTS[-1], 2)
    assert (conv.memory == 0).all()
    plain = StatePool.allocate(SlotLayout(ODD[0].spec(window=3, stagger=False)), 4)
    assert (plain["cursor"][..., 3] == 3).all() and "read_scale" not in plain and "state" in plain


def test_pool_in_the_middle_of_other_memory() -> None:
    layout = LAYOUTS[0]
    memory = torch.zeros(6, layout.slot_bytes + 256, dtype=torch.uint8)
    pool = StatePool(layout, memory[1::2, 128:])
    pool["state"].fill_(1.0)
    assert pool.slots == 3 and (memory[::2] == 0).all() and (memory[:, :128] == 0).all()
    assert memory[1].any()


def test_missing_region() -> None:
    with pytest.raises(
        ReplayError, match="region 'ring_k' is not in this layout; it has cursor, state, state_scale, read_copy"
    ):
        StatePool.allocate(LAYOUTS[0], 1)["ring_k"]


def test_refused_memory() -> None:
    layout = LAYOUTS[0]
    size = layout.slot_bytes

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    for memory, message in (
        (torch.zeros(2, size), "memory is torch.float32; it must be torch.uint8"),
        (zeros(size), r"memory has shape \(\d+,\); it must be \[slots, stride_bytes\]"),
        (zeros(2, 2, size), "memory has shape"),
        (zeros(size, 2).T, "memory must be dense along its last axis"),
        (zeros(2, size - 16), f"memory rows are {size - 16} bytes; this layout needs at least {size}"),
        (zeros(2, size + 8), f"memory row stride is {size + 8}; it must be a multiple of 16"),
        (zeros(1, size).expand(2, size), "memory rows are 0 bytes apart and overlap"),
        (
            zeros(2 * size).as_strided((2, size), (16, 1)),
            f"16 bytes apart and overlap; this layout needs at least {size}",
        ),
        (None, r"memory is NoneType; it must be a uint8 tensor \[slots, stride_bytes\]"),
        (np.zeros((2, size), np.uint8), "memory is ndarray; it must be a uint8 tensor"),
        (zeros(2, size + 16)[:, 8:], r"memory base address is \d+; it must be a multiple of 16"),
    ):
        with pytest.raises(ReplayError, match=message):
            StatePool(layout, memory)  # type: ignore[arg-type]
    for slots in (0, -1, 2.0, True, "2", None):
        with pytest.raises(ReplayError, match=f"slots is {slots!r}; it must be a whole number from 1 to"):
            StatePool.allocate(layout, slots)  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="layout is RecurrenceSpec; it must be a SlotLayout or ConvLayout"):
        StatePool(layout.spec, zeros(2, size))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LAYOUTS[0], 2, "gpu"), "device is 'gpu'; it must be a torch device such as cpu, cuda or cuda:0"),
        ((LAYOUTS[0], 2, 3.5), "device is 3.5; it must be a torch device"),
        ((LAYOUTS[0], 2, "cuda:77"), r"device is 'cuda:77'; torch \S+ finds \d+ CUDA devices here"),
        ((LAYOUTS[0], 2, "xpu"), r"device is 'xpu'; torch \S+ has no such device here"),
        ((None, 2), "layout is NoneType; it must be a SlotLayout or ConvLayout"),
    ],
)
def test_pools_that_cannot_be_allocated(arguments: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        StatePool.allocate(*arguments)


def test_more_memory_than_there_is() -> None:
    """How many bytes were asked for, of what. They are past the 47 bits of an address, so nobody can have them."""
    layout = SlotLayout(RecurrenceSpec("mamba2", 512, 8, 64, 128))
    assert MAX_SLOTS * layout.slot_bytes > 1 << 47
    asked = f"{MAX_SLOTS * layout.slot_bytes:,}"
    with pytest.raises(ReplayError, match=rf"slots is {MAX_SLOTS}: {asked} bytes \([0-9,.]+ GiB, .* than cpu can give"):
        StatePool.allocate(layout, MAX_SLOTS)


def test_one_slot_may_have_any_stride() -> None:
    size = LAYOUTS[0].slot_bytes
    assert StatePool(LAYOUTS[0], torch.zeros(size, dtype=torch.uint8).as_strided((1, size), (16, 1))).slots == 1


def test_dtype_names() -> None:
    for name, size in DTYPE_BYTES.items():
        assert torch_dtype(name).itemsize == size
    with pytest.raises(ReplayError, match="dtype is 'fp32'; it must be one of float64, float32, bfloat16"):
        torch_dtype("fp32")


def test_checkpoint_is_the_state_times_its_scale() -> None:
    pool = StatePool.allocate(SlotLayout(RecurrenceSpec("gated_delta", 4, 2, 16, 16)), 3)
    pool["state"].copy_(torch.arange(3 * 4 * 16 * 16).reshape(3, 4, 16, 16))
    pool["state_scale"].copy_(torch.tensor([1.0, 0.5, 0.25, 2.0])[:, None].expand(3, 4, 4))
    want = pool["state"] * torch.tensor([1.0, 0.5, 0.25, 2.0])[:, None, None]
    assert torch.equal(pool.checkpoint(), want)
    assert torch.equal(pool.checkpoint(torch.tensor([2, 0], dtype=torch.int32)), want[[2, 0]])
    assert pool.checkpoint(torch.zeros(0, dtype=torch.int64)).shape == (0, 4, 16, 16)
    kda = StatePool.allocate(SlotLayout(RecurrenceSpec("kimi_delta", 4, 2, 16, 16)), 2)
    kda["state"].fill_(3.0)
    kda.checkpoint().fill_(7.0)
    assert (kda.checkpoint() == 3.0).all(), "it is a copy"


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0], "slots is list; it must be an int tensor"),
        (torch.tensor([0.0]), r"slots is torch.float32 \[1\]; it must be an int tensor \[n\]"),
        (torch.tensor(0), r"slots is torch.int64 \[\]"),
        (torch.tensor([0, -1]), "slots names slot -1; the pool has slots 0 to 2"),
        (torch.tensor([3]), "slots names slot 3; the pool has slots 0 to 2"),
    ],
)
def test_slots_that_have_no_checkpoint(slots: object, message: str) -> None:
    pool = StatePool.allocate(SlotLayout(RecurrenceSpec("mamba2", 4, 2, 16, 16)), 3)
    with pytest.raises(ReplayError, match=message):
        pool.checkpoint(slots)  # type: ignore[arg-type]


def test_a_convolution_has_no_checkpoint() -> None:
    with pytest.raises(ReplayError, match="this pool has no recurrent state"):
        StatePool.allocate(ConvLayout(ConvSpec(72)), 2).checkpoint()
