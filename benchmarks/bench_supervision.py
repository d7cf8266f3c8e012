"""How soon a death is noticed, and how soon a process is back.

    python benchmarks/bench_supervision.py            about two minutes
    python benchmarks/bench_supervision.py --quick
    python benchmarks/bench_supervision.py --monarch-python /path/to/venv/bin/python

Each figure is a time on one clock of one host, from the signal on. `goal` is what was set out for. Beside it, the
median of torchmonarch with its defaults in the same run, where that is installed here or in an environment whose
interpreter --monarch-python or the environment variable MONARCH_RDMA_TEST_MONARCH_PYTHON names; that takes two minutes
more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
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
    monarch: float | None = None  # p50

    def __str__(self) -> str:
        met = "met" if self.p99 <= self.goal else "missed"
        line = f"{self.what:<58} {self.rounds:>4}  {self.p50:>9.4f}  {self.p99:>9.4f}  {self.goal:>6g}  {met:<6}"
        return line if self.monarch is None else f"{line}  {self.monarch:>7.2f}  {self.monarch / self.p50:>6.0f} x"


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


class Clerk(Actor):
    """Ends when it is told to, and goes on with what it has counted."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def quit(self) -> None:
        raise SystemExit(1)


class KeptClerk(Clerk):
    def __snapshot__(self) -> int:
        return self.count

    def __restore__(self, count: int) -> None:
        self.count = count


def actor_restarted(rounds: int) -> list[float]:
    """Seconds from the call that ends an actor until a call to the new one is answered, its state restored."""
    taken = []
    with this_host().spawn_procs() as procs:
        clerk = procs.supervised(max_restarts=None).spawn("clerk", KeptClerk)
        for done in range(rounds):
            assert clerk.add.call_one().get(LIMIT) == 2 * done + 1  # nothing is lost
            at = time.monotonic()
            assert clerk.quit.call_one().exception(LIMIT) is not None
            assert clerk.add.call_one().get(LIMIT) == 2 * done + 2
            taken.append(time.monotonic() - at)
    return taken


PROGRAM = """
import time
from monarch_rdma.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def work(self) -> None:
        time.sleep(60)

workers = this_host().spawn_procs({"gpus": 4}).spawn("workers", Worker)
workers.initialized.get(60)
calls = [workers.slice(gpus=rank).work.call_one() for rank in range(4)]
print("ready", flush=True)
time.sleep(60)
"""


def orphaned(rounds: int) -> list[float]:
    """Seconds from SIGKILL of a program until the last process of its four busy workers and their template is gone."""
    taken = []
    for _ in range(rounds):
        with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None and program.stdout.readline() == b"ready\n"
            watched = select.poll()
            descriptors = [os.pidfd_open(each.pid) for each in psutil.Process(program.pid).children(recursive=True)]
            assert len(descriptors) > 4
            for descriptor in descriptors:
                watched.register(descriptor, select.POLLIN)
            at = time.monotonic()
            program.kill()
            for _ in descriptors:
                (descriptor, _), *_ = watched.poll(LIMIT * 1000)
                watched.unregister(descriptor)
                os.close(descriptor)
            taken.append(time.monotonic() - at)
    return taken


def _pid(victim: Any) -> int | None:
    try:
        return int(victim.pid.call_one().get(LIMIT))
    except SupervisionError:
        return None


def of_monarch(python: str | None, rounds: int, number: signal.Signals) -> dict[str, float | None]:
    """Medians of torchmonarch, as `noticed` measures; none where there is none."""
    if python is None:
        return {"told": None, "ended": None}
    command = [python, str(Path(__file__).with_name("supervision_peer.py")), str(rounds), number.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {name: statistics.median(values) for name, values in times.items()}


def figure(what: str, times: list[float], goal: float, monarch: float | None = None) -> Figure:
    p99 = sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]
    return Figure(what, len(times), statistics.median(times), p99, goal, monarch)


def figures(quick: bool, python: str | None) -> list[Figure]:
    killed = of_monarch(python, 1 if quick else 5, signal.SIGKILL)
    silent = of_monarch(python, 1, signal.SIGSTOP)
    told, ended = noticed(20 if quick else 200, signal.SIGKILL)
    stopped, _ = noticed(1 if quick else 3, signal.SIGSTOP)
    back = restarted(10 if quick else 100)
    again = actor_restarted(20 if quick else 200)
    alone = orphaned(3 if quick else 20)
    timeout = float(config.get("heartbeat_timeout"))
    return [
        figure("SIGKILL, until the owner's handler runs", told, 0.1, killed["told"]),
        figure("SIGKILL, until 20 calls that waited have ended", ended, 0.1, killed["ended"]),
        figure(
            f"SIGSTOP, until the owner's handler runs (timeout {timeout:g} s)", stopped, timeout + 0.5, silent["told"]
        ),
        figure("SIGKILL, until the new process answers, torch imported", back, 1.0),
        figure("an actor ends, until the new one answers, with its state", again, 1.0),
        figure("SIGKILL of a program, until its workers are gone", alone, 2.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--monarch-python",
        metavar="PYTHON",
        default=os.environ.get("MONARCH_RDMA_TEST_MONARCH_PYTHON"),
        help="an interpreter that has torchmonarch [this one, where it has]",
    )
    arguments = parser.parse_args()
    python = arguments.monarch_python or (sys.executable if importlib.util.find_spec("monarch") else None)
    if python is None:
        print("torchmonarch: left out, not installed (pip install torchmonarch==0.7.0, or --monarch-python)")
    hook: Callable[[MeshFailure], None] = lambda failure: print(failure.report())  # noqa: E731
    actor.unhandled_fault_hook = hook
    found = figures(arguments.quick, python)
    head = f"{'seconds':<58} {'n':>4}  {'p50':>9}  {'p99':>9}  {'goal':>6}"
    print(head if python is None else f"{head}  {'':<6}  {'monarch':>7}")
    for each in found:
        print(each)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2))


if __name__ == "__main__":
    main()
