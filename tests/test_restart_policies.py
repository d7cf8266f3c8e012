"""Restart policies at work: who is started again with whom, when it is given up, what owners do by hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_client import LIMIT, Faults, Stage, wait_until
from supervised import SLOW, Owner, Worker, an_owner, kill, pids_of

from monarch_rdma.actor import (
    ActorError,
    Channel,
    HostMesh,
    ProcMesh,
    SupervisionError,
)
from monarch_rdma.errors import ConfigError
from monarch_rdma.supervision.policy import Backoff

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
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match=why):
        client.spawn_procs(**arguments)
    assert set(psutil.Process().children(recursive=True)) <= before


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


def test_too_many_restarts_reach_the_owner(procs: ProcMesh, faults: Faults) -> None:
    owner, workers, heard = an_owner(procs, restart="always", max_restarts=2, within=600.0)
    pids = [kill(workers.slice(n=1)), kill(workers.slice(n=0)), kill(workers.slice(n=1))]
    failure: Any = heard.next()
    assert (failure.kind, failure.rank, failure.exit_code) == ("process", 1, -signal.SIGKILL)
    causes = [(cause.rank, cause.exit_code) for cause in failure.causes]
    assert sorted(causes) == [(0, -9), (1, -9), (1, -9)] and causes[-1] == (1, -9)  # the owner may hear of 0 before 1
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
    procs = client.spawn_procs(restart="always", max_restarts=2, within=600.0)
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


def test_what_is_seen_to_be_lost_can_be_replaced_at_once(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs({"n": 2}, restart="never") as procs:
        worker = procs.spawn("workers", Worker).slice(n=1)
        for _ in range(3):
            pid = kill(worker)
            procs.replace(1).get(LIMIT)
            assert worker.pid.call_one().get(LIMIT) != pid
            faults.next()


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
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its processes are left")
