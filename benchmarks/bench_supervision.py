"""How soon a death is noticed, and how soon a process is back.

    python benchmarks/bench_supervision.py            about two minutes
    python benchmarks/bench_supervision.py --quick

Each figure is a time on one clock of one host, from the signal on. `goal` is what was set out for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from monarch_rdma import actor, config
from monarch_rdma.actor import Actor, Channel, MeshFailure, Port, SupervisionError, endpoint, this_host

LIMIT = 60.0  # seconds


@dataclass(frozen=True)
class Figure:
    what: str
    rounds: int
    p50: float  # seconds
    p99: float
    goal: float

    def __str__(self) -> str:
        met = "met" if self.p99 <= self.goal else "missed"
        return f"{self.what:<58} {self.rounds:>4}  {self.p50:>9.4f}  {self.p99:>9.4f}  {self.goal:>6g}  {met}"


class Victim(Actor):
    def __init__(self) -> None:
        self.weights = torch.ones(8)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self, started: Port[None]) -> None:
        started.send(None)
        time.sleep(LIMIT)


class Owner(Actor):
    """Owns one victim, says when it hears of its end, and has another one made."""

    def __init__(self, heard: Port[float]) -> None:
        self.heard = heard
        self.procs = this_host().spawn_procs(restart="never")
        self.victim = self.procs.spawn("victim", Victim)

    @endpoint
    def get(self) -> Any:
        return self.victim

    @endpoint
    def replace(self) -> None:
        self.procs.replace(0).get(LIMIT)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.send(time.monotonic())
        return True


def noticed(rounds: int, number: int) -> tuple[list[float], list[float]]:
    """Seconds until the owner's handler runs, and until all of 20 calls that waited have ended here."""
    heard, receiver = Channel[float].open()
    with this_host().spawn_procs() as procs:
        owner = procs.spawn("owner", Owner, heard)
        victim = owner.get.call_one().get(LIMIT)
        told, ended = [], []
        for _ in range(rounds):
            pid = victim.pid.call_one().get(LIMIT)
            started, begun = Channel[None].open()
            calls = [victim.wait.call_one(started), *(victim.pid.call_one() for _ in range(19))]
            begun.recv().get(LIMIT)
            at = time.monotonic()
            os.kill(pid, number)
            for call in calls:
                assert isinstance(call.exception(LIMIT), SupervisionError)
            ended.append(time.monotonic() - at)
            told.append(receiver.recv().get(LIMIT) - at)
            owner.replace.call_one().get(LIMIT)
    return told, ended


def restarted(rounds: int) -> list[float]:
    """Seconds from SIGKILL until a call to the new process is answered."""
    taken = []
    with this_host().spawn_procs(restart="always", max_restarts=None) as procs:
        victim = procs.spawn("victim", Victim)
        for _ in range(rounds):
            pid = victim.pid.call_one().get(LIMIT)
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            while _pid(victim) in (None, pid):
                pass
            taken.append(time.monotonic() - at)
    return taken


def _pid(victim: Any) -> int | None:
    try:
        return int(victim.pid.call_one().get(LIMIT))
    except SupervisionError:
        return None


def figure(what: str, times: list[float], goal: float) -> Figure:
    p99 = sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]
    return Figure(what, len(times), statistics.median(times), p99, goal)


def figures(quick: bool) -> list[Figure]:
    told, ended = noticed(20 if quick else 200, signal.SIGKILL)
    stopped, _ = noticed(1 if quick else 3, signal.SIGSTOP)
    back = restarted(10 if quick else 100)
    timeout = float(config.get("heartbeat_timeout"))
    return [
        figure("SIGKILL, until the owner's handler runs", told, 0.1),
        figure("SIGKILL, until 20 calls that waited have ended", ended, 0.1),
        figure(f"SIGSTOP, until the owner's handler runs (timeout {timeout:g} s)", stopped, timeout + 0.5),
        figure("SIGKILL, until the new process answers, torch imported", back, 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    hook: Callable[[MeshFailure], None] = lambda failure: print(failure.report())  # noqa: E731
    actor.unhandled_fault_hook = hook
    found = figures(arguments.quick)
    print(f"{'seconds':<58} {'n':>4}  {'p50':>9}  {'p99':>9}  {'goal':>6}")
    for each in found:
        print(each)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2))


if __name__ == "__main__":
    main()
