"""Shapes, with numpy as the judge: a mesh is an array of its base ranks, and must do with them what numpy does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from monarch_rdma.actor.shape import Extent, MeshTrait, NDSlice, OutOfExtent, Point, Region, UnknownDimension
from monarch_rdma.errors import ConfigError

LABELS = ("hosts", "gpus", "dp", "tp")


class Mesh(MeshTrait):
    """The smallest mesh: a region."""

    def __init__(self, region: Region) -> None:
        self.region = region

    @property
    def _region(self) -> Region:
        return self.region

    def _with_region(self, region: Region) -> Mesh:
        return Mesh(region)

    @property
    def ranks(self) -> np.ndarray:
        return np.array(self.region.ranks(), dtype=int).reshape(self.extent.sizes)


def mesh_of(**sizes: int) -> Mesh:
    return Mesh(Extent.of(sizes).region)


def array_of(mesh: Mesh) -> np.ndarray:
    return np.arange(len(mesh)).reshape(mesh.extent.sizes)


sizes_of_a_mesh = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(sizes_of_a_mesh)
    return Mesh(Extent(LABELS[: len(sizes)], sizes).region)


@st.composite
def selections(draw: st.DrawFn, mesh: Mesh) -> dict[str, int | slice]:
    """An index or a slice for some of the dimensions, each leaving something."""
    chosen: dict[str, int | slice] = {}
    for label, size in mesh.sizes.items():
        match draw(st.sampled_from(["all", "index", "slice"])):
            case "index":
                chosen[label] = draw(st.integers(0, size - 1))
            case "slice":
                part = draw(st.slices(size))
                part = slice(part.start, part.stop, abs(part.step) if part.step else None)
                assume(range(size)[part])
                chosen[label] = part
    return chosen


@st.composite
def sliced_meshes(draw: st.DrawFn) -> tuple[Mesh, np.ndarray]:
    """A mesh cut from a larger one, and the base ranks that it must have."""
    whole = draw(meshes())
    selection = draw(selections(whole))
    index = tuple(selection.get(label, slice(None)) for label in whole.extent)
    return whole.slice(**selection), array_of(whole)[index]


# --- Extent and Point ----------------------------------------------------------------------------------------------


def test_an_extent_maps_labels_to_sizes() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    assert dict(extent) == {"hosts": 2, "gpus": 4}
    assert list(extent.keys()) == ["hosts", "gpus"]
    assert extent["gpus"] == 4
    assert "hosts" in extent and "tp" not in extent
    assert len(extent) == 2
    assert extent.nelements == 8
    assert (extent.labels, extent.sizes) == (("hosts", "gpus"), (2, 4))
    assert str(extent) == "{hosts: 2, gpus: 4}"


def test_extents_are_equal_by_labels_sizes_and_order() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    assert extent == Extent.of({"hosts": 2, "gpus": 4})
    assert hash(extent) == hash(Extent(("hosts", "gpus"), (2, 4)))
    assert extent != Extent(["gpus", "hosts"], [4, 2])
    assert extent != Extent(["hosts", "tp"], [2, 4])
    assert {extent: 1}[Extent.of({"hosts": 2, "gpus": 4})] == 1


def test_an_extent_without_dimensions_has_one_rank() -> None:
    extent = Extent([], [])
    assert (len(extent), extent.nelements) == (0, 1)
    assert dict(extent.point(0)) == {}


@given(meshes())
def test_points_count_as_numpy_does(mesh: Mesh) -> None:
    extent = mesh.extent
    points = list(extent.points())
    assert [tuple(point.values()) for point in points] == list(np.ndindex(*extent.sizes))
    assert [point.rank for point in points] == list(range(extent.nelements))
    assert [extent.rank_of(**point) for point in points] == list(range(extent.nelements))


def test_a_point_maps_labels_to_coordinates() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    point = extent.point(5)
    assert dict(point) == {"hosts": 1, "gpus": 1}
    assert (point.rank, point.extent, point.size("gpus")) == (5, extent, 4)
    assert point == Point(5, Extent(["hosts", "gpus"], [2, 4]))
    assert point != extent.point(6)
    assert point != Point(5, Extent(["dp", "tp"], [2, 4]))
    assert len({point, Point(5, extent), extent.point(6)}) == 2
    assert str(point) == "{'hosts': 1/2, 'gpus': 1/4}"


def test_numpy_integers_become_plain_ones() -> None:
    extent = Extent(["gpus"], [np.int64(4)])
    assert type(extent["gpus"]) is int
    assert type(extent.point(np.int32(2)).rank) is int
    assert type(mesh_of(gpus=4).slice(gpus=np.int64(2)).ranks.item()) is int


@pytest.mark.parametrize(
    "value",
    [
        Extent(["hosts", "gpus"], [2, 4]),
        Extent(["hosts", "gpus"], [2, 4]).point(3),
        NDSlice(3, [2, 2], [4, 1]),
        Region(["hosts", "gpus"], NDSlice(3, [2, 2], [4, 1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shapes_are_pickled_small_and_cannot_change(value: Any) -> None:
    pickled = pickle.dumps(value)
    assert pickle.loads(pickled) == value
    assert hash(pickle.loads(pickled)) == hash(value)
    assert len(pickled) < 160
    with pytest.raises(AttributeError):
        setattr(value, next(iter(type(value).__dataclass_fields__)), ())


# --- NDSlice -------------------------------------------------------------------------------------------------------


@st.composite
def strided(draw: st.DrawFn) -> tuple[NDSlice, np.ndarray]:
    """A slice whose ranks are a part of a larger array in any order of its dimensions, and that part."""
    sizes = draw(sizes_of_a_mesh)
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    starts = [draw(st.integers(0, 2)) for _ in sizes]
    room = [start + size * step for start, size, step in zip(starts, sizes, steps, strict=True)]
    base = np.arange(int(np.prod(room, dtype=int)), dtype=np.int64).reshape(room)
    part = base[tuple(slice(a, a + n * k, k) for a, n, k in zip(starts, sizes, steps, strict=True))]
    part = part.transpose(draw(st.permutations(range(part.ndim))))
    return NDSlice(part.flat[0], part.shape, [stride // part.itemsize for stride in part.strides]), part


@given(strided())
def test_a_slice_has_the_ranks_of_the_array_in_its_order(pair: tuple[NDSlice, np.ndarray]) -> None:
    ndslice, array = pair
    ranks = array.flatten().tolist()
    assert list(ndslice) == list(ndslice.ranks()) == ranks
    assert (len(ndslice), ndslice.nelements, ndslice.ndim) == (array.size, array.size, array.ndim)
    assert [ndslice[position] for position in range(-len(ranks), len(ranks))] == ranks + ranks
    assert list(ndslice[1:3]) == ranks[1:3]
    assert [ndslice.coordinates(rank) for rank in ranks] == list(np.ndindex(*array.shape))


@given(strided())
def test_a_slice_contains_its_ranks_and_no_others(pair: tuple[NDSlice, np.ndarray]) -> None:
    ndslice, array = pair
    ranks = set(array.flatten().tolist())
    everything = range(-2, max(ranks) + 3)
    assert {rank for rank in everything if rank in ndslice} == ranks
    for rank in set(everything) - ranks:
        with pytest.raises(OutOfExtent, match=f"rank {rank} "):
            ndslice.coordinates(rank)


@given(strided())
def test_evenly_spaced_ranks_are_a_range(pair: tuple[NDSlice, np.ndarray]) -> None:
    ndslice, array = pair
    steps = set(np.diff(array.flatten()).tolist())
    even = ndslice.evenly_spaced()
    assert (even is not None) == (len(steps) <= 1 and all(step > 0 for step in steps))
    if even is not None:
        assert list(even) == array.flatten().tolist()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3), st.integers(0, 3))
def test_dimensions_nest_or_are_refused(dimensions: list[tuple[int, int]], offset: int) -> None:
    strides, sizes = [stride for stride, _ in dimensions], [size for _, size in dimensions]
    outermost_first = sorted(dimensions, reverse=True)
    ascending = [
        offset + sum(at * stride for at, (stride, _) in zip(index, outermost_first, strict=True))
        for index in np.ndindex(*(size for _, size in outermost_first))
    ]
    if all(np.diff(ascending) > 0):
        assert sorted(NDSlice(offset, sizes, strides)) == ascending
    else:
        with pytest.raises(ConfigError, match="overlap"):
            NDSlice(offset, sizes, strides)


# --- regions and meshes --------------------------------------------------------------------------------------------


@given(sliced_meshes())
def test_slicing_is_numpy_indexing(pair: tuple[Mesh, np.ndarray]) -> None:
    mesh, array = pair
    assert mesh.ranks.tolist() == array.tolist()
    assert mesh.extent.sizes == array.shape
    assert len(mesh) == mesh.size() == array.size


@given(sliced_meshes(), st.data())
def test_slices_of_slices(pair: tuple[Mesh, np.ndarray], data: st.DataObject) -> None:
    mesh, array = pair
    selection = data.draw(selections(mesh))
    index = tuple(selection.get(label, slice(None)) for label in mesh.extent)
    assert mesh.slice(**selection).ranks.tolist() == array[index].tolist()


@given(sliced_meshes())
def test_base_ranks_lead_back_to_their_points(pair: tuple[Mesh, np.ndarray]) -> None:
    mesh, array = pair
    found = [mesh.region.point_of_base_rank(rank) for rank in array.flatten().tolist()]
    assert found == list(mesh.extent.points())


def test_a_base_rank_of_another_part_is_refused() -> None:
    with pytest.raises(OutOfExtent, match="rank 2 is not in"):
        mesh_of(hosts=2, gpus=2).slice(hosts=0).region.point_of_base_rank(2)


def test_an_index_removes_its_dimension_and_a_slice_keeps_it() -> None:
    mesh = mesh_of(hosts=2, gpus=4)
    assert mesh.slice(gpus=1).sizes == {"hosts": 2}
    assert mesh.slice(gpus=slice(1, 2)).sizes == {"hosts": 2, "gpus": 1}
    assert mesh.slice(gpus=slice(2, 100)).sizes == {"hosts": 2, "gpus": 2}
    assert mesh.slice(hosts=1, gpus=2).sizes == {}
    assert mesh.slice(hosts=1, gpus=2).region.ranks() == [6]
    assert mesh.slice().region == mesh.region


@given(sliced_meshes())
def test_flattening_keeps_the_ranks_in_order(pair: tuple[Mesh, np.ndarray]) -> None:
    mesh, array = pair
    ranks = array.flatten().tolist()
    if len(set(np.diff(ranks))) <= 1:
        flat = mesh.flatten("rank")
        assert flat.sizes == {"rank": len(ranks)}
        assert flat.region.ranks() == ranks
    else:
        with pytest.raises(ConfigError, match="cannot flatten sparse mesh"):
            mesh.flatten("rank")


@given(sliced_meshes(), st.data())
def test_splitting_is_reshaping(pair: tuple[Mesh, np.ndarray], data: st.DataObject) -> None:
    """Splits every dimension in up to three, leaving at most one size of each to be inferred."""
    mesh, array = pair
    arguments: dict[str, Any] = {}
    shape: list[int] = []
    for label, size in mesh.sizes.items():
        outer = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        middle = data.draw(st.sampled_from([n for n in range(1, size // outer + 1) if (size // outer) % n == 0]))
        sizes = {f"{label}_0": outer, f"{label}_1": middle, f"{label}_2": size // outer // middle}
        arguments[label] = tuple(sizes)
        shape += sizes.values()
        inferred = data.draw(st.sampled_from([*sizes, None]))
        arguments |= {part: n for part, n in sizes.items() if part != inferred}
    split = mesh.split(**arguments)
    assert split.extent.sizes == tuple(shape)
    assert split.ranks.tolist() == array.reshape(shape).tolist()


def test_a_split_leaves_other_dimensions_as_they_are() -> None:
    split = mesh_of(hosts=4, gpus=6).split(gpus=("tp", "cp"), cp=2)
    assert split.sizes == {"hosts": 4, "tp": 3, "cp": 2}
    assert mesh_of(gpus=6).split(gpus=("gpus", "cp"), cp=2).sizes == {"gpus": 3, "cp": 2}
    assert mesh_of(hosts=1, gpus=6).split(hosts=()).sizes == {"gpus": 6}


@given(sliced_meshes())
def test_renaming_changes_labels_alone(pair: tuple[Mesh, np.ndarray]) -> None:
    mesh, array = pair
    labels = mesh.extent.labels
    renamed = mesh.rename(**dict(zip(labels, reversed(labels), strict=True)))
    assert renamed.extent.labels == labels[::-1]
    assert renamed.ranks.tolist() == array.tolist()
    assert mesh.rename(**{label: f"my_{label}" for label in labels[:1]}).extent.labels[1:] == labels[1:]


def test_sizes() -> None:
    mesh = mesh_of(hosts=2, gpus=4, tp=3)
    assert mesh.sizes == {"hosts": 2, "gpus": 4, "tp": 3}
    assert (mesh.size(), mesh.size("gpus"), mesh.size(["hosts", "tp"]), mesh.size([])) == (24, 4, 6, 1)


# --- what is refused -----------------------------------------------------------------------------------------------

MESH = mesh_of(hosts=2, gpus=4)
EXTENT = MESH.extent


@pytest.mark.parametrize(
    ("attempt", "kinds", "sentence"),
    [
        (lambda: Extent(["a"], [1, 2]), ValueError, "differ in number"),
        (lambda: Extent(["a", "a"], [1, 2]), ValueError, "two dimensions would be called 'a'"),
        (lambda: Extent("ab", [1, 2]), ValueError, "not 'ab'"),
        (lambda: Extent([1], [1]), ValueError, "must be a str, not 1"),
        (lambda: Extent(["a"], [0]), ValueError, "size must be at least 1, not 0"),
        (lambda: Extent(["a"], [1.5]), ValueError, "must be an integer, not 1.5"),
        (lambda: EXTENT["tp"], KeyError, "{hosts: 2, gpus: 4} has no dimension 'tp'"),
        (lambda: EXTENT.point(8), (ValueError, IndexError), "rank 8 is out of range"),
        (lambda: EXTENT.point(-1), (ValueError, IndexError), "rank -1 is out of range"),
        (lambda: EXTENT.rank_of(hosts=1), KeyError, "no coordinate is given for dimension 'gpus'"),
        (lambda: EXTENT.rank_of(hosts=1, gpus=1, tp=1), KeyError, "no dimension 'tp'"),
        (lambda: EXTENT.rank_of(hosts=1, gpus=4), IndexError, "gpus=4 is out of range"),
        (lambda: NDSlice(0, [2, 2], [1]), ValueError, "differ in number"),
        (lambda: NDSlice(0, [2, 2], [1, 1]), ValueError, "overlap"),
        (lambda: NDSlice(0, [2], [-1]), ValueError, "stride must be at least 0, not -1"),
        (lambda: NDSlice(-1, [2], [1]), ValueError, "offset must be at least 0, not -1"),
        (lambda: NDSlice(0, [2], [1])[2], IndexError, "index 2 is out of range"),
        (lambda: Region(["a"], NDSlice(0, [2, 2], [2, 1])), ValueError, "do not name the 2 dimensions"),
        (lambda: MESH.slice(tp=0), (TypeError, ValueError), "no dimension 'tp'"),
        (lambda: MESH.slice(gpus=4), IndexError, "gpus=4 is out of range: dimension 'gpus' has size 4"),
        (lambda: MESH.slice(gpus=-1), IndexError, "gpus=-1 is out of range"),
        (lambda: MESH.slice(gpus=[1, 2]), ValueError, "must be an integer, not [1, 2]"),
        (lambda: MESH.slice(gpus=slice(3, 1)), ValueError, "selects nothing of dimension 'gpus' of size 4"),
        (lambda: MESH.slice(gpus=slice(4, 8)), ValueError, "selects nothing"),
        (lambda: MESH.slice(gpus=slice(None, None, -1)), ValueError, "goes backwards"),
        (lambda: MESH.slice(gpus=slice(None, None, 0)), ValueError, "step cannot be zero"),
        (lambda: MESH.slice(gpus=slice("a", None)), ValueError, "for dimension 'gpus'"),
        (lambda: MESH.flatten(3), ValueError, "must be a str, not 3"),
        (lambda: MESH.slice(gpus=slice(0, 2)).flatten("r"), ValueError, "cannot flatten sparse mesh"),
        (lambda: MESH.rename(tp="dp"), ValueError, "no dimension 'tp'"),
        (lambda: MESH.rename(hosts="gpus"), ValueError, "two dimensions would be called 'gpus'"),
        (lambda: MESH.rename(hosts=3), ValueError, "must be a str, not 3"),
        (lambda: MESH.split(gpus=("a", "b")), ValueError, "give all but one, as in b=2"),
        (lambda: MESH.split(gpus=("a", "b"), a=3), ValueError, "size 4 cannot be split into (a=3, b=?)"),
        (lambda: MESH.split(gpus=("a", "b"), a=2, b=4), ValueError, "cannot be split into (a=2, b=4)"),
        (lambda: MESH.split(gpus=("a", "b"), a=0), ValueError, "size of 'a' must be at least 1, not 0"),
        (lambda: MESH.split(gpus=("a", "b"), a=1.5), ValueError, "size of 'a' must be an integer, not 1.5"),
        (lambda: MESH.split(gpus=()), ValueError, "size 4 cannot be split into ()"),
        (lambda: MESH.split(gpus="ab"), ValueError, "not 'ab'"),
        (lambda: MESH.split(gpus=2), ValueError, "expected a sequence of dimension labels, not 2"),
        (lambda: MESH.split(gpus=("hosts", "b"), b=2), ValueError, "two dimensions would be called 'hosts'"),
        (lambda: MESH.split(tp=("a", "b")), ValueError, "no dimension 'tp'"),
        (lambda: MESH.split(tp=3), ValueError, "sizes are given for ['tp'], which no dimension is split into"),
        (lambda: MESH.size("tp"), KeyError, "no dimension 'tp'"),
        (lambda: MESH.size(["hosts", "tp"]), KeyError, "no dimension 'tp'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    attempt: Callable[[], object], kinds: type[Exception] | tuple[type[Exception], ...], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        attempt()
    assert sentence in str(caught.value)
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        assert isinstance(caught.value, kind)


@pytest.mark.parametrize("kind", [UnknownDimension, OutOfExtent])
def test_errors_are_pickled_as_themselves(kind: type[ConfigError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("no dimension 'tp'")))
    assert type(copy) is kind
    assert str(copy) == "no dimension 'tp'"
