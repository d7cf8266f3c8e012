"""Controllers: one of a name in a job, in the client's process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from actor_client import LIMIT, Faults, client_of_its_own, faults_recorded

from monarch_rdma.actor import (
    Actor,
    ActorError,
    HostMesh,
    SupervisionError,
    endpoint,
    get_or_spawn_controller,
    this_host,
)
from monarch_rdma.errors import ConfigError


class Counter(Actor):
    def __init__(self, begin: int = 0) -> None:
        self.value = begin

    @endpoint
    def count(self) -> int:
        self.value += 1
        return self.value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        raise ValueError("it is broken")


class Picky(Actor):
    def __init__(self, mood: str) -> None:
        if mood != "good":
            raise ValueError(f"not in {mood} mood")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Chief(Actor):
    """A controller that needs another one."""

    def __init__(self) -> None:
        self.counter = get_or_spawn_controller("counter of chief", Counter, 100).get()

    @endpoint
    def count(self) -> int:
        return self.counter.count.call_one().get()


class Worker(Actor):
    @endpoint
    def count(self, name: str, begin: int) -> int:
        return get_or_spawn_controller(name, Counter, begin).get(LIMIT).count.call_one().get(LIMIT)

    @endpoint
    async def count_async(self, name: str) -> int:
        counter = await get_or_spawn_controller(name, Counter)
        return await counter.count.call_one()


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faults_recorded() as faults:
        yield faults


@pytest.fixture
def host(faults: Faults) -> Iterator[HostMesh]:
    with client_of_its_own() as host:
        yield host


def test_there_is_one_of_a_name_for_all_processes(host: HostMesh) -> None:
    workers = host.spawn_procs({"gpus": 3}).spawn("workers", Worker)
    counts = list(workers.count.call("steps", 10).get().values())
    counts += list(workers.count_async.call("steps").get().values())
    mine = get_or_spawn_controller("steps", Picky, "any").get()  # what it is was decided by who came first
    counts.append(mine.count.call_one().get())
    assert sorted(counts) == list(range(11, 18))
    assert mine.sizes == {} and mine.pid.call_one().get() == os.getpid()
    assert get_or_spawn_controller("others", Counter).get().count.call_one().get() == 1


def test_it_is_made_once_however_many_ask_at_once(host: HostMesh) -> None:
    futures = [get_or_spawn_controller("steps", Counter) for _ in range(50)]
    counts = [future.get(LIMIT).count.call_one().get() for future in futures]
    assert counts == list(range(1, 51))


def test_controllers_may_need_each_other(host: HostMesh) -> None:
    assert get_or_spawn_controller("chief", Chief).get(LIMIT).count.call_one().get() == 101


def test_one_that_cannot_begin_can_be_tried_again(host: HostMesh) -> None:
    with pytest.raises(ActorError, match="not in bad mood"):
        get_or_spawn_controller("picky", Picky, "bad").get(LIMIT)
    picky = get_or_spawn_controller("picky", Picky, "good").get(LIMIT)
    assert picky.pid.call_one().get() == os.getpid()


def test_one_that_fails_is_told_to_the_client_and_replaced(host: HostMesh, faults: Faults) -> None:
    first, other = (get_or_spawn_controller(name, Counter).get() for name in ("first", "other"))
    first.fail.broadcast()
    failure = faults.next()
    assert failure.mesh_name == "first" and "it is broken" in failure.message
    with pytest.raises(SupervisionError):
        first.count.call_one().get(LIMIT)
    assert get_or_spawn_controller("first", Counter, 5).get(LIMIT).count.call_one().get() == 6
    assert other.count.call_one().get() == 1


def test_arguments_are_checked_at_the_call(host: HostMesh) -> None:
    with pytest.raises(ConfigError, match="Class is <class 'int'>"):
        get_or_spawn_controller("steps", int)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="name is ''"):
        get_or_spawn_controller("", Counter)


def test_a_client_without_processes_has_controllers_too() -> None:
    with client_of_its_own():
        assert this_host().sizes == {}
        assert get_or_spawn_controller("steps", Counter).get(LIMIT).count.call_one().get() == 1
