"""What ranks under torch.distributed run in tests. Each function is run by all ranks at the same time."""

from __future__ import annotations

import shutil
import tempfile
import time
from datetime import timedelta
from typing import Any

import process_group_edges
import torch
import torch.distributed as dist
from collective_programs import DTYPES, FLOATS, reduced, same, values
from torch import nn
from torch.distributed import ReduceOp

import monarch_rdma.collectives
from monarch_rdma import errors

__all__ = ["begin", "dist", "end", "errors", "run", "time", "torch"]

OPS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT, "avg": ReduceOp.AVG}
assert monarch_rdma.collectives.register


def begin(backend: str, port: int, rank: int, size: int, timeout: float = 60) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    prefix = dist.PrefixStore(f"{backend}-{size}-{begin.count}", store)
    begin.count += 1
    dist.init_process_group(backend, store=prefix, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


begin.count = 0


def end() -> None:
    dist.destroy_process_group()


def run(name: str, *arguments: Any) -> Any:
    found = globals().get(name) or getattr(process_group_edges, name)
    return found(*arguments)


def collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for count in (1, 5, 1001):
            everyone = [values(dtype, count, each) for each in range(size)]
            for name, op in OPS.items():
                if (dtype is torch.bool and name == "avg") or (name == "avg" and dtype not in FLOATS):
                    continue
                meant = {"sum": "max", "product": "min"}.get(name, name) if dtype is torch.bool else name
                out = everyone[rank].clone()
                dist.all_reduce(out, op)
                assert same(out, reduced(everyone, meant)), (dtype, name)
            outs = [torch.empty_like(each) for each in everyone]
            dist.all_gather(outs, everyone[rank])
            assert all(map(same, outs, everyone)), dtype
            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, everyone[rank])
            assert same(whole, torch.cat([each.view(torch.uint8) for each in everyone]).view(dtype))
            out = everyone[rank].clone()
            dist.broadcast(out, 1)
            assert same(out, everyone[1])
            dist.gather(everyone[rank], outs if rank == 0 else None, 0)
            assert rank or all(map(same, outs, everyone))
            dist.scatter(out, everyone if rank == 1 else None, 1)
            assert same(out, everyone[rank])
            dist.all_to_all(outs, [values(dtype, count, 10 * rank + each) for each in range(size)])
            assert all(same(outs[each], values(dtype, count, 10 * each + rank)) for each in range(size))


def layouts() -> None:
    """Tensors that are not contiguous, uneven splits, several at a time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    grid = torch.arange(12.0).reshape(3, 4)
    turned = (grid + rank).t()
    dist.all_reduce(turned)
    assert torch.equal(turned, (grid * size + sum(range(size))).t())
    out = torch.zeros(4, 3).t()
    dist.broadcast(out if rank else out.copy_(grid), 0)
    assert torch.equal(out, grid)
    splits = [each + rank for each in range(size)]
    given = torch.arange(float(sum(splits) * 2)).reshape(-1, 2) + 100 * rank
    got = torch.empty(sum(each + rank for each in range(size)), 2)
    dist.all_to_all_single(got, given, [each + rank for each in range(size)], splits)
    at = 0
    for each in range(size):
        begin_at = sum(other + each for other in range(rank))
        part = got[at : at + each + rank]
        expected = (torch.arange(float(sum(o + each for o in range(size)) * 2)).reshape(-1, 2) + 100 * each)[
            begin_at : begin_at + rank + each
        ]
        assert torch.equal(part, expected)
        at += each + rank
    shard = torch.empty(2, 2)
    dist.reduce_scatter_tensor(shard, torch.arange(4.0 * size).reshape(2 * size, 2))
    assert torch.equal(shard, size * torch.arange(4.0 * size).reshape(2 * size, 2)[2 * rank : 2 * rank + 2])
    word = torch.tensor([0b1100 + rank])
    dist.all_reduce(word, ReduceOp.BOR)
    assert word.item() == 0b1100 | (size - 1 | 1)
    scaled = torch.ones(3)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(scaled, torch.full((3,), 0.5 * size))
    with dist._coalescing_manager(async_ops=True) as manager:
        many = [torch.full((each + 1,), 1.0 + rank) for each in range(3)]
        for each in many:
            dist.all_reduce(each)
    manager.wait()
    assert all(torch.equal(each, torch.full_like(each, sum(range(1, size + 1)))) for each in many)


def without_waiting() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(i + rank)) for i in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, work in reversed(list(enumerate(works))):
        assert work.wait() and work.is_completed()
        assert torch.equal(tensors[i], torch.full((1000,), float(size * i + sum(range(size)))))
    tensor = torch.ones(4)
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((4,), 2.0 * size))
    # An operation that others join much later holds nobody up.
    work = dist.barrier(async_op=True) if rank == 0 else None
    if rank == 0:
        dist.send(torch.ones(1), 1)
        work.wait()
    elif rank == 1:
        dist.recv(torch.empty(1), 0)
        dist.barrier()
    else:
        dist.barrier()


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (10 ** (rank + 1))}
    everyone = [None] * size
    dist.all_gather_object(everyone, mine)
    assert [each["rank"] for each in everyone] == list(range(size))
    given = [mine]
    dist.broadcast_object_list(given, src=1)
    assert given[0]["rank"] == 1
    got = [None]
    dist.scatter_object_list(got, everyone if rank == 0 else [None] * size, src=0)
    assert got[0] == mine


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    to, sender = (rank + 1) % size, (rank - 1) % size
    big = torch.full((400_000,), float(rank))
    got = torch.empty_like(big)
    ops = [dist.P2POp(dist.isend, big, to), dist.P2POp(dist.irecv, got, sender)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got, torch.full_like(got, float(sender)))
    works = [dist.isend(torch.tensor([float(tag)]), to, tag=tag) for tag in (1, 2, 3)]
    tensors = {tag: torch.empty(1) for tag in (3, 2, 1)}
    works += [dist.irecv(tensor, sender, tag=tag) for tag, tensor in tensors.items()]
    for work in works:
        work.wait()
    assert {tag: tensor.item() for tag, tensor in tensors.items()} == {1: 1.0, 2: 2.0, 3: 3.0}
    if rank == 0:
        tensor = torch.empty(1)
        assert sorted(dist.recv(tensor) for _ in range(size - 1)) == list(range(1, size))
    else:
        dist.send(torch.ones(1), 0)
    dist.barrier()


def subgroups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    last = dist.new_group([0, size - 1])
    tensor = torch.tensor([float(rank)])
    if rank in (0, size - 1):
        dist.all_reduce(tensor, group=last)
        assert tensor.item() == size - 1
    dist.all_reduce(tensor)
    assert tensor.item() == 2 * (size - 1) + sum(range(1, size - 1))
    # All ranks split into two groups, which work at the same time.
    parts = [[0], list(range(1, size))]
    mine, _ = dist.new_subgroups_by_enumeration(parts)
    part = next(part for part in parts if rank in part)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert dist.get_process_group_ranks(mine) == part and tensor.item() == sum(part)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def losses(net: nn.Module, *, seed: int | None = None) -> list[float]:
    """Of eight steps, on data of each rank's own, or of all ranks' where there is a seed."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return [train(net, optimizer, generator) for _ in range(8)]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
    inputs = torch.randn(16, 8, generator=generator)
    loss = error_of(net(inputs), inputs[:, :4].sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def error_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def ddp() -> list[float]:
    return losses(nn.parallel.DistributedDataParallel(model(1), bucket_cap_mb=0.001))


def fsdp() -> list[float]:
    return losses(sharded(model(1)))


def sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel() -> list[float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 36), nn.Tanh(), nn.Linear(36, 4))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return losses(parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), seed=5)


def pipeline() -> list[float]:
    """Each rank has a stage; four microbatches, one forward and one backward in turns."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    layers = list(model(1))
    ends = [0, 2, 4, 5] if size == 3 else [0, 2, 5]
    net = nn.Sequential(*layers[ends[rank] : ends[rank + 1]])
    stage = PipelineStage(net, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=error_of)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    out = torch.empty(8)
    for step in range(8):
        inputs = torch.randn(16, 8, generator=generator)
        found: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        wanted = {"target": inputs[:, :4].sin(), "losses": found} if rank == size - 1 else {}
        optimizer.zero_grad()
        schedule.step(*given, **wanted)
        optimizer.step()
        if rank == size - 1:
            out[step] = torch.stack(found).mean().detach()
    dist.broadcast(out, size - 1)
    return out.tolist()


def checkpointed() -> list[float]:
    """Saved by all ranks after some steps, loaded into another model, whose training goes on from there."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    out = []
    for seed in (1, 2):
        net = sharded(model(seed))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
        if seed == 2:
            dcp.load(state, checkpoint_id=folder[0])
            set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        out += [train(net, optimizer, generator) for _ in range(4)]
        state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
        if seed == 1:
            dcp.save(state, checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return out


def dtensors() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(10, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    assert torch.equal((sharded.t() @ sharded).full_tensor(), whole.t() @ whole)
    assert isinstance(sharded, DTensor)
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)


def failing(seconds: float) -> tuple[str, str, float]:
    """Collectives, sleeping in between, until one fails."""
    tensor = torch.ones(1000)
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        before = time.monotonic()
        try:
            dist.all_reduce(tensor)
        except errors.RdmaError as error:
            return type(error).__name__, str(error), time.monotonic() - before
    return "", "", 0.0


def going_on() -> tuple[int, float]:
    smaller = dist.group.WORLD.shrink(timedelta(seconds=30))
    tensor = torch.ones(3)
    smaller.allreduce([tensor]).wait()
    return smaller.size(), tensor.sum().item()
