"""A member: which epoch it may work in, for how long, and what its user has to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError
from .epoch import Departure, Epoch, EpochId, MemberId, check_integer, check_number
from .messages import (
    Activated,
    Agree,
    Asked,
    Dropped,
    GiveUp,
    Leave,
    Left,
    Lost,
    MemberEvent,
    MemberOutput,
    Notice,
    Refused,
    Report,
    Resumed,
    Suspended,
    Tick,
    Withdrawn,
)

__all__ = ["Member"]

_NONE = EpochId(0, 0)


class Member:
    """One member's side. Not thread-safe.

    `heartbeat`: seconds between its reports, or less where the coordinator's timeout asks for it.
    `metadata`: plain data that the others find in the next epoch; may be set at any time.
    """

    def __init__(self, me: MemberId, *, metadata: Any = None, heartbeat: float = 0.5, now: float) -> None:
        check_integer("incarnation", me.incarnation, 1)
        check_number("heartbeat", heartbeat, 0, above=True)
        self.me = me
        self.metadata = metadata
        self._heartbeat = heartbeat
        self._now = now
        self._term = 0
        self._revision = 0
        self._is_recovering = False  # the coordinator
        self._heard_until = -math.inf  # with the lease: its answers count this long
        self._epoch: Epoch | None = None
        self._lease_until = -math.inf
        self._is_suspended = False
        self._before: Epoch | None = None  # the one that it was in last
        self._asked: Epoch | None = None
        self._newest_asked = _NONE
        self._agreed: EpochId | None = None
        self._past = _NONE  # it never works in this epoch or an older one again
        self._told: set[MemberId] = set()  # departed from the epoch, as its user knows
        self._reason = ""
        self._left_at: float | None = None  # the report that says so
        self._leave_by = math.inf
        self._is_over = False
        self._sent_at = -math.inf
        self._report_at = now
        self._outputs: list[MemberOutput] = []

    def epoch(self, now: float) -> Epoch | None:
        """The epoch that it may work in at this moment, if any."""
        return self._epoch if now < self._lease_until else None

    @property
    def wake_at(self) -> float | None:
        """When a Tick is due, on the clock of `handle`'s `now`; None when it is over."""
        if self._is_over:
            return None
        ends = self._lease_until if self._epoch is not None and not self._is_suspended else math.inf
        return min(self._report_at, ends, self._leave_by)

    def handle(self, event: MemberEvent, now: float) -> list[MemberOutput]:
        """What follows. `now`: seconds on a clock that never goes back.

        Raises:
            ConfigError: an Agree to what was never proposed to it; something that is no event.
        """
        if self._is_over:
            return []
        self._now = max(self._now, now)
        match event:
            case Notice():
                self._on_notice(event)
            case Agree(proposal):
                self._on_agree(proposal)
            case GiveUp(reason):
                self._on_give_up(reason)
            case Leave(reason):
                self._on_leave(reason)
            case Tick():
                self._on_tick()
            case _:
                raise ConfigError(f"event {event!r} is none that a member knows")
        if self._now >= self._report_at:
            self._report()
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- what its user wants

    def _on_agree(self, proposal: EpochId) -> None:
        if proposal > self._newest_asked:
            raise ConfigError(f"epoch {proposal} was not proposed to {self.me}")
        newest = max(self._past, self._agreed or _NONE, self._epoch.id if self._epoch is not None else _NONE)
        if self._left_at is None and proposal > newest:
            self._exit_epoch()
            self._agreed = proposal
            self._report_at = self._now

    def _on_give_up(self, reason: str) -> None:
        if self._epoch is not None or self._agreed is not None:
            self._exit_epoch()
            self._reason = reason
            self._report_at = self._now

    def _on_leave(self, reason: str) -> None:
        if self._left_at is None:
            self._exit_epoch()
            self._reason = reason
            self._left_at = self._next_stamp()
            self._leave_by = max(self._heard_until, self._now + 4 * self._heartbeat)
            self._report_at = self._now

    def _exit_epoch(self) -> None:
        if self._epoch is not None:
            self._past = max(self._past, self._epoch.id)
            self._before = self._epoch
        if self._agreed is not None:
            self._past = max(self._past, self._agreed)
        self._epoch = None
        self._agreed = None
        self._is_suspended = False
        self._told = set()

    # --- time

    def _on_tick(self) -> None:
        if self._now >= self._leave_by:
            self._end(Left())
        elif self._epoch is not None and not self._is_suspended and self._now >= self._lease_until:
            self._is_suspended = True
            self._outputs.append(Suspended(self._epoch.id))
            self._report_at = self._now

    def _next_stamp(self) -> float:
        return max(self._now, math.nextafter(self._sent_at, math.inf))

    def _report(self) -> None:
        self._sent_at = self._next_stamp()
        self._report_at = self._now + self._heartbeat
        report = Report(
            self.me,
            self._sent_at,
            self._term,
            self._left_at is None and not self._is_over,
            self._now < self._heard_until,
            self._epoch.id if self._epoch is not None else None,
            self._agreed,
            self._past if self._past != _NONE else None,
            self._asked.id if self._asked is not None else None,
            self._epoch if self._is_recovering else None,
            self.metadata,
            self._reason,
        )
        self._outputs.append(report)

    def _end(self, last: Refused | Left) -> None:
        self._exit_epoch()
        self._is_over = True
        self._outputs.append(last)

    # --- what the coordinator says

    def _on_notice(self, notice: Notice) -> None:
        if notice.to != self.me or (notice.term, notice.revision) < (self._term, self._revision):
            return
        self._hear(notice)
        if self._left_at is not None:
            if notice.refused or notice.answers >= self._left_at:
                self._end(Left())
        elif notice.refused:
            self._end(Refused(notice.refused))
            self._report()  # that it works in no epoch any more
        elif notice.recovering:
            if self.epoch(self._now) is not None:  # an epoch whose lease has run out may be an old one
                self._prolong(notice)
        else:
            self._on_epoch(notice)
            self._on_proposal(notice)

    def _hear(self, notice: Notice) -> None:
        self._heard_until = max(self._heard_until, notice.answers + notice.lease)
        if notice.term > self._term or notice.recovering != self._is_recovering:
            self._report_at = self._now
        self._term, self._revision, self._is_recovering = notice.term, notice.revision, notice.recovering
        self._heartbeat = min(self._heartbeat, notice.lease / 4)

    def _prolong(self, notice: Notice) -> None:
        self._lease_until = max(self._lease_until, notice.answers + notice.lease)
        if self._epoch is not None and self._is_suspended and self._now < self._lease_until:
            self._is_suspended = False
            self._outputs.append(Resumed(self._epoch.id))
            self._report_at = self._now

    def _on_epoch(self, notice: Notice) -> None:
        current = _name_of(notice.epoch)
        departed = {departure.member: departure.reason for departure in notice.departed}
        if self._epoch is not None and current != self._epoch.id:
            why = f"epoch {current} went on without it" if current is not None else "nobody knows it any more"
            self._drop(self._epoch.id, why)
        elif self._epoch is not None and self.me in departed:
            self._drop(self._epoch.id, departed[self.me])
        elif self._epoch is not None:
            self._prolong(notice)
            self._tell_lost(notice.departed)
        elif current is not None and current == self._agreed and self.me in departed:
            self._drop(current, departed[self.me])
        elif isinstance(notice.epoch, Epoch) and current == self._agreed and self._now < notice.answers + notice.lease:
            self._activate(notice.epoch, notice.answers + notice.lease)
            self._tell_lost(notice.departed)

    def _drop(self, epoch: EpochId, reason: str) -> None:
        self._outputs.append(Dropped(epoch, reason))
        self._past = max(self._past, epoch)
        self._exit_epoch()
        self._report_at = self._now

    def _tell_lost(self, departed: Sequence[Departure]) -> None:
        assert self._epoch is not None
        news = tuple(departure for departure in departed if departure.member not in self._told)
        if news:
            self._told |= {departure.member for departure in news}
            self._outputs.append(Lost(self._epoch.id, news))

    def _activate(self, epoch: Epoch, lease_until: float) -> None:
        before = self._before.members if self._before is not None else ()
        reasons = {departure.member: departure.reason for departure in epoch.departed}
        old, new = frozenset(before), frozenset(epoch.members)
        self._agreed = self._asked = None
        self._epoch, self._lease_until = epoch, lease_until
        self._report_at = self._now
        self._outputs.append(
            Activated(
                epoch,
                epoch.rank_of(self.me),
                tuple(member for member in epoch.members if member not in old and member != self.me),
                tuple(Departure(m, reasons.get(m, "it departed meanwhile")) for m in before if m not in new),
            )
        )

    def _on_proposal(self, notice: Notice) -> None:
        proposal = notice.proposal
        if isinstance(proposal, Epoch) and (self._asked is None or self._asked.id != proposal.id):
            self._asked = proposal
            self._newest_asked = max(self._newest_asked, proposal.id)
            self._outputs.append(Asked(proposal))
            self._report_at = self._now
        elif proposal is None and self._asked is not None and self._asked.id != _name_of(notice.epoch):
            self._outputs.append(Withdrawn(self._asked.id))
            self._asked = None


def _name_of(epoch: Epoch | EpochId | None) -> EpochId | None:
    return epoch.id if isinstance(epoch, Epoch) else epoch
