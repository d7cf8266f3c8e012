"""Processes that are started again when they die: who is restarted, who follows them, what becomes of calls."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from actor_client import LIMIT, Faults, Stage, hold, traces, wait_until

from monarch_rdma.actor import (
    Actor,
    ActorError,
    Channel,
    HostMesh,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import ConfigError, PeerLost, TransferTimeout
from monarch_rdma.rdma import RDMABuffer
from monarch_rdma.supervision.policy import Backoff

FOR_EVER: dict[str, Any] = {"max_restarts": None}


class Worker(Actor):
    def __init__(self, start: int = 0, ended: Port[Any] | None = None) -> None:
        self.value, self.ended = start, ended

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> tuple[int, int, str]:
        instance = context().actor_instance
        return current_rank().rank, instance.rank.rank, instance.name

    @endpoint
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def note(self, number: int, port: Port[Any]) -> int:
        port.send(number)
        return number

    @endpoint
    def write(self, number: int, path: str) -> int:
        with open(path, "a") as log:
            log.write(f"{number}\n")
        return number

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def ask(self, other: Any) -> int:
        return other.pid.call_one().get(LIMIT)

    @endpoint
    def ask_through(self, other: Any, third: Any) -> int:
        return other.ask.call_one(third).get(LIMIT)

    @endpoint
    def spawn_owner(self, heard: Port[Any]) -> Any:
        self.below = this_proc().spawn("owner", Owner, heard, True, {"restart": "always"})
        return self.below.get.call_one().get(LIMIT)

    @endpoint
    def fail(self) -> None:
        raise LookupError("unheard")

    @endpoint
    def share(self) -> RDMABuffer:
        self.tensor = torch.ones(1000)
        return RDMABuffer(self.tensor)

    @endpoint
    def spawn(self, procs: ProcMesh) -> Any:
        return procs.spawn("foreign", Worker)

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ended is not None:
            self.ended.send(self.value)


def pids_of(workers: Any) -> list[int]:
    return list(workers.pid.call().get(LIMIT).values())


def kill(worker: Any) -> int:
    """The process of the one worker, by SIGKILL; returns when it is known here. Its pid."""
    pid: int = worker.pid.call_one().get(LIMIT)
    stage = Stage()
    waiting = worker.wait.call_one(stage.port)
    stage.next()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        waiting.get(LIMIT)
    return pid


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"restart": "sometimes"}, "restart must be one of .* not 'sometimes'"),
        ({"restart": "always", "strategy": "all"}, "strategy must be one of .* not 'all'"),
        ({"restart": "always", "max_restarts": -1}, "max_restarts must be .* not -1"),
        ({"restart": "always", "within": 0}, "within must be .* not 0"),
        ({"restart": "always", "backoff": 1.0}, "backoff must be a Backoff, not 1.0"),
        ({"restart": "always", "backoff": Backoff(10.0)}, "would never be exceeded"),
        ({"restart": "never", "strategy": "one_for_all"}, "strategy is 'one_for_all', but restart is 'never'"),
        ({"max_restarts": 5}, "max_restarts is 5, but restart is None"),
    ],
)
def test_wrong_arguments_start_nothing(client: HostMesh, arguments: dict[str, Any], why: str) -> None:
    before = len(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match=why):
        client.spawn_procs(**arguments)
    assert len(psutil.Process().children(recursive=True)) == before


# --- references follow


def test_a_killed_process_comes_back_and_references_follow(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 3}, restart="always") as procs:
        workers = procs.spawn("workers", Worker, 10)
        copy = pickle.loads(pickle.dumps(workers)).slice(n=1)
        assert workers.add.call(1).get(LIMIT).values() == [11, 11, 11]
        before = pids_of(workers)
        kill(workers.slice(n=1))
        assert workers.add.call(1).get(LIMIT).values() == [12, 11, 12]  # its __init__ ran again
        now = pids_of(workers)
        assert now[0] == before[0] and now[1] != before[1] and now[2] == before[2]
        assert copy.pid.call_one().get(LIMIT) == now[1]
        assert workers.slice(n=0).ask.call_one(copy).get(LIMIT) == now[1]  # of a process that had never heard of it
        assert copy.rank.call_one().get(LIMIT) == (0, 1, "workers")
        assert not psutil.pid_exists(before[1])


def test_others_that_use_it_follow_too(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, restart="always") as procs, client.spawn_procs() as elsewhere:
        worker = procs.spawn("workers", Worker).slice(n=1)
        user = elsewhere.spawn("user", Worker)
        for _ in range(3):
            assert user.ask.call_one(worker).get(LIMIT) == worker.pid.call_one().get(LIMIT)
            pid = kill(worker)
            error = user.ask.call_one(worker).exception(LIMIT)
            assert error is None or isinstance(error, ActorError)  # it may be the one to find out
            assert user.ask.call_one(worker).get(LIMIT) != pid


def test_actors_of_every_owner_are_made_again(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, restart="always") as procs, client.spawn_procs() as elsewhere:
        first, second = procs.spawn("first", Worker, 1), procs.slice(n=1).spawn("second", Worker, torch.ones(100_000))
        foreign = elsewhere.spawn("spawner", Worker).spawn.call_one(procs).get(LIMIT)
        stopped = procs.spawn("stopped", Worker)
        stopped.stop().get(LIMIT)
        old = kill(first.slice(n=1))
        new = first.slice(n=1).pid.call_one().get(LIMIT)
        assert new != old
        assert second.add.call_one(0).get(LIMIT).equal(torch.ones(100_000))
        assert second.pid.call_one().get(LIMIT) == new
        assert pids_of(foreign) == pids_of(first)
        with pytest.raises(TransferTimeout):
            stopped.slice(n=1).pid.options(timeout=0.2).call_one().get(LIMIT)


def test_arguments_are_those_of_the_spawn(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs(restart="always") as procs:
        tensor = torch.zeros(100_000)
        worker = procs.spawn("worker", Worker, tensor)
        tensor.fill_(7)
        kill(worker)
        assert worker.add.call_one(1).get(LIMIT).equal(torch.ones(100_000))


def test_a_buffer_of_the_old_one_stays_dead(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs(restart="always") as procs:
        worker = procs.spawn("worker", Worker)
        buffer, mine = worker.share.call_one().get(LIMIT), torch.zeros(1000)
        buffer.read_into(mine).get(LIMIT)
        kill(worker)
        again = worker.share.call_one().get(LIMIT)
        with pytest.raises(PeerLost):
            buffer.read_into(mine).get(LIMIT)
        again.read_into(mine).get(LIMIT)


def test_what_an_old_incarnation_sends_is_refused(client: HostMesh) -> None:
    with client.spawn_procs({"n": 2}) as procs:
        workers = procs.spawn("workers", Worker)
        here = this_proc().spawn("here", Worker)
        assert workers.slice(n=0).ask.call_one(here).get(LIMIT) == os.getpid()
        port, receiver = Channel.open()
        current_proc().supersede(procs.slice(n=0)._chosen()[0])
        workers.slice(n=1).note.call_one(1, port).get(LIMIT)
        assert receiver.recv().get(LIMIT) == 1
        error = workers.slice(n=1).ask_through.call_one(workers.slice(n=0), here).exception(LIMIT)
        assert isinstance(error, ActorError) and "old incarnation" in str(error)
        here.stop().get(LIMIT)


# --- calls


def test_calls_under_way_end_once_and_none_is_repeated(client: HostMesh, faults: Faults, tmp_path: Path) -> None:
    with client.spawn_procs({"n": 2}, restart="always", **FOR_EVER) as procs:
        worker = procs.spawn("workers", Worker).slice(n=1)
        pid, stage, log = worker.pid.call_one().get(LIMIT), Stage(), str(tmp_path / "log")
        done = [worker.write.call_one(number, log) for number in range(5)]
        blocked = worker.wait.call_one(stage.port)
        queued = [worker.write.call_one(number, log) for number in range(5, 100)]
        stage.next()
        os.kill(pid, signal.SIGKILL)
        for future in [blocked, *queued]:
            with pytest.raises(SupervisionError):
                future.get(LIMIT)
        assert [future.get(LIMIT) for future in done] == list(range(5))
        assert worker.write.call_one(1000, log).get(LIMIT) == 1000
        assert Path(log).read_text().split() == [*map(str, range(5)), "1000"]


SLOW: dict[str, Any] = {"restart": "always", "within": 60.0, "backoff": Backoff(0.5, factor=1.0)}


def test_calls_wait_for_the_restart_or_fail_at_once(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, **SLOW) as procs:
        workers = procs.spawn("workers", Worker)
        kill(workers.slice(n=1))
        at_once = workers.pid.options(wait_for_restart=False)
        with pytest.raises(SupervisionError, match="restart"):
            at_once.call().get(LIMIT)
        with pytest.raises(SupervisionError, match="restart"):
            at_once.broadcast()
        with pytest.raises((SupervisionError, TransferTimeout)):
            workers.pid.options(timeout=0.05).call().get(LIMIT)
        assert workers.slice(n=0).add.call_one(1).get(LIMIT) == 1  # does not concern it
        living = workers.add.call_living(0).get(LIMIT)
        assert living.values() == [1, None]
        results = workers.add.options(wait_for_restart=False).stream(0)
        ends = [future.exception(LIMIT) for future in results]
        assert sorted(map(bool, ends)) == [False, True]
        assert workers.add.call(0).get(LIMIT).values() == [1, 0]  # waits


def test_a_spawn_during_a_restart_waits_for_it(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, **SLOW) as procs:
        kill(procs.spawn("first", Worker).slice(n=1))
        second = procs.spawn("second", Worker)
        second.initialized.get(LIMIT)
        assert len(set(pids_of(second))) == 2


# --- policies


def test_transient_is_not_started_again_after_a_normal_end(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, restart="transient") as procs:
        workers = procs.spawn("workers", Worker)
        before = pids_of(workers)
        with pytest.raises(SupervisionError):
            workers.slice(n=0).exit.call_one(3).get(LIMIT)
        assert workers.slice(n=0).pid.call_one().get(LIMIT) != before[0]
        with pytest.raises(SupervisionError):
            workers.slice(n=1).exit.call_one(0).get(LIMIT)
        with pytest.raises(SupervisionError, match="exit code 0"):
            workers.slice(n=1).pid.call_one().get(LIMIT)


@pytest.mark.parametrize(
    ("strategy", "others"), [("one_for_one", []), ("rest_for_one", [2, 3]), ("one_for_all", [0, 2, 3])]
)
def test_strategies(client: HostMesh, faults: Faults, strategy: Any, others: list[int]) -> None:
    port, receiver = Channel.open_ranked()
    with client.spawn_procs({"n": 4}, restart="always", strategy=strategy) as procs:
        workers = procs.spawn("workers", Worker, 0, port)
        before = pids_of(workers)
        for rank in range(4):
            workers.slice(n=rank).add.call_one(rank).get(LIMIT)
        kill(workers.slice(n=1))
        now = pids_of(workers)
        assert [rank for rank in range(4) if now[rank] != before[rank]] == sorted([1, *others])
        values = []
        while len(values) < len(others):
            error_or_value = receiver.recv()
            if error_or_value.exception(LIMIT) is None:
                values.append(error_or_value.get()[1])
        assert sorted(values) == others  # they were stopped, not killed
        if strategy == "rest_for_one":
            assert values == others[::-1]


class Owner(Actor):
    """Owns supervised workers, and tells what it hears of them."""

    def __init__(self, heard: Port[Any], handles: bool, arguments: dict[str, Any]) -> None:
        self.heard, self.handles = heard, handles
        self.procs = this_host().spawn_procs({"n": 2}, **arguments)
        self.workers = self.procs.spawn("workers", Worker)

    @endpoint
    def get(self) -> Any:
        return self.workers

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def replace(self, rank: int) -> None:
        self.procs.replace(rank).get(LIMIT)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.send(failure)
        return self.handles


def an_owner(procs: ProcMesh, handles: bool = True, **arguments: Any) -> tuple[Any, Any, Stage]:
    heard = Stage()
    owner = procs.slice(gpus=0).spawn("owner", Owner, heard.port, handles, arguments)
    return owner, owner.get.call_one().get(LIMIT), heard


def test_too_many_restarts_reach_the_owner(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, restart="always", max_restarts=2, within=60.0)
    pids = [kill(workers.slice(n=1)), kill(workers.slice(n=0)), kill(workers.slice(n=1))]
    failure: Any = heard.next()
    assert (failure.kind, failure.rank, failure.exit_code) == ("process", 1, -signal.SIGKILL)
    assert [(cause.rank, cause.exit_code) for cause in failure.causes] == [(1, -9), (0, -9), (1, -9)]
    assert all(f"pid {pid}" in failure.report() for pid in pids)
    for rank in range(2):
        with pytest.raises(SupervisionError, match="given up|3 restarts"):
            workers.slice(n=rank).pid.call_one().get(LIMIT)
    assert owner.pid.call_one().get(LIMIT)
    owner.stop().get(LIMIT)


def test_what_an_owner_does_not_handle_ends_it(procs: ProcMesh, faults: Faults) -> None:
    _, workers, heard = an_owner(procs, handles=False, restart="always", max_restarts=0)
    kill(workers.slice(n=1))
    heard.next()
    failure = faults.next()
    assert failure.mesh_name == "owner" and "max_restarts=0" in failure.report()


class Fragile(Worker):
    """Can be made once."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if os.path.exists(path):
            raise LookupError("it was here before")
        Path(path).touch()


def test_an_init_that_fails_at_the_restart_counts(client: HostMesh, faults: Faults, tmp_path: Path) -> None:
    procs = client.spawn_procs(restart="always", max_restarts=2)
    worker = procs.spawn("worker", Fragile, str(tmp_path / "made"))
    kill(worker)
    failure = faults.next()
    assert "it was here before" in failure.report() and len(failure.causes) == 3
    with pytest.raises(SupervisionError, match="given up"):
        worker.pid.call_one().get(LIMIT)
    procs.stop().get(LIMIT)


def test_an_actor_that_cannot_be_made_is_not_made_again(client: HostMesh, faults: Faults, tmp_path: Path) -> None:
    with client.spawn_procs(restart="always") as procs:
        (tmp_path / "made").touch()
        with pytest.raises(ActorError):
            procs.spawn("fragile", Fragile, str(tmp_path / "made")).initialized.get(LIMIT)
        assert faults.next().mesh_name == "fragile"
        worker = procs.spawn("worker", Worker)
        assert kill(worker) != worker.pid.call_one().get(LIMIT)


def test_the_failure_of_an_actor_reaches_its_owner(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, restart="always")
    kill(workers.slice(n=1))
    for _ in range(2):  # of one that was made again, too
        victim = workers.slice(n=1)
        pid = victim.pid.call_one().get(LIMIT)
        victim.fail.broadcast()
        failure: Any = heard.next()
        assert (failure.mesh_name, failure.kind, failure.rank) == ("workers", "actor", 1)
        with pytest.raises(SupervisionError, match="failed"):
            victim.pid.call_one().get(LIMIT)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda victim=victim: victim.pid.call_one().exception(LIMIT) is None, "it does not come back")  # type: ignore[misc]
    owner.stop().get(LIMIT)


# --- by hand


def test_never_tells_the_owner_who_may_replace_it(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, restart="never")
    for _ in range(2):
        before = pids_of(workers)
        kill(workers.slice(n=1))
        failure: Any = heard.next()
        assert (failure.mesh_name, failure.kind, failure.rank, failure.exit_code) == ("workers", "process", 1, -9)
        with pytest.raises(SupervisionError, match="gone"):
            workers.pid.call().get(LIMIT)
        owner.replace.call_one(1).get(LIMIT)
        now = pids_of(workers)
        assert now[0] == before[0] and now[1] != before[1]
    error = owner.replace.call_one(0).exception(LIMIT)
    assert isinstance(error, ActorError) and "only one that is gone is replaced" in str(error)
    owner.stop().get(LIMIT)


def test_replace_needs_somebody_to_do_it(procs: ProcMesh) -> None:
    with pytest.raises(ConfigError, match="was not spawned with restart="):
        procs.replace(0)


def test_what_is_left_of_a_mesh(client: HostMesh, faults: Faults) -> None:
    for arguments in ({}, {"restart": "never"}):
        procs = client.spawn_procs({"n": 3}, **arguments)
        workers = procs.spawn("workers", Worker)
        before = pids_of(workers)
        kill(workers.slice(n=1))
        faults.next()
        left = procs.living()
        assert left.sizes == {"procs": 2}
        assert pids_of(left.spawn("again", Worker)) == before[::2]
        procs.stop().get(LIMIT)
        with pytest.raises(SupervisionError, match="no process"):
            wait_until(lambda procs=procs: not procs.living(), "some are left")  # type: ignore[misc]


# --- ends


def test_stop_during_a_restart(client: HostMesh, faults: Faults) -> None:
    procs = client.spawn_procs({"n": 2}, **SLOW)
    workers = procs.spawn("workers", Worker)
    kill(workers.slice(n=1))
    procs.stop().get(LIMIT)
    with pytest.raises(SupervisionError):
        workers.pid.call().get(LIMIT)
    procs.stop().get(LIMIT)  # again is no error
    with pytest.raises(ConfigError, match="stopped"):
        procs.spawn("late", Worker)


def test_a_part_can_be_stopped_for_good(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 3}, restart="always", strategy="one_for_all") as procs:
        workers = procs.spawn("workers", Worker)
        procs.slice(n=1).stop("not needed").get(LIMIT)
        rest = workers.slice(n=slice(0, 3, 2))
        before = pids_of(rest)
        kill(rest.slice(n=0))
        assert not set(pids_of(rest)) & set(before)
        with pytest.raises(SupervisionError, match="not needed"):
            workers.slice(n=1).pid.call_one().get(LIMIT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_owner_has_supervised_ends_with_it(client: HostMesh, faults: Faults, number: int) -> None:
    heard = Stage()
    owner = client.spawn_procs().spawn("owner", Owner, heard.port, True, {"restart": "always"})
    nested = owner.get.call_one().get(LIMIT).slice(n=0)
    deeper = nested.spawn_owner.call_one(heard.port).get(LIMIT)
    pids = [*pids_of(owner.get.call_one().get(LIMIT)), *pids_of(deeper)]
    os.kill(owner.pid.call_one().get(LIMIT), number)
    faults.next()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its processes are left", 5.0)


def test_hosts_that_are_stopped_restart_nothing(client: HostMesh, faults: Faults) -> None:
    procs = client.spawn_procs({"n": 2}, restart="always")
    workers = procs.spawn("workers", Worker)
    workers.pid.call().get(LIMIT)
    client.stop().get(LIMIT)
    with pytest.raises(SupervisionError, match="stopped"):
        workers.pid.call().get(LIMIT)
    procs.stop().get(LIMIT)


# --- one after another


def test_many_kills_under_load(client: HostMesh, faults: Faults) -> None:
    rounds = 300 if os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long" else 12
    procs = client.spawn_procs({"n": 2}, restart="always", **FOR_EVER)
    workers = procs.spawn("workers", Worker)
    user = procs.slice(n=0).spawn("user", Worker)
    before: dict[str, Any] = {}
    ends: Counter[str] = Counter()
    for number in range(rounds):
        victim = workers.slice(n=1)
        pid = victim.pid.call_one().get(LIMIT)
        calls = [victim.add.call_one(1) for _ in range(50)] + [user.ask.call_one(victim) for _ in range(3)]
        os.kill(pid, signal.SIGKILL)
        calls += [victim.add.options(timeout=LIMIT).call_one(1) for _ in range(10)]
        for call in calls:
            ends[type(call.exception(LIMIT)).__name__] += 1
        assert victim.pid.call_one().get(LIMIT) != pid
        if number == 5:
            before = what_is_held()
    assert sum(ends.values()) == rounds * 63 and set(ends) <= {"NoneType", "SupervisionError", "ActorError"}
    after = what_is_held()
    assert {name: after[name] for name in before if name != "memory"} == {
        name: value for name, value in before.items() if name != "memory"
    }
    assert after["memory"] < before["memory"] + (64 << 20)
    procs.stop().get(LIMIT)


def what_is_held() -> dict[str, Any]:
    found = traces()
    return {
        "fds": sum(count for name, count in found.items() if name.startswith("fd ")),
        "processes": sum(name.startswith("process ") for name in found),
        "files": sorted(name for name in found if name.startswith("file ")),
        "memory": psutil.Process().memory_info().rss,
    }
