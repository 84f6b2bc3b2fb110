"""The contenders of bench_against_peers: our own kernels and those of the packages that people use today.

One module per package, each with the same parts (base.py). A package is imported by its own module alone, so the others
run where it is absent; ``CONTENDERS`` maps the name in the table to the module and class.
"""

from __future__ import annotations

import importlib

from trtllm_replayssm.errors import require

from .base import Contender

#: Name in the table -> (module of this package, class). Order is the order of the table.
CONTENDERS = {
    "ours": ("own", "OwnReplay"),
    "ours-conventional": ("own", "OwnConventional"),
    "vllm-replay": ("vllm_triton", "VllmReplay"),
    "vllm-conventional": ("vllm_triton", "VllmConventional"),
    "flashinfer-replay": ("flashinfer_cuda", "FlashInferReplay"),
    "flashinfer-conventional": ("flashinfer_cuda", "FlashInferConventional"),
    "mamba-ssm": ("mamba_ssm_triton", "MambaSsm"),
}


def contender(name: str) -> Contender:
    """The contender of that name. Raises ReplayError for another name."""
    require(name in CONTENDERS, f"contender is {name!r}; it must be one of {', '.join(CONTENDERS)}")
    module, kind = CONTENDERS[name]
    made = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    assert isinstance(made, Contender)
    return made
