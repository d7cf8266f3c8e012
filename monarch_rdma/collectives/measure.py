"""`monarch-rdma bench --collectives`: which steps are best on this host, for the table that collectives choose by.

Processes take turns with groups of different options, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from .. import config
from ..rdma.group import ALL_REDUCE, BARRIER
from .group import DTYPES
from .table import BUILT_IN, Row, save

__all__ = ["main", "measured"]

dist: Any = torch.distributed
mp: Any = torch.multiprocessing

_STEPS = [128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20]  # bytes


def measured(size: int, *, mib: int, rounds: int) -> dict[int, float]:
    """Seconds of an all_reduce of so many MiB over `size` processes on this host, by the bytes of a step."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_measure, args=(size, store.port, mib, rounds, results), nprocs=size)
    return dict(results.get())


def _measure(rank: int, size: int, port: int, mib: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:monarch_rdma", store=store, rank=rank, world_size=size)
    groups = {}
    for step in _STEPS:
        with config.configured(collective_step_bytes=step):
            groups[step] = dist.new_group(backend="cpu:monarch_rdma")
    tensor = torch.ones(mib << 18)
    block = [(tensor.data_ptr(), tensor.nbytes)]
    taken: dict[int, list[float]] = {step: [] for step in _STEPS}
    for round_number in range(rounds + 1):
        for step, group in groups.items():
            run = group.group.core.run
            run(BARRIER)
            begun = time.perf_counter()
            run(ALL_REDUCE, block, block, dtype=DTYPES["float32"], reduction=3)  # max: the values stay as they are
            if round_number:  # the first one warms up
                taken[step].append(time.perf_counter() - begun)
    if rank == 0:
        results.put([(step, statistics.median(samples)) for step, samples in taken.items()])
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="monarch-rdma bench --collectives", description=__doc__)
    parser.add_argument("--processes", default="2,4", metavar="N,..", help="sizes of groups [2,4]")
    parser.add_argument("--mib", type=int, default=16, help="size of the tensor [16]")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts [7]")
    parser.add_argument("--save", metavar="FILE", help="write the table there, for option collective_table")
    options = parser.parse_args(arguments)
    rows = []
    for size in map(int, options.processes.split(",")):
        seconds = measured(size, mib=options.mib, rounds=options.rounds)
        best = min(seconds, key=seconds.__getitem__)
        print(f"{size} processes, all_reduce of {options.mib} MiB:", flush=True)
        for step, each in seconds.items():
            print(
                f"  steps of {step >> 10:5} KiB {each * 1e3:9.2f} ms{'  <- best' if step == best else ''}", flush=True
            )
        rows.append(Row(size, best, BUILT_IN[-1].two_level_bytes))
    if options.save:
        save(rows, options.save)
        print(f"written: {options.save}; use it with MONARCH_RDMA_COLLECTIVE_TABLE={options.save}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
