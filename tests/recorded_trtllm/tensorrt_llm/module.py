"""Recorded: Module keeps Modules and Parameters that are set as attributes, under their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._common import default_net
from .parameter import Parameter


class Module:
    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._parameters: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        default_net()
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        for kept in ("_parameters", "_modules"):
            found = self.__dict__.get(kept)
            if found is not None and name in found:
                return found[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter):
            self.__dict__["_parameters"][name] = value
        elif isinstance(value, Module):
            self.__dict__["_modules"][name] = value
        else:
            object.__setattr__(self, name, value)

    def named_children(self) -> Iterator[tuple[str, Any]]:
        yield from self._modules.items()

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        dot = f"{prefix}." if prefix else ""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, module in self._modules.items():
            yield from module.named_parameters(dot + name)

    def register_parameter(self, name: str, param: Any) -> None:
        self._parameters[name] = param
