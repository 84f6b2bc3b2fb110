"""Finding and loading libtrtllm_replayssm.so. Loaded on first use, checked for its ABI number, then kept.

Needs the standard library alone. TRTLLM_REPLAYSSM_LIBRARY names another file than the packaged one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from ..errors import ReplayError
from . import abi

ENVIRONMENT_VARIABLE = "TRTLLM_REPLAYSSM_LIBRARY"
LIBRARY_NAME = "libtrtllm_replayssm.so"


def library_path() -> Path:
    """Where the library is expected: TRTLLM_REPLAYSSM_LIBRARY, or lib/ of this package."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / "lib" / LIBRARY_NAME


def bind(path: Path) -> ctypes.CDLL:
    """Load ``path``, check its ABI and declare its functions.

    Raises:
        ReplayError: no such file, not loadable, or built for another ABI.
    """
    if not path.is_file():
        raise ReplayError(
            f"library {path} does not exist; build it with `make lib` (needs nvcc), or let {ENVIRONMENT_VARIABLE} "
            "name the file"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.replayssm_abi_version())
    except (OSError, AttributeError) as error:
        raise ReplayError(f"library {path} cannot be used: {error}; build it again with `make lib`") from None
    if version != abi.ABI_VERSION:
        raise ReplayError(
            f"library {path} has ABI {version}; this package needs {abi.ABI_VERSION}: build it again with `make lib`"
        )
    for name in ("replayssm_version", "replayssm_architectures", "replayssm_last_error"):
        getattr(library, name).restype = ctypes.c_char_p
    for name, params in abi.OPERATIONS.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = [ctypes.POINTER(params), ctypes.c_void_p]
    library.replayssm_slot_layout.argtypes = [ctypes.POINTER(abi.CRecurrenceSpec), ctypes.POINTER(abi.CLayout)]
    library.replayssm_conv_layout.argtypes = [ctypes.POINTER(abi.CConvSpec), ctypes.POINTER(abi.CLayout)]
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The library at :func:`library_path`, loaded once. Raises ReplayError as :func:`bind` does."""
    return bind(library_path())


def info() -> dict[str, str]:
    """Path, package version and GPU architectures of the library. Raises ReplayError if it cannot be loaded."""
    library = load()
    return {
        "path": str(library_path()),
        "version": library.replayssm_version().decode(),
        "architectures": library.replayssm_architectures().decode(),
        "abi": str(library.replayssm_abi_version()),
    }


def check(library: Any, status: int) -> None:
    """Raise ReplayError (RuntimeError for a CUDA error) with the library's message unless ``status`` is 0."""
    if status == 0:
        return
    message = library.replayssm_last_error().decode(errors="replace")
    if status == abi.CUDA_ERROR:
        raise RuntimeError(message)
    raise ReplayError(message)


def call(name: str, params: ctypes.Structure, stream: int) -> None:
    """Run an operation on a CUDA stream. Raises as :func:`check`."""
    library = load()
    check(library, getattr(library, name)(ctypes.byref(params), stream))
