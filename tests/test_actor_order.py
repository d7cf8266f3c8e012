"""What runs when: order of messages, concurrency, calls within calls, threads and forks in endpoints."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from actor_client import LIMIT, Stage, hold, hold_async, wait_until

from monarch_rdma import config
from monarch_rdma.actor import (
    Actor,
    ActorMesh,
    Port,
    ProcMesh,
    concurrent_endpoint,
    current_actor_name,
    current_rank,
    endpoint,
    this_proc,
)


class Recorder(Actor):
    """Sync endpoints only."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.inside = 0

    @endpoint
    def record(self, what: Any) -> int:
        self.inside += 1
        assert self.inside == 1, "two messages at once"
        self.seen.append(what)
        self.inside -= 1
        return len(self.seen)

    @endpoint
    def all(self) -> list[Any]:
        return self.seen

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def send_to(self, other: Any, tag: Any, count: int) -> None:
        for number in range(count):
            other.record.broadcast((tag, number))

    @endpoint
    def ask(self, others: list[Any], what: Any) -> Any:
        """Along a chain of actors."""
        return others[0].ask.call_one(others[1:], what).get(LIMIT) if others else what

    @endpoint
    def call_self(self, me: Any, timeout: float) -> str:
        try:
            me.all.call_one().get(timeout)
        except TimeoutError:
            return "waits for itself"
        return "answered"

    @endpoint
    def tell_self(self, me: Any) -> None:
        me.record.broadcast("from myself")
        self.seen.append("first")

    @endpoint
    def ask_from_threads(self, other: Any, count: int) -> list[int]:
        with ThreadPoolExecutor(4) as pool:
            return sorted(pool.map(lambda number: other.record.call_one(number).get(LIMIT), range(count)))

    @endpoint
    def fork(self) -> tuple[int, bytes]:
        """A child that does something of its own and exits."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, f"child of {os.getppid()}".encode())
            finally:
                os._exit(7)
        os.close(writing)
        said = os.read(reading, 100)
        os.close(reading)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

    @endpoint
    def thread(self) -> int:
        return threading.get_ident()


class Juggler(Actor):
    """Async endpoints, some of them concurrent."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @endpoint
    async def wait(self, started: Port[Any], tag: Any) -> Any:
        self.log.append(("begin", tag))
        value = await hold_async(started)
        self.log.append(("end", tag))
        return value

    @concurrent_endpoint
    async def wait_aside(self, started: Port[Any], tag: Any) -> Any:
        self.log.append(("begin", tag))
        value = await hold_async(started)
        self.log.append(("end", tag))
        return value

    @concurrent_endpoint
    async def ask_aside(self, other: Any, what: Any) -> Any:
        return await other.answer.call_one(what)

    @concurrent_endpoint
    async def round_trip(self, through: Any, what: Any) -> Any:
        """To another actor and back into this one, which is at work on this."""
        return await through.ask_aside.call_one(self.me, what)

    @endpoint
    async def meet(self, me: Any) -> None:
        self.me = me

    @concurrent_endpoint
    async def answer(self, what: Any) -> Any:
        return what

    @endpoint
    async def history(self) -> list[Any]:
        return self.log

    @endpoint
    async def start_task(self, started: Port[Any], done: Port[Any]) -> str:
        async def later() -> None:
            await hold_async(started)
            done.send((dict(current_rank()), current_actor_name()))

        self.task = asyncio.get_running_loop().create_task(later())
        return current_actor_name()

    @endpoint
    async def in_thread(self) -> tuple[dict[str, int], bool]:
        rank, ident = await asyncio.to_thread(lambda: (dict(current_rank()), threading.get_ident()))
        return rank, ident != threading.get_ident()

    @endpoint
    def thread(self) -> int:
        return threading.get_ident()

    @endpoint
    def has_loop(self) -> bool:
        return asyncio.get_running_loop() is not None


@pytest.fixture
def recorder(procs: ProcMesh) -> Any:
    return procs.spawn("recorder", Recorder).slice(gpus=0)


@pytest.fixture
def juggler(procs: ProcMesh) -> Any:
    return procs.spawn("juggler", Juggler).slice(gpus=1)


@pytest.fixture
def senders(procs: ProcMesh) -> ActorMesh[Recorder]:
    return procs.spawn("senders", Recorder)


def test_messages_of_one_sender_are_worked_on_in_their_order(recorder: Any) -> None:
    futures = [recorder.record.call_one(number) for number in range(2000)]
    for number in range(2000, 3000):
        recorder.record.broadcast(number)
    assert [future.get(LIMIT) for future in futures] == list(range(1, 2001))
    assert recorder.all.call_one().get(LIMIT) == list(range(3000))


def test_large_and_small_messages_keep_their_order(recorder: Any) -> None:
    sizes = [1 << 20 if number % 7 == 0 else 10 for number in range(60)]
    for size in sizes:
        recorder.record.broadcast(b"x" * size)
    assert [len(data) for data in recorder.all.call_one().get(LIMIT)] == sizes


def test_messages_of_many_senders_keep_the_order_of_each(recorder: Any, senders: Any) -> None:
    done = senders.send_to.call(recorder, "actor", 500)
    for number in range(500):
        recorder.record.broadcast(("client", number))
    done.get(LIMIT)  # all have left; those of the senders may still be on their way
    seen: list[Any] = []

    def all_came() -> bool:
        seen[:] = recorder.all.call_one().get(LIMIT)
        return len(seen) >= 3 * 500

    wait_until(all_came, lambda: f"{len(seen)} came")
    assert [number for tag, number in seen if tag == "client"] == list(range(500))
    assert sorted(number for tag, number in seen if tag == "actor") == sorted([*range(500)] * 2)


def test_messages_of_several_threads_keep_the_order_of_each(recorder: Any) -> None:
    def send(tag: int) -> list[int]:
        return [recorder.record.call_one((tag, number)) for number in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for futures in pool.map(send, range(4)):
            answers = [future.get(LIMIT) for future in futures]
            assert answers == sorted(answers)
    seen = recorder.all.call_one().get(LIMIT)
    assert all([n for tag, n in seen if tag == thread] == list(range(200)) for thread in range(4))


def test_a_slice_and_the_whole_mesh_share_one_order(procs: ProcMesh) -> None:
    mesh = procs.spawn("recorder", Recorder)
    one = mesh.slice(gpus=0)
    for number in range(100):
        (mesh if number % 2 else one).record.broadcast(number)
    assert one.all.call_one().get(LIMIT) == list(range(100))
    assert mesh.slice(gpus=1).all.call_one().get(LIMIT) == list(range(1, 100, 2))


def test_a_slow_actor_does_not_hold_up_others_of_its_process(procs: ProcMesh) -> None:
    slow, fast = (procs.spawn(name, Recorder).slice(gpus=0) for name in ("slow", "fast"))
    async_slow, stage = procs.spawn("slow too", Juggler).slice(gpus=0), Stage()
    held = [slow.wait.call_one(stage.port), async_slow.wait.call_one(stage.port, 0)]
    ports = [stage.next(), stage.next()]
    waiting = slow.record.call_one("behind")
    assert [fast.record.call_one(number).get(LIMIT) for number in range(100)][-1] == 100
    assert not waiting.done()
    for port in ports:
        port.send("go")
    assert [future.get(LIMIT) for future in [*held, waiting]] == ["go", "go", 1]


def test_async_messages_do_not_overlap(juggler: Any) -> None:
    stage = Stage()
    first, second = (juggler.wait.call_one(stage.port, tag) for tag in "ab")
    stage.next().send(1)
    assert first.get(LIMIT) == 1
    stage.next().send(2)
    assert second.get(LIMIT) == 2
    log = juggler.history.call_one().get(LIMIT)
    assert log == [("begin", "a"), ("end", "a"), ("begin", "b"), ("end", "b")]


def test_concurrent_messages_start_in_order_and_end_in_any(juggler: Any) -> None:
    stage = Stage()
    futures = [juggler.wait_aside.call_one(stage.port, tag) for tag in range(50)]
    ports = [stage.next() for _ in futures]
    for tag in reversed(range(50)):
        ports[tag].send(tag)
        assert futures[tag].get(LIMIT) == tag
    log = juggler.history.call_one().get(LIMIT)
    assert log == [("begin", tag) for tag in range(50)] + [("end", tag) for tag in reversed(range(50))]


def test_others_run_beside_concurrent_ones(juggler: Any) -> None:
    stage = Stage()
    held = juggler.wait_aside.call_one(stage.port, "aside")
    port = stage.next()
    assert juggler.history.call_one().get(LIMIT) == [("begin", "aside")]
    port.send(None)
    held.get(LIMIT)


def test_calls_go_through_a_chain_of_actors(procs: ProcMesh, client: Any) -> None:
    other = client.spawn_procs().spawn("other", Recorder)
    chain = [procs.spawn(f"link{n}", Recorder).slice(gpus=n % 2) for n in range(6)] + [other]
    assert chain[0].ask.call_one(chain[1:], "through all").get(LIMIT) == "through all"


def test_a_call_may_come_back_into_a_concurrent_actor(procs: ProcMesh, juggler: Any) -> None:
    through = procs.spawn("through", Juggler).slice(gpus=0)
    juggler.meet.call_one(juggler).get(LIMIT)
    assert juggler.round_trip.call_one(through, "back").get(LIMIT) == "back"


def test_an_actor_that_waits_for_itself_does_not_hang_with_a_timeout(recorder: Any) -> None:
    assert recorder.call_self.call_one(recorder, 0.05).get(LIMIT) == "waits for itself"
    assert recorder.record.call_one("on").get(LIMIT) == 1


def test_a_message_to_oneself_comes_after_the_one_at_hand(recorder: Any) -> None:
    recorder.tell_self.call_one(recorder).get(LIMIT)
    assert recorder.all.call_one().get(LIMIT) == ["first", "from myself"]


def test_threads_of_an_endpoint_call_other_actors(recorder: Any, senders: Any) -> None:
    assert senders.slice(gpus=1).ask_from_threads.call_one(recorder, 100).get(LIMIT) == list(range(1, 101))


def test_an_endpoint_may_fork(recorder: Any) -> None:
    for _ in range(3):
        code, said = recorder.fork.call_one().get(LIMIT)
        assert code == 7
        assert said.startswith(b"child of ")
    assert recorder.record.call_one("still here").get(LIMIT) == 1


def test_an_actor_has_one_thread_of_its_own(procs: ProcMesh) -> None:
    meshes = [procs.spawn("a", Recorder), procs.spawn("b", Recorder), procs.spawn("c", Juggler)]
    actors = [mesh.slice(gpus=0) for mesh in meshes]
    threads = [{actor.thread.call_one().get(LIMIT) for _ in range(5)} for actor in actors]
    assert [len(idents) for idents in threads] == [1, 1, 1]
    assert len(set.union(*threads)) == 3


def test_sync_endpoints_of_an_async_actor_run_on_its_loop(juggler: Any) -> None:
    assert juggler.has_loop.call_one().get(LIMIT)


def test_a_task_outlives_its_endpoint_and_knows_its_actor(juggler: Any) -> None:
    stage, results = Stage(), Stage()
    name = juggler.start_task.call_one(stage.port, results.port).get(LIMIT)
    stage.next().send(None)
    assert results.next() == ({}, name)


def test_to_thread_keeps_the_context(procs: ProcMesh) -> None:
    jugglers = procs.spawn("juggler", Juggler)
    found = list(jugglers.in_thread.call().get(LIMIT).values())
    assert found == [({"gpus": 0}, True), ({"gpus": 1}, True)]


def test_actors_of_the_clients_own_process_are_actors_like_others() -> None:
    recorder = this_proc().spawn("local", Recorder)
    stage = Stage()
    held = recorder.wait.call_one(stage.port)
    waiting = recorder.record.call_one("x")
    stage.next().send("here")
    assert held.get(LIMIT) == "here"
    assert waiting.get(LIMIT) == 1
    assert recorder.thread.call_one().get(LIMIT) != threading.get_ident()
    recorder.stop().get(LIMIT)


class Player(Actor):
    @endpoint
    def hit(self, i: int) -> int:
        return i

    @endpoint
    def play(self, other: ActorMesh[Player], count: int) -> int:
        return sum(other.hit.call_one(i).get(LIMIT) == i for i in range(count))


def test_members_of_one_mesh_call_each_other_more_often_than_a_mailbox_holds(procs: ProcMesh) -> None:
    """They have one number in their processes: what is given back must not be taken for something of the other."""
    players = procs.spawn("players", Player)
    with config.configured(mailbox_messages=64):
        assert players.slice(gpus=0).play.call_one(players.slice(gpus=1), 1500).get(LIMIT) == 1500


class Forker(Actor):
    @endpoint
    async def fork(self) -> int:
        return os.fork()

    @endpoint
    async def end_of(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_that_returns_from_an_endpoint_ends_and_its_parent_goes_on(procs: ProcMesh) -> None:
    forker = procs.slice(gpus=0).spawn("forker", Forker)
    pid = forker.fork.call_one().get(LIMIT)
    assert pid > 0
    assert forker.end_of.call_one(pid).get(LIMIT) == 70
