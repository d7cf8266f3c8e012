"""Who averages with whom, from round to round, while members are lost and come.

A round is one averaging. All members make the same rounds in the same order, so that they are never more than one
apart: a member that is lost in the middle of a round may leave some that have its mean and some that have not. Whoever
notices ends the group for all; the survivors form another one, compare how far they are, and those that have the mean
send it to those that have not. Where nobody has it the round is made again, from the same contributions, of those that
are left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..collectives import Group
from ..errors import Cancelled, ConfigError, PeerLost, TransferTimeout
from .contribution import Contribution, Wire
from .exchange import Exchange, GroupExchange, ProcessGroupExchange, mean_of

__all__ = ["LOST", "Cohort", "FixedCohort", "GroupCohort", "Offering", "RegroupingCohort", "Standing", "StateReplaced"]

LOST = (PeerLost, TransferTimeout, Cancelled)  # how a group ends
_FORM = 30.0  # seconds for members that are all on their way into a group


class StateReplaced(Exception):
    """This member had fallen behind, and has taken over the state of another one: what it was about is void."""


@dataclass(frozen=True)
class Offering:
    """What a member brings into a round. `base`: a checksum of what it started from, which is the same on all."""

    wire: Wire
    contribution: Contribution
    base: int


class Cohort(Protocol):
    """What semi-synchronous training needs of its members."""

    rounds: int  # that this member has completed

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
        """The mean of this round, fp32, flat; None where this member's state was replaced by that of another."""
        ...

    def attend(self) -> None:
        """Between rounds, at each step: helps those that a lost member has left behind."""
        ...

    def boundary(self) -> None:
        """After the mean of a round was applied: whoever waits to come in is let in."""
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
        self.rounds = 0
        self._regroup = regroup
        self._exchange: Exchange
        self.use(members, names)

    def use(self, members: Exchange | Any, names: Sequence[Any] | None = None, *, rounds: int | None = None) -> None:
        """From now on these are the members. `rounds`: how many a newcomer has, which took over another's state."""
        is_exchange = hasattr(members, "all_to_all") and hasattr(members, "names")
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
                agree(self._exchange, self.rounds, offering, wants_others=False)
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


def agree(exchange: Exchange, rounds: int, offering: Offering, *, wants_others: bool) -> bool:
    """Whether any member wants other members. ConfigError, on all, where they are not about the same round."""
    mine = [rounds, offering.contribution.numel, offering.wire.mean_dtype.itemsize, offering.base, int(wants_others)]
    table = gathered(exchange, mine)
    for what, column in (("round", 0), ("number of elements", 1), ("quantisation", 2), ("parameters before", 3)):
        values = {name: row[column] for name, row in zip(exchange.names, table, strict=True)}
        if len(set(values.values())) > 1:
            raise ConfigError(f"members differ in the {what} of an averaging: {values}")
    return any(row[4] for row in table)


def gathered(exchange: Exchange, numbers: Sequence[int]) -> list[list[int]]:
    """Each member's numbers, by rank."""
    row = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    found: list[list[int]] = exchange.all_gather(row).view(torch.int64).tolist()
    return found


@dataclass(frozen=True)
class Standing:
    """How far a member is: FRESH has no state; PENDING waits for the mean of the round after `rounds`; AT_BOUNDARY has
    just applied the last one, and COMPUTING is on its way to the next.
    """

    FRESH, COMPUTING, PENDING, AT_BOUNDARY = range(4)

    rounds: int
    phase: int

    @property
    def numbers(self) -> list[int]:
        return [self.rounds, self.phase]


class RegroupingCohort(ABC):
    """What is the same wherever groups come from."""

    def __init__(self, *, timeout: float | None = None) -> None:
        """`timeout`: seconds that a round waits for the slowest member; None takes option collective_timeout."""
        self.rounds = 0
        self.names: tuple[Any, ...] = ()
        self._timeout = timeout
        self._phase = Standing.COMPUTING
        self._last: Tensor | None = None  # the mean of the last round, for those that did not get it
        self._exchange: Exchange | None = None  # of those that contribute; None: it has to be found out

    # --- for the training

    def average(self, offering: Offering) -> Tensor | None:
        """As Cohort.average. Members that are lost are left out; ConfigError where those that are left disagree."""
        self._phase = Standing.PENDING
        while True:
            try:
                mean = self._missed(offering) if self._exchange is None else None
                if mean is None:
                    assert self._exchange is not None
                    self._on_agreed(agree(self._exchange, self.rounds, offering, wants_others=self._wants_others()))
                    mean = mean_of(self._exchange, offering.wire, offering.contribution)
                    self.names = self._exchange.names
            except LOST as error:
                self._end(error)
                continue
            except StateReplaced:
                return None
            self._last, self.rounds, self._phase = mean, self.rounds + 1, Standing.AT_BOUNDARY
            self._confirm()
            return mean

    def _confirm(self) -> None:
        """Returns when all have the mean, so that this member may leave; or somebody was lost, who may have had it."""
        try:
            if self._exchange is not None:
                gathered(self._exchange, [self.rounds])
        except LOST as error:
            self._end(error)

    def attend(self) -> None:
        """As Cohort.attend."""
        self._phase = Standing.COMPUTING
        if self._exchange is not None and self._has_failed():
            self._end(PeerLost("a member was lost between rounds"))
        self._settle()

    def _settle(self) -> None:
        """Until there is a group again."""
        while self._exchange is None:
            try:
                self._missed(None)
            except LOST as error:
                self._end(error)
            except StateReplaced:
                return

    # --- where groups come from

    @abstractmethod
    def _missed(self, offering: Offering | None) -> Tensor | None:
        """Forms the group, and compares. The mean that this member has missed, if others have it."""

    @abstractmethod
    def _end(self, error: Exception) -> None:
        """The group is of no use any more: nobody shall wait in it."""

    @abstractmethod
    def _has_failed(self) -> bool: ...

    def _wants_others(self) -> bool:
        return False

    def _on_agreed(self, wants_others: bool) -> None:
        return None

    # --- comparing

    def _swapped(self, group: Group, standings: Sequence[Standing], offering: Offering | None) -> Tensor | None:
        """The mean of the last round goes from the first member that has it to those that wait for it."""
        top = max(standing.rounds for standing in standings)
        behind = [r for r, s in enumerate(standings) if s.phase == Standing.PENDING and s.rounds == top - 1]
        source = next(r for r, s in enumerate(standings) if s.rounds == top)
        if group.rank == source:
            for rank in behind:
                assert self._last is not None, "it has completed a round"
                group.send(self._last, rank, timeout=self._timeout)
        if group.rank not in behind:
            return None
        assert offering is not None, "it waits for the mean of what it offers"
        mean = torch.empty(offering.contribution.numel)
        group.receive(mean, source, timeout=self._timeout)
        return mean


class GroupCohort(RegroupingCohort):
    """The members of a Group: whoever is lost is left out from then on, and nobody comes."""

    def __init__(
        self, group: Group, names: Sequence[Any] | None = None, *, minimum: int = 1, timeout: float | None = None
    ) -> None:
        """`names`: of the members, by rank; sums are in their order. `minimum`: with fewer the training ends, by a
        PeerLost.
        """
        super().__init__(timeout=timeout)
        names = tuple(range(group.size)) if names is None else tuple(names)
        if len(set(names)) != group.size:
            raise ConfigError(f"names is {names!r}, but must be {group.size} different ones, one for each member")
        self.names = names
        self._minimum = minimum
        self._of_address = dict(zip(group.members, names, strict=True))
        self._group = group
        self._is_over = False
        self._exchange = GroupExchange(group, names, timeout=timeout)

    def serve(self, state: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Nobody comes."""

    def join(self) -> bool:
        return False

    def boundary(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        self._group.close()

    def _missed(self, offering: Offering | None) -> Tensor | None:
        if self._is_over:
            self._group = self._group.shrink(timeout=_FORM)
            self._is_over = False
            if self._group.size < self._minimum:
                raise ConfigError(f"{self._group.size} members are left, but minimum is {self._minimum}")
        names = [self._of_address[address] for address in self._group.members]
        exchange = GroupExchange(self._group, names, timeout=self._timeout)
        mine = Standing(self.rounds, self._phase)
        mean = self._swapped(self._group, [Standing(*row) for row in gathered(exchange, mine.numbers)], offering)
        self._exchange = exchange
        return mean

    def _end(self, error: Exception) -> None:
        if self._is_over:
            raise error  # no group can be formed any more
        self._is_over, self._exchange = True, None

    def _has_failed(self) -> bool:
        return self._group.failed_rank is not None
