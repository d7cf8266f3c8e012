"""Weights of Llama 3.2 1B on one host, from four FSDP ranks to two tensor-parallel ones, beside what else moves them.

python benchmarks/bench_sharding.py [--layers 4] [--rounds 5] [--torchstore PYTHON]

Real shapes, bf16; `--layers` of the 16 (all of them are 2.5 GB on each side). Destinations were written before. Each
process copies with one thread, whatever it is that copies. Contenders take turns in an order that turns too; the
slowest process counts. A ratio is taken in each round by itself: the median of these is told, and the middle half of
them. First two more processes read what the four have; then the four themselves become two replicas of two, as DTensor
can do it, with at most 8 layers. `--torchstore`: a Python that has TorchStore (see torchstore_pair.py), which then does
what the two do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from monarch_rdma.rdma import Engine, Secret
from monarch_rdma.sharding import Layout, Mesh, Publication, Reader, TensorSpec, make_plan, publish
from monarch_rdma.sharding import Shard as Rows
from monarch_rdma.sharding.models import llama32_1b, tensor_parallel_dim
from monarch_rdma.sharding.reads import Strided, ends_of, rows_of

TRAINERS, GENERATORS = 4, 2
Move = Callable[[], object]
FITS = 8  # layers whose checkpoint four ranks can read with 24 GB of memory
PIECE = 64 << 20  # bytes of one process_vm_readv


def model_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The first layers of the model, and its embedding in proportion."""
    whole = llama32_1b()
    kept = {n: s for n, s in whole.items() if not n.startswith("model.layers.") or int(n.split(".")[2]) < layers}
    vocabulary, hidden = kept["model.embed_tokens.weight"]
    return kept | {"model.embed_tokens.weight": (vocabulary * layers // 16, hidden)}


Vectors = tuple[object, int, int]  # an array of struct iovec, how many, and their bytes


def vectors(pieces: list[tuple[int, int]]) -> Vectors:
    """Addresses and lengths, as the kernel takes them."""
    flat = [number for piece in pieces for number in piece]
    return (ctypes.c_uint64 * len(flat))(*flat), len(pieces), sum(length for _, length in pieces)


def process_vm_readv(pid: int, here: Vectors, there: Vectors) -> None:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    if call(pid, here[0], here[1], there[0], there[1], 0) != there[2]:
        raise OSError(ctypes.get_errno(), "process_vm_readv")


def runs(address: int, part: Strided, run: int) -> list[tuple[int, int]]:
    """The contiguous runs, of so many elements of two bytes, that a part of a tensor at this address is made of."""
    places = np.array([part.offset])
    for n, stride in zip(part.shape, part.strides, strict=True):
        places = np.add.outer(places, np.arange(n) * stride)
    return [(address + 2 * int(place), 2 * run) for place in places.reshape(-1, run)[:, 0]]


def nothing() -> None:
    """What a process does that has no part in a contender."""


class Process:
    """One of the six: ranks 0 to 3 have the FSDP shards, 4 and 5 read tensor-parallel ones."""

    def __init__(self, rank: int, layers: int, folder: str) -> None:
        self.rank, self.folder, self.is_trainer = rank, folder, rank < TRAINERS
        self.store = dist.distributed_c10d._get_default_store()
        self.engine = Engine(secret=Secret(self.store.get("secret")), copy_threads=1)
        self.shapes = model_shapes(layers)
        self.fsdp = {name: Layout(shape, Mesh({"dp": TRAINERS}), [Rows(0)]) for name, shape in self.shapes.items()}
        self.mine: dict[str, torch.Tensor] = {}
        if self.is_trainer:
            self.mine = {n: torch.randn(whole.part(rank).shape).to(torch.bfloat16) for n, whole in self.fsdp.items()}
        self.published: list[Publication] = []
        self.targets: dict[Mesh, tuple[dict[str, Layout], dict[str, torch.Tensor]]] = {}  # that contenders share
        self.blocks: list[torch.Tensor] = []  # these, too
        self.four = DeviceMesh("cpu", torch.arange(TRAINERS).reshape(2, 2), mesh_dim_names=("dp", "tp"))

    def publish(self, memory: str) -> None:
        if self.is_trainer:
            # Publishing in shared memory moves a tensor there.
            own = self.mine if memory == "shared" else {name: tensor.clone() for name, tensor in self.mine.items()}
            where = {"directory": self.store, "rank": self.rank, "ranks": TRAINERS, "engine": self.engine}
            self.published.append(publish(own, memory, memory=memory, layouts=self.fsdp, **where))  # type: ignore[arg-type]
            addresses = {name: tensor.data_ptr() for name, tensor in own.items()}
            self.store.set(f"{memory}/{self.rank}", json.dumps([os.getpid(), addresses]))
        dist.barrier()

    def block(self, number: int, nbytes: int) -> torch.Tensor:
        while len(self.blocks) <= number:
            self.blocks.append(torch.ones(nbytes, dtype=torch.uint8))
        return self.blocks[number]

    def tensor_parallel(self, mesh: Mesh, rank: int) -> tuple[dict[str, Layout], dict[str, torch.Tensor]]:
        if mesh in self.targets:
            return self.targets[mesh]
        layouts, tensors = {}, {}
        for name, shape in self.shapes.items():
            dim = tensor_parallel_dim(name)
            layouts[name] = Layout(shape, mesh, {} if dim is None else {"tp": Rows(dim)})
            tensors[name] = torch.ones(layouts[name].part(rank).shape, dtype=torch.bfloat16)
        return self.targets.setdefault(mesh, (layouts, tensors))

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
        here, there = (self.block(number, nbytes) for number in range(2))
        return lambda: copy(here.data_ptr(), there.data_ptr(), nbytes), nbytes

    def two_process_vm(self, nbytes: int) -> tuple[Move, int]:
        """As many bytes out of a trainer, 64 MiB a call, one thread a reader."""
        if self.is_trainer:
            if self.rank < GENERATORS:
                block = self.block(0, nbytes)
                self.store.set(f"vm/{self.rank}", f"{os.getpid()} {block.data_ptr()}")
            return nothing, 0
        pid, address = map(int, self.store.get(f"vm/{self.rank - TRAINERS}").split())
        target = self.block(0, nbytes)
        sizes = [(at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)]
        calls = [
            (pid, vectors([(target.data_ptr() + at, size)]), vectors([(address + at, size)])) for at, size in sizes
        ]
        return lambda: [process_vm_readv(*call) for call in calls], nbytes

    def two_process_vm_of_the_same_pieces(self) -> tuple[Move, int]:
        """What a reader reads from ordinary memory, piece by piece, as many in one call as the kernel takes."""
        if self.is_trainer:
            return nothing, 0
        rank = self.rank - TRAINERS
        layouts, tensors = self.tensor_parallel(Mesh({"tp": GENERATORS}), rank)
        there = {r: json.loads(self.store.get(f"in_place/{r}")) for r in range(TRAINERS)}
        source, target = (
            {name: TensorSpec(layout, "bfloat16") for name, layout in which.items()}
            for which in (self.fsdp, {name: layout.renumbered(TRAINERS) for name, layout in layouts.items()})
        )
        calls = []
        for tensor in make_plan(source, target, self.rank).tensors:
            into, copies = tensors[tensor.target], tensor.copies
            for one in rows_of(copies, None):
                trainer = int(one.source[0])
                pid, addresses = there[trainer]
                part = torch.empty(self.fsdp[tensor.source].part(trainer).shape, device="meta")
                ends = zip(
                    (addresses[tensor.source], into.data_ptr()), ends_of(one, part.stride(), into.stride()), strict=True
                )
                theirs, ours = (runs(address, end, int(one.run[0])) for address, end in ends)
                for at in range(0, len(theirs), os.sysconf("SC_IOV_MAX")):
                    some = slice(at, at + os.sysconf("SC_IOV_MAX"))
                    calls.append((pid, vectors(ours[some]), vectors(theirs[some])))
        return lambda: [process_vm_readv(*call) for call in calls], sum(tensor.nbytes for tensor in tensors.values())

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

    def four_redistribute(self, own: dict[str, DTensor]) -> tuple[Move, int]:
        if not self.is_trainer:
            return nothing, 0
        _, tensors = self.tensor_parallel(Mesh({"dp": 2, "tp": 2}), self.rank)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return lambda: [t.redistribute(self.four, self.placements(name)) for name, t in own.items()], nbytes

    def four_checkpoint(self, own: dict[str, DTensor]) -> tuple[Move, int]:
        """Saved to /dev/shm, loaded as tensor-parallel DTensors."""
        if not self.is_trainer:
            return nothing, 0
        group = self.trainers
        _, tensors = self.tensor_parallel(Mesh({"dp": 2, "tp": 2}), self.rank)
        into = {
            name: DTensor.from_local(
                local, self.four, self.placements(name), run_check=False, shape=shape, stride=stride
            )
            for name, local in tensors.items()
            for shape, stride in [
                (torch.Size(self.shapes[name]), torch.empty(self.shapes[name], device="meta").stride())
            ]
        }

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


def two_more_read(process: Process, rounds: int) -> dict[str, list[float]]:
    process.publish("shared")
    process.publish("in_place")
    nbytes = torch.tensor([process.two_readers("shared")[1]])
    dist.all_reduce(nbytes, op=dist.ReduceOp.MAX)
    each = int(nbytes)
    return compare(
        {
            "two readers, shared memory": process.two_readers("shared"),
            "two readers, ordinary memory": process.two_readers("in_place"),
            "two memcpy": process.two_memcpy(each),
            "two process_vm_readv": process.two_process_vm(each),
            "two process_vm_readv, the same pieces": process.two_process_vm_of_the_same_pieces(),
        },
        rounds,
    )


def the_four_move(process: Process, rounds: int) -> dict[str, list[float]]:
    process.publish("shared")
    own = process.dtensors() if process.is_trainer else {}
    return compare(
        {
            "four ranks, fetch": process.four_readers(),
            "four ranks, DTensor.redistribute, gloo": process.four_redistribute(own),
            "four ranks, checkpoint in /dev/shm": process.four_checkpoint(own),
        },
        rounds,
    )


Part = Callable[[Process, int], dict[str, list[float]]]


def run(rank: int, part: Part, layers: int, rounds: int, port: int, folder: str, secret: bytes) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # each round writes it anew
    store = dist.PrefixStore(part.__name__, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS + GENERATORS)
    dist.distributed_c10d._get_default_store().set("secret", secret)
    process = Process(rank, layers, folder)
    process.trainers = dist.new_group(list(range(TRAINERS)))
    rates = part(process, rounds)
    if rank == 0:
        report(rates)
        store.set("rate", str(statistics.median(next(iter(rates.values())))))
    dist.barrier()
    dist.destroy_process_group()


COMPARED = [
    ("two readers, shared memory", "two memcpy"),
    ("two readers, ordinary memory", "two process_vm_readv"),
    ("two readers, ordinary memory", "two process_vm_readv, the same pieces"),
    ("four ranks, fetch", "four ranks, DTensor.redistribute, gloo"),
    ("four ranks, fetch", "four ranks, checkpoint in /dev/shm"),
]


def compare(contenders: dict[str, tuple[Move, int]], rounds: int) -> dict[str, list[float]]:
    """GB/s of each in each round. The first process prints them."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            spent = timed(contenders[name][0])
            if number:  # the first one warms up
                seconds[name].append(spent)
    moved = torch.tensor([nbytes for _, nbytes in contenders.values()])
    dist.all_reduce(moved)
    arrived = dict(zip(contenders, moved.tolist(), strict=True))
    if dist.get_rank() == 0:
        for name, many in seconds.items():
            spent = statistics.median(many)
            print(f"{name:40} {arrived[name] / 1e6:8.0f} MB  {spent:7.3f} s  {arrived[name] / spent / 1e9:6.2f} GB/s")
    return {name: [arrived[name] / spent / 1e9 for spent in many] for name, many in seconds.items()}


def report(rates: dict[str, list[float]]) -> None:
    for mine, other in [pair for pair in COMPARED if pair[0] in rates]:
        ratios = sorted(a / b for a, b in zip(rates[mine], rates[other], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{mine} against {other}: {statistics.median(ratios):.2f} ({low:.2f} - {high:.2f})")


def torchstore(python: str, layers: int, rounds: int, ours: float) -> None:
    """Two readers of what four processes have put into a TorchStore, slices of each tensor into memory of their own."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torchstore_pair.py")
    shapes = json.dumps({name: [shape, tensor_parallel_dim(name)] for name, shape in model_shapes(layers).items()})
    done = subprocess.run([python, program, str(rounds)], input=shapes, capture_output=True, text=True, check=False)
    if not done.stdout.strip():  # on a busy machine Monarch fails to end in order, after all is done
        raise SystemExit(f"{program} failed:\n{done.stderr}")
    nbytes, spent = json.loads(done.stdout.splitlines()[-1])
    median = statistics.median(spent)
    rate = nbytes / median / 1e9
    print(f"{'two readers, TorchStore':40} {nbytes / 1e6:8.0f} MB  {median:7.3f} s  {rate:6.2f} GB/s")
    print(f"{COMPARED[0][0]} against two readers, TorchStore: {ours / rate:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of the model's 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torchstore", metavar="PYTHON", help="a Python that has TorchStore")
    given = parser.parse_args()
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the parent serves it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is in /dev/shm is removed then, too
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        secret = Secret.generate().reveal()
        for part, layers in [(two_more_read, given.layers), (the_four_move, min(given.layers, FITS))]:
            mp.spawn(run, (part, layers, given.rounds, rendezvous.port, folder, bytes(secret)), TRAINERS + GENERATORS)
    finally:
        shutil.rmtree(folder)
    if given.torchstore:
        torchstore(given.torchstore, given.layers, given.rounds, float(rendezvous.get("two_more_read/rate")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
