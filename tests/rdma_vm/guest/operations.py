"""operations.py HANDLES OPTIONS: reads, writes, notifications and atomics on an owner's memory, each one checked.

Prints one JSON line: what was done, what failed and how, and what was wrong. HANDLES: what owner.py printed. OPTIONS
(JSON): those of the engine, `secret` (a file), `rounds`, `depth` (operations in a round, all at the same time), `bytes`
(the most of one operation), `timeout` (seconds of one operation), `pause` (seconds between rounds), `stop_at_failure`,
`rails` (it begins when so many carry a read).
"""

from __future__ import annotations

import base64
import collections
import itertools
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rails import queue_pairs

from monarch_rdma.errors import RdmaError
from monarch_rdma.rdma import Engine, Future, RDMAAction, RDMABuffer, Secret

CYCLE = bytes(range(251))


def pattern(size: int) -> bytes:
    return (CYCLE * (size // 251 + 1))[:size]


@dataclass
class Outcome:
    done: int = 0
    failures: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    wrong: list[str] = field(default_factory=list)
    added: int = 0  # additions known to be carried out
    perhaps_added: int = 0
    notified: list[int] = field(default_factory=list)
    perhaps_notified: list[int] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    rails: int = 0  # the most of one operation
    retries: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    left: int = 0  # descriptors and queue pairs, after the engine's end


class Slot:
    """A part of the owner's memory, with one operation at a time, and what must be in it."""

    def __init__(self, buffer: RDMABuffer, begin: int, content: bytes, outcome: Outcome) -> None:
        self.buffer = buffer[begin : begin + len(content)]
        self.either = [content]  # one of these for each byte: more than one after a write that failed
        self.outcome = outcome
        self.begin = begin

    def start_read(self, size: int, timeout: float) -> tuple[Future, Any]:
        into = bytearray(b"\xee" * size)

        def finish(error: RdmaError | None) -> None:
            if error is None and not self._may_be(into):
                self.outcome.wrong.append(f"read of {size} bytes at {self.begin}")

        return self.buffer[:size].read_into(memoryview(into), timeout=timeout), finish

    def _may_be(self, got: bytearray) -> bool:
        return any(got == known[: len(got)] for known in self.either) or all(
            byte in known for byte, *known in zip(got, *self.either, strict=False)
        )

    def start_write(self, data: bytes, notify: int | None, timeout: float) -> tuple[Future, Any]:
        known = self.outcome.notified, self.outcome.perhaps_notified

        def finish(error: RdmaError | None) -> None:
            if error is None or getattr(error, "remote_state", "") != "not_written":
                written = [data + old[len(data) :] for old in self.either]
                self.either = written if error is None else self.either + written
            if notify is not None:
                known[error is not None].append(notify)

        return self.buffer.write_from(memoryview(data), timeout=timeout, notify=notify), finish

    def start_add(self, counter: RDMABuffer, timeout: float) -> tuple[Any, Any]:
        old = bytearray(8)

        def finish(error: RdmaError | None) -> None:
            self.outcome.added += error is None
            self.outcome.perhaps_added += error is not None

        return RDMAAction().fetch_add(counter, memoryview(old), 1).submit(timeout=timeout), finish


def run(data: RDMABuffer, counter: RDMABuffer, options: dict[str, Any]) -> Outcome:
    outcome = Outcome()
    seeded = random.Random(options["rounds"])
    depth = options["depth"]
    size = data.size() // depth
    most = min(size, options["bytes"])
    content = pattern(data.size())
    rotated = pattern(most + 251)
    slots = [Slot(data, i * size, content[i * size : (i + 1) * size], outcome) for i in range(depth)]
    numbers = itertools.count(1)
    began = time.monotonic()
    for _ in range(options["rounds"]):
        started = []
        round_began = time.monotonic()
        for slot in slots:
            kind = seeded.random()
            if kind < 0.4:
                started.append(slot.start_read(seeded.randint(1, most), options["timeout"]))
            elif kind < 0.9:
                notify = next(numbers) if kind > 0.7 else None
                first, length = seeded.randrange(251), seeded.randint(1, most)
                started.append(slot.start_write(rotated[first : first + length], notify, options["timeout"]))
            else:
                started.append(slot.start_add(counter, options["timeout"]))
        for future, finish in started:
            finish(_end_of(future, outcome, options["timeout"]))
        outcome.slowest = max(outcome.slowest, time.monotonic() - round_began)
        if outcome.failures and options["stop_at_failure"]:
            break
        time.sleep(options["pause"])
    outcome.seconds = time.monotonic() - began
    return outcome


def _end_of(future: Any, outcome: Outcome, timeout: float) -> RdmaError | None:
    """Its error, None if it was done. One that does not end at all is wrong."""
    try:
        error = future.exception(timeout + 10)
    except TimeoutError:
        outcome.wrong.append(f"no end after {timeout + 10:.0f} s: {future!r}")
        return None
    report = future.explain()
    outcome.retries += report.retries
    outcome.rails = max(outcome.rails, report.rails)
    if report.lane and report.lane not in outcome.lanes:
        outcome.lanes.append(report.lane)
    if error is None:
        outcome.done += 1
    else:
        outcome.failures[f"{type(error).__name__}: {error}"] += 1
    return error


def held() -> int:
    """Descriptors and queue pairs of this process."""
    return len(os.listdir("/proc/self/fd")) + len(queue_pairs(os.getpid()))


def connect(data: RDMABuffer, rails: int) -> None:
    """Reads all of it until so many rails carry it: each is connected in its own time."""
    deadline = time.monotonic() + 30
    while True:
        done = data.read_into(bytearray(data.size()))
        done.get(30)
        if done.explain().rails >= rails:
            return
        assert time.monotonic() < deadline, f"{done.explain().rails} of {rails} rails are connected after 30 s"


def main(handles: dict[str, str], options: dict[str, Any]) -> None:
    ours = {name: options.pop(name) for name in ("rounds", "bytes", "depth", "timeout", "pause", "stop_at_failure")}
    rails = options.pop("rails")
    secret = Secret.from_file(options.pop("secret"))
    before = held()
    with Engine(secret=secret, name="reader", **options) as engine:
        data, counter = (
            RDMABuffer.from_bytes(base64.b64decode(handles[name]), engine=engine) for name in ("data", "counter")
        )
        connect(data, rails)
        print("{}", flush=True)  # it begins
        outcome = run(data, counter, ours)
    outcome.left = held() - before
    print(json.dumps(vars(outcome)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
