"""Fields: typed look-ups in a config.json, with errors that name the file, the field and the value. JSON reading."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ReplayError, require

_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. ``Infinity`` and ``NaN`` are accepted, as published configs contain them.

    Raises:
        ReplayError: the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{path} is not JSON: {error}") from None
    require(isinstance(data, dict), f"{path} holds a JSON {type(data).__name__}; it must be an object")
    return dict(data)


def decode_float(value: Any) -> Any:
    """The number behind ``{"__float__": "Infinity"}``, as some configs write it. Other values come back as they are."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        try:
            return float(value["__float__"])
        except (TypeError, ValueError):
            return value
    return value


class Fields:
    """The fields of one config object.

    Args:
        data: the object. where: how errors name it.

    A name may be a tuple of names that different publishers use for one field; the first that is present and not null
    counts.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def get(self, names: str | tuple[str, ...], default: Any = _MISSING) -> Any:
        """The value, or ``default``. Raises ReplayError for a field that is absent or null and has no default."""
        options = (names,) if isinstance(names, str) else names
        for name in options:
            if self.data.get(name) is not None:
                return self.data[name]
        require(default is not _MISSING, f"{self.where}: {options[0]} is missing")
        return default

    def integer(self, names: str | tuple[str, ...], default: Any = _MISSING) -> int:
        """A whole number."""
        value = self.get(names, default)
        ok = isinstance(value, int) and not isinstance(value, bool)
        require(ok, f"{self._name(names)} is {value!r}; it must be a whole number")
        return int(value)

    def number(self, names: str | tuple[str, ...], default: Any = _MISSING) -> float:
        """A number, infinite ones included."""
        value = decode_float(self.get(names, default))
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
        require(ok, f"{self._name(names)} is {value!r}; it must be a number")
        return float(value)

    def boolean(self, names: str | tuple[str, ...], default: Any = _MISSING) -> bool:
        """True or false."""
        value = self.get(names, default)
        require(isinstance(value, bool), f"{self._name(names)} is {value!r}; it must be true or false")
        return bool(value)

    def strings(self, names: str | tuple[str, ...]) -> list[str]:
        """A list of strings."""
        value = self.get(names)
        ok = isinstance(value, list) and all(isinstance(item, str) for item in value)
        require(ok, f"{self._name(names)} is {value!r}; it must be a list of strings")
        return list(value)

    def integers(self, names: str | tuple[str, ...]) -> tuple[int, ...]:
        """None, a whole number or a list of them, as a tuple."""
        value = self.get(names, [])
        items = value if isinstance(value, list) else [value]
        ok = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
        require(ok, f"{self._name(names)} is {value!r}; it must be a whole number or a list of them")
        return tuple(items)

    def optional_integer(self, name: str) -> int | None:
        """A whole number, or None where the field is absent or null."""
        return None if self.get(name, None) is None else self.integer(name)

    def expect(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Raise ReplayError unless the field (``default`` where absent) is one of ``allowed``."""
        value = self.get(name, default)
        listed = ", ".join(map(str, allowed))
        require(value in allowed, f"{self._name(name)} is {value!r}; only {listed} is supported")

    def key(self, *names: str) -> str:
        """Which of the names is there and not null; the first where none is."""
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def _name(self, names: str | tuple[str, ...]) -> str:
        return f"{self.where}: {self.key(names) if isinstance(names, str) else self.key(*names)}"
