"""A replica's end of a training by itself: what those that come are told of where it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_rdma.ft.cohort import Offering
from monarch_rdma.ft.contribution import wire_of
from monarch_rdma.ft.peer_state import progress_of
from monarch_rdma.ft.quorum import Meeting, Standing
from monarch_rdma.ft.replica_cohort import ReplicaCohort
from monarch_rdma.ft.training import Place
from monarch_rdma.rdma import Engine, Secret


class Waiting(Exception):
    """The others have not come yet."""


class Quorum:
    """Founds a training of one replica, and then waits for others."""

    def __init__(self) -> None:
        self._is_founded = False

    def come(self) -> None:
        """Nobody else is there."""

    def meet(self, standing: Standing) -> Meeting:
        if self._is_founded:
            raise Waiting
        self._is_founded = True
        return Meeting((0,), ("",), (standing,), 0)

    def leave(self, reason: str) -> None:
        """Nobody is told."""


def test_who_comes_while_others_wait_at_the_end_of_a_round_makes_one_step(secret: Secret) -> None:
    """Not a whole round, for which all of them would wait."""
    nobody = SimpleNamespace(call_one=lambda: SimpleNamespace(get=lambda: None))
    lighthouse: Any = SimpleNamespace(epoch=SimpleNamespace(options=lambda timeout: nobody))
    inside: Any = SimpleNamespace(share=lambda value: value, all=lambda is_good: is_good)
    engine = Engine(secret=secret, name="trainer")
    quorum: Any = Quorum()
    cohort = ReplicaCohort(Place(0, 1, 0, 1), 1, quorum, inside, lighthouse, engine, timeout=1.0)
    try:
        cohort.serve(lambda: {"w": torch.ones(4)}, lambda state: None)
        assert not cohort.join()
        for step in range(1, 5):
            cohort.stepped()
            assert progress_of([engine.address], engine, 1) == step
        wire = wire_of(None)
        with pytest.raises(Waiting):
            cohort.average(Offering(wire, wire.contribution(torch.zeros(4), None), 0, 4, 4))
        assert progress_of([engine.address], engine, 1) == 3
    finally:
        cohort.close()
        engine.close()
