"""A replica: its trainers, which it starts together, watches, and starts again together where one of them fails."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

from ..actor import Actor, ActorError, ActorMesh, Channel, HostMesh, MeshFailure, Port, ProcMesh, endpoint
from ..errors import RdmaError
from .recovery import GiveUp, Recovery, RecoveryPolicy, Rung
from .reports import Decided, Report, TrainersStarted
from .trainer_actor import Assembly, Coordination, TrainerActor
from .training import TrainingPlan

__all__ = ["ReplicaActor", "ReplicaFailed", "in_a_line"]


class ReplicaFailed(RdmaError):
    """A replica's trainers have failed more often than its policy allows. Raised by ReplicaActor.train."""


class ReplicaActor(Actor):
    """Runs on the replica's own allocation. Its trainers end with it."""

    def __init__(self, plan: TrainingPlan, replica: int, hosts: HostMesh, policy: RecoveryPolicy) -> None:
        self._plan, self._replica, self._hosts = plan, replica, hosts
        self._recovery = Recovery(policy)
        self._lives = 0
        self._trainers: ProcMesh | None = None

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Of a trainer: `train` hears of it where it waits."""
        return True

    @endpoint
    async def train(
        self,
        lighthouse: ActorMesh[Any],
        coordination: Coordination,
        watcher: Port[Report] | None,
        life: int,
    ) -> None:
        """Returns when the training is done. `life`: how many lives of this replica there were before.

        Raises ReplicaFailed.
        """
        self._lives = life
        while True:
            try:
                return await self._train_once(lighthouse, coordination, watcher)
            except Exception as error:
                decision = self._recovery.failed(Rung.TRAINERS, time.monotonic())
                if isinstance(decision, GiveUp) or decision.rung is not Rung.TRAINERS:
                    raise ReplicaFailed(
                        f"replica {self._replica}: its trainers have failed too often: {error}"
                    ) from error
                if watcher is not None:
                    watcher.send(Decided(time.time(), self._replica, "trainers", decision.delay, in_a_line(error)))
                await self._end_trainers()
                await asyncio.sleep(decision.delay)

    async def _train_once(
        self,
        lighthouse: ActorMesh[Any],
        coordination: Coordination,
        watcher: Port[Report] | None,
    ) -> None:
        self._lives += 1
        plan = self._plan
        procs = self._trainers = await asyncio.to_thread(
            self._hosts.spawn_procs, {"trainers": self._per_host()}, name=f"trainers{self._replica}",
            threads=plan.threads, gpus_per_proc=plan.gpus_per_proc, env=plan.environment, preload=plan.imported,
        )  # fmt: skip
        trainers = procs.spawn("trainer", TrainerActor)
        addresses = tuple((await trainers.address.call()).values())
        host = urlsplit(addresses[0]).hostname or "127.0.0.1"
        port = await first(trainers).serve_store.call_one(host)
        if watcher is not None:
            watcher.send(TrainersStarted(time.time(), self._replica, self._lives))
        ended, receiver = Channel[int].open()
        assembly = Assembly(
            plan, self._replica, self._lives, lighthouse, coordination, addresses, (host, port), watcher
        )
        await trainers.start.call(assembly, ended)
        for _ in addresses:  # who has ended stays: another replica may still have to read its state
            await receiver.recv()

    def _per_host(self) -> int:
        return self._plan.trainers // max(1, len(self._hosts))

    async def _end_trainers(self) -> None:
        procs, self._trainers = self._trainers, None
        if procs is not None:
            await procs.stop("the replica's trainers end together")


def first(trainers: ActorMesh[Any]) -> Any:
    """That of rank 0."""
    return trainers.flatten("rank").slice(rank=0)


def in_a_line(error: BaseException) -> str:
    """What has failed, without how it was called."""
    while isinstance(error, ActorError) and error.exception is not None:
        error = error.exception
    return (str(error) or type(error).__name__).splitlines()[0]
