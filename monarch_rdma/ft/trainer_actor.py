"""One trainer of a replica: trains a round, meets the others, heals where it is behind, synchronises, and again."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import monarch_rdma.collectives  # noqa: F401  registers the backend

from ..actor import Actor, ActorMesh, Port, current_rank, endpoint
from ..actor.membership import CoordinationId
from ..collectives.group import Group
from ..errors import RdmaError
from ..rdma import default_engine
from .peer_state import PeerState, fetch_state
from .quorum import Inside, Meeting, Quorum, Standing, SyncFailed
from .reports import Healed, Report, Stepped, Synchronised
from .training import Place, Training, TrainingPlan

__all__ = ["Assembly", "TrainerActor"]

_HEAL_TIMEOUT = 60.0  # seconds
_JOIN_TIMEOUT = 60.0
_ASK_TIMEOUT = 10.0
_ARRIVALS = 3  # times that state is looked for on arrival; those that train may just be changing
_log = logging.getLogger("monarch_rdma.ft")


@dataclass(frozen=True)
class Assembly:
    """What the trainers of one replica are told to begin with. `life`: counts the trainers of this replica."""

    plan: TrainingPlan
    replica: int
    life: int
    lighthouse: ActorMesh[Any]
    coordination: CoordinationId
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
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
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
        self._plan = assembly.plan
        self._engine = default_engine()
        self._quorum: Quorum | None = None
        self._rounds = self._total = 0
        self._is_fresh = True
        self._is_stopped = False
        threading.Thread(target=self._main, name="trainer", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped = True
        if self._quorum is not None:
            self._quorum.leave("its replica ends it")

    def _main(self) -> None:
        try:
            self._train()
        except Exception as error:
            if not self._is_stopped:
                self._ended.exception(error)
        else:
            self._ended.send(self._place.rank)

    def _train(self) -> None:
        self._inside = self._met_inside()
        self._training: Training = self._plan.recipe(self._place)
        self._is_fresh = not self._healed_on_arrival()
        self._offer = PeerState(
            self._state(), self._version, replica=self._place.replica, replicas=self._plan.replicas, engine=self._engine
        )
        quorum = self._quorum = Quorum(
            self._assembly.coordination, self._place, self._assembly.addresses, self._inside, self._engine,
            timeout=self._plan.sync_timeout, quorum_timeout=self._plan.quorum_timeout,
        )  # fmt: skip
        quorum.come()
        is_known = False  # whether the others have met this one
        while self._total < self._plan.steps:
            steps = 0 if self._is_fresh else self._round(quorum, is_known)
            self._synchronise(quorum, steps)
            is_known = True
        quorum.leave("all is done")
        self._offer.close()
        dist.destroy_process_group()

    @property
    def _version(self) -> int:
        """Of the state that is offered; 0 is this one's own beginning, which counts only where there is nothing else."""
        return 0 if self._is_fresh else self._rounds + 1

    def _met_inside(self) -> Inside:
        """The replica's own groups: torch.distributed for the training, and one for what all have to do alike."""
        host, port = self._assembly.store
        store = dist.TCPStore(host, port, is_master=False)
        rank, ranks = self._place.rank, self._place.ranks
        dist.init_process_group(self._plan.backend, store=store, rank=rank, world_size=ranks)
        name = f"ft/replica{self._place.replica}.{self._assembly.life}"
        group = Group.form(self._assembly.addresses, name=name, engine=self._engine, timeout=_JOIN_TIMEOUT)
        return Inside(group, self._plan.quorum_timeout + self._plan.sync_timeout)

    # --- a round

    def _round(self, quorum: Quorum, is_known: bool) -> int:
        """Steps until it is time to synchronise: a round, or until those who do not know this one yet have ended theirs."""
        for step in range(1, self._plan.sync_every + 1):
            loss = self._training.step()
            self._tell(Stepped(time.time(), self._place.replica, self._assembly.life, self._rounds, step, loss))
            if not is_known and quorum.is_awaited():
                return step
        return self._plan.sync_every

    def _synchronise(self, quorum: Quorum, steps: int) -> None:
        begin = time.monotonic()
        while True:
            meeting = quorum.meet(Standing(self._is_fresh, self._rounds, steps, self._total))
            if meeting.is_behind:
                if not self._has_healed([meeting.addresses[rank] for rank in meeting.ahead], at_least=0):
                    quorum.give_up("the state of the others could not be read")
                    continue
                steps = 0
            if meeting.is_founding:
                break
            try:
                self._training.sync(quorum.average)
            except SyncFailed:
                continue
            self._rounds += 1
            self._total += sum(meeting.contributed)
            self._tell_synchronised(meeting, time.monotonic() - begin)
            break
        self._is_fresh = False
        self._offer.renew(self._state(), self._version)

    # --- state

    def _state(self) -> dict[str, Any]:
        return {"training": self._training.state_dict(), "total": self._total}

    def _healed_on_arrival(self) -> bool:
        """Reads the state of those who train already, before the first step. False where nobody does."""
        for _ in range(_ARRIVALS):
            epoch = self._assembly.lighthouse.epoch.options(timeout=_ASK_TIMEOUT).call_one().get()
            others = [] if epoch is None else [each for each in epoch.metadata if each[0] != self._place.replica]
            if not self._inside.share(len(others)):
                return False
            if self._has_healed([addresses[self._place.rank] for _, addresses in others], at_least=1):
                return True
        return False

    def _has_healed(self, peers: list[str], *, at_least: int) -> bool:
        """All ranks from the same synchronisation, or none of them."""
        fetched = None
        try:
            fetched = fetch_state(self._state(), peers, self._engine, at_least=at_least, timeout=_HEAL_TIMEOUT)
        except RdmaError as error:
            _log.info("replica %d, rank %d: %s", self._place.replica, self._place.rank, error)
        version = -1 if fetched is None else fetched.version
        if not self._inside.all(self._inside.share(version) == version >= 0):
            return False
        assert fetched is not None
        self._training.load_state_dict(fetched.state["training"])
        self._rounds, self._total = max(0, fetched.version - 1), fetched.state["total"]
        self._tell(
            Healed(
                time.time(), self._place.replica, self._assembly.life, self._rounds, fetched.seconds, fetched.bytes,
                fetched.peers,
            )
        )  # fmt: skip
        return True

    # --- whoever watches

    def _tell_synchronised(self, meeting: Meeting, seconds: float) -> None:
        self._tell(
            Synchronised(
                time.time(), self._place.replica, self._assembly.life, self._rounds, meeting.replicas,
                meeting.contributed, self._total, seconds,
            )
        )  # fmt: skip

    def _tell(self, report: Report) -> None:
        if self._place.rank == 0 and self._assembly.watcher is not None:
            self._assembly.watcher.send(report)
