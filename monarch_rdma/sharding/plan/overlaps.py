"""Where one dimension's parts of the source and of the target meet. Regular runs are rows, however long they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from .geometry import IntArray, Segments

__all__ = ["Overlaps", "Pairs", "overlaps"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """What a part of the source and one of the target have in common, one row a pair that has anything.

    Rows are ordered by source part, then by target part.
    """

    source: IntArray
    target: IntArray
    elements: IntArray
    rows: IntArray  # of Overlaps
    segments: IntArray  # contiguous pieces
    full: IntArray  # 1 where it is one piece, and all of both parts; else 0
    first: IntArray  # for each part of the source its first row; and the end

    def of_source(self, part: int, num_targets: int) -> IntArray:
        """The elements that each part of the target has in common with this part of the source."""
        mine = slice(self.first[part], self.first[part + 1])
        elements = np.zeros(num_targets, dtype=np.int64)
        elements[self.target[mine]] = self.elements[mine]
        return elements


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Row i: `count` pieces of `size` indices. The first is at source_at in the source part and at target_at in the
    target part, and each next one source_step and target_step after the one before.

    Rows are ordered by target part, then by source part.
    """

    target: IntArray
    source: IntArray
    target_at: IntArray
    source_at: IntArray
    size: IntArray
    count: IntArray
    target_step: IntArray
    source_step: IntArray
    target_sizes: IntArray  # indices of each part
    source_sizes: IntArray
    first: IntArray  # for each part of the target its first row; and the end

    @cached_property
    def pairs(self) -> Pairs:
        order = np.lexsort((self.target, self.source))
        source, target = self.source[order], self.target[order]
        new = np.flatnonzero(_differs(source, target))
        size, count = self.size[order], self.count[order]

        def added(values: IntArray) -> IntArray:
            return np.add.reduceat(values, new) if new.size else values

        elements, segments = added(size * count), added(count)
        source, target = source[new], target[new]
        whole = (elements == self.source_sizes[source]) & (elements == self.target_sizes[target])
        first = np.searchsorted(source, np.arange(self.source_sizes.size + 1))
        full = (whole & (segments == 1)).astype(np.int64)
        return Pairs(source, target, elements, added(np.ones_like(size)), segments, full, first)


@lru_cache(maxsize=8192)
def overlaps(source: Segments, target: Segments, shift: int, low: int, high: int) -> Overlaps:
    """Index i of the source is index i + shift of the target; only indices of the target from `low` to `high` count."""
    s_begin, s_end, s_row = _clipped(source, shift, low, high)
    t_begin, t_end, t_row = _clipped(target, 0, low, high)
    cuts = np.unique(np.concatenate([s_begin, s_end, t_begin, t_end]))
    begin, size = cuts[:-1], np.diff(cuts)
    s_at = np.searchsorted(s_begin, begin, side="right") - 1
    t_at = np.searchsorted(t_begin, begin, side="right") - 1
    both = (s_at >= 0) & (t_at >= 0)
    both[both] = (begin[both] < s_end[s_at[both]]) & (begin[both] < t_end[t_at[both]])
    begin, size = begin[both], size[both]
    s, t = s_row[s_at[both]], t_row[t_at[both]]
    source_at = begin - source.start[s] - shift + source.at[s]
    target_at = begin - target.start[t] + target.at[t]
    order = np.lexsort((target_at, source.part[s], target.part[t]))
    rows = [column[order] for column in (target.part[t], source.part[s], target_at, source_at, size)]
    runs = _runs(*_joined(*rows))
    first = np.searchsorted(runs["target"], np.arange(target.num_parts + 1))
    return Overlaps(**runs, target_sizes=target.part_sizes, source_sizes=source.part_sizes, first=first)


def _clipped(segments: Segments, shift: int, low: int, high: int) -> tuple[IntArray, IntArray, IntArray]:
    """Begin, end and row of what lies in the window, in order."""
    begin = np.maximum(segments.start + shift, low)
    end = np.minimum(segments.start + segments.size + shift, high)
    row = np.flatnonzero(end > begin)
    row = row[np.argsort(begin[row])]
    return begin[row], end[row], row


def _differs(*columns: IntArray) -> npt.NDArray[np.bool_]:
    """Whether a row differs from the one before in any column; the first one does."""
    new = np.ones(columns[0].size, dtype=bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def _joined(
    target: IntArray, source: IntArray, target_at: IntArray, source_at: IntArray, size: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Pieces that follow each other on both ends become one."""
    new = _differs(target, source)
    for at in (target_at, source_at):
        new[1:] |= at[1:] != at[:-1] + size[:-1]
    first = np.flatnonzero(new)
    sizes = np.add.reduceat(size, first) if first.size else size
    return target[first], source[first], target_at[first], source_at[first], sizes


def _runs(
    target: IntArray, source: IntArray, target_at: IntArray, source_at: IntArray, size: IntArray
) -> dict[str, IntArray]:
    """Pieces of one size at regular distances become one row.

    Two pieces are linked; equal links in a row make a stretch. A stretch of two links or more becomes a run, without
    its first link where the stretch before it has taken the piece in between.
    """
    linked = ~_differs(target, source, size)[1:]
    target_step, source_step = np.diff(target_at), np.diff(source_at)
    starts = _differs(target_step, source_step) if linked.size else linked
    starts[1:] |= ~linked[1:] | ~linked[:-1]
    first = np.flatnonzero(starts)
    long = np.diff(first, append=linked.size) >= 2
    kept = np.repeat(long, np.diff(first, append=linked.size))
    if first.size:
        kept[first[1:]] &= ~long[:-1]
    new = np.ones(size.size, dtype=bool)
    new[1:] = ~kept
    first = np.flatnonzero(new)
    count = np.diff(first, append=size.size)
    several = count > 1

    def of_several(step: IntArray) -> IntArray:
        steps = np.zeros(first.size, dtype=np.int64)
        steps[several] = step[first[several]]
        return steps

    columns = {"target": target, "source": source, "target_at": target_at, "source_at": source_at, "size": size}
    runs = {name: column[first] for name, column in columns.items()}
    return {**runs, "count": count, "target_step": of_several(target_step), "source_step": of_several(source_step)}
