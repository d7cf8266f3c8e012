"""What tests of restarts share: workers that may be killed, who kills them, owners that hear of it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from actor_client import LIMIT, Stage, hold

from monarch_rdma.actor import (
    Actor,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from monarch_rdma.rdma import RDMABuffer
from monarch_rdma.supervision.policy import Backoff

PAUSE = Backoff(8.0, factor=1.0)  # before a restart: a busy host has come to what is to be seen meanwhile
SLOW: dict[str, Any] = {"restart": "always", "within": 600.0, "backoff": PAUSE}
FOR_EVER: dict[str, Any] = {"max_restarts": None}


class Worker(Actor):
    def __init__(self, start: int = 0, ended: Port[Any] | None = None) -> None:
        self.value, self.ended = start, ended

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> tuple[int, int, str]:
        instance = context().actor_instance
        return current_rank().rank, instance.rank.rank, instance.name

    @endpoint
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def note(self, number: int, port: Port[Any]) -> int:
        port.send(number)
        return number

    @endpoint
    def write(self, number: int, path: str) -> int:
        with open(path, "a") as log:
            log.write(f"{number}\n")
        return number

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def ask(self, other: Any) -> int:
        return other.pid.call_one().get(LIMIT)

    @endpoint
    def ask_through(self, other: Any, third: Any) -> int:
        return other.ask.call_one(third).get(LIMIT)

    @endpoint
    def spawn_owner(self, heard: Port[Any]) -> Any:
        self.below = this_proc().spawn("owner", Owner, heard, True, {"restart": "always"})
        return self.below.get.call_one().get(LIMIT)

    @endpoint
    def fail(self) -> None:
        raise LookupError("unheard")

    @endpoint
    def share(self) -> RDMABuffer:
        self.tensor = torch.ones(1000)
        return RDMABuffer(self.tensor)

    @endpoint
    def spawn(self, procs: ProcMesh) -> Any:
        return procs.spawn("foreign", Worker)

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ended is not None:
            self.ended.send(self.value)


def pids_of(workers: Any) -> list[int]:
    return list(workers.pid.call().get(LIMIT).values())


def kill(worker: Any) -> int:
    """The process of the one worker, by SIGKILL; returns when it is known here. Its pid."""
    pid: int = worker.pid.call_one().get(LIMIT)
    stage = Stage()
    waiting = worker.wait.call_one(stage.port)
    stage.next()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        waiting.get(LIMIT)
    return pid


class Owner(Actor):
    """Owns supervised workers, and tells what it hears of them."""

    def __init__(self, heard: Port[Any], handles: bool, arguments: dict[str, Any]) -> None:
        self.heard, self.handles = heard, handles
        self.procs = this_host().spawn_procs({"n": 2}, **arguments)
        self.workers = self.procs.spawn("workers", Worker)

    @endpoint
    def get(self) -> Any:
        return self.workers

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def replace(self, rank: int) -> None:
        self.procs.replace(rank).get(LIMIT)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.send(failure)
        return self.handles


def an_owner(procs: ProcMesh, handles: bool = True, **arguments: Any) -> tuple[Any, Any, Stage]:
    heard = Stage()
    owner = procs.slice(gpus=0).spawn("owner", Owner, heard.port, handles, arguments)
    return owner, owner.get.call_one().get(LIMIT), heard
