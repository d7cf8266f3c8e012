"""What came of a training, from what was reported of it: losses, who took part, recoveries, steps lost, goodput."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from .reports import Decided, Healed, Measured, Report, Stepped, Synchronised

__all__ = ["History", "Recovered", "Struck"]


@dataclass(frozen=True)
class Struck:
    """A fault that somebody put on the training. `replica`: the one that it happened to."""

    at: float
    replica: int
    kind: str
    target: str


@dataclass(frozen=True)
class Recovered:
    """A replica that failed and came back. `began`: when the fault struck, or else when it was noticed; `ended`: with
    its first step after that. `lost`: steps of it that were not synchronised. `what`: was started again.
    """

    replica: int
    kind: str
    what: str
    began: float
    ended: float
    lost: int
    healing: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class History:
    """Takes reports in the order in which they come."""

    reports: list[Report] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.reports.append(report)

    # --- losses

    def losses(self) -> dict[int, float]:
        """Mean over all steps of a round, by the number of the round, from 0."""
        found: dict[int, list[float]] = defaultdict(list)
        for report in self.reports:
            if isinstance(report, Stepped):
                found[report.rounds].append(report.loss)
        return {number: statistics.fmean(losses) for number, losses in sorted(found.items())}

    def measured(self, name: str) -> dict[int, float]:
        """By the number of rounds before it; of several, the last one that came."""
        return {r.rounds: r.value for r in self.reports if isinstance(r, Measured) and r.name == name}

    # --- who takes part

    def rounds(self) -> list[Synchronised]:
        """One for each, in order."""
        first: dict[int, Synchronised] = {}
        for report in self.reports:
            if isinstance(report, Synchronised):
                first.setdefault(report.rounds, report)
        return [first[number] for number in sorted(first)]

    def active(self) -> list[tuple[float, int]]:
        """When how many replicas took steps: the changes, in order."""
        last: dict[int, tuple[float, float]] = {}
        changes: list[tuple[float, int]] = []
        losses = sorted((each.began, each.replica) for each in self.recoveries())
        for replica in {report.replica for report in self.reports if isinstance(report, Stepped)}:
            times = [r.at for r in self.reports if isinstance(r, Stepped) and r.replica == replica]
            last[replica] = times[0], times[-1]
            changes += [(times[0], 1), (times[-1], -1)]
        changes += [(at, -1) for at, _ in losses] + [(each.ended, 1) for each in self.recoveries()]
        count, steps = 0, []
        for at, change in sorted(changes, key=lambda each: (each[0], -each[1])):
            count += change
            steps.append((at, count))
        return steps

    # --- what failures cost

    def recoveries(self) -> list[Recovered]:
        """Of each decision to start something again, up to the first step that follows."""
        found: list[Recovered] = []
        open_since: dict[int, tuple[float, str, str, int]] = {}  # by replica: when, kind, what, steps lost
        steps: dict[int, int] = defaultdict(int)  # of a replica since it was last synchronised
        healing: dict[int, float] = defaultdict(float)
        for report in self.reports:
            replica = report.replica
            if isinstance(report, Synchronised):
                steps[replica] = 0
            elif isinstance(report, Healed):
                healing[replica] = report.seconds
            elif isinstance(report, Stepped):
                if replica in open_since:
                    began, kind, what, lost = open_since.pop(replica)
                    found.append(Recovered(replica, kind, what, began, report.at, lost, healing[replica]))
                steps[replica] = report.step
            elif isinstance(report, Decided):
                struck = self._cause(report)
                began, kind = (report.at, "?") if struck is None else (struck.at, struck.kind)
                earlier = open_since.get(replica)
                if earlier is not None:  # it failed again before it was back
                    began, kind = earlier[0], earlier[1]
                open_since[replica] = began, kind, report.what, steps[replica] + (earlier[3] if earlier else 0)
                steps[replica] = 0
        return found

    def _cause(self, decided: Decided) -> Struck | None:
        """The last fault of that replica before, if there was one a short time ago."""
        before = [s for s in self.struck if s.replica == decided.replica and 0 <= decided.at - s.at < _SOON]
        return max(before, key=lambda struck: struck.at, default=None)

    @property
    def seconds(self) -> float:
        """From the first step to the last one."""
        times = [report.at for report in self.reports if isinstance(report, Stepped)]
        return max(times) - min(times) if times else 0.0

    @property
    def steps(self) -> int:
        """Of all replicas together, that were synchronised."""
        return max((each.total for each in self.rounds()), default=0)

    @property
    def steps_lost(self) -> int:
        """That were made and never synchronised."""
        return sum(isinstance(report, Stepped) for report in self.reports) - self.steps

    @property
    def rate(self) -> float:
        """Synchronised steps of all replicas per second: what counts of all that was done."""
        return self.steps / self.seconds if self.seconds else 0.0


_SOON = 20.0  # seconds from a fault to what is decided about it
