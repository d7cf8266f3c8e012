"""Who takes part in a synchronisation, on our own membership: replicas that come, go and fail, and the sums over them.

A member of the membership is a replica. Its trainer of rank 0 speaks for it; what that one decides, all of its ranks
do. Rank k of each replica forms a group with rank k of the others, epoch after epoch.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from ..actor.future import Future
from ..actor.membership import CoordinationId, Membership
from ..collectives.group import Group
from ..errors import Cancelled, RdmaError, TransferTimeout
from ..rdma import Engine
from ..supervision.chaos import moment
from ..supervision.membership import Activated, Epoch
from .training import Place

__all__ = ["Inside", "Meeting", "Quorum", "Standing", "SyncFailed"]

T = TypeVar("T")


class SyncFailed(RdmaError):
    """A synchronisation has failed on this replica, and nothing was changed. Another one follows, with who is left."""


class Inside:
    """The trainers of one replica, among each other: what all of them have to do alike."""

    def __init__(self, group: Group, timeout: float) -> None:
        self._group = group
        self._timeout = timeout

    def share(self, value: Any) -> Any:
        """That of rank 0, on all ranks."""
        if self._group.size == 1:
            return value
        data = pickle.dumps(value) if self._group.rank == 0 else b""
        length = torch.tensor([len(data)])
        self._group.broadcast(length, 0, timeout=self._timeout)
        buffer = torch.frombuffer(bytearray(data.ljust(int(length))), dtype=torch.uint8)
        self._group.broadcast(buffer, 0, timeout=self._timeout)
        return pickle.loads(buffer.numpy().tobytes())

    def all(self, is_good: bool) -> bool:
        """Whether it is on all ranks."""
        good = torch.tensor([int(is_good)])
        if self._group.size > 1:
            self._group.all_reduce(good, op="min", timeout=self._timeout)
        return bool(good)

    def close(self) -> None:
        self._group.close()


class Standing(NamedTuple):
    """What a replica brings to a meeting. `is_fresh`: its state is its own beginning, that nobody else has. `steps`:
    since its last synchronisation. `total`: of all replicas, up to that. `base`: a checksum of what they started from.
    `span`: steps that are in what it brings in, which may be of a fragment that is older than the last synchronisation.
    """

    is_fresh: bool
    rounds: int
    steps: int
    total: int
    base: int = 0
    span: int = 0

    @property
    def order(self) -> tuple[bool, int]:
        """Who is further has the state that counts."""
        return not self.is_fresh, self.rounds


@dataclass(frozen=True)
class Meeting:
    """Replicas that are about to do the same. `replicas`: their numbers, by rank in the group; `addresses`: of the
    trainers of this rank.
    """

    replicas: tuple[int, ...]
    addresses: tuple[str, ...]
    standings: tuple[Standing, ...]
    rank: int

    @property
    def is_founding(self) -> bool:
        """All are fresh: the first one's state counts, and there is nothing to be summed."""
        return all(standing.is_fresh for standing in self.standings)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Ranks that have the state that counts."""
        if self.is_founding:
            return (0,)
        most = max(standing.order for standing in self.standings)
        return tuple(rank for rank, standing in enumerate(self.standings) if standing.order == most)

    @property
    def is_behind(self) -> bool:
        return self.rank not in self.ahead

    @property
    def rounds(self) -> int:
        """Of the state that counts."""
        return self.standings[self.ahead[0]].rounds

    @property
    def is_of_one_base(self) -> bool:
        """Whether those whose steps count have made them from the same parameters."""
        return len({self.standings[rank].base for rank, steps in enumerate(self.contributed) if steps}) <= 1

    @property
    def contributed(self) -> tuple[int, ...]:
        """Steps of each that count: what is done from another state is lost."""
        return self._counted(lambda standing: standing.steps)

    @property
    def spans(self) -> tuple[int, ...]:
        """Steps that are in what each brings in, and count."""
        return self._counted(lambda standing: standing.span)

    def _counted(self, steps_of: Callable[[Standing], int]) -> tuple[int, ...]:
        """Those of the replicas that are ahead, whose steps count; 0 of the others."""
        ahead = self.ahead
        return tuple(steps_of(standing) if rank in ahead else 0 for rank, standing in enumerate(self.standings))

    @property
    def weight(self) -> float:
        """Of this replica in the mean: 1 where what all bring in spans as many steps."""
        total = sum(self.spans)
        return self.spans[self.rank] * len(self.replicas) / total if total else 1.0


class Quorum:
    """One trainer's part. Its ranks call the same methods in the same order."""

    def __init__(
        self,
        coordination: CoordinationId,
        place: Place,
        addresses: Sequence[str],
        inside: Inside,
        engine: Engine,
        *,
        timeout: float,
        quorum_timeout: float,
    ) -> None:
        """`addresses`: of the engines of this replica's trainers. `timeout`: of a sum; `quorum_timeout`: until others
        have come to the end of their round, or enough of them are there.
        """
        self._coordination = coordination
        self._place = place
        self._addresses = tuple(addresses)
        self._inside = inside
        self._engine = engine
        self._timeout, self._quorum_timeout = timeout, quorum_timeout
        self._membership: Membership | None = None
        self._entering: Future[Activated] | None = None
        self._epoch: Epoch | None = None
        self._group: Group | None = None
        self._broken = ""  # why the group is of no use any more
        self._meeting: Meeting | None = None
        self._is_closed = False

    def come(self) -> None:
        """Asks to be taken in. Others do so at the end of their round; work goes on meanwhile."""
        if self._place.rank != 0:
            return
        if self._membership is None:
            name, about = f"replica{self._place.replica}", (self._place.replica, self._addresses)
            self._membership = Membership(self._coordination, name, metadata=about)
        else:
            self._give_up_epoch(self._membership)
        self._entering = self._membership.enter()

    def meet(self, standing: Standing) -> Meeting:
        """Who takes part in what comes now, and where each of them stands. Returns on all of them, or none.

        Raises TransferTimeout where the others do not come, SupervisionError where this one is not taken in any more.
        """
        while True:
            epoch = self._inside.share(self._led() if self._place.rank == 0 else None)
            problem = ""
            try:
                if epoch is not None:
                    self._form(epoch)
                meeting = self._exchanged(standing)
            except RdmaError as error:
                problem = str(error) or type(error).__name__
            if self._inside.all(not problem):
                self._meeting = meeting
                return meeting
            self.give_up(problem or "another trainer of this replica could not go on")

    def run(self, exchange: Callable[[Group, Meeting], T]) -> T:
        """Does something in the group of the last meeting, on all ranks of this replica or on none. SyncFailed."""
        assert self._meeting is not None and self._group is not None, "meet first"
        moment("synchronisation")
        problem = ""
        try:
            result = exchange(self._group, self._meeting)
        except RdmaError as error:
            problem = str(error) or type(error).__name__
        if not self._inside.all(not problem):
            self.give_up(problem or "another trainer of this replica could not go on")
            raise SyncFailed(f"the synchronisation has failed: {self._broken}")
        return result

    def give_up(self, reason: str) -> None:
        """The next meeting is in another epoch; whoever waits for this one in the old one goes there too."""
        self._broken = reason
        if self._group is not None:
            self._group.abort(reason)

    def leave(self, reason: str) -> None:
        if self._membership is not None:
            self._membership.leave(reason)
        self.close()

    def close(self) -> None:
        """Ends what this trainer waits for, from any thread."""
        self._is_closed = True
        group = self._group
        if group is not None:
            group.abort("a trainer ends")

    # --- inside

    def _led(self) -> Epoch | None:
        """For rank 0: the epoch to go on in, None for the one that it is in. Those of all replicas decide alike."""
        assert self._membership is not None, "come first"
        if self._group is not None and not self._broken and self._entering is None:
            assert self._epoch is not None
            changes = torch.tensor([int(not self._membership.is_in(self._epoch))])
            try:
                self._group.all_reduce(changes, op="max", timeout=self._timeout)
            except RdmaError as error:
                self._broken = str(error) or type(error).__name__
            if not self._broken and not changes:
                return None
        if self._entering is None:
            self._give_up_epoch(self._membership)
        return self._entered(self._membership)

    def _give_up_epoch(self, membership: Membership) -> None:
        """The one that this replica was in, where it still is: so that another one follows."""
        current = membership.epoch
        if self._epoch is not None and current is not None and current.id == self._epoch.id:
            membership.give_up(self._broken or "a replica has come or is lost")

    def _entered(self, membership: Membership) -> Epoch:
        entering = self._entering if self._entering is not None else membership.enter()
        self._entering = None
        deadline = time.monotonic() + self._quorum_timeout
        while True:
            if self._is_closed:
                raise Cancelled("the trainer ends", operation="meet")
            try:
                return entering.get(0.5).epoch
            except TimeoutError as error:
                if entering.done():
                    raise
                if time.monotonic() > deadline:
                    why = f"no epoch has begun within {self._quorum_timeout:g} s"
                    raise TransferTimeout(why, operation="meet") from error

    def _form(self, epoch: Epoch) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._epoch, self._broken = epoch, ""
        members = [addresses[self._place.rank] for _, addresses in epoch.metadata]
        name = f"ft/{epoch.id.term}.{epoch.id.number}/{self._place.rank}"
        self._group = Group.form(members, name=name, engine=self._engine, timeout=self._timeout)
        if self._is_closed:
            self._group.close()

    def _exchanged(self, standing: Standing) -> Meeting:
        assert self._group is not None and self._epoch is not None
        mine = torch.tensor([int(value) for value in standing])
        all_of_them = [torch.empty_like(mine) for _ in range(self._group.size)]
        self._group.all_gather(all_of_them, mine, timeout=self._timeout)
        standings = [Standing(bool(fresh), *rest) for fresh, *rest in (each.tolist() for each in all_of_them)]
        replicas = tuple(number for number, _ in self._epoch.metadata)
        return Meeting(replicas, self._group.members, tuple(standings), self._group.rank)
