"""A client that ends, or is ended, with work in flight of every kind.

    python holds_work.py HOW

Prints the pids of its workers, then "ready", waits for a line, and ends by HOW: return, raise, exit, abort; or wait: at
once, until somebody ends it; or linger: it returns, and is "ready" while it waits for an actor to clean up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from monarch_rdma.actor import Actor, Channel, concurrent_endpoint, endpoint, this_host, this_proc


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self, started: Any) -> None:
        started.send("sleep")
        time.sleep(600)

    @endpoint
    def spin(self, started: Any) -> None:
        """Never lets go of the interpreter for long."""
        started.send("spin")
        while True:
            sum(range(100_000))

    @endpoint
    def call(self, other: Any, started: Any) -> None:
        """Waits for another worker, which never answers."""
        started.send("call")
        other.sleep.call_one(started).get()

    @endpoint
    def stop_process(self, started: Any) -> None:
        started.send("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)


class Waiter(Actor):
    @concurrent_endpoint
    async def wait(self, port: Any, started: Any) -> None:
        started.send("wait")
        _, receiver = Channel.open()
        await receiver.recv()


class Lingering(Actor):
    @endpoint
    def there(self) -> None:
        """It is."""

    def __cleanup__(self, error: BaseException | None) -> None:
        print("ready", flush=True)
        time.sleep(600)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(how: str) -> None:
    procs = this_host().spawn_procs({"n": 2})
    stubborn = this_host().spawn_procs({"n": 2}, bootstrap=ignore_sigterm)
    workers, others = procs.spawn("workers", Worker), stubborn.spawn("others", Worker)
    waiters = procs.spawn("waiters", Waiter)
    pids = [*workers.pid.call().get().values(), *others.pid.call().get().values()]
    port, receiver = Channel.open()
    futures = [
        waiters.wait.call(None, port),
        workers.slice(n=0).call.call_one(workers.slice(n=1), port),
        procs.spawn("large", Worker).slice(n=0).sleep.call_one(port),
        others.slice(n=0).spin.call_one(port),
        others.slice(n=1).stop_process.call_one(port),
    ]
    started = sorted(receiver.recv().get(20) for _ in range(7))
    waiters.wait.broadcast(b"x" * (8 << 20), port)
    assert started == ["call", "sleep", "sleep", "spin", "stopped", "wait", "wait"], started
    print(*pids, flush=True)
    if how == "linger":
        return this_proc().spawn("lingering", Lingering).there.call_one().get()
    print("ready", flush=True)
    if how != "wait":
        sys.stdin.readline()
    if how == "wait":
        futures[0].get()
    elif how == "raise":
        raise RuntimeError("the client fails")
    elif how == "exit":
        sys.exit(3)
    elif how == "abort":
        os._exit(4)


if __name__ == "__main__":
    main(sys.argv[1])
