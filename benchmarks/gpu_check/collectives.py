"""Collectives of tensors on GPUs through torch.distributed, against the CPU's kernels, bit for bit.

    python benchmarks/gpu_check/collectives.py [ROUNDS]      two processes, on two GPUs or sharing one

benchmarks/gpu_check.sh runs it where torch is for CUDA; it is the same on ROCm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import monarch_rdma.collectives
from monarch_rdma import kernels

SIZES = (1, 33, 4096, 200_001, 5_000_000)  # elements: by both ways, and in several parts
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
Place = Callable[[torch.Tensor], torch.Tensor]


def wrong_results(place: Place, sizes: tuple[int, ...], rounds: int) -> list[str]:
    """What came out wrong on this rank. `place`: a CPU tensor's copy on the GPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []

    def expect(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        same = torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8))
        wrong.extend([] if same else [f"{what} of {wanted.numel()} {wanted.dtype}"])

    for round_ in range(rounds):
        for dtype in DTYPES:
            for count in sizes:
                generator = torch.Generator().manual_seed(round_ * 1000 + count)
                everyone = [(100 * torch.randn(count * size, generator=generator)).to(dtype) for _ in range(size)]
                mine, total = everyone[rank], kernels.reduce(everyone, "sum")
                out = place(mine)
                dist.all_reduce(out)
                expect(out, total, "all_reduce")
                out = place(mine)
                dist.all_reduce(out, ReduceOp.MAX)
                expect(out, kernels.reduce(everyone, "max"), "all_reduce max")
                part = place(torch.zeros(count, dtype=dtype))
                dist.reduce_scatter_tensor(part, place(mine))
                expect(part, total[rank * count : (rank + 1) * count].clone(), "reduce_scatter")
                whole = place(torch.zeros(count * size, dtype=dtype))
                dist.all_gather_into_tensor(whole, place(mine[:count].clone()))
                expect(whole, torch.cat([each[:count] for each in everyone]), "all_gather")
                out = place(mine)
                dist.broadcast(out, round_ % size)
                expect(out, everyone[round_ % size], "broadcast")
    return wrong


def run(rank: int, port: int, rounds: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    monarch_rdma.collectives.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=60)
    dist.init_process_group("cuda:monarch_rdma", store=store, rank=rank, world_size=2, timeout=limit)
    wrong = wrong_results(lambda tensor: tensor.to(device), SIZES, rounds)
    dist.destroy_process_group()
    print(f"  rank {rank} on {device}: {len(wrong)} wrong {wrong[:5] or ''}", flush=True)
    if wrong:
        raise SystemExit(1)


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check: torch has no GPU here", file=sys.stderr)
        return 1
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.multiprocessing.spawn(run, args=(store.port, rounds), nprocs=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
