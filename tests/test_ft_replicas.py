"""Replicas of trainers in real processes, which are killed, stopped and cut off: the others go on, they come back."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from toy_training import Watch, agreed, inject, plan, toy

from monarch_rdma.actor import HostMesh, this_host
from monarch_rdma.errors import RdmaError
from monarch_rdma.ft import (
    Cohort,
    Decided,
    Ended,
    Healed,
    Measured,
    Place,
    RecoveryPolicy,
    Report,
    Stepped,
    Synchronised,
    TrainersStarted,
    Training,
    TrainingPlan,
    train,
)
from monarch_rdma.supervision.membership import MembershipOptions
from monarch_rdma.supervision.policy import Policy

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
NEVER = Policy(max_restarts=0, within=60.0)
TOGETHER = MembershipOptions(maximum=3, join_window=60.0)  # nobody begins before all are there
MANY = 100  # rounds: as many as it may take until all faults are over; those that are left are quick


def test_without_failures_every_round_is_the_same_on_all(client: HostMesh, tmp_path: Path) -> None:
    watch = Watch()
    assert train(plan(tmp_path, 4), membership=TOGETHER, watch=watch) == Ended((0, 1, 2))
    shared = agreed(tmp_path)
    assert {number: value / 5000 for number, value in shared.items()} == {1: 10, 2: 20, 3: 30, 4: 40}
    assert len(watch.of(TrainersStarted)) == 3 and not watch.of(Decided)
    assert {each.contributed for each in watch.of(Synchronised)} == {(10, 10, 10)}


def test_whoever_is_lost_comes_back_and_heals_from_the_others(client: HostMesh, tmp_path: Path) -> None:
    watch = Watch(
        {
            2: inject("kill", "trainers1/1"),
            6: inject("kill", "replica2/0"),
            10: inject("abort_group", "trainers0/0"),
            14: inject("stop", "trainers1/0", seconds=0.5),
            16: inject("cut_link", "trainers0/0", peer="trainers1/0", seconds=0.5),
        },
        folder=tmp_path,
    )
    ended = train(plan(tmp_path, MANY), watch=watch)
    assert ended == Ended((0, 1, 2))
    assert [(each.replica, each.what) for each in watch.of(Decided)] == [
        (1, "trainers"), (2, "replica"), (0, "trainers"),
    ]  # fmt: skip
    agreed(tmp_path)
    healed = [each for each in watch.of(Healed) if each.rounds]
    assert all(each.verified == each.bytes > 0 for each in healed)
    for replica in range(3):  # each of them has come back, and has read what the others had
        assert any(each.replica == replica and each.rounds > 1 for each in watch.of(Healed))
    assert watch.of(Synchronised)[-1].total >= MANY * 30
    assert sorted(watch.of(Synchronised)[-1].members) == [0, 1, 2]


def test_healthy_replicas_lose_nothing_by_the_death_of_another(client: HostMesh, tmp_path: Path) -> None:
    watch = Watch({1: inject("kill", "replica2/0"), 4: inject("kill", "trainers2/0")}, folder=tmp_path)
    train(plan(tmp_path, MANY), membership=TOGETHER, watch=watch)
    done = {replica: [] for replica in (0, 1)}
    for report in watch.of(Stepped):
        if report.replica in done:
            done[report.replica].append((report.rounds, report.step))
    for steps in done.values():
        assert len(steps) == len(set(steps)), "none is done twice"
    rounds = {each.rounds: each for each in watch.of(Synchronised)}
    assert sorted(rounds) == list(range(1, len(rounds) + 1))
    for each in rounds.values():
        contributed = dict(zip(each.members, each.contributed, strict=True))
        assert [contributed.get(replica) for replica in done] == [10, 10], each
    came_back = [each for each in watch.of(Measured) if each.replica == 2 and each.life > 1]
    assert came_back, "its trainer has taken over how far the others' trainers were"
    assert all(each.value == 10 * each.rounds for each in came_back), came_back


def test_with_the_backends_and_devices_of_a_cluster_of_gpus(client: HostMesh, tmp_path: Path) -> None:
    """As far as it goes without one: each trainer has a GPU of its own to see, and an aborted group is made anew."""
    shared, seen = tmp_path / "shared", tmp_path / "seen"
    shared.mkdir()
    made = toy(shared)

    def recipe(place: Place, cohort: Cohort) -> Training:
        devices = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HIP_VISIBLE_DEVICES"], dist.get_backend()
        with open(seen, "a") as file:
            file.write(f"{place.replica} {place.rank} {' '.join(devices)}\n")
        return made(place, cohort)

    backend = "cpu:monarch_rdma,cuda:nccl"
    training = replace(plan(shared, MANY, replicas=2, backend=backend, gpus_per_proc=1), recipe=recipe)
    watch = Watch({2: inject("abort_group", "trainers1/0")}, replicas=2, folder=shared)
    assert train(training, watch=watch) == Ended((0, 1))
    assert [(each.replica, each.what) for each in watch.of(Decided)] == [(1, "trainers")]
    agreed(shared)
    lives = [f"{replica} {rank} {rank} {rank} {backend}" for replica in (0, 1, 1) for rank in (0, 1)]
    assert sorted(seen.read_text().splitlines()) == sorted(lives)


def test_sums_that_overlap_with_steps_count_the_steps_of_their_own_round(client: HostMesh, tmp_path: Path) -> None:
    """In two fragments, whose replicas differ, so that a weight that depended on the moment would show. The mean of all
    is 2 a step; 3 of 10 steps are made while a sum is, and then replaced by it.
    """
    options: dict[str, Any] = {"every": 20, "fragments": 2, "delay": 3, "in_step": False, "seconds": 0.005}
    recipe, watch = toy(tmp_path, **options), Watch()
    assert train(replace(plan(tmp_path, 6), recipe=recipe), membership=TOGETHER, watch=watch) == Ended((0, 1, 2))
    of_fragments = [(20, 0), (20, 40), (54, 40), (54, 74), (88, 74), (88, 108)]
    assert agreed(tmp_path) == {number: 5000 * sum(each) for number, each in enumerate(of_fragments, 1)}
    assert {each.contributed for each in watch.of(Synchronised)} == {(10, 10, 10)}
    assert {each.total for each in watch.of(Synchronised)} == {30 * number for number in range(1, 7)}


def test_what_a_newcomer_brings_in_is_weighed_by_the_steps_in_it(client: HostMesh, tmp_path: Path) -> None:
    """Of two fragments in turn: all steps are 1, so that a mean of contributions says by what each was weighed."""
    watch = Watch({3: inject("kill", "trainers1/0"), 9: inject("kill", "replica2/0")}, folder=tmp_path)
    recipe = toy(tmp_path, every=20, fragments=2)
    training = replace(plan(tmp_path, MANY, trainers=1), recipe=recipe)
    assert train(training, membership=TOGETHER, watch=watch) == Ended((0, 1, 2))
    shared, spans = agreed(tmp_path), {each.rounds: each.spans for each in watch.of(Synchronised)}
    for number, value in shared.items():
        moved = (value - shared.get(number - 1, 0.0)) / 5000
        assert moved == pytest.approx(sum(span**2 for span in spans[number]) / sum(spans[number]), rel=1e-5), number
    assert any(0 < min(each) < max(each) == 20 for each in spans.values()), "nobody came in the middle of a fragment"


def test_who_is_lost_in_a_round_that_overlaps_comes_back_and_heals(client: HostMesh, tmp_path: Path) -> None:
    deeds = {
        2: inject("kill", "trainers1/1"),
        6: inject("kill", "replica2/0"),
        10: inject("abort_group", "trainers0/0"),
    }
    watch = Watch(deeds, folder=tmp_path)
    recipe = toy(tmp_path, every=20, fragments=2, delay=4, mix=0.25, quantize="int8", in_step=False)
    assert train(replace(plan(tmp_path, MANY), recipe=recipe), watch=watch) == Ended((0, 1, 2))
    assert [each.replica for each in watch.of(Decided)] == [1, 2, 0]
    agreed(tmp_path)
    for replica in range(3):
        assert any(each.replica == replica and each.rounds > 1 for each in watch.of(Healed))
    rounds = {each.rounds for each in watch.of(Synchronised)}
    assert rounds == set(range(1, len(rounds) + 1)), "no averaging is left out"
    assert sorted(watch.of(Synchronised)[-1].members) == [0, 1, 2]


class Enough(Exception):
    """The test has seen what it wanted."""


class Reaper:
    """Kills one replica after the other, each when both have ended a round together since the last death: what only one
    of them has is lost with it.
    """

    def __init__(self, deaths: int) -> None:
        self.left, self.victim = deaths, 0
        self.killed, self.lives = {0: 0, 1: 0}, {0: 0, 1: 0}  # which life was ended, and which one is seen
        self.rounds: list[int] = []
        self.together: set[int] = set()

    def __call__(self, report: Report) -> None:
        if not isinstance(report, Synchronised):
            return
        self.rounds.append(report.rounds)
        self.lives[report.replica] = report.life
        if len(report.members) == 2 and report.life > self.killed[report.replica]:
            self.together.add(report.replica)
        if self.together != {0, 1}:
            return
        if not self.left:
            raise Enough
        self.killed[self.victim] = self.lives[self.victim]
        inject("kill", f"replica{self.victim}/0").do()
        self.together.clear()
        self.left, self.victim = self.left - 1, 1 - self.victim


def test_nothing_is_left_of_replicas_that_died(client: HostMesh, tmp_path: Path) -> None:
    """What this process still has when all is over is looked at when the module's tests are done."""
    reaper = Reaper(100 if LONG else 5)
    policy = RecoveryPolicy(replica=Policy(max_restarts=None))
    with pytest.raises(Enough):
        train(plan(tmp_path, 100_000, replicas=2, trainers=1), policy=policy, watch=reaper)
    assert all(after >= before - 1 for before, after in pairwise(reaper.rounds)), "more than a round was lost"


class Hosts:
    """Gives this host out, and counts how often."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def allocate(self, replica: int) -> HostMesh:
        self._note(f"allocate {replica}")
        return this_host()

    def release(self, replica: int, hosts: HostMesh | None) -> None:
        self._note(f"release {replica}")

    def _note(self, what: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{what}\n")


def test_the_job_is_asked_for_another_allocation_and_then_a_replica_is_given_up(
    client: HostMesh, tmp_path: Path
) -> None:
    policy = RecoveryPolicy(trainers=NEVER, replica=NEVER, allocation=Policy(max_restarts=1, within=600.0))
    shared, log = tmp_path / "shared", tmp_path / "log"
    shared.mkdir()
    watch = Watch({1: inject("kill", "trainers1/0"), 5: inject("kill", "trainers1/0")}, folder=shared)
    ended = train(plan(shared, MANY), allocator=Hosts(log), policy=policy, watch=watch)
    assert ended.done == (0, 2) and "1 allocations within 600 s have failed" in ended.given_up[1]
    assert [each.what for each in watch.of(Decided)] == ["allocation", "given up"]
    noted = log.read_text().splitlines()
    assert noted.count("allocate 1") == 2 and noted.count("allocate 0") == 1
    assert all(noted.count(f"release {number}") == noted.count(f"allocate {number}") for number in range(3))
    agreed(shared)


class TwoHosts(Hosts):
    def allocate(self, replica: int) -> Any:
        super().allocate(replica)
        return [this_host(), this_host()]


def test_trainers_that_do_not_fit_on_the_hosts_are_refused(client: HostMesh, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="trainers is 3, which cannot be dealt out evenly to the 2 hosts of replica 0"):
        train(plan(tmp_path, 1, replicas=1, trainers=3), allocator=TwoHosts(tmp_path / "log"))
    assert (tmp_path / "log").read_text().splitlines() == ["allocate 0", "release 0"], "it does not try again"


def test_where_nothing_can_be_had_the_training_ends_with_a_sentence(client: HostMesh, tmp_path: Path) -> None:
    class Nothing(Hosts):
        def allocate(self, replica: int) -> HostMesh:
            raise LookupError("the cluster is full")

    policy = RecoveryPolicy(trainers=NEVER, replica=NEVER, allocation=NEVER)
    with pytest.raises(Exception, match="all replicas were given up.*the cluster is full") as raised:
        train(plan(tmp_path, 1), allocator=Nothing(tmp_path / "log"), policy=policy)
    assert isinstance(getattr(raised.value, "exception", raised.value), RdmaError)


def test_a_recipe_that_fails_is_told(client: HostMesh, tmp_path: Path) -> None:
    def recipe(place: Any, cohort: Any) -> Any:
        raise LookupError("no such model")

    policy = RecoveryPolicy(trainers=NEVER, replica=NEVER, allocation=NEVER)
    with pytest.raises(Exception, match="no such model"):
        train(TrainingPlan(recipe, steps=10, replicas=1, trainers=1), policy=policy)
