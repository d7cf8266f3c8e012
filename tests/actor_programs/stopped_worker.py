"""A worker is stopped for longer than heartbeats wait: calls to it fail, the other one goes on."""

from __future__ import annotations

import os
import signal
import time

import psutil

from monarch_rdma import actor, config
from monarch_rdma.actor import Actor, SupervisionError, current_rank, endpoint, this_host


class Worker(Actor):
    @endpoint
    def where(self) -> tuple[int, int]:
        return os.getpid(), current_rank().rank


def main() -> None:
    config.configure(heartbeat_interval=0.05, heartbeat_timeout=0.4)
    failures: list[actor.MeshFailure] = []
    actor.unhandled_fault_hook = failures.append
    procs = this_host().spawn_procs({"n": 2})
    workers = procs.spawn("workers", Worker)
    pid, _ = workers.slice(n=1).where.call_one().get(20)
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    for future in (workers.where.call(), workers.slice(n=1).where.call_one()):
        try:
            future.get(20)
        except SupervisionError as error:
            print("workers" in str(error), "is lost" in str(error))
    print(workers.slice(n=0).where.call_one().get(20)[1])
    until = time.monotonic() + 20
    while not failures and time.monotonic() < until:  # its host's agent gives it up, too
        time.sleep(0.001)
    procs.stop().get(20)
    print([(failure.mesh_name, failure.kind) for failure in failures])


if __name__ == "__main__":
    main()
