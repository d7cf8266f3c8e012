"""Actors that are started again in their processes: who is, who follows them, what becomes of calls, when it is given
up.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from actor_client import LIMIT, Faults, Stage, hold, hold_async, wait_until
from supervised import FOR_EVER, PAUSE

from monarch_rdma import config
from monarch_rdma.actor import (
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    this_proc,
)
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import AccessDenied, ConfigError
from monarch_rdma.rdma import RDMABuffer


class Worker(Actor):
    def __init__(self, start: int = 0, ended: Port[Any] | None = None) -> None:
        self.value, self.ended = start, ended

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @endpoint
    def who(self) -> tuple[int, int, str, int]:
        instance = context().actor_instance
        return current_rank().rank, instance.rank.rank, instance.name, self.value

    @endpoint
    def fail(self) -> None:
        raise LookupError("unheard")

    @endpoint
    def quit(self) -> None:
        raise SystemExit(3)

    @endpoint
    def leave(self) -> None:
        self.stop()

    @endpoint
    def fail_when_told(self, started: Port[Any]) -> None:
        hold(started)
        raise SystemExit(3)

    @endpoint
    def write(self, number: int, path: str) -> int:
        with open(path, "a") as log:
            log.write(f"{number}\n")
        return number

    @endpoint
    def share(self) -> RDMABuffer:
        self.memory = bytearray(b"mine")
        return RDMABuffer(self.memory)

    @endpoint
    def ask(self, other: Any) -> int:
        return other.add.call_one(1).get(LIMIT)

    @endpoint(limit=0.1)
    def get_stuck(self, started: Port[Any]) -> Any:
        return hold(started)

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ended is not None:
            self.ended.send((context().actor_instance.rank.rank, error is None))


class AsyncWorker(Actor):
    def __init__(self) -> None:
        self.value = 0

    @endpoint
    async def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @endpoint(limit=0.1)
    async def get_stuck(self, started: Port[Any]) -> Any:
        return await hold_async(started)

    @concurrent_endpoint(limit=0.1)
    async def get_stuck_aside(self, started: Port[Any]) -> Any:
        return await hold_async(started)


def fail(worker: Any) -> None:
    """Ends the one actor with an exception; returns when a call says so."""
    with pytest.raises((ActorError, SupervisionError)):
        worker.quit.call_one().get(LIMIT)


# --- references follow


def test_an_actor_comes_back_in_its_process_and_references_follow(procs: ProcMesh, faults: Faults) -> None:
    workers = procs.supervised("always", **FOR_EVER).spawn("workers", Worker, 10)
    copy = pickle.loads(pickle.dumps(workers)).slice(gpus=1)
    assert workers.add.call(1).get(LIMIT).values() == [11, 11]
    pids = workers.pid.call().get(LIMIT).values()
    fail(workers.slice(gpus=1))
    assert workers.add.call(1).get(LIMIT).values() == [12, 11]  # __init__ ran again
    assert workers.pid.call().get(LIMIT).values() == pids
    assert copy.who.call_one().get(LIMIT) == (0, 1, "workers", 11)
    other = procs.spawn("other", Worker)
    for _ in range(3):  # another process follows too, from the first use on
        asker = other.slice(gpus=0)
        before = asker.ask.call_one(copy).get(LIMIT)
        fail(copy)
        wait_until(lambda: copy.who.call_one().get(LIMIT)[3] == 10, "it is not there")
        answer = asker.ask.call_one(copy)
        assert before > 10 and answer.exception(LIMIT) is None and answer.get(LIMIT) == 11
    workers.stop().get(LIMIT)
    with pytest.raises(SupervisionError, match="stopped"):
        workers.add.call(1).get(LIMIT)
    other.stop().get(LIMIT)


def test_a_buffer_of_the_old_one_stays_dead(procs: ProcMesh, faults: Faults) -> None:
    worker = procs.supervised("always").spawn("workers", Worker).slice(gpus=1)
    buffer, mine = worker.share.call_one().get(LIMIT), bytearray(4)
    buffer.read_into(mine).get(LIMIT)
    fail(worker)
    again = worker.share.call_one().get(LIMIT)
    with pytest.raises(AccessDenied):
        buffer.read_into(mine).get(LIMIT)
    assert again.read_into(mine).get(LIMIT) is None and mine == b"mine"
    worker.stop().get(LIMIT)


def test_casts_over_a_tree_reach_every_incarnation(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 7}) as procs, config.configured(cast_fanout=2):
        workers = procs.supervised("always").spawn("workers", Worker)
        for rank in (0, 3):
            fail(workers.slice(n=rank))
        assert workers.add.call(1).get(LIMIT).values() == [1] * 7
        fail(workers.slice(n=3))
        assert workers.add.call(1).get(LIMIT).values() == [2, 2, 2, 1, 2, 2, 2]
        workers.stop().get(LIMIT)


def test_what_is_queued_fails_and_is_never_replayed(procs: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    worker = procs.supervised(**FOR_EVER).spawn("workers", Worker).slice(gpus=1)
    stage, log = Stage(), str(tmp_path / "log")
    done = [worker.write.call_one(number, log) for number in range(5)]
    ending = worker.fail_when_told.call_one(stage.port)
    queued = [worker.write.call_one(number, log) for number in range(5, 50)]
    stage.next().send(None)
    with pytest.raises(ActorError):
        ending.get(LIMIT)
    again = worker.write.call_one(1000, log)  # made when the end is known here: waits for the next one
    for future in queued:
        with pytest.raises(SupervisionError):
            future.get(LIMIT)
    assert [future.get(LIMIT) for future in done] == list(range(5))
    assert again.get(LIMIT) == 1000
    assert Path(log).read_text().split() == [*map(str, range(5)), "1000"]
    worker.stop().get(LIMIT)


def test_calls_wait_for_the_restart_or_fail_at_once(procs: ProcMesh, faults: Faults) -> None:
    slow = procs.supervised(within=600.0, backoff=PAUSE)
    workers = slow.spawn("workers", Worker)
    fail(workers.slice(gpus=1))
    with pytest.raises(SupervisionError):
        workers.add.options(wait_for_restart=False).call(1).get(LIMIT)
    assert workers.add.call_living(0).get(LIMIT).values() == [1, None]
    assert workers.add.call(0).get(LIMIT).values() == [1, 0]  # waits
    workers.stop().get(LIMIT)


# --- policies


def test_a_broadcast_that_fails_is_answered_by_a_restart(procs: ProcMesh, faults: Faults) -> None:
    workers = procs.supervised("transient").spawn("workers", Worker, 5)
    workers.add.call(1).get(LIMIT)
    workers.fail.broadcast()
    wait_until(lambda: workers.add.call_living(0).get(LIMIT).values() == [5, 5], "they do not come back")
    workers.stop().get(LIMIT)


def test_a_normal_end_is_answered_by_always_alone(procs: ProcMesh, faults: Faults) -> None:
    always = procs.supervised("always").spawn("always", Worker, 5).slice(gpus=0)
    transient = procs.supervised("transient").spawn("transient", Worker).slice(gpus=0)
    always.add.call_one(1).get(LIMIT)
    for worker in (always, transient):
        worker.leave.call_one().get(LIMIT)
    wait_until(lambda: always.add.call_living(0).get(LIMIT).values() == [5], "it does not come back")
    with pytest.raises(SupervisionError, match="stopped"):
        transient.add.call_one(0).get(LIMIT)


@pytest.mark.parametrize(("strategy", "others"), [("one_for_one", []), ("rest_for_one", [2]), ("one_for_all", [0, 2])])
def test_strategies(client: HostMesh, faults: Faults, strategy: Any, others: list[int]) -> None:
    heard = Stage()
    with client.spawn_procs({"n": 3}) as procs:
        workers = procs.supervised("always", strategy=strategy).spawn("workers", Worker, 0, heard.port)
        assert workers.add.call(1).get(LIMIT).values() == [1, 1, 1]
        fail(workers.slice(n=1))
        again = [1, *others]
        wait_until(
            lambda: workers.add.call_living(0).get(LIMIT).values() == [0 if rank in again else 1 for rank in range(3)],
            "not all come back",
        )
        ended = [heard.next() for _ in again]
        assert sorted(ended) == sorted([(1, False), *((rank, True) for rank in others)])  # stopped, with cleanup
        workers.stop().get(LIMIT)


class Owner(Actor):
    """Owns supervised workers, and tells what it hears of them."""

    def __init__(self, procs: ProcMesh, heard: Port[Any], cls: type[Any], args: Any, arguments: dict[str, Any]) -> None:
        self.heard = heard
        self.workers = procs.supervised(**arguments).spawn("workers", cls, *args)

    @endpoint
    def get(self) -> Any:
        return self.workers

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.send(failure)
        return True

    def __stuck__(self, failure: MeshFailure) -> None:
        self.heard.send(failure)


def an_owner(procs: ProcMesh, cls: type[Any], *args: Any, **arguments: Any) -> tuple[Any, Any, Stage]:
    heard = Stage()
    owner = procs.slice(gpus=0).spawn("owner", Owner, procs.slice(gpus=slice(1, 2)), heard.port, cls, args, arguments)
    return owner, owner.get.call_one().get(LIMIT), heard


def test_too_many_restarts_reach_the_owner(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, Worker, max_restarts=2, within=600.0)
    for _ in range(3):
        fail(workers)
        workers.add.call_living(1).get(LIMIT)
    failure: Any = heard.next()
    assert (failure.mesh_name, failure.kind, failure.rank) == ("workers", "actor", 0)
    assert len(failure.causes) == 3 and failure.report().count("SystemExit: 3") >= 3
    with pytest.raises(SupervisionError, match="given up"):
        workers.add.call(0).get(LIMIT)
    owner.stop().get(LIMIT)


class Fragile(Worker):
    """Can be made once."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if os.path.exists(path):
            raise LookupError("it was here before")
        Path(path).touch()


def test_an_init_that_fails_at_the_restart_counts(procs: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    owner, workers, heard = an_owner(procs, Fragile, str(tmp_path / "made"), max_restarts=2, within=600.0)
    fail(workers)
    failure: Any = heard.next()
    assert "it was here before" in failure.report() and len(failure.causes) == 3
    owner.stop().get(LIMIT)


def test_an_actor_that_cannot_be_made_is_not_made_again(procs: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    with pytest.raises(ActorError, match="here before"):
        procs.supervised().spawn("fragile", Fragile, str(tmp_path / "made")).initialized.get(LIMIT)
    assert [faults.next().mesh_name for _ in range(2)] == ["fragile", "fragile"]


def test_never_tells_the_owner(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, Worker, restart="never")
    fail(workers)
    failure: Any = heard.next()
    assert (failure.mesh_name, failure.kind, failure.rank) == ("workers", "actor", 0)
    with pytest.raises(SupervisionError, match="SystemExit"):
        workers.add.call_one(0).get(LIMIT)
    owner.stop().get(LIMIT)


# --- stuck


def test_a_stuck_actor_is_told_of_or_started_again(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, Worker)
    stage = Stage()
    stuck = workers.get_stuck.call_one(stage.port)
    go_on = stage.next()
    assert heard.next().kind == "stuck"  # type: ignore[attr-defined]
    go_on.send("done")
    assert stuck.get(LIMIT) == "done"
    owner.stop().get(LIMIT)


@pytest.mark.parametrize(
    ("cls", "method"), [(Worker, "get_stuck"), (AsyncWorker, "get_stuck"), (AsyncWorker, "get_stuck_aside")]
)
def test_a_stuck_actor_is_given_up(procs: ProcMesh, faults: Faults, cls: type[Any], method: str) -> None:
    worker = procs.supervised(restart_stuck=True).spawn("workers", cls).slice(gpus=1)
    stage = Stage()
    worker.add.call_one(5).get(LIMIT)
    stuck = getattr(worker, method).call_one(stage.port)
    queued = worker.add.call_one(1) if method == "get_stuck" else None
    go_on = stage.next()
    with pytest.raises(SupervisionError, match="given up.*its limit"):
        stuck.get(LIMIT)
    if queued is not None:
        with pytest.raises(SupervisionError):
            queued.get(LIMIT)
    assert worker.add.call_one(1).get(LIMIT) == 1
    go_on.send("too late")  # nobody hears of it
    assert worker.add.call_one(1).get(LIMIT) == 2
    worker.stop().get(LIMIT)


# --- processes


def test_an_actor_is_lost_with_a_process_that_nobody_restarts(client: HostMesh, faults: Faults) -> None:
    procs = client.spawn_procs({"n": 2})
    workers = procs.supervised("always", **FOR_EVER).spawn("workers", Worker)
    os.kill(workers.slice(n=1).pid.call_one().get(LIMIT), 9)
    assert faults.next().mesh_name == "workers"
    with pytest.raises(SupervisionError, match="gone|lost"):
        workers.slice(n=1).add.call_one(1).get(LIMIT)
    fail(workers.slice(n=0))
    assert workers.slice(n=0).add.call_one(1).get(LIMIT) == 1  # the other one goes on
    procs.stop().get(LIMIT)


def test_an_actor_comes_back_with_its_process(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, restart="always", **FOR_EVER) as procs:
        workers = procs.supervised("always", **FOR_EVER).spawn("workers", Worker, 5)
        for _ in range(3):
            pids = workers.pid.call().get(LIMIT).values()
            os.kill(pids[1], 9)
            wait_until(lambda: workers.pid.call_living().get(LIMIT).values()[1] not in (None, pids[1]), "not back")  # noqa: B023
            assert workers.slice(n=1).add.call_one(1).get(LIMIT) == 6
            fail(workers.slice(n=1))
            assert workers.slice(n=1).add.call_one(1).get(LIMIT) == 6
    with pytest.raises(SupervisionError):
        workers.add.call(1).get(LIMIT)


def test_a_slice_of_processes_has_ranks_of_its_own(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 3}) as procs:
        workers = procs.slice(n=slice(1, 3)).supervised("always").spawn("workers", Worker)
        fail(workers.slice(n=1))
        assert workers.who.call().get(LIMIT).values() == [(0, 0, "workers", 0), (1, 1, "workers", 0)]
        workers.slice(n=0).stop().get(LIMIT)
        assert workers.add.call_living(1).get(LIMIT).values() == [None, 1]
        workers.stop().get(LIMIT)


def test_in_this_process(client: HostMesh, faults: Faults) -> None:
    worker = this_proc().supervised("always").spawn("here", Worker, 3)
    fail(worker)
    assert worker.add.call_one(1).get(LIMIT) == 4
    worker.stop().get(LIMIT)


def test_nothing_is_left_of_many_restarts(procs: ProcMesh, faults: Faults) -> None:
    workers = procs.supervised("always", **FOR_EVER).spawn("workers", Worker)
    before = len(current_proc().receivers)
    for _ in range(50):
        fail(workers.slice(gpus=1))
        assert workers.slice(gpus=1).add.call_one(1).get(LIMIT) == 1
    wait_until(lambda: len(current_proc().receivers) <= before, "receivers are left")
    workers.stop().get(LIMIT)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"restart": "sometimes"}, "restart must be one of .* not 'sometimes'"),
        ({"restart": None}, "restart is None"),
        ({"strategy": "all"}, "strategy must be one of"),
        ({"restart_stuck": 1}, "restart_stuck is 1"),
        ({"restart": "never", "restart_stuck": True}, "restart_stuck is True, but restart is 'never'"),
    ],
)
def test_wrong_arguments(procs: ProcMesh, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        procs.supervised(**arguments)
