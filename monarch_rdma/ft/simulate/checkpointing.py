"""Checkpoint and restart: any failure stops the whole job, which starts again from its last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from .failures import Failure
from .job import Job
from .outcome import Outcome

__all__ = ["simulate_checkpointing"]


def simulate_checkpointing(job: Job, failures: Sequence[Failure], horizon_s: float) -> Outcome:
    """Runs `job` for `horizon_s` seconds against `failures` (by time). A failure during a restart starts that anew."""
    outcome = Outcome(job.groups, horizon_s)
    down_since = back = 0.0
    for failure in failures:
        if failure.time >= horizon_s:
            break
        outcome.failures += 1
        if failure.time >= back:
            _down(job, outcome, down_since, back)
            _work(job, outcome, back, failure.time, "lost")
            down_since = failure.time
        machine = failure.recovery_s if failure.needs_machine else 0.0
        back = failure.time + job.detect_s + max(job.job_restart_s, machine)
    back = min(back, horizon_s)
    _down(job, outcome, down_since, back)
    _work(job, outcome, back, horizon_s, "unfinished")
    return outcome


def _down(job: Job, outcome: Outcome, start: float, end: float) -> None:
    outcome.seconds["down"] += job.groups * (end - start)
    outcome.count_active(0, end - start)


def _work(job: Job, outcome: Outcome, start: float, end: float, rest: str) -> None:
    """All work from `start` to `end`, a checkpoint after each interval; what came since goes to account `rest`."""
    outcome.count_active(job.groups, end - start)
    checkpoints = int((end - start) / (job.checkpoint_interval_s + job.checkpoint_stall_s))
    saved = checkpoints * job.checkpoint_interval_s if checkpoints else 0.0
    stalled = checkpoints * job.checkpoint_stall_s
    steps = job.failure_free_goodput
    outcome.seconds["useful"] += job.groups * saved * steps
    outcome.seconds["sync"] += job.groups * saved * (1 - steps)
    outcome.seconds["checkpoint"] += job.groups * stalled
    outcome.seconds[rest] += job.groups * (end - start - saved - stalled)
    outcome.group_rounds += job.groups * saved / (job.compute_s + job.sync_s)
