"""A training that was watched, as `monarch-rdma simulate --measured` takes it; docs/goodput.md describes the file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from .history import History
from .reports import Stepped, Synchronised

__all__ = ["measured_run"]


def measured_run(history: History, *, title: str, groups: int, steps_per_round: int) -> dict[str, Any]:
    """`groups`: replicas that the training was to have. Contributions of a part of a round count as that part.

    Steps take what rounds that were made in full have taken from one synchronisation to the next, over their steps;
    a synchronisation what it takes from a replica's last step on, waiting for the others included. What those with
    other members than the one before have taken on top is `reconfigure_s`. ValueError where no round was made in full.
    """
    rounds = list(_full_rounds(history, steps_per_round))
    if not rounds:
        raise ValueError(f"no replica has made a round of {steps_per_round} steps after another one")
    step = statistics.fmean(compute for compute, _, _ in rounds) / steps_per_round
    began = min(report.at for report in history.reports if isinstance(report, Stepped)) - step
    ended = max(report.at for report in history.reports if isinstance(report, Synchronised))
    usual = [sync for _, sync, is_usual in rounds if is_usual] or [sync for _, sync, _ in rounds]
    others = [sync for _, sync, is_usual in rounds if not is_usual]
    sync = statistics.fmean(usual)
    return {
        "title": title,
        "groups": groups,
        "steps_per_round": steps_per_round,
        "step_s": step,
        "sync_s": sync,
        "reconfigure_s": max(0.0, statistics.fmean(others) - sync) if others else 0.0,
        "duration_s": ended - began,
        "failures": [
            {
                "time_s": max(0.0, each.began - began),
                "group": each.replica,
                "recovery_s": max(0.0, each.seconds - step),  # its first step ends a recovery
            }
            for each in history.recoveries()
            if each.began < ended
        ],
        "group_rounds": history.steps / steps_per_round,
    }


def _full_rounds(history: History, steps_per_round: int) -> Iterable[tuple[float, float, bool]]:
    """Of each replica and round: seconds of the steps, of the synchronisation, and whether that had the same members as
    the one before.
    """
    members = {each.rounds: each.members for each in history.rounds()}
    before: dict[int, Synchronised] = {}
    last: dict[int, Stepped] = {}
    for report in history.reports:
        replica = report.replica
        if isinstance(report, Stepped):
            last[replica] = report
        elif isinstance(report, Synchronised):
            earlier, step = before.get(replica), last.get(replica)
            before[replica] = report
            if earlier is None or step is None or earlier.life != report.life or earlier.rounds + 1 != report.rounds:
                continue
            if report.contributed[report.members.index(replica)] == steps_per_round and step.at > earlier.at:
                is_usual = members.get(report.rounds - 1) == report.members
                yield step.at - earlier.at, report.at - step.at, is_usual
