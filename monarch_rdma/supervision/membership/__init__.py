"""Who is in: epochs over members that join, leave, fail and come back.

A member is whatever joins and fails as one: a replica group, a process of a mesh, a rank of a collective. An epoch is a
set of members with the ranks 0 to n-1. It never changes; when somebody joins or departs, another epoch follows it, and
says who and why. One coordinator proposes epochs; members agree by ending what they do in the old one, and work in
the new one once all have agreed.

Both sides are machines without threads, sockets or clocks of their own: they are told messages and the time, and answer
with messages to be sent, which may be lost, repeated, late or out of order, and with what has happened. What holds:
- At any moment, all members that may work (`Member.epoch`) work in one and the same epoch, and agree on its members,
  ranks and metadata; each name has one rank in it and each rank one member.
- No member is left out in silence: an epoch names whom it has lost and why, and members are told.
- When messages get through again, all that want to be in are, in one epoch, as far as the limits allow.

It rests on two things. There is one coordinator at a time, each with a greater `term` than the one before. And clocks
may show any time, but run equally fast, up to `clock_drift`: a member works on a lease that every answer of the
coordinator prolongs, and which is over before the coordinator goes on without it. docs/supervision.md has an example.
"""

from .coordinator import Coordinator
from .epoch import Departure, Epoch, EpochId, MemberId, MembershipOptions
from .member import Member
from .messages import (
    Activated,
    Agree,
    Asked,
    Committed,
    Died,
    Dropped,
    GiveUp,
    Leave,
    Left,
    Lost,
    Notice,
    Proposed,
    Refused,
    Report,
    Resumed,
    Superseded,
    Suspended,
    Tick,
    Withdrawn,
)

__all__ = [
    "Activated",
    "Agree",
    "Asked",
    "Committed",
    "Coordinator",
    "Departure",
    "Died",
    "Dropped",
    "Epoch",
    "EpochId",
    "GiveUp",
    "Leave",
    "Left",
    "Lost",
    "Member",
    "MemberId",
    "MembershipOptions",
    "Notice",
    "Proposed",
    "Refused",
    "Report",
    "Resumed",
    "Superseded",
    "Suspended",
    "Tick",
    "Withdrawn",
]
