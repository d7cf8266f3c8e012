"""Many at once: actors, calls in flight, processes, lines of output, threads, ends."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from actor_client import LIMIT, Faults

from monarch_rdma.actor import (
    Actor,
    Channel,
    HostMesh,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    endpoint,
)


class Counter(Actor):
    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.calls = 0

    @endpoint
    def count(self, by: int) -> int:
        self.calls += by
        return self.calls

    @endpoint
    def get(self) -> int:
        return self.number

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def call_all(self, others: list[Any], times: int) -> int:
        futures = [other.count.call_one(1) for _ in range(times) for other in others]
        return len([future.get(LIMIT) for future in futures])

    @endpoint
    def print_lines(self, count: int) -> None:
        for number in range(count):
            print(f"line {number} of {current_rank().rank}")
        sys.stdout.flush()

    @endpoint
    def print_without_end(self, size: int) -> None:
        os.write(1, b"x" * size + b"\n")
        os.write(2, b"\xff\xfe not utf-8\n")


class AsyncCounter(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @concurrent_endpoint
    async def count(self, by: int) -> int:
        self.calls += by
        return self.calls

    @concurrent_endpoint
    async def spread(self, others: Any, depth: int) -> int:
        """A tree of calls through the same actors."""
        if depth == 0:
            return 1
        return sum((await others.spread.call(others, depth - 1)).values())

    @concurrent_endpoint
    async def send_back(self, port: Port[Any], value: Any) -> None:
        port.send(value)


def test_a_thousand_actors(procs: ProcMesh) -> None:
    meshes = [procs.spawn(f"counter{number}", Counter, number) for number in range(500)]
    futures = [mesh.get.call() for mesh in meshes]
    assert [list(future.get(LIMIT).values()) for future in futures] == [[n, n] for n in range(500)]
    stops = [mesh.stop() for mesh in meshes]
    for stop in stops:
        stop.get(LIMIT)


def test_ten_thousand_calls_in_flight(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", Counter)
    futures = [counters.slice(gpus=number % 2).count.call_one(1) for number in range(10_000)]
    answers = [future.get(LIMIT) for future in futures]
    assert answers[0::2] == answers[1::2] == list(range(1, 5001))


def test_thousands_of_calls_of_concurrent_endpoints(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", AsyncCounter)
    futures = [counters.count.call(1) for _ in range(3000)]
    assert [list(future.get(LIMIT).values()) for future in futures] == [[n, n] for n in range(1, 3001)]


def test_all_call_all(client: HostMesh) -> None:
    with client.spawn_procs({"n": 4}) as procs:
        counters = procs.spawn("counters", Counter)
        targets = procs.spawn("targets", Counter)
        others = [targets.slice(n=rank) for rank in range(4)]
        assert list(counters.call_all.call(others, 200).get(LIMIT).values()) == [800] * 4
        assert list(targets.count.call(0).get(LIMIT).values()) == [800] * 4


def test_trees_of_calls_through_the_same_actors(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", AsyncCounter)
    assert counters.slice(gpus=0).spread.call_one(counters, 7).get(LIMIT) == 2**7


def test_threads_make_ports_and_calls(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", AsyncCounter)

    def work(seed: int) -> int:
        chosen = random.Random(seed)
        total = 0
        for number in range(100):
            one = counters.slice(gpus=chosen.randrange(2))
            if chosen.random() < 0.5:
                port, receiver = Channel.open()
                one.send_back.broadcast(port, number)
                total += receiver.recv().get(LIMIT) == number
            else:
                total += one.count.call_one(1).get(LIMIT) > 0
        return total

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [100] * 8


def test_many_processes(client: HostMesh) -> None:
    with client.spawn_procs({"n": 40}) as procs:
        pids = list(procs.spawn("counters", Counter).pid.call().get(LIMIT).values())
    assert len(set(pids)) == 40


def test_deaths_among_calls_lose_no_future(client: HostMesh, faults: Faults) -> None:
    """Each call ends, with its value or with the error of its process."""
    procs = client.spawn_procs({"n": 6})
    counters = procs.spawn("counters", Counter)
    pids = list(counters.pid.call().get(LIMIT).values())
    futures: list[tuple[int, Any]] = []
    for number in range(3000):
        rank = number % 6
        futures.append((rank, counters.slice(n=rank).count.call_one(1)))
        if number in (500, 1500, 2500):
            os.kill(pids[number // 1000], signal.SIGKILL)
    outcomes = [(rank, future.exception(LIMIT)) for rank, future in futures]
    assert all(error is None for rank, error in outcomes if rank > 2)
    assert all(error is None or isinstance(error, SupervisionError) for _, error in outcomes)
    assert sorted(faults.next().rank for _ in range(3)) == [0, 1, 2]
    procs.stop().get(LIMIT)


def test_what_processes_print_comes_to_the_client(client: HostMesh, capfd: pytest.CaptureFixture[str]) -> None:
    with client.spawn_procs({"n": 2}) as procs:
        counters = procs.spawn("counters", Counter)
        procs.logging_option(stream_to_client=True, aggregate_window_sec=None).get(LIMIT)
        counters.print_lines.call(5000).get(LIMIT)
        counters.slice(n=0).print_without_end.call_one(1 << 20).get(LIMIT)
    deadline = time.monotonic() + LIMIT
    out = err = ""

    def all_is_there() -> bool:
        return "not utf-8" in err and out.count("line 4999 of") == 2 and out.count("x") >= 1 << 20

    while time.monotonic() < deadline and not all_is_there():
        said = capfd.readouterr()
        out, err = out + said.out, err + said.err
    for rank in range(2):
        numbers = [int(line.split()[-3]) for line in out.splitlines() if line.endswith(f" of {rank}")]
        assert numbers == list(range(5000))
    assert out.count("x") >= 1 << 20
    assert "not utf-8" in err
