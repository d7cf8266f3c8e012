"""Response ports that are sent on: whoever has one last and lets go of it, the caller is told, and waits for nobody."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
from actor_client import LIMIT, Stage, hold, wait_until

from monarch_rdma import config
from monarch_rdma.actor import Actor, Channel, HostMesh, Port, ProcMesh, SupervisionError, endpoint, this_proc
from monarch_rdma.actor.runtime.proc import current_proc


class Front(Actor):
    """Answers nothing by itself."""

    @endpoint(explicit_response_port=True)
    def hand_on(self, port: Port[Any], *others: Any) -> None:
        for other in others:
            other.keep.broadcast(port)

    @endpoint(explicit_response_port=True)
    def hand_on_large(self, port: Port[Any], others: Any) -> None:
        others.keep.broadcast(port, bytes(1 << 20))

    @endpoint(explicit_response_port=True)
    def hand_on_in_value(self, port: Port[Any], to: Port[Any]) -> None:
        to.send({"answer here": [port]})

    @endpoint(explicit_response_port=True)
    def hand_on_and_cancel(self, port: Port[Any], other: Any) -> None:
        other.keep.call_one(port).cancel()

    @endpoint(explicit_response_port=True)
    def hand_on_at_spawn(self, port: Port[Any], procs: ProcMesh) -> None:
        self.made = procs.spawn("holder", Holder, port)

    @endpoint(explicit_response_port=True)
    def hand_on_or_answer(self, port: Port[Any], other: Any) -> None:
        try:
            other.keep.broadcast(port)
        except SupervisionError:
            port.send("by itself")

    @endpoint(explicit_response_port=True)
    def hand_on_and_answer(self, port: Port[Any], other: Any) -> None:
        other.keep.broadcast(port)
        try:
            port.send("twice")
        except RuntimeError as error:
            other.keep.broadcast(str(error))

    @endpoint
    def stop_made(self) -> None:
        self.made.stop().get(LIMIT)


class Holder(Actor):
    def __init__(self, port: Port[Any] | None = None) -> None:
        self.ports: list[Any] = [] if port is None else [port]

    @endpoint
    def keep(self, port: Port[Any], beside: bytes = b"") -> None:
        self.ports.append(port)

    @endpoint
    def pass_on(self, other: Any) -> None:
        other.keep.broadcast(self.ports.pop())

    @endpoint
    def answer(self, value: Any) -> None:
        self.ports.pop().send(value)

    @endpoint
    def pop(self) -> Any:
        return self.ports.pop()

    @endpoint
    def drop(self) -> None:
        self.ports.clear()

    @endpoint
    def num_ports(self) -> int:
        return len(self.ports)

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)


@pytest.fixture
def front(procs: ProcMesh) -> Any:
    return procs.spawn("front", Front).slice(gpus=0)


@pytest.fixture
def holders(procs: ProcMesh) -> Any:
    """In the front's process, and in another one."""
    return procs.spawn("holders", Holder)


LET_GO = "without an answer"


def nobody_answers(future: Any) -> None:
    with pytest.raises(SupervisionError, match=LET_GO):
        future.get(LIMIT)


def has_it(holder: Any) -> None:
    wait_until(lambda: holder.num_ports.call_one().get(LIMIT) > 0, "it does not get there")


@pytest.mark.parametrize("where", [0, 1])
def test_who_has_it_may_let_go_of_it(front: Any, holders: Any, where: int) -> None:
    holder = holders.slice(gpus=where)
    future = front.hand_on.call_one(holder)
    has_it(holder)
    assert not future.done()
    holder.drop.call_one().get(LIMIT)
    nobody_answers(future)


def test_it_may_be_passed_on_again(front: Any, holders: Any) -> None:
    first, second = holders.slice(gpus=1), holders.slice(gpus=0)
    for end in ("answer", "drop"):
        future = front.hand_on.call_one(first)
        has_it(first)
        first.pass_on.call_one(second).get(LIMIT)
        has_it(second)
        first.drop.call_one().get(LIMIT)
        assert not future.done()
        if end == "answer":
            second.answer.call_one("at last").get(LIMIT)
            assert future.get(LIMIT) == "at last"
        else:
            second.drop.call_one().get(LIMIT)
            nobody_answers(future)


def test_of_several_the_last_one_counts(front: Any, holders: Any) -> None:
    for end in ("answer", "drop"):
        futures = front.hand_on.call_one(*[holders.slice(gpus=rank) for rank in range(2)])
        for rank in range(2):
            has_it(holders.slice(gpus=rank))
        holders.slice(gpus=1).drop.call_one().get(LIMIT)
        assert not futures.done()
        if end == "answer":
            holders.slice(gpus=0).answer.call_one(1).get(LIMIT)
            assert futures.get(LIMIT) == 1
            holders.drop.call().get(LIMIT)
        else:
            holders.slice(gpus=0).drop.call_one().get(LIMIT)
            nobody_answers(futures)


def test_a_call_of_many_fails_with_one(procs: ProcMesh, holders: Any) -> None:
    fronts = procs.spawn("fronts", Front)
    futures = fronts.hand_on.call(holders.slice(gpus=1)), fronts.hand_on.call_living(holders.slice(gpus=0))
    for rank in range(2):
        wait_until(lambda rank=rank: holders.slice(gpus=rank).num_ports.call_one().get(LIMIT) == 2, "it is not there")
    holders.drop.call().get(LIMIT)
    nobody_answers(futures[0])
    assert futures[1].get(LIMIT).values() == [None, None]


def test_a_message_that_is_never_worked_on_lets_go_of_it(front: Any, holders: Any) -> None:
    """Of an actor that has ended, and one that is cancelled while it waits."""
    ended, busy, stage = holders.slice(gpus=1), holders.slice(gpus=0), Stage()
    ended.stop().get(LIMIT)
    nobody_answers(front.hand_on.call_one(ended))
    nobody_answers(front.hand_on_large.call_one(ended))
    waiting = busy.wait.call_one(stage.port)
    go = stage.next()
    future = front.hand_on_and_cancel.call_one(busy)
    nobody_answers(front.hand_on.call_one())  # after it
    go.send(None)
    waiting.get(LIMIT)
    nobody_answers(future)


def test_a_value_that_nobody_takes_lets_go_of_it(front: Any) -> None:
    port, receiver = Channel.open()
    first, second = front.hand_on_in_value.call_one(port), front.hand_on_in_value.call_one(port)
    receiver.recv().get(LIMIT)["answer here"][0].send("by the client")
    assert first.get(LIMIT) == "by the client"
    others = [receiver]
    wait_until(lambda: bool(others[0]._queue._arrived), "it does not come")
    del receiver
    others.clear()
    gc.collect()
    nobody_answers(second)


def test_the_clients_own_copies_count(front: Any) -> None:
    port, receiver = Channel.open()
    future = front.hand_on_in_value.call_one(port)
    value = receiver.recv().get(LIMIT)
    assert not future.done()
    del value
    gc.collect()
    nobody_answers(future)


def test_an_actor_that_was_made_with_it_ends(front: Any, procs: ProcMesh) -> None:
    future = front.hand_on_at_spawn.call_one(procs.slice(gpus=1))
    front.stop_made.call_one().get(LIMIT)
    nobody_answers(future)


def test_where_it_cannot_be_sent_on_it_may_still_be_used(front: Any, client: HostMesh) -> None:
    gone = client.spawn_procs()
    holder = gone.spawn("gone", Holder)
    holder.num_ports.call_one().get(LIMIT)
    gone.stop().get(LIMIT)
    assert front.hand_on_or_answer.call_one(holder).get(LIMIT) == "by itself"


def test_once_sent_on_it_is_somebody_elses(front: Any, holders: Any) -> None:
    holder = holders.slice(gpus=1)
    future = front.hand_on_and_answer.call_one(holder)
    wait_until(lambda: holder.num_ports.call_one().get(LIMIT) == 2, "both do not get there")
    assert "sent to somebody else" in holder.pop.call_one().get(LIMIT)
    holder.answer.call_one("once").get(LIMIT)
    assert future.get(LIMIT) == "once"


def test_over_a_tree_with_what_is_large(client: HostMesh) -> None:
    with config.configured(cast_fanout=2), client.spawn_procs({"n": 5}) as procs:
        holders = procs.spawn("holders", Holder)
        front = procs.slice(n=0).spawn("front", Front)
        holders.num_ports.call().get(LIMIT)
        future = front.hand_on_large.call_one(holders)
        for rank in range(5):
            has_it(holders.slice(n=rank))
        holders.slice(n=slice(0, 4)).drop.call().get(LIMIT)
        assert not future.done()
        holders.slice(n=4).drop.call_one().get(LIMIT)
        nobody_answers(future)


def test_a_port_that_was_pickled_otherwise_is_nobodys_business(holders: Any) -> None:
    """Nothing is known of who has it, so nothing is said when it is let go of."""
    keeper = this_proc().spawn("keeper", Pickler)
    future = keeper.pickle_it.call_one()
    (data,) = keeper.data.call_one().get(LIMIT)
    pickle.loads(data)
    gc.collect()
    holders.drop.call().get(LIMIT)
    assert not future.done()
    pickle.loads(data).send("from a copy")
    assert future.get(LIMIT) == "from a copy"
    keeper.stop().get(LIMIT)


class Pickler(Actor):
    def __init__(self) -> None:
        self.kept: list[bytes] = []

    @endpoint(explicit_response_port=True)
    def pickle_it(self, port: Port[Any]) -> None:
        self.kept.append(pickle.dumps(port))

    @endpoint
    def data(self) -> list[bytes]:
        return self.kept


def test_nothing_is_left_of_ports_that_were_sent_on(front: Any, holders: Any) -> None:
    def waiting() -> int:
        return sum(map(len, current_proc()._watches._expecting.values()))

    holder = holders.slice(gpus=1)
    before = waiting()
    for _ in range(20):
        future = front.hand_on.call_one(holder)
        has_it(holder)
        holder.answer.call_one(None).get(LIMIT)
        future.get(LIMIT)
    wait_until(lambda: waiting() <= before, lambda: f"{waiting()} are waited for, not {before}")
