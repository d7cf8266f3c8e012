"""One dimension of a tensor, dealt out to parts by any number of placements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from .checks import IntArray
from .placements import Sharding

__all__ = ["Segments", "segments_of"]


@dataclass(frozen=True, eq=False)
class Segments:
    """One dimension's indices, dealt out to parts. Row i: part[i] has start[i] to start[i] + size[i], where it counts
    them at[i] to at[i] + size[i]. Rows are ordered by part, then by `at`; none is empty.
    """

    part: IntArray
    start: IntArray
    size: IntArray
    part_sizes: IntArray  # elements of each part

    @property
    def num_parts(self) -> int:
        return self.part_sizes.size

    @cached_property
    def at(self) -> IntArray:
        first = np.cumsum(self.part_sizes) - self.part_sizes
        return np.cumsum(self.size) - self.size - first[self.part]

    def of_part(self, part: int) -> slice:
        """The rows of one part."""
        return slice(*np.searchsorted(self.part, [part, part + 1]).tolist())

    @classmethod
    def whole(cls, n: int) -> Segments:
        """One part that has all n."""
        return cls.of_range(0, n)

    @classmethod
    def of_range(cls, start: int, size: int) -> Segments:
        """One part that has `size` indices from `start` on."""
        rows = np.zeros(min(1, size), dtype=np.int64)
        return cls(rows, rows + start, rows + size, np.array([size], dtype=np.int64))

    def dealt(self, placement: Sharding, parts: int) -> Segments:
        """Each part of this dealt out once more: part p becomes the parts p * parts to (p + 1) * parts - 1.

        The elements of all parts lie on one axis, one after another. Pieces and the rows of this cut it, and each
        stretch between two cuts is a row of the result.
        """
        base = np.cumsum(self.part_sizes) - self.part_sizes
        columns = []
        for n in np.unique(self.part_sizes).tolist():
            part, begin, end = placement.deal(n, parts)
            which = np.flatnonzero(self.part_sizes == n)[:, None]
            columns.append([(which * parts + part).ravel(), *((base[which] + edge).ravel() for edge in (begin, end))])
        piece_part, begin, end = (np.concatenate(column) for column in zip(*columns, strict=True))
        kept = np.flatnonzero(end > begin)
        kept = kept[np.argsort(piece_part[kept], kind="stable")]
        piece_part, begin = piece_part[kept], begin[kept]
        rows = np.cumsum(self.size) - self.size

        total = int(self.part_sizes.sum())
        cuts = np.union1d(begin, rows)
        sizes = np.diff(cuts, append=total)
        by_begin = np.argsort(begin)
        piece = by_begin[np.searchsorted(begin[by_begin], cuts, side="right") - 1]
        row = np.searchsorted(rows, cuts, side="right") - 1
        order = np.lexsort((cuts, piece))
        start = (self.start[row] + cuts - rows[row])[order]
        part, sizes = piece_part[piece][order], sizes[order]
        counts = np.bincount(part, weights=sizes, minlength=self.num_parts * parts).astype(np.int64)
        return Segments(*_joined(part, start, sizes), counts)


def _joined(part: IntArray, start: IntArray, size: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Rows that follow each other without a gap become one."""
    new = np.ones(part.size, dtype=bool)
    new[1:] = (part[1:] != part[:-1]) | (start[1:] != start[:-1] + size[:-1])
    first = np.flatnonzero(new)
    return part[first], start[first], np.add.reduceat(size, first) if first.size else size


@lru_cache(maxsize=4096)
def segments_of(n: int, deals: tuple[tuple[Sharding, int], ...]) -> Segments:
    segments = Segments.whole(n)
    for placement, parts in deals:
        segments = segments.dealt(placement, parts)
    return segments
