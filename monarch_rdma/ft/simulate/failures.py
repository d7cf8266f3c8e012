"""When which node fails, and how long until it is back: a list made before the run, so that two policies meet the same.

Three streams of random numbers, one for gaps, one for nodes, one for what it takes to recover: a changed input changes
what it scales and leaves the rest as it was (common random numbers).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .job import check

__all__ = ["Failure", "Failures"]


@dataclass(frozen=True)
class Failure:
    """Node `node` fails at `time` seconds. Its group can train again `recovery_s` after that; with `needs_machine` the
    recovery waits for its turn where machines are replaced one after the other."""

    time: float
    node: int
    recovery_s: float
    needs_machine: bool = False


@dataclass(frozen=True)
class Failures:
    """How often nodes of a job fail, and what a recovery takes. InputError for a value that cannot be.

    Attributes:
        interval_s: mean time between failures of the whole job.
        periodic: evenly spaced, as from a fault injector; else a Poisson process.
        restart_s: from a fault to training again on the same machine.
        replace_s: the same on another machine.
        machine_share: of the failures that need another machine, 0 to 1.
        exponential: recoveries are drawn from exponential distributions of those means; else they are constant.
    """

    interval_s: float
    periodic: bool = False
    restart_s: float = 0.0
    replace_s: float = 0.0
    machine_share: float = 0.0
    exponential: bool = False

    def __post_init__(self) -> None:
        check("interval_s", self.interval_s, self.interval_s > 0, "more than 0")
        check("machine_share", self.machine_share, 0 <= self.machine_share <= 1, "from 0 to 1")
        for name in ("restart_s", "replace_s"):
            check(name, getattr(self, name), 0 <= getattr(self, name) < float("inf"), "a finite number from 0 on")

    def draw(self, nodes: int, horizon_s: float, seed: int) -> list[Failure]:
        """The failures of one run of `horizon_s` seconds, by time."""
        gaps, places, kinds = (random.Random(f"{name} {seed}") for name in ("gaps", "places", "kinds"))
        found: list[Failure] = []
        time = 0.0
        while True:
            gap = gaps.expovariate(1)
            time += self.interval_s * (1.0 if self.periodic else gap)
            if time >= horizon_s:
                return found
            needs_machine = kinds.random() < self.machine_share
            length = kinds.expovariate(1)
            mean = self.replace_s if needs_machine else self.restart_s
            recovery = mean * (length if self.exponential else 1.0)
            found.append(Failure(time, places.randrange(nodes), recovery, needs_machine))
