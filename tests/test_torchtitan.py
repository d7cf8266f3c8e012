"""TorchTitan's own trainer in replicas: FSDP inside each, DiLoCo between them, and one that is killed comes back."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from monarch_rdma.actor import HostMesh
from monarch_rdma.actor.chaos import Injector
from monarch_rdma.ft import Ended, Healed, Report, Stepped, Synchronised, TrainingPlan, train
from monarch_rdma.supervision.chaos import Fault, Plan

pytest.importorskip("torchtitan", reason="torchtitan is not installed (extra `titan`): its trainer is not run")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.torchtitan import assets, configs
from examples.torchtitan.replicas import recipe

EVERY, ROUNDS = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and a tokenizer."""
    path = tmp_path_factory.mktemp("titan")
    assets.make(path, most_documents=60)
    return path


def plan(folder: Path, rounds: int, replicas: int, trainers: int) -> TrainingPlan:
    made = recipe(configs.llama3_debug, folder, steps=EVERY * rounds, every=EVERY)
    steps = EVERY * rounds * replicas
    return TrainingPlan(made, steps, replicas, trainers, threads=1, preload=("examples.torchtitan.preloaded",))


@pytest.mark.timeout(300)
def test_replicas_of_the_debug_model_train_and_one_that_is_killed_heals(client: HostMesh, folder: Path) -> None:
    reports: list[Report] = []
    killed: list[Report] = []

    def watch(report: Report) -> None:
        reports.append(report)
        if isinstance(report, Stepped) and (report.rounds, report.step) == (1, 2) and not killed:
            killed.append(report)
            injected = Injector(Plan(())).inject(Fault("kill", target="trainers1/1"))
            assert not injected.problem, injected

    assert train(plan(folder, ROUNDS, replicas=2, trainers=2), watch=watch) == Ended((0, 1))
    steps = [each for each in reports if isinstance(each, Stepped)]
    assert killed and all(math.isfinite(each.loss) for each in steps)
    healed = [each for each in reports if isinstance(each, Healed) and each.life > 1]
    assert [each.replica for each in healed] == [1] and healed[0].rounds >= 1 and healed[0].bytes > 0
    rounds = [each for each in reports if isinstance(each, Synchronised)]
    assert rounds[-1].members == (0, 1), "the replica that was killed is in again"
    first = [each.loss for each in steps if each.rounds == 0]
    last = [each.loss for each in steps if each.rounds == max(step.rounds for step in steps)]
    # A vocabulary of 2048, of which a model that knows nothing gives each the same: log(2048) is 7.6.
    assert all(7 < loss < 9 for loss in first), "the loss is not that of one replica"
    assert sum(last) / len(last) < sum(first) / len(first) - 0.1
