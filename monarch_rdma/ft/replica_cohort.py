"""A cohort of replicas that come and go, each of one or more trainers: what semi-synchronous training sees of them.

Whoever comes reads the state of the others before its first step, while they train on, and is at the same step of the
round as they are. Whoever missed the end of a round reads it as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..actor import ActorMesh
from ..collectives.group import Group
from ..errors import ConfigError, RdmaError
from ..rdma import Engine
from .cohort import Offering
from .exchange import GroupExchange, mean_of
from .healing import FetchedState
from .peer_state import PeerState, progress_of, state_of_peers
from .quorum import Inside, Meeting, Quorum, SyncFailed
from .replica_progress import ReplicaProgress, weighed
from .reports import Healed, Report
from .training import Place

__all__ = ["ReplicaCohort"]

_HEAL_TIMEOUT = 60.0  # seconds
_ASK_TIMEOUT = 10.0
_ARRIVALS = 3  # times that state is looked for on arrival: those that train may just be changing
_log = logging.getLogger("monarch_rdma.ft")


class ReplicaCohort(ReplicaProgress):
    """One trainer's end. A Cohort; all ranks of a replica call the same in the same order."""

    def __init__(
        self,
        place: Place,
        life: int,
        quorum: Quorum,
        inside: Inside,
        lighthouse: ActorMesh[Any],
        engine: Engine,
        *,
        timeout: float,
        tell: Callable[[Report], None] = lambda report: None,
    ) -> None:
        super().__init__(place, life, tell)
        self._quorum, self._inside, self._lighthouse, self._engine = quorum, inside, lighthouse, engine
        self._timeout = timeout
        self._offer: PeerState | None = None
        self._round: tuple[Meeting, float] | None = None  # averaged, and how long that took
        self._found: FetchedState | None = None  # in its stead
        self._state: Callable[[], Any] = dict
        self._load: Callable[[Any], None] = lambda state: None

    # --- for the training

    def serve(self, state: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """As Cohort.serve."""
        self._state, self._load = state, load

    def join(self) -> bool:
        """As Cohort.join. Who comes while others train does not wait for them, and begins where they are: `ahead`."""
        while True:
            if self._has_healed_on_arrival():
                self._offer_state()
                self._quorum.come()
                return True
            if self._offer is None:
                self._offer_state()  # its own beginning, which others may have to take over
            self._quorum.come()
            meeting = self._quorum.meet(self._standing())
            if meeting.is_founding and (not meeting.is_behind or self._has_healed(_addresses(meeting), at_least=0)):
                self._is_fresh, self.ahead = False, 0
                self._offer_state()
                return meeting.is_behind
            self._quorum.give_up("it begins with the state of the others")

    def stepped(self) -> int:
        """As ReplicaProgress.stepped; who comes may look it up."""
        steps = super().stepped()
        if self._offer is not None:
            self._offer.set_progress(steps)
        return steps

    def average(self, offering: Offering) -> Tensor | None:
        """As Cohort.average. A replica has the weight of the steps that its contribution spans."""
        begin = time.monotonic()
        if self._offer is not None:  # who comes now makes one step, and is at the end of this round like this replica
            self._offer.set_progress(max(0, self._steps - 1))
        while True:
            meeting = self._quorum.meet(self._standing(offering.steps, offering.base, offering.span))
            if not meeting.is_of_one_base:
                raise ConfigError("replicas have different parameters after the same round: their recipes differ")
            try:
                mean = self._quorum.run(partial(self._mean, offering))
            except SyncFailed:
                continue
            if not meeting.is_behind:
                self._round = meeting, time.monotonic() - begin
                return mean
            self._found = self._fetched(_addresses(meeting), at_least=meeting.rounds + 2, waits=True)
            if self._found is not None:
                self.names = meeting.replicas
                return None
            self._quorum.give_up("the state of the others could not be read")

    def attend(self) -> None:
        """Who is left behind reads what it has missed from the others, when it meets them again."""

    def boundary(self) -> None:
        """As Cohort.boundary. What the others may read is renewed."""
        if self._found is not None:
            self._take_over(self._found)
        elif self._round is not None:
            self._completed(*self._round)
        self._round = self._found = None
        self._offer_state()

    def leave(self) -> None:
        """All is done. What is offered stays: one may still have to read it."""
        self._quorum.leave("all is done")

    def stop(self, reason: str) -> None:
        """Ends what this trainer waits for, from any thread."""
        self._quorum.leave(reason)

    def close(self) -> None:
        self.leave()
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    # --- a round

    def _mean(self, offering: Offering, group: Group, meeting: Meeting) -> Tensor:
        exchange = GroupExchange(group, meeting.replicas, timeout=self._timeout)
        return mean_of(exchange, offering.wire, weighed(offering, meeting))

    # --- state

    def _offer_state(self) -> None:
        """Version 0 is what this replica begins with, which counts only where there is nothing else."""
        state = {"training": self._state(), "total": self.total}
        version = 0 if self._is_fresh else self.rounds + 1
        if self._offer is None:
            self._offer = PeerState(state, version, replica=self._place.replica, engine=self._engine)
        else:
            self._offer.renew(state, version)

    def _has_healed_on_arrival(self) -> bool:
        """Reads the state of those who train already, before the first step. False where nobody does."""
        for _ in range(_ARRIVALS):
            epoch = self._lighthouse.epoch.options(timeout=_ASK_TIMEOUT).call_one().get()
            others = [] if epoch is None else [each for each in epoch.metadata if each[0] != self._place.replica]
            if not self._inside.share(len(others)):
                return False
            peers = [addresses[self._place.rank] for _, addresses in others]
            if self._has_healed(peers, at_least=1):
                self.ahead = self._inside.share(progress_of(peers, self._engine, self.rounds + 1))
                if self.ahead >= 0:
                    return True
        return False

    def _has_healed(self, peers: Sequence[str], *, at_least: int) -> bool:
        """Whether the state of these was read and taken over."""
        fetched = self._fetched(peers, at_least=at_least)
        if fetched is not None:
            self._take_over(fetched)
        return fetched is not None

    def _fetched(self, peers: Sequence[str], *, at_least: int, waits: bool = False) -> FetchedState | None:
        """All ranks from the same round, or none of them."""
        fetched = None
        like = {"training": self._state(), "total": 0}
        try:
            fetched = state_of_peers(like, peers, self._engine, at_least=at_least, waits=waits, timeout=_HEAL_TIMEOUT)
        except RdmaError as error:
            _log.info("replica %d, rank %d: %s", self._place.replica, self._place.rank, error)
        version = -1 if fetched is None else fetched.version
        return fetched if self._inside.all(self._inside.share(version) == version >= 0) else None

    def _take_over(self, fetched: FetchedState) -> None:
        self._load(fetched.state["training"])
        self.rounds, self.total = max(0, fetched.version - 1), fetched.state["total"]
        self._is_fresh = fetched.version == 0
        self._steps = 0
        self._tell(
            Healed(
                time.time(), self._place.replica, self._life, self.rounds, fetched.seconds, fetched.bytes,
                len(fetched.sources), fetched.verified,
            )
        )  # fmt: skip


def _addresses(meeting: Meeting) -> list[str]:
    """Of those whose state counts."""
    return [meeting.addresses[rank] for rank in meeting.ahead]
