"""What ranks have: boxes of a tensor in a local tensor, and grids of tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from .checks import IntArray, Shape
from .segments import Segments

__all__ = ["Box", "Grid", "Part"]


@dataclass(frozen=True)
class Box:
    """Elements start[d] to start[d] + size[d] of the tensor, that a local tensor has from position at[d] on."""

    start: Shape
    size: Shape
    at: Shape

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True)) + "]"


@dataclass(frozen=True)
class Part:
    """What one rank has: the shape of its local tensor, and where its elements belong."""

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(math.prod(box.size) for box in self.boxes)


@dataclass(frozen=True, eq=False)
class Grid:
    """A product of dealt dimensions. Its tiles are numbered row-major by their parts in each dimension."""

    segments: tuple[Segments, ...]
    holders: IntArray  # (tiles, replicas): the ranks that have each tile
    # For each replica (replicas, dims) where the tile begins in its local tensor, and that tensor's shape. None: the
    # tile is the local tensor.
    origin: IntArray | None = None
    local_shapes: IntArray | None = None

    @cached_property
    def parts(self) -> Shape:
        """The number of parts in each dimension."""
        return tuple(segments.num_parts for segments in self.segments)
