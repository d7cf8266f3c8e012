"""Casts over a tree: order, exactly once, large arguments, and processes that die in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from actor_client import LIMIT, Faults, wait_until
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma import config
from monarch_rdma.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Future,
    HostMesh,
    Port,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
)
from monarch_rdma.actor.runtime import message, tree
from monarch_rdma.actor.runtime.proc import Proc, current_proc
from monarch_rdma.actor.runtime.reply import Waiting
from monarch_rdma.errors import ConfigError, TransferTimeout

COUNT = 9


class Member(Actor):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    @endpoint
    def hear(self, value: Any) -> int:
        self.heard.append(value)
        return current_rank().rank

    @endpoint
    def tell(self) -> list[Any]:
        return self.heard

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sum(self, tensor: torch.Tensor) -> float:
        total = float(tensor.sum())
        tensor.zero_()  # its own, whoever reads from it meanwhile
        return total

    @endpoint
    def ones_of(self, counts: list[int]) -> torch.Tensor:
        return torch.ones(counts[current_rank().rank])

    @endpoint
    def hear_and_report(self, value: Any, port: Port[Any]) -> None:
        port.send(value)

    @endpoint
    async def sleep(self, seconds: float, fails_at: int = -1) -> None:
        await asyncio.sleep(seconds)
        if current_rank().rank == fails_at:
            raise KeyError(fails_at)

    @endpoint
    def num_receivers(self) -> int:
        return len(current_proc().receivers)

    @endpoint
    def call_hear(self, others: ActorMesh[Member]) -> list[int]:
        return others.hear.call("from a member").get(timeout=LIMIT).values()

    @endpoint
    def hold_cleanup(self, port: Port[int]) -> None:
        self.port: Port[int] | None = port

    def __cleanup__(self, error: BaseException | None) -> None:
        if getattr(self, "port", None) is not None:
            self.port.send(0)
            threading.Event().wait()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def ranks_tensor(self, size: int) -> torch.Tensor:
        return torch.full((size,), float(current_rank().rank))

    @endpoint
    def raise_on(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise KeyError(rank)


class Heard:
    """Answers to calls of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[message.Frame] = []
        on_frame = Proc.on_frame

        def noting(proc: Proc, frame: message.Frame) -> None:
            if frame.kind == message.SEND and isinstance(proc.receivers.get(frame.target), Waiting):
                self.answers.append(frame)
            on_frame(proc, frame)

        monkeypatch.setattr(Proc, "on_frame", noting)


@pytest.fixture(scope="module")
def shared(client: HostMesh) -> ProcMesh:
    return client.spawn_procs({"p": COUNT}, threads=1)  # torch's own, in so many processes, wait for each other


@pytest.fixture(params=[2, 3, COUNT - 1])
def procs(request: pytest.FixtureRequest, shared: ProcMesh) -> Iterator[ProcMesh]:
    with config.configured(cast_fanout=request.param):
        yield shared


def spawn(procs: ProcMesh) -> ActorMesh[Member]:
    members = procs.spawn("members", Member)
    members.initialized.get(timeout=LIMIT)
    return members


def test_all_are_called_and_answer_by_their_rank(procs: ProcMesh) -> None:
    members = spawn(procs)
    assert members.hear.call("x").get(timeout=LIMIT).values() == list(range(COUNT))
    assert members.slice(p=slice(1, 8)).hear.call("y").get(timeout=LIMIT).values() == list(range(7))


def test_casts_and_single_calls_stay_in_order(procs: ProcMesh) -> None:
    members = spawn(procs)
    expected: list[list[int]] = [[] for _ in range(COUNT)]
    for i in range(60):
        members.hear.broadcast(i)
        members.slice(p=i % COUNT).hear.broadcast(-i)
        part = members.slice(p=slice(2, 6))
        part.hear.broadcast(1000 + i)
        for rank, heard in enumerate(expected):
            heard.append(i)
            if rank == i % COUNT:
                heard.append(-i)
            if 2 <= rank < 6:
                heard.append(1000 + i)
    assert members.tell.call().get(timeout=LIMIT).values() == expected


def test_a_large_tensor_goes_down_the_tree_as_it_was_at_the_call(procs: ProcMesh) -> None:
    members = spawn(procs)
    tensor = torch.ones(300_000)
    for _ in range(3):
        future = members.sum.call(tensor.fill_(1))
        tensor.fill_(7)
        assert future.get(timeout=LIMIT).values() == [300_000.0] * COUNT


def test_an_exception_of_one_reaches_the_caller(procs: ProcMesh) -> None:
    members = spawn(procs)
    with pytest.raises(Exception, match=r"rank 5"):
        members.raise_on.call(5).get(timeout=LIMIT)


@pytest.mark.parametrize("victim", [0, 1, COUNT - 1])
def test_a_process_killed_in_the_middle_costs_nobody_else_the_call(
    victim: int, client: HostMesh, faults: Faults
) -> None:
    config.configure(cast_fanout=2)
    procs = client.spawn_procs({"p": COUNT})
    members = spawn(procs)
    pids = members.pid.call().get(timeout=LIMIT).values()
    survivors = [rank for rank in range(COUNT) if rank != victim]
    # Stopped, it holds everyone below it up; what it has taken, if anything, dies with it.
    os.kill(pids[victim], signal.SIGSTOP)
    members.hear.broadcast("through")
    os.kill(pids[victim], signal.SIGKILL)
    for rank in survivors:
        assert members.slice(p=rank).tell.call_one().get(timeout=LIMIT) == ["through"]
    with pytest.raises(SupervisionError):
        members.hear.call("again").get(timeout=LIMIT)
    for rank in survivors:
        assert members.slice(p=rank).tell.call_one().get(timeout=LIMIT) == ["through", "again"]
    assert faults.next().rank == victim
    procs.stop().get(timeout=LIMIT)


@given(st.integers(1, 40), st.integers(1, 12))
def test_parts_are_in_order_complete_and_even(total: int, count: int) -> None:
    members = [tree.Member(rank, f"a{rank}") for rank in range(total)]
    parts = tree.split(members, count)
    assert [member for part in parts for member in part] == members
    assert len(parts) == min(count, total)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_answers_come_up_the_tree_together(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets a frame from each of its branches, not from each actor."""
    members = spawn(procs)
    members.tell.call().get(timeout=LIMIT)
    heard = Heard(monkeypatch)
    members.tell.call().get(timeout=LIMIT)
    assert 1 <= len(heard.answers) <= int(config.get("cast_fanout"))


def test_large_answers_go_to_the_caller_directly_and_hold_nobody_up(procs: ProcMesh) -> None:
    members = spawn(procs)
    for small in (set[int](), {0, 4, 7}, {COUNT - 1}):
        counts = [10 if rank in small else 300_000 for rank in range(COUNT)]
        answers = members.ones_of.call(counts).get(timeout=LIMIT).values()
        assert [float(tensor.sum()) for tensor in answers] == counts
    assert members.hear.call("next").get(timeout=LIMIT).values() == list(range(COUNT))


def test_an_actor_may_answer_before_its_process_has_passed_the_call_on(client: HostMesh) -> None:
    """Another way than those below, whose answers are collected all the same."""

    def wait_for_the_answer_of_each_call() -> None:
        on_frame = Proc.on_frame

        def waiting(proc: Proc, frame: message.Frame) -> None:
            on_frame(proc, frame)
            if frame.kind == message.CALL and frame.method == b"ones_of":
                wait_until(lambda: frame.is_answered, "it is not answered")

        Proc.on_frame = waiting  # type: ignore[method-assign]

    with (
        config.configured(cast_fanout=2),
        client.spawn_procs({"p": 6}, bootstrap=wait_for_the_answer_of_each_call, threads=1) as procs,
    ):
        counts = [300_000, 10, 10, 300_000, 10, 10]  # the first of each branch
        answers = spawn(procs).ones_of.call(counts).get(timeout=LIMIT).values()
        assert [float(tensor.sum()) for tensor in answers] == counts


def test_casts_of_many_threads_all_arrive(procs: ProcMesh) -> None:
    """Each thread's in their order, to all or to a part."""
    members = spawn(procs)
    parts = [members, members.slice(p=slice(2, 7)), members, members.slice(p=slice(0, 5))]

    def send(who: int) -> None:
        for i in range(100):
            parts[who].hear.broadcast((who, i))

    threads = [threading.Thread(target=send, args=(who,)) for who in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, heard in enumerate(members.tell.call().get(timeout=LIMIT).values()):
        for who, part in enumerate([range(COUNT), range(2, 7), range(COUNT), range(5)]):
            assert [i for sender, i in heard if sender == who] == (list(range(100)) if rank in part else [])


def test_a_stop_of_one_comes_after_a_cast_on_its_way(procs: ProcMesh) -> None:
    members = spawn(procs)
    pids = members.pid.call().get(timeout=LIMIT).values()
    port, receiver = Channel[str].open()
    os.kill(pids[0], signal.SIGSTOP)  # it is asked to pass the cast on
    members.slice(p=slice(0, 8)).hear_and_report.broadcast("cast", port)
    stopping: list[Future[None]] = []
    thread = threading.Thread(target=lambda: stopping.append(members.slice(p=slice(1, 8)).stop()))
    thread.start()
    os.kill(pids[0], signal.SIGCONT)
    thread.join()
    stopping[0].get(timeout=LIMIT)
    assert [receiver.recv().get(timeout=LIMIT) for _ in range(8)] == ["cast"] * 8


def test_a_cancel_reaches_calls_that_are_on_their_way_over_the_tree(procs: ProcMesh) -> None:
    members = spawn(procs)
    pids = members.pid.call().get(timeout=LIMIT).values()
    os.kill(pids[0], signal.SIGSTOP)
    future = members.slice(p=slice(0, 8)).sleep.call(3600)
    future.cancel()
    os.kill(pids[0], signal.SIGCONT)
    assert members.hear.call("after").get(timeout=LIMIT).values() == list(range(COUNT))


def test_nothing_is_left_of_calls_that_get_no_answers(procs: ProcMesh) -> None:
    """Neither of those that were cancelled, nor of those that fail because a member has ended."""
    members = spawn(procs)
    before = members.num_receivers.call().get(timeout=LIMIT).values()
    for seconds in (3600, 0):
        with pytest.raises((TransferTimeout, ActorError)):
            members.sleep.options(timeout=0.2).call(seconds, fails_at=COUNT - 1).get()
    members.hear.call("after").get(timeout=LIMIT)
    wait_until(lambda: members.num_receivers.call().get(timeout=LIMIT).values() == before, "numbers are left behind")


def test_a_stop_ends_although_who_passed_it_on_dies(client: HostMesh, faults: Faults) -> None:
    with config.configured(cast_fanout=2):
        procs = client.spawn_procs({"p": COUNT})
        members = spawn(procs)
        pid = members.slice(p=0).pid.call_one().get(timeout=LIMIT)
        port, receiver = Channel[int].open()
        members.slice(p=0).hold_cleanup.call_one(port).get(timeout=LIMIT)
        stopped = members.stop()
        assert receiver.recv().get(timeout=LIMIT) == 0  # its answer, and those from below, are not here yet
        with pytest.raises(SupervisionError):
            members.slice(p=1).pid.call_one().get(timeout=LIMIT)
        os.kill(pid, signal.SIGKILL)
        stopped.get(timeout=LIMIT)
        assert faults.next().rank == 0
        procs.stop().get(timeout=LIMIT)


def test_an_actor_may_be_called_by_others_before_its_own_first_message(procs: ProcMesh) -> None:
    """A mesh can be sent on at once; the way to the first messages of its actors may be the longer one."""
    callers = spawn(procs)
    pids = callers.pid.call().get(timeout=LIMIT).values()
    os.kill(pids[0], signal.SIGSTOP)  # it is asked to pass the first message on
    members = procs.slice(p=slice(0, 8)).spawn("late", Member)
    future = callers.slice(p=8).call_hear.call_one(members.slice(p=slice(1, 8)))
    os.kill(pids[0], signal.SIGCONT)
    assert future.get(timeout=LIMIT) == list(range(7))


def test_large_arguments_go_to_another_host_once(client: HostMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes of this host taken for ones of two others."""
    procs = client.spawn_procs({"p": 6})
    members = spawn(procs)
    hosts = dict(zip(procs._chosen(), ["here", "here", "b", "b", "c", "c"], strict=True))
    monkeypatch.setattr(tree, "host_of", lambda address: hosts.get(address, "here"))
    sent: list[str] = []
    post = Proc.post

    def spying(proc: Proc, address: str, head: bytes, body: bytes = b"", timeout: float | None = None) -> None:
        if address in hosts and b"sum" in head + body:  # and not a pulse
            sent.append(hosts[address])
        post(proc, address, head, body, timeout)

    monkeypatch.setattr(Proc, "post", spying)
    tensor = torch.ones(300_000)
    assert members.sum.call(tensor).get(timeout=LIMIT).values() == [300_000.0] * 6
    assert sorted(sent) == ["b", "c", "here", "here"]
    procs.stop().get(timeout=LIMIT)


# --- results that are combined on the way up


def appended(ranks: list[int], rank: int) -> list[int]:
    return [*ranks, rank]


def added(total: Any, value: Any) -> Any:
    return total + value


def test_results_are_combined_on_their_way_in_the_order_of_ranks(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each branch one sum comes, whatever went to some of them directly before."""
    members = spawn(procs)
    ranks = Accumulator(members.rank, [], appended, merge=added)
    assert ranks.accumulate().get(timeout=LIMIT) == list(range(COUNT))
    heard = Heard(monkeypatch)
    assert ranks.accumulate().get(timeout=LIMIT) == list(range(COUNT))
    assert 1 <= len(heard.answers) <= int(config.get("cast_fanout"))
    for alone in ({3}, {0, 4, 8}, {1, 2, 7}):
        for rank in alone:
            members.slice(p=rank).hear.broadcast("directly")
        assert ranks.accumulate().get(timeout=LIMIT) == list(range(COUNT))
    part = Accumulator(members.slice(p=slice(1, COUNT)).rank, [], appended, merge=added)
    assert part.accumulate().get(timeout=LIMIT) == list(range(COUNT - 1))


def test_without_merge_results_are_folded_by_the_caller_in_the_order_of_ranks(procs: ProcMesh) -> None:
    members = spawn(procs)
    folded = Accumulator(members.rank, 100.0, lambda total, rank: total / 2 - rank).accumulate().get(timeout=LIMIT)
    expected = 100.0
    for rank in range(COUNT):
        expected = expected / 2 - rank
    assert folded == expected


def test_large_results_are_combined_on_their_way(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    members, size = spawn(procs), 300_000
    total = Accumulator(members.ranks_tensor, 0, added, merge=torch.Tensor.add_)
    expected = torch.full((size,), float(sum(range(COUNT))))
    heard = Heard(monkeypatch)
    assert torch.equal(total.accumulate(size).get(timeout=LIMIT), expected)
    assert all(frame.flags & message.LARGE for frame in heard.answers)
    assert 1 <= len(heard.answers) <= int(config.get("cast_fanout"))


def test_what_the_caller_gets_does_not_grow_with_the_mesh(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of sums, nor of answers that are all the same."""
    members, fanout = spawn(procs), int(config.get("cast_fanout"))
    calls = [Accumulator(members.rank, 0, added, merge=added).accumulate, lambda: members.sleep.call(0)]
    for call in calls:
        call().get(timeout=LIMIT)
        heard = Heard(monkeypatch)
        call().get(timeout=LIMIT)
        assert sum(len(frame.body) for frame in heard.answers) <= fanout * 40
        monkeypatch.undo()
        config.configure(cast_fanout=fanout)


def test_what_combine_and_merge_raise_is_raised_at_the_caller(procs: ProcMesh) -> None:
    members = spawn(procs)
    before = members.num_receivers.call().get(timeout=LIMIT).values()

    def combine(total: int, rank: int) -> int:
        if rank == COUNT - 1:
            raise KeyError(rank)
        return total + rank

    def merge(total: int, more: int) -> int:
        raise ArithmeticError(total)

    for functions, kind in (((combine, added), KeyError), ((added, merge), ArithmeticError)):
        with pytest.raises(kind):
            Accumulator(members.rank, 0, *functions).accumulate().get(timeout=LIMIT)
    with pytest.raises(TypeError, match="pickle"):
        Accumulator(members.rank, 0, lambda *_: threading.Lock(), merge=lambda a, b: a).accumulate().get(timeout=LIMIT)
    with pytest.raises(ActorError, match="rank 5"):
        Accumulator(members.raise_on, 0, lambda total, _: total, merge=added).accumulate(5).get(timeout=LIMIT)
    assert Accumulator(members.rank, 0, added, added).accumulate().get(timeout=LIMIT) == sum(range(COUNT))
    wait_until(lambda: members.num_receivers.call().get(timeout=LIMIT).values() == before, "numbers are left behind")


def test_functions_that_cannot_be_are_refused(shared: ProcMesh) -> None:
    members = shared.spawn("members", Member)
    with pytest.raises(ConfigError, match="combine is 3"):
        Accumulator(members.rank, 0, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="merge is 'sum'"):
        Accumulator(members.rank, 0, added, merge="sum")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pickle"):
        Accumulator(members.rank, threading.Lock(), added, merge=added).accumulate()


def test_a_safe_call_is_combined_by_the_caller(procs: ProcMesh) -> None:
    members = spawn(procs)
    total = Accumulator(members.rank.options(codec="safe"), 0, added, merge=added)
    assert total.accumulate().get(timeout=LIMIT) == sum(range(COUNT))


def test_a_sum_that_is_cancelled_or_lost_leaves_nothing_behind(client: HostMesh, faults: Faults) -> None:
    with config.configured(cast_fanout=2):
        procs = client.spawn_procs({"p": COUNT})
        members = spawn(procs)
        before = members.num_receivers.call().get(timeout=LIMIT).values()
        total = Accumulator(members.sleep, 0, lambda total, _: total + 1, merge=added)
        total.accumulate(3600).cancel()
        with pytest.raises(TransferTimeout):
            Accumulator(members.sleep.options(timeout=0.1), 0, added, merge=added).accumulate(3600).get(timeout=LIMIT)
        assert total.accumulate(0).get(timeout=LIMIT) == COUNT
        wait_until(
            lambda: members.num_receivers.call().get(timeout=LIMIT).values() == before, "numbers are left behind"
        )
        pids = members.pid.call().get(timeout=LIMIT).values()
        future = total.accumulate(3600)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(SupervisionError):
            future.get(timeout=LIMIT)
        assert faults.next().rank == 1
        procs.stop().get(timeout=LIMIT)
