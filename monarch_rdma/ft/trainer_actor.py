"""One trainer of a replica: the process in which a recipe's training runs, step after step."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import monarch_rdma.collectives  # noqa: F401  registers the backend

from ..actor import Actor, ActorMesh, Port, SupervisionError, current_rank, endpoint
from ..actor.membership import CoordinationId
from ..collectives.group import Group
from ..errors import RdmaError
from ..rdma import default_engine
from .quorum import Inside, Quorum
from .replica_cohort import ReplicaCohort
from .reports import Report, Stepped
from .torchft_lighthouse import TorchFTCoordination
from .training import Place, TrainingPlan

if TYPE_CHECKING:
    from .torchft_cohort import TorchFTCohort

__all__ = ["Assembly", "Coordination", "TrainerActor"]

Coordination: TypeAlias = CoordinationId | TorchFTCoordination  # where replicas meet
_log = logging.getLogger("monarch_rdma.ft")
_JOIN_TIMEOUT = 60.0  # seconds until all trainers of a replica have met


@dataclass(frozen=True)
class Assembly:
    """What the trainers of one replica are told to begin with. `life`: counts the trainers of this replica."""

    plan: TrainingPlan
    replica: int
    life: int
    lighthouse: ActorMesh[Any]
    coordination: Coordination
    addresses: tuple[str, ...]
    store: tuple[str, int]  # host and port of torch.distributed's
    watcher: Port[Report] | None


class TrainerActor(Actor):
    """One process of a replica. It trains on a thread of its own, so that its end is not waited for."""

    def __init__(self) -> None:
        self._run: _Run | None = None
        self._store: Any = None

    @endpoint
    def address(self) -> str:
        """Of this process's engine."""
        return default_engine().address

    @endpoint
    def serve_store(self, host: str) -> int:
        """For rank 0: the port of a store for torch.distributed, where all of the replica find each other."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    @endpoint
    def start(self, assembly: Assembly, ended: Port[int]) -> None:
        """Trains. `ended` gets this rank when all is done, or the error because of which it ends."""
        place = Place(assembly.replica, assembly.plan.replicas, current_rank().rank, len(assembly.addresses))
        self._run = _Run(assembly, place, ended)

    def __cleanup__(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.stop()


class _Run:
    """The training of one trainer, from its start to its end."""

    def __init__(self, assembly: Assembly, place: Place, ended: Port[int]) -> None:
        self._assembly, self._place, self._ended = assembly, place, ended
        self._engine = default_engine()
        self._cohort: ReplicaCohort | TorchFTCohort | None = None
        self._is_stopped = False
        threading.Thread(target=self._main, name="trainer", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped = True
        if self._cohort is not None:
            self._cohort.stop("its replica ends it")

    def _main(self) -> None:
        try:
            self._train()
        except Exception as error:
            self._report(error)
        else:
            self._report(None)

    def _report(self, error: Exception | None) -> None:
        """To the replica's actor. Where that is gone or ends this process, nobody waits for it."""
        try:
            if error is None:
                self._ended.send(self._place.rank)
            elif not self._is_stopped:
                self._ended.exception(error)
        except (RdmaError, SupervisionError) as lost:
            _log.info("replica %d, rank %d: %s", self._place.replica, self._place.rank, lost)

    def _train(self) -> None:
        """What is offered to peers stays until the process ends: one may still have to read it."""
        plan = self._assembly.plan
        cohort = self._cohort = self._coordinated(self._met_inside())
        training = plan.recipe(self._place, cohort)
        training.averaging.join()
        while cohort.total < plan.steps:
            loss = training.step()
            step = cohort.stepped()
            self._tell(Stepped(time.time(), self._place.replica, self._assembly.life, cohort.rounds, step, loss))
            training.averaging.step()
        cohort.leave()

    def _met_inside(self) -> Inside:
        """The replica's own groups: torch.distributed for the training, and one for what all have to do alike."""
        plan, (host, port) = self._assembly.plan, self._assembly.store
        store = TCPStore(host, port, is_master=False)
        rank, ranks = self._place.rank, self._place.ranks
        dist.init_process_group(plan.backend, store=store, rank=rank, world_size=ranks)
        name = f"ft/replica{self._place.replica}.{self._assembly.life}"
        group = Group.form(self._assembly.addresses, name=name, engine=self._engine, timeout=_JOIN_TIMEOUT)
        return Inside(group, plan.quorum_timeout + plan.sync_timeout)

    def _coordinated(self, inside: Inside) -> ReplicaCohort | TorchFTCohort:
        assembly, plan, place = self._assembly, self._assembly.plan, self._place
        if not isinstance(assembly.coordination, CoordinationId):
            from .torchft_cohort import TorchFTCohort

            return TorchFTCohort(
                plan, place, assembly.life, inside, self._engine, lighthouse=assembly.coordination.lighthouse,
                minimum=assembly.coordination.minimum, store=assembly.store, tell=self._tell,
            )  # fmt: skip
        quorum = Quorum(
            assembly.coordination, place, assembly.addresses, inside, self._engine,
            timeout=plan.sync_timeout, quorum_timeout=plan.quorum_timeout,
        )  # fmt: skip
        return ReplicaCohort(
            place, assembly.life, quorum, inside, assembly.lighthouse, self._engine,
            timeout=plan.sync_timeout, tell=self._tell,
        )  # fmt: skip

    def _tell(self, report: Report) -> None:
        if self._place.rank == 0 and self._assembly.watcher is not None:
            self._assembly.watcher.send(report)
