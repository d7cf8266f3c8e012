"""Sharded tensors as values, beside plain ones: every operation gives what it gives on the whole tensor."""

from __future__ import annotations

import operator
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sharded import LONG, any_layouts, shapes, values
from test_dtensor import as_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate as Everywhere
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_rdma.errors import ConfigError, TransferTimeout
from monarch_rdma.rdma import default_engine
from monarch_rdma.sharding import (
    BlockCyclic,
    Box,
    BoxLayout,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Shard,
    ShardedTensor,
    TensorSpec,
    picture,
)
from monarch_rdma.sharding.gathering import Gathering

quick = settings(max_examples=300 if LONG else 40, deadline=None)
FOUR = Layout((8, 6), Mesh({"dp": 4}), [Shard(0)])
WHOLE = torch.arange(48.0).reshape(8, 6)


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Of some dimensions from the first on, numbers and slices of all kinds; sometimes dots among them."""
    edge = st.none() | st.integers(-20, 20)
    one_of = [st.builds(slice, edge, edge, st.none() | st.integers(1, 4)) for _ in shape]
    several = [st.integers(-n, n - 1) | piece if n else piece for n, piece in zip(shape, one_of, strict=True)]
    return st.integers(0, len(shape)).flatmap(
        lambda count: st.tuples(*several[:count]) | st.tuples(*several[:count]).map(lambda key: (*key, ...))
    )


@pytest.mark.timeout(600)
@quick
@given(st.data())
def test_slices_are_those_of_the_whole_tensor(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    layout = data.draw(any_layouts(shape))
    assume(layout.ranks.size)
    whole = torch.from_numpy(values(shape))
    key = data.draw(indices(shape))
    tensor = ShardedTensor.distribute(whole, layout)
    part = tensor[key]
    assert part.shape == tuple(whole[key].shape)
    assert torch.equal(part.full(), whole[key])
    again = data.draw(indices(part.shape))
    assert torch.equal(part[again].full(), whole[key][again])


@pytest.mark.timeout(600)
@quick
@given(st.data())
def test_any_layout_becomes_any_other_and_is_cut_from_the_whole(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    source, target = data.draw(any_layouts(shape)), data.draw(any_layouts(shape))
    assume(source.ranks.size and target.ranks.size)
    whole = torch.from_numpy(values(shape))
    moved = ShardedTensor.distribute(whole, source).redistribute(target)
    expected = ShardedTensor.distribute(whole, target)
    assert moved.layout == target and moved.parts.keys() == expected.parts.keys()
    assert all(
        torch.equal(moved.parts[rank][at], expected.parts[rank][at])
        for rank in moved.parts
        for box in target.part(rank).boxes
        for at in [tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))]
    )


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_arithmetic_is_that_of_the_whole_tensor(name: str) -> None:
    function: Callable[[Any, Any], Any] = getattr(operator, name)
    layout = Layout((8, 6), Mesh({"a": 2, "b": 2}), [BlockCyclic(0, 1), Shard(1)])
    whole, other = WHOLE + 1, (WHOLE % 5 + 1).to(torch.int32)
    a, b = (ShardedTensor.distribute(one, layout) for one in (whole, other))
    for left, right, expected in [
        (a, b, function(whole, other)),
        (b, a, function(other, whole)),
        (a, 3, function(whole, 3)),
        (b, 2, function(other, 2)),
        (2, a, function(2, whole)),
        (b, torch.tensor(2.5), function(other, torch.tensor(2.5))),
    ]:
        got = function(left, right)
        assert got.dtype == expected.dtype and torch.equal(got.full(), expected)


def test_negatives_and_other_dtypes() -> None:
    tensor = ShardedTensor.distribute(WHOLE, FOUR)
    assert torch.equal((-tensor).full(), -WHOLE)
    assert torch.equal(tensor.to(torch.float16).full(), WHOLE.half())
    assert (tensor.ndim, tensor.numel(), tensor.shape, tensor.dtype) == (2, 48, (8, 6), torch.float32)


def test_it_says_who_has_what() -> None:
    tensor = ShardedTensor(FOUR, WHOLE[2:4], rank=1)
    assert repr(tensor).splitlines() == [
        "ShardedTensor((8, 6), float32, dp=4: Shard(dim=0, sizes=None))",
        "  rank 0: [0:2, 0:6]",
        "  rank 1: [2:4, 0:6] (here)",
        "  rank 2: [4:6, 0:6]",
        "  rank 3: [6:8, 0:6]",
    ]
    many = Layout((40,), Mesh({"dp": 10}), [BlockCyclic(0, 1)])
    lines = repr(ShardedTensor(many, torch.zeros(4), rank=0)).splitlines()
    assert lines[1] == "  rank 0: [0:1] [10:11] [20:21] [30:31] (here)" and lines[-1] == "  and 2 more ranks"
    wide = Layout((40,), Mesh({"dp": 2}), [BlockCyclic(0, 1)])
    assert "[6:7] and 16 more" in repr(ShardedTensor(wide, torch.zeros(20), rank=0))
    assert "boxes on 4 ranks" in repr(tensor[1:])


def test_it_is_drawn(tmp_path: Path) -> None:
    """Every rectangle of the picture is a box of the layout, once in the whole and once a rank."""
    layout = Layout((8, 6), Mesh({"r": 2, "tp": 2}), {"tp": Shard(1)})
    tensor = ShardedTensor.distribute(WHOLE, layout)
    drawing = tensor.show(tmp_path / "w.svg")
    assert (tmp_path / "w.svg").read_text() == drawing == tensor._repr_svg_()
    shapes = ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}rect")
    tips = sorted(shape[0].text or "" for shape in shapes)
    assert tips == sorted(["rank 0, 2", "rank 1, 3", *["[0:8, 0:3]"] * 2, *["[0:8, 3:6]"] * 2])
    tensor.show(tmp_path / "w.html")
    assert (tmp_path / "w.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match=re.escape("w.png', but must end in .svg or .html")):
        tensor.show(tmp_path / "w.png")
    assert ShardedTensor.distribute(torch.zeros(3, 2, 2), Layout((3, 2, 2), Mesh({"a": 3}), [Shard(0)])).show()


def test_the_pictures_in_the_documents_are_ours() -> None:
    docs = Path(__file__).resolve().parent.parent / "docs"
    pair = Layout((8, 6), Mesh({"replica": 2, "tp": 2}, [4, 5, 6, 7]), {"tp": Shard(1)})
    plan = picture({"w": TensorSpec(FOUR, "bfloat16")}, {"w": TensorSpec(pair, "bfloat16")}, "w")
    assert (docs / "sharding-plan.svg").read_text() == plan
    assert (docs / "sharded-tensor.svg").read_text() == ShardedTensor.distribute(WHOLE, pair).show()


def test_torch_has_the_same_parts() -> None:
    """DTensors become sharded tensors and come back, sharing memory; ranks take turns in this process."""
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            for placements in (
                [Rows(0), Rows(1)],
                [_StridedShard(0, split_factor=2), Rows(0)],
                [Everywhere(), Rows(0)],
            ):
                given = distribute_tensor(WHOLE, mesh, placements, src_data_rank=None)
                tensor = ShardedTensor.from_dtensor(given)
                assert torch.equal(tensor.local, given.to_local())
                assert torch.equal(tensor.local, ShardedTensor.distribute(WHOLE, tensor.layout).local)
                tensor.local.mul_(2)
                again = tensor.to_dtensor(mesh)
                assert (again.placements, again.shape, again.stride()) == (given.placements, (8, 6), (6, 1))
                assert torch.equal(again.to_local(), given.to_local())
                assert torch.equal(tensor.to_dtensor().to_local(), given.to_local())
            with pytest.raises(LayoutError, match="has no counterpart among DTensors"):
                tensor[1:].to_dtensor()
            with pytest.raises(ConfigError, match="mesh is Mesh"):
                tensor.to_dtensor(mesh["dp"])


def _worker(rank: int, port: int) -> Any:
    """One rank of four, in a process of its own."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given = distribute_tensor(WHOLE, mesh, [Rows(0), Rows(1)])
    tensor = ShardedTensor.from_dtensor(given)
    doubled = tensor + tensor
    assert torch.equal(doubled.full(), 2 * WHOLE) and torch.equal(doubled[3:5, 1].full(), 2 * WHOLE[3:5, 1])
    torchs = given.redistribute(mesh, [Everywhere(), Rows(0)])
    ours = tensor.redistribute(Layout((8, 6), tensor.layout.mesh, {"tp": Shard(0)}))  # type: ignore[union-attr]
    back = ours.to_dtensor(mesh)
    assert back.placements == torchs.placements and torch.equal(back.to_local(), torchs.to_local())
    assert torch.equal(back.full_tensor(), WHOLE)

    two = Layout((8, 6), Mesh({"x": 2}, [1, 3]), [Shard(1)])  # and back from ranks of which this may be none
    some = tensor.redistribute(two)
    assert sorted(some.parts) == ([rank] if rank in (1, 3) else [])
    assert torch.equal(some.redistribute(FOUR).local, WHOLE[2 * rank : 2 * rank + 2])
    left = store.num_keys()
    dist.barrier()
    for _ in range(3):
        tensor.full()
    dist.barrier()
    regions = default_engine().counters()["regions"]
    dist.destroy_process_group()
    return back.to_local().tolist(), store.num_keys() - left, regions


def test_processes_with_dtensors_of_torch() -> None:
    """Nothing stays behind in the store or in the engines."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = forked(4, _worker, rendezvous.port)
    assert [part for part, _, _ in results] == [WHOLE[:4].tolist(), WHOLE[4:].tolist()] * 2
    assert [regions for _, _, regions in results] == [0] * 4
    assert max(keys for _, keys, _ in results) <= 8  # barriers of torch's own


def test_a_rank_that_does_not_come_is_named() -> None:
    tensor = ShardedTensor(FOUR, WHOLE[:2], rank=0, store=dist.HashStore())
    with pytest.raises(TransferTimeout, match=r"rank 1 has not come in 0\.05 s"):
        tensor.full(timeout=0.05)


def test_ranks_meet_again_after_one_was_late() -> None:
    """What one rank gave up is not taken for what it does next."""
    store = dist.HashStore()
    late = Gathering(store, [0, 1], 1)
    with pytest.raises(TransferTimeout):
        Gathering(store, [0, 1], 0).gather("offers", b"a", 0.01)
    next_one = Gathering(store, [0, 1], 0)
    assert late.gather("offers", b"b", 1) == [b"a", b"b"]
    with pytest.raises(TransferTimeout):
        late.gather("done", b"", 0.01)
    got: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: got.append(Gathering(store, [0, 1], 1).gather("offers", b"d", 10)))
    thread.start()
    assert next_one.gather("offers", b"c", 10) == [b"c", b"d"]
    thread.join()
    assert got == [[b"c", b"d"]]


def test_what_is_wrong_is_said() -> None:
    tensor = ShardedTensor.distribute(WHOLE, FOUR)
    other = ShardedTensor.distribute(WHOLE, Layout((8, 6), Mesh({"dp": 4}), [Shard(1)]))
    terms = ShardedTensor(Layout((8, 6), Mesh({"dp": 1}), [Partial()]), {0: WHOLE})
    holes = BoxLayout((8, 6), {0: [Box((0, 0), (8, 6), (0, 0))]})
    for kind, call, told in [
        (LayoutError, lambda: tensor + other, "are not equal: redistribute one of them"),
        (LayoutError, lambda: terms + 1, "has terms of a sum: reduce them first"),
        (LayoutError, lambda: terms[0], "has terms of a sum: reduce them first"),
        (LayoutError, lambda: terms.full(), "has terms of a sum: reduce them first"),
        (LayoutError, lambda: tensor.redistribute(Layout((8,), Mesh({"a": 1}))), "layout has shape (8,), but the"),
        (LayoutError, lambda: ShardedTensor.distribute(WHOLE, holes).to_dtensor(), "no counterpart among DTensors"),
        (TypeError, lambda: tensor + "x", "unsupported operand"),
        (IndexError, lambda: tensor[8], "index 8 is not within the 8 elements of dimension 0"),
        (IndexError, lambda: tensor[1.5], "index 1.5 is not within the 8 elements of dimension 0"),
        (IndexError, lambda: tensor[::-1], "slice(None, None, -1) of dimension 0: the step has to be above 0"),
        (IndexError, lambda: tensor[0, 0, 0], "does not fit a tensor of 2 dimensions"),
        (IndexError, lambda: tensor[..., 0, ...], "does not fit a tensor of 2 dimensions"),
        (ConfigError, lambda: tensor.local, "this process has the parts of the ranks [0, 1, 2, 3], but one is needed"),
        (ConfigError, lambda: ShardedTensor(FOUR, WHOLE[:2]), "parts is one tensor, but this process is [0, 1, 2, 3]"),
        (ConfigError, lambda: ShardedTensor(FOUR, {0: WHOLE[:2]}), "parts are of the ranks [0], but this process is"),
        (ConfigError, lambda: ShardedTensor(FOUR, WHOLE, rank=1), "the part of rank 1 has shape (8, 6), but by its"),
        (ConfigError, lambda: ShardedTensor(FOUR, rank=9), "dtype is None, but the parts here are []"),
        (ConfigError, lambda: ShardedTensor(FOUR, WHOLE[:2], rank=1, dtype=torch.int8), "dtype is torch.int8, but"),
        (ConfigError, lambda: ShardedTensor.distribute(WHOLE[1:], FOUR), "whole has shape (7, 6), but the layout"),
        (ConfigError, lambda: ShardedTensor(FOUR, WHOLE[:2], rank=1).full(), "there is no store: pass store"),
        (ConfigError, lambda: Gathering(dist.HashStore(), [0, 1], 2), "rank is 2, which is none of the ranks [0, 1]"),
    ]:
        with pytest.raises(kind, match=re.escape(told)):
            call()
