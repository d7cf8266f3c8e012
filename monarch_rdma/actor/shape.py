"""Named shapes: which ranks a mesh has, and how they are laid out.

An `Extent` gives each dimension a label and a size, a `Point` is one position in it. An `NDSlice` lays ranks out by an
offset and strides, as an array does its elements. A `Region` adds labels to that: a slice of a mesh remembers through
it the *base ranks*, those in the mesh that it was cut from. `MeshTrait` gives all meshes the same algebra.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

from ..errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Extent", "MeshTrait", "NDSlice", "OutOfExtent", "Point", "Region", "Selector", "Slice", "UnknownDimension"]

Selector: TypeAlias = "SupportsIndex | slice"


class UnknownDimension(ConfigError, KeyError, TypeError):
    """No dimension has this label. Monarch raises any of the three, depending on the method."""

    __str__ = Exception.__str__  # KeyError's would put the sentence in quotes


class OutOfExtent(ConfigError, IndexError):
    """A rank or a coordinate lies outside of the shape."""


@dataclass(frozen=True, init=False, repr=False, slots=True)
class Extent(Mapping[str, int]):
    """The labels and sizes of a shape's dimensions, outermost first; a mapping from label to size.

    `len(extent)` is the number of dimensions, `extent.nelements` the number of ranks.

    Raises:
        ConfigError: unequal numbers of labels and sizes, a label twice, or a size below 1.
    """

    labels: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, labels: Sequence[str], sizes: Sequence[SupportsIndex]) -> None:
        object.__setattr__(self, "labels", _as_labels(labels))
        object.__setattr__(self, "sizes", _as_integers("size", 1, sizes))
        if len(self.labels) != len(self.sizes):
            raise ConfigError(f"labels {self.labels} and sizes {self.sizes} differ in number")

    @classmethod
    def of(cls, sizes: Mapping[str, SupportsIndex]) -> Extent:
        return cls(list(sizes), list(sizes.values()))

    @property
    def nelements(self) -> int:
        return math.prod(self.sizes)

    @property
    def region(self) -> Region:
        """All ranks of this extent, in row-major order from 0."""
        return Region(self.labels, NDSlice.new_row_major(self.sizes))

    def point(self, rank: SupportsIndex) -> Point:
        return Point(rank, self)

    def points(self) -> Iterator[Point]:
        return (Point(rank, self) for rank in range(self.nelements))

    def rank_of(self, **coordinates: SupportsIndex) -> int:
        """The rank at these coordinates, one for every dimension.

        Raises:
            UnknownDimension: a label is missing, or none of this extent's.
            OutOfExtent: a coordinate is negative or not below the dimension's size.
        """
        for label in coordinates:
            self._axis(label)
        rank = 0
        for label, size in self.items():
            if label not in coordinates:
                raise UnknownDimension(f"no coordinate is given for dimension {label!r} of {self}")
            rank = rank * size + _as_coordinate(label, coordinates[label], size)
        return rank

    def _axis(self, label: str) -> int:
        if label not in self.labels:
            raise UnknownDimension(f"{self} has no dimension {label!r}")
        return self.labels.index(label)

    def __getitem__(self, label: str) -> int:
        return self.sizes[self._axis(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label}: {size}" for label, size in self.items()) + "}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent, (self.labels, self.sizes)


@dataclass(frozen=True, init=False, repr=False, slots=True)
class Point(Mapping[str, int]):
    """One position in an extent; a mapping from label to coordinate. `rank` counts in row-major order from 0.

    Raises:
        OutOfExtent: the rank is negative or not below `extent.nelements`.
    """

    rank: int
    extent: Extent

    def __init__(self, rank: SupportsIndex, extent: Extent) -> None:
        object.__setattr__(self, "rank", _as_integer("rank", rank))
        object.__setattr__(self, "extent", extent)
        if not 0 <= self.rank < extent.nelements:
            raise OutOfExtent(f"rank {self.rank} is out of range: {extent} has {extent.nelements} ranks")

    def size(self, label: str) -> int:
        """The size of this dimension of the extent."""
        return self.extent[label]

    def __getitem__(self, label: str) -> int:
        sizes = self.extent.sizes
        axis = self.extent._axis(label)
        return self.rank // math.prod(sizes[axis + 1 :]) % sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent)

    def __len__(self) -> int:
        return len(self.extent)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {at}/{self.size(label)}" for label, at in self.items()) + "}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self.rank, self.extent)


@dataclass(frozen=True, init=False, slots=True)
class NDSlice(Sequence[int]):
    """The ranks offset + i * strides[0] + j * strides[1] + ..., in row-major order of (i, j, ...); each occurs once.

    Raises:
        ConfigError: unequal numbers of sizes and strides, a size below 1, a negative offset or stride, or overlapping
            dimensions: a stride must lead past all that the dimensions of smaller strides span.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __init__(self, offset: SupportsIndex, sizes: Sequence[SupportsIndex], strides: Sequence[SupportsIndex]) -> None:
        object.__setattr__(self, "offset", _as_integer("offset", offset, 0))
        object.__setattr__(self, "sizes", _as_integers("size", 1, sizes))
        object.__setattr__(self, "strides", _as_integers("stride", 0, strides))
        if len(self.sizes) != len(self.strides):
            raise ConfigError(f"sizes {self.sizes} and strides {self.strides} differ in number")
        reach = 0  # how far from the offset the dimensions of smaller stride lead
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size > 1 and stride <= reach:
                raise ConfigError(f"dimensions of sizes {self.sizes} overlap with strides {self.strides}")
            reach += (size - 1) * stride

    @classmethod
    def new_row_major(cls, sizes: Sequence[SupportsIndex]) -> NDSlice:
        """Ranks 0, 1, 2, ... with the last dimension varying fastest."""
        checked = _as_integers("size", 1, sizes)
        return cls(0, checked, _row_major_strides(checked))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def nelements(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where `rank` is, one index for each dimension.

        Raises:
            OutOfExtent: this slice does not have the rank.
        """
        rest = rank - self.offset
        found = [0] * self.ndim
        for axis in sorted(range(self.ndim), key=self.strides.__getitem__, reverse=True):
            if self.sizes[axis] > 1:
                found[axis], rest = divmod(rest, self.strides[axis])
        if rest or not all(0 <= at < size for at, size in zip(found, self.sizes, strict=True)):
            raise OutOfExtent(f"rank {rank} is not in {self}")
        return tuple(found)

    def evenly_spaced(self) -> range | None:
        """The ranks as a range, or None where no single step leads from each to the next."""
        step = count = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if count == 1:
                step = stride
            elif stride != count * step:
                return None
            count *= size
        return range(self.offset, self.offset + count * step, step)

    def ranks(self) -> Sequence[int]:
        """All ranks in order: a range where they are evenly spaced, else a list."""
        even = self.evenly_spaced()
        if even is not None:
            return even
        ranks = [self.offset]
        for size, stride in zip(self.sizes, self.strides, strict=True):
            ranks = [rank + index * stride for rank in ranks for index in range(size)]
        return ranks

    def __len__(self) -> int:
        return self.nelements

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def __contains__(self, rank: object) -> bool:
        try:
            return isinstance(rank, int) and self.coordinates(rank) is not None
        except OutOfExtent:
            return False

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self.ranks()[index]
        position = operator.index(index)
        rest = position + self.nelements if position < 0 else position
        if not 0 <= rest < self.nelements:
            raise OutOfExtent(f"index {position} is out of range: {self} has {self.nelements} ranks")
        rank = self.offset
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            rest, at = divmod(rest, size)
            rank += at * stride
        return rank

    def __reduce__(self) -> tuple[Any, ...]:
        return NDSlice, (self.offset, self.sizes, self.strides)


Slice = NDSlice


@dataclass(frozen=True, init=False, slots=True)
class Region:
    """Labelled base ranks: `slice` says which, `labels` names its dimensions.

    Raises:
        ConfigError: unequal numbers of labels and dimensions, or a label twice.
    """

    labels: tuple[str, ...]
    slice: NDSlice

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        object.__setattr__(self, "labels", _as_labels(labels))
        object.__setattr__(self, "slice", slice)
        if len(self.labels) != slice.ndim:
            raise ConfigError(f"labels {self.labels} do not name the {slice.ndim} dimensions of {slice}")

    @property
    def extent(self) -> Extent:
        return Extent(self.labels, self.slice.sizes)

    def ranks(self) -> list[int]:
        """The base ranks, in row-major order."""
        return list(self.slice)

    def point_of_base_rank(self, rank: int) -> Point:
        """The point of this region's extent where base rank `rank` is.

        Raises:
            OutOfExtent: this region does not have the rank.
        """
        coordinates = self.slice.coordinates(rank)
        return self.extent.point(sum(map(operator.mul, coordinates, _row_major_strides(self.slice.sizes))))

    def sliced(self, **selectors: Selector) -> Region:
        """See MeshTrait.slice."""
        for label in selectors:
            self.extent._axis(label)
        offset = self.slice.offset
        kept: list[tuple[str, int, int]] = []
        for label, size, stride in self._dimensions():
            chosen = _select(label, selectors.get(label, slice(None)), size)
            if isinstance(chosen, range):
                offset += chosen.start * stride
                kept.append((label, len(chosen), stride * chosen.step))
            else:
                offset += chosen * stride
        return _region(offset, kept)

    def flattened(self, name: str) -> Region:
        """See MeshTrait.flatten."""
        ranks = self.slice.evenly_spaced()
        if ranks is None:
            raise ConfigError(
                f"cannot flatten sparse mesh {self.extent}: its ranks are not evenly spaced, their strides being "
                f"{self.slice.strides}"
            )
        return Region([name], NDSlice(ranks.start, [len(ranks)], [ranks.step]))

    def renamed(self, **names: str) -> Region:
        """See MeshTrait.rename."""
        for label in names:
            self.extent._axis(label)
        return Region([names.get(label, label) for label in self.labels], self.slice)

    def split(self, **parts_and_sizes: Sequence[str] | SupportsIndex) -> Region:
        """See MeshTrait.split."""
        parts: dict[str, tuple[str, ...]] = {}
        given: dict[str, int] = {}
        for label, value in parts_and_sizes.items():
            if label in self.labels:
                parts[label] = _as_labels(value)
            elif isinstance(value, Sequence):
                raise UnknownDimension(f"{self.extent} has no dimension {label!r} that could be split into {value!r}")
            else:
                given[label] = _as_integer(f"size of {label!r}", value, 1)

        result: list[tuple[str, int, int]] = []
        for label, size, stride in self._dimensions():
            names = parts.get(label, (label,))
            sizes = _divide(label, size, names, given)
            strides = (stride * inner for inner in _row_major_strides(sizes))
            result += zip(names, sizes, strides, strict=True)
        if unused := given.keys() - {label for label, _, _ in result}:
            raise ConfigError(f"sizes are given for {sorted(unused)}, which no dimension is split into")
        return _region(self.slice.offset, result)

    def _dimensions(self) -> Iterator[tuple[str, int, int]]:
        """(label, size, stride) of each."""
        return zip(self.labels, self.slice.sizes, self.slice.strides, strict=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.labels, self.slice)


class MeshTrait(abc.ABC):
    """What all meshes can do with their shape. Each method returns a new mesh over some or all of the same ranks."""

    @property
    @abc.abstractmethod
    def _region(self) -> Region: ...

    @abc.abstractmethod
    def _with_region(self, region: Region) -> Self:
        """The same mesh over `region`, whose base ranks are all in `_region`."""

    def slice(self, **selectors: Selector) -> Self:
        """Keeps a part: `mesh.slice(hosts=0, gpus=slice(2, 6))`. An integer removes its dimension.

        Raises:
            UnknownDimension: the mesh has no dimension of that label.
            OutOfExtent: an integer that is negative or not below the dimension's size.
            ConfigError: a slice that selects nothing, or goes backwards.
        """
        return self._with_region(self._region.sliced(**selectors))

    def flatten(self, name: str) -> Self:
        """Makes all dimensions one, called `name`.

        Raises:
            ConfigError: the ranks are not evenly spaced, as after slice(gpus=slice(0, 2)) of 2 hosts x 4 gpus.
        """
        return self._with_region(self._region.flattened(name))

    def rename(self, **names: str) -> Self:
        """Gives dimensions new labels: `mesh.rename(hosts="dp", gpus="tp")`.

        Raises:
            UnknownDimension: the mesh has no dimension of that label.
            ConfigError: two dimensions would have the same label.
        """
        return self._with_region(self._region.renamed(**names))

    def split(self, **parts_and_sizes: Sequence[str] | SupportsIndex) -> Self:
        """Splits dimensions: `mesh.split(hosts=("dp", "pp"), gpus=("tp", "cp"), pp=16, cp=2)`.

        The outermost part is named first. Of each dimension's parts, the size of one may be left out; it is inferred.

        Raises:
            UnknownDimension: the mesh has no dimension of that label.
            ConfigError: sizes that do not multiply to the dimension's, that cannot be inferred or are of no part;
                two dimensions of the same label.
        """
        return self._with_region(self._region.split(**parts_and_sizes))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """The number of ranks along a dimension, along several of them, or in the whole mesh (None).

        Raises:
            UnknownDimension: the mesh has no dimension of that label.
        """
        extent = self.extent
        if dim is None:
            return extent.nelements
        return extent[dim] if isinstance(dim, str) else math.prod(extent[label] for label in dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Label -> size, outermost dimension first."""
        return dict(self.extent)

    @property
    def extent(self) -> Extent:
        return self._region.extent

    def __len__(self) -> int:
        """The number of ranks."""
        return self._region.slice.nelements


def _region(offset: int, dimensions: Sequence[tuple[str, int, int]]) -> Region:
    """From (label, size, stride) of each dimension."""
    labels, sizes, strides = zip(*dimensions, strict=True) if dimensions else ((), (), ())
    return Region(labels, NDSlice(offset, sizes, strides))


def _row_major_strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _select(label: str, selector: Selector, size: int) -> int | range:
    """The index that `selector` picks of a dimension, or the range of those that it keeps."""
    if not isinstance(selector, slice):
        return _as_coordinate(label, selector, size)
    try:
        chosen = range(size)[selector]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{selector} for dimension {label!r}: {error}") from None
    if chosen.step < 0:
        raise ConfigError(f"{selector} goes backwards through dimension {label!r}")
    if not chosen:
        raise ConfigError(f"{selector} selects nothing of dimension {label!r} of size {size}")
    return chosen


def _divide(label: str, size: int, parts: Sequence[str], given: Mapping[str, int]) -> list[int]:
    """The sizes of the parts that a dimension is split into; at most one is not given."""
    unknown = [part for part in parts if part not in given]
    known = math.prod(given[part] for part in parts if part in given)
    if len(unknown) > 1:
        raise ConfigError(
            f"cannot infer the sizes of {', '.join(unknown)} from {label!r} of size {size}: give all but one, "
            f"as in {unknown[-1]}=2"
        )
    if size % known or (not unknown and known != size):
        sizes = ", ".join(f"{part}={given.get(part, '?')}" for part in parts)
        raise ConfigError(f"dimension {label!r} of size {size} cannot be split into ({sizes})")
    return [given.get(part, size // known) for part in parts]


def _as_labels(labels: object) -> tuple[str, ...]:
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise ConfigError(f"expected a sequence of dimension labels, not {labels!r}")
    for position, label in enumerate(labels):
        if not isinstance(label, str):
            raise ConfigError(f"a dimension's label must be a str, not {label!r}")
        if label in labels[:position]:
            raise ConfigError(f"two dimensions would be called {label!r}")
    return tuple(labels)


def _as_integers(name: str, at_least: int, values: Sequence[SupportsIndex]) -> tuple[int, ...]:
    return tuple(_as_integer(name, value, at_least) for value in values)


def _as_integer(name: str, value: Any, at_least: int | None = None) -> int:
    try:
        integer = int(operator.index(value))
    except TypeError:
        raise ConfigError(f"{name} must be an integer, not {value!r}") from None
    if at_least is not None and integer < at_least:
        raise ConfigError(f"{name} must be at least {at_least}, not {integer}")
    return integer


def _as_coordinate(label: str, value: Any, size: int) -> int:
    at = _as_integer(f"coordinate {label!r}", value)
    if not 0 <= at < size:
        raise OutOfExtent(f"{label}={at} is out of range: dimension {label!r} has size {size}")
    return at
