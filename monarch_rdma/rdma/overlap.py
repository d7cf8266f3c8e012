"""Which bytes several operations write: two may not write the same, as nobody could say what would be there then."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .view import View

__all__ = ["Target", "Targets"]

_MOST_RUNS = 1 << 22  # that are compared one by one; interleaved views with more count as overlapping


@dataclass(frozen=True)
class Target:
    """The bytes of `view` at `address` in some place, written by one operation."""

    address: int
    view: View
    atomic: bool
    what: str  # the argument and operation, for messages

    @property
    def start(self) -> int:
        return self.address + self.view.offset

    @property
    def end(self) -> int:
        return self.start + self.view.extent

    def clashes(self, other: Target) -> bool:
        """Whether both write some byte. Atomics on the same word are no clash: that is what they are for."""
        apart = self.start >= other.end or other.start >= self.end
        if apart or not self.view.nbytes or not other.view.nbytes or (self.atomic and other.atomic):
            return False
        if self.view.is_contiguous and other.view.is_contiguous:
            return True
        return _runs_meet(self, other)


class Targets:
    """What the operations of one action write, by place: this process, or a region of some peer."""

    def __init__(self) -> None:
        self._places: dict[Any, list[Target]] = {}  # ordered by start
        self._starts: dict[Any, list[int]] = {}
        self._longest: dict[Any, int] = {}

    def check(self, place: Any, target: Target) -> None:
        """ConfigError where the target overlaps one that was added."""
        starts = self._starts.get(place, [])
        first = bisect_left(starts, target.start - self._longest.get(place, 0))
        for other in self._places.get(place, [])[first : bisect_left(starts, target.end)]:
            if target.clashes(other):
                raise ConfigError(f"{target.what} overlaps {other.what}, which this action writes too")

    def add(self, place: Any, target: Target) -> None:
        starts = self._starts.setdefault(place, [])
        at = bisect_left(starts, target.start)
        starts.insert(at, target.start)
        self._places.setdefault(place, []).insert(at, target)
        self._longest[place] = max(self._longest.get(place, 0), target.end - target.start)


def _runs_meet(a: Target, b: Target) -> bool:
    import numpy

    ranges = []
    for target in (a, b):
        run, counts, strides = target.view.merged
        starts = numpy.array([target.start], dtype=numpy.int64)
        for count, stride in zip(counts, strides, strict=True):
            if starts.size * count > _MOST_RUNS:
                return True
            starts = (starts[:, None] + numpy.arange(count, dtype=numpy.int64) * stride).ravel()
        ranges.append((numpy.sort(starts), run))
    (first, first_run), (second, second_run) = ranges
    # The last run of `first` that begins before each run of `second` ends must end before that one begins.
    before = numpy.searchsorted(first, second + second_run, side="left") - 1
    return bool(numpy.any((before >= 0) & (first[before] + first_run > second)))
