"""Epochs, the members in them, and the limits that they are formed by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import ConfigError

__all__ = ["Departure", "Epoch", "EpochId", "MemberId", "MembershipOptions", "check_integer", "check_number"]


@dataclass(frozen=True)
class MembershipOptions:
    """The coordinator's; members learn from it what they need.

    Attributes:
        minimum: no epoch is smaller; 1 or more.
        maximum: no epoch is larger, and who comes later waits for a place; None is no limit.
        join_window: seconds from the first newcomer to the proposal that takes it in, so that those who come together
            go in together. Not waited for when the epoch is full, or is replaced anyhow because it lost a member.
        timeout: seconds; a member that is silent this long has departed.
        agree_timeout: seconds; who does not agree to a proposal this long is refused, until it comes as another
            incarnation. Longer than a member ever works before it can agree. None waits for ever.
        clock_drift: by how much the rates of two clocks differ at most, as a share.

    Raises:
        ConfigError: a value outside of these.
    """

    minimum: int = 1
    maximum: int | None = None
    join_window: float = 1.0
    timeout: float = 5.0
    agree_timeout: float | None = 600.0
    clock_drift: float = 0.001

    def __post_init__(self) -> None:
        check_integer("minimum", self.minimum, 1)
        if self.maximum is not None:
            check_integer("maximum", self.maximum, self.minimum)
        check_number("join_window", self.join_window, 0)
        check_number("timeout", self.timeout, 0, above=True)
        if self.agree_timeout is not None:
            check_number("agree_timeout", self.agree_timeout, 0, above=True)
        check_number("clock_drift", self.clock_drift, 0, 0.5)

    @property
    def lease(self) -> float:
        """Seconds that a member may work after it sent a report that was answered, on its own clock."""
        return self.timeout * (1 - self.clock_drift) / (1 + self.clock_drift)


def check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}")


def check_number(name: str, value: object, least: float, most: float = math.inf, *, above: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most or (above and value == least):  # type: ignore[operator]
        limits = f"{'above' if above else 'at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise ConfigError(f"{name} must be a number {limits}, not {value!r}")


class EpochId(NamedTuple):
    """Ordered: the later epoch is the greater one."""

    term: int  # of the coordinator
    number: int  # goes on from term to term

    def __str__(self) -> str:
        return f"{self.number} (term {self.term})"


class MemberId(NamedTuple):
    """`incarnation`: greater for each life of the same name, from 1."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


@dataclass(frozen=True)
class Departure:
    member: MemberId
    reason: str


@dataclass(frozen=True)
class Epoch:
    """Attributes:
    members: a member's position is its rank.
    metadata: of each member, in the same order: what it said about itself when it agreed.
    previous: the epoch that this one replaces; None where there was none.
    joined: members that the previous one did not have.
    departed: members that the previous one had and that left it, were lost, or gave it up; these last ones may be
        among `members` again.

    Raises:
        ConfigError: a name twice, or another number of metadata than of members.
    """

    id: EpochId
    members: tuple[MemberId, ...]
    metadata: tuple[Any, ...]
    previous: EpochId | None = None
    joined: tuple[MemberId, ...] = ()
    departed: tuple[Departure, ...] = ()

    def __post_init__(self) -> None:
        if len({member.name for member in self.members}) != len(self.members):
            raise ConfigError(f"members of epoch {self.id} have the same name: {', '.join(map(str, self.members))}")
        if len(self.metadata) != len(self.members):
            raise ConfigError(f"{len(self.members)} members have {len(self.metadata)} metadata")

    def __len__(self) -> int:
        return len(self.members)

    def rank_of(self, member: MemberId) -> int:
        """Raises ConfigError where it is not a member."""
        if member not in self.members:
            raise ConfigError(f"{member} is no member of epoch {self.id}")
        return self.members.index(member)
