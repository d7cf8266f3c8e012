"""How soon torchmonarch notices a death: for bench_supervision.py, run by an interpreter that has it.

    python benchmarks/supervision_peer.py ROUNDS SIGNAL

Prints a JSON object: seconds from the signal until the owner's handler ran, and until a call that waited had ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import monarch.actor
from monarch.actor import Actor, Channel, Port, endpoint, this_host

LIMIT = 120.0  # seconds


class Victim(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self, started: Port[None]) -> None:
        started.send(None)
        time.sleep(LIMIT)


class Owner(Actor):
    """Owns one victim, and says when it hears of its end."""

    def __init__(self, heard: Port[float]) -> None:
        self.heard = heard
        self.victim = this_host().spawn_procs(per_host={"gpus": 1}).spawn("victim", Victim)

    @endpoint
    def get(self) -> object:
        return self.victim

    def __supervise__(self, failure: object) -> bool:
        self.heard.send(time.monotonic())
        return True


def one_round(number: int) -> tuple[float, float]:
    heard, receiver = Channel[float].open()
    owner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owner", Owner, heard)
    victim = owner.get.call_one().get(timeout=LIMIT)
    pid = victim.pid.call_one().get(timeout=LIMIT)
    started, begun = Channel[None].open()
    waiting = victim.wait.call_one(started)
    begun.recv().get(timeout=LIMIT)
    at = time.monotonic()
    os.kill(pid, number)
    error = waiting.exception(timeout=LIMIT)
    ended = time.monotonic() - at
    assert error is not None and not isinstance(error, TimeoutError), "its process is gone"
    told = receiver.recv().get(timeout=LIMIT) - at
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    return told, ended


def main() -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None
    rounds, number = int(sys.argv[1]), signal.Signals[sys.argv[2]]
    times = [one_round(number) for _ in range(rounds)]
    print(json.dumps({"told": [told for told, _ in times], "ended": [ended for _, ended in times]}), flush=True)
    os._exit(0)  # what it has spawned may keep it from ending


if __name__ == "__main__":
    main()
