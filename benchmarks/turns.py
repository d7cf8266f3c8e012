"""Contenders that take turns, so that a change in the machine's load meets all of them alike; medians decide."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Contender", "each", "take_turns"]


@dataclass
class Contender:
    """Something to time. `run(count)` does it `count` times and returns the seconds of each time."""

    name: str
    run: Callable[[int], list[float]]
    whole_program: bool = False  # a run warms itself up and gives one figure
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median of one time."""
        return median(self.samples)


def each(step: Callable[[], object]) -> Callable[[int], list[float]]:
    """Times a step of this process one by one."""

    def run(count: int) -> list[float]:
        clock, samples = time.perf_counter, [0.0] * count
        for i in range(count):
            started = clock()
            step()
            samples[i] = clock() - started
        return samples

    return run


def take_turns(contenders: list[Contender], *, rounds: int = 7, seconds: float = 0.1, most: int = 2000) -> None:
    """Every contender gets `rounds` turns of about `seconds`, after one that warms it up and tells its pace."""
    counts = []
    for contender in contenders:
        if contender.whole_program:
            counts.append(1)
            continue
        contender.run(2)
        pace = median(contender.run(3))
        counts.append(max(1, min(most, round(seconds / max(pace, 1e-9)))))
    for round_ in range(rounds):
        for i in range(len(contenders)):
            turn = (round_ + i) % len(contenders)
            contenders[turn].samples += contenders[turn].run(counts[turn])
