"""TensorRT as the build sees it: which module, its log, its progress, and what its failures mean.

The classes that TensorRT calls back are made for the module that is in use, since they derive from its own.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from ..errors import ReplayError, require
from .options import IO

#: Called with (done, total, what is being done now).
Progress = Callable[[int, int, str], None]

INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2
_KEPT = 8
_INSTALL = {"tensorrt": "pip install 'tensorrt>=10,<12'", "tensorrt_rtx": "pip install tensorrt-rtx"}
#: Text in TensorRT 8.6's log that begins a phase of the build -> the phase's name, in their order.
_LOG_PHASES = (
    ("Graph optimization time", "choosing kernels"),
    ("Total Host Persistent Memory", "planning memory"),
    ("Total Activation Memory", "generating the engine"),
    ("Engine generation completed", "serialising"),
)
#: Text in the log -> what it means to the user; the first that is found counts.
_MEANINGS = (
    (
        ("insufficient workspace", "requested size was"),
        "a layer needs more scratch memory than --workspace allows; raise it or leave it out",
    ),
    (
        ("out of memory", "outofmemory", "cudamalloc"),
        "the GPU is out of memory; free it, or build for a smaller --max-batch, --max-input-len or --max-positions",
    ),
    (
        ("could not find plugin", "plugin not found", "getplugincreator", "getcreator"),
        "a plugin of this package is not registered with TensorRT; `trtllm-replayssm doctor` says what the library did",
    ),
    (
        ("cuda initialization failure", "cuda driver", "no cuda-capable device"),
        "TensorRT finds no usable GPU; engines are built on the GPU that runs them",
    ),
    (
        ("could not find any implementation", "no implementation"),
        "TensorRT has no kernel for one of the layers at these sizes",
    ),
)


def find_tensorrt(name: str, network: str | None = None) -> ModuleType:
    """The module ``tensorrt`` or ``tensorrt_rtx``; ``auto`` is tensorrt.

    Args:
        name: as above. network: of the build that it is for, None for a run: what may be tried without a GPU is said of
            builds, in the options that are not given yet.

    Raises:
        ReplayError: it is not installed, or does not load.
    """
    wanted = "tensorrt" if name == "auto" else name
    install = _INSTALL[wanted]
    if wanted == "tensorrt" and network is not None:
        more = "--tensorrt tensorrt_rtx" + ("" if network == IO else f" --network {IO}")
        install += f"; building needs a GPU (without one: {more})"
    try:
        module = importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        if error.name != wanted:
            raise ReplayError(f"{wanted} does not load: {error}") from None
        raise ReplayError(f"{wanted} is not installed; install it with: {install}") from None
    except Exception as error:  # its own start-up code may raise anything
        raise ReplayError(f"{wanted} does not load: {type(error).__name__}: {error}") from None
    require(hasattr(module, "Builder"), f"{wanted} {getattr(module, '__version__', '')} has no builder; {install}")
    return module


def major_version(trt: Any) -> int:
    """8, 10, 11 ... (TensorRT-RTX counts for itself and has the interfaces of 10 and newer)."""
    return int(str(trt.__version__).split(".", maxsplit=1)[0])


class BuildLog:
    """The last errors and warnings of a build or runtime, and its phases where TensorRT tells them in its log alone."""

    def __init__(self, progress: Progress | None = None, *, verbose: bool = False) -> None:
        self.errors: deque[str] = deque(maxlen=_KEPT)
        self.warnings: deque[str] = deque(maxlen=_KEPT)
        self.interrupted = False
        #: Set where a progress monitor reports the phases instead.
        self.monitored = False
        self._progress = progress
        self._verbose = verbose

    def add(self, severity: int, message: str) -> None:
        """One message of TensorRT. Raises nothing: the caller is C++."""
        try:
            if severity <= ERROR:
                self.errors.append(message)
            elif severity == WARNING:
                self.warnings.append(message)
            if self._verbose:
                print(f"[tensorrt] {message}", file=sys.stderr, flush=True)
            if self._progress is not None and not self.monitored:
                for done, (text, phase) in enumerate(_LOG_PHASES, start=1):
                    if text in message:
                        self._progress(done, len(_LOG_PHASES), phase)
        except BaseException:
            self.interrupted = True

    def reason(self) -> str:
        """What went wrong, for a message: the meaning of the errors where it is known, and the errors themselves."""
        messages = list(self.errors) or list(self.warnings)
        text = " ".join(messages).lower()
        meaning = next((meaning for signs, meaning in _MEANINGS if any(sign in text for sign in signs)), "")
        return f"{meaning} ({self.said()})" if meaning else self.said()

    def said(self) -> str:
        """The last errors, or else warnings, in TensorRT's words."""
        messages = list(self.errors) or list(self.warnings)
        if not messages:
            return "TensorRT gave no reason in its log"
        return "TensorRT: " + "; ".join(" ".join(m.split()) for m in messages[-3:])

    @property
    def lacks_kernel(self) -> bool:
        """Whether the build found no kernel for a layer although the workspace would do."""
        text = " ".join(self.errors).lower()
        return "could not find any implementation" in text and not any(sign in text for sign in _MEANINGS[0][0])

    def clear(self) -> None:
        """Forget the messages so far."""
        self.errors.clear()
        self.warnings.clear()


def make_logger(trt: Any, log: BuildLog) -> Any:
    """An ILogger of ``trt`` that writes into ``log``; it must outlive the builder and its engines."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.add(int(severity), message)

    return Logger()


def make_monitor(trt: Any, log: BuildLog, progress: Progress) -> Any:
    """An IProgressMonitor of ``trt`` (10 and newer) that reports the outermost phase and stops the build on Ctrl-C."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: list[tuple[str, int]] = []

        def phase_start(self, phase_name: str, parent_phase: Any, num_steps: int) -> None:
            self.phases.append((phase_name, num_steps))
            self._report(phase_name, 0)

        def phase_finish(self, phase_name: str) -> None:
            steps = [steps for name, steps in self.phases if name == phase_name]
            self.phases = [entry for entry in self.phases if entry[0] != phase_name]
            if steps:
                self._report(phase_name, steps[-1], steps[-1])

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._report(phase_name, step + 1)
            return not log.interrupted

        def _report(self, phase: str, done: int, total: int = 0) -> None:
            try:
                if not total:
                    total = next((steps for name, steps in self.phases if name == phase), done)
                if not self.phases or self.phases[0][0] == phase:
                    progress(min(done, total), total, phase)
            except BaseException:
                log.interrupted = True

    log.monitored = True
    return Monitor()


@contextmanager
def interruptible(log: BuildLog) -> Iterator[None]:
    """Ctrl-C stops the build at its next step, a second one the process: Python must not raise inside TensorRT's calls.

    Raises:
        KeyboardInterrupt: at the end of the block, where one came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        log.interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if log.interrupted:
        raise KeyboardInterrupt
