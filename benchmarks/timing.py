"""Timing of device work: CUDA-graph replay, buffers that rotate past the L2 cache, medians; the card's own bandwidth.

A measurement is a list of calls, each on buffers of its own, captured in one graph. A replay is timed with events and
divided by the number of calls, so launch gaps inside the graph count, as they do for a decoding step.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the replays of one graph."""

    median_us: float
    best_us: float
    worst_us: float
    calls: int


def time_calls(
    calls: Sequence[Callable[[], object]],
    *,
    restore: Callable[[], object] | None = None,
    replays: int = 9,
    warmup: int = 2,
) -> Timing:
    """Capture ``calls`` in one CUDA graph and time its replays.

    Args:
        calls: device work without synchronisation; together they should run for a millisecond or more.
        restore: run (untimed) before every replay, for work that changes its own state.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(warmup + replays):
        if restore is not None:
            restore()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= warmup:
            times.append(begin.elapsed_time(end) * 1000.0 / len(calls))
    return Timing(statistics.median(times), min(times), max(times), len(calls))


def require_gpu() -> None:
    """End the program where torch has no GPU to time on."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks need an NVIDIA GPU and a torch built with CUDA; torch sees none")


def read_bandwidth(nbytes: int = 4 << 30) -> float:
    """TB/s of summing a large fp32 buffer: what reading alone can reach."""
    require_gpu()
    data = torch.randn(nbytes // 4, device="cuda")
    out = torch.empty((), device="cuda")
    timing = time_calls([lambda: torch.sum(data, dim=0, out=out)] * 2)
    return nbytes / timing.median_us / 1e6


def copy_bandwidth(nbytes: int = 2 << 30) -> float:
    """TB/s, bytes read plus bytes written, of a large device-to-device copy."""
    source = torch.randn(nbytes // 4, device="cuda")
    target = torch.empty_like(source)
    timing = time_calls([lambda: torch.mul(source, 1.0, out=target)] * 2)
    return 2 * nbytes / timing.median_us / 1e6


def machine() -> str:
    """GPU, driver, torch and CUDA versions in one line."""
    require_gpu()
    name = torch.cuda.get_device_name()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return f"{name}, driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}"
