"""The plain trainer of examples/llama_diloco: what it computes is a function of its seed, and its state is complete."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.llama_diloco import Llama, LlamaConfig, Text, Trainer, TrainerConfig  # noqa: E402

SMALL = TrainerConfig(model=LlamaConfig(dim=32, layers=2, hidden=64, context=32), steps=40, warmup_steps=4, batch=4)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.of_python()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_it_learns_the_text(text: Text) -> None:
    trainer = Trainer(SMALL, text=text)
    before = trainer.evaluate()
    assert abs(before - 5.545) < 0.1  # all 256 bytes alike
    for _ in range(30):
        trainer.step()
    assert trainer.evaluate() < before - 1.0


def test_equal_seeds_are_equal_to_the_bit_and_shards_differ(text: Text) -> None:
    trainers = [Trainer(SMALL, shard=shard, text=text) for shard in (0, 0, 1)]
    assert torch.equal(weights(trainers[0]), weights(trainers[2]))
    losses = [[trainer.step() for _ in range(3)] for trainer in trainers]
    assert losses[0] == losses[1] and losses[0] != losses[2]
    assert torch.equal(weights(trainers[0]), weights(trainers[1]))


def test_a_state_continues_in_another_trainer_as_if_nothing_had_been(text: Text) -> None:
    one, other = Trainer(SMALL, text=text), Trainer(SMALL, text=text)
    for _ in range(6):
        one.step()
    state: dict[str, Any] = copy.deepcopy(one.state_dict())
    other.load_state_dict(state)
    assert other.steps == 6
    assert [one.step() for _ in range(6)] == [other.step() for _ in range(6)]
    assert torch.equal(weights(one), weights(other))
    assert one.schedule.get_last_lr() == other.schedule.get_last_lr()


def test_the_state_has_the_same_tensors_before_and_after_the_first_step(text: Text) -> None:
    trainer = Trainer(SMALL, text=text)

    def shapes() -> list[Any]:
        leaves, spec = tree_flatten(trainer.state_dict())
        return [leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves] + [spec]

    before = shapes()
    trainer.step()
    assert shapes() == before


def test_gradients_that_trainers_of_a_replica_average(text: Text) -> None:
    """Two trainers that average, one after the other, are one with twice the batch, up to rounding."""
    given: list[list[torch.Tensor]] = []
    trainers = [Trainer(SMALL, shard=shard, text=text) for shard in (0, 1)]
    for trainer in trainers:
        trainer.step(lambda gradients: given.append([gradient.clone() for gradient in gradients]))
    means = [(a + b) / 2 for a, b in zip(*given, strict=True)]
    averaged = [Trainer(SMALL, shard=shard, text=text) for shard in (0, 1)]
    for trainer in averaged:
        trainer.step(lambda gradients: [g.copy_(mean) for g, mean in zip(gradients, means, strict=True)] and None)
    assert torch.equal(weights(averaged[0]), weights(averaged[1]))
    assert not torch.equal(weights(averaged[0]), weights(trainers[0]))


def test_a_token_sees_only_those_before_it() -> None:
    model = Llama(SMALL.model)
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % 256
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :20], b[:, :20]) and not torch.equal(a[:, 20:], b[:, 20:])


def test_the_program() -> None:
    command = [sys.executable, "-m", "examples.llama_diloco", "--steps", "4", "--report", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "353,952 parameters" in done.stdout and "step     4: loss" in done.stdout
