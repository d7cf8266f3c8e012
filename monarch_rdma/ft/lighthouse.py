"""Who is in, for all replicas: the one place that they have in common."""

from __future__ import annotations

from ..actor import Actor, endpoint
from ..actor.membership import Coordination, CoordinationId
from ..supervision.membership import Epoch, MembershipOptions

__all__ = ["Lighthouse"]


class Lighthouse(Actor):
    """Has the coordination of the replicas' membership. It takes no part in the training: no tensor comes by here."""

    def __init__(self, options: MembershipOptions | None = None) -> None:
        self._coordination = Coordination(options)

    @endpoint
    def coordination(self) -> CoordinationId:
        return self._coordination.id

    @endpoint
    def epoch(self) -> Epoch | None:
        """The current one: who trains, and the addresses of their trainers."""
        return self._coordination.epoch

    @endpoint
    def explain(self) -> str:
        """In a sentence, for people: what it waits for."""
        return self._coordination.explain()

    def __cleanup__(self, error: BaseException | None) -> None:
        self._coordination.close()
