"""Who is in: simulated networks, clocks, crashes and restarts by the thousand, each repeatable from its seed."""

from __future__ import annotations

import dataclasses
import doctest
import heapq
import itertools
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from monarch_rdma.errors import ConfigError
from monarch_rdma.supervision.membership import (
    Activated,
    Agree,
    Asked,
    Committed,
    Coordinator,
    Departure,
    Died,
    Dropped,
    Epoch,
    EpochId,
    GiveUp,
    Leave,
    Left,
    Lost,
    Member,
    MemberId,
    MembershipOptions,
    Notice,
    Proposed,
    Refused,
    Report,
    Resumed,
    Superseded,
    Suspended,
    Tick,
    Withdrawn,
)

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
SCHEDULES = 50_000 if LONG else 2000
CHAOS = 30.0  # seconds of simulated time in which anything may happen
CALM = 60.0  # at most so long, afterwards, until everybody is in


class Broken(AssertionError):
    """An invariant does not hold."""


class Clock:
    """Shows any time, and runs a little too fast or too slow."""

    def __init__(self, random: Random, drift: float) -> None:
        self.offset = random.uniform(0, 1000)
        self.rate = 1 + random.uniform(-drift, drift)

    def read(self, time: float) -> float:
        return self.offset + self.rate * time

    def time_of(self, reading: float) -> float:
        return (reading - self.offset) / self.rate


class Node:
    """A machine, its clock and its timer. A paused one does what comes when it goes on."""

    def __init__(self, world: World, machine: Any, clock: Clock) -> None:
        self.world, self.machine, self.clock = world, machine, clock
        self.is_alive = True
        self.paused_until = 0.0
        self.timer = 0

    @property
    def now(self) -> float:
        return self.clock.read(self.world.time)

    def tell(self, event: Any) -> None:
        if not self.is_alive:
            return
        if self.world.time < self.paused_until:
            self.world.at(self.paused_until, lambda: self.tell(event))
            return
        outputs = self.machine.handle(event, self.now)
        for output in outputs:
            self.world.on_output(self, output)
        self.set_timer()
        self.world.check()

    def set_timer(self) -> None:
        wake_at = self.machine.wake_at
        if wake_at is None:
            return
        self.timer += 1
        timer = self.timer
        # A hair later: the clock's reading must have passed, not only nearly.
        time = max(self.clock.time_of(wake_at) + 1e-6, self.world.time + 1e-6)
        self.world.at(time, lambda: self.tell(Tick()) if timer == self.timer else None)


class World:
    """Members, a coordinator, and a network that loses, repeats, delays, reorders and cuts."""

    make_coordinator: Callable[..., Coordinator] = Coordinator
    make_member: Callable[..., Member] = Member

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        names = random.randint(2, 5)
        maximum = random.choice([None, None, random.randint(1, names)])
        self.options = MembershipOptions(
            minimum=random.randint(1, maximum or names),
            maximum=maximum,
            join_window=random.choice([0.0, 0.5, 2.0]),
            timeout=4.0,
            agree_timeout=random.choice([None, 8.0]),
            clock_drift=0.02,
        )
        self.time = 0.0
        self.queue: list[tuple[float, int, Callable[[], object]]] = []
        self.order = itertools.count()
        self.loss = random.choice([0.0, 0.05, 0.3])
        self.repeats = random.choice([0.0, 0.2])
        self.delay = random.choice([0.01, 0.1, 0.8])
        self.is_calm = False
        self.cut_to: dict[Node, float] = {}  # by member: until when nothing gets to it
        self.cut_from: dict[Node, float] = {}
        self.members: list[Node] = []
        self.incarnations: dict[str, int] = {}
        self.term = 0
        self.start_coordinator()
        for number in range(names):
            self.at(random.uniform(0, 3), lambda name=f"m{number}": self.start_member(name))
        self.to_start = names
        self.coordinator_fails = random.choice([0.05, 0.05, 0.5])
        for _ in range(random.randint(0, 10)):
            self.at(random.uniform(0, CHAOS), self.misfortune)
        # What has been seen.
        self.committed: dict[EpochId, Epoch] = {}
        self.last_committed: EpochId | None = None
        self.activated: dict[EpochId, Epoch] = {}
        self.seats: dict[tuple[EpochId, int], MemberId] = {}
        self.newest: EpochId = EpochId(0, 0)
        self.before: dict[MemberId, Epoch] = {}

    def at(self, time: float, action: Callable[[], object]) -> None:
        heapq.heappush(self.queue, (time, next(self.order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.time + seconds, action)

    # --- nodes

    def start_coordinator(self) -> None:
        self.term += 1
        clock = Clock(self.random, self.options.clock_drift)
        machine = self.make_coordinator(self.options, term=self.term, now=clock.read(self.time))
        self.coordinator = Node(self, machine, clock)
        self.coordinator.set_timer()

    def start_member(self, name: str) -> None:
        self.to_start -= 1
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        clock = Clock(self.random, self.options.clock_drift)
        me = MemberId(name, incarnation)
        machine = self.make_member(me, metadata=f"step of {me}", heartbeat=1.0, now=clock.read(self.time))
        node = Node(self, machine, clock)
        self.members.append(node)
        node.tell(Tick())

    def living(self) -> list[Node]:
        return [node for node in self.members if node.is_alive and node.machine.wake_at is not None]

    # --- what goes wrong

    def misfortune(self) -> None:
        if self.is_calm:
            return
        random = self.random
        if random.random() < self.coordinator_fails:
            if self.coordinator.is_alive:
                self.coordinator.is_alive = False
                self.after(random.choice([0.0, 0.1, 2.0, 8.0]), self.start_coordinator)
            return
        what = random.choice(["crash", "crash", "loss", "cut", "cut", "pause", "give up", "leave", "zombie"])
        if not self.living():
            return
        node = random.choice(self.living())
        seconds = random.choice([0.5, 3.0, 6.0, 12.0])
        if what in ("crash", "loss"):
            node.is_alive = False
            if random.random() < 0.5:
                event = Died(node.machine.me, "signal 9")
                self.after(random.expovariate(5), lambda: self.coordinator.tell(event))
            if what == "crash":
                self.come_back(node, seconds)
        elif what == "cut":
            if random.random() < 0.7:
                self.cut_to[node] = self.time + seconds
            if random.random() < 0.7:
                self.cut_from[node] = self.time + seconds
        elif what == "pause":
            node.paused_until = self.time + seconds
        elif what == "zombie":  # cut off and alive, while its successor starts
            self.cut_to[node] = self.cut_from[node] = self.time + seconds
            self.come_back(node, random.choice([0.1, 2.0, 5.0]))
        elif what == "give up":
            node.tell(GiveUp("a collective was aborted"))
        else:
            node.tell(Leave("it is done"))

    def come_back(self, node: Node, seconds: float) -> None:
        """The next incarnation, unless there is a later one by then."""
        me = node.machine.me

        def start() -> None:
            if self.incarnations[me.name] == me.incarnation:
                self.start_member(me.name)
            else:
                self.to_start -= 1

        self.to_start += 1
        self.after(seconds, start)

    # --- messages

    def on_output(self, node: Node, output: Any) -> None:
        if isinstance(output, Report):
            self.send(output, self.cut_from.get(node, 0.0), lambda: self.coordinator.tell(output))
        elif isinstance(output, Notice):
            for receiver in self.members:
                if receiver.machine.me == output.to:
                    self.send(output, self.cut_to.get(receiver, 0.0), lambda to=receiver: to.tell(output))
        elif isinstance(output, Asked):
            self.be_asked(node, output.proposal)
        elif isinstance(output, Activated):
            self.see_activated(node, output)
        elif isinstance(output, Committed):
            self.see_committed(output.epoch)
        elif isinstance(output, Refused | Left):
            self.come_back(node, self.random.choice([0.5, 3.0]))
        elif isinstance(output, Lost) and self.random.random() < 0.5:
            node.tell(GiveUp("a peer is gone"))

    def send(self, message: Any, cut_until: float, deliver: Callable[[], object]) -> None:
        if self.is_calm:
            self.after(self.random.uniform(0.001, 0.02), deliver)
            return
        for _ in range(2 if self.random.random() < self.repeats else 1):
            if self.time >= cut_until and self.random.random() >= self.loss:
                self.after(self.random.expovariate(1 / self.delay), deliver)

    def be_asked(self, node: Node, proposal: Epoch) -> None:
        """Its work ends at once, after a while, or not while things go wrong."""
        wait = self.random.choice([0.0, 0.0, 0.3, 2.0])
        if not self.is_calm and self.random.random() < 0.05:
            wait += CHAOS
        self.after(wait, lambda: node.tell(Agree(proposal.id)))
        if self.random.random() < 0.1:  # what was agreed to long ago, said again
            self.after(wait + self.random.uniform(0, 8), lambda: node.tell(Agree(proposal.id)))

    # --- what must hold

    def see_committed(self, epoch: Epoch) -> None:
        if epoch.id <= self.newest:
            raise Broken(f"epoch {epoch.id} comes after {self.newest}")
        if not self.options.minimum <= len(epoch) <= (self.options.maximum or math.inf):
            raise Broken(f"epoch {epoch.id} has {len(epoch)} members")
        previous = self.committed.get(epoch.previous) if epoch.previous is not None else None
        if previous is not None:
            lost = set(previous.members) - set(epoch.members)
            named = {departure.member for departure in epoch.departed}
            if epoch.id.number <= previous.id.number:
                raise Broken(f"the number of epoch {epoch.id} is not greater than that of {previous.id}")
            if not lost <= named <= set(previous.members) or set(epoch.joined) != set(epoch.members) - set(
                previous.members
            ):
                raise Broken(f"epoch {epoch.id} lost {lost} and names {named}")
        if epoch.id.number > 1 and epoch.id.term == self.newest.term and epoch.previous != self.newest:
            raise Broken(f"epoch {epoch.id} does not follow {self.newest}")
        self.newest = epoch.id
        self.committed[epoch.id] = epoch

    def see_activated(self, node: Node, output: Activated) -> None:
        epoch, me = output.epoch, node.machine.me
        if self.committed.get(epoch.id) != epoch or self.activated.setdefault(epoch.id, epoch) != epoch:
            raise Broken(f"{me} has another epoch {epoch.id} than others")
        if self.seats.setdefault((epoch.id, output.rank), me) != me or epoch.members[output.rank] != me:
            raise Broken(f"rank {output.rank} of epoch {epoch.id} is there twice")
        if node.machine.epoch(node.now) != epoch:
            raise Broken(f"{me} must not work in {epoch.id}, which it activated")
        before = self.before.get(me)
        if before is not None:
            if before.id >= epoch.id:
                raise Broken(f"{me} went back from {before.id} to {epoch.id}")
            if {each.member for each in output.lost} != set(before.members) - set(epoch.members):
                raise Broken(f"{me} was not told who is lost in {epoch.id}")
        self.before[me] = epoch

    def working(self) -> dict[MemberId, EpochId]:
        found = {}
        for node in self.members:
            if node.is_alive:
                epoch = node.machine.epoch(node.now)
                if epoch is not None:
                    found[node.machine.me] = epoch.id
        return found

    def check(self) -> None:
        working = self.working()
        if len(set(working.values())) > 1:
            raise Broken(f"at {self.time:.2f} there is work in several epochs: {working}")
        if len({member.name for member in working}) < len(working):
            raise Broken(f"at {self.time:.2f} two incarnations work: {working}")

    def is_settled(self) -> bool:
        """Whether everybody who wants in is in, as far as the limits allow."""
        there = len({node.machine.me.name for node in self.living()})
        if self.to_start or not self.coordinator.is_alive:
            return False
        if there < self.options.minimum:
            return True
        working = self.working()
        if len(working) != min(there, self.options.maximum or there):
            return False
        return working.keys() == set(self.committed[next(iter(working.values()))].members)

    def run(self) -> None:
        self.run_until(CHAOS)
        self.is_calm = True
        self.cut_to, self.cut_from = {}, {}
        for node in self.members:
            node.paused_until = min(node.paused_until, self.time)
        if not self.run_until(CHAOS + CALM, self.is_settled):
            raise Broken(f"nothing goes on: {self.coordinator.machine.explain()}; {self.working()}")

    def run_until(self, end: float, is_done: Callable[[], bool] | None = None) -> bool:
        while self.queue and self.queue[0][0] <= end:
            self.time, _, action = heapq.heappop(self.queue)
            action()
            if is_done is not None and is_done():
                return True
        self.time = end
        return is_done is not None and is_done()


def run_schedules(seeds: range, world: type[World] = World) -> None:
    for seed in seeds:
        try:
            world(seed).run()
        except Exception as error:
            raise Broken(f"seed {seed}: {error}") from error


def test_whatever_happens_members_agree_and_go_on() -> None:
    run_schedules(range(SCHEDULES))


class EndlessLease(Member):
    def epoch(self, now: float) -> Epoch | None:
        return self._epoch


class Impatient(Coordinator):
    def _held_up_by(self, proposal: Epoch) -> dict[MemberId, float]:
        return {}


class Forgetful(Coordinator):
    def __init__(self, options: MembershipOptions, *, term: int, now: float) -> None:
        super().__init__(options, term=term, now=now)
        self._recovered_at = None


class Silent(Coordinator):
    def _next_epoch(self, id: EpochId, members: tuple[MemberId, ...]) -> Epoch:
        return dataclasses.replace(super()._next_epoch(id, members), departed=())


class Lonely(Coordinator):
    def _on_report(self, report: Report) -> Any:
        return super()._on_report(report) if report.member.name != "m0" else None


@pytest.mark.parametrize(
    ("coordinator", "member", "expected"),
    [
        (Coordinator, EndlessLease, "several epochs"),
        (Impatient, Member, "several epochs|two incarnations"),
        (Forgetful, Member, "several epochs|two incarnations"),
        (Silent, Member, "names set"),
        (Lonely, Member, "nothing goes on"),
    ],
)
def test_the_simulation_notices_what_it_is_there_for(coordinator: Any, member: Any, expected: str) -> None:
    class Wrong(World):
        make_coordinator = coordinator
        make_member = member

    with pytest.raises(Broken, match=expected):
        run_schedules(range(1000), Wrong)


# --- by hand -------------------------------------------------------------------------------------------------------


class Table:
    """A coordinator and members with one clock, whose messages arrive at once, unless they are cut off."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.options = MembershipOptions(**{"timeout": 4.0, "join_window": 1.0, **options})
        self.now = 0.0
        self.term = 0
        self.members: dict[str, Member] = {}
        self.said: dict[str, list[Any]] = {}  # all but messages, since it was looked at
        self.log: list[Any] = []  # the coordinator's
        self.cut: set[str] = set()
        self.deaf: set[str] = set()
        self.busy: set[str] = set()  # they do not agree
        self.reports: dict[str, list[Report]] = {}
        self.notices: dict[str, list[Notice]] = {}
        self.restart()
        for name in names:
            self.join(name)

    def restart(self) -> None:
        self.term += 1
        self.coordinator = Coordinator(self.options, term=self.term, now=self.now)

    def join(self, name: str, incarnation: int = 1, **options: Any) -> None:
        me = MemberId(name, incarnation)
        self.members[name] = Member(me, metadata=f"{me} at 0", heartbeat=1.0, now=self.now, **options)
        self.tell(name, Tick())

    def crash(self, name: str) -> MemberId:
        return self.members.pop(name).me

    def tell(self, name: str, event: Any) -> None:
        for output in self.members[name].handle(event, self.now):
            if isinstance(output, Report):
                self.reports.setdefault(name, []).append(output)
                if name not in self.cut:
                    self.ask(output)
            else:
                self.said.setdefault(name, []).append(output)
                if isinstance(output, Asked) and name not in self.busy:
                    self.members[name].metadata = f"{self.members[name].me} at {self.now:g}"
                    self.tell(name, Agree(output.proposal.id))

    def ask(self, event: Any) -> None:
        for output in self.coordinator.handle(event, self.now):
            if not isinstance(output, Notice):
                self.log.append(output)
                continue
            self.notices.setdefault(output.to.name, []).append(output)
            if output.to.name in self.members and output.to.name not in self.cut | self.deaf:
                self.tell(output.to.name, output)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = {name: member.wake_at for name, member in self.members.items() if member.wake_at is not None}
            due |= {"": self.coordinator.wake_at} if self.coordinator.wake_at is not None else {}
            name = min(due, key=lambda each: due[each], default="")
            if not due or due[name] > end:
                self.now = end
                return
            self.now = max(self.now, due[name])
            self.tell(name, Tick()) if name else self.ask(Tick())

    def hears(self, name: str, kind: type[Any]) -> Any:
        """The only output of this kind since the last look."""
        (found,) = [output for output in self.said.get(name, []) if isinstance(output, kind)]
        self.said[name].remove(found)
        return found

    def ranks(self) -> dict[str, int]:
        """Who works, and as what; all in the same epoch."""
        epochs = {name: member.epoch(self.now) for name, member in self.members.items()}
        working = {name: epoch for name, epoch in epochs.items() if epoch is not None}
        assert len({epoch.id for epoch in working.values()}) <= 1
        return {name: epoch.rank_of(self.members[name].me) for name, epoch in working.items()}


def together(*names: str, **options: Any) -> Table:
    """All of them in the first epoch; what was said on the way there is forgotten."""
    table = Table(*names, **options)
    table.wait(2)
    assert table.ranks() == {name: rank for rank, name in enumerate(sorted(names))}
    table.said, table.log = {}, []
    return table


A, B, C, D = (MemberId(name, 1) for name in "abcd")


def test_those_who_come_within_the_window_come_in_together() -> None:
    table = Table("b")
    table.wait(0.5)
    table.join("a")
    assert table.ranks() == {}
    table.wait(0.75)
    assert table.ranks() == {"a": 0, "b": 1}
    assert table.hears("a", Activated).joined == (B,)
    proposed, committed = table.log
    assert isinstance(proposed, Proposed) and isinstance(committed, Committed)
    assert committed.epoch.members == (A, B) and committed.epoch.joined == (A, B)
    assert committed.epoch.id == EpochId(1, 1) and committed.epoch.previous is None
    assert str(committed.epoch.id) == "1 (term 1)" and str(A) == "a#1"


def test_a_full_epoch_waits_for_nobody() -> None:
    table = Table("a", "b", minimum=2, maximum=2, join_window=60.0)
    assert table.ranks() == {"a": 0, "b": 1}


def test_no_epoch_is_smaller_than_the_minimum() -> None:
    table = Table("a", "b", minimum=3)
    table.wait(20)
    assert table.ranks() == {}
    assert table.coordinator.explain() == "2 of at least 3 are there"
    table.join("c")
    assert table.ranks() == {"a": 0, "b": 1, "c": 2}
    assert table.coordinator.explain() == "epoch 1 (term 1) of 3 is complete"


def test_a_newcomer_gets_the_next_rank_when_the_others_agree() -> None:
    table = together("a", "c")
    table.busy = {"c"}
    table.join("b")
    table.wait(2)
    assert table.hears("c", Asked).proposal.members == (A, C, B)
    assert table.ranks() == {"c": 1}  # a waits already, c works on
    assert table.coordinator.explain() == "proposed epoch 2 (term 1) waits for the agreement of c#1"
    table.tell("c", Agree(EpochId(1, 2)))
    assert table.ranks() == {"a": 0, "c": 1, "b": 2}
    activated = table.hears("c", Activated)
    assert (activated.rank, activated.joined, activated.lost) == (1, (B,), ())


def test_who_is_known_to_be_dead_is_left_out_at_once_and_the_others_are_told() -> None:
    table = together("a", "b", "c")
    dead = table.crash("a")
    table.busy = {"b"}
    table.ask(Died(dead, "signal 9"))
    assert table.hears("b", Lost) == Lost(EpochId(1, 1), (Departure(A, "signal 9"),))
    assert table.ranks() == {"b": 1}
    table.tell("b", Agree(table.hears("b", Asked).proposal.id))
    assert table.ranks() == {"c": 0, "b": 1}  # b keeps its rank, c gets the free one
    assert table.hears("b", Activated).lost == (Departure(A, "signal 9"),)
    assert table.log[-1].epoch.departed == (Departure(A, "signal 9"),)


def test_who_is_silent_is_left_out_after_the_timeout_and_not_before() -> None:
    table = together("a", "b", "c")
    table.cut = {"a"}
    heard = table.reports["a"][-1].sent_at
    table.wait(heard + 3.9 - table.now)
    assert table.ranks() == {"b": 1, "c": 2} | ({"a": 0} if table.now < heard + table.options.lease else {})
    table.wait(0.2)
    assert table.ranks() == {"c": 0, "b": 1}
    assert table.hears("b", Activated).lost == (Departure(A, "it was silent for 4 s"),)
    assert table.hears("a", Suspended).epoch == EpochId(1, 1)


def test_below_the_minimum_members_are_told_and_wait_for_somebody_to_come() -> None:
    table = together("a", "b", minimum=2)
    table.ask(Died(table.crash("a"), "signal 9"))
    assert table.hears("b", Lost).departed == (Departure(A, "signal 9"),)
    table.wait(30)
    assert table.ranks() == {"b": 1}
    table.join("c")
    assert table.ranks() == {"c": 0, "b": 1}
    assert table.hears("b", Activated).lost == (Departure(A, "signal 9"),)


def test_above_the_maximum_they_wait_for_a_place() -> None:
    table = together("a", "b", maximum=2)
    table.join("c")
    table.wait(30)
    assert table.ranks() == {"a": 0, "b": 1}
    table.tell("a", Leave("its job is over"))
    assert table.hears("a", Left)
    assert table.ranks() == {"c": 0, "b": 1}
    assert table.log[-1].epoch.departed == (Departure(A, "it left: its job is over"),)


def test_leaving_is_over_when_the_coordinator_knows_or_the_lease_has_run_out() -> None:
    table = together("a", "b")
    table.cut = {"a"}
    answered = table.notices["a"][-1]
    table.tell("a", Leave("done"))
    assert table.ranks() == {"b": 1}
    table.tell("a", answered)  # to an earlier report
    assert "a" not in table.said
    table.wait(4)
    assert table.hears("a", Left)
    assert table.members["a"].wake_at is None
    assert table.members["a"].handle(Tick(), table.now) == []


def test_an_epoch_that_is_given_up_is_followed_by_another_one_each_time() -> None:
    table = together("a", "b")
    table.busy = {"b"}
    for number in (2, 3):
        table.tell("a", GiveUp("a collective was aborted"))
        departed = (Departure(A, "it gave up the epoch: a collective was aborted"),)
        assert table.hears("b", Lost) == Lost(EpochId(1, number - 1), departed)
        table.tell("b", Agree(table.hears("b", Asked).proposal.id))
        assert table.ranks() == {"a": 0, "b": 1}
        epoch = table.hears("b", Activated).epoch
        assert (epoch.id, epoch.joined, epoch.departed) == (EpochId(1, number), (), departed)


def test_who_gives_up_after_agreeing_is_asked_for_another_epoch() -> None:
    table = together("a", "b")
    table.busy = {"b"}
    table.join("c")
    table.wait(2)
    table.tell("a", GiveUp("out of memory"))
    assert [each.proposal.id.number for each in table.said["a"] if isinstance(each, Asked)] == [2, 3]
    table.tell("b", Agree(EpochId(1, 3)))
    assert table.ranks() == {"a": 0, "b": 1, "c": 2}


def test_who_does_not_agree_in_time_is_refused_and_may_come_back_as_another_incarnation() -> None:
    table = together("a", "b", "c", agree_timeout=10.0)
    table.busy = {"a"}
    table.tell("b", GiveUp("a collective was aborted"))
    table.wait(9.9)
    assert table.ranks() == {"a": 0}
    table.wait(0.2)
    assert table.ranks() == {"b": 1, "c": 0}
    reason = "it did not agree to epoch 2 (term 1) within 10 s"
    assert table.hears("a", Refused).reason == reason
    assert table.log[-1].epoch.departed[-1] == Departure(A, reason)
    table.said = {}
    table.join("a", 2)
    table.wait(2)
    table.tell("a", Agree(table.hears("a", Asked).proposal.id))
    assert table.ranks() == {"a": 2, "b": 1, "c": 0}


def test_who_is_refused_and_does_not_know_holds_up_nobody_for_longer_than_its_lease() -> None:
    table = together("a", "b", agree_timeout=10.0)
    table.busy, table.deaf = {"a"}, {"a"}
    table.tell("b", GiveUp("a collective was aborted"))
    table.wait(10.1 + 4.0)
    assert table.ranks() == {"b": 0}


def test_who_is_refused_is_not_proposed_again_before_it_knows() -> None:
    table = together("a", "b", agree_timeout=10.0)
    table.busy = {"a"}
    table.tell("b", GiveUp("a collective was aborted"))
    table.wait(9.9)
    table.deaf = {"a"}
    table.log = []
    table.wait(0.2)
    assert [output.epoch.members for output in table.log if isinstance(output, Proposed)] == [(B,)]


def test_without_answers_a_member_stops_and_goes_on_when_they_come_again() -> None:
    table = together("a", "b")
    table.deaf = {"a"}
    last = table.notices["a"][-1].answers
    table.wait(last + table.options.lease - 0.01 - table.now)
    assert table.ranks() == {"a": 0, "b": 1}
    table.wait(0.02)
    assert table.ranks() == {"b": 1}
    assert table.hears("a", Suspended).epoch == EpochId(1, 1)
    table.deaf = set()
    table.wait(1)
    assert table.hears("a", Resumed).epoch == EpochId(1, 1)
    assert table.ranks() == {"a": 0, "b": 1}


def test_who_hears_nothing_is_left_out_and_not_asked_to_come_in() -> None:
    table = together("a", "b")
    table.deaf = {"a", "c"}
    table.join("c")
    table.wait(3 * 4 + 1)  # until its lease is over, until that is believed, until its last answer counts no more
    assert table.ranks() == {"b": 0}
    assert table.log[-1].epoch.departed == (Departure(A, "it did not hear the coordinator for 4 s"),)
    table.wait(20)
    assert [output.epoch.members for output in table.log if isinstance(output, Proposed)] == [(B,)]
    table.deaf = set()
    table.wait(3)
    assert table.hears("a", Dropped).epoch == EpochId(1, 1)
    assert sorted(table.ranks()) == ["a", "b", "c"]


def test_a_proposal_ends_with_whom_it_asks() -> None:
    table = together("a", "b")
    table.busy = {"a", "b"}
    table.join("c")
    table.wait(1.5)
    table.ask(Died(table.crash("c"), "signal 9"))
    assert table.hears("a", Withdrawn).proposal == EpochId(1, 2)
    assert table.ranks() == {"a": 0, "b": 1}
    table.tell("a", Agree(EpochId(1, 2)))  # on its way already: it does not work any more, so there is another one
    table.tell("b", Agree(EpochId(1, 3)))
    table.tell("a", Agree(EpochId(1, 3)))
    assert table.ranks() == {"a": 0, "b": 1}
    assert table.hears("b", Activated).epoch.id == EpochId(1, 3)


def test_a_later_incarnation_waits_until_the_earlier_one_cannot_be_at_work_any_more() -> None:
    table = together("a", "b")
    table.cut = {"a"}
    zombie = table.members["a"]
    last = table.reports["a"][-1].sent_at
    del table.members["a"]
    table.cut = set()
    table.join("a", 2)
    table.wait(last + 3.9 - table.now)
    assert table.ranks() == {}  # b has agreed to go on without a#1
    assert table.coordinator.explain() == "proposed epoch 2 (term 1) waits for the lease of a#1 to run out"
    table.wait(0.2)
    assert zombie.epoch(table.now) is None
    assert table.ranks() == {"b": 0}
    assert table.hears("b", Activated).lost == (Departure(A, "it came back as incarnation 2"),)
    table.wait(1)
    assert table.ranks() == {"b": 0, "a": 1}
    (refusal,) = table.coordinator.handle(zombie.handle(Tick(), table.now)[-1], table.now)
    assert zombie.handle(refusal, table.now)[0] == Refused("incarnation 1 of a is over, or a later one has come")


def test_a_later_incarnation_of_one_that_is_dead_waits_for_nothing() -> None:
    table = together("a", "b")
    dead = table.crash("a")
    table.join("a", 2)
    assert table.ranks() == {}
    table.ask(Died(dead, "signal 9"))
    assert table.ranks() == {"b": 0}
    table.wait(1)
    assert table.ranks() == {"b": 0, "a": 1}


def test_the_death_of_a_later_incarnation_says_nothing_about_an_earlier_one() -> None:
    table = together("a", "b")
    table.cut = {"a"}
    table.ask(Died(MemberId("a", 2), "signal 9"))
    assert table.members["a"].epoch(table.now) is not None
    assert table.ranks() == {"a": 0}  # it may be at work, so nobody else is
    table.wait(4)
    assert len(table.ranks()) == 1 and "b" in table.ranks()


def test_what_a_member_says_about_itself_when_it_agrees_is_what_all_find_in_the_epoch() -> None:
    table = together("a", "b")
    table.wait(5)
    table.join("c")
    table.wait(2)
    epoch = table.hears("c", Activated).epoch
    assert epoch.metadata == tuple(f"{member} at {table.log[-1].epoch.metadata[0][7:]}" for member in (A, B, C))
    assert float(epoch.metadata[0][7:]) >= 7


# --- coordinators that come and go


def test_a_restarted_coordinator_finds_the_epoch_as_it_is_and_disturbs_nobody() -> None:
    table = together("a", "b")
    table.wait(3)
    table.restart()
    assert table.coordinator.explain() == "restarted, and learning who is there"
    table.wait(20)
    assert table.ranks() == {"a": 0, "b": 1}
    assert table.said == {} and table.log == []
    assert table.coordinator.epoch.id == EpochId(1, 1)
    table.join("c")
    table.wait(2)
    assert table.ranks() == {"a": 0, "b": 1, "c": 2}
    assert table.log[-1].epoch.id == EpochId(2, 2)


def test_a_restarted_coordinator_misses_who_was_lost_with_it() -> None:
    table = together("a", "b", "c")
    table.crash("a")
    table.crash("b")
    table.restart()
    table.join("b", 2)
    table.wait(3.9)
    assert table.ranks() == {"c": 2}
    table.wait(2)
    assert sorted(table.ranks()) == ["b", "c"]
    assert set(table.hears("c", Activated).lost) == {
        Departure(A, "it was not heard of since the coordinator was restarted"),
        Departure(B, "it came back as incarnation 2"),
    }


def test_a_restarted_coordinator_waits_for_who_did_not_tell_what_it_works_in() -> None:
    table = together("c")
    worker = table.members.pop("c")
    table.restart()
    table.join("d")
    table.wait(3.8)
    # It heard of the new coordinator while its lease was good, but nothing more comes from it.
    (report,) = worker.handle(Tick(), table.now)
    (answer,) = table.coordinator.handle(report, table.now)
    worker._lease_until = table.now + 0.1
    worker.handle(answer, table.now)
    until = table.now + table.options.lease
    table.wait(until - 0.1 - table.now)
    assert worker.epoch(table.now) is not None and table.ranks() == {}
    table.wait(0.2)
    assert worker.epoch(table.now) is None and table.ranks() == {"d": 0}


def test_a_coordinator_ends_when_it_hears_of_a_later_one() -> None:
    table = together("a")
    old = table.coordinator
    table.restart()
    table.wait(2)
    assert old.handle(table.reports["a"][-1], table.now) == [Superseded(2)]
    assert old.wake_at is None
    assert old.handle(Tick(), table.now + 60) == []


# --- messages


def test_two_reports_of_one_moment_are_told_apart() -> None:
    member = Member(A, now=0.0)
    (first,) = member.handle(Tick(), 1.0)
    coordinator = Coordinator(MembershipOptions(join_window=0.0), now=1.0)
    (notice,) = coordinator.handle(first, 1.0)
    (second,) = member.handle(notice, 1.0)
    assert second.sent_at > first.sent_at
    assert coordinator.handle(first, 1.0) == []
    asked, third = member.handle(coordinator.handle(second, 1.0)[-1], 1.0)
    assert isinstance(asked, Asked) and third.sent_at > second.sent_at


def test_notices_to_others_and_older_ones_change_nothing() -> None:
    table = together("a", "b")
    old = table.notices["a"][0]
    for notice in (old, table.notices["b"][-1], Notice(MemberId("a", 2), 9, 9, 0.0, 4.0, refused="no")):
        assert table.members["a"].handle(notice, table.now) == []
    assert table.ranks() == {"a": 0, "b": 1}


def test_what_was_agreed_to_before_changes_nothing() -> None:
    table = together("a", "b")
    table.tell("a", Agree(EpochId(1, 1)))
    assert table.ranks() == {"a": 0, "b": 1}
    table.tell("a", GiveUp("a collective was aborted"))
    table.tell("a", Agree(EpochId(1, 1)))
    table.tell("a", Agree(EpochId(1, 2)))
    assert table.ranks() == {"a": 0, "b": 1}


def test_members_report_often_enough_for_the_timeout() -> None:
    table = together("a", "b", timeout=1.0)
    table.wait(10)
    stamps = [report.sent_at for report in table.reports["a"]]
    assert max(later - earlier for earlier, later in itertools.pairwise(stamps[3:])) <= 0.25
    assert table.ranks() == {"a": 0, "b": 1}


def test_texts_travel_to_those_who_do_not_have_them() -> None:
    table = together("a", "b")
    assert table.notices["a"][-1].epoch == EpochId(1, 1)
    table.busy = {"b"}
    table.tell("a", GiveUp("a collective was aborted"))
    table.wait(2)
    assert table.notices["b"][-1].proposal == EpochId(1, 2)
    table.tell("b", Agree(EpochId(1, 2)))
    assert table.reports["a"][-1].text is None
    table.restart()
    table.wait(1.5)
    assert table.reports["a"][-1].text.members == (A, B)


def test_messages_travel_and_compare() -> None:
    table = together("a", "b")
    for message in (*table.reports["a"], *table.notices["a"]):
        assert pickle.loads(pickle.dumps(message)) == message


def test_a_clock_that_goes_back_stands_still() -> None:
    table = together("a")
    table.tell("a", Tick())
    assert table.members["a"].handle(Tick(), 0.0) == []
    table.coordinator.handle(Tick(), 0.0)
    assert table.ranks() == {"a": 0}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: MembershipOptions(minimum=0), "minimum must be an integer of at least 1, not 0"),
        (lambda: MembershipOptions(minimum=3, maximum=2), "maximum must be an integer of at least 3, not 2"),
        (lambda: MembershipOptions(maximum=True), "maximum must be an integer of at least 1, not True"),
        (lambda: MembershipOptions(timeout=0), "timeout must be a number above 0, not 0"),
        (lambda: MembershipOptions(timeout="5"), "timeout must be a number above 0, not '5'"),  # type: ignore[arg-type]
        (lambda: MembershipOptions(timeout=math.nan), "timeout must be a number above 0, not nan"),
        (lambda: MembershipOptions(join_window=-1), "join_window must be a number at least 0, not -1"),
        (lambda: MembershipOptions(agree_timeout=0), "agree_timeout must be a number above 0, not 0"),
        (
            lambda: MembershipOptions(clock_drift=0.6),
            "clock_drift must be a number at least 0 and at most 0.5, not 0.6",
        ),
        (lambda: Coordinator(MembershipOptions(), term=0, now=0.0), "term must be an integer of at least 1, not 0"),
        (lambda: Coordinator(MembershipOptions(), now=0.0).handle("hello", 0.0), "event 'hello' is none"),  # type: ignore[arg-type]
        (lambda: Member(MemberId("a", 0), now=0.0), "incarnation must be an integer of at least 1, not 0"),
        (lambda: Member(A, heartbeat=0, now=0.0), "heartbeat must be a number above 0, not 0"),
        (lambda: Member(A, now=0.0).handle("hello", 0.0), "event 'hello' is none"),  # type: ignore[arg-type]
        (lambda: Member(A, now=0.0).handle(Agree(EpochId(1, 1)), 0.0), "epoch 1 \\(term 1\\) was not proposed to a#1"),
        (lambda: Epoch(EpochId(1, 1), (A, MemberId("a", 2)), ("", "")), "have the same name: a#1, a#2"),
        (lambda: Epoch(EpochId(1, 1), (A, B), ("",)), "2 members have 1 metadata"),
        (lambda: Epoch(EpochId(1, 1), (A, B), ("", "")).rank_of(C), "c#1 is no member of epoch 1"),
    ],
)
def test_bad_values_are_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make()


def test_the_examples_of_the_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "supervision.md").read_text()
    example = doctest.DocTestParser().get_doctest(page[page.index("## Membership") :], {}, "membership", "", 0)
    assert len(example.examples) > 10
    assert doctest.DocTestRunner().run(example).failed == 0
