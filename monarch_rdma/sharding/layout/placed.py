"""Layouts that a mesh and placements make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .checks import IntArray, LayoutError, Shape, natural_numbers
from .mesh import Mesh
from .part import Box, Grid, Part
from .placements import SHARDING, Partial, Placement, Replicate
from .segments import Segments, segments_of

__all__ = ["Layout"]


class Layout:
    """A tensor of `shape`, placed on `mesh` by one placement for each of its dimensions.

    Where several placements shard one dimension, they do so in the order of the mesh's dimensions, each what the one
    before has left. Equal layouts compare equal, and hash.
    """

    def __init__(
        self, shape: Iterable[int], mesh: Mesh, placements: Sequence[Placement] | Mapping[str, Placement] = ()
    ) -> None:
        """`placements`: one for each mesh dimension in order, or by name, where those not named are Replicate.

        LayoutError where a placement does not fit the shape or the mesh.
        """
        self.shape: Shape = natural_numbers("shape", shape)
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = self._checked(placements)
        self._key = (self.shape, self.mesh, self.placements)
        self._hash = hash(self._key)
        for dim in range(len(self.shape)):
            self._segments(dim)  # says now what is wrong with sizes

    def _checked(self, given: Any) -> tuple[Placement, ...]:
        names = self.mesh.names
        if isinstance(given, Mapping):
            if unknown := set(given) - set(names):
                raise LayoutError(f"placements name {sorted(unknown)}, but the mesh has the dimensions {list(names)}")
            given = [given.get(name, Replicate()) for name in names]
        elif len(given) == 0:
            given = [Replicate()] * len(names)
        if len(given) != len(names):
            raise LayoutError(f"{len(given)} placements are given for a mesh of {len(names)} dimensions {list(names)}")
        return tuple(self._checked_one(placement, name) for placement, name in zip(given, names, strict=True))

    def _checked_one(self, placement: Any, name: str) -> Placement:
        if isinstance(placement, Replicate | Partial):
            return placement
        if not isinstance(placement, SHARDING):
            raise LayoutError(f"the placement for {name!r} is {placement!r}, which is none")
        dims = len(self.shape)
        if not -dims <= placement.dim < dims:
            raise LayoutError(f"{placement} for {name!r}: a tensor of shape {self.shape} has no such dimension")
        if placement.dim >= 0:
            return placement
        fields = {name: getattr(placement, name) for name in placement.__dataclass_fields__}
        return type(placement)(**{**fields, "dim": placement.dim % dims})

    def _mesh_dims(self, dim: int) -> list[int]:
        """The dimensions of the mesh that shard dimension `dim` of the tensor."""
        return [
            axis
            for axis, placement in enumerate(self.placements)
            if isinstance(placement, SHARDING) and placement.dim == dim
        ]

    def _segments(self, dim: int) -> Segments:
        deals = tuple((self.placements[axis], self.mesh.sizes[axis]) for axis in self._mesh_dims(dim))
        return segments_of(self.shape[dim], deals)

    @property
    def is_partial(self) -> bool:
        """Whether elements are yet to be reduced."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    @cached_property
    def ranks(self) -> IntArray:
        return self.mesh.ranks.ravel()

    @cached_property
    def grid(self) -> Grid:
        """The whole layout."""
        axes = [axis for dim in range(len(self.shape)) for axis in self._mesh_dims(dim)]
        others = [axis for axis in range(len(self.mesh.sizes)) if axis not in axes]
        tiles = math.prod(self.mesh.sizes[axis] for axis in axes)
        holders = self.mesh.ranks.transpose(axes + others).reshape(tiles, -1)
        return Grid(tuple(self._segments(dim) for dim in range(len(self.shape))), holders)

    @cached_property
    def _tiles(self) -> dict[int, tuple[int, int]]:
        """Tile and replica of each rank."""
        replicas = self.grid.holders.shape[1]
        return {rank: divmod(place, replicas) for place, rank in enumerate(self.grid.holders.ravel().tolist())}

    def grids(self, low: Sequence[int] | None = None, high: Sequence[int] | None = None) -> list[Grid]:
        """Grids that have all elements between, each element once. Here always the one."""
        return [self.grid]

    def tiles(self, rank: int) -> list[tuple[Grid, int, int]]:
        """What a rank has: grid, tile, and which replica of it. Nothing where it is not in the mesh."""
        place = self._tiles.get(rank)
        return [] if place is None else [(self.grid, *place)]

    def part(self, rank: int) -> Part:
        """Shape and boxes of a rank's local tensor; of a rank outside of the mesh (0, ...) and none."""
        place = self._tiles.get(rank)
        if place is None:
            return Part((0,) * len(self.shape), ())
        indices = np.unravel_index(place[0], self.grid.parts) if self.shape else ()
        shape, rows = [], []
        for segments, part in zip(self.grid.segments, indices, strict=True):
            mine = segments.of_part(int(part))
            shape.append(int(segments.part_sizes[part]))
            rows.append(
                list(
                    zip(
                        *(column[mine].tolist() for column in (segments.start, segments.size, segments.at)), strict=True
                    )
                )
            )
        boxes = (Box(*zip(*row, strict=True)) if row else Box((), (), ()) for row in itertools.product(*rows))
        return Part(tuple(shape), tuple(boxes))

    def own_boxes(self, rank: int) -> tuple[Box, ...]:
        """Those of a rank's boxes that it is the first to have. Those of all ranks have each element once."""
        place = self._tiles.get(rank)
        return self.part(rank).boxes if place is not None and place[1] == 0 else ()

    def renumbered(self, by: int) -> Layout:
        """The same on other ranks: each number grows by this."""
        mesh = self.mesh
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        return Layout(self.shape, Mesh(sizes, (mesh.ranks + by).ravel().tolist()), self.placements)

    def check(self) -> None:
        """Does nothing: placements can neither miss an element nor have one twice."""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Layout({self.shape}, {self.mesh}, {list(self.placements)})"
