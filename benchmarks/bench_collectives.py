"""Collectives of 2 and 4 processes on this host, through torch.distributed, in turns with gloo.

python benchmarks/bench_collectives.py [--processes 2,4] [--largest 256] [--rounds 5] [--quick]

Both process groups live in the same processes. For each size and collective they take turns; the slowest rank counts,
medians of rounds are compared. "mapped": with tensors in memory that the others can map. "of bound": bytes that must
be read from tensors and written to them, over the bandwidth of memory: the better one of STREAM's copy and triad, which
all processes run at the same time, in turns with the collective, over arrays as large as its tensors and at least
four times the last cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import monarch_rdma.collectives
from monarch_rdma.rdma import zeros
from monarch_rdma.rdma.group import ALL_REDUCE

KIB, MIB = 1 << 10, 1 << 20
Step = Callable[[], object]
# Newer torch has other names for them, and warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """What is timed: steps on tensors of `size` bytes a rank; the bytes of tensors that each touches on all ranks."""

    def __init__(self, size: int, *, mapped: bool) -> None:
        """`mapped`: in memory that the other process can map."""
        count, ranks = size // 4, dist.get_world_size()
        self.one, self.other, self.whole = (
            zeros(each).fill_(1) if mapped else torch.ones(each) for each in (count, count, count * ranks)
        )
        self.bytes = {
            "all_reduce": 2 * ranks * size,
            "reduce_scatter": ranks * (ranks + 1) * size,
            "all_gather": ranks * (ranks + 1) * size,
            "all_to_all": 2 * ranks * size,
            "broadcast": ranks * size,
            "send/recv": 2 * size,
        }

    def step(self, name: str, group: dist.ProcessGroup) -> Step:
        one, other, whole, rank = self.one, self.other, self.whole, dist.get_rank()
        steps: dict[str, Step] = {
            "all_reduce": lambda: dist.all_reduce(one, dist.ReduceOp.MAX, group=group),
            "reduce_scatter": lambda: _reduce_scatter(one, whole, dist.ReduceOp.MAX, group=group),
            "all_gather": lambda: _all_gather(whole, one, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, one, group=group),
            "broadcast": lambda: dist.broadcast(one, 0, group=group),
            "send/recv": lambda: self._pass(rank, group),
        }
        return steps[name]

    def _pass(self, rank: int, group: dist.ProcessGroup) -> None:
        """From rank 0 to rank 1, and an answer, which is what tells rank 0 that it has come."""
        if rank == 0:
            dist.send(self.one, 1, group=group)
            dist.recv(self.other[:1], 1, group=group)
        elif rank == 1:
            dist.recv(self.one, 0, group=group)
            dist.send(self.other[:1], 0, group=group)


def seconds(step: Step, times: int) -> float:
    """The slowest rank's time of one step, where all begin together."""
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(times):
        step()
    taken = torch.tensor([(time.perf_counter() - begun) / times], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def last_cache() -> int:
    """Bytes."""
    sizes = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.strip().rstrip("K")) * KIB for size in sizes), default=32 * MIB)


class Stream:
    """STREAM's kernels: what they read and write, without what a cache fetches to be overwritten."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of a tensor of the collective that it is beside."""
        count = max(size, 4 * last_cache()) // 4
        a, b, c = (torch.ones(count) for _ in range(3))
        self._kernels: list[tuple[Step, int]] = [
            (lambda: a.copy_(b), 2 * a.nbytes),
            (lambda: torch.add(b, c, alpha=3.0, out=a), 3 * a.nbytes),
        ]
        self._samples: list[list[float]] = [[] for _ in self._kernels]

    def measure(self) -> None:
        for samples, (kernel, touched) in zip(self._samples, self._kernels, strict=True):
            samples.append(touched * dist.get_world_size() / seconds(kernel, 1))

    @property
    def bandwidth(self) -> float:
        """Bytes a second of all processes together: the median of the better kernel."""
        return max(map(statistics.median, self._samples))


def latencies(step: Step, times: int) -> float:
    """Median of single steps, in microseconds."""
    samples = []
    for _ in range(times):
        begun = time.perf_counter()
        step()
        samples.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(samples)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def measure(rank: int, ranks: int, port: int, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    groups = {"gloo": dist.group.WORLD, "monarch_rdma": dist.new_group(backend="cpu:monarch_rdma")}
    assert monarch_rdma.collectives.ProcessGroup
    ours = groups["monarch_rdma"]

    say(f"\n{ranks} processes, {torch.get_num_threads()} thread each")
    eight = torch.ones(2)
    block = [(eight.data_ptr(), eight.nbytes)]
    small: dict[str, list[float]] = {"gloo": [], "monarch_rdma": [], "core": []}
    for _ in range(rounds):
        for name, group in groups.items():
            small[name].append(latencies(lambda group=group: dist.all_reduce(eight, group=group), 300))
        small["core"].append(latencies(lambda: ours.group.core.run(ALL_REDUCE, block, block, dtype=5), 300))
        dist.barrier()
    p50 = {name: statistics.median(values) for name, values in small.items()}
    say(
        f"all_reduce of 8 bytes, p50: gloo {p50['gloo']:.1f} us, monarch_rdma {p50['monarch_rdma']:.1f} us "
        f"({p50['gloo'] / p50['monarch_rdma']:.1f} x), its core alone {p50['core']:.1f} us"
    )

    say(f"{'collective':24}{'size':>10}{'gloo ms':>12}{'ours ms':>12}{'times':>8}{'GB/s':>8}{'of bound':>10}")
    rows = [(size, mapped) for size in sizes for mapped in (False, True) if size >= MIB or not mapped]
    for size, mapped in rows:
        collectives = Collectives(size, mapped=mapped)
        for name, touched in collectives.bytes.items():
            title = f"{name}, mapped" if mapped else name
            samples: dict[str, list[float]] = {each: [] for each in groups}
            times = max(1, min(200, 4 * MIB // size))
            stream = Stream(size) if size >= 16 * MIB else None
            for round_number in range(rounds + 1):
                for each, group in groups.items():
                    taken = seconds(collectives.step(name, group), times)
                    if round_number:  # the first one warms up
                        samples[each].append(taken)
                if stream is not None and round_number:
                    stream.measure()
            theirs, mine = (statistics.median(samples[each]) for each in ("gloo", "monarch_rdma"))
            label = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
            row = f"{title:24}{label:>10}{theirs * 1e3:>12.3f}{mine * 1e3:>12.3f}{theirs / mine:>8.1f}"
            if stream is not None:
                memory = stream.bandwidth
                row += f"{memory / 1e9:>8.1f}{touched / memory / mine:>10.2f}"
            say(row)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--largest", type=int, default=256, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    options = parser.parse_args()
    sizes = [4 * KIB << 2 * i for i in range(9) if 4 * KIB << 2 * i <= options.largest * MIB]
    if options.quick:
        sizes, options.rounds = [4 * KIB, MIB, 64 * MIB], 3
    for ranks in map(int, options.processes.split(",")):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(measure, args=(ranks, store.port, sizes, options.rounds), nprocs=ranks)


if __name__ == "__main__":
    main()
