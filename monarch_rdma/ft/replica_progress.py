"""How far a replica is, which others weigh its part by: the same for every way that replicas meet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from .cohort import Offering
from .contribution import Contribution
from .quorum import Meeting, Standing
from .reports import Measured, Report, Synchronised
from .training import Place

__all__ = ["ReplicaProgress", "weighed"]


class ReplicaProgress:
    """One trainer's. `rounds`: that it has completed; `names`: the replicas that took part in the last one; `total`:
    steps of all replicas up to that one; `ahead`: how many steps its averaging is to go on by when it has come.
    """

    may_overlap = True  # whether state is read only between two rounds, so that a round may go on while steps are made

    def __init__(self, place: Place, life: int, tell: Callable[[Report], None]) -> None:
        self.rounds = 0
        self.names: tuple[Any, ...] = ()
        self.total = 0
        self.ahead = 0
        self._steps = 0  # of this replica, since the last round was applied
        self._is_fresh = True
        self._place, self._life, self._tell = place, life, tell

    def stepped(self) -> int:
        """After each step of this replica; how many those of this round are."""
        self._steps += 1
        return self._steps

    def tell_measured(self, name: str, value: float) -> None:
        """To whoever watches the training."""
        self._tell(Measured(time.time(), self._place.replica, self._life, self.rounds, name, value))

    def _standing(self, steps: int = 0, base: int = 0, span: int = 0) -> Standing:
        return Standing(self._is_fresh, self.rounds, steps, self.total, base, span)

    def _completed(self, meeting: Meeting, seconds: float) -> None:
        self.rounds += 1
        self.total += sum(meeting.contributed)
        self.names = meeting.replicas
        self._steps = 0
        self._tell(
            Synchronised(
                time.time(), self._place.replica, self._life, self.rounds, meeting.replicas, meeting.contributed,
                self.total, seconds, meeting.spans,
            )
        )  # fmt: skip


def weighed(offering: Offering, meeting: Meeting) -> Contribution:
    """What a replica brings in, with its weight in the mean: as large, and nothing, where none of its steps counts."""
    contribution = offering.contribution
    if meeting.is_behind or not meeting.weight:
        return offering.wire.contribution(torch.zeros(contribution.numel), None)
    if meeting.weight == 1.0:
        return contribution
    *others, numbers = contribution.parts  # the last part is the numbers themselves, or their scales
    return dataclasses.replace(contribution, parts=(*others, numbers * meeting.weight))
