"""Random layouts, and tensors put apart and together again by a plain reference."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from monarch_rdma.sharding.layout import (
    BlockCyclic,
    Box,
    BoxLayout,
    GroupedShard,
    Layout,
    Mesh,
    Part,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)

Array = npt.NDArray[Any]
AnyLayout = Layout | BoxLayout
LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
ROUNDS = 2000 if LONG else 150


def values(shape: tuple[int, ...]) -> Array:
    """A tensor in which every element is another one."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def parts_of(layout: AnyLayout, whole: Array) -> dict[int, Array]:
    """The local tensor of each rank; -1 where it has nothing to hold."""
    parts = {}
    for rank in layout.ranks.tolist():
        part = layout.part(rank)
        parts[rank] = np.full(part.shape, -1, dtype=whole.dtype)
        for box in part.boxes:
            parts[rank][slices(box.at, box.size)] = whole[slices(box.start, box.size)]
    return parts


def assembled(layout: AnyLayout, parts: Mapping[int, Array]) -> Array:
    """The whole tensor out of all local ones; -1 where none has it."""
    whole = np.full(layout.shape, -1, dtype=np.int64)
    for rank, local in parts.items():
        for box in layout.part(rank).boxes:
            whole[slices(box.start, box.size)] = local[slices(box.at, box.size)]
    return whole


def placements(dims: int, shape: tuple[int, ...], parts: int) -> st.SearchStrategy[Placement]:
    """Placements that fit a tensor whatever else shards it."""
    if not dims:
        return st.just(Replicate())
    dim = st.integers(0, dims - 1)
    return st.one_of(
        dim.map(Shard),
        st.just(Replicate()),
        st.builds(StridedShard, dim, st.integers(1, 4)),
        st.builds(BlockCyclic, dim, st.integers(1, 4)),
    )


def cut(total: int, pieces: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes that add up to the total."""
    edges = st.lists(st.integers(0, total), min_size=pieces - 1, max_size=pieces - 1).map(sorted)
    return edges.map(lambda inner: tuple(b - a for a, b in itertools.pairwise([0, *inner, total])))


shapes = st.lists(st.integers(0, 13), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...] | None = None, first_rank: int | None = None) -> Layout:
    """Meshes of one to three dimensions, placements of all kinds; uneven sizes and groups where they can be."""
    shape = draw(shapes) if shape is None else shape
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count, names = math.prod(sizes), "abc"[: len(sizes)]
    start = draw(st.integers(0, 6)) if first_rank is None else first_rank
    ranks = draw(st.permutations(range(start, start + count)))
    chosen = [draw(placements(len(shape), shape, n)) for n in sizes]
    for axis, placement in enumerate(chosen):
        alone = not isinstance(placement, Replicate) and [
            other for other in chosen if not isinstance(other, Replicate) and other.dim == placement.dim
        ] == [placement]
        if isinstance(placement, Shard) and alone and draw(st.booleans()):
            total = shape[placement.dim]
            if draw(st.booleans()):
                chosen[axis] = Shard(placement.dim, draw(cut(total, sizes[axis])))
            else:
                chosen[axis] = GroupedShard(placement.dim, draw(cut(total, draw(st.integers(1, 3)))))
    return Layout(shape, Mesh(dict(zip(names, sizes, strict=True)), ranks), chosen)


@st.composite
def box_layouts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> BoxLayout:
    """Boxes made by cutting again and again, each given to one or more ranks, at some place of their tensors."""
    if shape is None:
        shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    boxes = [((0,) * len(shape), shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 5)) if boxes and shape else 0):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        for low, high in ((0, at), (at, size[dim])):
            if high > low:
                begin = (*start[:dim], start[dim] + low, *start[dim + 1 :])
                boxes.append((begin, (*size[:dim], high - low, *size[dim + 1 :])))
    parts: dict[int, list[Box]] = {}
    for start, size in boxes:
        for rank in draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)):
            mine = parts.setdefault(rank, [])
            beyond = max((box.at[0] + box.size[0] for box in mine), default=0) if shape else 0
            at = (beyond + draw(st.integers(0, 2)), *(draw(st.integers(0, 2)) for _ in shape[1:])) if shape else ()
            mine.append(Box(start, size, at))
    return BoxLayout(shape, {rank: _with_room(draw, boxes) for rank, boxes in parts.items()})


def _with_room(draw: st.DrawFn, boxes: list[Box]) -> Part:
    dims = len(boxes[0].start)
    ends = [max(box.at[d] + box.size[d] for box in boxes) + draw(st.integers(0, 1)) for d in range(dims)]
    return Part(tuple(ends), tuple(boxes))


def any_layouts(shape: tuple[int, ...] | None = None) -> st.SearchStrategy[AnyLayout]:
    return st.one_of(layouts(shape), layouts(shape), layouts(shape), box_layouts(shape))
