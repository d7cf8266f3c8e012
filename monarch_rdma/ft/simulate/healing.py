"""Healing: a failure stops one group; the others go on, and it comes back with their state, without a checkpoint.

A run is a sequence of rounds. In a round each group that trains does its steps, then all of them synchronise and what
they did counts. A group that fails in a round loses that round; back again, it joins the next one. A failure during a
synchronisation makes the others synchronise again without it. Below the quorum all wait.
Where the last group that trains fails, no peer has the state any more: the job falls back to its last checkpoint.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import deque
from collections.abc import Sequence

from .failures import Failure
from .job import Job
from .outcome import Outcome

__all__ = ["simulate_healing"]


def simulate_healing(job: Job, failures: Sequence[Failure], horizon_s: float) -> Outcome:
    """Runs `job` for `horizon_s` seconds against `failures` (by time). A failure while recovering starts that anew."""
    return _Run(job, failures, horizon_s).outcome


class _State(enum.Enum):
    TRAINING = enum.auto()
    READY = enum.auto()  # back, waits for the next round
    RECOVERING = enum.auto()
    QUEUED = enum.auto()  # waits for its turn to get a machine


class _Phase(enum.Enum):
    STEPS = enum.auto()
    QUORUM = enum.auto()  # steps are done, too few groups to synchronise
    SYNC = enum.auto()
    COLD = enum.auto()  # between two rounds: below the quorum, or starting again from a checkpoint


class _Run:
    def __init__(self, job: Job, failures: Sequence[Failure], horizon_s: float) -> None:
        self._job = job
        self._horizon = horizon_s
        self.outcome = Outcome(job.groups, horizon_s)
        self._state = [_State.READY] * job.groups
        self._since = [0.0] * job.groups  # from when on a group's time is in no account yet
        self._comeback: list[tuple[float, int]] = []  # heap of (time, group)
        self._comes_back = [math.inf] * job.groups
        self._replaced = [False] * job.groups  # a machine of the group is being replaced
        self._queue: deque[tuple[int, Failure]] = deque()
        self._phase = _Phase.COLD
        self._phase_ends = 0.0
        self._quorum_changed = False
        self._counted = 0.0  # active_s is complete up to here
        self._unsaved = 0.0  # group-seconds of steps since the last checkpoint
        self._unsaved_rounds = 0.0
        self._saved_at = 0.0
        self._run([failure for failure in failures if failure.time < horizon_s])

    def _run(self, failures: Sequence[Failure]) -> None:
        self._begin_round(0.0)
        coming = 0
        while True:
            failure_at = failures[coming].time if coming < len(failures) else math.inf
            back_at = self._comeback[0][0] if self._comeback else math.inf
            now = min(failure_at, back_at, self._phase_ends)
            if now > self._horizon:
                return self._end()
            self._count_active(now)
            if now == failure_at:
                self._on_failure(now, failures[coming])
                coming += 1
            elif now == back_at:
                self._on_back(now)
            else:
                self._on_phase_end(now)

    def _members(self, *states: _State) -> list[int]:
        return [group for group, state in enumerate(self._state) if state in states]

    # --- what happens ---

    def _on_failure(self, now: float, failure: Failure) -> None:
        self.outcome.failures += 1
        group = failure.node // self._job.nodes_per_group
        state = self._state[group]
        if state is _State.QUEUED:
            return
        if state is _State.RECOVERING:
            self._start_recovery(now, group, failure)
            return
        in_round = state is _State.TRAINING and self._phase is not _Phase.COLD
        self._charge(group, now, "lost" if in_round else "stalled")
        self._recover(now, group, failure)
        if state is _State.TRAINING:
            self._on_lost_member(now)

    def _on_lost_member(self, now: float) -> None:
        self._quorum_changed = True
        if not self._members(_State.TRAINING):
            self._fall_back(now)
        elif self._phase is _Phase.SYNC:
            self._try_sync(now + self._job.detect_s)

    def _recover(self, now: float, group: int, failure: Failure) -> None:
        limit = self._job.replacements_at_once
        if failure.needs_machine and limit and sum(self._replaced) == limit:
            self._state[group] = _State.QUEUED
            self._queue.append((group, failure))
            return
        self._replaced[group] = failure.needs_machine
        self._state[group] = _State.RECOVERING
        self._start_recovery(now, group, failure)

    def _start_recovery(self, now: float, group: int, failure: Failure) -> None:
        self._comes_back[group] = now + failure.recovery_s + self._job.heal_s
        heapq.heappush(self._comeback, (self._comes_back[group], group))

    def _on_back(self, now: float) -> None:
        planned, group = heapq.heappop(self._comeback)
        if self._state[group] is not _State.RECOVERING or planned != self._comes_back[group]:
            return  # it failed again meanwhile
        self._charge(group, now, "down")
        self._state[group] = _State.READY
        freed, self._replaced[group] = self._replaced[group], False
        if freed and self._queue:
            self._recover(now, *self._queue.popleft())
        if self._phase is _Phase.QUORUM:
            self._try_sync(now)
        elif self._phase is _Phase.COLD and self._phase_ends == math.inf:
            self._begin_round(now)

    def _on_phase_end(self, now: float) -> None:
        if self._phase is _Phase.STEPS:
            self._try_sync(now)
        elif self._phase is _Phase.SYNC:
            self._commit(now)
            self._begin_round(now)
        else:
            self._begin_round(now)

    # --- rounds ---

    def _begin_round(self, now: float) -> None:
        """The groups that trained and those that are back begin a round; below the quorum they wait, without an end."""
        members = self._members(_State.TRAINING, _State.READY)
        if len(members) < self._job.min_groups:
            self._phase, self._phase_ends = _Phase.COLD, math.inf
            return
        for group in members:
            self._charge(group, now, "stalled")
            self._quorum_changed |= self._state[group] is _State.READY and now > 0
            self._state[group] = _State.TRAINING
        self._phase, self._phase_ends = _Phase.STEPS, now + self._job.compute_s

    def _try_sync(self, now: float) -> None:
        if len(self._members(_State.TRAINING, _State.READY)) < self._job.min_groups:
            self._phase, self._phase_ends = _Phase.QUORUM, math.inf
            return
        self._phase = _Phase.SYNC
        self._phase_ends = now + self._job.sync_s + self._job.reconfigure_s * self._quorum_changed

    def _commit(self, now: float) -> None:
        job, outcome = self._job, self.outcome
        members = self._members(_State.TRAINING)
        for group in members:
            outcome.seconds["useful"] += job.compute_s
            outcome.seconds["sync"] += job.sync_s
            self._since[group] += job.compute_s + job.sync_s
            self._charge(group, now, "stalled")
        outcome.group_rounds += len(members)
        self._quorum_changed = False
        self._unsaved += job.compute_s * len(members)
        self._unsaved_rounds += len(members)
        if now - self._saved_at >= job.checkpoint_interval_s:
            self._saved_at, self._unsaved, self._unsaved_rounds = now, 0.0, 0.0

    def _fall_back(self, now: float) -> None:
        """Nobody has the state: what was done since the last checkpoint is lost, and the job starts again from it."""
        seconds = self.outcome.seconds
        seconds["useful"] -= self._unsaved
        seconds["lost"] += self._unsaved
        self.outcome.group_rounds -= self._unsaved_rounds
        self._saved_at, self._unsaved, self._unsaved_rounds = now, 0.0, 0.0
        self._phase, self._phase_ends = _Phase.COLD, now + self._job.job_restart_s

    # --- accounts ---

    def _charge(self, group: int, now: float, account: str) -> None:
        self.outcome.seconds[account] += now - self._since[group]
        self._since[group] = now

    def _count_active(self, now: float) -> None:
        self.outcome.count_active(len(self._members(_State.TRAINING)), now - self._counted)
        self._counted = now

    def _end(self) -> None:
        self._count_active(self._horizon)
        unfinished = {_State.TRAINING: "unfinished", _State.READY: "stalled"}
        for group, state in enumerate(self._state):
            self._charge(group, self._horizon, unfinished.get(state, "down"))
