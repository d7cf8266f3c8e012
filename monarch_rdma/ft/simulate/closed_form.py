"""What theory says exactly, for failures that are a Poisson process: the simulation is held against it."""

from __future__ import annotations

import math

from .job import InputError, check

__all__ = [
    "availability",
    "best_interval",
    "checkpointing_goodput",
    "machines_up",
    "young_interval",
]


def young_interval(mtbf_s: float, checkpoint_s: float) -> float:
    """Young's first-order optimum of the work between two checkpoints, sqrt(2 x cost x mean time between failures)."""
    _positive(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def best_interval(mtbf_s: float, checkpoint_s: float) -> float:
    """The exact optimum, which Daly's formula approaches: the x with (1 - x/M) exp((x + C)/M) = 1."""
    _positive(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    low, high = 0.0, mtbf_s
    for _ in range(200):
        middle = (low + high) / 2
        if 1 - middle / mtbf_s > math.exp(-(middle + checkpoint_s) / mtbf_s):
            low = middle
        else:
            high = middle
    return low


def checkpointing_goodput(mtbf_s: float, interval_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Useful part of the time, a checkpoint after each `interval_s` of work, where failures also hit restarts (Daly).

    A piece of work of length a takes exp(R/M) M (exp(a/M) - 1) in expectation.
    """
    _positive(mtbf_s=mtbf_s, interval_s=interval_s)
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:
        return 0.0  # less than a double holds
    return interval_s / (math.exp(restart_s / mtbf_s) * mtbf_s * math.expm1(exponent))


def availability(mtbf_s: float, recovery_s: float) -> float:
    """Part of the time that something is up which recovers in `recovery_s`, anew where it fails again meanwhile.

    Up for M, then down for M (exp(R/M) - 1), in expectation.
    """
    _positive(mtbf_s=mtbf_s)
    return math.exp(-recovery_s / mtbf_s)


def machines_up(machines: int, mtbf_s: float, repair_s: float, repairs_at_once: int = 0) -> list[float]:
    """P(0), P(1), ... P(machines) of so many being up, in the long run: the machine-repair queue M/M/c//N.

    Each machine fails after `mtbf_s`, each repair takes `repair_s`, both exponentially distributed; `repairs_at_once`
    can go on at the same time (0: all).
    """
    _positive(mtbf_s=mtbf_s, repair_s=repair_s)
    if machines < 1:
        raise InputError(f"machines is {machines!r}, but must be at least 1")
    weights = [1.0]  # by the number that is down
    for down in range(machines):
        repairs = min(down + 1, repairs_at_once or machines)
        weights.append(weights[-1] * (machines - down) / mtbf_s * repair_s / repairs)
    total = math.fsum(weights)
    return [weight / total for weight in reversed(weights)]


def _positive(**values: float) -> None:
    for name, value in values.items():
        check(name, value, value > 0 and math.isfinite(value), "a finite number above 0")
