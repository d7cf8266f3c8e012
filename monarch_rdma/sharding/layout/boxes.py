"""Layouts that are said box by box."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .checks import IntArray, LayoutError, Shape, natural_numbers
from .part import Box, Grid, Part
from .segments import Segments

__all__ = ["BoxLayout"]


@dataclass(eq=False)
class _Held:
    """One box and who has it."""

    start: Shape
    size: Shape
    ranks: list[int] = field(default_factory=list)
    at: list[Shape] = field(default_factory=list)

    def grid(self, shapes: Mapping[int, Shape]) -> Grid:
        dims = len(self.start)
        return Grid(
            tuple(Segments.of_range(start, size) for start, size in zip(self.start, self.size, strict=True)),
            np.array([self.ranks], dtype=np.int64),
            _table(self.at, dims),
            _table([shapes[rank] for rank in self.ranks], dims),
        )


class BoxLayout:
    """A tensor of `shape` of which each rank has boxes. Boxes of different ranks must be equal (then they are replicas)
    or have no element in common, and together all boxes must have every element; `check` says what is wrong.
    """

    is_partial = False

    def __init__(self, shape: Iterable[int], parts: Mapping[int, Part | Iterable[Box]]) -> None:
        """`parts`: what each rank has. Boxes alone: its local tensor ends where the last of them does.

        LayoutError as in `check`, and for boxes outside of the tensor or of the local tensor.
        """
        self.shape: Shape = natural_numbers("shape", shape)
        self._parts: dict[int, Part] = {}
        held: dict[tuple[Shape, Shape], _Held] = {}
        for rank in sorted(natural_numbers("ranks", parts)):
            part = self._parts[rank] = self._checked(rank, parts[rank])
            for box in part.boxes:
                one = held.setdefault((box.start, box.size), _Held(box.start, box.size))
                if rank in one.ranks:
                    raise LayoutError(f"rank {rank} has the box {box} twice")
                one.ranks.append(rank)
                one.at.append(box.at)
        self._held = list(held.values())
        self._first = {key: one.ranks[0] for key, one in held.items()}
        dims = len(self.shape)
        self._start = _table([one.start for one in self._held], dims)
        self._end = self._start + _table([one.size for one in self._held], dims)
        self._key = (self.shape, tuple(self._parts.items()))
        self._hash = hash(self._key)
        self.check()

    def _checked(self, rank: int, given: Part | Iterable[Box]) -> Part:
        boxes = tuple(given.boxes if isinstance(given, Part) else given)
        dims = len(self.shape)
        for box in boxes:
            for name, values in (("start", box.start), ("size", box.size), ("at", box.at)):
                if len(natural_numbers(f"{name} of {box!r}", values)) != dims:
                    raise LayoutError(f"{box!r} of rank {rank} does not have {dims} dimensions, as shape {self.shape}")
            if any(start + size > n for start, size, n in zip(box.start, box.size, self.shape, strict=True)):
                raise LayoutError(f"box {box} of rank {rank} reaches outside of the shape {self.shape}")
        boxes = tuple(box for box in boxes if 0 not in box.size)
        needed = tuple(max((box.at[d] + box.size[d] for box in boxes), default=0) for d in range(dims))
        shape = natural_numbers("shape of the part", given.shape) if isinstance(given, Part) else needed
        if len(shape) != dims or any(have < need for have, need in zip(shape, needed, strict=True)):
            raise LayoutError(f"the local tensor of rank {rank} has shape {shape}, but its boxes need {needed}")
        places = _table([box.at for box in boxes], dims)
        ends = places + _table([box.size for box in boxes], dims)
        if (clash := _first_overlap(places, ends)) is not None:
            one, other = (boxes[i] for i in clash)
            raise LayoutError(f"boxes {one} at {one.at} and {other} at {other.at} overlap in rank {rank}'s tensor")
        return Part(shape, boxes)

    @cached_property
    def ranks(self) -> IntArray:
        return np.array(list(self._parts), dtype=np.int64)

    @cached_property
    def _grids(self) -> list[Grid]:
        shapes = {rank: part.shape for rank, part in self._parts.items()}
        return [one.grid(shapes) for one in self._held]

    @cached_property
    def _tiles(self) -> dict[int, list[tuple[Grid, int, int]]]:
        tiles: dict[int, list[tuple[Grid, int, int]]] = {}
        for one, grid in zip(self._held, self._grids, strict=True):
            for replica, rank in enumerate(one.ranks):
                tiles.setdefault(rank, []).append((grid, 0, replica))
        return tiles

    def grids(self, low: Sequence[int] | None = None, high: Sequence[int] | None = None) -> list[Grid]:
        """As Layout.grids: those with elements between `low` and `high`, one for each box."""
        touched = np.ones(len(self._held), dtype=bool)
        if low is not None and high is not None:
            touched = np.all((self._start < np.asarray(high)) & (self._end > np.asarray(low)), axis=1)
        return [self._grids[i] for i in np.flatnonzero(touched)]

    def tiles(self, rank: int) -> list[tuple[Grid, int, int]]:
        """As Layout.tiles."""
        return self._tiles.get(rank, [])

    def part(self, rank: int) -> Part:
        """As Layout.part."""
        return self._parts.get(rank, Part((0,) * len(self.shape), ()))

    def own_boxes(self, rank: int) -> tuple[Box, ...]:
        """As Layout.own_boxes."""
        return tuple(box for box in self.part(rank).boxes if self._first[box.start, box.size] == rank)

    def renumbered(self, by: int) -> BoxLayout:
        """As Layout.renumbered."""
        return BoxLayout(self.shape, {rank + by: part for rank, part in self._parts.items()})

    def check(self) -> None:
        """LayoutError naming elements that two boxes share, or that no rank has."""
        if (clash := _first_overlap(self._start, self._end)) is not None:
            one, other = (self._held[i] for i in clash)
            low = tuple(max(pair) for pair in zip(one.start, other.start, strict=True))
            high = np.minimum(self._end[clash[0]], self._end[clash[1]]).tolist()
            shared = Box(low, tuple(b - a for a, b in zip(low, high, strict=True)), low)
            raise LayoutError(
                f"boxes {Box(one.start, one.size, one.start)} of rank {one.ranks[0]} and "
                f"{Box(other.start, other.size, other.start)} of rank {other.ranks[0]} both have {shared}, but are not "
                "equal; cut them so that they are, or have nothing in common"
            )
        have, total = int(np.prod(self._end - self._start, axis=1).sum()), math.prod(self.shape)
        if have < total:
            missing = _first_missing(self.shape, self._start, self._end)
            raise LayoutError(f"no rank has the elements {missing}: {total - have} of {total} are missing")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BoxLayout) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"BoxLayout({self.shape}, {len(self._held)} boxes on {len(self._parts)} ranks)"


def _table(rows: Sequence[Shape], dims: int) -> IntArray:
    return np.array(rows, dtype=np.int64).reshape(len(rows), dims)


def _first_overlap(start: IntArray, end: IntArray) -> tuple[int, int] | None:
    """Two boxes that have an element in common. Along the dimension that tells most apart only neighbours can meet."""
    count, dims = start.shape
    if count < 2:
        return None
    if dims == 0:
        return 0, 1
    axis = max(range(dims), key=lambda d: np.unique(start[:, d]).size)
    order = np.argsort(start[:, axis], kind="stable")
    start, end = start[order], end[order]
    upto = np.searchsorted(start[:, axis], end[:, axis], side="left")
    for i in range(count - 1):
        others = slice(i + 1, upto[i])
        meets = np.all((start[others] < end[i]) & (end[others] > start[i]), axis=1)
        if meets.any():
            return int(order[i]), int(order[i + 1 + np.argmax(meets)])
    return None


def _first_missing(shape: Shape, start: IntArray, end: IntArray) -> Box:
    """A box of elements that none of the boxes has: what is left of the whole when all are cut out of it."""
    left = [(tuple([0] * len(shape)), shape)]
    for low, high in zip(start.tolist(), end.tolist(), strict=True):
        left = [rest for one in left for rest in _without(one, low, high)]
    first, last = min(left)
    return Box(first, tuple(b - a for a, b in zip(first, last, strict=True)), first)


def _without(box: tuple[Shape, Shape], low: Sequence[int], high: Sequence[int]) -> list[tuple[Shape, Shape]]:
    """The box without the elements between low and high, as boxes."""
    begin, end = list(box[0]), list(box[1])
    if any(a >= q or b <= p for a, b, p, q in zip(begin, end, low, high, strict=True)):
        return [box]
    rest = []
    for dim in range(len(begin)):
        if begin[dim] < low[dim]:
            rest.append((tuple(begin), (*end[:dim], low[dim], *end[dim + 1 :])))
            begin[dim] = low[dim]
        if end[dim] > high[dim]:
            rest.append(((*begin[:dim], high[dim], *begin[dim + 1 :]), tuple(end)))
            end[dim] = high[dim]
    return rest
