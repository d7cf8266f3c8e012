"""Who averages with whom, from round to round, while members are lost and come.

A round is one averaging. All members make the same rounds in the same order, so that they are never more than one
apart: a member that is lost in the middle of a round may leave some that have its mean and some that have not. Whoever
notices ends the group for all; the survivors form another one, compare how far they are, and those that have the mean
send it to those that have not. Where nobody has it the round is made again, from the same contributions, of those that
are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..collectives import Group
from ..errors import Cancelled, ConfigError, PeerLost, TransferTimeout
from .contribution import Contribution, Wire
from .exchange import Exchange, GroupExchange, ProcessGroupExchange, mean_of

__all__ = ["Cohort", "FixedCohort", "GroupCohort", "Offering"]

LOST = (PeerLost, TransferTimeout, Cancelled)  # how a group ends
_FORM = 30.0  # seconds for members that are all on their way into a group


@dataclass(frozen=True)
class Offering:
    """What a member brings into a round. `base`: a checksum of what it started from, which is the same on all. `steps`:
    that it has made since it brought in something. `span`: steps that are in this contribution, since its parameters
    were the shared ones, which give it its weight where members come and go.
    """

    wire: Wire
    contribution: Contribution
    base: int
    steps: int
    span: int


class Cohort(Protocol):
    """What semi-synchronous training needs of its members."""

    rounds: int  # that this member has completed
    ahead: int  # steps by which a newcomer goes on from the state that it has taken over: others have made them

    @property
    def names(self) -> tuple[Any, ...]:
        """Of those that contributed to the last round."""
        ...

    def serve(self, state: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """How a newcomer gets the state of the training, and how this member takes over that of another one."""
        ...

    def join(self) -> bool:
        """Before the first step. Whether a state was taken over; else all begin together."""
        ...

    def average(self, offering: Offering) -> Tensor | None:
        """The mean of this round, fp32, flat; None where another's state takes the place of this member's. Steps may go
        on meanwhile, in another thread.
        """
        ...

    def attend(self) -> None:
        """Between rounds, at each step: helps those that a lost member has left behind."""
        ...

    def boundary(self) -> None:
        """After the mean of a round was applied, or there was none: the state of another is taken over then. Whoever
        waits to come in is let in.
        """
        ...

    def close(self) -> None: ...


class FixedCohort:
    """The members of an exchange, or of a process group of torch.distributed or TorchFT, which whoever made it replaces
    by another one, with `use`, between two rounds.
    """

    def __init__(
        self,
        members: Exchange | Any,
        names: Sequence[Any] | None = None,
        *,
        regroup: Callable[[Exception], Any] | None = None,
    ) -> None:
        """`names`: of the ranks of a process group. `regroup`: called when an averaging fails; returns other members,
        as for `use`, among whom the round is made again, or raises. None: the failure is raised.
        """
        if regroup is not None and not callable(regroup):
            raise ConfigError(f"regroup is {regroup!r:.200}, but must be a function of the failure, or None")
        self.rounds = self.ahead = 0
        self._regroup = regroup
        self._exchange: Exchange
        self.use(members, names)

    def use(self, members: Exchange | Any, names: Sequence[Any] | None = None, *, rounds: int | None = None) -> None:
        """From now on these are the members. `rounds`: how many a newcomer has, which took over another's state."""
        is_exchange = hasattr(members, "all_to_all") and hasattr(members, "names")
        if not is_exchange and not hasattr(members, "size"):
            raise ConfigError(f"members is {members!r:.200}, but must be a process group or an Exchange")
        self._exchange = members if is_exchange else ProcessGroupExchange(members, names)
        self.rounds = self.rounds if rounds is None else rounds

    @property
    def names(self) -> tuple[Any, ...]:
        return self._exchange.names

    def serve(self, state: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Nobody comes."""

    def join(self) -> bool:
        return False

    def average(self, offering: Offering) -> Tensor | None:
        while True:
            try:
                agree(self._exchange, self.rounds, offering)
                mean = mean_of(self._exchange, offering.wire, offering.contribution)
                break
            except ConfigError:
                raise
            except (*LOST, RuntimeError) as error:  # the latter is what torch's process groups raise
                if self._regroup is None:
                    raise
                self.use(self._regroup(error))
        self.rounds += 1
        return mean

    def attend(self) -> None:
        """Nobody is left behind."""

    def boundary(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """The group is its maker's."""


def agree(exchange: Exchange, rounds: int, offering: Offering) -> None:
    """ConfigError, on all members, where they are not about the same round."""
    mine = [rounds, offering.contribution.numel, offering.wire.mean_dtype.itemsize, offering.base]
    table = gathered(exchange, mine)
    for column, what in enumerate(("round", "number of elements", "quantisation", "parameters before")):
        values = {name: row[column] for name, row in zip(exchange.names, table, strict=True)}
        if len(set(values.values())) > 1:
            raise ConfigError(f"members differ in the {what} of an averaging: {values}")


def gathered(exchange: Exchange, numbers: Sequence[int]) -> list[list[int]]:
    """Each member's numbers, by rank."""
    row = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    found: list[list[int]] = exchange.all_gather(row).view(torch.int64).tolist()
    return found


class GroupCohort:
    """The members of a Group: whoever is lost is left out from then on, and nobody comes."""

    def __init__(
        self, group: Group, names: Sequence[Any] | None = None, *, minimum: int = 1, timeout: float | None = None
    ) -> None:
        """`names`: of the members, by rank; sums are in their order. `minimum`: with fewer the training ends, by a
        PeerLost. `timeout`: seconds that a round waits for the slowest member; None takes option collective_timeout.
        """
        if not isinstance(group, Group):
            raise ConfigError(f"group is {group!r:.200}, but must be a Group")
        names = tuple(range(group.size)) if names is None else tuple(names)
        if len(set(names)) != group.size:
            raise ConfigError(f"names is {names!r}, but must be {group.size} different ones, one for each member")
        self.rounds = self.ahead = 0
        self.names: tuple[Any, ...] = names
        self._of_address = dict(zip(group.members, names, strict=True))
        self._minimum, self._timeout = minimum, timeout
        self._group = group
        self._exchange: GroupExchange | None = GroupExchange(group, names, timeout=timeout)  # None: it has failed
        self._is_waiting = False  # for the mean of a round
        self._last: Tensor | None = None  # the mean of the last round, for those that did not get it

    def serve(self, state: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Nobody comes."""

    def join(self) -> bool:
        return False

    def boundary(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        self._group.close()

    def average(self, offering: Offering) -> Tensor | None:
        """As Cohort.average. Members that are lost are left out; ConfigError where those that are left disagree."""
        self._is_waiting = True
        mean: Tensor | None = None
        while mean is None:
            if self._exchange is None:
                mean = self._regrouped(offering)
                continue
            self.names = self._exchange.names
            try:
                agree(self._exchange, self.rounds, offering)
                mean = mean_of(self._exchange, offering.wire, offering.contribution)
            except LOST:
                self._exchange = None
        self._last, self.rounds, self._is_waiting = mean, self.rounds + 1, False
        self._confirm()
        return mean

    def _confirm(self) -> None:
        """Returns when all have the mean, so that this member may leave; or somebody was lost, who may have had it."""
        try:
            if self._exchange is not None:
                gathered(self._exchange, [self.rounds])
        except LOST:
            self._exchange = None

    def attend(self) -> None:
        """As Cohort.attend."""
        if self._group.failed_rank is not None:
            self._exchange = None
        while self._exchange is None:
            self._regrouped(None)

    def _regrouped(self, offering: Offering | None) -> Tensor | None:
        """Forms a group of those that are left, and compares. The mean that this member has missed, if others have it;
        `_exchange` is None again where somebody was lost meanwhile.
        """
        self._group = self._group.shrink(timeout=_FORM)
        if self._group.size < self._minimum:
            raise PeerLost(f"{self._group.size} members are left, but minimum is {self._minimum}")
        names = [self._of_address[address] for address in self._group.members]
        exchange = GroupExchange(self._group, names, timeout=self._timeout)
        try:
            mean = self._swapped(gathered(exchange, [self.rounds, int(self._is_waiting)]), offering)
        except LOST:
            return None
        self._exchange = exchange
        return mean

    def _swapped(self, standings: Sequence[Sequence[int]], offering: Offering | None) -> Tensor | None:
        """The mean of the last round goes from the first member that has it to those that wait for it. `standings`: of
        each, how many rounds it has, and whether it waits.
        """
        top = max(rounds for rounds, _ in standings)
        behind = [rank for rank, (rounds, is_waiting) in enumerate(standings) if is_waiting and rounds == top - 1]
        source = next(rank for rank, (rounds, _) in enumerate(standings) if rounds == top)
        if self._group.rank == source:
            for rank in behind:
                assert self._last is not None, "it has completed a round"
                self._group.send(self._last, rank, timeout=self._timeout)
        if self._group.rank not in behind:
            return None
        assert offering is not None, "it waits for the mean of what it offers"
        mean = torch.empty(offering.contribution.numel)
        self._group.receive(mean, source, timeout=self._timeout)
        return mean
