"""What a supervisor knows of each member: the incarnation that lives now, and the failures that led there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...supervision.policy import Escalate, Incarnation
from ..failure import MeshFailure
from ..future import Future

__all__ = ["FailureLog", "Life", "rank_of"]

_MOST_FAILURES = 256  # that are kept for reports


@dataclass(eq=False)
class Life:
    """One incarnation of a process or an actor. `address`: of the process, once it is known; `number`: of an actor."""

    incarnation: Incarnation
    address: str = ""
    number: int = 0
    births: Sequence[Future[Any]] = ()
    cause: str | None = None  # the event that led to it
    stop_reason: str | None = None  # it shall end as soon as it can be told
    is_up: bool = False
    is_ending: bool = False
    is_over: bool = False

    @property
    def rank(self) -> int:
        return rank_of(self.incarnation)

    @property
    def can_be_reached(self) -> bool:
        return bool(self.address) and not self.is_ending and not self.is_over


def rank_of(incarnation: Incarnation) -> int:
    rank = incarnation.child
    assert isinstance(rank, int), "children are ranks"
    return rank


class FailureLog:
    """The last failures of one mesh's members, with what was done about each in its time line."""

    def __init__(self, mesh: str, kind: str) -> None:
        self._mesh = mesh
        self._kind = kind
        self._failures: list[tuple[Any, MeshFailure]] = []  # each with its child

    def add(self, child: Any, failure: MeshFailure) -> None:
        self._failures.append((child, failure))
        del self._failures[:-_MOST_FAILURES]

    def note(self, child: Any, what: str) -> None:
        """In the time line of the last failure of that member."""
        for index in range(len(self._failures) - 1, -1, -1):
            if self._failures[index][0] == child:
                self._failures[index] = child, self._failures[index][1].noted(what)
                return

    def causes_of(self, decision: Escalate) -> tuple[MeshFailure, ...]:
        """The failures that count, as they were told; those that nobody has told of (of a start) by their reasons."""
        causes = []
        for failed in decision.failures:
            known = [each for child, each in self._failures if (child, each.message) == (failed.child, failed.reason)]
            made = MeshFailure(self._mesh, self._kind, failed.reason, int(str(failed.child)))
            causes.append(known[-1] if known else made)
        return tuple(causes)
