"""The slot budget: TensorRT-LLM sizes its two state pools from config.json alone; our slots must fit in them.

Its C++ runtime and its Python session allocate, per recurrent layer and sequence,
    rnn_state_ptr_{i}   rnn_hidden_size * state_size fp32 numbers
    conv_state_ptr_{i}  (conv_kernel - 1) * rnn_conv_dim_size numbers of the model dtype
and hand the plugins the base address; the engine's own shapes are never compared with these keys. So config.json states
a ``state_size`` and ``conv_kernel`` that are large enough for a whole slot (layout.py), while the true dimensions stand
in its ``replayssm`` object, and the plugins' slot_stride is what the enlarged keys give. Needs the standard library
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ReplayError
from ..layout import ConvLayout, SlotLayout
from ..models.config import HybridConfig
from ..spec import DTYPE_BYTES, MAX_WINDOW, require_int

#: TensorRT-LLM's pool of recurrent states is fp32, whatever the model's dtype.
POOL_ELEMENT_BYTES = 4
_SIZE_LIMIT = 1 << 20


@dataclass(frozen=True)
class PoolShape:
    """The two keys of config.json and what they give.

    Attributes:
        state_size, conv_kernel: values of the keys.
        state_stride, conv_stride: bytes between two slots of a layer in TensorRT-LLM's pools.
        state_bytes, conv_bytes: bytes of our slots; no more than the strides.
    """

    state_size: int
    conv_kernel: int
    state_stride: int
    conv_stride: int
    state_bytes: int
    conv_bytes: int


def slot_bytes(config: HybridConfig, window: int) -> tuple[int, int]:
    """Bytes of a recurrent slot and of a convolution slot (one token per step, no read copy)."""
    return SlotLayout(config.recurrence_spec(window=window)).slot_bytes, ConvLayout(config.conv_spec()).slot_bytes


def state_stride(config: HybridConfig, state_size: int) -> int:
    """Bytes per sequence and layer in TensorRT-LLM's pool of recurrent states."""
    return config.ssm_inner_size * state_size * POOL_ELEMENT_BYTES


def conv_stride(config: HybridConfig, conv_kernel: int) -> int:
    """Bytes per sequence and layer in TensorRT-LLM's pool of convolution states."""
    return (conv_kernel - 1) * config.conv_channels * DTYPE_BYTES[config.dtype]


def needed(config: HybridConfig, window: int) -> PoolShape:
    """The smallest ``state_size`` and ``conv_kernel``, none below the model's own, whose pools hold the slots.

    Raises:
        ReplayError: window out of range.
    """
    state_bytes, conv_bytes = slot_bytes(config, window)
    state_size = max(config.ssm_state_size, -(-state_bytes // state_stride(config, 1)))
    conv_kernel = max(config.conv_kernel, 1 - (-conv_bytes // conv_stride(config, 2)))
    return checked(config, window, state_size, conv_kernel)


def checked(config: HybridConfig, window: int, state_size: int, conv_kernel: int) -> PoolShape:
    """The pools of a config.json, if they hold the slots of ``config`` with ``window``.

    Raises:
        ReplayError: a slot does not fit; the message has both sizes in bytes, the largest window that fits and the key
            that would make room.
    """
    require_int("state_size", state_size, 1, _SIZE_LIMIT)
    require_int("conv_kernel", conv_kernel, 2, _SIZE_LIMIT)
    state_bytes, conv_bytes = slot_bytes(config, window)
    have, conv_have = state_stride(config, state_size), conv_stride(config, conv_kernel)
    if have < state_bytes:
        fits = largest_window(config, state_size)
        other = f"window {fits} would fit" if fits else "no window would fit"
        raise ReplayError(
            f"state_size is {state_size}: TensorRT-LLM's state pool has {have} bytes per slot, window {window} needs "
            f"{state_bytes}; {other}, or set state_size to {-(-state_bytes // state_stride(config, 1))} or more"
        )
    if conv_have < conv_bytes:
        raise ReplayError(
            f"conv_kernel is {conv_kernel}: TensorRT-LLM's convolution pool has {conv_have} bytes per slot, the "
            f"convolution slot needs {conv_bytes}; set conv_kernel to {1 - (-conv_bytes // conv_stride(config, 2))} or "
            "more (the true kernel stands in the replayssm object)"
        )
    return PoolShape(state_size, conv_kernel, have, conv_have, state_bytes, conv_bytes)


def largest_window(config: HybridConfig, state_size: int) -> int:
    """The largest window whose slot fits the state pool that ``state_size`` gives; 0 if none does."""
    room = state_stride(config, state_size)
    fitting = [window for window in range(1, MAX_WINDOW + 1) if slot_bytes(config, window)[0] <= room]
    return max(fitting, default=0)
