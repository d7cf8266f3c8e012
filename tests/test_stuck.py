"""Actors and processes that are stuck: told apart from dead ones, reported once, and left alone."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from actor_client import LIMIT, Faults, Stage, hold, hold_async

from monarch_rdma import config
from monarch_rdma.actor import Actor, HostMesh, MeshFailure, Port, ProcMesh, concurrent_endpoint, endpoint, this_host
from monarch_rdma.errors import ConfigError
from monarch_rdma.supervision import events

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"


class _Keeper(logging.Handler):
    """Warnings of the client, which has no hook."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: SimpleQueue[str] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[SimpleQueue[str]]:
    keeper, logger = _Keeper(), logging.getLogger("monarch_rdma.actor")
    logger.addHandler(keeper)
    yield keeper.texts
    logger.removeHandler(keeper)


class Slow(Actor):
    @endpoint(limit=0.2)
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint(limit=60)
    def wait_patiently(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def hold_the_gil(self, seconds: float) -> int:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return os.getpid()


class SlowAsync(Actor):
    @endpoint(limit=0.2)
    async def wait(self, started: Port[Any]) -> Any:
        return await hold_async(started)

    @concurrent_endpoint(limit=0.2)
    async def wait_aside(self, started: Port[Any]) -> Any:
        return await hold_async(started)


class Owner(Actor):
    def __init__(self, told: Port[Any], arguments: dict[str, Any]) -> None:
        self.told = told
        self.procs = this_host().spawn_procs({"n": 2}, **arguments)
        self.slow = self.procs.spawn("slow", Slow)

    @endpoint
    def get(self) -> Any:
        return self.slow

    def __stuck__(self, failure: MeshFailure) -> None:
        self.told.send(failure)

    def __supervise__(self, failure: MeshFailure) -> bool:
        raise AssertionError(f"nothing has failed: {failure.report()}")


class AsyncOwner(Owner):
    @endpoint
    async def work(self) -> None:
        await asyncio.sleep(0)

    async def __stuck__(self, failure: MeshFailure) -> None:
        self.told.send(failure)


@pytest.fixture(autouse=True)
def soon(untouched_options: None) -> None:
    config.configure(stuck_timeout=1.0)


@pytest.fixture(params=[(Owner, None), (AsyncOwner, None), (Owner, "always")], ids=["plain", "async", "supervised"])
def owned(procs: ProcMesh, faults: Faults, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Stage]]:
    cls, restart = request.param
    told = Stage()
    owner = procs.slice(gpus=0).spawn("owner", cls, told.port, {} if restart is None else {"restart": restart})
    yield owner.get.call_one().get(LIMIT), told
    owner.stop().get(LIMIT)


def test_a_message_past_its_limit_is_reported_once_and_goes_on(owned: tuple[Any, Stage]) -> None:
    slow, told = owned
    stage = Stage()
    for _ in range(2):
        future = slow.slice(n=1).wait.call_one(stage.port)
        go_on = stage.next()
        failure: Any = told.next()
        assert (failure.kind, failure.mesh_name, failure.rank) == ("stuck", "slow", 1)
        assert "wait has run for 0.2 s" in failure.message and "in hold" in failure.message
        go_on.send("done")
        assert future.get(LIMIT) == "done"
    assert slow.slice(n=1).pid.call_one().get(LIMIT)


def test_a_message_within_its_limit_is_not_reported(owned: tuple[Any, Stage]) -> None:
    slow, told = owned
    stage = Stage()
    patient, hasty = slow.slice(n=0).wait_patiently.call_one(stage.port), slow.slice(n=1).wait.call_one(stage.port)
    ports = [stage.next(), stage.next()]
    failure: Any = told.next()
    assert failure.rank == 1  # the one that came first, and the only one
    for port in ports:
        port.send(None)
    assert patient.exception(LIMIT) is None and hasty.exception(LIMIT) is None


@pytest.mark.parametrize("name", ["wait", "wait_aside"])
def test_async_messages_have_limits_too(
    client: HostMesh, faults: Faults, warnings: SimpleQueue[str], name: str
) -> None:
    stage = Stage()
    with client.spawn_procs() as procs:
        slow = procs.spawn("slow", SlowAsync)
        future = getattr(slow, name).call_one(stage.port)
        go_on = stage.next()
        assert warnings.get(timeout=LIMIT).count("has run for 0.2 s") == 1
        go_on.send(1)
        assert future.get(LIMIT) == 1


def test_a_process_that_holds_the_gil_is_stuck_and_not_dead(owned: tuple[Any, Stage]) -> None:
    slow, told = owned
    pid = slow.slice(n=1).pid.call_one().get(LIMIT)
    future = slow.slice(n=1).hold_the_gil.call_one(2.5)
    failure: Any = told.next()
    assert failure.kind == "stuck" and f"pid {pid}" in failure.message and "no Python" in failure.message
    assert not future.done()
    assert future.get(LIMIT) == pid
    assert slow.slice(n=1).pid.call_one().get(LIMIT) == pid


def test_the_end_of_it_is_an_event_with_its_cause(client: HostMesh, faults: Faults) -> None:
    with events.Recording() as recording, client.spawn_procs() as procs:
        slow = procs.spawn("slow", Slow)
        slow.hold_the_gil.call_one(30.0 if LONG else 6.5).get(60)  # longer than heartbeat_timeout, too
        over = recording.wait("stuck.over", LIMIT)
        # Others of this module may have been, too, where they got no processor.
        assert over.cause in [event.id for event in recording.events if event.kind == "process.stuck"]


def test_a_limit_for_all(client: HostMesh, faults: Faults, warnings: SimpleQueue[str]) -> None:
    stage = Stage()
    with config.configured(message_limit=0.2), client.spawn_procs() as procs:
        plain = procs.spawn("plain", Plain)
        future = plain.wait.call_one(stage.port)
        go_on = stage.next()
        assert "has run for 0.2 s" in warnings.get(timeout=LIMIT)
        go_on.send(2)
        assert future.get(LIMIT) == 2


class Plain(Actor):
    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)


@pytest.mark.parametrize("limit", [-1, "soon"])
def test_a_limit_is_checked(limit: Any) -> None:
    with pytest.raises(ConfigError, match="limit is"):

        @endpoint(limit=limit)
        def method(self: Any) -> None: ...
