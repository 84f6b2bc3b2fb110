"""The append to a KV cache without a GPU: what library and binding refuse, by name. The copies: tests/gpu/test_kv.py.

Pointers here are numbers that are never followed: every case is refused before a launch, and what passes the checks
fails at the missing GPU (a status of its own).
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from trtllm_replayssm import ReplayError, kernels
from trtllm_replayssm.kernels import abi, library
from trtllm_replayssm.kernels.kv import kv_append


def params(**changes: Any) -> abi.KvAppendParams:
    """Params that pass the checks, with changes."""
    values: dict[str, Any] = {
        "struct_size": ctypes.sizeof(abi.KvAppendParams),
        "rows": 2,
        "tokens": 3,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": abi.DTYPE_CODES["float16"],
        "parts": 2,
        "slots": 4,
        "max_positions": 16,
        "new_kv": 64,
        "cache": 64,
        "slot_mapping": abi.CIndex(64, 32, 0),
        "positions": abi.CIndex(64, 64, 0),
    }
    return abi.KvAppendParams(**{**values, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"struct_size": 8}, "params.struct_size is 8"),
        ({"dtype": 5}, "dtype is int16; it must be float32, bfloat16 or float16"),
        ({"dtype": 1}, "dtype is float64; it must be float32"),
        ({"rows": -1}, "rows is -1; it must be from 0 to"),
        ({"tokens": -1}, "tokens is -1"),
        ({"rows": 1 << 20, "tokens": 1 << 12}, "rows is 1048576 with tokens 4096; their product must be at most"),
        ({"parts": 0}, "parts is 0; it must be from 1 to 2"),
        ({"parts": 3}, "parts is 3"),
        ({"kv_heads": 0}, "kv_heads is 0; it must be from 1 to 4096"),
        ({"head_dim": 4097}, "head_dim is 4097; it must be from 1 to 4096"),
        ({"slots": 0}, "slots is 0; it must be from 1 to"),
        ({"max_positions": 0}, "max_positions is 0"),
        ({"new_kv": 0}, "new_kv is NULL; it must be a device pointer"),
        ({"cache": 0}, "cache is NULL"),
        ({"cache": 65}, "cache starts at address 65; it must be a multiple of 2, the bytes of an element"),
        ({"dtype": 2, "new_kv": 66}, "new_kv starts at address 66; it must be a multiple of 4"),
        ({"slot_mapping": abi.CIndex(0, 32, 0)}, "slot_mapping is NULL"),
        ({"slot_mapping": abi.CIndex(64, 16, 0)}, "slot_mapping.bits is 16; it must be 32 or 64"),
        ({"positions": abi.CIndex(0, 32, 0)}, "positions is NULL"),
        ({"counts": abi.CIndex(64, 8, 0)}, "counts.bits is 8"),
    ],
)
def test_bad_params_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=f"kv_append: {message}"):
        library.call("replayssm_kv_append", params(**changes), 0)


def test_no_params() -> None:
    loaded = kernels.load()
    assert loaded.replayssm_kv_append(None, None) == 1
    assert b"params is NULL" in loaded.replayssm_last_error()


@pytest.mark.parametrize("changes", [{"rows": 0}, {"tokens": 0}])
def test_nothing_to_do_touches_nothing(changes: dict[str, int]) -> None:
    library.call("replayssm_kv_append", params(**changes, new_kv=0, cache=0), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the pointers would be followed")
def test_good_params_get_as_far_as_cuda() -> None:
    """Teeth of the refusals: the params that the changes start from are right."""
    for change in ({}, {"parts": 1}, {"dtype": abi.DTYPE_CODES["float32"]}, {"head_dim": 3}):
        with pytest.raises(RuntimeError, match="kv_append: "):
            library.call("replayssm_kv_append", params(**change), 0)


def test_the_binding_refuses_tensors_by_name() -> None:
    cache, new = torch.zeros(2, 2, 1, 8, 4), torch.zeros(1, 3, 2, 1, 4)
    slots, places = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ReplayError, match="cache is on cpu; it must be on a CUDA device"):
        kv_append(cache, new, slots, places)
    with pytest.raises(ReplayError, match=r"cache has shape \[2, 2, 8, 4\]; it must be \[slots, parts"):
        kv_append(cache[:, :, 0], new, slots, places)
