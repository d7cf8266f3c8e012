"""What became of a run's time, counted in seconds of replica groups: every second of every group is in one account."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

__all__ = ["ACCOUNTS", "Outcome"]

ACCOUNTS = {
    "useful": "steps that are part of the model",
    "lost": "steps thrown away",
    "sync": "synchronising",
    "stalled": "waiting for others, a quorum or the next round",
    "checkpoint": "standing still for a checkpoint",
    "down": "recovering or restarting",
    "unfinished": "in the round that the end of the run cut off",
}


@dataclass
class Outcome:
    """One run.

    Attributes:
        groups: of the job.
        horizon_s: how long the run was.
        seconds: group-seconds by account; they add up to groups x horizon_s.
        active_s: seconds by the number of groups that trained.
        group_rounds: contributions to the model, one a group and round.
        failures: that hit the run.
    """

    groups: int
    horizon_s: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    active_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    group_rounds: float = 0.0
    failures: int = 0

    @property
    def goodput(self) -> float:
        """The part of all groups' time that went into steps that are part of the model, 0 to 1."""
        return self.share("useful")

    def share(self, account: str) -> float:
        return self.seconds[account] / (self.groups * self.horizon_s)

    def count_active(self, count: int, seconds: float) -> None:
        if seconds:
            self.active_s[count] += seconds

    @property
    def mean_active(self) -> float:
        """Groups that trained, on average over time."""
        return sum(count * seconds for count, seconds in self.active_s.items()) / self.horizon_s

    def active_quantile(self, part: float) -> int:
        """At most so many groups trained during `part` of the time (0 to 1)."""
        passed = 0.0
        for count in sorted(self.active_s):
            passed += self.active_s[count]
            if passed >= part * self.horizon_s:
                return count
        return self.groups
