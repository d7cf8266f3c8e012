"""The coordinator: who is there, who goes into the next epoch, and when it may begin."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import ConfigError
from .epoch import Departure, Epoch, EpochId, MemberId, MembershipOptions, check_integer
from .messages import (
    Committed,
    CoordinatorEvent,
    CoordinatorOutput,
    Died,
    Notice,
    Proposed,
    Report,
    Superseded,
    Tick,
)

__all__ = ["Coordinator"]


class _Record:
    """What the coordinator knows of the newest incarnation of a name."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.heard_at = 0.0
        self.deaf_since = math.inf  # it did not hear us since
        self.waiting_since = math.inf  # it could be taken in since
        self.refused = ""

    @property
    def member(self) -> MemberId:
        return self.report.member

    def take(self, report: Report, now: float) -> None:
        self.report, self.heard_at = report, now
        self.deaf_since = math.inf if report.hears else min(self.deaf_since, now)


class Coordinator:
    """Decides who is in. Not thread-safe.

    `term`: 1 for the first coordinator of a job, and a greater one each time that it is restarted. A restarted one
    knows nothing: it spends its first `timeout` seconds learning from the members, who work on meanwhile.
    """

    def __init__(self, options: MembershipOptions, *, term: int = 1, now: float) -> None:
        check_integer("term", term, 1)
        self.options = options
        self.term = term
        self._now = now
        self._records: dict[str, _Record] = {}
        self._over: dict[str, int] = {}  # by name: incarnations up to this one are refused
        self._epoch: Epoch | None = None
        self._departed: dict[MemberId, str] = {}  # from the epoch
        # Members of the epoch, and until when they may believe to be in it; while recovering, everybody who was heard.
        self._may_work_until: dict[MemberId, float] = {}
        self._strangers: dict[MemberId, float] = {}  # the same, of those who never told us what they work in
        self._proposal: Epoch | None = None
        self._proposed_at = 0.0
        self._number = 0
        self._recovered_at = now + options.timeout if term > 1 else None
        self._reported: dict[EpochId, Epoch] = {}  # while recovering
        self._revision = 0
        self._is_touched = False
        self._wake_at = math.inf if self._recovered_at is None else self._recovered_at
        self._superseded_by: int | None = None
        self._outputs: list[CoordinatorOutput] = []

    @property
    def epoch(self) -> Epoch | None:
        """The current one. Some of its members may have departed, until another one follows."""
        return self._epoch

    @property
    def wake_at(self) -> float | None:
        """When a Tick is due, on the clock of `handle`'s `now`; None while nothing is awaited."""
        return None if self._wake_at == math.inf or self._superseded_by is not None else self._wake_at

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorOutput]:
        """What follows. `now`: seconds on a clock that never goes back. Raises ConfigError for what is no event."""
        if self._superseded_by is not None:
            return []
        self._now = max(self._now, now)
        revision = self._revision
        answered: _Record | None = None
        match event:
            case Report():
                answered = self._on_report(event)
            case Died(member, reason):
                self._on_died(member, reason)
            case Tick():
                pass
            case _:
                raise ConfigError(f"event {event!r} is none that a coordinator knows")
        if self._superseded_by is None:
            if self._is_touched or self._now >= self._wake_at:
                self._advance()
            if self._revision != revision:
                self._outputs += [self._notice(record) for record in self._records.values()]
            elif answered is not None:
                self._outputs.append(self._notice(answered))
        outputs, self._outputs = self._outputs, []
        return outputs

    def explain(self) -> str:
        """In a sentence, for people: what it waits for."""
        if self._recovered_at is not None:
            return "restarted, and learning who is there"
        if self._proposal is not None:
            missing = [str(member) for member in self._proposal.members if not self._has_agreed(member)]
            held = [str(member) for member in sorted(self._held_up_by(self._proposal))]
            waits = (
                f"the agreement of {', '.join(missing)}" if missing else f"the lease of {', '.join(held)} to run out"
            )
            return f"proposed epoch {self._proposal.id} waits for {waits}"
        if self._epoch is not None and not self._departed:
            return f"epoch {self._epoch.id} of {len(self._epoch)} is complete"
        there = len(self._staying()) + len(self._joining())
        return f"{there} of at least {self.options.minimum} are there"

    # --- events

    def _on_report(self, report: Report) -> _Record | None:
        """Returns whom to answer."""
        if report.term > self.term:
            self._superseded_by = report.term
            self._outputs.append(Superseded(report.term))
            return None
        member, record = report.member, self._records.get(report.member.name)
        if record is None or record.member != member:
            if member.incarnation <= self._over.get(member.name, 0):
                why = f"incarnation {self._over[member.name]} of {member.name} is over, or a later one has come"
                answer = Notice(member, self.term, self._revision, report.sent_at, self.options.lease, refused=why)
                self._outputs.append(answer)
                return None
            record = self._enter(report)
        elif report.sent_at <= record.report.sent_at:
            return None
        self._is_touched |= _stage(report) != _stage(record.report)
        record.take(report, self._now)
        if self._recovered_at is not None or self._is_in_epoch(member):
            self._may_work_until[member] = self._now + self.options.timeout  # because it is answered
        self._note(record)
        return record

    def _enter(self, report: Report) -> _Record:
        """A name or an incarnation that is new."""
        member = report.member
        older = self._records.get(member.name)
        if older is not None:
            self._depart(older.member, f"it came back as incarnation {member.incarnation}")
        self._over[member.name] = member.incarnation - 1
        record = self._records[member.name] = _Record(report)
        self._is_touched = True
        return record

    def _note(self, record: _Record) -> None:
        """What its newest report says about its part in the current epoch."""
        report, member = record.report, record.member
        if not report.wants_in:
            self._over[member.name] = member.incarnation
        if self._recovered_at is not None and report.text is not None:
            self._reported[report.text.id] = report.text
        if self._epoch is None or member not in self._may_work_until:
            return
        current = self._epoch.id
        is_out = report.past is not None and report.past >= current
        if not report.wants_in:
            self._depart(member, f"it left: {report.reason}")
        elif is_out and (report.agreed is None or report.agreed < current):
            self._depart(member, f"it gave up the epoch: {report.reason}")
        if is_out:
            self._may_work_until[member] = -math.inf

    def _on_died(self, member: MemberId, reason: str) -> None:
        self._over[member.name] = max(member.incarnation, self._over.get(member.name, 0))
        record = self._records.get(member.name)
        if record is not None and record.member.incarnation <= member.incarnation:
            del self._records[member.name]
        self._is_touched = True
        for each in list(self._may_work_until):
            if each.name == member.name and each.incarnation <= member.incarnation:
                self._depart(each, reason)
        if member in self._may_work_until:  # an older incarnation may still be at work somewhere
            self._may_work_until[member] = -math.inf

    def _depart(self, member: MemberId, reason: str) -> None:
        if self._is_in_epoch(member):
            self._departed[member] = reason
            self._change()

    def _change(self) -> None:
        """Something that all members are told."""
        self._revision += 1
        self._is_touched = True

    # --- from one epoch to the next

    def _advance(self) -> None:
        self._expire()
        if self._recovered_at is not None and self._now >= self._recovered_at:
            self._recover()
        if self._recovered_at is None:
            self._review_proposal()
            if self._proposal is None:
                self._propose()
            if self._proposal is not None and self._is_ready(self._proposal):
                self._commit(self._proposal)
                self._propose()
        self._is_touched = False
        self._wake_at = min(self._times(), default=math.inf)

    def _times(self) -> list[float]:
        """When something may change by itself."""
        timeout = self.options.timeout
        times = [min(record.heard_at, record.deaf_since) + timeout for record in self._records.values()]
        if self._recovered_at is not None:
            return [*times, self._recovered_at]
        if self._proposal is not None:
            times += self._held_up_by(self._proposal).values()
            if self.options.agree_timeout is not None:
                times.append(self._proposed_at + self.options.agree_timeout)
        elif joining := self._joining():
            times.append(joining[0].waiting_since + self.options.join_window)
        return [time for time in times if time > self._now]

    def _is_in_epoch(self, member: MemberId) -> bool:
        return self._epoch is not None and member in self._may_work_until and member not in self._departed

    def _expire(self) -> None:
        timeout = self.options.timeout
        for record in list(self._records.values()):
            is_silent = self._now >= record.heard_at + timeout
            if is_silent or self._now >= record.deaf_since + timeout:
                del self._records[record.member.name]
                what = "it was silent" if is_silent else "it did not hear the coordinator"
                self._depart(record.member, f"{what} for {timeout:g} s")

    def _recover(self) -> None:
        """Whoever has worked on in an older coordinator's epoch has told us by now, or its lease is over."""
        self._recovered_at = None
        self._change()
        heard, self._may_work_until = self._may_work_until, {}
        self._strangers = {member: until for member, until in heard.items() if not self._has_told(member)}
        if not self._reported:
            return
        self._epoch = max(self._reported.values(), key=lambda epoch: epoch.id)
        self._number = self._epoch.id.number
        self._may_work_until = {member: heard.get(member, -math.inf) for member in self._epoch.members}
        for member in self._epoch.members:
            record = self._records.get(member.name)
            if record is None:
                self._depart(member, "it was not heard of since the coordinator was restarted")
            elif record.member != member:
                self._depart(member, f"it came back as incarnation {record.member.incarnation}")
            else:
                self._note(record)

    def _has_told(self, member: MemberId) -> bool:
        """Whether it listens to us, so that no late message of an older coordinator sets it to work any more."""
        record = self._records.get(member.name)
        return record is not None and record.member == member and record.report.term == self.term

    def _staying(self) -> list[MemberId]:
        return [member for member in self._may_work_until if member not in self._departed]

    def _joining(self) -> list[_Record]:
        """Who can be taken in, the longest waiting first."""
        joining = []
        for record in self._records.values():
            if not self._can_join(record):
                record.waiting_since = math.inf
                continue
            record.waiting_since = min(record.waiting_since, self._now)
            joining.append(record)
        return sorted(joining, key=lambda record: (record.waiting_since, record.member))

    def _can_join(self, record: _Record) -> bool:
        report = record.report
        hears_us = report.hears and report.term == self.term
        return hears_us and report.wants_in and not record.refused and not self._is_in_epoch(record.member)

    def _review_proposal(self) -> None:
        proposal, patience = self._proposal, self.options.agree_timeout
        if proposal is None:
            return
        if patience is not None and self._now >= self._proposed_at + patience:
            for member in proposal.members:
                if not self._has_agreed(member):
                    self._refuse(member, f"it did not agree to epoch {proposal.id} within {patience:g} s")
        if not all(self._can_still_agree(member, proposal.id) for member in proposal.members):
            self._proposal = None
            self._change()

    def _refuse(self, member: MemberId, reason: str) -> None:
        record = self._records.get(member.name)
        if record is not None and record.member == member:
            record.refused = reason
            self._over[member.name] = member.incarnation
            self._change()
        self._depart(member, reason)

    def _can_still_agree(self, member: MemberId, proposal: EpochId) -> bool:
        record = self._records.get(member.name)
        if record is None or record.member != member or record.refused or not record.report.wants_in:
            return False
        return record.report.past is None or record.report.past < proposal

    def _has_agreed(self, member: MemberId) -> bool:
        record = self._records.get(member.name)
        if record is None or record.member != member or self._proposal is None:
            return False
        return record.report.agreed == self._proposal.id

    def _held_up_by(self, proposal: Epoch) -> dict[MemberId, float]:
        """Those who are not in the proposed epoch but may still be at work in an older one, and until when."""
        may_work = {**self._strangers, **self._may_work_until}
        held_up = may_work.keys() - set(proposal.members)
        return {member: may_work[member] for member in held_up if may_work[member] > self._now}

    def _is_ready(self, proposal: Epoch) -> bool:
        return all(map(self._has_agreed, proposal.members)) and not self._held_up_by(proposal)

    def _propose(self) -> None:
        staying, joining = self._staying(), self._joining()
        if self.options.maximum is not None:
            joining = joining[: max(self.options.maximum - len(staying), 0)]
        members = staying + [record.member for record in joining]
        if len(members) < self.options.minimum:
            return
        is_broken = bool(self._departed) or any(self._may_work_until[member] == -math.inf for member in staying)
        is_full = len(members) == self.options.maximum
        if is_broken or (joining and (is_full or self._now >= joining[0].waiting_since + self.options.join_window)):
            self._number += 1
            self._proposal = self._next_epoch(EpochId(self.term, self._number), self._seats(members))
            self._proposed_at = self._now
            self._change()
            self._outputs.append(Proposed(self._proposal))

    def _seats(self, members: Sequence[MemberId]) -> tuple[MemberId, ...]:
        """By rank. Who has a rank keeps it, if it still exists; the others fill the gaps, older members first."""
        old, new = self._epoch.members if self._epoch is not None else (), set(members)
        seats: list[MemberId | None] = [member if member in new else None for member in old[: len(members)]]
        seats += [None] * (len(members) - len(seats))
        moved = iter([member for member in old[len(members) :] if member in new] + sorted(new.difference(old)))
        return tuple(seat if seat is not None else next(moved) for seat in seats)

    def _next_epoch(self, id: EpochId, members: tuple[MemberId, ...]) -> Epoch:
        return Epoch(
            id,
            members,
            tuple(self._records[member.name].report.metadata for member in members),
            self._epoch.id if self._epoch is not None else None,
            tuple(member for member in members if member not in self._may_work_until),
            tuple(Departure(member, reason) for member, reason in self._departed.items()),
        )

    def _commit(self, proposal: Epoch) -> None:
        self._epoch = self._next_epoch(proposal.id, proposal.members)
        self._proposal = None
        self._departed = {}
        self._strangers = {}
        self._may_work_until = dict.fromkeys(proposal.members, self._now + self.options.timeout)
        self._change()
        self._outputs.append(Committed(self._epoch))

    def _notice(self, record: _Record) -> Notice:
        report, member = record.report, record.member
        epoch: Epoch | EpochId | None = self._epoch
        if self._epoch is not None and (report.epoch == self._epoch.id or member not in self._may_work_until):
            epoch = self._epoch.id
        proposal: Epoch | EpochId | None = None
        if self._proposal is not None and member in self._proposal.members:
            proposal = self._proposal.id if report.known == self._proposal.id else self._proposal
        return Notice(
            member,
            self.term,
            self._revision,
            report.sent_at,
            self.options.lease,
            epoch,
            proposal,
            tuple(Departure(gone, reason) for gone, reason in self._departed.items()),
            record.refused,
            self._recovered_at is not None,
        )


def _stage(report: Report) -> tuple[object, ...]:
    """What, when it changes, changes more than how long ago the member was heard of."""
    return report.term, report.wants_in, report.hears, report.epoch, report.agreed, report.past
