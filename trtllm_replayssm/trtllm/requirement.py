"""The one place that imports tensorrt_llm and tensorrt, and that says what to install where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import ReplayError, require

SUPPORTED_VERSION = "1.2.1"
#: Releases whose TensorRT backend this package was written against.
_SERIES = "1.2."
_HOW = (
    f"install it with `pip install tensorrt_llm=={SUPPORTED_VERSION}` (Linux, Python 3.10 or 3.12, CUDA 13; its wheel "
    "and TensorRT 10.14 come from NVIDIA's package index, which pip must reach)"
)


def module(name: str) -> Any:
    """The module ``tensorrt_llm.<name>``.

    Raises:
        ReplayError: tensorrt_llm cannot be imported, is of another series than 1.2, or has no such module (its TensorRT
            backend was removed after 1.3.0rc20).
    """
    package = tensorrt_llm()
    try:
        return importlib.import_module(f"tensorrt_llm.{name}")
    except ImportError as error:
        raise ReplayError(
            f"tensorrt_llm {_version(package)} has no usable module {name} ({error}); the TensorRT backend of "
            f"{SUPPORTED_VERSION} is needed: {_HOW}"
        ) from None


def tensorrt_llm() -> Any:
    """The package tensorrt_llm. Raises ReplayError as :func:`module`."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except (ImportError, OSError) as error:
        raise ReplayError(f"tensorrt_llm cannot be imported ({error}); {_HOW}") from None
    found = _version(package)
    require(
        found.startswith(_SERIES),
        f"tensorrt_llm is {found}; the TensorRT backend of {SUPPORTED_VERSION} is needed: {_HOW}",
    )
    return package


def tensorrt() -> Any:
    """The module tensorrt that tensorrt_llm uses. Raises ReplayError where it cannot be imported."""
    try:
        return importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        raise ReplayError(f"tensorrt cannot be imported ({error}); it comes with tensorrt_llm: {_HOW}") from None


def _version(package: Any) -> str:
    return str(getattr(package, "__version__", "of unknown version"))
