"""StatePool: the slots of one layer as torch memory, viewed through a layout. Knows no offsets of its own.

The memory is one uint8 tensor [slots, stride_bytes]; ``pool["state"]`` is a strided view of it with the region's dtype
and shape [slots, ...], so that writing to the view writes the slot. Where the layout has ``state_scale`` the state is
``pool["state"]`` times it: :meth:`StatePool.checkpoint`. Torch is imported when a pool is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from .errors import ReplayError, require
from .layout import ROW_ALIGNMENT, ConvLayout, SlotLayout
from .spec import DTYPE_BYTES, require_int

if TYPE_CHECKING:
    import torch

Layout = Union[SlotLayout, ConvLayout]  # | between classes needs Python 3.10
#: Most slots of one pool.
MAX_SLOTS = 1 << 24


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of the names in spec.DTYPE_BYTES."""
    import torch

    require(name in DTYPE_BYTES, f"dtype is {name!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    dtype = torch.float8_e4m3fn if name == "float8_e4m3" else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_layout(layout: object) -> None:
    known = isinstance(layout, (SlotLayout, ConvLayout))
    require(known, f"layout is {type(layout).__name__}; it must be a SlotLayout or ConvLayout")


def _zeros(slots: int, slot_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Zeroed uint8 [slots, slot_bytes]. Raises ReplayError where torch lacks the device or the memory."""
    import torch

    try:
        home = torch.device(device)
    except (RuntimeError, TypeError):  # torch's own words list every kind of device that it has a name for
        raise ReplayError(f"device is {device!r}; it must be a torch device such as cpu, cuda or cuda:0") from None
    if home.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = (home.index or 0) < count
        require(there, f"device is {str(device)!r}; torch {torch.__version__} finds {count} CUDA devices here")
    try:
        return torch.zeros(slots, slot_bytes, dtype=torch.uint8, device=home)
    except (AssertionError, NotImplementedError):  # this torch was built without such devices
        raise ReplayError(f"device is {str(device)!r}; torch {torch.__version__} has no such device here") from None
    except RuntimeError as error:
        name, text = type(error).__name__, str(error)
        if name != "OutOfMemoryError" and "DefaultCPUAllocator" not in text and "overflow" not in text:
            raise
        asked = slots * slot_bytes
        raise ReplayError(
            f"slots is {slots}: {asked:,} bytes ({asked / (1 << 30):,.1f} GiB, {slot_bytes:,} a slot) are more than "
            f"{home} can give; allocate fewer slots (run: a smaller --max-batch)"
        ) from None


class StatePool:
    """Slots of one layer.

    Args:
        layout: a SlotLayout or ConvLayout.
        memory: uint8 [slots, stride_bytes], last axis dense, base and stride multiples of 16, stride_bytes >=
            layout.slot_bytes, rows that do not overlap. A larger stride is how a TensorRT-LLM pool, sized from its
            config, holds our slot.

    Raises:
        ReplayError: no layout or tensor; memory of another dtype, rank, alignment, too narrow, or with rows that
            overlap.
    """

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        import torch

        _check_layout(layout)
        have = type(memory).__name__
        require(isinstance(memory, torch.Tensor), f"memory is {have}; it must be a uint8 tensor [slots, stride_bytes]")
        require(memory.dtype == torch.uint8, f"memory is {memory.dtype}; it must be torch.uint8")
        require(memory.dim() == 2, f"memory has shape {tuple(memory.shape)}; it must be [slots, stride_bytes]")
        require(memory.stride(1) == 1, "memory must be dense along its last axis")
        need = layout.slot_bytes
        require(memory.shape[1] >= need, f"memory rows are {memory.shape[1]} bytes; this layout needs at least {need}")
        apart = memory.shape[0] <= 1 or memory.stride(0) >= need
        require(apart, f"memory rows are {memory.stride(0)} bytes apart and overlap; this layout needs at least {need}")
        for what, value in (("row stride", memory.stride(0)), ("base address", memory.data_ptr())):
            require(value % ROW_ALIGNMENT == 0, f"memory {what} is {value}; it must be a multiple of {ROW_ALIGNMENT}")
        self.layout = layout
        self.memory = memory
        self._views = {r.name: self._view(r.name) for r in layout.regions}

    @classmethod
    def allocate(cls, layout: Layout, slots: int, device: torch.device | str = "cpu") -> StatePool:
        """A zeroed pool of ``slots`` slots, every slot reset (empty window, zero state).

        Raises:
            ReplayError: no layout, slots out of range, a device that torch does not have here, or that cannot give so
                much memory (with the bytes that were asked for).
        """
        import torch

        _check_layout(layout)
        require_int("slots", slots, 1, MAX_SLOTS)
        pool = cls(layout, _zeros(slots, layout.slot_bytes, device))
        if isinstance(layout, SlotLayout):
            limits = [layout.spec.first_limit(i) for i in range(slots)]
            pool["cursor"][..., 3] = torch.tensor(limits, dtype=torch.int16, device=device)[:, None, None]
            for name in ("state_scale", "read_scale"):
                if name in layout:
                    pool[name].fill_(1.0)
        return pool

    @property
    def slots(self) -> int:
        """Number of slots."""
        return int(self.memory.shape[0])

    def __getitem__(self, name: str) -> torch.Tensor:
        """View of a region: [slots, *region.shape]. Raises ReplayError for a region that the layout lacks."""
        if name not in self._views:
            self.layout[name]  # raises, naming what there is
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def checkpoint(self, slots: torch.Tensor | None = None) -> torch.Tensor:
        """The checkpoints of ``slots`` (int [n]; default all), [n, H, P, N] of the state dtype, a copy: what region
        ``state`` holds times ``state_scale`` rounded to the state dtype, where the layout has one. Tokens that wait in
        the ring are not in it: ``materialize`` folds them.

        Raises:
            ReplayError: a pool of a convolution; slots that are no int tensor [n], or name a slot that the pool lacks.
        """
        require("state" in self, "this pool has no recurrent state: its layout is a ConvLayout")
        chosen = slice(None) if slots is None else self._chosen(slots)
        state = self["state"][chosen].clone() if slots is None else self["state"][chosen]
        if "state_scale" not in self:
            return state
        return state * self["state_scale"][chosen][..., 0].to(state.dtype)[..., None, None]

    def _chosen(self, slots: object) -> torch.Tensor:
        """The checked slots as int64."""
        import torch

        is_tensor = isinstance(slots, torch.Tensor)
        require(is_tensor, f"slots is {type(slots).__name__}; it must be an int tensor [n]")
        assert isinstance(slots, torch.Tensor)
        whole = slots.dtype in (torch.int16, torch.int32, torch.int64)
        require(whole and slots.dim() == 1, f"slots is {slots.dtype} {list(slots.shape)}; it must be an int tensor [n]")
        if len(slots) and not slots.is_cuda:  # device data is not waited for
            low, high = int(slots.min()), int(slots.max())
            named = low if low < 0 else high
            require(
                low >= 0 and high < self.slots, f"slots names slot {named}; the pool has slots 0 to {self.slots - 1}"
            )
        return slots.long()

    def _view(self, name: str) -> torch.Tensor:
        region = self.layout[name]
        size = DTYPE_BYTES[region.dtype]
        flat = self.memory[:, region.offset : region.end].view(torch_dtype(region.dtype))
        stride = (flat.stride(0), *region.strides)
        assert region.nbytes % size == 0
        return flat.as_strided((self.slots, *region.shape), stride, flat.storage_offset())
