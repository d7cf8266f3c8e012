"""`monarch-rdma bench --collectives`: which steps and algorithms are best, for the table that collectives choose by.

Groups, or algorithms, take turns, so that what else the machine does falls on all of them. Processes of this host take
the part of hosts: their bytes go over sockets. For hosts that are: `torchrun --nnodes ... -m monarch_rdma bench
--collectives`, one process on each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from .. import config
from ..rdma import Engine
from ..rdma import group as core
from .group import DTYPES, Group
from .table import BUILT_IN, KINDS, Row, Steps, save

__all__ = ["main", "measured"]

dist: Any = torch.distributed
mp: Any = torch.multiprocessing

_STEPS = [128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20]  # bytes
_LEAST = 8
_SMALL, _TIMES = 64 << 10, 5  # up to so many bytes so many are timed together
_BETTER = 0.9  # of the time of going directly: else that is taken
_MOST_PROCESSES = 64  # of this host, which play hosts
_MAX = core.REDUCTIONS["max"]  # the values stay as they are
Timings = dict[str, dict[int, dict[str, float]]]  # seconds, by kind, bytes and algorithm


def _process(rank: int, size: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """One of those that play hosts here."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:monarch_rdma", store=store, rank=rank, world_size=size)
    steps = _measure_steps(options)
    secret = dist.group.WORLD.group.engine.secret
    with Engine(lanes="tcp", secret=secret) as engine, Group.form(_addresses(engine), engine=engine) as group:
        across = measured(group, mib=options.mib, rounds=options.rounds)
    if rank == 0:
        results.put((steps, across))
    dist.barrier()
    dist.destroy_process_group()


def _addresses(engine: Engine) -> list[str]:
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, engine.address)
    return addresses


def _measure_steps(options: argparse.Namespace) -> dict[int, float]:
    """Seconds of an all_reduce, by the bytes of a step."""
    groups = {}
    for step in _STEPS:
        with config.configured(collective_step_bytes=step):
            groups[step] = dist.new_group(backend="cpu:monarch_rdma")
    tensor = torch.ones(options.mib << 18)
    block = [(tensor.data_ptr(), tensor.nbytes)]
    taken: dict[int, list[float]] = {step: [] for step in _STEPS}
    for round_number in range(options.rounds + 1):
        for step, group in groups.items():
            run = group.group.core.run
            run(core.BARRIER)
            begun = time.perf_counter()
            run(core.ALL_REDUCE, block, block, dtype=DTYPES["float32"], reduction=_MAX)
            if round_number:  # the first one warms up
                taken[step].append(time.perf_counter() - begun)
    return {step: statistics.median(samples) for step, samples in taken.items()}


def measured(group: Group, *, mib: int, rounds: int, kinds: Iterable[str] = tuple(KINDS)) -> Timings:
    """What collectives on host memory take in a group, by each algorithm. All members call it."""
    taken: Timings = {}
    for name in kinds:
        kind = KINDS[name]
        for size in [0] if kind == core.BARRIER else _sizes(mib << 20):
            taken.setdefault(name, {})[size] = _measure_one(group, kind, size, rounds)
    return taken


def _sizes(most: int) -> Iterator[int]:
    size = _LEAST
    while size <= most:
        yield size
        size *= 16


def _measure_one(group: Group, kind: int, nbytes: int, rounds: int) -> dict[str, float]:
    """Seconds until the last member has a collective about so many bytes, by algorithm."""
    inputs, outputs = _tensors(kind, nbytes, group)
    blocks, to = ([(each.data_ptr(), each.nbytes) for each in tensors] for tensors in (inputs, outputs))
    run, times = group.core.run, _TIMES if nbytes <= _SMALL else 1
    has = {name: number for name, number in core.ALGORITHMS.items() if core.has_algorithm(kind, number)}
    taken: dict[str, list[float]] = {name: [] for name in has}
    for round_number in range(rounds + 1):
        for name, number in has.items():
            run(core.BARRIER)
            begun = time.perf_counter()
            for _ in range(times):
                run(kind, blocks, to, dtype=DTYPES["float32"], reduction=_MAX, algorithm=number)
            run(core.BARRIER)
            if round_number:
                taken[name].append((time.perf_counter() - begun) / times)
    medians = torch.tensor([statistics.median(samples) for samples in taken.values()], dtype=torch.float64)
    block = [(medians.data_ptr(), medians.nbytes)]
    run(core.ALL_REDUCE, block, block, dtype=DTYPES["float64"], reduction=_MAX)
    return dict(zip(has, medians.tolist(), strict=True))


def _tensors(kind: int, nbytes: int, group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a member gives to, and gets from, a collective about so many bytes in all, of root 0."""

    def one(count: int = nbytes // 4) -> list[torch.Tensor]:
        return [torch.ones(count)]

    part, size, is_root = -(-nbytes // (4 * group.size)), group.size, group.rank == 0
    parts = [torch.ones(part) for _ in range(size)]
    if kind == core.ALL_REDUCE:
        tensor = one()
        return tensor, tensor
    ways: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {
        core.BARRIER: ([], []),
        core.BROADCAST: (one(), []) if is_root else ([], one()),
        core.REDUCE: (one(), one() if is_root else []),
        core.REDUCE_SCATTER: (parts, one(part)),
        core.ALL_GATHER: (one(part), parts),
        core.GATHER: (one(part), parts if is_root else []),
        core.SCATTER: (parts if is_root else [], one(part)),
    }
    return ways[kind]


def _best(timings: Timings) -> dict[str, Steps]:
    """By kind, from how many bytes on which algorithm is taken; what always goes directly is left out."""
    across = {}
    for kind, by_size in timings.items():
        steps: list[tuple[int, str]] = []
        for size, seconds in by_size.items():
            name = min(seconds, key=seconds.__getitem__)
            if seconds[name] > _BETTER * seconds["direct"]:
                name = "direct"
            if name != (steps[-1][1] if steps else "direct"):
                steps.append((size if steps or size > _LEAST else 0, name))
        if steps:
            across[kind] = tuple(steps)
    return across


def _say(size: int, steps: dict[int, float], across: Timings, options: argparse.Namespace) -> Row:
    best = min(steps, key=steps.__getitem__) if steps else BUILT_IN[-1].step_bytes
    print(f"{size} processes, all_reduce of {options.mib} MiB:", flush=True)
    for step, seconds in steps.items():
        mark = "  <- best" if step == best else ""
        print(f"  steps of {step >> 10:5} KiB {seconds * 1e3:9.2f} ms{mark}", flush=True)
    print(f"{size} members on hosts of their own:", flush=True)
    for kind, by_size in across.items():
        for nbytes, of_algorithms in by_size.items():
            row = "  ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in of_algorithms.items())
            print(f"  {kind:15} {nbytes:10} bytes  {row} ms", flush=True)
    return Row(size, best, BUILT_IN[-1].two_level_bytes, _best(across))


def _on_this_host(size: int, options: argparse.Namespace) -> Row:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_process, args=(size, store.port, options, results), nprocs=size)
    steps, across = results.get()
    return _say(size, steps, across, options)


def _on_these_hosts(options: argparse.Namespace) -> list[Row]:
    """torchrun has started this on each. Empty on all but the first."""
    dist.init_process_group("cpu:monarch_rdma")
    group = dist.group.WORLD.group
    taken = measured(group, mib=options.mib, rounds=options.rounds)
    rows = [_say(group.size, {}, taken, options)] if group.rank == 0 else []
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return whole


def _sizes_of_groups(text: str) -> list[int]:
    return [_whole(2, _MOST_PROCESSES)(part) for part in text.split(",")]


def _writable(text: str) -> str:
    """Looked at before hours of measuring."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="monarch-rdma bench --collectives", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--processes", type=_sizes_of_groups, default="2,4", metavar="N,..", help="sizes of groups [2,4]"
    )
    parser.add_argument("--mib", type=_whole(1, 4096), default=16, help="size of the largest tensor [16]")
    parser.add_argument("--rounds", type=_whole(1, 10_000), default=7, help="of which the median counts [7]")
    parser.add_argument(
        "--save", type=_writable, metavar="FILE", help="write the table there, for option collective_table"
    )
    options = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        rows = _on_these_hosts(options)
    else:
        rows = [_on_this_host(size, options) for size in options.processes]
    if options.save and rows:
        save(rows, options.save)
        print(f"written: {options.save}; use it with MONARCH_RDMA_COLLECTIVE_TABLE={options.save}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
