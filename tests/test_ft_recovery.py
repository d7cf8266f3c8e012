"""What is done about a failure, as pure logic: the ladder from the trainers to another allocation, and meetings."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma.errors import ConfigError
from monarch_rdma.ft import GiveUp, Recover, Recovery, RecoveryPolicy, Rung, TrainingPlan
from monarch_rdma.ft.quorum import Meeting, Standing
from monarch_rdma.supervision.policy import Backoff, Policy

LADDER = RecoveryPolicy(
    trainers=Policy(max_restarts=2, within=10.0),
    replica=Policy(max_restarts=1, within=100.0),
    allocation=Policy(max_restarts=1, within=1000.0, backoff=Backoff(initial=5.0, maximum=5.0)),
)


def rungs(recovery: Recovery, *failures: tuple[Rung, float]) -> list[Any]:
    decisions = [recovery.failed(rung, at) for rung, at in failures]
    return [decision.rung if isinstance(decision, Recover) else "given up" for decision in decisions]


def test_what_keeps_failing_climbs_the_ladder_and_begins_anew_below() -> None:
    failures = [(Rung.TRAINERS, float(at)) for at in range(12)]
    t, r, a = Rung.TRAINERS, Rung.REPLICA, Rung.ALLOCATION
    assert rungs(Recovery(LADDER), *failures) == [t, t, r, t, t, a, t, t, r, t, t, "given up"]


def test_failures_that_are_far_apart_do_not_add_up() -> None:
    assert set(rungs(Recovery(LADDER), *((Rung.TRAINERS, 11.0 * at) for at in range(50)))) == {Rung.TRAINERS}


def test_a_lost_replica_is_not_a_matter_of_its_trainers() -> None:
    decided = rungs(Recovery(LADDER), (Rung.REPLICA, 0.0), (Rung.REPLICA, 1.0), (Rung.ALLOCATION, 2.0))
    assert decided == [Rung.REPLICA, Rung.ALLOCATION, "given up"]


def test_a_new_allocation_waits() -> None:
    decision = Recovery(LADDER).failed(Rung.ALLOCATION, 0.0)
    assert decision == Recover(Rung.ALLOCATION, 5.0, 1)


limits = st.builds(Policy, max_restarts=st.integers(0, 3), within=st.floats(0.5, 50.0))
policies = st.builds(RecoveryPolicy, trainers=limits, replica=limits, allocation=limits)


@given(policies, st.lists(st.tuples(st.sampled_from(Rung), st.floats(0.0, 20.0)), max_size=40))
def test_no_rung_is_tried_more_often_than_its_policy_says(policy: RecoveryPolicy, failures: Any) -> None:
    recovery, now = Recovery(policy, rng=Random(0)), 0.0
    tried: dict[Rung, list[float]] = {rung: [] for rung in Rung}
    for failed, pause in failures:
        now += pause
        decision = recovery.failed(failed, now)
        if isinstance(decision, GiveUp):
            chosen, exhausted = None, [rung for rung in Rung if rung >= failed]
        else:
            chosen, exhausted = decision.rung, [rung for rung in Rung if failed <= rung < decision.rung]
            assert decision.rung >= failed
        for rung in exhausted:  # nothing is skipped that could have been tried
            limit = policy.rungs[rung]
            assert sum(now - at <= limit.within for at in tried[rung]) == limit.max_restarts
        if chosen is not None:
            limit = policy.rungs[chosen]
            tried[chosen].append(now)
            assert sum(now - at <= limit.within for at in tried[chosen]) <= limit.max_restarts
            for below in Rung:
                if below < chosen:
                    tried[below] = []


@pytest.mark.parametrize("arguments", [{"trainers": 3}, {"allocation": None}])
def test_a_policy_of_something_else_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        RecoveryPolicy(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"steps": 0}, {"replicas": True}, {"trainers": 1.5}, {"sync_timeout": 0}, {"recipe": 7},
     {"quorum_timeout": "long"}, {"sync_timeout": math.inf}, {"threads": -1}, {"gpus_per_proc": "one"}, {"backend": 5},
     {"trainer_env": 5}, {"preload": "os"}, {"coordination": 5}, {"lighthouse": 5}],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))} is {next(iter(arguments.values()))!r}"):
        TrainingPlan(**{"recipe": print, "steps": 100, **arguments})


# --- meetings


def meeting(rank: int, *standings: tuple[bool, int, int]) -> Meeting:
    ranks = range(len(standings))
    full = tuple(Standing(fresh, rounds, steps, 0, span=steps) for fresh, rounds, steps in standings)
    return Meeting(tuple(ranks), tuple(f"address {each}" for each in ranks), full, rank)


def test_the_first_of_those_who_begin_is_whom_the_others_follow() -> None:
    for rank in range(3):
        founding = meeting(rank, (True, 0, 0), (True, 0, 0), (True, 0, 0))
        assert (founding.is_founding, founding.ahead, founding.is_behind) == (True, (0,), rank != 0)


def test_one_who_begins_follows_those_who_train() -> None:
    late = meeting(0, (True, 0, 7), (False, 0, 20), (False, 0, 20))
    assert (late.is_founding, late.ahead, late.is_behind) == (False, (1, 2), True)
    assert late.contributed == (0, 20, 20) and late.weight == 0


def test_a_fragment_is_weighed_by_the_steps_that_are_in_it_and_not_by_those_of_the_round() -> None:
    """One has come in the middle of the fragment before, and has made as many steps since then as the others."""
    all_of_them = tuple(Standing(False, 7, 10, 210, span=span) for span in (20, 20, 14))
    seen = [Meeting((0, 1, 2), ("", "", ""), all_of_them, rank) for rank in range(3)]
    assert [each.weight for each in seen] == [3 * 20 / 54, 3 * 20 / 54, 3 * 14 / 54]
    assert seen[0].contributed == (10, 10, 10) and seen[0].spans == (20, 20, 14)


def test_who_missed_the_end_of_a_synchronisation_follows_and_has_contributed_already() -> None:
    split = meeting(1, (False, 5, 20), (False, 4, 20), (False, 5, 20))
    assert (split.ahead, split.is_behind, split.contributed) == ((0, 2), True, (20, 0, 20))


standings = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=8)


@given(standings)
def test_all_see_the_same_meeting_and_weights_are_one_on_average(given_standings: Any) -> None:
    seen = [meeting(rank, *given_standings) for rank in range(len(given_standings))]
    assert len({(each.ahead, each.contributed, each.is_founding) for each in seen}) == 1
    assert sum(each.weight for each in seen) == pytest.approx(len(seen))
    assert seen[0].ahead  # somebody's state counts
    assert not any(seen[rank].is_behind for rank in seen[0].ahead)
