"""What members of groups run in tests: collectives beside what they must give, worked out by one process."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from monarch_rdma import errors
from monarch_rdma.collectives import Group, table
from monarch_rdma.rdma import share

__all__ = ["DTYPES", "OPS", "Group", "attempt", "check", "errors", "hammer", "time", "torch"]

FLOATS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
OPS = ("sum", "avg", "min", "max", "product")


def is_defined(op: str, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return op in ("min", "max")
    return op != "avg" or dtype in FLOATS


def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=generator).to(dtype)


def reduced(tensors: list[torch.Tensor], op: str, hosts: list[list[int]] | None = None) -> torch.Tensor:
    """What docs/collectives.md promises, to the last bit: in the order of ranks, in fp32 for small floats; over several
    `hosts` on each of them first, where an average is divided, and then over them.
    """
    if hosts is not None:
        of_hosts = [_in_order([tensors[rank] for rank in host], op, divisor=len(tensors)) for host in hosts]
        return _in_order(of_hosts, "sum" if op == "avg" else op)
    return _in_order(tensors, op, divisor=len(tensors))


def _in_order(tensors: list[torch.Tensor], op: str, *, divisor: int = 0) -> torch.Tensor:
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in FLOATS and dtype is not torch.float64 else dtype
    out = tensors[0].to(wide)
    for tensor in tensors[1:]:
        other = tensor.to(wide)
        if op in ("sum", "avg"):
            out = out + other
        elif op == "product":
            out = out * other
        elif wide is torch.bool:
            out = out & other if op == "min" else out | other
        else:
            out = torch.minimum(out, other) if op == "min" else torch.maximum(out, other)
    return (out / divisor if op == "avg" else out).to(dtype)


def hosts_of_sums(group: Group, tensors: list[torch.Tensor]) -> list[list[int]] | None:
    """Over which hosts the sum of these tensors, one from each member or one for each, goes in two levels."""
    is_large = sum(tensor.nbytes for tensor in tensors) >= table.row_for(group.size).two_level_bytes
    return group.hosts if len(group.hosts) > 1 and is_large else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def check(
    group: Group, dtype: torch.dtype, count: int, op: str, seed: int, root: int, *, in_place: bool = False
) -> None:
    """Every collective once, on tensors of about `count` elements; `in_place`: which others on the host can map."""
    rank, size = group.rank, group.size

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return share(tensor, engine=group.engine) if in_place else tensor.clone()

    def room(count: int) -> torch.Tensor:
        return put(torch.empty(count, dtype=dtype))

    everyone = [values(dtype, count, seed * 100 + each) for each in range(size)]
    mine = put(everyone[rank])
    if is_defined(op, dtype):
        out = put(mine)
        group.all_reduce(out, op=op)
        assert same(out, reduced(everyone, op, hosts_of_sums(group, everyone))), "all_reduce"
        out = put(mine)
        group.reduce(out, root, op=op)
        assert same(out, reduced(everyone, op) if rank == root else mine), "reduce"
        shards = [put(values(dtype, count + 3 * each, seed * 100 + rank)) for each in range(size)]
        shard = room(count + 3 * rank)
        group.reduce_scatter(shard, shards, op=op)
        given = [values(dtype, count + 3 * rank, seed * 100 + each) for each in range(size)]
        assert same(shard, reduced(given, op, hosts_of_sums(group, shards))), "reduce_scatter"
    out = put(mine)
    group.broadcast(out, root)
    assert same(out, everyone[root]), "broadcast"
    uneven = [room(count + each) for each in range(size)]
    group.all_gather(uneven, put(values(dtype, count + rank, seed + rank)))
    assert all(same(uneven[each], values(dtype, count + each, seed + each)) for each in range(size)), "all_gather"
    gathered = [room(count) for _ in range(size)] if rank == root else None
    group.gather(gathered, mine, root)
    assert gathered is None or all(map(same, gathered, everyone)), "gather"
    out = room(count)
    group.scatter(out, [put(each) for each in everyone] if rank == root else None, root)
    assert same(out, everyone[rank]), "scatter"
    given = [put(values(dtype, count + rank + 2 * each, seed + rank * size + each)) for each in range(size)]
    got = [room(count + each + 2 * rank) for each in range(size)]
    group.all_to_all(got, given)
    for each in range(size):
        assert same(got[each], values(dtype, count + each + 2 * rank, seed + each * size + rank)), "all_to_all"
    group.barrier()


def attempt(call: Any) -> tuple[str, str, float]:
    """What class of failure it ends with, its message, and after how long."""
    begin = time.monotonic()
    try:
        call()
    except errors.RdmaError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def hammer(group: Group, seed: int) -> tuple[str, str, int | None]:
    """Checked collectives of all kinds, until the group fails: how it did, and because of which rank."""
    draw = random.Random(seed)  # the same on all members
    while True:
        dtype = draw.choice(DTYPES)
        op = draw.choice(OPS)
        count = draw.choice((1, 17, 1000, 70_000, 400_000))
        seed, root, in_place = draw.randrange(1000), draw.randrange(group.size), draw.random() < 0.5
        try:
            check(group, dtype, count, op, seed, root, in_place=in_place)
        except errors.RdmaError as error:
            return type(error).__name__, str(error), group.failed_rank
