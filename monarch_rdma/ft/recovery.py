"""What is done about a failure of a replica: its trainers are restarted, else the replica where it is, else elsewhere.

A machine without threads or a clock of its own, as those in supervision/: it is told what failed and the time, and
answers with what to start again, and how soon. docs/fault-tolerance.md tells how it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from types import MappingProxyType

from ..errors import ConfigError
from ..supervision.policy import Backoff, Policy

__all__ = ["GiveUp", "Recover", "Recovery", "RecoveryPolicy", "Rung"]


class Rung(IntEnum):
    """What is started again; each includes those before it."""

    TRAINERS = 0  # the replica's trainer processes, by the replica
    REPLICA = 1  # the replica itself, in the allocation that it has
    ALLOCATION = 2  # the replica in another allocation, which the job is asked for


@dataclass(frozen=True)
class RecoveryPolicy:
    """For each rung, how often it is tried, and how soon; then it is the next one's turn.

    Of these policies `max_restarts`, `within` and `backoff` count. Where the last rung is exhausted too, the replica is
    given up, and the others train on without it.
    """

    trainers: Policy = field(default=Policy(max_restarts=3, within=60.0))
    replica: Policy = field(default=Policy(max_restarts=3, within=300.0))
    allocation: Policy = field(
        default=Policy(max_restarts=4, within=3600.0, backoff=Backoff(initial=1.0, factor=4.0, maximum=60.0))
    )

    def __post_init__(self) -> None:
        for name in ("trainers", "replica", "allocation"):
            if not isinstance(getattr(self, name), Policy):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be a Policy")

    @property
    def rungs(self) -> Mapping[Rung, Policy]:
        return MappingProxyType(
            {Rung.TRAINERS: self.trainers, Rung.REPLICA: self.replica, Rung.ALLOCATION: self.allocation}
        )


@dataclass(frozen=True)
class Recover:
    """Start this again, after `delay` seconds. `attempt`: of this rung, within its policy's time."""

    rung: Rung
    delay: float
    attempt: int


@dataclass(frozen=True)
class GiveUp:
    reason: str


class Recovery:
    """Decides for one replica. Not thread-safe. `rng`: where the jitter of delays comes from."""

    def __init__(self, policy: RecoveryPolicy, *, rng: Random | None = None) -> None:
        self.policy = policy
        self._rng = rng or Random()
        self._tried: dict[Rung, list[float]] = {rung: [] for rung in Rung}

    def failed(self, rung: Rung, now: float) -> Recover | GiveUp:
        """`rung`: what has failed, the least that has to be started again. `now`: seconds on a clock that never goes
        back. What is started again begins anew on the rungs below.
        """
        for each in Rung:
            if each < rung:
                continue
            limit = self.policy.rungs[each]
            recent = [at for at in self._tried[each] if now - at <= limit.within]
            if limit.max_restarts is None or len(recent) < limit.max_restarts:
                self._tried[each] = [*recent, now]
                for below in Rung:
                    if below < each:
                        self._tried[below] = []
                attempt = len(recent) + 1
                return Recover(each, limit.backoff.delay(attempt, self._rng), attempt)
        last = self.policy.allocation
        return GiveUp(f"{last.max_restarts} allocations within {last.within:g} s have failed")
