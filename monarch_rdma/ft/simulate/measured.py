"""A real run held against the model: the same job and failures at the same moments, then both counts of rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .failures import Failure
from .healing import simulate_healing
from .job import InputError, Job, check
from .outcome import Outcome

__all__ = ["Measured", "Replay", "measured_of", "read", "replay"]


@dataclass(frozen=True)
class Measured:
    """What was seen of a run; docs/goodput.md describes the file. InputError for a value that cannot be.

    Attributes:
        job: the job with the means of the measured steps and synchronisations.
        duration_s: of the run, from the first step of the first group.
        failures: each with the measured time until its group was ready to train.
        group_rounds: contributions to the model, one a group and round, counted in the run.
    """

    title: str
    job: Job
    duration_s: float
    failures: Sequence[Failure]
    group_rounds: float

    @property
    def goodput(self) -> float:
        return self.group_rounds * self.job.compute_s / (self.job.groups * self.duration_s)


@dataclass(frozen=True)
class Replay:
    measured: Measured
    outcome: Outcome

    @property
    def ratio(self) -> float:
        """Rounds the model predicts for each round that was counted."""
        return self.outcome.group_rounds / self.measured.group_rounds


def read(path: Path) -> Measured:
    """InputError where the file is not as it must be."""
    try:
        return measured_of(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} is not a measured run: {type(error).__name__}: {error}") from error


def replay(measured: Measured) -> Replay:
    return Replay(measured, simulate_healing(measured.job, measured.failures, measured.duration_s))


def measured_of(document: Mapping[str, Any]) -> Measured:
    """Of what is in such a file. InputError, KeyError, TypeError or ValueError where it is not as it must be."""
    job = Job(
        groups=int(document["groups"]),
        step_s=_mean(document["step_s"]),
        steps_per_round=int(document["steps_per_round"]),
        sync_s=_mean(document["sync_s"]),
        min_groups=int(document.get("min_groups", 1)),
        detect_s=_mean(document.get("detect_s", 0.0)),
        reconfigure_s=_mean(document.get("reconfigure_s", 0.0)),
        job_restart_s=_mean(document.get("job_restart_s", 0.0)),
    )
    failures = [_failure(entry, job.groups) for entry in document.get("failures", [])]
    measured = Measured(
        title=str(document.get("title", "measured run")),
        job=job,
        duration_s=float(document["duration_s"]),
        failures=sorted(failures, key=lambda failure: failure.time),
        group_rounds=float(document["group_rounds"]),
    )
    check("duration_s", measured.duration_s, measured.duration_s > 0, "more than 0")
    check("group_rounds", measured.group_rounds, measured.group_rounds > 0, "more than 0")
    return measured


def _failure(entry: Mapping[str, Any], groups: int) -> Failure:
    group, time, recovery = int(entry["group"]), float(entry["time_s"]), float(entry["recovery_s"])
    check("group of a failure", group, 0 <= group < groups, f"from 0 to {groups - 1}")
    check("time_s of a failure", time, time >= 0, "at least 0")
    check("recovery_s of a failure", recovery, recovery >= 0, "at least 0")
    return Failure(time, group, recovery)


def _mean(value: float | Sequence[float]) -> float:
    return statistics.fmean(value) if isinstance(value, Sequence) else float(value)
