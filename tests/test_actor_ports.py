"""Ports: values from anywhere, answers that endpoints give themselves, and what happens when an end is gone."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
from actor_client import LIMIT, Faults, Stage, hold, hold_async, wait_until

from monarch_rdma.actor import (
    Actor,
    ActorError,
    Channel,
    HostMesh,
    Port,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    send,
)
from monarch_rdma.actor.runtime.proc import current_proc
from monarch_rdma.errors import ConfigError


class Source(Actor):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint
    def pour(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def pour_nested(self, wrapped: dict[str, Any]) -> None:
        wrapped["ports"][0].send(current_rank().rank)

    @endpoint
    def raise_through(self, port: Port[Any], error: Any) -> None:
        port.exception(error)

    @endpoint
    def keep(self, port: Port[Any]) -> int:
        self.kept.append(port)
        return os.getpid()

    @endpoint
    def pass_on(self, port: Port[Any], to: Any) -> int:
        return to.keep.call_one(port).get(LIMIT)

    @endpoint
    def use_kept(self, value: Any) -> str:
        try:
            self.kept[-1].send(value)
        except SupervisionError as error:
            return f"refused: {error}"
        return "sent"

    @endpoint
    def drop_kept(self) -> None:
        self.kept.clear()
        gc.collect()

    @endpoint
    def open_here(self) -> Any:
        port, self.receiver = Channel.open()
        return port, os.getpid()

    @endpoint
    def receive_here(self) -> Any:
        return self.receiver.recv().get(LIMIT)

    @endpoint
    def value(self) -> int:
        return 100 + current_rank().rank

    @endpoint
    def fail(self) -> None:
        raise LookupError("for the port")

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)


class Answerer(Actor):
    """Endpoints that answer through their port, in the ways that there are."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.problems: list[str] = []

    @endpoint(explicit_response_port=True)
    def at_once(self, port: Port[Any], x: int) -> str:
        port.send((x, current_rank().rank))
        return "is ignored"

    @endpoint(explicit_response_port=True)
    async def from_a_task(self, port: Port[Any], started: Port[Any]) -> None:
        async def later() -> None:
            port.send(await hold_async(started))

        self.task = asyncio.get_running_loop().create_task(later())

    @endpoint(explicit_response_port=True)
    async def from_a_thread(self, port: Port[Any], x: int) -> None:
        threading.Thread(target=port.send, args=(x,)).start()

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[Any], x: int) -> None:
        self.open.append((port, x))

    @endpoint
    def answer_all(self) -> None:
        while self.open:
            port, x = self.open.pop()
            port.send(x)

    @endpoint
    def drop_all(self) -> None:
        self.open.clear()

    @endpoint(explicit_response_port=True)
    def raise_through(self, port: Port[Any], error: Exception) -> None:
        port.exception(error)

    @endpoint(explicit_response_port=True)
    def copies_answer(self, port: Port[Any]) -> None:
        for _ in range(2):
            pickle.loads(pickle.dumps(port)).send(current_rank().rank)

    @endpoint(explicit_response_port=True)
    def drop(self, port: Port[Any]) -> None:
        """Answers nothing."""

    @endpoint(explicit_response_port=True)
    def twice(self, port: Port[Any]) -> None:
        port.send("first")
        try:
            port.send("second")
        except RuntimeError as error:
            self.problems.append(str(error))

    @endpoint
    def all_problems(self) -> list[str]:
        return self.problems

    @endpoint(explicit_response_port=True)
    def let_other_answer(self, port: Port[Any], other: Any, x: int) -> None:
        other.pour.broadcast(port, [x])

    @endpoint(explicit_response_port=True)
    def fail(self, port: Port[Any]) -> None:
        raise LookupError("before the answer")


@pytest.fixture
def sources(procs: ProcMesh) -> Any:
    return procs.spawn("sources", Source)


@pytest.fixture
def source(sources: Any) -> Any:
    return sources.slice(gpus=0)


@pytest.fixture
def answerers(procs: ProcMesh) -> Any:
    return procs.spawn("answerers", Answerer)


@pytest.fixture
def answerer(answerers: Any) -> Any:
    return answerers.slice(gpus=1)


@pytest.fixture
def mortal(client: HostMesh) -> Any:
    """An actor in a process of its own, which the test kills."""
    return client.spawn_procs().spawn("mortal", Source)


# --- values


def test_values_arrive_in_the_order_of_their_sender(sources: Any) -> None:
    port, receiver = Channel[tuple].open()
    sources.slice(gpus=0).pour.broadcast(port, [("a", n) for n in range(300)])
    sources.slice(gpus=1).pour.broadcast(port, [("b", n) for n in range(300)])
    got = [receiver.recv().get(LIMIT) for _ in range(600)]
    assert all([n for tag, n in got if tag == sender] == list(range(300)) for sender in "ab")


def test_a_port_works_within_one_process() -> None:
    port, receiver = Channel.open()
    port.send({"x": 1})
    port.send(None)
    assert [receiver.recv().get(LIMIT) for _ in range(2)] == [{"x": 1}, None]


def test_a_port_works_within_an_actor(source: Any) -> None:
    port, _ = source.open_here.call_one().get(LIMIT)
    source.pour.call_one(port, ["to itself"]).get(LIMIT)
    assert source.receive_here.call_one().get(LIMIT) == "to itself"


def test_several_receives_wait_in_their_order() -> None:
    port, receiver = Channel.open()
    futures = [receiver.recv() for _ in range(10)]
    for number in range(10):
        port.send(number)
    assert [future.get(LIMIT) for future in futures] == list(range(10))


def test_threads_that_receive_get_one_value_each() -> None:
    port, receiver = Channel.open()
    with ThreadPoolExecutor(4) as pool:
        got = [pool.submit(lambda: receiver.recv().get(LIMIT)) for _ in range(40)]
        for number in range(40):
            port.send(number)
        assert sorted(future.result(LIMIT) for future in got) == list(range(40))


def test_receives_can_be_awaited(source: Any) -> None:
    async def receive() -> list[Any]:
        port, receiver = Channel.open()
        source.pour.broadcast(port, [1, 2, 3])
        return [await receiver.recv() for _ in range(3)]

    assert asyncio.run(receive()) == [1, 2, 3]


def test_a_value_may_be_changed_when_send_returns() -> None:
    port, receiver = Channel.open()
    small, large = [1], bytearray(1 << 20)
    port.send((small, large))
    small.append(2)
    large[0] = 1
    got_small, got_large = receiver.recv().get(LIMIT)
    assert got_small == [1]
    assert got_large[0] == 0


def test_an_exception_is_raised_as_it_is(source: Any) -> None:
    port, receiver = Channel.open()
    source.raise_through.call_one(port, KeyError("p", 1)).get(LIMIT)
    with pytest.raises(KeyError) as caught:
        receiver.recv().get(LIMIT)
    assert caught.value.args == ("p", 1)
    port.send("goes on")
    assert receiver.recv().get(LIMIT) == "goes on"


def test_only_exceptions_can_be_sent_as_such() -> None:
    port, _receiver = Channel.open()
    with pytest.raises(ValueError, match="5.*must be an exception"):
        port.exception(5)  # type: ignore[arg-type]


def test_what_cannot_be_pickled_is_refused_at_send() -> None:
    port, receiver = Channel.open()
    with pytest.raises(TypeError, match="cannot pickle"):
        port.send(threading.Lock())
    port.send("next")
    assert receiver.recv().get(LIMIT) == "next"


# --- receiving with a timeout


def test_a_receive_that_timed_out_takes_nothing() -> None:
    port, receiver = Channel.open()
    with pytest.raises(TimeoutError):
        receiver.recv().get(timeout=0.01)
    port.send("kept")
    assert receiver.recv().get(LIMIT) == "kept"


def test_a_receive_that_timed_out_takes_nothing_although_its_error_is_kept() -> None:
    port, receiver = Channel.open()
    with pytest.raises(TimeoutError) as kept:
        receiver.recv().get(timeout=0.01)
    port.send("kept")
    assert receiver.recv().get(LIMIT) == "kept"
    assert kept.value is not None


def test_a_receive_can_be_asked_again_after_a_timeout() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    port.send("late")
    assert future.get(LIMIT) == "late"


def test_a_receive_whose_await_timed_out_takes_nothing() -> None:
    async def receive() -> Any:
        port, receiver = Channel.open()
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receiver.recv(), 0.01)
        port.send("kept")
        return await asyncio.wait_for(receiver.recv(), LIMIT)

    assert asyncio.run(receive()) == "kept"


def test_a_cancelled_receive_takes_nothing() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    assert future.cancel()
    port.send("kept")
    assert receiver.recv().get(LIMIT) == "kept"


def test_a_receive_that_nobody_waits_for_takes_nothing() -> None:
    port, receiver = Channel.open()
    receiver.recv()
    port.send("kept")
    assert receiver.recv().get(LIMIT) == "kept"


# --- once, ranked


def test_a_port_for_one_value_takes_one() -> None:
    port, receiver = Channel.open(once=True)
    port.send(1)
    with pytest.raises(RuntimeError, match="used"):
        port.send(2)
    assert receiver.recv().get(LIMIT) == 1


def test_ranked_ports_tell_who_sent(sources: Any) -> None:
    port, receiver = Channel.open_ranked()
    send(sources.value, (), {}, port=port)
    assert sorted(receiver.recv().get(LIMIT) for _ in range(2)) == [(0, 100), (1, 101)]
    send(sources.value, (), {}, port=port, selection="choose")
    assert receiver.recv().get(LIMIT) in [(0, 100), (1, 101)]


def test_failures_of_sent_calls_come_to_the_port(sources: Any) -> None:
    port, receiver = Channel.open()
    send(sources.slice(gpus=0).fail, (), {}, port=port)
    with pytest.raises(ActorError, match="for the port"):
        receiver.recv().get(LIMIT)


# --- ports in messages


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_ports_can_be_pickled_receivers_cannot(dumps: Any) -> None:
    port, receiver = Channel.open()
    pickle.loads(dumps(port)).send("through a copy")
    assert receiver.recv().get(LIMIT) == "through a copy"
    with pytest.raises(ValueError, match="PortReceiver cannot be sent"):
        dumps(receiver)


def test_ports_travel_inside_of_values(sources: Any) -> None:
    port, receiver = Channel.open()
    sources.pour_nested.call({"ports": [port]}).get(LIMIT)
    assert sorted(receiver.recv().get(LIMIT) for _ in range(2)) == [0, 1]


def test_a_port_is_passed_on_through_actors(sources: Any) -> None:
    port, receiver = Channel.open()
    first, second = sources.slice(gpus=0), sources.slice(gpus=1)
    first.pass_on.call_one(port, second).get(LIMIT)
    assert second.use_kept.call_one("from afar").get(LIMIT) == "sent"
    assert receiver.recv().get(LIMIT) == "from afar"


def test_a_port_opened_by_an_actor_is_reached_from_the_client_and_from_others(sources: Any) -> None:
    first, second = sources.slice(gpus=0), sources.slice(gpus=1)
    port, _ = first.open_here.call_one().get(LIMIT)
    port.send("from the client")
    assert first.receive_here.call_one().get(LIMIT) == "from the client"
    second.pour.call_one(port, ["from the other"]).get(LIMIT)
    assert first.receive_here.call_one().get(LIMIT) == "from the other"


# --- an end is gone


def test_values_for_a_closed_port_are_dropped_and_hold_nobody_up(source: Any) -> None:
    port, receiver = Channel.open()
    del receiver
    gc.collect()
    source.pour.call_one(port, list(range(5000))).get(LIMIT)
    for number in range(5000):
        port.send(number)


@pytest.mark.parametrize("passed_on", [False, True])
def test_the_death_of_a_holder_is_raised(source: Any, mortal: Any, faults: Faults, passed_on: bool) -> None:
    port, receiver = Channel.open()
    pid = source.pass_on.call_one(port, mortal) if passed_on else mortal.keep.call_one(port)
    waiting = receiver.recv()
    os.kill(pid.get(LIMIT), signal.SIGKILL)
    with pytest.raises(SupervisionError, match="is lost"):
        waiting.get(LIMIT)
    assert faults.next().kind == "process"
    port.send("of those that live")
    assert receiver.recv().get(LIMIT) == "of those that live"


def test_what_a_holder_sent_before_its_death_arrives(mortal: Any, faults: Faults) -> None:
    port, receiver = Channel.open()
    pid = mortal.keep.call_one(port).get(LIMIT)
    mortal.pour.call_one(port, ["a", "b"]).get(LIMIT)
    os.kill(pid, signal.SIGKILL)
    assert [receiver.recv().get(LIMIT) for _ in range(2)] == ["a", "b"]
    with pytest.raises(SupervisionError):
        receiver.recv().get(LIMIT)
    faults.next()


def test_a_call_to_a_port_raises_when_the_process_dies(mortal: Any, faults: Faults) -> None:
    port, receiver = Channel.open()
    stage = Stage()
    pid = mortal.keep.call_one(stage.port).get(LIMIT)
    send(mortal.wait, (stage.port,), {}, port=port)
    stage.next()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        receiver.recv().get(LIMIT)
    faults.next()


def test_sending_to_a_process_that_died_raises(source: Any, mortal: Any, faults: Faults) -> None:
    port, pid = mortal.open_here.call_one().get(LIMIT)
    source.keep.call_one(port).get(LIMIT)
    os.kill(pid, signal.SIGKILL)
    faults.next()

    def is_refused() -> bool:
        try:
            port.send("nobody reads this")
        except SupervisionError:
            return True
        return False

    wait_until(is_refused, "the client may send to a dead process")
    wait_until(lambda: source.use_kept.call_one("nor this").get(LIMIT).startswith("refused"), "an actor may send to it")


def test_a_holder_that_is_stopped_counts_as_gone(client: HostMesh) -> None:
    procs = client.spawn_procs()
    holder = procs.spawn("holder", Source)
    port, receiver = Channel.open()
    holder.keep.call_one(port).get(LIMIT)
    procs.stop().get(LIMIT)
    with pytest.raises(SupervisionError):
        receiver.recv().get(LIMIT)


# --- endpoints that answer through their port


def test_an_answer_through_the_port_is_the_result(answerers: Any, answerer: Any) -> None:
    assert answerer.at_once.call_one(1).get(LIMIT) == (1, 0)
    values = answerers.at_once.call(2).get(LIMIT)
    assert [(dict(point), value) for point, value in values.items()] == [({"gpus": 0}, (2, 0)), ({"gpus": 1}, (2, 1))]
    assert sorted(future.get(LIMIT) for future in answerers.at_once.stream(3)) == [(3, 0), (3, 1)]
    assert answerers.at_once.choose(4).get(LIMIT) in [(4, 0), (4, 1)]


def test_a_broadcast_to_such_an_endpoint_drops_the_answer(answerer: Any) -> None:
    answerer.at_once.broadcast(1)
    assert answerer.at_once.call_one(2).get(LIMIT) == (2, 0)


def test_answers_may_come_in_another_order(answerer: Any) -> None:
    futures = [answerer.later.call_one(number) for number in range(20)]
    answerer.answer_all.call_one().get(LIMIT)
    assert [future.get(LIMIT) for future in futures] == list(range(20))


def test_a_task_or_a_thread_may_answer(answerer: Any) -> None:
    stage = Stage()
    from_task = answerer.from_a_task.call_one(stage.port)
    assert answerer.from_a_thread.call_one(5).get(LIMIT) == 5
    stage.next().send("from a task")
    assert from_task.get(LIMIT) == "from a task"


def test_another_actor_may_answer(answerer: Any, source: Any) -> None:
    assert answerer.let_other_answer.call_one(source, 6).get(LIMIT) == 6


def test_an_exception_through_the_port_is_raised_as_it_is(answerers: Any, answerer: Any) -> None:
    for future in (answerer.raise_through.call_one(LookupError("x")), answerers.raise_through.call(LookupError("x"))):
        with pytest.raises(LookupError, match="x"):
            future.get(LIMIT)


@pytest.mark.parametrize("adverb", ["call_one", "call"])
def test_a_port_let_go_of_unanswered_raises(answerer: Any, adverb: str) -> None:
    with pytest.raises(SupervisionError, match="without an answer"):
        getattr(answerer.drop, adverb)().get(LIMIT)


def test_a_port_let_go_of_later_raises_then(answerer: Any) -> None:
    future = answerer.later.call_one(1)
    answerer.drop_all.call_one().get(LIMIT)
    with pytest.raises(SupervisionError, match="without an answer"):
        future.get(LIMIT)


def test_a_second_answer_is_refused(answerer: Any) -> None:
    assert answerer.twice.call_one().get(LIMIT) == "first"
    assert len(answerer.all_problems.call_one().get(LIMIT)) == 1


def test_of_the_answers_through_copies_of_a_port_the_first_counts(answerers: Any) -> None:
    for _ in range(20):
        assert answerers.copies_answer.call().get(LIMIT).values() == list(range(len(answerers)))


def test_a_port_that_is_closed_waits_for_nobody(sources: Any) -> None:
    def waiting() -> int:
        return sum(map(len, current_proc()._watches._expecting.values()))

    sources.value.call().get(LIMIT)
    gc.collect()
    before = waiting()
    for number in range(20):
        port, receiver = Channel[int].open()
        sources.pour.call(port, [number]).get(LIMIT)
        assert receiver.recv().get(LIMIT) == number
        send(sources.value, (), {}, port=port)
        receiver.recv().get(LIMIT)
        del port, receiver
    gc.collect()
    wait_until(lambda: waiting() <= before, lambda: f"{waiting()} are waited for, not {before}")


def test_the_caller_hears_of_an_exception_before_the_answer(procs: ProcMesh, faults: Faults) -> None:
    doomed = procs.spawn("doomed", Answerer).slice(gpus=0)
    with pytest.raises(ActorError, match="before the answer"):
        doomed.fail.call_one().get(LIMIT)
    assert "before the answer" in faults.next().report()


def test_the_death_of_who_has_the_response_port_is_raised(
    client: HostMesh, mortal: Any, answerer: Any, faults: Faults
) -> None:
    """The port was passed on to another process, which dies before it answers."""
    passing = client.spawn_procs().spawn("passing", Passing)
    future = passing.give.call_one(mortal)
    pid = mortal.keep.call_one(None).get(LIMIT)
    passing.is_given.call_one().get(LIMIT)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        future.get(LIMIT)
    faults.next()


class Passing(Actor):
    @endpoint(explicit_response_port=True)
    def give(self, port: Port[Any], other: Any) -> None:
        other.keep.call_one(port).get(LIMIT)

    @endpoint
    def is_given(self) -> bool:
        return True


def test_a_port_for_one_value_is_asked_once() -> None:
    port, receiver = Channel.open(once=True)
    first = receiver.recv()
    with pytest.raises(ConfigError, match="for one value"):
        receiver.recv()
    port.send(1)
    assert first.get(LIMIT) == 1
