"""A stand-in for a TensorRT that builds: the recorded network API (recorded_tensorrt.py) with a builder that says and
gives what a test tells it to. It shows what build_engine does with what comes back; engines are built by a real
tensorrt_rtx in test_build.py and by TensorRT 8.6 in tests/engine.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from recorded_tensorrt import recorded_tensorrt


class StandInBuild:
    """What the builder does and what it was asked.

    Attributes:
        messages: (severity, text) that the log gets while building. result: the engine's bytes, or None.
        obeying: refuse with this message while precisions are binding; empty: do not.
        settings: the IBuilderConfig that was used. phases: calls that a progress monitor gets.
    """

    def __init__(self, version: str) -> None:
        self.messages: list[tuple[int, str]] = []
        self.result: bytes | None = b"engine of the stand-in"
        self.phases: list[tuple[Any, ...]] = []
        self.obeying = ""
        self.builds = 0
        self.no_builder = False
        self.continued: list[bool] = []
        self.trt = self._module(version)

    def _module(self, version: str) -> Any:
        module = recorded_tensorrt(version)
        module.__name__ = "tensorrt"
        module.ILogger = type("ILogger", (), {})
        state = self

        class Builder:
            def __init__(self, logger: Any) -> None:
                self.logger = logger
                self.create_network = module.INetworkDefinition
                if state.no_builder:
                    logger.log(1, "CUDA initialization failure with error: 35")
                    raise TypeError("pybind11::init(): factory function returned nullptr")

            def create_builder_config(self) -> Settings:
                state.settings = Settings()
                return state.settings

            def create_optimization_profile(self) -> Any:
                return SimpleNamespace(set_shape=lambda *shapes: None)

            def build_serialized_network(self, network: Any, settings: Settings) -> bytes | None:
                state.builds += 1
                if state.obeying and settings.flags["OBEY_PRECISION_CONSTRAINTS"]:
                    self.logger.log(1, state.obeying)
                    return None
                for severity, text in state.messages:
                    self.logger.log(severity, text)
                for name, *arguments in state.phases:
                    state.continued.append(getattr(settings.progress_monitor, name)(*arguments))
                return state.result

        module.Builder = Builder
        if version == "8.6":
            module.PreviewFeature = SimpleNamespace(PROFILE_SHARING_0806="sharing")
        else:
            module.IProgressMonitor = type("IProgressMonitor", (), {})
        return module


class Settings:
    """An IBuilderConfig: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.builder_optimization_level = 3
        self.refuse_cache = False
        self.flags: Counter[str] = Counter()

    def clear_flag(self, flag: Any) -> None:
        self.flags[flag.name] = 0
        self.told.append(("clear", flag.name))

    def set_flag(self, flag: Any) -> None:
        self.flags[flag.name] = 1
        self.told.append(("set", flag.name))

    def set_memory_pool_limit(self, pool: Any, nbytes: int) -> None:
        self.told.append(("limit", pool.name, nbytes))

    def set_tactic_sources(self, sources: int) -> None:
        self.told.append(("tactics", sources))

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self.told.append(("preview", feature, on))

    def add_optimization_profile(self, profile: Any) -> int:
        return 0

    def create_timing_cache(self, data: bytes) -> Any:
        self.told.append(("cache", data))
        return None if data == b"of another GPU" else SimpleNamespace()

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"measured")
