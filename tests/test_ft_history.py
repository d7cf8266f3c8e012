"""What came of a training, from what was reported of it."""

from __future__ import annotations

from monarch_rdma.ft import Decided, Healed, History, Measured, Recovered, Report, Stepped, Struck, Synchronised

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


def test_nothing_happened() -> None:
    assert (History().seconds, History().rate, History().steps_lost, History().active()) == (0.0, 0.0, 0, [])
