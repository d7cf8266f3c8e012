"""Mailboxes and ports that are full: senders wait, memory does not grow, what matters passes, and nobody hangs."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import psutil
import pytest
from actor_client import LIMIT, Faults, Stage, hold, wait_until

from monarch_rdma import config
from monarch_rdma.actor import Actor, Channel, HostMesh, Port, ProcMesh, SupervisionError, endpoint, this_proc
from monarch_rdma.actor.runtime.read_ahead import ReadAhead
from monarch_rdma.errors import Cancelled, ResourceExhausted, TransferTimeout

SPACE = 64  # messages of one process in a mailbox: the least that can be set


class Slow(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def take(self, what: Any) -> None:
        self.seen.append(what if isinstance(what, int) else len(what))

    @endpoint
    def all(self) -> list[Any]:
        return self.seen

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def pour(self, port: Port[Any], count: int) -> str:
        for number in range(count):
            port.send(number)
        return "poured"

    @endpoint
    def pour_large(self, port: Port[Any], size: int, count: int) -> str:
        for number in range(count):
            port.send(bytes([number]) * size)
        return "poured"

    @endpoint
    def flood_anew(self, others: bytes, count: int) -> str:
        """Each message through a mesh that is made for it, and then let go of."""
        try:
            for number in range(count):
                pickle.loads(others).slice(n=0).take.options(timeout=2.0).broadcast(number)
                gc.collect()
        except (ResourceExhausted, TransferTimeout) as error:
            return type(error).__name__
        return "all sent"

    @endpoint
    def flood(self, other: Any, count: int) -> str:
        taking = other.take.options(timeout=2.0)
        try:
            for number in range(count):
                taking.broadcast(number)
        except (ResourceExhausted, TransferTimeout) as error:
            return type(error).__name__
        return "all sent"


@pytest.fixture(autouse=True)
def small_mailboxes() -> Iterator[None]:
    with config.configured(mailbox_messages=SPACE):
        yield


@pytest.fixture
def slow_procs(client: HostMesh) -> Iterator[ProcMesh]:
    """Two processes with small mailboxes."""
    procs = client.spawn_procs({"n": 2})
    yield procs
    procs.stop().get(LIMIT)


@pytest.fixture
def slow(slow_procs: ProcMesh) -> Any:
    return slow_procs.spawn("slow", Slow).slice(n=0)


class Sender:
    """Calls again and again on a thread of its own; `sent` counts, `error` is what ended it."""

    def __init__(self, call: Callable[[int], Any], count: int) -> None:
        self.sent = 0
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self._call, self._count = call, count
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for number in range(self._count):
                self.results.append(self._call(number))
                self.sent += 1
        except BaseException as error:
            self.error = error

    def wait_until_stuck(self, at_least: int) -> int:
        """Until it has sent so many, and then no more for a moment."""
        wait_until(lambda: self.sent >= at_least, lambda: f"only {self.sent} were sent")
        self.thread.join(0.2)
        assert self.thread.is_alive(), "it was never stuck"
        return self.sent

    def finish(self) -> None:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("adverb", ["broadcast", "call_one"])
def test_a_sender_waits_while_a_mailbox_is_full(slow: Any, adverb: str) -> None:
    stage = Stage()
    held = slow.wait.call_one(stage.port)
    port = stage.next()
    sender = Sender(lambda number: getattr(slow.take, adverb)(number), 1000)
    assert sender.wait_until_stuck(SPACE - 1) <= SPACE
    port.send(None)
    sender.finish()
    held.get(LIMIT)
    assert sender.error is None
    assert slow.all.call_one().get(LIMIT) == list(range(1000))


def test_several_senders_that_wait_keep_their_orders(slow: Any) -> None:
    stage = Stage()
    slow.wait.broadcast(stage.port)
    port = stage.next()
    senders = [Sender(lambda number, tag=tag: slow.take.broadcast(tag * 1000 + number), 200) for tag in range(4)]
    wait_until(lambda: sum(sender.sent for sender in senders) >= SPACE // 2, "they do not fill it")
    port.send(None)
    for sender in senders:
        sender.finish()
    seen = slow.all.call_one().get(LIMIT)
    assert all([n for n in seen if n // 1000 == tag] == [tag * 1000 + n for n in range(200)] for tag in range(4))


def test_a_timeout_ends_the_wait_for_room(slow: Any) -> None:
    stage = Stage()
    slow.wait.broadcast(stage.port)
    port = stage.next()
    taking = slow.take.options(timeout=2.0)
    for number in range(SPACE - 1):
        taking.broadcast(number)
    with pytest.raises((ResourceExhausted, TransferTimeout)):
        taking.broadcast(SPACE)
    port.send(None)
    wait_until(lambda: bool(slow.all.call_one().get(LIMIT)), "nothing was taken")
    slow.take.call_one(-1).get(LIMIT)
    seen = slow.all.call_one().get(LIMIT)
    assert seen == [*range(len(seen) - 1), -1]


def test_a_full_mailbox_holds_up_nobody_else(slow_procs: ProcMesh, slow: Any) -> None:
    stage = Stage()
    other = slow_procs.spawn("other", Slow).slice(n=0)
    slow.wait.broadcast(stage.port)
    port = stage.next()
    sender = Sender(slow.take.broadcast, 2 * SPACE)
    sender.wait_until_stuck(SPACE - 1)
    for number in range(5 * SPACE):
        other.take.broadcast(number)
    assert len(other.all.call_one().get(LIMIT)) == 5 * SPACE
    port.send(None)
    sender.finish()


def test_each_process_has_room_of_its_own(slow_procs: ProcMesh, slow: Any) -> None:
    stage = Stage()
    slow.wait.broadcast(stage.port)
    port = stage.next()
    sender = Sender(slow.take.broadcast, 2 * SPACE)
    sender.wait_until_stuck(SPACE - 1)
    other = slow_procs.spawn("other", Slow).slice(n=1)
    assert other.flood.call_one(slow, SPACE // 2).get(LIMIT) == "all sent"
    port.send(None)
    sender.finish()


def test_cancels_and_stops_pass_a_full_mailbox(slow_procs: ProcMesh, slow: Any) -> None:
    stage = Stage()
    slow.wait.broadcast(stage.port)
    stage.next()
    waiting = [slow.take.call_one(number) for number in range(SPACE - 1)]
    waiting[3].cancel()
    with pytest.raises(Cancelled):
        waiting[3].get(LIMIT)
    with config.configured(process_exit_timeout=0.1):
        slow_procs.stop().get(LIMIT)
    assert all(isinstance(future.exception(LIMIT), SupervisionError) for future in waiting if future is not waiting[3])


def test_the_death_of_the_process_ends_the_wait_for_room(slow: Any, faults: Faults) -> None:
    stage = Stage()
    pid = slow.pid.call_one().get(LIMIT)
    slow.wait.broadcast(stage.port)
    stage.next()
    senders = [Sender(slow.take.broadcast, 10 * SPACE) for _ in range(3)]
    wait_until(lambda: sum(sender.sent for sender in senders) >= SPACE // 2, "they do not fill it")
    os.kill(pid, signal.SIGKILL)
    for sender in senders:
        sender.finish()
        assert isinstance(sender.error, SupervisionError)
    faults.next()


def test_the_end_of_the_actor_ends_the_wait_for_room(slow: Any) -> None:
    stage = Stage()
    slow.wait.broadcast(stage.port)
    port = stage.next()
    sender = Sender(slow.take.call_one, 3 * SPACE)
    sender.wait_until_stuck(SPACE // 2)
    stopped = slow.stop()
    port.send(None)
    stopped.get(LIMIT)
    sender.finish()
    outcomes = [future.exception(LIMIT) for future in sender.results]
    assert all(error is None or isinstance(error, SupervisionError) for error in outcomes)
    assert isinstance(outcomes[-1], SupervisionError)


def test_actors_that_flood_each_other_or_themselves_do_not_hang(slow_procs: ProcMesh) -> None:
    mesh = slow_procs.spawn("slow", Slow)
    first, second = mesh.slice(n=0), mesh.slice(n=1)
    both = first.flood.call_one(second, 50 * SPACE), second.flood.call_one(first, 50 * SPACE)
    outcomes = {future.get(LIMIT) for future in both}
    assert outcomes & {"ResourceExhausted", "TransferTimeout"}
    assert first.flood.call_one(first, 2 * SPACE).get(LIMIT) in ("ResourceExhausted", "TransferTimeout")
    assert first.flood.call_one(first, SPACE // 2).get(LIMIT) == "all sent"


def test_a_mailbox_is_full_whatever_mesh_a_message_comes_through(slow_procs: ProcMesh) -> None:
    mesh, stage = slow_procs.spawn("slow", Slow), Stage()
    mesh.slice(n=0).wait.broadcast(stage.port)
    port = stage.next()
    flooding = mesh.slice(n=1).flood_anew.call_one(cloudpickle.dumps(mesh), 2 * SPACE)
    assert flooding.get(LIMIT) in ("ResourceExhausted", "TransferTimeout")
    port.send(None)
    assert mesh.slice(n=0).all.call_one().get(LIMIT) == list(range(SPACE))


def test_a_port_that_nobody_reads_holds_its_sender_up(slow: Any) -> None:
    port, receiver = Channel.open()
    pouring = slow.pour.call_one(port, 10 * SPACE)
    with pytest.raises(TimeoutError):
        pouring.get(timeout=0.2)
    assert [receiver.recv().get(LIMIT) for _ in range(10 * SPACE)] == list(range(10 * SPACE))
    assert pouring.get(LIMIT) == "poured"


def test_large_arguments_are_read_ahead_however_many_there_were(client: HostMesh) -> None:
    with config.configured(mailbox_bytes=4 << 20):
        procs = client.spawn_procs()
    slow, size = procs.spawn("slow", Slow), 3 << 20
    for number in range(1, 4):
        stage = Stage()
        slow.wait.broadcast(stage.port)
        port = stage.next()
        sender = Sender(lambda _: slow.take.broadcast(b"x" * size), 1)
        sender.finish()  # although the actor is busy
        port.send(None)
        assert slow.all.call_one().get(LIMIT) == [size] * number
    procs.stop().get(LIMIT)


def test_large_arguments_that_come_at_the_same_time_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left for an actor that sleeps to fetch, and then forgotten."""
    slow, size, admit, both = this_proc().spawn("slow", Slow), 1 << 21, ReadAhead.admit, threading.Barrier(2)
    slow.all.call_one().get(LIMIT)

    def admit_together(ahead: ReadAhead, *frame: Any) -> bool:
        is_admitted = admit(ahead, *frame)
        both.wait(LIMIT)
        return is_admitted

    monkeypatch.setattr(ReadAhead, "admit", admit_together)
    senders = [Sender(lambda _: slow.take.call_one(b"x" * size).get(LIMIT), 1) for _ in range(2)]
    for sender in senders:
        sender.finish()
    assert slow.all.call_one().get(LIMIT) == [size] * 2
    slow.stop().get(LIMIT)


def test_large_arguments_beyond_the_budget_stay_with_their_sender(client: HostMesh) -> None:
    size = 4 << 20
    with config.configured(mailbox_bytes=4 * size):
        procs = client.spawn_procs()
    slow, stage = procs.spawn("slow", Slow), Stage()
    process = psutil.Process(slow.pid.call_one().get(LIMIT))
    slow.wait.broadcast(stage.port)
    port = stage.next()
    before = process.memory_info().rss
    senders = [Sender(lambda number: slow.take.broadcast(b"x" * size), 5) for _ in range(8)]
    wait_until(lambda: sum(sender.sent for sender in senders) >= 3, "nothing is fetched")
    senders[0].thread.join(0.3)
    assert process.memory_info().rss - before < 10 * size
    port.send(None)
    for sender in senders:
        sender.finish()
    assert slow.all.call_one().get(LIMIT) == [size] * 40
    procs.stop().get(LIMIT)


class Debtor(Slow):
    """Owes another one more than fits into its mailbox, out of a handler that it does not leave."""

    @endpoint
    def owe(self, other: Any, size: int, count: int, started: Port[Any]) -> tuple[int, str]:
        """How many were sent, and what kept it from more."""
        hold(started)
        for sent in range(count):
            try:
                other.take.broadcast(b"x" * size)
            except ResourceExhausted as error:
                return sent, str(error)
        return count, ""


def be_impatient() -> None:
    from monarch_rdma.actor.runtime import mailbox

    mailbox.PATIENCE = 0.5  # type: ignore[attr-defined]


def test_two_that_owe_each_other_too_much_are_told_of_each_other(client: HostMesh) -> None:
    size = 1 << 20
    with config.configured(mailbox_bytes=size):
        procs = client.spawn_procs({"n": 2}, bootstrap=be_impatient)
    debtors, stages = procs.spawn("debtors", Debtor), [Stage(), Stage()]
    calls = [
        debtors.slice(n=rank).owe.call_one(debtors.slice(n=1 - rank), size, 3, stages[rank].port) for rank in (0, 1)
    ]
    for port in [stage.next() for stage in stages]:
        port.send(None)
    sent, told = zip(*[call.get(LIMIT) for call in calls], strict=True)
    assert any(told), "they do not wait for each other"
    for rank, said in enumerate(told):  # who is told first leaves its handler, which may be enough for the other one
        if said:
            assert re.match(
                rf"take: actor debtors\[{1 - rank}\], which has been at owe for .* s, has no room for", said
            )
            assert re.search(r"bytes: \d+ wait there already \(option mailbox_bytes\).*wait for each other", said)
    assert debtors.all.call().get(LIMIT).values() == [[size] * count for count in sent[::-1]]  # and nothing else
    procs.stop().get(LIMIT)


def test_a_timeout_of_its_own_has_a_large_call_wait_for_longer(client: HostMesh) -> None:
    size = 1 << 20
    with config.configured(mailbox_bytes=size):
        procs = client.spawn_procs(bootstrap=be_impatient)
    slow, stage = procs.spawn("slow", Slow), Stage()
    slow.wait.broadcast(stage.port)
    port = stage.next()
    patient = Sender(lambda _: slow.take.options(timeout=LIMIT).call_one(b"x" * size), 3)
    wait_until(lambda: patient.sent >= 1, "the first is not read ahead")
    with pytest.raises(ResourceExhausted, match=r"slow.take: actor slow\[0\], which has been at wait for"):
        slow.take.call_one(b"y" * size)
    port.send(None)
    patient.finish()
    assert slow.all.call_one().get(LIMIT) == [size] * 3
    procs.stop().get(LIMIT)


def test_large_values_beyond_the_budget_of_a_port_stay_with_their_sender(slow: Any) -> None:
    size, count = 4 << 20, 16
    with config.configured(mailbox_bytes=2 * size):
        port, receiver = Channel.open()
    before = psutil.Process().memory_info().rss
    pouring = slow.pour_large.call_one(port, size, count)
    with pytest.raises(TimeoutError):
        pouring.get(timeout=0.5)
    assert psutil.Process().memory_info().rss - before < 6 * size
    values = [receiver.recv().get(LIMIT) for _ in range(count)]
    assert [(value[0], len(value)) for value in values] == [(number, size) for number in range(count)]
    assert pouring.get(LIMIT) == "poured"


def test_a_sender_of_what_a_port_has_no_room_for_goes_on_when_the_port_is_closed(slow: Any) -> None:
    size = 1 << 20
    with config.configured(mailbox_bytes=size):
        port, receiver = Channel.open()
    pouring = slow.pour_large.call_one(port, size, 4)
    with pytest.raises(TimeoutError):
        pouring.get(timeout=0.2)
    del receiver
    gc.collect()
    assert pouring.get(LIMIT) == "poured"
