"""What callers of groups may get wrong: one typed error with the argument and its value, and the group goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diloco_reference import in_threads

from monarch_rdma.collectives import Group
from monarch_rdma.collectives.compressed import CompressedAllReduce
from monarch_rdma.errors import Cancelled, ConfigError
from monarch_rdma.rdma import Engine, Secret, share

ONES = torch.ones(3)
X = torch.arange(12.0)
Wrong = tuple[Callable[[Group], Any], str]

WRONG: list[Wrong] = [
    (lambda g: g.broadcast(ONES, "a"), "root is 'a', but must be an integer from 0 to 1"),  # type: ignore[arg-type]
    (lambda g: g.broadcast(ONES, 1.0), "root is 1.0"),  # type: ignore[arg-type]
    (lambda g: g.reduce(ONES, True), "root is True"),
    (lambda g: g.reduce(ONES, 2**40), "root is 1099511627776"),
    (lambda g: g.all_reduce(ONES, op=["sum"]), r"op is \['sum'\]"),  # type: ignore[arg-type]
    (lambda g: g.all_reduce(ONES, algorithm=3), "algorithm is 3"),  # type: ignore[arg-type]
    (lambda g: g.all_reduce(ONES, timeout="1"), "timeout is '1'"),  # type: ignore[arg-type]
    (lambda g: g.all_reduce(ONES.int(), op="avg"), "op is 'avg', which is not defined for tensor of dtype int32"),
    (lambda g: g.all_reduce(ONES.bool()), "op is 'sum', which is not defined for tensor of dtype bool"),
    (lambda g: g.all_reduce(ONES.to(torch.uint16)), "not defined for tensor of dtype uint16"),
    (lambda g: g.all_reduce([1, 2]), "tensor is a list"),
    (lambda g: g.all_reduce(b"1234"), "tensor is read-only"),
    (lambda g: g.reduce_scatter(ONES, [ONES, ONES.int()]), r"inputs\[1\] has dtype int32, but inputs\[0\] has float32"),
    (lambda g: g.reduce_scatter(ONES.int(), [ONES, ONES]), "output has dtype int32"),
    (lambda g: g.reduce_scatter(ONES, None), "inputs is None, but must be a list"),  # type: ignore[arg-type]
    (lambda g: g.all_gather(5, ONES), "outputs is 5, but must be a list"),  # type: ignore[arg-type]
    (lambda g: g.all_to_all([ONES], [ONES]), "has 1 pieces of memory, but must have 2"),
    (lambda g: g.send(ONES, -5), "to is -5"),
    (lambda g: g.send(ONES, None), "to is None"),  # type: ignore[arg-type]
    (lambda g: g.send(ONES, 2**40), "to is 1099511627776"),
    (lambda g: g.send(ONES, 1 - g.rank, tag="x"), "tag is 'x'"),  # type: ignore[arg-type]
    (lambda g: g.send(ONES, 1 - g.rank, tag=2**70), "tag is 1180591620717411303424"),
    (lambda g: g.receive(ONES, -1, timeout=0), "sender is -1"),
    (lambda g: g.abort(5), "reason is 5"),  # type: ignore[arg-type]
    (lambda g: g.shrink(timeout="x"), "timeout is 'x'"),  # type: ignore[arg-type]
    (lambda g: g.grow("abc"), "newcomers is 'abc', but must be a list of engines' addresses"),
    (lambda g: g.grow([g.members[0]]), "members has an address twice"),
    (lambda g: Group.form(None, engine=g.engine), "members is None"),  # type: ignore[arg-type]
    (lambda g: Group.form([g.engine.address, 7], engine=g.engine), r"members\[1\] is 7"),  # type: ignore[list-item]
    (lambda g: Group.form([g.engine.address, "nonsense"], engine=g.engine), r"members\[1\] is 'nonsense'"),
    (lambda g: Group.form([g.engine.address], engine="x"), "engine is 'x'"),  # type: ignore[arg-type]
    (lambda g: Group.form([g.engine.address], engine=g.engine, name=5), "name is 5"),  # type: ignore[arg-type]
    (lambda g: CompressedAllReduce(None, 3), "group is None"),  # type: ignore[arg-type]
    (lambda g: CompressedAllReduce(g, "3"), "numel is '3'"),  # type: ignore[arg-type]
    (lambda g: CompressedAllReduce(g, 3, block=1.5), "block is 1.5"),  # type: ignore[arg-type]
    (lambda g: CompressedAllReduce(g, 3, dtype=["int8"]), r"dtype is \['int8'\]"),  # type: ignore[arg-type]
    (lambda g: CompressedAllReduce(g, 3).run([1, 2, 3]), r"tensor is \[1, 2, 3\]"),  # type: ignore[arg-type]
    # Memory that would be written twice, or read by others after it was.
    (lambda g: g.all_gather([X[:3], X[:3]], ONES), r"outputs\[.\] and outputs\[.\] have memory in common"),
    (lambda g: g.all_gather([X[:3], X[2:5]], ONES), r"outputs\[0\] and outputs\[1\]"),
    (lambda g: g.all_gather([X[:3], X[3:6]], X[1:4]), r"outputs\[0\] and inputs\[0\]"),
    (lambda g: g.all_to_all([X[:2], X[2:4]], [X[2:4], X[:2]]), r"have memory in common"),
    (lambda g: g.reduce_scatter(X[1 - g.rank : 2 - g.rank], [X[:1], X[1:2]]), r"have memory in common"),
    (lambda g: g.reduce_scatter(X[:1], [X[:1], X[:1]]), r"have memory in common"),
]


def test_wrong_arguments_are_named_and_change_nothing() -> None:
    def member(_: int, group: Group) -> None:
        for call, message in WRONG:
            with pytest.raises(ConfigError, match=message):
                call(group)
        assert group.failed_rank is None
        group.barrier(timeout=60)

    in_threads(2, member)
    assert torch.equal(X, torch.arange(12.0)) and torch.equal(ONES, torch.ones(3))


def test_what_may_be_the_same_memory() -> None:
    """The input that goes where an output comes from, of private memory and of memory that others read in place."""

    def member(rank: int, group: Group) -> None:
        for count, put in ((5, torch.clone), (300_001, lambda each: share(each, engine=group.engine))):
            whole = put(torch.full((3 * count,), float(rank)))
            parts = list(whole.split(count))
            group.all_gather(parts, parts[rank])
            assert torch.equal(whole, torch.arange(3.0).repeat_interleave(count))
            group.reduce_scatter(parts[rank], parts)
            assert torch.equal(parts[rank], torch.full((count,), 3.0 * rank))
            group.gather(parts if rank == 1 else None, parts[rank], 1)
            assert rank != 1 or torch.equal(whole, 3 * torch.arange(3.0).repeat_interleave(count))
            group.scatter(parts[rank], parts if rank == 1 else None, 1)
            assert torch.equal(parts[rank], torch.full((count,), 3.0 * rank))
            for number in range(5):
                parts = list(put(torch.arange(3.0 * count) + 1000 * rank + number).split(count))
                group.all_to_all(parts, parts)
                for each, part in enumerate(parts):
                    assert torch.equal(part, torch.arange(3.0 * count).split(count)[rank] + 1000 * each + number)

    in_threads(3, member)


def test_a_closed_group_and_one_whose_engine_is_closed_refuse_everything() -> None:
    def member(rank: int, group: Group) -> None:
        group.barrier()
        if rank == 0:
            group.close()
        else:
            group.engine.close()
        for call in (
            group.barrier,
            lambda: group.all_reduce(torch.ones(3)),
            lambda: group.send(torch.ones(1), 1 - rank),
        ):
            with pytest.raises(Cancelled):
                call()
        group.close()

    in_threads(2, member)


def test_a_name_may_be_used_again() -> None:
    secret = Secret.generate()
    with Engine(secret=secret) as engine:
        for _ in range(3):
            with Group.form([engine.address], name="again", engine=engine, timeout=20) as group:
                group.barrier()

    def member(_: int, group: Group) -> None:
        for _ in range(5):
            again = Group.form(group.members, name="again", engine=group.engine, timeout=60)
            tensor = torch.ones(4)
            again.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 4
            again.close()

    in_threads(2, member)


def test_a_forked_child_is_told_and_its_parents_group_goes_on() -> None:
    """It has the parent's memory mapped, in which others would take its word for the parent's."""

    def member(rank: int, group: Group) -> None:
        group.barrier()
        if rank == 0 and (pid := os.fork()) == 0:
            refused = 0
            for call in (
                group.barrier, lambda: group.all_reduce(torch.ones(3)), lambda: group.send(torch.ones(1), 1),
                lambda: group.receive(torch.ones(1), 1), group.shrink,
            ):  # fmt: skip
                try:
                    call()
                except ConfigError as error:
                    refused += "after a fork" in str(error)
            group.abort()
            group.close()
            os._exit(refused)
        if rank == 0:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        tensor = torch.ones(3)
        group.all_reduce(tensor, timeout=60)
        assert tensor.tolist() == [2.0] * 3 and group.failed_rank is None

    in_threads(2, member)
