"""What is simulated: a job of replica groups, and what its steps, synchronisations and recoveries cost in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

__all__ = ["InputError", "Job"]


class InputError(ValueError):
    """An input of the simulation that cannot be: the message names it and its value."""


@dataclass(frozen=True)
class Job:
    """Replica groups that train on their own for a round of steps and then synchronise. InputError for what cannot be.

    Attributes:
        groups: replica groups, each with a copy of the model.
        nodes_per_group: nodes of each; where one fails, its group does.
        step_s: one step of a group.
        steps_per_round: steps between two synchronisations (1: every step, as in data-parallel training).
        sync_s: one synchronisation of all groups.
        min_groups: groups that must be there for a synchronisation; below that all wait.
        detect_s: from a fault to the moment others know of it.
        reconfigure_s: for a new quorum to form, once after each change of who is in.
        heal_s: for the state to come from peers, on top of a group's recovery.
        replacements_at_once: machines that can be replaced at the same time; 0 for any number.
        job_restart_s: for the whole job to start again and load its checkpoint.
        checkpoint_interval_s: of work between two checkpoints.
        checkpoint_stall_s: that training stands still for each.
    """

    groups: int
    step_s: float
    nodes_per_group: int = 1
    steps_per_round: int = 1
    sync_s: float = 0.0
    min_groups: int = 1
    detect_s: float = 0.0
    reconfigure_s: float = 0.0
    heal_s: float = 0.0
    replacements_at_once: int = 0
    job_restart_s: float = 0.0
    checkpoint_interval_s: float = math.inf
    checkpoint_stall_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("groups", "nodes_per_group", "steps_per_round", "min_groups"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        check("min_groups", self.min_groups, self.min_groups <= self.groups, f"at most the {self.groups} groups")
        check("replacements_at_once", self.replacements_at_once, self.replacements_at_once >= 0, "at least 0")
        for name in ("step_s", "checkpoint_interval_s"):
            check(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        for field in fields(self):
            value = getattr(self, field.name)
            finite = math.isfinite(value) or (field.name == "checkpoint_interval_s" and value > 0)
            check(field.name, value, finite and value >= 0, "a finite number from 0 on")

    @property
    def nodes(self) -> int:
        return self.groups * self.nodes_per_group

    @property
    def compute_s(self) -> float:
        """Steps of one round."""
        return self.steps_per_round * self.step_s

    @property
    def failure_free_goodput(self) -> float:
        """The part of a round that is steps, where nothing fails and no checkpoint is taken."""
        return self.compute_s / (self.compute_s + self.sync_s)


def check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}, but must be {rule}")
