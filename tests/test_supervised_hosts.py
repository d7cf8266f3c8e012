"""Hosts that are lost with what runs there: who is told, what is started again when the host is back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_client import Faults, faults_recorded, traces, wait_until
from programs import LIMIT, WORKER_LOOP, Program, is_alive, make_secret
from supervised import Worker, pids_of

from monarch_rdma import config
from monarch_rdma.actor import HostMesh, SupervisionError, attach_to_workers
from monarch_rdma.actor.chaos import Injected, Injector, targets
from monarch_rdma.actor.runtime.proc import close_current, current_proc
from monarch_rdma.rdma import default_engine
from monarch_rdma.supervision.chaos import Fault, Plan
from monarch_rdma.supervision.policy import Backoff

READY = 'import monarch_rdma.actor\nsay("ready")\nhear()\n'
PATIENT: dict[str, Any] = {"restart": "always", "max_restarts": None, "backoff": Backoff(0.2, factor=1.0)}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return make_secret(tmp_path / "job.secret")


@pytest.fixture
def worker_loop(secret_file: Path, tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Starts a worker loop by its name."""
    before = traces()
    loops: list[Program] = []

    def make(name: str, code: str = WORKER_LOOP) -> Program:
        options = {"MONARCH_RDMA_HEARTBEAT_TIMEOUT": "1.0", "MONARCH_RDMA_HEARTBEAT_INTERVAL": "0.2"}
        loops.append(
            Program(code, f"ipc://{tmp_path}/{name}", "run_worker_loop_forever", secret_file=secret_file, **options)
        )
        return loops[-1]

    yield make
    for each in loops:
        each.close()
    wait_until(lambda: not traces() - before, lambda: f"left behind: {dict(traces() - before)}")


@pytest.fixture
def client(secret_file: Path, worker_loop: Any) -> Iterator[Faults]:
    """This process is a client of the job. What it has to handle are its faults."""
    config.configure(secret_file=str(secret_file), heartbeat_timeout=1.0, heartbeat_interval=0.2)
    with faults_recorded() as faults:
        yield faults
        close_current()
        default_engine().close()


def hosts_at(tmp_path: Path, *names: str) -> HostMesh:
    return attach_to_workers(workers=[f"ipc://{tmp_path}/{name}" for name in names])


def test_a_lost_host_takes_its_processes_out_and_the_owner_is_told(
    tmp_path: Path, worker_loop: Any, client: Faults
) -> None:
    loops = [worker_loop("one"), worker_loop("two")]
    procs = hosts_at(tmp_path, "one", "two").spawn_procs({"n": 2}, restart="always", max_restarts=2, within=600.0)
    workers = procs.spawn("workers", Worker)
    pids = pids_of(workers)
    loops[1].kill()
    failure = client.next()
    assert failure.mesh_name == procs.name and "given up" in failure.message
    assert {cause.rank for cause in failure.causes} <= {2, 3} and "agent is lost" in failure.report()
    wait_until(lambda: not any(map(is_alive, pids)), "processes are left")
    with pytest.raises(SupervisionError, match="given up"):
        workers.pid.call().get(LIMIT)


def test_a_host_that_comes_back_has_its_processes_again(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    loops = [worker_loop("one"), worker_loop("two")]
    procs = hosts_at(tmp_path, "one", "two").spawn_procs(**PATIENT)
    workers = procs.spawn("workers", Worker)
    before, old = pids_of(workers), procs._chosen()
    loops[1].kill()
    wait_until(lambda: not is_alive(before[1]), "it is left")
    loops.append(worker_loop("two"))
    now = list(workers.pid.options(timeout=LIMIT).call().get(LIMIT).values())
    assert now[0] == before[0] and now[1] != before[1]
    assert psutil.Process(now[1]).parents()[1].pid == loops[2].pid
    assert old[1] in current_proc()._superseded
    procs.stop().get(LIMIT)
    wait_until(lambda: not any(map(is_alive, pids_now(loops))), "processes are left")


def pids_now(loops: list[Program]) -> list[int]:
    alive = [psutil.Process(loop.pid) for loop in loops if loop.process.poll() is None]
    return [each.pid for parent in alive for template in parent.children() for each in template.children()]


def test_an_agent_that_was_stopped_serves_again(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    """Cut off for longer than the timeout: its processes are out, and it ends them; then it is found again."""
    worker_loop("one")
    loop = worker_loop("two")
    procs = hosts_at(tmp_path, "one", "two").spawn_procs(**PATIENT)
    workers = procs.spawn("workers", Worker)
    before = pids_of(workers)
    os.kill(loop.pid, signal.SIGSTOP)
    part = workers.slice(hosts=1)
    wait_until(lambda: part.pid.options(timeout=0.1).call_one().exception(LIMIT) is not None, "it is still there")
    wait_until(lambda: not is_alive(before[1]), "its process is left")
    os.kill(loop.pid, signal.SIGCONT)
    now = list(workers.pid.options(timeout=LIMIT).call().get(LIMIT).values())
    assert now[0] == before[0] and now[1] != before[1]
    assert psutil.Process(now[1]).parents()[1].pid == loop.pid
    again = hosts_at(tmp_path, "two").spawn_procs()  # attaching by hand works too
    assert again.spawn("worker", Worker).add.call_one(1).get(LIMIT) == 1
    procs.stop().get(LIMIT)


def test_the_loss_of_a_host_is_one_failure(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    loop = worker_loop("one")
    once = {"restart": "always", "max_restarts": 1, "within": 600.0, "backoff": Backoff(5.0)}
    with hosts_at(tmp_path, "one").spawn_procs({"n": 4}, **once) as procs:
        workers = procs.spawn("workers", Worker)
        others = procs.supervised("always", max_restarts=1, within=600.0).spawn("others", Worker)
        others.add.call(1).get(LIMIT)
        pids = pids_of(workers)
        following = worker_loop("one", READY + WORKER_LOOP)  # there in time for the one restart, on a busy host too
        following.line()
        loop.kill()
        wait_until(lambda: not any(map(is_alive, pids)), "processes are left")
        following.tell()
        for mesh in (workers, others):
            assert mesh.add.options(timeout=LIMIT).call(1).get(LIMIT).values() == [1] * 4
    assert client.rest() == []


def inject(**fault: Any) -> Injected:
    injected = Injector(Plan(())).inject(Fault(**fault))
    assert injected.problem == ""
    return injected


def test_faults_hit_hosts_that_are_named(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    loops = [worker_loop("one"), worker_loop("two")]
    procs = hosts_at(tmp_path, "one", "two").spawn_procs(**PATIENT)
    workers = procs.spawn("workers", Worker)
    pids = pids_of(workers)
    names = sorted(process.name for process in targets())
    assert [name for name in names if not name.startswith("host:")] == [f"{procs.name}/0", f"{procs.name}/1"]
    assert len([name for name in names if name.startswith("host:")]) == 2
    here = Injector(Plan(())).inject(Fault("kill", target=f"host:*:{os.getpid()}"))
    assert "no process matches" in here.problem  # the program itself is no host
    chosen = {fault.choose_target(names) for fault in Plan.random(3, duration=100, rate=1).faults}
    assert chosen == {f"{procs.name}/0", f"{procs.name}/1"}  # "*" is no host

    killed = inject(kind="kill", target=f"host:*:{loops[1].pid}")
    assert killed.target.startswith("host:") and loops[1].process.wait(LIMIT) == -signal.SIGKILL
    wait_until(lambda: not is_alive(pids[1]), "its process is left")
    loops.append(worker_loop("two"))
    now = list(workers.pid.options(timeout=LIMIT).call().get(LIMIT).values())
    assert now[0] == pids[0] and now[1] != pids[1]
    procs.stop().get(LIMIT)


def test_a_host_that_is_stopped_by_a_fault_goes_on(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    loop = worker_loop("one")
    procs = hosts_at(tmp_path, "one").spawn_procs(**PATIENT)
    workers = procs.spawn("workers", Worker)
    before = pids_of(workers)
    inject(kind="stop", target="host:*", seconds=2.5)  # longer than the timeout: it is lost with all that it has
    wait_until(lambda: psutil.Process(loop.pid).status() == psutil.STATUS_STOPPED, "it is not stopped")
    wait_until(lambda: not is_alive(before[0]), "its process is left")
    (now,) = workers.pid.options(timeout=LIMIT).call().get(LIMIT).values()
    assert now != before[0] and psutil.Process(now).parents()[1].pid == loop.pid
    procs.stop().get(LIMIT)


def test_a_host_that_is_cut_off_by_a_fault_comes_back(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    worker_loop("one")
    procs = hosts_at(tmp_path, "one").spawn_procs(**PATIENT)
    workers = procs.spawn("workers", Worker)
    before = pids_of(workers)
    inject(kind="cut_link", target="host:*", peer=current_proc().name, seconds=2.5)
    wait_until(lambda: not is_alive(before[0]), "its process is left")  # whose owner the agent has lost
    (now,) = workers.pid.options(timeout=LIMIT).call().get(LIMIT).values()
    assert now != before[0]
    procs.stop().get(LIMIT)


def test_hosts_that_are_stopped_restart_nothing(tmp_path: Path, worker_loop: Any, client: Faults) -> None:
    worker_loop("one")
    hosts = hosts_at(tmp_path, "one")
    procs = hosts.spawn_procs({"n": 2}, restart="always")
    workers = procs.spawn("workers", Worker)
    pids = pids_of(workers)
    hosts.stop("enough").get(LIMIT)
    wait_until(lambda: not any(map(is_alive, pids)), "processes are left")
    with pytest.raises(SupervisionError, match="enough"):
        workers.pid.call().get(LIMIT)
    procs.stop().get(LIMIT)
    assert hosts.spawn_procs().spawn("worker", Worker).add.call_one(1).get(LIMIT) == 1
