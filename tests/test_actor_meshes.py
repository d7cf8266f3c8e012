"""Meshes: their shapes on live actors, what messages see of them, and references to them in messages."""

from __future__ import annotations

import os
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
from actor_client import LIMIT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_rdma.actor import (
    Actor,
    Extent,
    HostMesh,
    ProcMesh,
    context,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)


class Member(Actor):
    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.born = dict(current_rank()), current_size()

    @endpoint
    def where(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """This actor's rank in the mesh that was spawned; its place and sizes in the mesh that was called."""
        return context().actor_instance.rank.rank, dict(current_rank()), current_size()

    @endpoint
    def birth(self) -> Any:
        return self.born

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def get(self) -> int:
        return self.number

    @endpoint
    def call(self, mesh: Any) -> list[Any]:
        return list(mesh.where.call().get(LIMIT).values())

    @endpoint
    def spawn(self, sizes: dict[str, int], number: int) -> Any:
        return this_host().spawn_procs(sizes).spawn("children", Member, number)

    @endpoint
    def spawn_on(self, procs: Any, number: int) -> Any:
        return procs.spawn("guests", Member, number)

    @endpoint
    def spawn_here(self, number: int) -> Any:
        return this_proc().spawn("beside", Member, number)

    @endpoint
    def own_procs(self) -> Any:
        return context().actor_instance.proc_mesh

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def names(self) -> tuple[str, str, str]:
        instance = context().actor_instance
        return instance.name, instance.class_name, repr(instance)


SIZES = {"a": 2, "b": 3, "c": 2}
RANKS = np.arange(12).reshape(2, 3, 2)


@pytest.fixture(scope="module")
def cube(client: HostMesh) -> Any:
    """Twelve actors in twelve processes."""
    return client.spawn_procs(SIZES).spawn("cube", Member)


# --- shapes


@st.composite
def selections(draw: st.DrawFn) -> dict[str, int | slice]:
    """For some dimensions an index, or a slice that is not empty."""
    chosen: dict[str, int | slice] = {}
    for label, size in SIZES.items():
        kind = draw(st.sampled_from(["all", "index", "slice"]))
        if kind == "index":
            chosen[label] = draw(st.integers(0, size - 1))
        elif kind == "slice":
            start = draw(st.integers(0, size - 1))
            chosen[label] = slice(start, draw(st.integers(start + 1, size)))
    return chosen


def indexed(selection: dict[str, int | slice]) -> np.ndarray:
    return RANKS[tuple(selection.get(label, slice(None)) for label in SIZES)]


@given(selection=selections())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slice_calls_the_actors_that_numpy_selects(cube: Any, selection: dict[str, int | slice]) -> None:
    wanted = indexed(selection)
    part = cube.slice(**selection)
    labels = [label for label in SIZES if not isinstance(selection.get(label), int)]
    assert part.sizes == dict(zip(labels, wanted.shape, strict=True))
    answers = part.where.call().get(LIMIT)
    for index, (point, (rank, place, sizes)) in zip(np.ndindex(*wanted.shape), answers.items(), strict=True):
        assert rank == wanted[index]
        assert dict(point) == place == dict(zip(labels, index, strict=True))
        assert sizes == part.sizes


@given(first=selections(), data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slices_of_slices_and_flattened_ones_call_the_same(
    cube: Any, first: dict[str, int | slice], data: st.DataObject
) -> None:
    wanted, part = indexed(first), cube.slice(**first)
    if part.sizes:
        label = data.draw(st.sampled_from(list(part.sizes)))
        index = data.draw(st.integers(0, part.size(label) - 1))
        axis = list(part.sizes).index(label)
        wanted, part = wanted.take(index, axis), part.slice(**{label: index})
    answers = part.where.call().get(LIMIT)
    assert [rank for rank, _, _ in answers.values()] == wanted.flatten().tolist()
    assert list(part.where.call().get(LIMIT).values()) == list(answers.values())


def test_flattened_split_and_renamed_meshes_are_the_same_actors(cube: Any) -> None:
    flat = cube.flatten("rank")
    assert [(dict(point)["rank"], rank) for point, (rank, _, _) in flat.where.call().get(LIMIT).items()] == [
        (rank, rank) for rank in range(12)
    ]
    split = flat.split(rank=("x", "y"), y=4)
    assert split.sizes == {"x": 3, "y": 4}
    assert split.slice(x=2, y=1).where.call_one().get(LIMIT) == (9, {}, {})
    assert cube.rename(a="z").slice(z=1, b=2, c=0).where.call_one().get(LIMIT)[0] == 10


def test_results_are_sliced_like_the_mesh(cube: Any) -> None:
    results = cube.where.call().get(LIMIT)
    assert [rank for rank, _, _ in results.slice(b=1).values()] == RANKS[:, 1].flatten().tolist()
    assert results.item(a=1, b=2, c=1)[0] == 11
    assert len(results) == 12


def test_a_spawn_on_a_slice_of_processes_has_its_shape(client: HostMesh) -> None:
    procs = client.spawn_procs({"a": 2, "b": 2})
    row = procs.slice(a=1).spawn("row", Member)
    assert row.sizes == {"b": 2}
    assert [born for born in row.birth.call().get(LIMIT).values()] == [({"b": 0}, {"b": 2}), ({"b": 1}, {"b": 2})]
    both = procs.spawn("both", Member).pid.call().get(LIMIT)
    assert list(row.pid.call().get(LIMIT).values()) == list(both.slice(a=1).values())
    procs.stop().get(LIMIT)


@pytest.mark.parametrize(
    ("select", "error"),
    [
        ({"nothing": 0}, TypeError),
        ({"a": 2}, IndexError),
        ({"a": -1}, IndexError),
        ({"b": slice(2, 2)}, ValueError),
        ({"b": [0, 1]}, ValueError),
    ],
)
def test_a_slice_that_there_is_not_is_refused(cube: Any, select: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        cube.slice(**select)


def test_sizes_are_told(cube: Any, client: HostMesh) -> None:
    assert cube.extent == Extent(["a", "b", "c"], [2, 3, 2])
    assert (cube.size(), cube.size("b"), cube.size(["a", "b"]), len(cube)) == (12, 3, 6, 12)
    assert (client.sizes, len(client), client.spawn_procs().sizes) == ({}, 1, {})


@pytest.mark.parametrize("per_host", [{"a": 0}, {"a": -1}, {"a": "two"}, {1: 2}])
def test_sizes_that_cannot_be_are_refused(client: HostMesh, per_host: Any) -> None:
    with pytest.raises(ValueError, match="a|1"):
        client.spawn_procs(per_host)


@pytest.mark.parametrize("per_host", [4, "gpus", [("a", 2)]])
def test_sizes_without_names_are_refused(client: HostMesh, per_host: Any) -> None:
    with pytest.raises(ValueError, match="per_host is .* must be a mapping"):
        client.spawn_procs(per_host)


# --- who am I


def test_the_client_has_a_context_too() -> None:
    assert (dict(current_rank()), current_size(), repr(context().actor_instance)) == ({}, {}, "<root>")


def test_an_actor_knows_its_name_and_its_creators(procs: ProcMesh) -> None:
    member = procs.spawn("member", Member).slice(gpus=1)
    name, class_name, text = member.names.call_one().get(LIMIT)
    assert (name, class_name) == ("member", "test_actor_meshes.Member")
    assert text.startswith("<root>.<") and "member" in text
    child = member.spawn_here.call_one(1).get(LIMIT)
    assert child.names.call_one().get(LIMIT)[2].startswith(text + ".<")


# --- references


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_references_can_be_pickled(cube: Any, dumps: Any) -> None:
    part = pickle.loads(dumps(cube.slice(a=1)))
    assert part.sizes == {"b": 3, "c": 2}
    assert [rank for rank, _, _ in part.where.call().get(LIMIT).values()] == [6, 7, 8, 9, 10, 11]


def test_a_reference_to_a_large_mesh_is_small(cube: Any) -> None:
    assert len(pickle.dumps(cube)) < 4000


def test_a_reference_in_a_message_calls_from_there(cube: Any) -> None:
    part = cube.slice(b=1, c=0)
    assert cube.slice(a=0, b=0, c=0).call.call_one(part).get(LIMIT) == [
        (2, {"a": 0}, {"a": 2}),
        (8, {"a": 1}, {"a": 2}),
    ]


def test_a_reference_comes_back_as_it_went(cube: Any) -> None:
    one = cube.slice(a=1, b=1, c=1)
    back = one.echo.call_one([cube, {"part": cube.slice(c=1)}]).get(LIMIT)
    assert back[0].sizes == SIZES
    assert back[1]["part"].slice(a=0, b=2).where.call_one().get(LIMIT)[0] == 5


def test_a_mesh_that_an_actor_spawned_is_used_by_the_client_and_by_others(cube: Any) -> None:
    one, other = cube.slice(a=0, b=0, c=0), cube.slice(a=1, b=2, c=1)
    children = one.spawn.call_one({"n": 2}, 7).get(LIMIT)
    assert list(children.get.call().get(LIMIT).values()) == [7, 7]
    assert [rank for rank, _, _ in other.call.call_one(children).get(LIMIT)] == [0, 1]
    assert len({*children.pid.call().get(LIMIT).values(), *cube.pid.call().get(LIMIT).values()}) == 14


def test_processes_can_be_given_to_actors(cube: Any, procs: ProcMesh) -> None:
    guests = cube.slice(a=0, b=0, c=0).spawn_on.call_one(procs, 5).get(LIMIT)
    assert guests.sizes == {"gpus": 2}
    assert list(guests.get.call().get(LIMIT).values()) == [5, 5]


def test_an_actor_spawns_in_its_own_process(cube: Any) -> None:
    one = cube.slice(a=1, b=0, c=0)
    beside = one.spawn_here.call_one(3).get(LIMIT)
    assert beside.sizes == {}
    assert beside.pid.call_one().get(LIMIT) == one.pid.call_one().get(LIMIT)


def test_the_processes_of_an_actor_are_those_it_was_spawned_on(cube: Any) -> None:
    procs = cube.slice(a=0, b=1, c=0).own_procs.call_one().get(LIMIT)
    assert procs.sizes == SIZES
    again = procs.spawn("again", Member)
    assert list(again.pid.call().get(LIMIT).values()) == list(cube.pid.call().get(LIMIT).values())


def test_hosts_can_be_given_to_actors(cube: Any, client: HostMesh) -> None:
    host = cube.slice(a=0, b=0, c=0).echo.call_one(client).get(LIMIT)
    assert host == client
    with host.spawn_procs({"n": 2}) as procs:
        assert len(procs.spawn("members", Member).pid.call().get(LIMIT)) == 2


def test_the_clients_own_process_is_reached_from_actors(cube: Any) -> None:
    local = this_proc().spawn("local", Member, 9)
    assert local.pid.call_one().get(LIMIT) == os.getpid()
    assert cube.slice(a=0, b=0, c=1).call.call_one(local).get(LIMIT) == [(0, {}, {})]
    local.stop().get(LIMIT)
