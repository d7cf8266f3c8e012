"""What tests of actors share: a client and what it leaves behind, failures that nobody handled, endpoints that wait."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch_rdma import actor
from monarch_rdma.actor import Channel, HostMesh, MeshFailure, Port, this_host
from monarch_rdma.actor.runtime.proc import close_current
from monarch_rdma.rdma.engine import default_engine

_OF_THE_PROCESS = ("pytest_timeout", "monarch-rdma-blocks")  # threads that are not a client's; one each, for good
LIMIT = 60.0  # seconds for what takes milliseconds; reached only by a failing test


@contextmanager
def client_of_its_own() -> Iterator[HostMesh]:
    """This process as a client, until the block ends. Then nothing of it may be left."""
    before = traces()
    try:
        yield this_host()
    finally:
        close_current()
        default_engine().close()
    wait_until(lambda: not traces() - before, lambda: f"left behind: {dict(traces() - before)}")


def traces() -> Counter[str]:
    """Descriptors, threads, processes and names in shared memory that belong to this process."""
    import psutil

    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists, or one that a thread closes right now
            found[f"fd {os.readlink(f'/proc/self/fd/{fd}')}"] += 1
    names = [thread.name for thread in threading.enumerate()]
    found.update(f"thread {name}" for name in names if not name.startswith(_OF_THE_PROCESS))
    found.update(f"process {child.pid}" for child in psutil.Process().children(recursive=True))
    found.update(f"file {path}" for path in Path("/dev/shm").glob("*monarch*"))
    return found


def wait_until(holds: Callable[[], bool], problem: str | Callable[[], str], limit: float = LIMIT) -> None:
    """Until `holds`, or fails: for what the kernel or another process does in its own time."""
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, problem if isinstance(problem, str) else problem()
        time.sleep(0.001)


class Faults:
    """Stands in for `unhandled_fault_hook`: failures that reached the client and that nobody handled."""

    def __init__(self) -> None:
        self._queue: queue.Queue[MeshFailure] = queue.Queue()

    def __call__(self, failure: MeshFailure) -> None:
        self._queue.put(failure)

    def next(self) -> MeshFailure:
        """The next one, expected by the test."""
        return self._queue.get(timeout=LIMIT)

    def rest(self) -> list[str]:
        """Those that no test asked for."""
        return [self._queue.get_nowait().report() for _ in range(self._queue.qsize())]


@contextmanager
def faults_recorded() -> Iterator[Faults]:
    """Until the block ends; there all must have been expected."""
    hook, faults = actor.unhandled_fault_hook, Faults()
    actor.unhandled_fault_hook = faults
    try:
        yield faults
    finally:
        actor.unhandled_fault_hook = hook
    assert faults.rest() == []


# In endpoints that a test holds: each says that it runs by sending a port, and goes on when something comes there.


def hold(started: Port[Any]) -> Any:
    """For sync endpoints; what came."""
    port, receiver = Channel.open()
    started.send(port)
    return receiver.recv().get(LIMIT)


async def hold_async(started: Port[Any]) -> Any:
    """The same for async ones."""
    port, receiver = Channel.open()
    started.send(port)
    return await receiver.recv()


class Stage:
    """The test's side of `hold`."""

    def __init__(self) -> None:
        self.port, self._receiver = Channel.open()

    def next(self) -> Port[Any]:
        """Of the next endpoint that runs: the port that lets it go on."""
        return self._receiver.recv().get(LIMIT)
