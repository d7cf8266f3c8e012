"""More of what ranks under torch.distributed run in tests: every dtype through every call, and what is seldom given."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_programs import DTYPES, FLOATS, INTEGERS, Group, is_defined, reduced, same, values
from torch.distributed import ReduceOp
from torch.testing._internal.distributed import fake_pg

from monarch_rdma import errors

__all__ = [
    "aborted", "bitwise", "coalesced", "conjugates", "every_dtype_is_moved", "every_dtype_is_reduced", "in_place",
    "late", "more_objects", "other_devices", "overlapping", "scaled", "with_gradients", "with_its_group",
]  # fmt: skip

OPS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT, "avg": ReduceOp.AVG}
COUNTS = (0, 1, 5, 1001)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*DTYPES, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, *COMPLEX)


def numbers(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    if dtype in COMPLEX:
        return torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    if dtype in DTYPES:
        return values(dtype, count, seed)
    return values(torch.uint8, count * dtype.itemsize, seed).view(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same(torch.view_as_real(a), torch.view_as_real(b)) if a.is_complex() else same(a, b)


def refusal(call: Any) -> str:
    """Why a call is refused, before any other rank takes part in it."""
    try:
        call()
    except errors.ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def every_dtype_is_reduced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for count in COUNTS:
            everyone = [values(dtype, count * size, each) for each in range(size)]
            mine = [each.chunk(size)[rank] if count else each for each in everyone]
            for name, op in OPS.items():
                meant = {"sum": "max", "product": "min"}.get(name, name) if dtype is torch.bool else name
                if not is_defined(meant, dtype):
                    assert "AVG" in refusal(lambda: dist.all_reduce(everyone[rank], OPS["avg"]))  # noqa: B023
                    continue
                out = everyone[rank].clone()
                dist.all_reduce(out, op)
                assert same(out, reduced(everyone, meant)), ("all_reduce", dtype, name, count)
                out = everyone[rank].clone()
                dist.reduce(out, size - 1, op)
                assert same(out, reduced(everyone, meant) if rank == size - 1 else everyone[rank]), (dtype, name, count)
                out = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(out, everyone[rank], op)
                assert same(out, reduced(mine, meant)), ("reduce_scatter_tensor", dtype, name, count)
                out = torch.empty(count, dtype=dtype)
                shards = [values(dtype, count, 10 * rank + each) for each in range(size)]
                dist.reduce_scatter(out, shards, op)
                given = [values(dtype, count, 10 * each + rank) for each in range(size)]
                assert same(out, reduced(given, meant)), ("reduce_scatter", dtype, name, count)
    total = numbers(torch.complex64, 7, rank)
    dist.all_reduce(total)
    parts = [torch.view_as_real(numbers(torch.complex64, 7, each)) for each in range(size)]
    assert torch.equal(torch.view_as_real(total), reduced(parts, "sum"))


def every_dtype_is_moved() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    to, sender = (rank + 1) % size, (rank - 1) % size
    for dtype in MOVED:
        for count in COUNTS:
            what = (dtype, count)
            uneven = [numbers(dtype, count + each, each) for each in range(size)]
            outs = [torch.empty_like(each) for each in uneven]
            dist.all_gather(outs, uneven[rank])
            assert all(map(equal, outs, uneven)), ("all_gather", *what)
            everyone = [numbers(dtype, count, each) for each in range(size)]
            out = everyone[rank].clone()
            dist.broadcast(out, size - 1)
            assert equal(out, everyone[size - 1]), ("broadcast", *what)
            outs = [torch.empty_like(each) for each in everyone]
            dist.gather(everyone[rank], outs if rank == 1 else None, 1)
            assert rank != 1 or all(map(equal, outs, everyone)), ("gather", *what)
            dist.scatter(out, everyone if rank == 1 else None, 1)
            assert equal(out, everyone[rank]), ("scatter", *what)
            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, everyone[rank])
            assert all(map(equal, whole.split(count) if count else [whole] * size, everyone)), what
            splits = [count + each + rank for each in range(size)]
            got = torch.empty(sum(splits), dtype=dtype)
            dist.all_to_all_single(got, numbers(dtype, sum(splits), rank), splits, splits)
            for each, part in enumerate(got.split(splits)):
                theirs = [count + other + each for other in range(size)]
                assert equal(part, numbers(dtype, sum(theirs), each).split(theirs)[rank]), ("all_to_all", *what)
            works = [dist.isend(everyone[rank], to), dist.irecv(out, sender)]
            for work in works:
                work.wait()
            assert equal(out, everyone[sender]), ("send", *what)


def scaled() -> None:
    """PREMUL_SUM: by a number or a tensor, rounded to the dtype before the sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        for factor in (0.3, torch.tensor([0.3])):
            everyone = [values(dtype, 101 * size, each) for each in range(size)]
            expected = reduced([(each.to(wide) * factor).to(dtype) for each in everyone], "sum")
            op = dist._make_nccl_premul_sum(factor)
            out = everyone[rank].clone()
            dist.all_reduce(out, op)
            assert same(out, expected), ("all_reduce", dtype)
            out = everyone[rank].clone()
            dist.reduce(out, 1, op)
            assert same(out, expected if rank == 1 else everyone[rank]), ("reduce", dtype)
            out = torch.empty(101, dtype=dtype)
            dist.reduce_scatter_tensor(out, everyone[rank], op)
            assert same(out, expected.split(101)[rank]), ("reduce_scatter", dtype)
    for dtype in (*INTEGERS, torch.bool):
        tensor = torch.ones(3, dtype=dtype)
        assert "PREMUL_SUM" in refusal(lambda: dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.3)))  # noqa: B023


def bitwise() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}
    for dtype in (*INTEGERS, torch.bool):
        everyone = [values(dtype, 7 * size, each) for each in range(size)]
        for op, combine in ops.items():
            expected = everyone[0]
            for each in everyone[1:]:
                expected = combine(expected, each)
            out = everyone[rank].clone()
            dist.all_reduce(out, op)
            assert same(out, expected), (op, dtype)
            out = everyone[rank].clone()
            dist.reduce(out, 1, op)
            assert same(out, expected if rank == 1 else everyone[rank]), (op, dtype)
            out = torch.empty(7, dtype=dtype)
            dist.reduce_scatter_tensor(out, everyone[rank], op)
            assert same(out, expected.split(7)[rank]), (op, dtype)
    assert "BXOR" in refusal(lambda: dist.all_reduce(torch.ones(3), ReduceOp.BXOR))


def conjugates() -> None:
    """Lazy ones, whose memory has other values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [torch.complex(torch.arange(5.0) + each, torch.ones(5)) for each in range(size)]
    out, options = everyone[rank].clone().conj(), dist.BroadcastOptions()
    options.rootRank = 1
    dist.group.WORLD.broadcast([out], options).wait()  # dist.broadcast leaves it to its caller
    assert torch.equal(out, everyone[1].conj())
    to, sender = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(5, dtype=torch.complex64).conj()
    sent = dist.group.WORLD.send([everyone[rank].conj()], to, 0)
    dist.group.WORLD.recv([got], sender, 0).wait()
    sent.wait()
    assert torch.equal(got, everyone[sender].conj())
    negative = torch._neg_view(torch.arange(3.0))
    dist.all_reduce(negative)
    assert torch.equal(negative, -torch.arange(3.0) * size)


def in_place() -> None:
    """Inputs that are parts of outputs, and the other way round, as FSDP has them; and of shared memory."""
    from monarch_rdma.rdma import share_

    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 300_001):
        whole = share_(torch.full((size * count,), float(rank)))
        dist.all_gather_into_tensor(whole, whole[rank * count : (rank + 1) * count])
        assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(count))
        dist.reduce_scatter_tensor(whole[rank * count : (rank + 1) * count], whole)
        assert torch.equal(whole[rank * count : (rank + 1) * count], torch.full((count,), float(rank * size)))
        for round in range(8):
            parts = list(share_(torch.arange(float(size * count)) + 1000 * rank + round).split(count))
            dist.all_to_all(parts, parts)
            for each, part in enumerate(parts):
                assert torch.equal(part, torch.arange(float(size * count)).split(count)[rank] + 1000 * each + round)


def overlapping() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(10.0)
    for call in (
        lambda: dist.all_gather([tensor[:3]] * size, torch.ones(3)),
        lambda: dist.all_gather([tensor[each : each + 3] for each in range(size)], torch.ones(3)),
        lambda: dist.reduce_scatter(tensor[1:3], [tensor[2 * each : 2 * each + 2] for each in range(size)]),
        lambda: dist.all_to_all(
            [tensor[each : each + 1] for each in range(size)], [tensor[1:2]] + [tensor[:1]] * (size - 1)
        ),
    ):
        assert "have memory in common" in refusal(call)
    assert torch.equal(tensor, torch.arange(10.0)) and dist.group.WORLD.group.failed_rank is None
    dist.all_reduce(tensor[rank : rank + 1])


def with_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaf = torch.full((4,), float(rank), requires_grad=True)
    made = leaf * 2
    dist.all_reduce(leaf)
    dist.broadcast(made, 1)
    assert leaf.requires_grad and made.tolist() == [2.0] * 4 and leaf.tolist() == [sum(range(size))] * 4


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    whole = [torch.empty(size * count) for count in (1, 3)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for each in whole:
            dist.all_gather_into_tensor(each, torch.full((each.numel() // size,), float(rank)))
    manager.wait()
    for each in whole:
        assert torch.equal(each, torch.arange(float(size)).repeat_interleave(each.numel() // size))
    parts = [torch.empty(count) for count in (1, 3)]
    with dist._coalescing_manager(device=device):
        for each in parts:
            dist.reduce_scatter_tensor(each, torch.ones(size * each.numel()))
    assert all(torch.equal(each, torch.full_like(each, float(size))) for each in parts)


def more_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size if rank == 1 else None
    dist.gather_object({"rank": rank}, gathered, dst=1)
    assert gathered is None or [each["rank"] for each in gathered] == list(range(size))
    if rank == 0:
        dist.send_object_list([1, "two", {3: None}], 1)
    elif rank == 1:
        got = [None] * 3
        dist.recv_object_list(got, 0)
        assert got == [1, "two", {3: None}]
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))  # dist.monitored_barrier is for gloo alone


def late() -> tuple[str, str]:
    """One rank does not come to a group with a short limit; the others' waits end, with what they wait for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=3))
    word = torch.ones(1)
    if rank == size - 1:
        dist.barrier()
        return "", ""
    work = dist.all_reduce(word, group=group, async_op=True)
    with pytest.raises(TimeoutError, match="has not ended within"):
        work.wait(timedelta(milliseconds=1))
    try:
        work.wait()
    except errors.RdmaError as error:
        dist.barrier()
        return type(error).__name__, str(error)
    raise AssertionError("it ended without the last one")


def aborted() -> str:
    """What waits in a group when one rank aborts it; the others of its groups go on."""
    rank = dist.get_rank()
    group = dist.new_group()
    try:
        if rank == 0:
            dist.barrier()
            group.abort()
        else:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            dist.barrier()
            work.wait()
    except errors.RdmaError as error:
        dist.barrier()
        return type(error).__name__
    dist.barrier()
    return ""


def with_its_group() -> None:
    """A process group, and its Group from another thread, at the same time: each with its own memory."""
    size = dist.get_world_size()
    pg, wrong = dist.new_group(), []

    def messages() -> None:
        inner: Group = pg.group
        for number in range(100):
            tensor = torch.full((500,), 7.0)
            inner.broadcast(tensor, number % size)
            wrong.extend([number] if not tensor.eq(7).all() else [])

    works = [dist.all_reduce(torch.ones(700), group=pg, async_op=True) for _ in range(100)]
    for work in works:
        work.wait()
    thread = threading.Thread(target=messages)
    thread.start()
    thread.join()
    assert not wrong and all(torch.equal(work.result()[0], torch.full((700,), float(size))) for work in works)


def other_devices() -> list[str]:
    """Tensors of a device that another backend has go there, with torch's own fake one in its place."""
    assert fake_pg
    rank, size = dist.get_rank(), dist.get_world_size()
    mixed = dist.new_group(backend="cpu:monarch_rdma,meta:fake")
    tensor, elsewhere = torch.ones(3), torch.ones(3, device="meta")
    dist.all_reduce(tensor, group=mixed)
    assert tensor.tolist() == [float(size)] * 3
    if rank == 0:  # the fake one waits for nobody
        dist.all_reduce(elsewhere, group=mixed)
        dist.all_gather([torch.empty_like(elsewhere) for _ in range(size)], elsewhere, group=mixed)
        dist.all_gather_into_tensor(torch.empty(3 * size, device="meta"), elsewhere, group=mixed)
        dist.reduce_scatter_tensor(elsewhere, torch.empty(3 * size, device="meta"), group=mixed)
        dist.all_to_all_single(torch.empty(3 * size, device="meta"), torch.empty(3 * size, device="meta"), group=mixed)
        dist.broadcast(elsewhere, 0, group=mixed)
        dist.gather(elsewhere, [torch.empty_like(elsewhere) for _ in range(size)], 0, group=mixed)
        for work in (dist.isend(elsewhere, 1, group=mixed), dist.irecv(elsewhere, 1, group=mixed)):
            work.wait()
        mixed._start_coalescing(elsewhere.device)
        dist.isend(elsewhere, 1, group=mixed)
        mixed._end_coalescing(elsewhere.device).wait()
    else:
        dist.gather(elsewhere, None, 0, group=mixed)
    found = mixed._get_backend(torch.device("meta")).name()
    plain = dist.new_group()
    assert "on meta" in refusal(lambda: dist.all_reduce(elsewhere, group=plain))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank, group=mixed)
    assert objects == list(range(size))
    dist.destroy_process_group(mixed)
    return [found]
