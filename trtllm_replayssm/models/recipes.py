"""Recipes: how each of our weights is made from the tensors of a published checkpoint.

A family module lists one Recipe per weight of its decoder. Source names are canonical, that is without the prefixes
(``backbone.``, ``model.language_model.`` ...) that publishers put in front; hf.py takes them off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Tensors = list["torch.Tensor"]


@dataclass(frozen=True)
class Source:
    """One published tensor: canonical name and the shape that the config implies, or one of the shapes ``also``."""

    name: str
    shape: tuple[int, ...]
    also: tuple[tuple[int, ...], ...] = ()


def only(tensors: Tensors) -> torch.Tensor:
    """The one source as it is."""
    (tensor,) = tensors
    return tensor


def concatenated(tensors: Tensors) -> torch.Tensor:
    """The sources' rows one behind the other."""
    import torch

    return torch.cat(tensors)


def squeezed(tensors: Tensors) -> torch.Tensor:
    """A depthwise convolution's [C, 1, taps] as [C, taps]."""
    return only(tensors).squeeze(1)


def one_plus(tensors: Tensors) -> torch.Tensor:
    """1 + w in fp32: the scale of a norm that is published as its distance from 1."""
    return only(tensors).float() + 1.0


@dataclass(frozen=True)
class Recipe:
    """How to make the weight ``target``: combine ``sources``; where one is absent, try ``otherwise``."""

    target: str
    sources: tuple[Source, ...]
    combine: Callable[[Tensors], torch.Tensor] = only
    otherwise: Recipe | None = None


def plain(target: str, name: str, *shape: int) -> Recipe:
    """One published tensor, unchanged."""
    return Recipe(target, (Source(name, shape),))


def stacked(target: str, names: dict[str, int], columns: int) -> Recipe:
    """Projections ``{name: rows}`` of [rows, columns] stacked into one; with ``columns`` 0, their biases [rows]."""
    tail = (columns,) if columns else ()
    return Recipe(target, tuple(Source(name, (rows, *tail)) for name, rows in names.items()), concatenated)
