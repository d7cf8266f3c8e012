"""Who is in, among real processes: they are killed, stopped and started again, and agree on it all the time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from actor_client import LIMIT, Faults, wait_until

from monarch_rdma.actor import Actor, HostMesh, ProcMesh, SupervisionError, endpoint
from monarch_rdma.actor.membership import Coordination, CoordinationId, Membership
from monarch_rdma.errors import ConfigError
from monarch_rdma.supervision.events import Recording
from monarch_rdma.supervision.membership import (
    Activated,
    Asked,
    Dropped,
    Epoch,
    Left,
    Lost,
    MemberId,
    MembershipOptions,
    Refused,
    Suspended,
)

PATIENT = MembershipOptions(join_window=0.1, timeout=60.0)  # only what is known to be dead departs soon
QUICK = MembershipOptions(join_window=0.1, timeout=2.0)


class Replica(Actor):
    def __init__(self, coordination: CoordinationId, heartbeat: float = 0.5) -> None:
        self.membership = Membership(coordination, metadata=os.getpid(), heartbeat=heartbeat)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def enter(self) -> Activated:
        return self.membership.enter().get(LIMIT)

    @endpoint
    def enter_one_of(self, *pids: int) -> Epoch:
        """Goes along until it is in an epoch of these processes."""
        while True:
            epoch = self.membership.enter().get(LIMIT).epoch
            if set(epoch.metadata) == set(pids):
                return epoch
            self.wait_for(Asked)

    @endpoint
    def until(self, *kinds: type[Any]) -> Any:
        return self.wait_for(*kinds)

    def wait_for(self, *kinds: type[Any]) -> Any:
        while not isinstance(event := self.membership.next_event(LIMIT), kinds):
            continue
        return event

    @endpoint
    def is_in(self, epoch: Epoch) -> bool:
        return self.membership.is_in(epoch)

    @endpoint
    def current(self) -> Epoch | None:
        return self.membership.epoch

    @endpoint
    def leave(self) -> None:
        self.membership.leave("it has had enough")

    @endpoint
    def give_up(self) -> None:
        self.membership.give_up("a collective was aborted")

    @endpoint
    def follow(self, coordination: CoordinationId) -> None:
        self.membership.follow(coordination)


@pytest.fixture
def coordination(client: HostMesh) -> Any:
    coordinations: list[Coordination] = []

    def make(options: MembershipOptions, **arguments: Any) -> Coordination:
        coordinations.append(Coordination(options, **arguments))
        return coordinations[-1]

    yield make
    for each in coordinations:
        each.close()


Make = Callable[..., Coordination]


def together(replicas: Any) -> Epoch:
    """The one epoch of all of them."""
    pids = replicas.pid.call().get(LIMIT).values()
    epochs = list(replicas.enter_one_of.call(*pids).get(LIMIT).values())
    assert len({epoch.id for epoch in epochs}) == 1
    return epochs[0]  # type: ignore[no-any-return]


def agreed(entered: list[Any]) -> Epoch:
    """The one epoch that all have entered, each with a rank of its own."""
    epochs = {each.epoch.id for each in entered}
    assert len(epochs) == 1 and sorted(each.rank for each in entered) == list(range(len(entered[0].epoch)))
    return entered[0].epoch  # type: ignore[no-any-return]


def test_a_mesh_shrinks_around_a_killed_process_and_regrows(
    client: HostMesh, faults: Faults, coordination: Make
) -> None:
    with client.spawn_procs({"n": 3}, restart="never") as procs, Recording("epoch.committed") as recording:
        replicas = procs.spawn("replicas", Replica, coordination(PATIENT).id)
        first = together(replicas)
        pids = replicas.pid.call().get(LIMIT).values()
        assert [first.metadata[first.members.index(member)] for member in sorted(first.members)] == pids
        assert replicas.is_in.call(first).get(LIMIT).values() == [True] * 3
        os.kill(pids[1], signal.SIGKILL)
        faults.next()
        left = [replicas.slice(n=0), replicas.slice(n=2)]
        for each in left:
            lost = each.until.call_one(Lost).get(LIMIT)  # long before the timeout: it has ended for sure
            assert [departure.member.name for departure in lost.departed] == ["replicas/1"]
            assert not each.is_in.call_one(first).get(LIMIT)
        entering = [each.enter.call_one() for each in left]
        second = agreed([future.get(LIMIT) for future in entering])
        assert [departure.member.name for departure in second.departed] == ["replicas/1"]
        assert f"pid {pids[1]}" in second.departed[0].reason
        procs.replace(1).get(LIMIT)
        regrown = together(replicas)
        assert [member.name for member in regrown.joined] == ["replicas/1"]
        assert regrown.metadata[regrown.members.index(regrown.joined[0])] == replicas.slice(n=1).pid.call_one().get(
            LIMIT
        )
        sizes = [len(event.fields["members"]) for event in recording.events]
        assert sizes[0] <= 3 and sizes[-2:] == [2, 3]


def test_kill_after_kill_everybody_agrees(client: HostMesh, faults: Faults, coordination: Make) -> None:
    with client.spawn_procs({"n": 3}, restart="always", max_restarts=None) as procs:
        replicas = procs.spawn("replicas", Replica, coordination(PATIENT).id)
        together(replicas)
        numbers = []
        for round in range(6):
            victim = replicas.slice(n=round % 3)
            pid = victim.pid.call_one().get(LIMIT)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: victim.pid.call_living().get(LIMIT).values() not in ([None], [pid]), "not back")  # noqa: B023
            epoch = together(replicas)
            numbers.append(epoch.id)
        assert numbers == sorted(set(numbers))


def test_below_the_minimum_nobody_is_in(client: HostMesh, faults: Faults, coordination: Make) -> None:
    with client.spawn_procs({"n": 2}, restart="never") as procs:
        replicas = procs.spawn("replicas", Replica, coordination(MembershipOptions(2, join_window=0.0)).id)
        together(replicas)
        os.kill(replicas.slice(n=0).pid.call_one().get(LIMIT), signal.SIGKILL)
        faults.next()
        rest = replicas.slice(n=1)
        rest.until.call_one(Lost).get(LIMIT)
        entering = rest.enter.call_one()
        assert not entering.wait(0.2)
        procs.replace(0).get(LIMIT)
        other = replicas.slice(n=0).enter.call_one()
        assert len(agreed([entering.get(LIMIT), other.get(LIMIT)])) == 2


def test_who_may_live_is_waited_for_until_its_lease_is_over(procs: ProcMesh, coordination: Make) -> None:
    replicas = procs.spawn("replicas", Replica, coordination(QUICK).id, 0.1)
    together(replicas)
    silent, other = replicas.slice(gpus=0), replicas.slice(gpus=1)
    pid, other_pid = replicas.pid.call().get(LIMIT).values()
    os.kill(pid, signal.SIGSTOP)
    try:
        alone = other.enter_one_of.call_one(other_pid).get(LIMIT)
        assert "silent" in alone.departed[0].reason
    finally:
        os.kill(pid, signal.SIGCONT)
    assert silent.current.call_one().get(LIMIT) is None  # its clock has gone on
    assert isinstance(silent.until.call_one(Suspended, Dropped).get(LIMIT), Suspended | Dropped)
    together(replicas)
    replicas.stop().get(LIMIT)


def test_leaving_giving_up_and_what_is_refused(procs: ProcMesh, coordination: Make) -> None:
    where = coordination(PATIENT)
    replicas = procs.spawn("replicas", Replica, where.id)
    first = together(replicas)
    replicas.slice(gpus=0).give_up.call_one().get(LIMIT)
    replicas.slice(gpus=1).until.call_one(Lost).get(LIMIT)
    second = together(replicas)
    assert second.id > first.id and set(second.members) == set(first.members)
    replicas.slice(gpus=0).leave.call_one().get(LIMIT)
    assert isinstance(replicas.slice(gpus=0).until.call_one(Left).get(LIMIT), Left)
    rest = replicas.slice(gpus=1)
    assert len(rest.enter_one_of.call_one(rest.pid.call_one().get(LIMIT)).get(LIMIT)) == 1
    error = replicas.slice(gpus=0).enter.call_one().exception(LIMIT)
    assert "it has left" in str(error)
    here = Membership(where.id, "replicas/1", incarnation=1)
    with pytest.raises(SupervisionError, match="refused"):
        here.enter().get(LIMIT)
    assert isinstance(here.next_event(LIMIT), Refused)
    replicas.stop().get(LIMIT)


def test_a_new_coordination_goes_on_with_the_epoch(procs: ProcMesh, coordination: Make) -> None:
    old = coordination(QUICK)
    replicas = procs.spawn("replicas", Replica, old.id, 0.1)
    epoch = together(replicas)
    old.close()
    new = coordination(QUICK, term=2)
    replicas.follow.call(new.id).get(LIMIT)
    wait_until(lambda: new.epoch is not None, new.explain)
    assert new.epoch is not None and new.epoch.id == epoch.id
    assert replicas.is_in.call(epoch).get(LIMIT).values() == [True, True]
    replicas.stop().get(LIMIT)


def test_members_in_one_process(client: HostMesh, coordination: Make) -> None:
    where = coordination(PATIENT)
    members = [Membership(where.id, f"m{number}") for number in range(4)]
    epoch = agreed([future.get(LIMIT) for future in [member.enter() for member in members]])
    assert len(epoch) == 4
    where.died(members[0].me, "somebody has seen it")
    rest = members[1:]
    again = agreed([future.get(LIMIT) for future in [member.enter() for member in rest if _heard(member)]])
    assert [departure.reason for departure in again.departed] == ["somebody has seen it"]
    for member in rest:
        member.leave("done")
        with pytest.raises(SupervisionError, match="has left"):
            member.enter().get(LIMIT)


def _heard(member: Membership) -> bool:
    while not isinstance(member.next_event(LIMIT), Lost):
        continue
    return True


def test_wrong_arguments(client: HostMesh, coordination: Make) -> None:
    where = coordination(PATIENT)
    for arguments, why in [
        (("here", "a"), "coordination is 'here'"),
        ((where.id, ""), "name is ''"),
    ]:
        with pytest.raises(ConfigError, match=why):
            Membership(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="incarnation must be"):
        Membership(where.id, "a", incarnation=0)
    member = Membership(where.id, "a")
    while not isinstance(member.next_event(LIMIT), Asked):
        continue
    with pytest.raises(TimeoutError, match="nothing has happened to a#"):
        member.next_event(0.01)
    member.leave("done")
    assert MemberId("a", member.me.incarnation) == member.me
