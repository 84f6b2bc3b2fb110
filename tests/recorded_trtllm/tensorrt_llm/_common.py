"""Recorded: the current network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_net: Any = None


def default_net() -> Any:
    assert _net is not None, "no network: use net_guard"
    return _net


def default_trtnet() -> Any:
    return default_net().trt_network


@contextlib.contextmanager
def net_guard(network: Any) -> Iterator[None]:
    """In the real package this lives in network.py, which imports it from nowhere else."""
    global _net
    before, _net = _net, network
    try:
        yield
    finally:
        _net = before
