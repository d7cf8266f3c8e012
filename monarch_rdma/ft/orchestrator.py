"""Keeps the replicas of a training going: starts them, hears of their ends, and starts again what the policy says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Future,
    HostMesh,
    MeshFailure,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    endpoint,
    this_host,
    this_proc,
)
from ..errors import ConfigError, RdmaError
from ..supervision.events import emit
from ..supervision.membership import MembershipOptions
from .allocation import Allocator, OnThisHost
from .lighthouse import Lighthouse
from .recovery import GiveUp, Recovery, RecoveryPolicy, Rung
from .replica_actor import ReplicaActor, in_a_line
from .reports import Decided, Report
from .torchft_lighthouse import TorchFTLighthouse
from .trainer_actor import Coordination
from .training import TrainingPlan

__all__ = ["Ended", "Orchestrator", "Replica", "train"]

_log = logging.getLogger("monarch_rdma.ft")
_LAST = 15.0  # seconds that replicas have to end after the first one has
_STOP = 1.0
_INTERRUPTED = 0.7  # seconds for what is left to end in order, where this program is interrupted; it ends anyhow
_LOOK = 0.1
_LIVES_OF_A_REPLICA = 1000  # numbers: each life of a replica numbers those of its trainers from there on


class _NoHosts(RdmaError):
    """An allocation could not be had, or nothing can be started on it."""


class _Unfit(ConfigError):
    """The plan is not one for these hosts, nor for others like them."""


@dataclass
class Replica:
    """One replica as its owner has it: where it runs, its process, and the actor in it."""

    number: int
    recovery: Recovery
    hosts: HostMesh | None = None
    procs: ProcMesh | None = None
    lives: int = 0  # of its trainers, so far
    is_waiting: bool = False  # for hosts

    async def start(self, plan: TrainingPlan, allocator: Allocator, policy: RecoveryPolicy) -> ActorMesh[Any]:
        """Its ReplicaActor, in a process on its hosts. Raises _NoHosts, _Unfit."""
        try:
            if self.hosts is None:
                self.is_waiting = True
                self.hosts = await asyncio.to_thread(allocator.allocate, self.number)
                self.is_waiting = False
            if plan.trainers % len(self.hosts):
                raise _Unfit(
                    f"trainers is {plan.trainers}, which cannot be dealt out evenly to the {len(self.hosts)} hosts of "
                    f"replica {self.number}"
                )
            leader = self.hosts.flatten("host").slice(host=slice(0, 1)) if len(self.hosts) > 1 else self.hosts
            self.procs = await asyncio.to_thread(
                leader.spawn_procs, name=f"replica{self.number}", threads=1, preload=plan.imported
            )
        except _Unfit:
            raise
        except Exception as error:
            self.is_waiting = False
            raise _NoHosts(f"replica {self.number} cannot be started: {error}") from error
        return self.procs.spawn("replica", ReplicaActor, plan, self.number, self.hosts, policy)

    async def end(self) -> None:
        procs, self.procs = self.procs, None
        if procs is not None:
            await procs.stop("the replica ends")

    async def let_go(self, allocator: Allocator) -> None:
        hosts, self.hosts = self.hosts, None
        if hosts is not None or self.is_waiting:
            self.is_waiting = False
            await asyncio.to_thread(allocator.release, self.number, hosts)


@dataclass(frozen=True)
class Ended:
    """How a training ended. `done`: replicas that were there at the end; `given_up`: why others were not."""

    done: tuple[int, ...]
    given_up: dict[int, str] = field(default_factory=dict)


class Orchestrator(Actor):
    """Owns the replicas. A replica that fails is started again as its policy says, while the others train on."""

    def __init__(
        self,
        plan: TrainingPlan,
        lighthouse: ActorMesh[Any],
        *,
        allocator: Allocator | None = None,
        policy: RecoveryPolicy | None = None,
        watcher: Port[Report] | None = None,
    ) -> None:
        self._plan = plan
        self._lighthouse = lighthouse
        self._allocator = allocator or OnThisHost()
        self._policy = policy or RecoveryPolicy()
        self._watcher = watcher
        self._is_over = False
        self._calls: dict[int, Any] = {}

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Of a replica's process: who waits for the replica hears of it."""
        return True

    @endpoint
    async def run(self) -> Ended:
        """Returns when the training is done. Raises RdmaError where all replicas were given up."""
        coordination = await self._lighthouse.coordination.call_one()
        replicas = [Replica(number, Recovery(self._policy)) for number in range(self._plan.replicas)]
        tasks = {asyncio.create_task(self._keep(replica, coordination)): replica for replica in replicas}
        given_up: dict[int, str] = {}
        done: list[int] = []
        try:
            await self._wait_for_the_first(tasks, done, given_up)
            if not done:
                raise RdmaError(f"all replicas were given up: {given_up}")
            self._is_over = True
            late, _ = await asyncio.wait(tasks, timeout=_LAST)
            done += [tasks[task].number for task in late if not task.exception() and tasks[task].number not in done]
        finally:
            self._is_over = True
            await self._end(tasks, replicas)
        return Ended(tuple(sorted(done)), given_up)

    async def _wait_for_the_first(
        self, tasks: dict[asyncio.Task[None], Replica], done: list[int], given_up: dict[int, str]
    ) -> None:
        left = set(tasks)
        while left and not done:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                error = task.exception()
                if error is None:
                    done.append(tasks[task].number)
                else:
                    given_up[tasks[task].number] = str(error)

    async def _end(self, tasks: dict[asyncio.Task[None], Replica], replicas: list[Replica]) -> None:
        for call in self._calls.values():
            call.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_STOP)
        await asyncio.gather(*(self._done_with(replica) for replica in replicas), return_exceptions=True)

    async def _done_with(self, replica: Replica) -> None:
        try:
            await replica.end()
        finally:
            await replica.let_go(self._allocator)

    async def _keep(self, replica: Replica, coordination: Coordination) -> None:
        """Until the training is done. Raises RdmaError where the replica is given up."""
        while True:
            failed, problem = Rung.REPLICA, ""
            try:
                actor = await replica.start(self._plan, self._allocator, self._policy)
                call = actor.train.call_one(self._lighthouse, coordination, self._watcher, replica.lives)
                self._calls[replica.number] = call
                await call
                return
            except _Unfit as error:
                self._tell(Decided(time.time(), replica.number, "given up", 0.0, str(error)))
                raise
            except _NoHosts as error:
                failed, problem = Rung.ALLOCATION, in_a_line(error)
            except (RdmaError, ActorError, SupervisionError) as error:
                problem = in_a_line(error)
            if self._is_over:
                raise RdmaError("it was lost when the training was done")
            decision = replica.recovery.failed(failed, time.monotonic())
            what = "given up" if isinstance(decision, GiveUp) else decision.rung.name.lower()
            delay = 0.0 if isinstance(decision, GiveUp) else decision.delay
            self._tell(Decided(time.time(), replica.number, what, delay, problem))
            await replica.end()
            replica.lives += _LIVES_OF_A_REPLICA
            if isinstance(decision, GiveUp):
                raise RdmaError(f"{decision.reason}; last: {problem}")
            if decision.rung is Rung.ALLOCATION:
                await replica.let_go(self._allocator)
            await asyncio.sleep(decision.delay)

    def _tell(self, decided: Decided) -> None:
        emit(
            "replica.decided",
            replica=decided.replica,
            decision=decided.what,
            delay=decided.delay,
            reason=decided.reason,
        )
        if self._watcher is not None:
            self._watcher.send(decided)


def train(
    plan: TrainingPlan,
    *,
    allocator: Allocator | None = None,
    policy: RecoveryPolicy | None = None,
    membership: MembershipOptions | None = None,
    watch: Callable[[Report], object] = lambda report: None,
) -> Ended:
    """Carries a training out, from this program, and returns when it is done.

    `membership`: of the replicas; by default at least one has to be there. `watch` is called with all that is told of
    the training, in this thread. Raises RdmaError where all replicas were given up.
    """
    port, receiver = Channel[Any].open()
    keeper = this_host().spawn_procs(name="lighthouse", threads=1, env=plan.environment, preload=plan.imported)
    here = this_proc()
    options = membership or MembershipOptions(maximum=plan.replicas, join_window=0.5)  # all there: nobody is waited for
    lighthouse: ActorMesh[Any] = (
        keeper.spawn("lighthouse", TorchFTLighthouse, options, plan.sync_timeout, plan.lighthouse)
        if plan.coordination == "torchft"
        else keeper.spawn("lighthouse", Lighthouse, options)
    )
    orchestrator = here.spawn(
        "orchestrator", Orchestrator, plan, lighthouse, allocator=allocator, policy=policy, watcher=port
    )
    running = orchestrator.run.call_one()
    limit = None
    try:
        _watch(running, receiver, watch)
        ended: Ended = running.get()
        return ended
    except ActorError as error:
        raise error.exception from error
    except (KeyboardInterrupt, SystemExit):
        limit = _INTERRUPTED
        raise
    finally:
        running.cancel()
        _stop(orchestrator, keeper, limit)


def _stop(orchestrator: ActorMesh[Any], keeper: ProcMesh, limit: float | None) -> None:
    """In this order: replicas part from the lighthouse. What has not ended within `limit` seconds is not waited for."""
    begin = time.monotonic()
    for owned in (orchestrator, keeper):
        left = None if limit is None else max(0.0, begin + limit - time.monotonic())
        try:
            owned.stop().get(left)
        except TimeoutError:
            _log.info("what is left of the training ends by itself")


def _watch(running: Future[Ended], receiver: PortReceiver[Report], watch: Callable[[Report], object]) -> None:
    awaited = receiver.recv()
    while True:
        try:
            report = awaited.get(_LOOK)
        except TimeoutError:
            if running.done():
                return
            continue
        except SupervisionError:  # who could send reports is lost: what is done about it is reported by others
            report = None
        awaited = receiver.recv()
        if report is not None:
            watch(report)
