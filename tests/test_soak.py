"""A program under faults for a while: 30 actors in 5 processes, calls and transfers all the time, a random fault a
second from a seed. At the end nothing is lost, nothing has happened twice, and nothing is left.

    MONARCH_RDMA_TEST_SOAK_SECONDS=7200 MONARCH_RDMA_TEST_SOAK_SEED=5 pytest tests/test_soak.py
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from actor_client import client_of_its_own, faults_recorded

from monarch_rdma.actor import Actor, ActorError, ProcMesh, SupervisionError, current_rank, endpoint
from monarch_rdma.actor.chaos import Injector
from monarch_rdma.config import configured
from monarch_rdma.errors import AccessDenied, PeerLost, RdmaError, TransferTimeout
from monarch_rdma.rdma import RDMABuffer, default_engine
from monarch_rdma.supervision import events
from monarch_rdma.supervision.chaos import Plan

SECONDS = float(os.environ.get("MONARCH_RDMA_TEST_SOAK_SECONDS", "20"))
SEED = int(os.environ.get("MONARCH_RDMA_TEST_SOAK_SEED", "1"))
PROCESSES, ACTORS_EACH, CALLERS = 5, 6, 6
FAULTS = {
    "kill": 3,
    "stop": 2,
    "hold_gil": 1,
    "exhaust_memory": 1,
    "break_link": 2,
    "cut_link": 1,
    "slow_link": 1,
    "corrupt_frame": 2,
}
ELEMENTS = 1 << 16  # of what is transferred
TIMEOUT = 60.0  # seconds for a call: what a fault takes away ends long before
GROWTH = 96 << 20  # bytes that the client may need more at the end than when all had run for a while
EXPECTED = (
    SupervisionError,
    RdmaError,
    MemoryError,
    OSError,
    RuntimeError,
)  # where memory is exhausted, anything fails
_RECORD = struct.Struct("<q")


def pattern(rank: int, life: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.int64) * 31 + rank * 1_000_003 + life


class Worker(Actor):
    """Writes down each message that it works on, where that survives it."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.life = int.from_bytes(os.urandom(4), "little")
        self.rank = current_rank().rank
        self.tensor = pattern(self.rank, self.life)
        self.buffer = RDMABuffer(self.tensor)

    @endpoint
    def work(self, number: int) -> int:
        os.write(self.file, _RECORD.pack(number))
        return -number

    @endpoint
    def relay(self, other: Any, number: int) -> int:
        os.write(self.file, _RECORD.pack(number))
        return int(other.work.options(timeout=TIMEOUT).call_one(number + 1).get()) - 1

    @endpoint
    def echo(self, number: int, value: torch.Tensor) -> torch.Tensor:
        os.write(self.file, _RECORD.pack(number))
        return value + 1

    @endpoint
    def offer(self) -> tuple[int, int, RDMABuffer]:
        return self.rank, self.life, self.buffer

    @endpoint
    def pull(self, number: int, offered: tuple[int, int, RDMABuffer]) -> str:
        os.write(self.file, _RECORD.pack(number))
        return pulled(offered)


def pulled(offered: tuple[int, int, RDMABuffer]) -> str:
    rank, life, buffer = offered
    target = torch.empty(ELEMENTS, dtype=torch.int64)
    buffer.read_into(target).get(TIMEOUT)
    return "right" if torch.equal(target, pattern(rank, life)) else "wrong bytes"


@dataclass
class Ledger:
    """What became of every call, by its number."""

    numbers: Any = field(default_factory=lambda: itertools.count(0, 10))
    began: set[int] = field(default_factory=set)
    ended: Counter[int] = field(default_factory=Counter)
    succeeded: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, make: Callable[[int], Any], is_right: Callable[[int, Any], bool]) -> None:
        """Makes a call with a new number and waits for its end."""
        with self.lock:
            number = next(self.numbers)
            self.began.add(number)
        value, problem, future = None, "", None
        try:
            future = make(number)
            future.add_callback(lambda: self._ended(number))
            value = future.get()
        except (SupervisionError, PeerLost, AccessDenied) as error:
            problem = type(error).__name__
        except TransferTimeout as error:
            self._note(f"call {number} hung: {error}")
            problem = "hung"
        except ActorError as error:
            problem = f"there: {type(error.exception).__name__}"
            if isinstance(error.exception, TransferTimeout) or not isinstance(error.exception, EXPECTED):
                self._note(f"call {number} failed: {error}")
        except Exception as error:
            self._note(f"call {number} failed: {type(error).__name__}: {error}")
        if future is None:  # it failed at once
            self._ended(number)
        with self.lock:
            self.failures[problem] += 1
            if not problem:
                self.succeeded.add(number)
        if not problem and not is_right(number, value):
            self._note(f"call {number} was answered with {value!r:.200}")

    def _ended(self, number: int) -> None:
        with self.lock:
            self.ended[number] += 1

    def _note(self, problem: str) -> None:
        with self.lock:
            self.problems.append(problem)


class Caller(threading.Thread):
    """Calls one actor after the other until `over`."""

    def __init__(self, meshes: list[Any], ledger: Ledger, over: threading.Event, seed: int) -> None:
        super().__init__(name=f"caller-{seed}")
        self.meshes, self.ledger, self.over, self.random = meshes, ledger, over, random.Random(seed)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.make_one()
        except BaseException as error:
            self.error = error

    def one_of(self, meshes: list[Any]) -> Any:
        return self.random.choice(meshes).slice(procs=self.random.randrange(PROCESSES))

    def make_one(self) -> None:
        half = len(self.meshes) // 2  # actors that wait for others, and those others: never in a circle
        actor, other = self.one_of(self.meshes[:half]), self.one_of(self.meshes[half:])
        what = self.random.randrange(5)
        with_timeout = {"timeout": TIMEOUT}
        if what == 0:
            self.ledger.call(actor.work.options(**with_timeout).call_one, lambda number, value: value == -number)
        elif what == 1:
            self.ledger.call(
                lambda number: actor.relay.options(timeout=2 * TIMEOUT).call_one(other, number),
                lambda number, value: value == -number - 2,
            )
        elif what == 2:
            sent = torch.full((self.random.choice([10, 100_000]),), float(self.random.randrange(1000)))
            self.ledger.call(
                lambda number: actor.echo.options(**with_timeout).call_one(number, sent),
                lambda number, value: torch.equal(value, sent + 1),
            )
        else:
            offered = self.offer(other)
            if offered is not None and what == 3:
                self.ledger.call(
                    lambda number: actor.pull.options(**with_timeout).call_one(number, offered),
                    lambda number, value: value == "right",
                )
            elif offered is not None:
                self.pull_here(offered)

    def offer(self, other: Any) -> Any:
        found: list[Any] = []
        self.ledger.call(
            lambda number: other.offer.options(timeout=TIMEOUT).call_one(),
            lambda number, value: found.append(value) is None,
        )
        return found[0] if found else None

    def pull_here(self, offered: Any) -> None:
        try:
            outcome = pulled(offered)
        except (PeerLost, AccessDenied):
            return
        if outcome != "right":
            self.ledger.problems.append(f"a transfer brought {outcome}")


def written(path: Path) -> Counter[int]:
    return Counter(number for (number,) in _RECORD.iter_unpack(path.read_bytes()))


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def soak(procs: ProcMesh, path: Path, log: Path) -> tuple[Ledger, int]:
    """Everything at once, for SECONDS; the ledger, and how much memory the client needs more than after a while."""
    meshes = [procs.spawn(f"workers{number}", Worker, str(path)) for number in range(ACTORS_EACH)]
    for mesh in meshes:
        mesh.initialized.get(TIMEOUT)
    ledger, over = Ledger(), threading.Event()
    callers = [Caller(meshes, ledger, over, SEED * 1000 + number) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    plan = Plan.random(SEED, duration=SECONDS - 2, rate=1.0, kinds=FAULTS, target="soaked/*", seconds=(0.1, 4.0))
    try:
        with Injector(plan):
            time.sleep(SECONDS / 4)
            before = resident()
            time.sleep(SECONDS - SECONDS / 4)
    finally:
        over.set()
        for caller in callers:
            caller.join(3 * TIMEOUT)
    assert [caller.error for caller in callers] == [None] * CALLERS
    assert not any(caller.is_alive() for caller in callers), "a caller hangs"
    for mesh in meshes:  # all are there again, and answer
        values = mesh.work.options(timeout=TIMEOUT).call(-1).get().values()
        assert values == [1] * PROCESSES
    return ledger, resident() - before


@pytest.mark.timeout(int(SECONDS) + 300)
def test_nothing_is_lost_or_twice_or_left(tmp_path: Path) -> None:
    log, path = tmp_path / "events.jsonl", tmp_path / "worked"
    default_engine().close()  # that of other tests has other options
    options = {"heartbeat_interval": 0.25, "heartbeat_timeout": 2.5, "event_log": log, "log_forwarding": False}
    with configured(**options), faults_recorded():  # no failure reaches the client: all are restarted
        with client_of_its_own() as host:  # nothing of it is left
            with host.spawn_procs({"procs": PROCESSES}, name="soaked", restart="always", max_restarts=None) as procs:
                ledger, growth = soak(procs, path, log)
    counted = written(path)
    del counted[-1]
    happened = Counter(event.kind for event in events.read(log))
    print(f"seed {SEED}: {dict(ledger.failures)}; {dict(happened)}; the client grew by {growth >> 20} MiB")
    assert ledger.problems == []
    assert {number: times for number, times in counted.items() if times > 1} == {}  # nothing twice
    assert ledger.began == set(ledger.ended)  # nothing lost
    assert set(ledger.ended.values()) == {1}
    assert growth < GROWTH
    assert happened["fault.injected"] > SECONDS / 3 and happened["restart.done"] > 0
    assert len(ledger.succeeded) > 20 * SECONDS
