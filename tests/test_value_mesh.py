"""Value meshes: numpy object arrays say which value belongs where; runs say what is kept."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma.actor.shape import Extent, NDSlice, OutOfExtent, Region, UnknownDimension
from monarch_rdma.actor.value_mesh import ValueMesh
from monarch_rdma.errors import ConfigError

HOSTS_GPUS = Extent(["hosts", "gpus"], [2, 3])
RANKS = Extent(["rank"], [6])

# Few distinct values, so that neighbours are often equal, or equal but not the same thing.
plain = st.sampled_from([None, True, False, 0, 1, 2**70, 0.0, -0.0, 1.0, math.inf, math.nan, "", "a", b"", b"a"])
values_of_ranks = plain | st.tuples(plain) | st.tuples(plain, plain) | st.builds(list, st.tuples(plain))


@st.composite
def filled(draw: st.DrawFn) -> tuple[Extent, list[Any]]:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    extent = Extent(("hosts", "gpus", "tp")[: len(sizes)], sizes)
    return extent, draw(st.lists(values_of_ranks, min_size=extent.nelements, max_size=extent.nelements))


def exactly(values: list[Any]) -> list[str]:
    """Equal only where the values are indistinguishable: 1 is not True, 0.0 is not -0.0, nan is nan."""
    return [repr(value) for value in values]


def objects(extent: Extent, values: list[Any]) -> np.ndarray:
    array = np.empty(extent.nelements, dtype=object)
    array[:] = values
    return array.reshape(extent.sizes)


# --- reading -------------------------------------------------------------------------------------------------------


@given(filled())
def test_each_rank_has_its_value(case: tuple[Extent, list[Any]]) -> None:
    extent, values = case
    mesh = ValueMesh(extent, values)
    assert exactly(mesh.values()) == exactly(values)
    assert exactly([mesh.get(rank) for rank in range(extent.nelements)]) == exactly(values)
    assert exactly([mesh.item(**point) for point in extent.points()]) == exactly(values)
    assert [point for point, _ in mesh.items()] == list(extent.points())
    assert exactly([value for _, value in mesh]) == exactly(values)
    assert (len(mesh), mesh.extent) == (extent.nelements, extent)


@given(filled(), st.data())
def test_slices_are_numpys(case: tuple[Extent, list[Any]], data: st.DataObject) -> None:
    extent, values = case
    selection = {
        label: data.draw(st.integers(0, size - 1) | st.integers(0, size - 1).map(lambda start: slice(start, None, 2)))
        for label, size in extent.items()
    }
    part = ValueMesh(extent, values).slice(**selection)
    expected = objects(extent, values)[tuple(selection.values())]
    expected = (
        expected
        if isinstance(expected, np.ndarray) and expected.dtype == object
        else objects(Extent([], []), [expected])
    )
    assert part.extent.sizes == expected.shape
    assert exactly(part.values()) == exactly(list(expected.flat))


@given(filled())
def test_a_changed_shape_keeps_values_in_order(case: tuple[Extent, list[Any]]) -> None:
    extent, values = case
    mesh = ValueMesh(extent, values)
    flat = mesh.flatten("rank")
    assert flat.sizes == {"rank": len(values)}
    assert exactly(flat.values()) == exactly(values)
    assert exactly(flat.split(rank=("a", "b"), a=1).values()) == exactly(values)
    renamed = mesh.rename(**{label: f"my_{label}" for label in extent})
    assert renamed.extent.labels == tuple(f"my_{label}" for label in extent)
    assert exactly(renamed.values()) == exactly(values)


def test_a_slice_counts_its_ranks_from_0() -> None:
    part = ValueMesh(HOSTS_GPUS, list("abcdef")).slice(hosts=1)
    assert part.get(0) == "d"
    assert [(point.rank, point["gpus"], value) for point, value in part] == [(0, 0, "d"), (1, 1, "e"), (2, 2, "f")]
    assert part.slice(gpus=2).item() == "f"


def test_any_slice_can_be_flattened() -> None:
    corner = ValueMesh(HOSTS_GPUS, list("abcdef")).slice(gpus=slice(0, 2))
    assert corner.flatten("rank").values() == ["a", "b", "d", "e"]


def test_of_a_region_the_extent_counts() -> None:
    region = Region(["gpus"], NDSlice(10, [2], [4]))
    mesh = ValueMesh(region, ["a", "b"])
    assert (mesh.get(1), mesh.item(gpus=0), mesh.extent) == ("b", "a", region.extent)


# --- making --------------------------------------------------------------------------------------------------------


@given(filled(), st.randoms())
def test_values_by_rank_in_any_order(case: tuple[Extent, list[Any]], random: Any) -> None:
    extent, values = case
    pairs = list(enumerate(values))
    random.shuffle(pairs)
    assert exactly(ValueMesh.from_indexed(extent, iter(pairs)).values()) == exactly(values)


def test_of_several_values_for_a_rank_the_last_counts() -> None:
    assert ValueMesh.from_indexed(Extent(["r"], [2]), [(1, "x"), (0, "a"), (1, "b")]).values() == ["a", "b"]


@given(filled(), st.integers(0, 64))
def test_halves_are_joined_by_their_runs(case: tuple[Extent, list[Any]], cut: int) -> None:
    extent, values = case
    halves = [ValueMesh(Extent(["rank"], [len(half)]), half) for half in (values[:cut], values[cut:]) if half]
    joined = ValueMesh.from_runs(extent, [run for half in halves for run in half.runs()])
    assert exactly(joined.values()) == exactly(values)
    assert joined.runs() == ValueMesh(extent, values).runs() or any(value != value for value in values)


@given(filled())
def test_a_value_mesh_can_be_pickled(case: tuple[Extent, list[Any]]) -> None:
    mesh = ValueMesh(*case)
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy.extent == mesh.extent
    assert exactly(copy.values()) == exactly(mesh.values())
    assert len(copy.runs()) == len(mesh.runs())


# --- runs ----------------------------------------------------------------------------------------------------------


def text(*parts: str) -> str:
    """A string that is not the object another call returned."""
    return "".join(parts)


def test_equal_neighbours_are_kept_once() -> None:
    mesh = ValueMesh(RANKS, [None, None, text("ab", "c"), text("a", "bc"), None, None])
    assert mesh.runs() == [(2, None), (2, "abc"), (2, None)]
    assert ValueMesh(RANKS, [(1, text("ab", "c")) for _ in range(6)]).runs() == [(6, (1, "abc"))]
    assert ValueMesh(RANKS, [text("ab", "c").encode() for _ in range(6)]).runs() == [(6, b"abc")]
    assert ValueMesh(RANKS, [10**30 for _ in range(6)]).runs() == [(6, 10**30)]


def test_what_is_equal_but_not_alike_is_kept_apart() -> None:
    values = [1, True, 1.0, 0.0, -0.0, 0]
    assert len(ValueMesh(RANKS, values).runs()) == 6
    assert len(ValueMesh(RANKS, [(value,) for value in values]).runs()) == 6


def test_mutable_values_are_kept_once_only_where_they_are_one_object() -> None:
    shared: list[int] = []
    mesh = ValueMesh(RANKS, [shared, shared, [], [], shared, shared])
    assert [count for count, _ in mesh.runs()] == [2, 1, 1, 2]
    mesh.get(0).append(1)
    assert mesh.values() == [[1], [1], [], [], [1], [1]]


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise AssertionError("values of other types are not to be compared")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "make",
    [
        Incomparable,
        lambda: (Incomparable(), 1),
        lambda: type("Text", (str,), {"__eq__": Incomparable.__eq__})("a"),
        lambda: np.ones(3),
        lambda: torch.ones(3),
    ],
    ids=["object", "in a tuple", "subclass of str", "array", "tensor"],
)
def test_other_values_are_never_compared(make: Callable[[], object]) -> None:
    values = [make() for _ in range(6)]
    mesh = ValueMesh(RANKS, values)
    assert [count for count, _ in mesh.runs()] == [1] * 6
    assert all(got is value for got, value in zip(mesh.values(), values, strict=True))


def test_tuples_nested_deeper_than_the_stack_are_values_too() -> None:
    def nested() -> tuple[Any, ...]:
        value: tuple[Any, ...] = ()
        for _ in range(100_000):
            value = (value,)
        return value

    assert len(ValueMesh(Extent(["r"], [2]), [nested(), nested()]).runs()) == 2


def test_a_million_equal_values_are_pickled_as_one() -> None:
    big = ValueMesh.from_runs(Extent(["r"], [1_000_000]), [(999_999, "same"), (1, "last")])
    assert len(pickle.dumps(big)) < 250
    assert (big.get(999_998), big.get(999_999)) == ("same", "last")


def test_values_are_let_go_with_the_mesh() -> None:
    value = Incomparable()
    mesh = ValueMesh(Extent(["r"], [2]), [value, value]).slice(r=1)
    gone = weakref.ref(value)
    del value, mesh
    gc.collect()
    assert gone() is None


# --- printing and refusing -----------------------------------------------------------------------------------------


def test_it_prints_its_runs() -> None:
    assert repr(ValueMesh(HOSTS_GPUS, ["a", "a", "a", "b", "c", "c"])).splitlines() == [
        "ValueMesh({hosts: 2, gpus: 3}):",
        "  {'hosts': 0/2, 'gpus': 0/3} to {'hosts': 0/2, 'gpus': 2/3}: 'a'",
        "  {'hosts': 1/2, 'gpus': 0/3}: 'b'",
        "  {'hosts': 1/2, 'gpus': 1/3} to {'hosts': 1/2, 'gpus': 2/3}: 'c'",
    ]


def test_it_prints_the_beginning_of_many_runs() -> None:
    lines = repr(ValueMesh(Extent(["r"], [1000]), range(1000))).splitlines()
    assert lines[-1] == "  ... and 968 more ranks"
    assert len(lines) < 40


@pytest.mark.parametrize(
    ("attempt", "kind", "sentence"),
    [
        (lambda: ValueMesh(RANKS, [1, 2]), ConfigError, "2 values are given for the 6 ranks of {rank: 6}"),
        (lambda: ValueMesh(RANKS, range(7)), ConfigError, "7 values are given for the 6 ranks"),
        (lambda: ValueMesh({"rank": 6}, [1]), ConfigError, "must be an Extent or a Region, not {'rank': 6}"),
        (lambda: ValueMesh.from_runs(RANKS, [(7, 1)]), ConfigError, "7 values"),
        (lambda: ValueMesh.from_runs(RANKS, [(0, 1), (6, 2)]), ConfigError, "at least 1, not 0"),
        (lambda: ValueMesh.from_indexed(RANKS, [(6, 1)]), OutOfExtent, "rank 6 is out of range"),
        (lambda: ValueMesh.from_indexed(RANKS, [(-1, 1)]), OutOfExtent, "rank -1 is out of range"),
        (
            lambda: ValueMesh.from_indexed(RANKS, [(1, 1)]),
            ConfigError,
            "5 of the 6 ranks of {rank: 6} have no value: 0, 2",
        ),
        (lambda: ValueMesh.from_indexed(Extent(["r"], [99]), []), ConfigError, "6, 7, ..."),
        (lambda: ValueMesh(RANKS, range(6)).get(6), OutOfExtent, "rank 6 is out of range: the mesh has 6 ranks"),
        (lambda: ValueMesh(RANKS, range(6)).get(-1), OutOfExtent, "rank -1"),
        (lambda: ValueMesh(RANKS, range(6)).item(), UnknownDimension, "for dimension 'rank'"),
        (lambda: ValueMesh(RANKS, range(6)).item(rank=0, tp=0), UnknownDimension, "no dimension 'tp'"),
        (lambda: ValueMesh(RANKS, range(6)).item(rank=6), OutOfExtent, "rank=6 is out of range"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    attempt: Callable[[], object], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        attempt()
    assert sentence in str(caught.value)
