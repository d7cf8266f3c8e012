"""Casts over a tree: order, exactly once, large arguments, and processes that die in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from actor_client import Faults
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma import config
from monarch_rdma.actor import Actor, ActorMesh, HostMesh, ProcMesh, SupervisionError, current_rank, endpoint
from monarch_rdma.actor.runtime import message, tree
from monarch_rdma.actor.runtime.proc import Proc

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
    def ones(self, count: int) -> torch.Tensor:
        return torch.ones(count)

    @endpoint
    def raise_on(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise KeyError(rank)


@pytest.fixture(scope="module")
def shared(client: HostMesh) -> ProcMesh:
    return client.spawn_procs({"p": COUNT})


@pytest.fixture(params=[2, 3, COUNT - 1])
def procs(request: pytest.FixtureRequest, shared: ProcMesh) -> Iterator[ProcMesh]:
    with config.configured(cast_fanout=request.param):
        yield shared


def spawn(procs: ProcMesh) -> ActorMesh[Member]:
    members = procs.spawn("members", Member)
    members.initialized.get(timeout=20)
    return members


def test_all_are_called_and_answer_by_their_rank(procs: ProcMesh) -> None:
    members = spawn(procs)
    assert members.hear.call("x").get(timeout=20).values() == list(range(COUNT))
    assert members.slice(p=slice(1, 8)).hear.call("y").get(timeout=20).values() == list(range(7))


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
    assert members.tell.call().get(timeout=20).values() == expected


def test_a_large_tensor_goes_down_the_tree_as_it_was_at_the_call(procs: ProcMesh) -> None:
    members = spawn(procs)
    tensor = torch.ones(300_000)
    for _ in range(3):
        future = members.sum.call(tensor.fill_(1))
        tensor.fill_(7)
        assert future.get(timeout=20).values() == [300_000.0] * COUNT


def test_an_exception_of_one_reaches_the_caller(procs: ProcMesh) -> None:
    members = spawn(procs)
    with pytest.raises(Exception, match=r"rank 5"):
        members.raise_on.call(5).get(timeout=20)


@pytest.mark.parametrize("victim", [0, 1, COUNT - 1])
def test_a_process_killed_in_the_middle_costs_nobody_else_the_call(
    victim: int, client: HostMesh, faults: Faults
) -> None:
    config.configure(cast_fanout=2)
    procs = client.spawn_procs({"p": COUNT})
    members = spawn(procs)
    pids = members.pid.call().get(timeout=20).values()
    survivors = [rank for rank in range(COUNT) if rank != victim]
    # Stopped, it holds everyone below it up; what it has taken, if anything, dies with it.
    os.kill(pids[victim], signal.SIGSTOP)
    members.hear.broadcast("through")
    os.kill(pids[victim], signal.SIGKILL)
    for rank in survivors:
        assert members.slice(p=rank).tell.call_one().get(timeout=20) == ["through"]
    with pytest.raises(SupervisionError):
        members.hear.call("again").get(timeout=20)
    for rank in survivors:
        assert members.slice(p=rank).tell.call_one().get(timeout=20) == ["through", "again"]
    assert faults.next().rank == victim
    procs.stop().get(timeout=20)


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
    members.tell.call().get(timeout=20)
    kinds: list[int] = []
    on_frame = Proc.on_frame

    def counting(proc: Proc, frame: message.Frame) -> None:
        kinds.append(frame.kind)
        on_frame(proc, frame)

    monkeypatch.setattr(Proc, "on_frame", counting)
    members.tell.call().get(timeout=20)
    assert 1 <= kinds.count(message.SEND) <= int(config.get("cast_fanout"))


def test_large_answers_and_failures_go_to_the_caller_directly(procs: ProcMesh) -> None:
    members = spawn(procs)
    answers = members.ones.call(300_000).get(timeout=20).values()
    assert [float(tensor.sum()) for tensor in answers] == [300_000.0] * COUNT


def test_large_arguments_go_to_another_host_once(client: HostMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes of this host taken for ones of two others."""
    procs = client.spawn_procs({"p": 6})
    members = spawn(procs)
    hosts = dict(zip(procs._chosen(), ["here", "here", "b", "b", "c", "c"], strict=True))
    monkeypatch.setattr(tree, "host_of", lambda address: hosts.get(address, "here"))
    sent: list[str] = []
    post = Proc.post

    def spying(proc: Proc, address: str, head: bytes, body: bytes = b"", timeout: float | None = None) -> None:
        if head[0] in (message.CALL, message.CAST) and address in hosts:
            sent.append(hosts[address])
        post(proc, address, head, body, timeout)

    monkeypatch.setattr(Proc, "post", spying)
    tensor = torch.ones(300_000)
    assert members.sum.call(tensor).get(timeout=20).values() == [300_000.0] * 6
    assert sorted(sent) == ["b", "c", "here", "here"]
    procs.stop().get(timeout=20)
