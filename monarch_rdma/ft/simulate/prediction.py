"""Runs a setting: the figures that were published, and what else the model says, each as a mean over seeds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .checkpointing import simulate_checkpointing
from .healing import simulate_healing
from .outcome import ACCOUNTS, Outcome
from .settings import Setting, Values, failures_of, job_of, workload_of

__all__ = ["Mean", "Prediction", "Sensitivity", "predict", "sensitivity"]


def _no_progress(amount: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Mean:
    """Over seeds; `error` is half of the 95 % confidence interval, 0 for what is not random."""

    value: float
    error: float = 0.0

    @staticmethod
    def of(values: list[float]) -> Mean:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return Mean(statistics.fmean(values), 1.96 * spread / math.sqrt(len(values)))


@dataclass(frozen=True)
class Prediction:
    """What a setting comes to.

    Attributes:
        figures: by name, among them all that was published for the setting.
        accounts: where the time went, by policy ("healing", "checkpointing") and account, as parts of all of it.
        active: nodes that trained under healing: parts of the time by their number.
    """

    setting: Setting
    figures: Mapping[str, Mean]
    accounts: Mapping[str, Mapping[str, float]]
    active: Mapping[int, float]


def predict(
    setting: Setting, values: Values, seeds: int = 32, advance: Callable[[int], None] = _no_progress
) -> Prediction:
    """Runs the setting with these values, both policies against the same failures. `advance` is called once a seed."""
    figures: dict[str, Mean] = {}
    if setting.has_scaling:
        figures["scaling_efficiency"] = Mean(workload_of(values).efficiency(int(values["nodes"])))
    if not setting.has_failures:
        advance(seeds)
        return Prediction(setting, figures, {}, {})
    job, failures, horizon = job_of(values), failures_of(values), values["horizon_s"]
    runs: dict[str, list[Outcome]] = {"healing": [], "checkpointing": []}
    for seed in range(seeds):
        hits = failures.draw(job.nodes, horizon, seed)
        runs["healing"].append(simulate_healing(job, hits, horizon))
        runs["checkpointing"].append(simulate_checkpointing(job, hits, horizon))
        advance(1)
    for policy, outcomes in runs.items():
        figures[f"goodput_{policy}"] = Mean.of([outcome.goodput for outcome in outcomes])
    figures["goodput_without_failures"] = Mean(job.failure_free_goodput)
    healing = runs["healing"]
    # "Between 8 and 16": what held for all but a hundredth of the time on either side.
    for name, part in (("active_nodes_low", 0.01), ("active_nodes_high", 0.99)):
        counts = [float(outcome.active_quantile(part) * job.nodes_per_group) for outcome in healing]
        figures[name] = Mean.of(counts)
    figures["active_nodes_mean"] = Mean.of([outcome.mean_active * job.nodes_per_group for outcome in healing])
    figures["failures"] = Mean.of([float(outcome.failures) for outcome in healing])
    accounts = {
        policy: {name: statistics.fmean(outcome.share(name) for outcome in outcomes) for name in ACCOUNTS}
        for policy, outcomes in runs.items()
    }
    active: defaultdict[int, float] = defaultdict(float)
    for outcome in healing:
        for count, seconds in outcome.active_s.items():
            active[count * job.nodes_per_group] += seconds / (horizon * seeds)
    return Prediction(setting, figures, accounts, active)


@dataclass(frozen=True)
class Sensitivity:
    """A figure with one input at the low and at the high end of its range, all others as they are."""

    name: str
    at_low: float
    at_high: float

    @property
    def span(self) -> float:
        return abs(self.at_high - self.at_low)


def sensitivity(
    setting: Setting,
    values: Values,
    figure: str,
    seeds: int = 8,
    advance: Callable[[int], None] = _no_progress,
) -> list[Sensitivity]:
    """Of `figure` to each input that has a range, the largest first. `advance` is called once an input."""
    found = []
    for name, entry in setting.inputs.items():
        if entry.low < entry.high:
            ends = [
                predict(setting, {**values, name: end}, seeds).figures[figure].value for end in (entry.low, entry.high)
            ]
            found.append(Sensitivity(name, *ends))
        advance(1)
    return sorted(found, key=lambda entry: -entry.span)
