"""Processes that are started again when they die: who is restarted, who follows them, what becomes of calls."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from actor_client import LIMIT, Faults, Stage, traces, wait_until
from supervised import FOR_EVER, SLOW, Worker, kill, pids_of

from monarch_rdma.actor import (
    ActorError,
    Channel,
    HostMesh,
    SupervisionError,
    endpoint,
    this_proc,
)
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import PeerLost, TransferTimeout

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


def test_a_restart_changes_nothing_of_the_class_in_the_program(client: HostMesh, faults: Faults) -> None:
    """It is made again as it was spawned, elsewhere."""

    class Local(Worker):
        label = "then"

        @endpoint
        def say(self) -> str:
            return self.label

    with client.spawn_procs(restart="always") as procs:
        worker = procs.spawn("worker", Local)
        Local.label, method = "now", inspect.getattr_static(Local, "say")
        kill(worker)
        assert worker.say.call_one().get(LIMIT) == "then"
        assert Local.label == "now" and inspect.getattr_static(Local, "say") is method
        assert procs.spawn("another", Local).say.call_one().get(LIMIT) == "now"  # others do as they are told


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


def test_calls_wait_for_the_restart_or_fail_at_once(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, **SLOW) as procs:
        workers = procs.spawn("workers", Worker)
        kill(workers.slice(n=1))
        at_once = workers.pid.options(wait_for_restart=False)
        with pytest.raises(SupervisionError):
            at_once.call().get(LIMIT)
        with pytest.raises(SupervisionError):
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


# --- one after another


def test_many_kills_under_load(client: HostMesh, faults: Faults) -> None:
    rounds = 300 if os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long" else 12
    procs = client.spawn_procs({"n": 2}, restart="always", **FOR_EVER)
    workers = procs.spawn("workers", Worker)
    user = procs.slice(n=0).spawn("user", Worker)
    before: dict[str, int] = {}
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
    # What is left of the last ones that were killed may be closed a moment later.
    wait_until(lambda: not more_than(before), lambda: f"more is held: {more_than(before)}")
    procs.stop().get(LIMIT)


def what_is_held() -> dict[str, int]:
    found = traces()
    counts = {kind: sum(n for name, n in found.items() if name.startswith(kind)) for kind in ("fd", "process", "file")}
    return counts | {"memory": psutil.Process().memory_info().rss}


def more_than(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    now, slack = what_is_held(), {"memory": 64 << 20}
    return {name: (now[name], then) for name, then in before.items() if now[name] > then + slack.get(name, 0)}
