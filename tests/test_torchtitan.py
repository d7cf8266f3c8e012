"""TorchTitan's own trainer in replicas: FSDP inside each, DiLoCo between them, and one that is killed comes back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

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
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and a tokenizer."""
    path = tmp_path_factory.mktemp("titan")
    assets.make(path, most_documents=60)
    return path


def plan(folder: Path, rounds: int, replicas: int, trainers: int, config: Any = configs.llama3_debug) -> TrainingPlan:
    made = recipe(config, folder, steps=EVERY * rounds, every=EVERY)
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


def test_the_8b_configuration_is_of_the_8b_model(tmp_path: Path) -> None:
    program = """
import sys
import torch
from pathlib import Path
from examples.torchtitan import configs, on_cpu
on_cpu.prepare()
config = configs.llama3_8b(Path(sys.argv[1]))
with torch.device("meta"):
    model = config.model_spec.model.build()
print(sum(parameter.numel() for parameter in model.parameters()), config.checkpoint.enable)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=200)
    assert done.stdout.split() == ["8030261248", "False"], done.stderr


def with_layers_of_the_debug_model(folder: Path) -> Any:
    """All of the 8B configuration but the size: its data, loss, optimizer, precision, recomputation and sharding."""
    config, debug = configs.llama3_8b(folder), configs.llama3_debug(folder)
    config.model_spec, config.loss = debug.model_spec, debug.loss
    config.training.seq_len, config.training.disable_cuda_graphs = 128, True
    return config


@pytest.mark.timeout(300)
def test_the_8b_configuration_trains_in_replicas_of_two(client: HostMesh, folder: Path) -> None:
    reports: list[Report] = []
    eight = plan(folder, 2, replicas=2, trainers=2, config=with_layers_of_the_debug_model)
    assert train(eight, watch=reports.append) == Ended((0, 1))
    assert all(7 < each.loss < 9 for each in reports if isinstance(each, Stepped))
    assert {each.members for each in reports if isinstance(each, Synchronised)} == {(0, 1)}
