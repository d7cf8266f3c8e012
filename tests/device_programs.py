"""What members of groups with tensors on (fake) GPUs run in tests; see collective_programs and fake_gpu_tensors."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from collective_programs import DTYPES, OPS, Group, attempt, errors, is_defined, reduced, same, values
from fake_gpu_tensors import on_gpu, use_fake_gpu
from fake_gpus import fail, held, wait_until_none_is
from torch.distributed import ReduceOp

import monarch_rdma.collectives
from monarch_rdma import config

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check"))
import collectives as gpu_check

__all__ = [
    "DTYPES", "OPS", "Group", "attempt",
    "check", "config", "errors", "fail", "held", "next_kernel", "on_gpu",
    "through_torch", "torch", "wait_until_none_is",
]  # fmt: skip
assert monarch_rdma.collectives.register

next_kernel = {"sleep": 0.0, "die": 0.0}  # before it begins, once


def _before_each() -> None:
    if next_kernel.pop("die", 0.0):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(next_kernel.pop("sleep", 0.0))


use_fake_gpu(_before_each)


def check(group: Group, dtype: torch.dtype, count: int, op: str, seed: int, root: int, offset: int) -> None:
    """Every collective that GPUs have, once; `offset`: elements between a multiple of 16 bytes and the tensors."""
    rank, size = group.rank, group.size

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return on_gpu(tensor, offset=offset * tensor.element_size())

    everyone = [values(dtype, count, seed * 100 + each) for each in range(size)]
    if is_defined(op, dtype):
        out = placed(everyone[rank])
        group.all_reduce(out, op=op)
        assert same(out.cpu(), reduced(everyone, op)), "all_reduce"
        out = placed(everyone[rank])
        group.reduce(out, root, op=op)
        assert same(out.cpu(), reduced(everyone, op) if rank == root else everyone[rank]), "reduce"
        shards = [[values(dtype, count, seed * 100 + 10 * each + to) for to in range(size)] for each in range(size)]
        out = placed(torch.zeros(count).to(dtype))
        group.reduce_scatter(out, [placed(each) for each in shards[rank]], op=op)
        assert same(out.cpu(), reduced([each[rank] for each in shards], op)), "reduce_scatter"
    out = placed(everyone[rank])
    group.broadcast(out, root)
    assert same(out.cpu(), everyone[root]), "broadcast"
    outs = [placed(torch.zeros(count).to(dtype)) for _ in range(size)]
    group.all_gather(outs, placed(everyone[rank]))
    assert all(same(each.cpu(), want) for each, want in zip(outs, everyone, strict=True)), "all_gather"


def through_torch(backend: str, port: int, rank: int, size: int) -> None:
    """torch.distributed's calls, as they come from a program whose tensors are on a GPU."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    everyone = [values(torch.bfloat16, 1000, each) for each in range(size)]
    total = reduced(everyone, "sum")
    out = on_gpu(everyone[rank])
    dist.all_reduce(out)
    assert same(out.cpu(), total)
    assert held("opened") == size - 1  # it went by the GPUs' memory
    out = on_gpu(everyone[rank])
    works = [dist.all_reduce(out, ReduceOp.MAX, async_op=True), dist.all_reduce(out, ReduceOp.AVG, async_op=True)]
    for work in works:
        work.wait()
    assert same(out.cpu(), reduced([reduced(everyone, "max")] * size, "avg"))
    strided = on_gpu(torch.stack([everyone[rank], everyone[rank]], 1).contiguous())
    dist.all_reduce(strided[:, 1])
    assert same(strided[:, 1].contiguous().cpu(), total) and same(strided[:, 0].contiguous().cpu(), everyone[rank])
    whole = on_gpu(torch.zeros(size * 1000, dtype=torch.bfloat16))
    dist.all_gather_into_tensor(whole, on_gpu(everyone[rank]))
    assert same(whole.cpu(), torch.cat(everyone))
    part = on_gpu(torch.zeros(1000, dtype=torch.bfloat16))
    dist.reduce_scatter_tensor(part, whole)
    assert same(part.cpu(), reduced([everyone[rank]] * size, "sum"))
    bits = on_gpu(torch.full((5,), 1 << rank))
    dist.all_reduce(bits, ReduceOp.BOR)
    assert bits.cpu().tolist() == [2**size - 1] * 5
    out = on_gpu(everyone[rank])
    dist.broadcast(out, 1)
    assert same(out.cpu(), everyone[1])
    for refused in (lambda: dist.send(out, 1 - rank % 2), lambda: dist.all_to_all_single(whole, whole.clone())):
        kind, message, _ = attempt(refused)
        assert kind == "ConfigError" and "backend='nccl'" in message, (kind, message)
    host = everyone[rank].clone()
    dist.all_reduce(host)
    assert same(host, total)
    assert gpu_check.wrong_results(on_gpu, (1, 33, 700), 1) == []  # what is first run on a real one
    dist.destroy_process_group()
    wait_until_none_is("opened")
