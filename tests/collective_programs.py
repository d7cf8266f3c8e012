"""What members of groups run in tests: collectives beside what they must give, worked out by one process."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from monarch_rdma import errors
from monarch_rdma.collectives import Group, table
from monarch_rdma.rdma import group as core
from monarch_rdma.rdma import share

__all__ = ["ALGORITHMS", "DTYPES", "OPS", "Group", "attempt", "check", "errors", "hammer", "time", "torch"]

FLOATS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
OPS = ("sum", "avg", "min", "max", "product")
ALGORITHMS = (None, *core.ALGORITHMS)


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


def by_algorithm(tensors: list[torch.Tensor], op: str, algorithm: str, *, root: int = 0) -> torch.Tensor:
    """What docs/collectives.md promises of sums that are made of two at a time, rounded each time; without a ring."""
    parts = [_in_order([tensor], op, divisor=len(tensors)) if op == "avg" else tensor for tensor in tensors]
    parts = parts[root:] + parts[:root]

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _in_order([a, b], "sum" if op == "avg" else op)

    if algorithm == "ring":  # of a reduce: a chain
        while len(parts) > 1:
            parts.append(pair(*parts[-2:]))
            del parts[-3:-1]
        return parts[0]
    if algorithm == "tree":
        while len(parts) > 1:
            parts = [pair(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0]
    power = 1 << (len(parts).bit_length() - 1)
    for extra in range(len(parts) - power):
        parts[extra : extra + 2] = [pair(*parts[extra : extra + 2])]
    while len(parts) > 1:
        half = len(parts) // 2
        pairs = [(i, i + half) if algorithm == "halving" else (2 * i, 2 * i + 1) for i in range(half)]
        parts = [pair(parts[a], parts[b]) for a, b in pairs]
    return parts[0]


def by_ring(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """An all_reduce: the part of rank r is summed from rank r + 1 on, round to rank r."""
    size, item = len(tensors), tensors[0].element_size()
    length = -(-tensors[0].nbytes // (size * 64)) * 64 // item
    return torch.cat([
        of_block([tensor[block * length : (block + 1) * length] for tensor in tensors], op, block)
        for block in range(size)
    ])  # fmt: skip


def of_block(tensors: list[torch.Tensor], op: str, block: int) -> torch.Tensor:
    parts = [_in_order([tensor], op, divisor=len(tensors)) if op == "avg" else tensor for tensor in tensors]
    out = parts[(block + 1) % len(parts)]
    for back in range(len(parts) - 1):
        out = _in_order([out, parts[(block + 2 + back) % len(parts)]], "sum" if op == "avg" else op)
    return out


def hosts_of_sums(group: Group, tensors: list[torch.Tensor]) -> list[list[int]] | None:
    """Over which hosts the sum of these tensors, one from each member or one for each, goes in two levels."""
    is_large = sum(tensor.nbytes for tensor in tensors) >= table.row_for(group.size).two_level_bytes
    return group.hosts if len(group.hosts) > 1 and is_large else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def check(
    group: Group,
    dtype: torch.dtype,
    count: int,
    op: str,
    seed: int,
    root: int,
    *,
    in_place: bool = False,
    algorithm: str | None = None,
) -> None:
    """Every collective once, on tensors of about `count` elements; `in_place`: which others on the host can map.

    `algorithm`: of those that have it.
    """
    rank, size = group.rank, group.size

    def way(kind: int) -> dict[str, Any]:
        has = algorithm is not None and core.has_algorithm(kind, core.ALGORITHMS[algorithm])
        return {"algorithm": algorithm} if has else {}

    def expected(kind: int, tensors: list[torch.Tensor], hosts: list[list[int]] | None, block: int) -> torch.Tensor:
        if hosts is not None or size == 1 or way(kind).get("algorithm", "direct") == "direct":
            return reduced(tensors, op, hosts)
        assert algorithm is not None
        if kind != core.REDUCE and algorithm == "ring":
            return by_ring(tensors, op) if kind == core.ALL_REDUCE else of_block(tensors, op, block)
        return by_algorithm(tensors, op, algorithm, root=root if kind == core.REDUCE else 0)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return share(tensor, engine=group.engine) if in_place else tensor.clone()

    def room(count: int) -> torch.Tensor:
        return put(torch.empty(count, dtype=dtype))

    everyone = [values(dtype, count, seed * 100 + each) for each in range(size)]
    mine = put(everyone[rank])
    if is_defined(op, dtype):
        out = put(mine)
        group.all_reduce(out, op=op, **way(core.ALL_REDUCE))
        assert same(out, expected(core.ALL_REDUCE, everyone, hosts_of_sums(group, everyone), 0)), "all_reduce"
        out = put(mine)
        group.reduce(out, root, op=op, **way(core.REDUCE))
        assert same(out, expected(core.REDUCE, everyone, None, 0) if rank == root else mine), "reduce"
        shards = [put(values(dtype, count + 3 * each, seed * 100 + rank)) for each in range(size)]
        shard = room(count + 3 * rank)
        group.reduce_scatter(shard, shards, op=op, **way(core.REDUCE_SCATTER))
        given = [values(dtype, count + 3 * rank, seed * 100 + each) for each in range(size)]
        hosts = hosts_of_sums(group, shards)
        assert same(shard, expected(core.REDUCE_SCATTER, given, hosts, rank)), "reduce_scatter"
    out = put(mine)
    group.broadcast(out, root, **way(core.BROADCAST))
    assert same(out, everyone[root]), "broadcast"
    uneven = [room(count + each) for each in range(size)]
    group.all_gather(uneven, put(values(dtype, count + rank, seed + rank)), **way(core.ALL_GATHER))
    assert all(same(uneven[each], values(dtype, count + each, seed + each)) for each in range(size)), "all_gather"
    gathered = [room(count) for _ in range(size)] if rank == root else None
    group.gather(gathered, mine, root, **way(core.GATHER))
    assert gathered is None or all(map(same, gathered, everyone)), "gather"
    out = room(count)
    group.scatter(out, [put(each) for each in everyone] if rank == root else None, root, **way(core.SCATTER))
    assert same(out, everyone[rank]), "scatter"
    given = [put(values(dtype, count + rank + 2 * each, seed + rank * size + each)) for each in range(size)]
    got = [room(count + each + 2 * rank) for each in range(size)]
    group.all_to_all(got, given)
    for each in range(size):
        assert same(got[each], values(dtype, count + each + 2 * rank, seed + each * size + rank)), "all_to_all"
    group.barrier(**way(core.BARRIER))


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
        algorithm = draw.choice(ALGORITHMS)
        try:
            check(group, dtype, count, op, seed, root, in_place=in_place, algorithm=algorithm)
        except errors.RdmaError as error:
            return type(error).__name__, str(error), group.failed_rank
