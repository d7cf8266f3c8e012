"""Layouts: who has which elements. Checked against a reference that deals out lists of indices one by one."""

from __future__ import annotations

import itertools
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import ROUNDS, assembled, box_layouts, layouts, values

from monarch_rdma import sharding
from monarch_rdma.sharding.layout import (
    BlockCyclic,
    Box,
    BoxLayout,
    GroupedShard,
    Layout,
    LayoutError,
    Mesh,
    Part,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)


def chunks(indices: Sequence[int], parts: int) -> list[list[int]]:
    """As torch.chunk, and empty ones after it."""
    size = max(1, -(-len(indices) // parts))
    return [list(indices[i * size : (i + 1) * size]) for i in range(parts)]


def dealt(indices: list[int], placement: Placement, parts: int, which: int) -> list[int]:
    """The indices that part `which` has, one by one."""
    if isinstance(placement, StridedShard):
        return [i for piece in chunks(indices, placement.split_factor) for i in chunks(piece, parts)[which]]
    if isinstance(placement, BlockCyclic):
        return [index for i, index in enumerate(indices) if i // placement.block % parts == which]
    if isinstance(placement, GroupedShard):
        rest = iter(indices)
        groups = [list(itertools.islice(rest, size)) for size in placement.groups]
        return [i for group in groups for i in chunks(group, parts)[which]]
    assert isinstance(placement, Shard)
    if placement.sizes is None:
        return chunks(indices, parts)[which]
    begin = sum(placement.sizes[:which])
    return indices[begin : begin + placement.sizes[which]]


def indices_of(layout: Layout, rank: int) -> list[list[int]]:
    """In each dimension the indices that a rank has, in the order of its local tensor."""
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    mine = [list(range(n)) for n in layout.shape]
    for placement, parts, which in zip(layout.placements, layout.mesh.sizes, coordinate, strict=True):
        if not isinstance(placement, Replicate | Partial):
            mine[placement.dim] = dealt(mine[placement.dim], placement, parts, which)
    return mine


@pytest.mark.timeout(600)
@settings(max_examples=ROUNDS, deadline=None)
@given(layouts())
def test_each_rank_has_what_dealing_index_by_index_gives_it(layout: Layout) -> None:
    whole = values(layout.shape)
    for rank in layout.ranks.tolist():
        part, mine = layout.part(rank), indices_of(layout, rank)
        assert part.shape == tuple(map(len, mine))
        local = np.full(part.shape, -1)
        for box in part.boxes:
            at = tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))
            assert (local[at] == -1).all()
            local[at] = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        assert np.array_equal(local, whole[np.ix_(*mine)] if mine else whole)
        assert part.numel == local.size


@pytest.mark.timeout(600)
@settings(max_examples=ROUNDS, deadline=None)
@given(box_layouts())
def test_boxes_are_held_as_they_were_given(layout: BoxLayout) -> None:
    locals_ = {}
    whole = values(layout.shape)
    for rank in layout.ranks.tolist():
        part = layout.part(rank)
        locals_[rank] = np.full(part.shape, -1)
        for box in part.boxes:
            at = tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))
            locals_[rank][at] = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
    assert np.array_equal(assembled(layout, locals_), whole)


def test_fsdp_over_tensor_parallel() -> None:
    layout = Layout((8, 2), Mesh({"dp": 2, "tp": 2}), [StridedShard(0, split_factor=2), Shard(0)])
    assert [layout.part(rank).boxes[0].start[0] for rank in range(4)] == [0, 4, 2, 6]


def test_fused_weights_of_a_tensor_parallel_rank() -> None:
    layout = Layout((16, 3), Mesh({"tp": 2}), [GroupedShard(0, (8, 4, 4))])  # q, k, v
    assert layout.part(1) == Part(
        (8, 3), (Box((4, 0), (4, 3), (0, 0)), Box((10, 0), (2, 3), (4, 0)), Box((14, 0), (2, 3), (6, 0)))
    )


def test_ranks_may_be_any_processes() -> None:
    mesh = Mesh({"pp": 2, "dp": 2}, ranks=[12, 4, 7, 9])
    layout = Layout((4,), mesh, {"dp": Shard(-1)})
    assert layout.placements == (Replicate(), Shard(0))
    assert [layout.part(rank).boxes[0].start for rank in (12, 4, 7, 9)] == [(0,), (2,), (0,), (2,)]
    assert layout.part(0) == Part((0,), ())
    assert mesh.coordinate(9) == (1, 1) and mesh.coordinate(0) is None


def test_scalars_and_empty_tensors() -> None:
    mesh = Mesh({"dp": 3})
    assert Layout((), mesh).part(2) == Part((), (Box((), (), ()),))
    assert Layout((0, 4), mesh, [Shard(1)]).part(0) == Part((0, 2), ())
    assert Layout((2,), mesh, [Shard(0)]).part(2) == Part((0,), ())
    assert BoxLayout((), {0: [Box((), (), ())], 5: [Box((), (), ())]}).part(5).numel == 1


def test_equal_layouts_are_one_key() -> None:
    def make(size: int) -> Layout:
        return Layout((4, 4), Mesh({"dp": 2}), [Shard(0, (size, 4 - size))])

    def boxes(size: int) -> BoxLayout:
        return BoxLayout((4,), {0: [Box((0,), (size,), (0,))], 1: [Box((size,), (4 - size,), (0,))]})

    assert {make(1): 1, make(2): 2}[make(2)] == 2
    assert {boxes(1): 1, boxes(2): 2}[boxes(2)] == 2
    assert make(1) != boxes(1)
    assert pickle.loads(pickle.dumps(make(3))) == make(3)


def test_a_large_layout_costs_little_memory() -> None:
    layout = Layout((128256, 4096), Mesh({"dp": 1024}), [Shard(0)])
    assert sum(layout.part(rank).numel for rank in range(1024)) == math.prod(layout.shape)
    assert layout.grid.segments[0].start.size == 1018  # of 126 rows: torch.chunk leaves six ranks empty


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Layout((4, -1), Mesh({"a": 2})), "shape: (4, -1), but none may be below 0"),
        (lambda: Layout((4, 1.5), Mesh({"a": 2})), "shape: (4, 1.5) are not all integers"),
        (lambda: Mesh({"a": 0}), "sizes of the mesh: (0,), but none may be below 1"),
        (lambda: Mesh({"a": 2}, [1, 2, 3]), "ranks has 3 entries, but a mesh of {'a': 2} has 2"),
        (lambda: Mesh({"a": 3}, [1, 2, 1]), "ranks [1] are in the mesh more than once"),
        (lambda: Layout((4,), Mesh({"a": 2}), [Shard(1)]), "no such dimension"),
        (lambda: Layout((4,), Mesh({"a": 2}), ["x"]), "the placement for 'a' is 'x', which is none"),
        (lambda: Layout((4,), Mesh({"a": 2}), [Shard(0)] * 2), "2 placements are given for a mesh of 1 dimensions"),
        (lambda: Layout((4,), Mesh({"a": 2}), {"b": Shard(0)}), "placements name ['b'], but the mesh"),
        (
            lambda: Layout((9,), Mesh({"a": 2}), [Shard(0, (3, 4))]),
            "add up to 7 of 9 elements of dimension 0: 2 are",
        ),
        (
            lambda: Layout((6,), Mesh({"a": 2}), [Shard(0, (3, 4))]),
            "7 of 6 elements of dimension 0: 1 do not",
        ),
        (lambda: Layout((6,), Mesh({"a": 2}), [Shard(0, (6,))]), "has 1 sizes, but the mesh dimension 2 ranks"),
        (lambda: Layout((6,), Mesh({"a": 2}), [GroupedShard(0, (4, 4))]), "add up to 8, but dimension 0 has 6"),
        (lambda: Layout((6,), Mesh({"a": 2}), [BlockCyclic(0, 0)]), "none may be below 1"),
        (lambda: Layout((6,), Mesh({"a": 2}), [StridedShard(0, 0)]), "none may be below 1"),
    ],
)
def test_what_is_wrong_with_a_layout_is_said(make: object, told: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(told)):
        make()  # type: ignore[operator]


def box(start: int, size: int, at: int = 0) -> Box:
    return Box((start, 0), (size, 4), (at, 0))


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({0: [box(0, 3)], 1: [box(5, 3)]}, "no rank has the elements [3:5, 0:4]: 8 of 32 are missing"),
        ({}, "no rank has the elements [0:8, 0:4]: 32 of 32 are missing"),
        (
            {0: [box(0, 5)], 3: [box(4, 4)]},
            "boxes [0:5, 0:4] of rank 0 and [4:8, 0:4] of rank 3 both have [4:5, 0:4], but are not equal",
        ),
        ({0: [box(0, 8), box(0, 8, 8)]}, "rank 0 has the box [0:8, 0:4] twice"),
        ({0: [box(0, 4, 0), box(4, 4, 3)]}, "at (0, 0) and [4:8, 0:4] at (3, 0) overlap in rank 0's tensor"),
        ({0: [box(4, 5)]}, "box [4:9, 0:4] of rank 0 reaches outside of the shape (8, 4)"),
        ({0: [Box((0,), (8,), (0,))]}, "does not have 2 dimensions"),
        ({0: Part((7, 4), (box(0, 8),))}, "the local tensor of rank 0 has shape (7, 4), but its boxes need (8, 4)"),
        ({-1: [box(0, 8)]}, "ranks: (-1,), but none may be below 0"),
    ],
)
def test_what_is_wrong_with_boxes_is_said(parts: dict[int, list[Box]], told: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(told)):
        BoxLayout((8, 4), parts)


@pytest.mark.timeout(600)
@settings(max_examples=ROUNDS, deadline=None)
@given(box_layouts(), st.data())
def test_a_missing_box_is_found(layout: BoxLayout, data: st.DataObject) -> None:
    everyone = {rank: list(layout.part(rank).boxes) for rank in layout.ranks.tolist()}
    gone = data.draw(st.sampled_from(sorted({(b.start, b.size) for boxes in everyone.values() for b in boxes})))
    left = {rank: [b for b in boxes if (b.start, b.size) != gone] for rank, boxes in everyone.items()}
    with pytest.raises(LayoutError, match=f"no rank has the elements .* {math.prod(gone[1])} of") as caught:
        BoxLayout(layout.shape, left)
    told = re.findall(r"(\d+):(\d+)", str(caught.value))
    assert len(told) == len(layout.shape)
    for (begin, end), start, size in zip(told, *gone, strict=True):
        assert start <= int(begin) < int(end) <= start + size


def test_geometry_loads_no_torch() -> None:
    program = """
import sys
from monarch_rdma.sharding import Layout, Mesh, Shard, TensorSpec, make_plan
specs = {"w": TensorSpec(Layout((8,), Mesh({"a": 2}), [Shard(0)]), "int8")}
make_plan(specs, specs, 0)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_front_page_has_what_it_says() -> None:
    assert all(getattr(sharding, name).__name__ == name for name in sharding.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sharding.nothing
