"""The same training where TorchFT's lighthouse says who is in, and its Managers bring replicas together."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from programs import Program
from toy_training import Deed, Watch, agreed, inject, plan

from monarch_rdma.actor import HostMesh
from monarch_rdma.errors import ConfigError
from monarch_rdma.ft import Decided, DiLoCo, Ended, Healed, Report, Synchronised, TrainingPlan, train
from monarch_rdma.supervision.membership import MembershipOptions

pytest.importorskip("torchft", reason="TorchFT is not installed: pip install 'monarch-rdma[ft]'")

LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000, heartbeat_timeout_ms=2000)
print("http://127.0.0.1:" + server.address().rpartition(":")[2], flush=True)
sys.stdin.read()
"""
TWO: dict[str, Any] = {"replicas": 2, "coordination": "torchft", "sync_timeout": 20.0}
SOON = MembershipOptions(minimum=1, timeout=1.0)  # when TorchFT's lighthouse takes a replica for dead


class Enough(Exception):
    """The test has seen what it wanted."""


class UntilHealed(Watch):
    """Ends the training when these replicas have come back one after the other, and all have made two whole rounds."""

    def __init__(self, at: dict[int, Deed], *replicas: int) -> None:
        super().__init__(at, replicas=2)
        self._away = [*replicas]
        self._whole = 0

    def __call__(self, report: Report) -> None:
        super().__call__(report)
        if isinstance(report, Healed) and report.rounds > 1 and report.replica in self._away:
            self._away.remove(report.replica)
        if isinstance(report, Synchronised) and report.replica == 0:
            self._whole = 0 if self._away or report.contributed != (10, 10) else self._whole + 1
            if self._whole == 2:
                raise Enough


def test_a_replica_and_a_trainer_are_killed_and_heal(client: HostMesh, tmp_path: Path) -> None:
    watch = UntilHealed({2: inject("kill", "replica1/0"), 8: inject("kill", "trainers0/1")}, 1, 0)
    with pytest.raises(Enough):
        train(plan(tmp_path, 10_000, trainers=2, **TWO), membership=SOON, watch=watch)
    assert [(each.replica, each.what) for each in watch.of(Decided)] == [(1, "replica"), (0, "trainers")]
    agreed(tmp_path)
    for replica in range(2):
        numbers = [each.rounds for each in watch.of(Synchronised) if each.replica == replica]
        assert numbers == sorted(set(numbers)), "no round is counted twice"


def test_what_a_newcomer_has_done_before_it_is_in_has_no_weight(client: HostMesh, tmp_path: Path) -> None:
    """It comes with what the others have, and with nothing of theirs a second time."""
    watch = UntilHealed({2: inject("kill", "replica1/0")}, 1)
    with pytest.raises(Enough):
        train(plan(tmp_path, 10_000, trainers=1, **TWO), membership=SOON, watch=watch)
    weights = {each.rounds: each.contributed for each in watch.of(Synchronised)}
    back = max(each.rounds for each in watch.of(Healed)) + 1  # the round that it came in by
    assert back > 2 and weights[back] == (10, 0)
    shared = {number: value / 5000 for number, value in agreed(tmp_path).items()}
    assert all(value == 10 * number for number, value in shared.items()), shared


def test_it_ends_with_its_last_step(client: HostMesh, tmp_path: Path) -> None:
    """With a lighthouse that somebody else has started."""
    with contextlib.closing(Program(LIGHTHOUSE)) as lighthouse:
        training = plan(tmp_path, 3, trainers=1, lighthouse=lighthouse.line(), **TWO)
        assert train(training) == Ended((0, 1))
    assert agreed(tmp_path) == {1: 50_000, 2: 100_000, 3: 150_000}


def test_wrong_ways_to_be_coordinated_are_refused(tmp_path: Path) -> None:
    def recipe(place: object, cohort: object) -> None:
        return None

    with pytest.raises(ConfigError, match="coordination is 'raft', but must be one of monarch_rdma, torchft"):
        TrainingPlan(recipe, steps=1, coordination="raft")
    with pytest.raises(ConfigError, match='lighthouse is .*, which only coordination="torchft" uses'):
        TrainingPlan(recipe, steps=1, lighthouse="http://there:29510")


def test_a_round_that_overlaps_with_steps_is_refused() -> None:
    import torch

    from monarch_rdma.ft.torchft_cohort import TorchFTCohort

    cohort = TorchFTCohort.__new__(TorchFTCohort)
    with pytest.raises(ConfigError, match="delay is 2, but must be 0: TorchFTCohort reads states as a round ends"):
        DiLoCo(torch.nn.Linear(2, 2), cohort, every=4, delay=2)
