"""What coordinator and members send each other, are told and say. All of it is data, and nothing in it is a secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from .epoch import Departure, Epoch, EpochId, MemberId

__all__ = [
    "Activated",
    "Agree",
    "Asked",
    "Committed",
    "CoordinatorEvent",
    "CoordinatorOutput",
    "Died",
    "Dropped",
    "GiveUp",
    "Leave",
    "Left",
    "Lost",
    "MemberEvent",
    "MemberOutput",
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


# --- messages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """From a member to the coordinator: all that there is to know about it, again and again.

    Attributes:
        sent_at: on the member's clock; each report has a greater one.
        term: of the newest coordinator that it heard of, or 0.
        hears: whether it was answered lately.
        epoch: the one that it works in, or did until its lease ran out.
        agreed: the proposal that it has agreed to and waits for.
        past: neither this epoch nor an older one will it work in (again).
        known: the proposal whose text it has.
        text: of `epoch`, where the coordinator asks for it because it has been restarted.
    """

    member: MemberId
    sent_at: float
    term: int
    wants_in: bool
    hears: bool
    epoch: EpochId | None
    agreed: EpochId | None
    past: EpochId | None
    known: EpochId | None
    text: Epoch | None
    metadata: Any
    reason: str


@dataclass(frozen=True)
class Notice:
    """From the coordinator to a member: all that it has to know, with every change and as the answer to each report.

    Attributes:
        revision: greater with every change.
        answers: `sent_at` of the member's newest report.
        lease: seconds from `answers` that the member may work.
        epoch: the current one; its name alone for who is not in it or knows it already.
        proposal: the one that the member shall agree to; its name alone for who knows it already.
        departed: from the current epoch.
        refused: why this incarnation is not taken in any more; "" while it may be.
        recovering: the coordinator was restarted, and still finds out how things are.
    """

    to: MemberId
    term: int
    revision: int
    answers: float
    lease: float
    epoch: Epoch | EpochId | None = None
    proposal: Epoch | EpochId | None = None
    departed: tuple[Departure, ...] = ()
    refused: str = ""
    recovering: bool = False


# --- events and outputs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time has passed. For both sides, when it is `wake_at`; later, more often or for nothing does no harm."""


@dataclass(frozen=True)
class Died:
    """To the coordinator: this one is certainly dead. It is not waited for until its lease is over."""

    member: MemberId
    reason: str


@dataclass(frozen=True)
class Agree:
    """To a member: its work in the current epoch has ended, and it is ready for the proposed one."""

    proposal: EpochId


@dataclass(frozen=True)
class GiveUp:
    """To a member: its epoch is of no use any more (a collective was aborted, say). Another one shall follow."""

    reason: str


@dataclass(frozen=True)
class Leave:
    """To a member: its work in the current epoch has ended, and it wants in no more."""

    reason: str


@dataclass(frozen=True)
class Proposed:
    """Of the coordinator: for the log."""

    epoch: Epoch


@dataclass(frozen=True)
class Committed:
    """Of the coordinator: this is the current epoch now."""

    epoch: Epoch


@dataclass(frozen=True)
class Superseded:
    """Of the coordinator, the last output: there is a newer one, of this term."""

    term: int


@dataclass(frozen=True)
class Asked:
    """Of a member: end the work in the current epoch, at once or where it suits, and then `Agree(proposal.id)`."""

    proposal: Epoch


@dataclass(frozen=True)
class Withdrawn:
    """Of a member: this proposal will not come about. Who has agreed to it is asked for another one."""

    proposal: EpochId


@dataclass(frozen=True)
class Activated:
    """Of a member: it works in this epoch now. `joined` and `lost`: compared with the epoch that it was in before."""

    epoch: Epoch
    rank: int
    joined: tuple[MemberId, ...]
    lost: tuple[Departure, ...]


@dataclass(frozen=True)
class Lost:
    """Of a member: these have departed from its epoch. It stays in it until it agrees to another one."""

    epoch: EpochId
    departed: tuple[Departure, ...]


@dataclass(frozen=True)
class Suspended:
    """Of a member: the coordinator does not answer. No work in the epoch until it is Resumed or another Activated."""

    epoch: EpochId


@dataclass(frozen=True)
class Resumed:
    epoch: EpochId


@dataclass(frozen=True)
class Dropped:
    """Of a member: its epoch went on without it. It waits to be taken in again."""

    epoch: EpochId
    reason: str


@dataclass(frozen=True)
class Refused:
    """Of a member, the last output: it is not taken in again. Another incarnation may be."""

    reason: str


@dataclass(frozen=True)
class Left:
    """Of a member, the last output: as Leave wanted."""


CoordinatorEvent: TypeAlias = Report | Died | Tick
CoordinatorOutput: TypeAlias = Notice | Proposed | Committed | Superseded
MemberEvent: TypeAlias = Notice | Agree | GiveUp | Leave | Tick
MemberOutput: TypeAlias = Report | Asked | Withdrawn | Activated | Lost | Suspended | Resumed | Dropped | Refused | Left
