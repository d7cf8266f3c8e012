"""What came of a training, from what was reported of it."""

from __future__ import annotations

import pytest

from monarch_rdma.ft import Decided, Healed, History, Measured, Recovered, Report, Stepped, Struck, Synchronised
from monarch_rdma.ft.measured_run import measured_run
from monarch_rdma.ft.simulate.measured import measured_of, replay

BOTH = (0, 1)


def played(*reports: Report, struck: tuple[Struck, ...] = ()) -> History:
    history = History(struck=list(struck))
    for report in reports:
        history.add(report)
    return history


def steps(replica: int, life: int, rounds: int, *times: float) -> list[Stepped]:
    return [Stepped(at, replica, life, rounds, number, 4.0 - at / 10) for number, at in enumerate(times, 1)]


def synchronised(at: float, rounds: int, total: int, members: tuple[int, ...] = BOTH) -> list[Synchronised]:
    return [Synchronised(at, each, 1, rounds, members, (2,) * len(members), total, 0.1) for each in members]


LOST = played(
    *steps(0, 1, 0, 1.0, 2.0), *steps(1, 1, 0, 1.0, 2.0), *synchronised(2.5, 1, 4),
    *steps(0, 1, 1, 3.0), *steps(1, 1, 1, 3.0),
    Decided(3.6, 1, "replica", 0.0, "killed"),
    Healed(4.5, 1, 1001, 1, 0.2, 100, 1, 100),
    *steps(0, 1, 1, 3.0, 4.0)[1:], *synchronised(4.1, 2, 6, (0,)),
    *steps(1, 1001, 1, 5.0),
    struck=(Struck(0.5, 1, "cut a link", "trainers1/0"), Struck(3.5, 1, "kill a replica", "replica1/0")),
)  # fmt: skip


def test_a_recovery_lasts_from_the_fault_to_the_first_step_that_follows() -> None:
    (recovered,) = LOST.recoveries()
    assert recovered == Recovered(1, "kill a replica", "replica", 3.5, 5.0, lost=1, healing=0.2)
    assert recovered.seconds == 1.5


def test_steps_that_were_never_synchronised_are_lost() -> None:
    assert (LOST.steps, LOST.steps_lost) == (6, 2)
    assert LOST.seconds == 4.0 and LOST.rate == 1.5


def test_who_takes_part_changes_with_failures() -> None:
    assert LOST.active() == [(1.0, 1), (1.0, 2), (3.5, 1), (4.0, 0), (5.0, 1), (5.0, 0)]
    assert [each.members for each in LOST.rounds()] == [BOTH, (0,)]


def test_one_that_fails_again_before_it_is_back_is_one_recovery() -> None:
    twice = played(
        *steps(0, 1, 0, 1.0), Decided(2.0, 0, "trainers", 0.0, "killed"), Decided(3.0, 0, "replica", 0.0, "killed"),
        *steps(0, 2, 0, 6.0),
    )  # fmt: skip
    assert twice.recoveries() == [Recovered(0, "?", "replica", 2.0, 6.0, lost=1, healing=0.0)]


def test_losses_are_by_round_and_measures_by_name() -> None:
    history = played(*steps(0, 1, 0, 10.0, 20.0), *steps(1, 1, 1, 10.0), Measured(1.0, 0, 1, 3, "held out", 2.5))
    assert history.losses() == {0: 2.5, 1: 3.0}
    assert history.measured("held out") == {3: 2.5} and history.measured("other") == {}


def run_of(rounds: int, *, without: set[int]) -> list[Report]:
    """Two replicas, steps of 1 s, two a round, and 0.5 s for each synchronisation; replica 1 is not in some."""
    reports: list[Report] = []
    for number in range(rounds):
        begin, members = number * 2.5, (0,) if number in without else BOTH
        for replica in members:
            reports += steps(replica, 1, number, begin + 1.0, begin + 2.0)
        total = sum(2 if each in without else 4 for each in range(number + 1))
        reports += synchronised(begin + 2.5, number + 1, total, members)
    return reports


def test_a_run_is_held_against_the_model() -> None:
    """The same failure, at the same moment and as long, costs the model's training the same round."""
    reports = run_of(8, without={3})
    failed = next(n for n, report in enumerate(reports) if report.at > 8.0)
    reports.insert(failed, Decided(8.0, 1, "trainers", 0.0, "killed"))
    run = measured_run(played(*reports), title="two", groups=2, steps_per_round=2)
    assert run["step_s"] == pytest.approx(1.0) and run["sync_s"] == pytest.approx(0.5)
    assert run["failures"] == [{"time_s": 8.0, "group": 1, "recovery_s": pytest.approx(2.0)}]
    assert run["duration_s"] == 20.0 and run["group_rounds"] == 15.0
    found = replay(measured_of(run))
    assert found.outcome.group_rounds == 15 and found.ratio == 1


def test_a_run_without_a_full_round_is_no_measure() -> None:
    with pytest.raises(ValueError, match="no replica has made a round of 2 steps"):
        measured_run(played(*run_of(1, without=set())), title="short", groups=2, steps_per_round=2)


def test_nothing_happened() -> None:
    assert (History().seconds, History().rate, History().steps_lost, History().active()) == (0.0, 0.0, 0, [])
