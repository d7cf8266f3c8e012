"""Weights of Llama 3.2 1B on one host, from four FSDP ranks to two tensor-parallel ones, beside what else moves them.

python benchmarks/bench_sharding.py [--layers 4] [--rounds 5]

Real shapes, bf16; `--layers` of the 16 (all of them are 2.5 GB on each side). Destinations were written before.
Contenders take turns, medians are compared; the slowest process counts. Above two more processes read what the four
have, below the four themselves become two replicas of two, as DTensor can do it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from monarch_rdma.rdma import Engine, Secret
from monarch_rdma.sharding import Layout, Mesh, Reader, publish
from monarch_rdma.sharding import Shard as Rows
from monarch_rdma.sharding.models import llama32_1b, tensor_parallel_dim

TRAINERS, GENERATORS = 4, 2
Move = Callable[[], object]
PIECE = 64 << 20  # bytes of one process_vm_readv


def model_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The first layers of the model, and its embedding in proportion."""
    whole = llama32_1b()
    kept = {n: s for n, s in whole.items() if not n.startswith("model.layers.") or int(n.split(".")[2]) < layers}
    vocabulary, hidden = kept["model.embed_tokens.weight"]
    return kept | {"model.embed_tokens.weight": (vocabulary * layers // 16, hidden)}


def nothing() -> None:
    """What a process does that has no part in a contender."""


class Process:
    """One of the six: ranks 0 to 3 have the FSDP shards, 4 and 5 read tensor-parallel ones."""

    def __init__(self, rank: int, layers: int, folder: str) -> None:
        self.rank, self.folder, self.is_trainer = rank, folder, rank < TRAINERS
        self.store = dist.distributed_c10d._get_default_store()
        self.engine = Engine(secret=Secret(self.store.get("secret")))
        self.shapes = model_shapes(layers)
        self.fsdp = {name: Layout(shape, Mesh({"dp": TRAINERS}), [Rows(0)]) for name, shape in self.shapes.items()}
        self.mine: dict[str, torch.Tensor] = {}
        self.kept: list[object] = []
        if self.is_trainer:
            self.mine = {n: torch.randn(whole.part(rank).shape).to(torch.bfloat16) for n, whole in self.fsdp.items()}
        self.four = DeviceMesh("cpu", torch.arange(TRAINERS).reshape(2, 2), mesh_dim_names=("dp", "tp"))

    def publish(self, memory: str) -> None:
        if self.is_trainer:
            own = {name: tensor.clone() for name, tensor in self.mine.items()}
            where = {"directory": self.store, "rank": self.rank, "ranks": TRAINERS, "engine": self.engine}
            self.kept.append(publish(own, memory, memory=memory, layouts=self.fsdp, **where))  # type: ignore[arg-type]
        dist.barrier()

    def tensor_parallel(self, mesh: Mesh, rank: int) -> tuple[dict[str, Layout], dict[str, torch.Tensor]]:
        layouts, tensors = {}, {}
        for name, shape in self.shapes.items():
            dim = tensor_parallel_dim(name)
            layouts[name] = Layout(shape, mesh, {} if dim is None else {"tp": Rows(dim)})
            tensors[name] = torch.ones(layouts[name].part(rank).shape, dtype=torch.bfloat16)
        return layouts, tensors

    # --- contenders: each returns what is timed, and the bytes that arrive at this process

    def two_readers(self, memory: str) -> tuple[Move, int]:
        if self.is_trainer:
            return nothing, 0
        rank = self.rank - TRAINERS
        layouts, tensors = self.tensor_parallel(Mesh({"tp": GENERATORS}), rank)
        reader = Reader(
            memory, tensors, directory=self.store, layouts=layouts, rank=rank, ranks=GENERATORS, engine=self.engine
        )
        return reader.fetch, sum(tensor.nbytes for tensor in tensors.values())

    def two_memcpy(self, nbytes: int) -> tuple[Move, int]:
        """Between two pieces of memory of the process, in one go."""
        if self.is_trainer:
            return nothing, 0
        copy = ctypes.CDLL(None).memcpy
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        here, there = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        self.kept += [here, there]
        return lambda: copy(here.data_ptr(), there.data_ptr(), nbytes), nbytes

    def two_process_vm(self, nbytes: int) -> tuple[Move, int]:
        """As many bytes out of a trainer, 64 MiB a call, one thread a reader."""
        if self.is_trainer:
            if self.rank < GENERATORS:
                block = torch.ones(nbytes, dtype=torch.uint8)
                self.kept.append(block)
                self.store.set(f"vm/{self.rank}", f"{os.getpid()} {block.data_ptr()}")
            return nothing, 0
        pid, address = map(int, self.store.get(f"vm/{self.rank - TRAINERS}").split())
        target = torch.ones(nbytes, dtype=torch.uint8)
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        pair = ctypes.c_uint64 * 2  # struct iovec: address and length

        def move() -> None:
            for at in range(0, nbytes, PIECE):
                size = min(PIECE, nbytes - at)
                here, there = pair(target.data_ptr() + at, size), pair(address + at, size)
                if call(pid, here, 1, there, 1, 0) != size:
                    raise OSError(ctypes.get_errno(), "process_vm_readv")

        return move, nbytes

    def four_readers(self) -> tuple[Move, int]:
        """The trainers themselves become two replicas of two."""
        if not self.is_trainer:
            return nothing, 0
        layouts, tensors = self.tensor_parallel(Mesh({"dp": 2, "tp": 2}), self.rank)
        reader = Reader(
            "shared", tensors, directory=self.store, layouts=layouts, rank=self.rank, ranks=4, engine=self.engine
        )
        return reader.fetch, sum(tensor.nbytes for tensor in tensors.values())

    def dtensors(self) -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(local, self.four, [Shard(0), Shard(0)], run_check=False)
            for name, local in self.mine.items()
        }

    def placements(self, name: str) -> list[Replicate | Shard]:
        dim = tensor_parallel_dim(name)
        return [Replicate(), Replicate() if dim is None else Shard(dim)]

    def four_redistribute(self) -> tuple[Move, int]:
        if not self.is_trainer:
            return nothing, 0
        own = self.dtensors()
        moved = {name: tensor.redistribute(self.four, self.placements(name)) for name, tensor in own.items()}
        nbytes = sum(tensor._local_tensor.nbytes for tensor in moved.values())
        return lambda: [t.redistribute(self.four, self.placements(name)) for name, t in own.items()], nbytes

    def four_checkpoint(self) -> tuple[Move, int]:
        """Saved to /dev/shm, loaded as tensor-parallel DTensors."""
        if not self.is_trainer:
            return nothing, 0
        own, group = self.dtensors(), self.trainers
        into = {name: tensor.redistribute(self.four, self.placements(name)) for name, tensor in own.items()}

        def move() -> None:
            dcp.save(own, checkpoint_id=self.folder, process_group=group)
            dcp.load(into, checkpoint_id=self.folder, process_group=group)

        return move, sum(tensor._local_tensor.nbytes for tensor in into.values())

    trainers: dist.ProcessGroup | None = None


def timed(move: Move) -> float:
    """Seconds of the slowest process."""
    dist.barrier()
    begin = time.perf_counter()
    move()
    slowest = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def run(rank: int, layers: int, rounds: int, port: int, folder: str, secret: bytes) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # each round writes it anew
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS + GENERATORS)
    dist.distributed_c10d._get_default_store().set("secret", secret)
    process = Process(rank, layers, folder)
    process.trainers = dist.new_group(list(range(TRAINERS)))
    process.publish("shared")
    process.publish("in_place")
    nbytes = torch.tensor([process.two_readers("shared")[1]])
    dist.all_reduce(nbytes, op=dist.ReduceOp.MAX)
    each = int(nbytes)
    contenders = {
        "two readers, shared memory": process.two_readers("shared"),
        "two readers, ordinary memory": process.two_readers("in_place"),
        "two memcpy": process.two_memcpy(each),
        "two process_vm_readv": process.two_process_vm(each),
        "four ranks, fetch": process.four_readers(),
        "four ranks, DTensor.redistribute, gloo": process.four_redistribute(),
        "four ranks, checkpoint in /dev/shm": process.four_checkpoint(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (move, _) in contenders.items():
            spent = timed(move)
            if number:  # the first one warms up
                seconds[name].append(spent)
    arrived = torch.tensor([moved for _, moved in contenders.values()])
    dist.all_reduce(arrived)
    if rank == 0:
        report(seconds, dict(zip(contenders, arrived.tolist(), strict=True)))
    dist.barrier()
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], arrived: dict[str, int]) -> None:
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    for name, median in medians.items():
        print(f"{name:40} {arrived[name] / 1e6:8.0f} MB  {median:7.3f} s  {arrived[name] / median / 1e9:6.2f} GB/s")
    for mine, other in [
        ("two readers, shared memory", "two memcpy"),
        ("two readers, ordinary memory", "two process_vm_readv"),
        ("four ranks, fetch", "four ranks, DTensor.redistribute, gloo"),
        ("four ranks, fetch", "four ranks, checkpoint in /dev/shm"),
    ]:
        ratio = arrived[mine] / medians[mine] / (arrived[other] / medians[other])
        print(f"{mine} against {other}: {ratio:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of the model's 16")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the parent serves it
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        secret = Secret.generate().reveal()
        mp.spawn(run, (given.layers, given.rounds, rendezvous.port, folder, bytes(secret)), TRAINERS + GENERATORS)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
