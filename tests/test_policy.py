"""Policies: against a model of OTP's rules, and whatever comes in whatever order.

The model does what the documentation of Erlang's supervisors says, at once and one event after the other, as they do.
The machine is asked for one decision at a time, with time passing and things going on in between.
"""

from __future__ import annotations

import doctest
import math
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rdma.errors import ConfigError
from monarch_rdma.supervision.policy import (
    Add,
    Backoff,
    ChildSpec,
    Decision,
    Ended,
    Escalate,
    Event,
    Finish,
    Forget,
    Incarnation,
    Kill,
    Policy,
    Remove,
    Restarting,
    Start,
    StartAsked,
    Started,
    StartFailed,
    Stop,
    StopAsked,
    Supervisor,
    Tick,
)

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
Log = list[tuple[str, Hashable]]
STRATEGIES = ("one_for_one", "rest_for_one", "one_for_all")
RESTARTS = ("never", "transient", "always")


def supervisor(policy: Policy, *specs: ChildSpec, seed: int = 0) -> Supervisor:
    return Supervisor(policy, specs, rng=Random(seed))


def one(decisions: list[Decision], kind: type[Any]) -> Any:
    """The only decision of this kind."""
    (found,) = [decision for decision in decisions if isinstance(decision, kind)]
    return found


# --- OTP's rules ---------------------------------------------------------------------------------------------------


class Otp:
    """A supervisor as Erlang documents it. `starts` says for each start in turn whether it works out."""

    def __init__(self, policy: Policy, specs: Sequence[ChildSpec], starts: Iterator[bool]) -> None:
        self.policy, self.starts = policy, starts
        self.types = {spec.child: spec.restart for spec in specs}
        self.alive: set[Hashable] = set()
        self.restarts: list[float] = []
        self.is_terminated = False
        self.log: Log = []

    def start_link(self) -> None:
        if not all(self.start(child) for child in self.types):
            self.terminate()

    def start_child(self, child: Hashable, restart: str) -> None:
        if self.start(child):
            self.types[child] = restart

    def delete_child(self, child: Hashable) -> None:
        self.stop(child)
        self.types.pop(child, None)

    def exit(self, child: Hashable, is_normal: bool, now: float) -> None:
        self.alive.discard(child)
        if self.types[child] == "always" or (self.types[child] == "transient" and not is_normal):
            self.restart(child, now)
        elif self.types[child] == "never":
            del self.types[child]

    def restart(self, failed: Hashable | None, now: float) -> None:
        while failed is not None:
            self.restarts = [at for at in [*self.restarts, now] if now - at <= self.policy.within]
            if len(self.restarts) > self.policy.max_restarts:
                self.terminate()
                return
            order = list(self.types)
            first = {"one_for_all": 0}.get(self.policy.strategy, order.index(failed))
            last = order.index(failed) + 1 if self.policy.strategy == "one_for_one" else len(order)
            for child in reversed(order[first:last]):
                self.stop(child)
                if self.types[child] == "never":
                    del self.types[child]
            kept = [child for child in order[first:last] if child in self.types]
            failed = next((child for child in kept if not self.start(child)), None)

    def terminate(self) -> None:
        for child in reversed(self.types):
            self.stop(child)
        self.is_terminated = True

    def start(self, child: Hashable) -> bool:
        works = next(self.starts)
        self.log.append(("start" if works else "no start", child))
        if works:
            self.alive.add(child)
        return works

    def stop(self, child: Hashable) -> None:
        if child in self.alive:
            self.alive.remove(child)
            self.log.append(("stop", child))


class Obedient:
    """Carries out decisions at once."""

    def __init__(self, machine: Supervisor, starts: Iterator[bool]) -> None:
        self.machine, self.starts = machine, starts
        self.log: Log = []

    def tell(self, event: Event, now: float) -> None:
        events = [event]
        while events:
            for decision in self.machine.handle(events.pop(0), now):
                events += self.carry_out(decision)

    def carry_out(self, decision: Decision) -> Iterator[Event]:
        if isinstance(decision, Start):
            for incarnation in decision.incarnations:
                works = next(self.starts)
                self.log.append(("start" if works else "no start", incarnation.child))
                yield Started(incarnation) if works else StartFailed(incarnation, "no")
        elif isinstance(decision, Stop):
            for incarnation in decision.incarnations:
                self.log.append(("stop", incarnation.child))
                yield Ended(incarnation, True, "stopped")

    def incarnation(self, child: Hashable) -> Incarnation:
        return Incarnation(child, sum(word != "stop" and name == child for word, name in self.log))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    return Policy(draw(st.sampled_from(STRATEGIES)), draw(st.integers(0, 4)), draw(st.sampled_from([1.0, 2.0, 5.0])))


restarts = st.sampled_from(RESTARTS)
happenings = st.lists(
    st.tuples(
        st.sampled_from(["abnormal", "abnormal", "normal", "add", "remove"]),
        st.integers(0, 9),
        restarts,
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    ),
    max_size=12,
)


@settings(max_examples=1000 if LONG else 300, deadline=None)
@given(policies(), st.lists(restarts, max_size=5), happenings, st.lists(st.sampled_from([True, True, True, False])))
def test_what_is_stopped_and_started_is_what_otp_says(
    policy: Policy, kinds: list[Any], happened: list[tuple[str, int, Any, float]], outcomes: list[bool]
) -> None:
    def starts() -> Iterator[bool]:
        yield from outcomes
        while True:
            yield True

    specs = [ChildSpec(number, restart) for number, restart in enumerate(kinds)]
    model, stage = Otp(policy, specs, starts()), Obedient(supervisor(policy, *specs), starts())
    model.start_link()
    stage.tell(StartAsked(), 0.0)

    now, next_name = 0.0, len(specs)
    for what, which, restart, pause in happened:
        assert (stage.log, stage.machine.is_over) == (model.log, model.is_terminated)
        if model.is_terminated:
            break
        now += pause
        assert {child: state == "up" for child, state in stage.machine.children.items()} == {
            child: child in model.alive for child in model.types
        }
        if what == "add":
            model.start_child(next_name, restart)
            stage.tell(Add(ChildSpec(next_name, restart)), now)
            next_name += 1
        elif what == "remove" and model.types:
            child = list(model.types)[which % len(model.types)]
            model.delete_child(child)
            stage.tell(Remove(child, "not needed"), now)
        elif model.alive:
            child = sorted(model.alive)[which % len(model.alive)]
            stage.tell(Ended(stage.incarnation(child), what == "normal", what), now)
            model.exit(child, what == "normal", now)
    assert (stage.log, stage.machine.is_over) == (model.log, model.is_terminated)


# --- whatever comes, in whatever order -----------------------------------------------------------------------------


class Stage:
    """Children that take their time, and rules that must hold whenever something is decided."""

    def __init__(self, policy: Policy, specs: Sequence[ChildSpec], seed: int) -> None:
        self.machine = Supervisor(policy, specs, rng=Random(seed))
        self.policy = policy
        self.now = 0.0
        self.specs = {spec.child: spec for spec in specs}
        self.order = [spec.child for spec in specs]
        self.removed: set[Hashable] = set()
        self.alive: dict[Incarnation, str] = {}  # "starting", "up"
        self.told: dict[Incarnation, float] = {}  # to stop, when
        self.killed: set[Incarnation] = set()
        self.ended_normally: set[Hashable] = set()
        self.numbers: dict[Hashable, int] = {}
        self.restarts: list[float] = []
        self.past: list[Event] = []
        self.last: Decision | None = None
        self.is_ending = False

    def tell(self, event: Event) -> None:
        self.past.append(event)
        for decision in self.machine.handle(event, self.now):
            assert self.last is None, "nothing follows the last decision"
            getattr(self, f"on_{type(decision).__name__.lower()}")(decision)
        due = self.machine.wake_at
        assert due is None or due > self.now

    def later(self, child: Hashable) -> list[Incarnation]:
        """What is alive of those after it, and not on its way out by itself."""
        position = self.order.index(child)
        return [one for one in self.alive if self.order.index(one.child) > position and one.child not in self.removed]

    def on_start(self, decision: Start) -> None:
        for child, number in decision.incarnations:
            assert child in self.machine.children and child not in {one.child for one in self.alive}
            assert number == self.numbers.get(child, 0) + 1
            assert number == 1 or self.specs[child].restart != "never"
            assert not self.is_ending
            assert self.policy.strategy == "one_for_one" or not self.policy.in_order or not self.later(child)
            self.numbers[child] = number
        assert not self.policy.in_order or len(decision.incarnations) == 1
        self.alive |= dict.fromkeys(decision.incarnations, "starting")

    def on_stop(self, decision: Stop) -> None:
        for incarnation in decision.incarnations:
            assert incarnation in self.alive and incarnation not in self.told
            assert self.specs[incarnation.child].stop_timeout > 0
            if self.policy.in_order and incarnation.child not in self.removed:
                assert not self.later(incarnation.child)
            self.told[incarnation] = self.now

    def on_kill(self, decision: Kill) -> None:
        for incarnation in decision.incarnations:
            assert incarnation in self.alive and incarnation not in self.killed
            timeout = self.specs[incarnation.child].stop_timeout
            assert timeout == 0 or self.now >= self.told[incarnation] + timeout
            self.killed.add(incarnation)

    def on_restarting(self, decision: Restarting) -> None:
        assert decision.failure.child in decision.children
        self.restarts = [at for at in self.restarts if at >= self.now - self.policy.within] + [self.now]
        assert self.policy.max_restarts is None or len(self.restarts) <= self.policy.max_restarts

    def on_forget(self, decision: Forget) -> None:
        assert decision.child not in {one.child for one in self.alive}
        assert decision.child not in self.machine.children
        self.order.remove(decision.child)

    def on_escalate(self, decision: Escalate) -> None:
        assert not self.alive and decision.reason and decision.failures
        self.last = decision

    def on_finish(self, decision: Finish) -> None:
        assert not self.alive and self.is_ending
        self.last = decision

    # --- what may happen

    def open(self) -> dict[str, list[Incarnation]]:
        return {
            "started": [one for one, state in self.alive.items() if state == "starting"],
            "stopped": [one for one in self.alive if one in self.told or one in self.killed],
            "dies": [one for one, state in self.alive.items() if state == "up"],
        }

    def happen(self, what: str, which: int, is_good: bool) -> None:
        if what == "time":
            self.now += (0.25, 0.5, 2.0, 6.0)[which % 4]
            self.tell(Tick())
        elif what == "repeat" and self.past:
            event = self.past[which % len(self.past)]
            if isinstance(event, Started | Ended | StartFailed) and event.incarnation not in self.alive:
                self.tell(event)
        elif what == "add" and not self.machine.is_ending and len(self.specs) < 8:
            self.add(ChildSpec(len(self.specs), RESTARTS[which % 3], (0.0, 1.0, math.inf)[which % 3]))
        elif what == "remove" and not self.is_ending and self.order:
            child = self.order[which % len(self.order)]
            self.removed.add(child)
            self.tell(Remove(child, "not needed"))
        elif what == "stop":
            self.is_ending = True
            self.tell(StopAsked("enough"))
        elif candidates := self.open().get(what):
            self.happen_to(candidates[which % len(candidates)], what, is_good)

    def add(self, spec: ChildSpec) -> None:
        self.specs[spec.child] = spec
        self.order.append(spec.child)
        self.tell(Add(spec))

    def happen_to(self, incarnation: Incarnation, what: str, is_good: bool) -> None:
        if what == "started" and is_good:
            self.alive[incarnation] = "up"
            self.tell(Started(incarnation))
            return
        del self.alive[incarnation]
        if what == "started":
            self.tell(StartFailed(incarnation, "no memory"))
        else:
            (self.ended_normally.add if is_good else self.ended_normally.discard)(incarnation.child)
            self.tell(Ended(incarnation, is_good, "it ended"))

    def settle(self) -> None:
        """Everything that is open happens, and goes well."""
        for _ in range(200):
            open = self.open()
            if open["stopped"] or open["started"]:
                self.happen("stopped" if open["stopped"] else "started", 0, True)
            elif self.machine.wake_at is not None:
                self.now = self.machine.wake_at
                self.tell(Tick())
            else:
                return
        pytest.fail(f"it does not come to rest: {self.machine.children}")


backoffs = st.builds(
    Backoff,
    initial=st.sampled_from([0.0, 0.25]),
    factor=st.sampled_from([1.0, 2.0]),
    maximum=st.just(1.0),
    jitter=st.sampled_from([0.0, 0.5]),
    reset_after=st.just(4.0),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["started"] * 6 + ["dies"] * 3 + ["stopped"] * 4 + ["time"] * 2 + ["repeat", "add", "remove", "stop"]
        ),
        st.integers(0, 11),
        st.sampled_from([True, True, False]),
    ),
    max_size=40,
)


@settings(max_examples=1000 if LONG else 300, deadline=None)
@given(
    st.sampled_from(STRATEGIES),
    st.sampled_from([0, 2, 5, None]),
    st.booleans(),
    backoffs,
    st.lists(st.tuples(restarts, st.sampled_from([0.0, 1.0, math.inf])), max_size=4),
    steps,
)
def test_rules_hold_whatever_happens_and_everything_comes_to_rest(
    strategy: Any, limit: int | None, in_order: bool, backoff: Backoff, kinds: list[Any], steps: list[Any]
) -> None:
    policy = Policy(strategy, limit, 5.0, backoff, in_order)
    stage = Stage(policy, [ChildSpec(number, *kind) for number, kind in enumerate(kinds)], seed=1)
    stage.tell(StartAsked())
    for step in steps:
        stage.happen(*step)
    stage.settle()
    if stage.machine.is_over:
        assert stage.last is not None and not stage.alive
        return
    assert not stage.is_ending, "a stop that was asked for is carried out"
    for child, state in stage.machine.children.items():
        assert state == "up" or (stage.specs[child].restart == "transient" and child in stage.ended_normally)
    assert stage.removed.isdisjoint(stage.machine.children)


@given(
    st.sampled_from([0.0, 0.25, 0.5, 2.0]),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.sampled_from([2.0, 4.0]),
    st.integers(0, 12),
    st.sampled_from([0.5, 1.0, 8.0, 16.0]),
)
def test_a_child_that_does_nothing_but_fail_is_given_up_or_the_policy_is_refused(
    initial: float, factor: float, maximum: float, limit: int, within: float
) -> None:
    backoff = Backoff(initial, factor, maximum)
    delays = [min(initial * factor**attempt, maximum) for attempt in range(limit)]
    if sum(delays) > within:
        with pytest.raises(ConfigError, match="would never be exceeded"):
            Policy("one_for_one", limit, within, backoff)
        return
    machine = supervisor(Policy("one_for_one", limit, within, backoff), ChildSpec("a"))
    now, waited, child = 0.0, [], one(machine.handle(StartAsked(), 0.0), Start).incarnations[0]
    while not machine.is_over:
        machine.handle(Started(child), now)
        decisions = machine.handle(Ended(child, False, "exit code 1"), now)
        if machine.is_over:
            break
        waited.append(one(decisions, Restarting).delay)
        if (due := machine.wake_at) is not None:
            now = due
            decisions = machine.handle(Tick(), now)
        (child,) = one(decisions, Start).incarnations
    assert waited == delays
    assert [failure.child for failure in one(decisions, Escalate).failures] == ["a"] * (limit + 1)


# --- one thing at a time -------------------------------------------------------------------------------------------


def started(policy: Policy, *specs: ChildSpec, seed: int = 0) -> Supervisor:
    """All children up at time 0."""
    machine = supervisor(policy, *specs, seed=seed)
    Obedient(machine, iter([True] * len(specs))).tell(StartAsked(), 0.0)
    assert set(machine.children.values()) <= {"up"}
    return machine


ABC = [ChildSpec(name) for name in "abc"]
A1, B1, C1 = (Incarnation(name, 1) for name in "abc")
A2, B2, C2 = (Incarnation(name, 2) for name in "abc")


def test_children_start_one_after_the_other_and_stop_in_reverse() -> None:
    machine = supervisor(Policy(), *ABC)
    assert machine.handle(StartAsked(), 0.0) == [Start((A1,))]
    assert machine.handle(Started(A1), 1.0) == [Start((B1,))]
    assert machine.handle(Started(B1), 2.0) == [Start((C1,))]
    assert machine.handle(Started(C1), 3.0) == []
    assert machine.handle(StopAsked("done"), 4.0) == [Stop((C1,), "done")]
    assert machine.handle(Ended(C1, True, ""), 5.0) == [Stop((B1,), "done")]
    assert machine.handle(Ended(B1, False, "exit code 1"), 6.0) == [Stop((A1,), "done")]
    assert machine.handle(Ended(A1, True, ""), 7.0) == [Finish("done")]
    assert machine.handle(StopAsked("again"), 8.0) == []


def test_side_by_side_nobody_waits_for_another() -> None:
    machine = supervisor(Policy("one_for_all", in_order=False), *ABC)
    assert machine.handle(StartAsked(), 0.0) == [Start((A1, B1, C1))]
    machine.handle(Started(A1), 0.0)
    failed = machine.handle(Ended(A1, False, "signal 9"), 0.0)
    assert one(failed, Stop).incarnations == (C1, B1)
    assert machine.handle(Ended(B1, True, ""), 0.0) == []
    assert machine.handle(StartFailed(C1, "stopped"), 0.0) == [Start((A2, B2, C2))]


def test_rest_for_one_stops_and_starts_those_after_it() -> None:
    machine = started(Policy("rest_for_one"), *ABC)
    failed = machine.handle(Ended(B1, False, "signal 9"), 1.0)
    assert one(failed, Restarting).children == ("b", "c")
    assert one(failed, Stop).incarnations == (C1,)
    assert machine.handle(Ended(C1, True, ""), 2.0) == [Start((B2,))]
    assert machine.handle(Started(B2), 3.0) == [Start((C2,))]
    assert machine.children == {"a": "up", "b": "up", "c": "starting"}


def test_a_failure_further_up_while_others_restart_widens_the_restart() -> None:
    machine = started(Policy("rest_for_one", backoff=Backoff(0.5, 1.0)), *ABC)
    machine.handle(Ended(C1, False, "signal 9"), 1.0)
    widened = machine.handle(Ended(A1, False, "signal 9"), 1.25)
    assert one(widened, Restarting).children == ("a", "b", "c")
    assert one(widened, Stop).incarnations == (B1,)
    assert machine.handle(Ended(B1, True, ""), 1.5) == []
    assert machine.wake_at == 1.75
    assert machine.handle(Tick(), 1.75) == [Start((A2,))]


def test_a_failure_further_up_does_not_shorten_the_delay_of_those_that_wait() -> None:
    machine = started(Policy("rest_for_one", backoff=Backoff(0.5, 4.0, 2.0)), *ABC[:2])
    machine.handle(Ended(B1, False, "signal 9"), 0.0)
    machine.handle(Tick(), 0.5)
    machine.handle(StartFailed(B2, "no memory"), 0.5)
    assert one(machine.handle(Ended(A1, False, "signal 9"), 1.0), Restarting).delay == 1.5
    assert machine.wake_at == 2.5


def test_those_that_are_never_restarted_go_with_the_others_for_good() -> None:
    machine = started(Policy("one_for_all"), ChildSpec("a"), ChildSpec("b", "never"))
    assert one(machine.handle(Ended(A1, False, "signal 9"), 0.0), Restarting).children == ("a",)
    forgotten, start = machine.handle(Ended(B1, True, ""), 0.0)
    assert one([forgotten], Forget).child == "b"
    assert start == Start((A2,))


def test_a_child_that_dies_while_the_others_are_stopped_counts_no_second_time() -> None:
    machine = started(Policy("one_for_all", max_restarts=1), *ABC)
    machine.handle(Ended(A1, False, "signal 9"), 0.0)
    assert machine.handle(Ended(B1, False, "its neighbour is gone"), 0.0) == []
    assert machine.handle(Ended(C1, False, "its neighbour is gone"), 0.0) == [Start((A2,))]


@pytest.mark.parametrize(
    ("restart", "normal", "comes_back"),
    [
        ("always", True, True),
        ("always", False, True),
        ("transient", True, False),
        ("transient", False, True),
        ("never", True, False),
        ("never", False, False),
    ],
)
def test_who_comes_back_after_which_end(restart: Any, normal: bool, comes_back: bool) -> None:
    machine = started(Policy(), ChildSpec("a", restart))
    decisions = machine.handle(Ended(A1, normal, "an end"), 0.0)
    assert (Start((A2,)) in decisions) == comes_back
    assert (Forget("a", "an end") in decisions) == (restart == "never")
    assert machine.children == ({} if restart == "never" else {"a": "starting" if comes_back else "down"})


def test_a_transient_child_that_was_done_runs_again_with_the_others() -> None:
    machine = started(Policy("one_for_all"), ChildSpec("a", "transient"), ChildSpec("b"))
    assert machine.handle(Ended(A1, True, "loaded"), 1.0) == []
    assert machine.handle(Ended(B1, False, "signal 9"), 2.0)[-1] == Start((A2,))
    assert machine.handle(Started(A2), 3.0) == [Start((B2,))]


def test_a_first_start_that_fails_takes_back_those_before_it_and_escalates() -> None:
    machine = supervisor(Policy(), *ABC)
    machine.handle(StartAsked(), 0.0)
    machine.handle(Started(A1), 0.0)
    failed = machine.handle(StartFailed(B1, "no such file"), 0.0)
    assert one(failed, Stop).incarnations == (A1,)
    last = one(machine.handle(Ended(A1, True, ""), 0.0), Escalate)
    assert last.reason == "child 'b': it did not start: no such file"


def test_an_added_child_waits_for_those_that_it_may_depend_on_and_is_forgotten_if_it_does_not_start() -> None:
    machine = started(Policy("rest_for_one", backoff=Backoff(1.0, 1.0)), *ABC[:2])
    machine.handle(Ended(B1, False, "signal 9"), 0.0)
    assert machine.handle(Add(ABC[2]), 0.5) == []
    assert machine.handle(Tick(), 1.0) == [Start((B2,))]
    assert machine.handle(Started(B2), 1.0) == [Start((C1,))]
    assert machine.handle(StartFailed(C1, "no"), 1.0) == [Forget("c", "it did not start: no")]
    assert machine.children == {"a": "up", "b": "up"}


def test_a_removed_child_does_not_come_back() -> None:
    machine = started(Policy("one_for_all"), *ABC)
    assert one(machine.handle(Remove("b", "not needed"), 0.0), Stop).incarnations == (B1,)
    assert one(machine.handle(Ended(A1, False, "signal 9"), 0.0), Restarting).children == ("a", "c")
    assert machine.handle(Ended(B1, True, "stopped"), 0.0) == [Forget("b", "stopped")]
    assert machine.handle(Remove("b", "again"), 0.0) == []
    assert machine.handle(Ended(C1, True, ""), 0.0) == [Start((A2,))]


def test_restarts_count_for_as_long_as_the_period_and_one_too_many_escalates() -> None:
    machine = started(Policy(max_restarts=2, within=10.0), ChildSpec("a"), ChildSpec("b"))
    number = 1

    def fail(now: float) -> list[Decision]:
        nonlocal number
        decisions = machine.handle(Ended(Incarnation("a", number), False, "exit code 3"), now)
        number += 1
        machine.handle(Started(Incarnation("a", number)), now)
        return decisions

    for now in (0.0, 9.0, 10.5, 19.5):  # each time at most 2 within 10 s
        assert one(fail(now), Restarting).failure.at == now
    assert one(fail(20.0), Stop).incarnations == (B1,)
    last = one(machine.handle(Ended(B1, True, ""), 20.1), Escalate)
    assert last.reason == (
        "3 restarts within 10 s would be more than max_restarts=2; the last failure was of child 'a': exit code 3"
    )
    assert [failure.at for failure in last.failures] == [10.5, 19.5, 20.0]


def test_a_restart_counts_until_the_period_is_over_to_the_last_moment() -> None:
    for later, is_one_too_many in ((10.0, True), (10.25, False)):
        machine = started(Policy(max_restarts=1, within=10.0), ChildSpec("a"))
        machine.handle(Ended(A1, False, ""), 0.0)
        machine.handle(Started(A2), 0.0)
        machine.handle(Ended(A2, False, ""), later)
        assert machine.is_over == is_one_too_many


def test_what_ends_on_one_occasion_counts_once() -> None:
    machine = started(Policy(max_restarts=2, within=10.0), *ABC)
    for name in "abc":
        decisions = machine.handle(Ended(Incarnation(name, 1), False, "its host is lost", "host 1"), 1.0)
        assert one(decisions, Restarting).failure.occasion == "host 1"
    for name in "abc":
        decisions = machine.handle(StartFailed(Incarnation(name, 2), "there is no host", ("host 1", 2)), 2.0)
        assert one(decisions, Restarting).children == (name,)
    for name in "ab":
        machine.handle(Started(Incarnation(name, 3)), 3.0)
    decisions = machine.handle(Ended(Incarnation("a", 3), False, "signal 9"), 4.0)  # the third occasion
    assert one(decisions, Stop).reason.startswith("3 restarts within 10 s")


def test_without_a_limit_it_restarts_for_ever() -> None:
    machine = started(Policy(max_restarts=None, backoff=Backoff(1.0, 10.0, 20.0)), ChildSpec("a"))
    now, delays = 0.0, []
    for number in range(1, 2000):
        decisions = machine.handle(Ended(Incarnation("a", number), False, ""), now)
        delays.append(one(decisions, Restarting).delay)
        now += delays[-1]
        machine.handle(Tick(), now)
        machine.handle(Started(Incarnation("a", number + 1)), now)
    assert delays == [1.0, 10.0, *[20.0] * 1997]


def test_all_or_nothing_is_a_policy_without_restarts() -> None:
    machine = started(Policy("one_for_all", max_restarts=0), *ABC)
    assert one(machine.handle(Ended(B1, False, "signal 9"), 0.0), Stop).incarnations == (C1,)


def test_a_healthy_time_begins_the_back_off_anew() -> None:
    policy = Policy(max_restarts=None, backoff=Backoff(1.0, 2.0, reset_after=60.0))
    machine = started(policy, ChildSpec("a"))

    def delay_after(number: int, up: float, down: float) -> float:
        machine.handle(Started(Incarnation("a", number)), up)
        restarting = one(machine.handle(Ended(Incarnation("a", number), False, ""), down), Restarting)
        machine.handle(Tick(), down + restarting.delay)
        return restarting.delay

    ups_and_downs = [(0.0, 0.0), (1.0, 5.0), (10.0, 69.75), (80.0, 140.0)]
    assert [delay_after(n, *times) for n, times in enumerate(ups_and_downs, 1)] == [1.0, 2.0, 4.0, 1.0]


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 5))
def test_jitter_only_shortens_and_a_seed_repeats_it(attempt: int, jitter: float, seed: int) -> None:
    backoff = Backoff(0.5, 3.0, 20.0, jitter)
    delay = backoff.delay(attempt, Random(seed))
    assert backoff.longest(attempt) * (1 - jitter) <= delay <= backoff.longest(attempt) <= 20.0
    assert delay == backoff.delay(attempt, Random(seed))
    assert jitter < 0.01 or len({backoff.delay(attempt, Random(other)) for other in range(20)}) > 1


def test_what_does_not_stop_in_time_is_killed_once() -> None:
    machine = started(Policy(), ChildSpec("a", stop_timeout=2.0))
    machine.handle(StopAsked("done"), 1.0)
    assert machine.wake_at == 3.0
    assert machine.handle(Tick(), 2.75) == []
    assert machine.handle(Tick(), 3.0) == [Kill((A1,))]
    assert machine.wake_at is None
    assert machine.handle(Tick(), 9.0) == []
    assert machine.handle(Ended(A1, False, "signal 9"), 9.0) == [Finish("done")]


def test_stop_timeout_of_nothing_and_of_forever() -> None:
    machine = started(Policy(in_order=False), ChildSpec("a", stop_timeout=0), ChildSpec("b", stop_timeout=math.inf))
    assert machine.handle(StopAsked("done"), 0.0) == [Stop((B1,), "done"), Kill((A1,))]
    assert machine.wake_at is None


def test_events_of_another_incarnation_change_nothing() -> None:
    machine = started(Policy(max_restarts=1), ChildSpec("a"))
    machine.handle(Ended(A1, False, ""), 0.0)
    machine.handle(Started(A1), 0.0)
    assert machine.children == {"a": "starting"}
    machine.handle(Started(A2), 0.0)
    machine.handle(StartAsked(), 0.0)
    for event in (Ended(A1, False, ""), StartFailed(A1, ""), Started(A1), Ended(Incarnation("a", 3), False, "")):
        assert machine.handle(event, 0.0) == []
    assert machine.handle(Ended(Incarnation("stranger", 1), False, ""), 0.0) == []
    assert machine.children == {"a": "up"}


def test_a_stop_while_children_start_and_wait_for_their_restart() -> None:
    machine = supervisor(Policy(backoff=Backoff(1.0, 1.0)), *ABC)
    machine.handle(StartAsked(), 0.0)
    machine.handle(Started(A1), 0.0)
    machine.handle(Ended(A1, False, "signal 9"), 0.0)
    assert machine.handle(StopAsked("done"), 0.5) == [Stop((B1,), "done")]
    assert machine.handle(Started(B1), 0.6) == []
    assert machine.handle(Ended(B1, True, ""), 0.7) == [Finish("done")]
    assert machine.wake_at is None
    with pytest.raises(ConfigError, match="cannot be added"):
        machine.handle(Add(ChildSpec("d")), 1.0)


def test_a_child_that_waits_for_its_restart_can_be_removed() -> None:
    machine = started(Policy(backoff=Backoff(1.0, 1.0)), ChildSpec("a"))
    machine.handle(Ended(A1, False, "signal 9"), 0.0)
    assert machine.handle(Remove("a", "not needed"), 0.5) == [Forget("a", "not needed")]
    assert machine.wake_at is None
    assert machine.handle(Tick(), 1.0) == []


def test_a_child_that_ends_before_it_has_started_did_not_start() -> None:
    machine = started(Policy(), ChildSpec("a", "transient"))
    machine.handle(Ended(A1, False, "signal 9"), 0.0)
    assert machine.handle(Ended(A2, True, "exit code 0"), 0.0)[-1] == Start((Incarnation("a", 3),))


def test_the_first_reason_to_end_counts() -> None:
    machine = started(Policy(max_restarts=0), *ABC[:2])
    machine.handle(Ended(A1, False, "signal 9"), 0.0)
    assert machine.is_ending
    assert machine.handle(StopAsked("done"), 0.0) == []
    assert "signal 9" in one(machine.handle(Ended(B1, True, ""), 0.0), Escalate).reason


def test_a_clock_that_goes_back_stands_still() -> None:
    machine = started(Policy(backoff=Backoff(1.0, 1.0)), ChildSpec("a"))
    machine.handle(Tick(), 5.0)
    machine.handle(Ended(A1, False, "signal 9"), 4.0)
    assert machine.wake_at == 6.0


def test_a_supervisor_without_children_does_what_it_is_asked() -> None:
    machine = supervisor(Policy())
    assert machine.handle(StartAsked(), 0.0) == []
    assert machine.handle(StopAsked("done"), 0.0) == [Finish("done")]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Backoff(initial=-1), "initial must be a number at least 0, not -1"),
        (lambda: Backoff(initial=math.nan), "initial must be a number at least 0, not nan"),
        (lambda: Backoff(factor=0.5), "factor must be a number at least 1, not 0.5"),
        (lambda: Backoff(initial=5, maximum=4), "maximum must be a number at least 5, not 4"),
        (lambda: Backoff(jitter=1.5), "jitter must be a number at least 0 and at most 1, not 1.5"),
        (lambda: Backoff(reset_after=0), "reset_after must be a number above 0, not 0"),
        (lambda: ChildSpec("a", "sometimes"), "restart must be one of 'never', 'transient', 'always', not 'sometimes'"),  # type: ignore[arg-type]
        (lambda: ChildSpec([]), "child must be hashable"),  # type: ignore[arg-type]
        (lambda: ChildSpec("a", stop_timeout=-1), "stop_timeout must be a number at least 0, not -1"),
        (lambda: Policy("all"), "strategy must be one of 'one_for_one', 'rest_for_one', 'one_for_all', not 'all'"),  # type: ignore[arg-type]
        (lambda: Policy(max_restarts=-1), "max_restarts must be an integer of at least 0, or None, not -1"),
        (lambda: Policy(max_restarts=True), "max_restarts must be an integer"),
        (lambda: Policy(max_restarts=1.5), "max_restarts must be an integer"),  # type: ignore[arg-type]
        (lambda: Policy(within=0), "within must be a number above 0, not 0"),
        (lambda: Policy(within=True), "within must be a number above 0, not True"),
        (lambda: Policy(backoff=1.0), "backoff must be a Backoff, not 1.0"),  # type: ignore[arg-type]
        (lambda: Policy(max_restarts=10**9, backoff=Backoff(1.0)), "its restarts alone wait for 3e\\+10 s"),
        (lambda: supervisor(Policy(), ABC[0], ABC[0]), "there is a child 'a' already"),
        (lambda: supervisor(Policy(), ABC[0]).handle(Add(ABC[0]), 0.0), "there is a child 'a' already"),
        (lambda: supervisor(Policy()).handle("stop", 0.0), "event 'stop' is none"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make()


def test_policies_and_decisions_travel_and_compare() -> None:
    values = [Policy("one_for_all", backoff=Backoff(1.0, 1.0, jitter=0.5)), *ABC, Stop((A1,), "done"), Tick()]
    assert pickle.loads(pickle.dumps(values)) == values


def test_the_examples_of_the_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "supervision.md").read_text()
    text = page[page.index("## Policies") : page.index("## Membership")]
    example = doctest.DocTestParser().get_doctest(text, {}, "policies", "supervision.md", 0)
    assert len(example.examples) > 10
    assert doctest.DocTestRunner().run(example).failed == 0
