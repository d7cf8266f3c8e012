"""What an actor that is started again goes on with: its last snapshot, a peer's state, or a failure that says why."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from actor_client import LIMIT, Faults, Stage

from monarch_rdma.actor import (
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    Port,
    ProcMesh,
    StateError,
    SupervisionError,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
)
from monarch_rdma.errors import ConfigError

EVER: dict[str, Any] = {"max_restarts": None}


class Counter(Actor):
    """Counts, and goes on counting."""

    def __init__(self, start: int = 0) -> None:
        self.value: Any = start
        self.taken = 0

    @endpoint
    def add(self, amount: int) -> Any:
        self.value += amount
        return self.value

    @endpoint
    def set(self, value: Any) -> None:
        self.value = value

    @endpoint
    def get(self) -> Any:
        return self.value

    @endpoint
    def num_taken(self) -> int:
        return self.taken

    @endpoint
    def keep(self) -> None:
        context().actor_instance.snapshot().get(LIMIT)

    @endpoint
    def quit(self) -> None:
        raise SystemExit(3)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def __snapshot__(self) -> Any:
        self.taken += 1
        return self.value

    def __restore__(self, state: Any) -> None:
        self.value = state


class AsyncCounter(Counter):
    @endpoint
    async def add(self, amount: int) -> Any:
        self.value += amount
        return self.value

    @endpoint
    async def keep(self) -> None:
        await context().actor_instance.snapshot()

    async def __snapshot__(self) -> Any:  # type: ignore[override]
        return self.value

    async def __restore__(self, state: Any) -> None:  # type: ignore[override]
        self.value = state


class EveryThird(Counter):
    snapshot_every = 3


class OnDemand(AsyncCounter):
    snapshot_every = None


class OnDemandSync(Counter):
    snapshot_every = None


class FromPeer(Counter):
    restore_from = "peer"


End = Callable[[Any], None]


def quit_it(counter: Any) -> None:
    with pytest.raises(ActorError):
        counter.quit.call_one().get(LIMIT)


def kill_it(counter: Any) -> None:
    with pytest.raises(SupervisionError):
        counter.die.call_one().get(LIMIT)


@contextmanager
def supervised(client: HostMesh, end: End, cls: type[Any], *args: Any) -> Iterator[Any]:
    """Two counters that come back from that end: by themselves, or with their processes."""
    restart: dict[str, Any] = {} if end is quit_it else {"restart": "always", **EVER}
    with client.spawn_procs({"n": 2}, **restart) as procs:
        where = procs.supervised("always", **EVER) if end is quit_it else procs
        yield where.spawn("counters", cls, *args)


ENDS = pytest.mark.parametrize("end", [quit_it, kill_it])


@ENDS
@pytest.mark.parametrize("cls", [Counter, AsyncCounter])
def test_what_was_answered_is_not_lost(client: HostMesh, faults: Faults, end: End, cls: type[Any]) -> None:
    with supervised(client, end, cls, 10) as counters:
        for expected in (11, 12, 13):
            assert counters.add.call(1).get(LIMIT).values() == [expected] * 2
            end(counters.slice(n=1))
        assert counters.get.call().get(LIMIT).values() == [13, 13]


@ENDS
def test_every_few_messages(client: HostMesh, faults: Faults, end: End) -> None:
    with supervised(client, end, EveryThird) as counters:
        for _ in range(5):
            counters.add.call(1).get(LIMIT)
        assert counters.num_taken.call().get(LIMIT).values() == [1, 1]  # with this one, two
        end(counters.slice(n=1))
        assert counters.slice(n=1).get.call_one().get(LIMIT) == 5


@ENDS
@pytest.mark.parametrize("cls", [OnDemand, OnDemandSync])
def test_on_demand(client: HostMesh, faults: Faults, end: End, cls: type[Any]) -> None:
    with supervised(client, end, cls) as counters:
        counters.add.call(1).get(LIMIT)
        end(counters.slice(n=1))
        assert counters.add.call(1).get(LIMIT).values() == [2, 1]  # none was ever taken: anew
        counters.keep.call().get(LIMIT)
        counters.add.call(1).get(LIMIT)
        end(counters.slice(n=1))
        assert counters.get.call().get(LIMIT).values() == [3, 1]


@ENDS
def test_from_a_peer(client: HostMesh, faults: Faults, end: End) -> None:
    with supervised(client, end, FromPeer) as counters:
        counters.slice(n=0).set.call_one(bytes(1 << 20) + b"state").get(LIMIT)
        end(counters.slice(n=1))
        state = counters.slice(n=1).get.call_one().get(LIMIT)
        assert len(state) == (1 << 20) + 5 and state.endswith(b"state")


def test_large_states(procs: ProcMesh, faults: Faults) -> None:
    counters = procs.supervised("always", **EVER).spawn("counters", Counter)
    for size in (0, 1, 65535, 65536, 3 << 20):
        counters.set.call(bytearray(os.urandom(1)) * size).get(LIMIT)
        before = counters.get.call().get(LIMIT).values()
        quit_it(counters.slice(gpus=1))
        assert counters.get.call().get(LIMIT).values() == before
    counters.stop().get(LIMIT)


def test_many_snapshots_find_room(procs: ProcMesh, faults: Faults) -> None:
    counters = procs.supervised("always").spawn("counters", Counter)
    calls = [counters.add.call(1) for _ in range(1500)]  # more than any mailbox takes
    assert calls[-1].get(LIMIT).values() == [1500, 1500]
    quit_it(counters.slice(gpus=0))
    assert counters.get.call().get(LIMIT).values() == [1500, 1500]
    counters.stop().get(LIMIT)


def test_without_a_supervisor_no_state_is_taken(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", Counter)
    counters.add.call(1).get(LIMIT)
    assert counters.num_taken.call().get(LIMIT).values() == [0, 0]
    error = counters.keep.call().exception(LIMIT)
    assert isinstance(error, ActorError) and "nobody keeps its state" in str(error)
    counters.stop().get(LIMIT)


# --- failures


class CannotTake(Counter):
    def __snapshot__(self) -> Any:
        if self.value == 2:
            raise LookupError("no state today")
        return threading.Lock() if self.value == 3 else self.value


class CannotRestore(Counter):
    def __restore__(self, state: Any) -> None:
        raise LookupError("no use for it")


class AsyncCannotRestore(AsyncCounter):
    async def __restore__(self, state: Any) -> None:  # type: ignore[override]
        raise LookupError("no use for it")


class Unloadable:
    def __reduce__(self) -> Any:
        return _break, ()


def _break() -> None:
    raise LookupError("it cannot be loaded")


class KeepsUnloadable(Counter):
    def __snapshot__(self) -> Any:
        return Unloadable()


class PeerCannot(FromPeer):
    def __snapshot__(self) -> Any:
        if current_rank().rank == 0 and self.value == 7:
            raise LookupError("no state today")
        return self.value


class Owner(Actor):
    def __init__(self, procs: ProcMesh, heard: Port[Any], cls: type[Any]) -> None:
        self.heard = heard
        self.counters = procs.supervised("always", max_restarts=2, within=600.0).spawn("counters", cls)

    @endpoint
    def get(self) -> Any:
        return self.counters

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.send(failure)
        return True


def test_a_state_that_cannot_be_taken_is_told_to_who_called(procs: ProcMesh, faults: Faults) -> None:
    counter = procs.supervised("always").spawn("counters", CannotTake).slice(gpus=0)
    assert counter.add.call_one(1).get(LIMIT) == 1
    for why in ("no state today", "cannot pickle"):
        error = counter.add.call_one(1).exception(LIMIT)
        assert isinstance(error, ActorError) and isinstance(error.exception, StateError) and why in str(error)
    quit_it(counter)
    assert counter.get.call_one().get(LIMIT) == 1  # the last one that was


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (CannotRestore, "__restore__ of counters failed: LookupError: no use for it"),
        (AsyncCannotRestore, "__restore__ of counters failed: LookupError: no use for it"),
        (KeepsUnloadable, "the snapshot of counters cannot be loaded: LookupError: it cannot be loaded"),
        (PeerCannot, "a peer of counters could not give its state: .*no state today"),
    ],
)
def test_a_state_that_cannot_be_given_is_a_failure_and_no_new_beginning(
    procs: ProcMesh, faults: Faults, cls: type[Any], why: str
) -> None:
    heard = Stage()
    owner = procs.slice(gpus=0).spawn("owner", Owner, procs, heard.port, cls)
    counters = owner.get.call_one().get(LIMIT)
    counters.set.call(7).get(LIMIT)
    quit_it(counters.slice(gpus=1))
    failure: Any = heard.next()
    assert failure.kind == "actor" and re.search(f"StateError: {why}", failure.report(), re.DOTALL)
    with pytest.raises(SupervisionError, match="given up"):
        counters.get.call().get(LIMIT)
    owner.stop().get(LIMIT)


def test_without_a_living_peer_there_is_no_new_beginning(client: HostMesh, faults: Faults) -> None:
    procs = client.spawn_procs({"n": 2}, restart="always", strategy="one_for_all", max_restarts=1, within=600.0)
    counters = procs.spawn("counters", FromPeer)
    kill_it(counters.slice(n=1))
    assert "no peer of counters gives its state: none lives" in faults.next().report()
    procs.stop().get(LIMIT)


class NamesOfItsOwn(Actor):
    snapshot_every = "noon"  # type: ignore[assignment]

    @endpoint
    def restore_from(self) -> str:  # type: ignore[override]
        return "the attic"


def test_a_class_without_the_hooks_may_use_the_names(procs: ProcMesh) -> None:
    own = procs.supervised("always").spawn("own", NamesOfItsOwn)
    assert own.restore_from.call().get(LIMIT).values() == ["the attic"] * 2
    own.stop().get(LIMIT)


class SlowToTell(AsyncCounter):
    """Its hook gives way to others."""

    @concurrent_endpoint
    async def add_aside(self, amount: int) -> Any:
        self.value += amount
        return self.value

    async def __snapshot__(self) -> Any:
        value = self.value
        await asyncio.sleep(0.05 if value == 1 else 0)
        return value


def test_the_last_state_kept_is_the_last_one_taken(procs: ProcMesh, faults: Faults) -> None:
    counter = procs.supervised("always").spawn("counters", SlowToTell).slice(gpus=0)
    calls = [counter.add_aside.call_one(1) for _ in range(5)]
    assert sorted(call.get(LIMIT) for call in calls) == [1, 2, 3, 4, 5]
    quit_it(counter)
    assert counter.get.call_one().get(LIMIT) == 5


class HalfSnapshot(Actor):
    def __snapshot__(self) -> int:
        return 1


class HalfRestore(Actor):
    def __restore__(self, state: int) -> None:
        """Of nobody."""


class Often(Counter):
    snapshot_every = 0


class FromNowhere(Counter):
    restore_from = "nowhere"


class PeerOfNothing(Actor):
    restore_from = "peer"


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (HalfSnapshot, "HalfSnapshot has __snapshot__, but no __restore__"),
        (HalfRestore, "HalfRestore has __restore__, but no __snapshot__"),
        (Often, "Often.snapshot_every is 0"),
        (FromNowhere, "FromNowhere.restore_from is 'nowhere'"),
        (PeerOfNothing, "PeerOfNothing.restore_from is 'peer', but it has no __snapshot__"),
    ],
)
def test_classes_that_cannot_be(procs: ProcMesh, cls: type[Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        procs.spawn("wrong", cls)


def test_peers_need_somebody_else(procs: ProcMesh) -> None:
    for supervised, where in (("one_for_all", procs), ("one_for_one", procs.slice(gpus=0))):
        with pytest.raises(ConfigError, match="no peer of it lives"):
            where.supervised("always", strategy=supervised).spawn("alone", FromPeer)  # type: ignore[arg-type]
