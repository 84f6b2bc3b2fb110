"""Views: consecutive features of a network tensor, which cost no layer until one is needed."""

from __future__ import annotations

from typing import NamedTuple

from ..plugins import ALIGNMENT
from ..spec import DTYPE_BYTES
from .tensorrt_io import ROWS, TOKENS
from .tensorrt_layers import Layers, Node


class View(NamedTuple):
    """Features ``offset`` .. ``offset + width`` of ``node`` [B, S, total]."""

    node: Node
    offset: int
    width: int
    total: int

    @classmethod
    def whole(cls, node: Node, width: int) -> View:
        """All features of a tensor."""
        return cls(node, 0, width, width)

    def part(self, offset: int, width: int) -> View:
        """Features ``offset`` .. ``offset + width`` of this view."""
        return View(self.node, self.offset + offset, width, self.total)

    @property
    def is_whole(self) -> bool:
        """Whether it is the tensor itself."""
        return self.width == self.total

    @property
    def is_aligned(self) -> bool:
        """Whether a plugin can load vectors from it: it begins at, and has rows of, whole ones."""
        size = DTYPE_BYTES[self.node.dtype]
        return self.offset * size % ALIGNMENT == 0 and self.total * size % ALIGNMENT == 0


class Slicer:
    """Turns Views into tensors; each view becomes a slice layer at most once.

    Args:
        layers: the network.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._leading: Node | None = None
        self._sizes: dict[int, Node] = {}
        self._made: dict[tuple[int, int, int], tuple[Node, Node]] = {}

    def node(self, view: View) -> Node:
        """The view as a tensor [B, S, width] of its own."""
        if view.is_whole:
            return view.node
        key = (id(view.node.tensor), view.offset, view.width)
        if key not in self._made:
            made = self._layers.slice(view.node, self.sizes(view.width), (0, 0, view.offset))
            # The parent's tensor is kept too, so that no other one gets its id.
            self._made[key] = (made, view.node)
        return self._made[key][0]

    def sizes(self, width: int) -> Node:
        """Shape tensor [3]: B, S, width."""
        if width not in self._sizes:
            if self._leading is None:
                self._leading = self._layers.shape_of(self._layers.input("input_ids", (ROWS, TOKENS)))
            last = self._layers.integers([width], self._leading.dtype)
            self._sizes[width] = self._layers.concat([self._leading, last], 0)
        return self._sizes[width]
