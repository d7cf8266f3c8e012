"""Members of a semi-synchronous training are killed at every point of a round: the others go on, with the same bits."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diloco_reference import Reference, Trainer, flat
from members import Members, members

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
STEPS, EVERY = 22, 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Members]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with members(3, setup="from diloco_programs import *", heartbeat_interval=0.1, heartbeat_timeout=3.0) as processes:
        yield processes
    torch.set_num_threads(before)


@pytest.fixture
def processes(pool: Members) -> Members:
    pool.replace_ended()
    pool.form()
    return pool


def expected(member: int, rounds: list[tuple[int, ...]], every: int, **options: Any) -> torch.Tensor:
    """A member's weights after these members have taken part in these rounds."""
    reference = Reference({name: Trainer(name) for name in range(3)}, lambda t: [t.model], every=every, **options)
    reference.run(STEPS, lambda number: rounds[number])
    return flat(reference.trainers[member].model)


def finish(processes: Members, lost: int) -> dict[int, Any]:
    return {name: processes.children[name].finish() for name in range(3) if name != lost}


def check(results: dict[int, Any], every: int, in_round: int | None = None, **options: Any) -> None:
    """All survivors say that the same members took part in each round, and have the weights that follow from it. The
    round in which a member is lost is with or without it.
    """
    rounds = next(iter(results.values()))[1]
    assert len(rounds) == STEPS // every
    for name, (weights, members_of_rounds) in results.items():
        assert members_of_rounds == rounds
        assert torch.equal(weights, expected(name, rounds, every, **options))
    if in_round is not None:
        assert all(each == (0, 1, 2) for each in rounds[:in_round])
        assert all(each == tuple(results) for each in rounds[in_round + 1 :])


MOMENTS = [
    ("all_gather", 0, True),
    ("all_to_all", 0, True),
    ("all_gather", 1, True),
    ("all_gather", 1, False),
    ("all_gather", 2, False),
]


@pytest.mark.parametrize(("call", "which", "is_before"), MOMENTS if LONG else MOMENTS[1::2])
def test_killed_in_the_middle_of_a_round(processes: Members, call: str, which: int, is_before: bool) -> None:
    victim = MOMENTS.index((call, which, is_before)) % 3
    processes.run("kill_myself_in(1, call, which, is_before)", [victim], call=call, which=which, is_before=is_before)
    processes.start("result = train(group, [0, 1, 2], steps, every=every)", steps=STEPS, every=EVERY)
    check(finish(processes, victim), EVERY, in_round=1)


def test_killed_between_rounds_while_an_averaging_is_under_way(processes: Members) -> None:
    options = {"every": EVERY, "delay": 2, "mix": 0.5}
    code = "result = train(group, [0, 1, 2], steps, kill_at=9 if rank == 0 else None, **options)"
    processes.start(code, steps=STEPS, options=options)
    check(finish(processes, 0), in_round=1, **options)


def test_killed_at_random_moments(pool: Members) -> None:
    for seed in range(100 if LONG else 2):
        draw = random.Random(seed)
        victim = draw.randrange(3)
        pool.replace_ended()
        pool.form()
        pool.start("result = train(group, [0, 1, 2], steps, every=1)", steps=STEPS)
        time.sleep(draw.random() * 0.2)  # whenever: it is right at any moment
        pool.children[victim].kill()
        check(finish(pool, victim), every=1)
