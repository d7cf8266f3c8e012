"""Processes that die or stop answering with calls pending; owners that are told, and handle it."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
from actor_client import LIMIT, Faults, Stage, hold, wait_until

from monarch_rdma.actor import (
    Accumulator,
    Actor,
    HostMesh,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    this_host,
)
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import RdmaError


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def wait_on(self, rank: int, started: Port[Any]) -> Any:
        return hold(started) if current_rank().rank == rank else current_rank().rank

    @endpoint
    def fail(self, text: str) -> None:
        raise LookupError(text)

    @endpoint
    def exit(self, code: int) -> None:
        print("my last words", flush=True)
        print("on stderr too", file=sys.stderr, flush=True)
        os._exit(code)

    @endpoint
    def much(self) -> Any:
        return np.zeros(1_000_000)

    @endpoint
    def ask(self, other: Any) -> int:
        return other.pid.call_one().get(LIMIT)

    @endpoint
    def kill_and_ask(self, other: Any, pid: int) -> str:
        os.kill(pid, signal.SIGKILL)
        try:
            while True:
                other.pid.call_one().get(LIMIT)
        except SupervisionError as error:
            return str(error)


class Owner(Actor):
    """Handles what it is told to, and tells what it heard."""

    def __init__(self, heard: Port[Any], handles: bool) -> None:
        self.heard, self.handles = heard, handles

    @endpoint
    def spawn(self, count: int) -> Any:
        self.procs = this_host().spawn_procs({"n": count})
        self.workers = self.procs.spawn("workers", Worker)
        return self.workers

    @endpoint
    def alive(self) -> bool:
        return True

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def stop_workers(self) -> None:
        self.procs.stop().get(LIMIT)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.send(failure)
        return self.handles


class AsyncOwner(Owner):
    @endpoint
    async def alive_too(self) -> bool:
        return True

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        self.heard.send(failure)
        return self.handles


@pytest.fixture
def workers(client: HostMesh) -> Any:
    """Three, which the test may kill."""
    procs = client.spawn_procs({"n": 3})
    yield procs.spawn("workers", Worker)
    procs.stop().get(LIMIT)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda workers, port: workers.wait_on.call(1, port),
    "call_one": lambda workers, port: workers.slice(n=1).wait.call_one(port),
    "choose": lambda workers, port: workers.slice(n=1).wait.choose(port),
    "accumulate": lambda workers, port: Accumulator(workers.wait_on, 0, lambda a, b: a + b).accumulate(1, port),
}


@pytest.mark.parametrize("adverb", CALLS)
def test_a_killed_process_ends_the_calls_that_wait_for_it(workers: Any, faults: Faults, adverb: str) -> None:
    stage = Stage()
    pids = list(workers.pid.call().get(LIMIT).values())
    waiting = [CALLS[adverb](workers, stage.port), *[workers.slice(n=1).pid.call_one() for _ in range(20)]]
    stage.next()
    os.kill(pids[1], signal.SIGKILL)
    for future in waiting:
        with pytest.raises(SupervisionError, match="workers"):
            future.get(LIMIT)
    failure = faults.next()
    assert (failure.kind, failure.rank, failure.mesh_name, failure.exit_code) == ("process", 1, "workers", -9)
    assert list(workers.slice(n=slice(0, 3, 2)).pid.call().get(LIMIT).values()) == pids[::2]


def test_the_others_of_a_stream_answer(workers: Any, faults: Faults) -> None:
    stage = Stage()
    pid = workers.slice(n=1).pid.call_one().get(LIMIT)
    results = workers.wait_on.stream(1, stage.port)
    stage.next()
    assert sorted(next(results).get(LIMIT) for _ in range(2)) == [0, 2]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        next(results).get(LIMIT)
    faults.next()


def test_later_calls_to_a_dead_process_fail_at_once(workers: Any, faults: Faults) -> None:
    os.kill(workers.slice(n=1).pid.call_one().get(LIMIT), signal.SIGKILL)
    faults.next()
    wait_until(lambda: workers.slice(n=1).pid.call_one().exception(LIMIT) is not None, "it answers")
    for future in (workers.slice(n=1).pid.call_one(), workers.pid.call()):
        with pytest.raises(SupervisionError):
            future.get(LIMIT)
    with pytest.raises(SupervisionError):
        workers.rank.broadcast()
    assert workers.slice(n=0).rank.call_one().get(LIMIT) == 0


def test_an_actor_hears_of_the_death_of_whom_it_calls(workers: Any, faults: Faults) -> None:
    pid = workers.slice(n=1).pid.call_one().get(LIMIT)
    text = workers.slice(n=0).kill_and_ask.call_one(workers.slice(n=1), pid).get(LIMIT)
    assert "workers" in text
    faults.next()


def test_the_report_of_an_exit_has_code_and_last_lines(workers: Any, faults: Faults) -> None:
    with pytest.raises(SupervisionError):
        workers.slice(n=2).exit.call_one(5).get(LIMIT)
    failure = faults.next()
    assert (failure.kind, failure.rank, failure.exit_code) == ("process", 2, 5)
    assert "my last words" in failure.report() and "on stderr too" in failure.report()
    assert "exit code 5" in failure.report()


def test_an_answer_whose_sender_dies_before_it_is_read_is_lost(
    workers: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, fetcher = workers.slice(n=1), current_proc().fetcher
    pid = worker.pid.call_one().get(LIMIT)
    arrived: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(fetcher, "fetch", arrived.put)
    future = worker.much.call_one()
    answer = arrived.get(timeout=LIMIT)
    os.kill(pid, signal.SIGKILL)
    faults.next()
    fetcher.fetch_now(answer)
    with pytest.raises(SupervisionError, match="lost with its sender"):
        future.get(LIMIT)


def suspended(pid: int) -> psutil.Process:
    process = psutil.Process(pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it does not stop")
    return process


def test_a_short_stop_is_survived(workers: Any) -> None:
    process = suspended(workers.slice(n=1).pid.call_one().get(LIMIT))
    future = workers.rank.call()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.2)
    process.resume()
    assert list(future.get(LIMIT).values()) == [0, 1, 2]


def test_a_call_to_a_stopped_process_ends_with_its_timeout(workers: Any) -> None:
    process = suspended(workers.slice(n=1).pid.call_one().get(LIMIT))
    with pytest.raises(RdmaError, match="no answer within 0.2 s"):
        workers.slice(n=1).rank.options(timeout=0.2).call_one().get(LIMIT)
    process.resume()
    assert workers.slice(n=1).rank.call_one().get(LIMIT) == 0


# --- owners


@pytest.mark.parametrize("cls", [Owner, AsyncOwner])
def test_an_owner_is_told_and_may_handle_it(procs: ProcMesh, faults: Faults, cls: Any) -> None:
    heard = Stage()
    owner = procs.spawn("owner", cls, heard.port, True).slice(gpus=0)
    workers = owner.spawn.call_one(2).get(LIMIT)
    workers.slice(n=1).fail.broadcast("unheard")
    failure = heard.next()
    assert isinstance(failure, MeshFailure)
    assert (failure.mesh_name, failure.kind, failure.rank) == ("workers", "actor", 1)
    assert "LookupError: unheard" in failure.report()
    workers.slice(n=0).exit.broadcast(6)
    failure = heard.next()
    assert (failure.mesh_name, failure.kind, failure.rank, failure.exit_code) == ("workers", "process", 0, 6)
    assert owner.alive.call_one().get(LIMIT)
    owner.stop_workers.call_one().get(LIMIT)


@pytest.mark.parametrize("cls", [Owner, AsyncOwner])
def test_what_an_owner_does_not_handle_ends_it_too(procs: ProcMesh, faults: Faults, cls: Any) -> None:
    heard = Stage()
    owner = procs.spawn("owner", cls, heard.port, False).slice(gpus=0)
    workers = owner.spawn.call_one(1).get(LIMIT)
    workers.slice(n=0).fail.broadcast("from below")
    heard.next()
    failure = faults.next()
    assert (failure.mesh_name, failure.kind) == ("owner", "actor")
    assert "from below" in failure.report() and "workers" in failure.report()
    with pytest.raises(SupervisionError, match="owner"):
        owner.alive.call_one().get(LIMIT)


def test_an_exception_that_the_caller_gets_is_no_failure(procs: ProcMesh, faults: Faults) -> None:
    worker = procs.spawn("worker", Worker).slice(gpus=0)
    for _ in range(3):
        assert worker.fail.call_one("heard").exception(LIMIT) is not None
    assert worker.rank.call_one().get(LIMIT) == 0


def test_what_an_actor_spawned_ends_with_it(procs: ProcMesh) -> None:
    heard = Stage()
    owner = procs.spawn("owner", Owner, heard.port, True).slice(gpus=1)
    workers = owner.spawn.call_one(2).get(LIMIT)
    pids = list(workers.pid.call().get(LIMIT).values())
    owner.stop().get(LIMIT)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its processes are left")


def test_what_a_killed_process_spawned_ends_with_it(client: HostMesh, faults: Faults) -> None:
    heard = Stage()
    owner = client.spawn_procs().spawn("owner", Owner, heard.port, True)
    workers = owner.spawn.call_one(2).get(LIMIT)
    pids = list(workers.pid.call().get(LIMIT).values())
    os.kill(owner.pid.call_one().get(LIMIT), signal.SIGKILL)
    faults.next()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its processes are left")
