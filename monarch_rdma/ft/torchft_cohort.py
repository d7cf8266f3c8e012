"""Replicas that TorchFT brings together: its lighthouse says who is in, and its Manager, one in each trainer, forms our
process group of them and heals who is behind through our transport. TrainingPlan(coordination="torchft").

Who comes is let in at the end of a round: it reads the state of those that are there, takes part without a weight, and
is where they are. Needs package torchft (extra `ft`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torchft import Manager

from ..collectives.torchft import ReconfigurableProcessGroup
from ..errors import ConfigError, RdmaError
from ..rdma import Engine
from .cohort import Offering, gathered
from .exchange import ProcessGroupExchange, mean_of
from .quorum import Inside, Meeting, Standing, SyncFailed
from .replica_progress import ReplicaProgress, weighed
from .reports import Healed, Report
from .torchft_transport import OneSidedTransport
from .training import Place, TrainingPlan

__all__ = ["TorchFTCohort"]

_FAILURES = (RdmaError, RuntimeError)  # of a process group; the Manager makes another one of those that are left


class TorchFTCohort(ReplicaProgress):
    """One trainer's end. A Cohort; all ranks of a replica call the same in the same order."""

    may_overlap = False  # the Manager reads the state at the end of a round

    def __init__(
        self,
        plan: TrainingPlan,
        place: Place,
        life: int,
        inside: Inside,
        engine: Engine,
        *,
        lighthouse: str,
        minimum: int,
        store: tuple[str, int],
        tell: Callable[[Report], None] = lambda report: None,
    ) -> None:
        """`lighthouse`: TorchFT's, http://host:port. `minimum`: replicas of a round. `store`: host and port of the one
        in which the ranks of this replica find their Manager.
        """
        super().__init__(place, life, tell)
        self._plan, self._inside, self._engine = plan, inside, engine
        self._lighthouse, self._minimum, self._store = lighthouse, minimum, store
        self._pg = ReconfigurableProcessGroup(timedelta(seconds=plan.sync_timeout))
        self._manager: Manager | None = None
        self._arrival: Meeting | None = None  # the one that this replica came in by, where a round ends
        self._state: Callable[[], Any] = dict
        self._load: Callable[[Any], None] = lambda state: None

    def serve(self, state: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """As Cohort.serve."""
        self._state, self._load = state, load

    def join(self) -> bool:
        """As Cohort.join. Waits for the others to end their round; the first step after it is the last one of that."""
        self._manager = self._managed()
        while True:
            meeting = self._met()
            if not self._inside.all(meeting is not None and self._manager.errored() is None):
                self._fail(SyncFailed("a trainer of this replica has not got the state of the others"))
                self._commits()
            elif meeting is not None and meeting.is_founding:
                if self._commits():
                    self._is_fresh = False
                    return False
            else:
                self._arrival, self.ahead = meeting, -1
                return True

    def average(self, offering: Offering) -> Tensor | None:
        """As Cohort.average. A replica has the weight of the steps that its contribution spans."""
        begin = time.monotonic()
        while True:
            meeting, self._arrival = self._arrival or self._met(offering), None
            mean = self._mean(offering, meeting) if meeting is not None else None
            if self._commits() and meeting is not None:
                self._completed(meeting, time.monotonic() - begin)
                return mean

    def attend(self) -> None:
        """Who is left behind is healed at the end of the next round."""

    def boundary(self) -> None:
        """Who waits to come in is let in by the lighthouse."""

    def leave(self) -> None:
        """All is done."""
        self.close()

    def stop(self, reason: str) -> None:
        """Ends what this trainer waits for, from any thread."""
        self._pg.abort()

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.shutdown(wait=False)
            self._pg.shutdown()

    # --- TorchFT

    def _managed(self) -> Manager:
        """From its first moment on the lighthouse counts this replica among those that live, and others wait for it."""
        host, port = self._store
        return Manager(
            pg=self._pg, checkpoint_transport=OneSidedTransport(engine=self._engine), state_dict=self._whole_state,
            load_state_dict=self._load_whole_state, min_replica_size=self._minimum, use_async_quorum=False,
            rank=self._place.rank, world_size=self._place.ranks, store_addr=host, store_port=port, hostname=host,
            replica_id=f"replica{self._place.replica}", lighthouse_addr=self._lighthouse,
            timeout=timedelta(seconds=self._plan.sync_timeout),
            quorum_timeout=timedelta(seconds=self._plan.quorum_timeout),
        )  # fmt: skip

    def _met(self, offering: Offering | None = None) -> Meeting | None:
        """Who takes part in what comes now, after whoever is behind was healed; None where the group has failed."""
        manager = self._managing
        manager.start_quorum()
        base, span = (offering.base, offering.span) if offering is not None else (0, 0)
        standing = self._standing(self._steps, base, span if self._steps else 0)  # none where it was just healed
        row = [self._place.replica, *map(int, standing)]
        try:
            table = gathered(ProcessGroupExchange(self._pg), row)
        except _FAILURES as error:
            self._fail(error)
            return None
        standings = tuple(Standing(bool(fresh), *rest) for _, fresh, *rest in table)
        meeting = Meeting(tuple(row[0] for row in table), (), standings, self._pg.rank())
        if not meeting.is_of_one_base:
            raise ConfigError("replicas have different parameters after the same round: their recipes differ")
        return meeting

    def _mean(self, offering: Offering, meeting: Meeting) -> Tensor | None:
        try:
            exchange = ProcessGroupExchange(self._pg, meeting.replicas)
            return mean_of(exchange, offering.wire, weighed(offering, meeting))
        except _FAILURES as error:
            self._fail(error)
            return None

    @property
    def _managing(self) -> Manager:
        assert self._manager is not None, "join first"
        return self._manager

    def _fail(self, error: Exception) -> None:
        """This replica does not commit, and TorchFT makes another quorum."""
        self._managing.report_error(error)

    def _commits(self) -> bool:
        """All of its ranks, or none."""
        return bool(self._managing.should_commit())

    # --- state

    def _whole_state(self) -> dict[str, Any]:
        return {"training": self._state(), "progress": [self._is_fresh, self.rounds, self.total]}

    def _load_whole_state(self, state: dict[str, Any]) -> None:
        self._load(state["training"])
        self._is_fresh, self.rounds, self.total = state["progress"]
        self._steps = 0
        last = self._managing._checkpoint_transport.last
        self._tell(
            Healed(
                time.time(), self._place.replica, self._life, self.rounds, last.seconds, last.bytes, 1, last.verified
            )
        )
