"""One value for each rank of a mesh, as `call` returns them.

Equal neighbours are kept once, with a count (run-length encoding): the None of 10,000 ranks takes no more room, here
and in a message, than that of one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Generic, TypeVar

from ..errors import ConfigError
from .shape import Extent, MeshTrait, OutOfExtent, Point, Region

__all__ = ["ValueMesh"]

T = TypeVar("T")

_MISSING: Any = object()
_PRINTED_RUNS = 32


class ValueMesh(MeshTrait, Generic[T]):
    """A value for each rank of `shape`; it does not change.

    Ranks count in row-major order from 0, also in what `slice` returns. Iterating gives (point, value) pairs.
    Neighbours are kept as one where they are the same object, or equal and exactly of type int, float, str or bytes,
    or tuples of those. No other value is ever compared, so tensors may be values.

    Args:
        shape: the extent, or a region of which only the extent counts.
        values: one for each rank.

    Raises:
        ConfigError: there are not as many values as ranks.
    """

    def __init__(self, shape: Extent | Region, values: Sequence[T]) -> None:
        self._fill(shape, zip(repeat(1), values, strict=False))

    @classmethod
    def from_indexed(cls, shape: Extent | Region, pairs: Iterable[tuple[int, T]]) -> ValueMesh[T]:
        """From (rank, value) pairs in any order. Of several for one rank the last counts.

        Raises:
            ConfigError: a rank has no value.
            OutOfExtent: a rank is not one of the shape's.
        """
        extent = _extent_of(shape)
        values: list[T] = [_MISSING] * extent.nelements
        for rank, value in pairs:
            _check(rank, len(values))
            values[rank] = value
        missing = [rank for rank, value in enumerate(values) if value is _MISSING]
        if missing:
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ConfigError(f"{len(missing)} of the {len(values)} ranks of {extent} have no value: {some}")
        return cls(extent, values)

    @classmethod
    def from_runs(cls, shape: Extent | Region, runs: Iterable[tuple[int, T]]) -> ValueMesh[T]:
        """From (count, value) of consecutive ranks, in a time that depends on the number of runs alone.

        Results of two halves are joined by `from_runs(shape, [*left.runs(), *right.runs()])`.

        Raises:
            ConfigError: a count is below 1, or they do not add up to the number of ranks.
        """
        mesh: ValueMesh[T] = cls.__new__(cls)
        mesh._fill(shape, runs)
        return mesh

    def _fill(self, shape: Extent | Region, runs: Iterable[tuple[int, T]]) -> None:
        self._extent = _extent_of(shape)
        self._values: list[T] = []  # one for each run
        self._ends: list[int] = []  # the rank after the last of each run
        end = 0
        for count, value in runs:
            if count < 1:
                raise ConfigError(f"the count of a run must be at least 1, not {count}")
            end += count
            if self._values and _same(self._values[-1], value):
                self._ends[-1] = end
            else:
                self._values.append(value)
                self._ends.append(end)
        if end != self._extent.nelements:
            raise ConfigError(f"{end} values are given for the {self._extent.nelements} ranks of {self._extent}")

    def get(self, rank: int) -> T:
        """The value of this rank.

        Raises:
            OutOfExtent: there is no such rank.
        """
        _check(rank, self._extent.nelements)
        return self._values[bisect_right(self._ends, rank)]

    def item(self, **coordinates: int) -> T:
        """The value at these coordinates, one for each dimension; `item()` where no dimension is left.

        Raises:
            UnknownDimension: a label is missing, or none of this mesh's.
            OutOfExtent: a coordinate is negative or not below the dimension's size.
        """
        return self.get(self._extent.rank_of(**coordinates))

    def values(self) -> list[T]:
        return list(chain.from_iterable(repeat(value, count) for count, value in self.runs()))

    def items(self) -> Iterator[tuple[Point, T]]:
        """(point, value) of each rank, in order."""
        return zip(self._extent.points(), self.values(), strict=True)

    def runs(self) -> list[tuple[int, T]]:
        """(count, value) of consecutive ranks; neighbouring runs differ."""
        return [
            (end - start, value) for start, end, value in zip([0, *self._ends], self._ends, self._values, strict=False)
        ]

    def __iter__(self) -> Iterator[tuple[Point, T]]:
        return self.items()

    @property
    def extent(self) -> Extent:
        return self._extent

    @property
    def _region(self) -> Region:
        return self._extent.region

    def _with_region(self, region: Region) -> ValueMesh[T]:
        ranks = region.slice.ranks()
        if ranks == range(len(self)):
            return ValueMesh.from_runs(region, self.runs())  # flatten, rename, split
        return ValueMesh(region, [self.get(rank) for rank in ranks])

    def __repr__(self) -> str:
        lines = [f"ValueMesh({self._extent}):"]
        start = 0
        for end, value in zip(self._ends[:_PRINTED_RUNS], self._values, strict=False):
            last = f" to {self._extent.point(end - 1)}" if end - start > 1 else ""
            lines.append(f"  {self._extent.point(start)}{last}: {value!r}")
            start = end
        if start < len(self):
            lines.append(f"  ... and {len(self) - start} more ranks")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueMesh.from_runs, (self._extent, self.runs())


def _same(left: object, right: object) -> bool:
    """Whether one may stand for the other. Decided without calling any `==` but those of builtin types."""
    if left is right:
        return True
    if type(left) is tuple and type(right) is tuple:
        return len(left) == len(right) and all(map(_same_scalar, left, right))
    return _same_scalar(left, right)


def _same_scalar(left: object, right: object) -> bool:
    if left is right:
        return True
    if type(left) is float and type(right) is float:
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return type(left) is type(right) and type(left) in (int, str, bytes) and left == right


def _extent_of(shape: Extent | Region) -> Extent:
    if isinstance(shape, Region):
        return shape.extent
    if isinstance(shape, Extent):
        return shape
    raise ConfigError(f"shape must be an Extent or a Region, not {shape!r}")


def _check(rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise OutOfExtent(f"rank {rank} is out of range: the mesh has {count} ranks")
