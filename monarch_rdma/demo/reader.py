"""A process that pulls tensors from their owners over one lane, and compares every byte."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from ..errors import RdmaError
from ..rdma import Future, Peer, RDMABuffer, connect
from . import weights
from .owner import as_bytes, sweep_contents

__all__ = ["Reader"]

_TIMEOUT = 60.0  # seconds, of each read
_SHOWN = 5  # wrong tensors that are named
_BATCH = 64 << 20  # bytes that a figure is the median over, at least
_POISON = 0xA5  # what destinations hold before each pull: what an earlier one brought must not count

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes, _memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


class Reader:
    """Its public methods are the orders of the parent."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._peers: dict[str, Peer] = {}
        self._held: weights.WeightSet | None = None
        self._destinations: dict[str, torch.Tensor] = {}

    def prepare(self, description: dict[str, Any]) -> None:
        """Makes room for all tensors of the set."""
        self._destinations = {}
        self._held = weights.load(description)
        for tensor in self._held.tensors:
            data = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            as_bytes(data).fill(_POISON)
            self._destinations[tensor.name] = data
            self._emit(progress=tensor.nbytes)

    def clear(self) -> None:
        """Nothing that an earlier pull brought is left."""
        for tensor in self._destinations.values():
            as_bytes(tensor).fill(_POISON)

    def pull(self, addresses: list[str], lane: str) -> dict[str, Any]:
        """Reads everything that these owners publish over this lane, then compares it.

        `began` and `ended` are readings of the clock that all processes of this host share.
        """
        buffers = {name: buffer for address in addresses for name, buffer in self._lookup(address, "weights").items()}
        began = time.monotonic()
        reads = {name: buffer.read_into(self._destinations[name], lanes=_family(lane), timeout=_TIMEOUT)
                 for name, buffer in buffers.items()}  # fmt: skip
        moved = 0
        for read in reads.values():
            read.get()
            moved += read.explain().bytes
        ended = time.monotonic()
        wrong = self._compare(list(buffers))
        wrong += [f"{name} went over {read.explain().lane}" for name, read in reads.items() if not _took(read, lane)]
        return {"began": began, "ended": ended, "bytes": moved, "tensors": len(reads), "num_wrong": len(wrong),
                "wrong": wrong[:_SHOWN]}  # fmt: skip

    def _compare(self, names: list[str]) -> list[str]:
        """A sentence for each tensor that is not what the set says."""
        assert self._held is not None
        wrong = []
        wanted = set(names)
        for tensor in self._held.tensors:
            if tensor.name in wanted:
                at = weights.first_difference(self._held, tensor, as_bytes(self._destinations[tensor.name]))
                if at is not None:
                    wrong.append(f"{tensor.name} is wrong from byte {at} of {tensor.nbytes} on")
                self._emit(progress=tensor.nbytes)
        return wrong

    def memcpy(self, size: int, seconds: float) -> dict[str, float]:
        """Bytes per second that one thread of this process copies on its own."""
        source, destination = np.ones(size, np.uint8), np.ones(size, np.uint8)
        began, copies = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            _memcpy(destination.ctypes.data, source.ctypes.data, size)
            copies += 1
        return {"rate": size * copies / (time.monotonic() - began)}

    def sweep(self, address: str, lanes: list[str], sizes: list[int]) -> list[list[Any]]:
        """Rows of lane (or "memcpy"), size and the median bytes per second of single reads, one after the other."""
        buffers = self._lookup(address, "sweep")
        room = torch.zeros(max(sizes), dtype=torch.uint8)
        source = torch.ones(max(sizes), dtype=torch.uint8)
        rows: list[list[Any]] = []
        for size in sizes:
            # In turns, so that all see the same weather.
            ways: dict[str, Callable[[], object]] = {}
            ways |= {lane: _one_read(buffers[_memory_of(lane)][:size], room[:size], lane) for lane in lanes}
            ways["memcpy"] = partial(_memcpy, room.data_ptr(), source.data_ptr(), size)
            rows += [[way, size, rate] for way, rate in _median_rates(ways, size).items()]
            self._emit(progress=1)
        return rows

    def pull_until_lost(self, address: str, lane: str, timeout: float) -> dict[str, Any]:
        """Reads this owner's tensors again and again, several at a time, until a read fails; says how it failed, and
        how the reads that were in flight at that moment ended."""
        buffers = self._lookup(address, "weights")
        large = sorted(buffers, key=lambda name: -buffers[name].size())[:8]
        reads: deque[Future] = deque()
        deadline, moved, moving, turn = time.monotonic() + timeout, 0, False, cycle(large)
        while time.monotonic() < deadline:
            while len(reads) < min(4, len(large)):
                name = next(turn)
                reads.append(buffers[name].read_into(self._destinations[name], lanes=_family(lane), timeout=_TIMEOUT))
            error = reads[0].exception()
            if error is not None:
                return _ending(error, reads, moved)
            moved += reads.popleft().explain().bytes
            if not moving:
                moving = True
                self._emit(event="moving")
        raise TimeoutError(f"the owner was to be lost, but reads still succeed after {timeout:g} s")

    def _lookup(self, address: str, name: str) -> dict[str, RDMABuffer]:
        if address not in self._peers:
            self._peers[address] = connect(address, timeout=20)
        found: dict[str, RDMABuffer] = self._peers[address].lookup(name, timeout=20)
        return found


def _family(lane: str) -> str:
    return lane.partition("-")[0]


def _memory_of(lane: str) -> str:
    return "shared" if lane == "shm-mapped" else "ordinary"


def _took(read: Future, lane: str) -> bool:
    report = read.explain()
    return report.lane == lane or report.bytes == 0


def _one_read(buffer: RDMABuffer, room: torch.Tensor, lane: str) -> Callable[[], object]:
    """A function that reads once. What it brings is compared here, and so is its lane."""
    room.fill_(_POISON)
    first = buffer.read_into(room, lanes=_family(lane), timeout=_TIMEOUT)
    first.get()
    if not torch.equal(room, sweep_contents(room.numel())) or not _took(first, lane):
        raise ValueError(f"a read over {lane} brought wrong bytes, or took another lane: {first.explain()}")
    return lambda: buffer.read_into(room, lanes=_family(lane), timeout=_TIMEOUT).get()


def _median_rates(ways: dict[str, Callable[[], object]], size: int) -> dict[str, float]:
    rounds = 5
    repeats = max(1, min(2000, _BATCH // rounds // size))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way in _turns(list(ways), rounds):
        began = time.perf_counter()
        for _ in range(repeats):
            ways[way]()
        seconds[way].append((time.perf_counter() - began) / repeats)
    return {way: size / statistics.median(times) for way, times in seconds.items()}


def _turns(ways: list[str], rounds: int) -> Iterator[str]:
    return (way for _ in range(rounds) for way in ways)


def _ending(error: RdmaError, reads: deque[Future], moved: int) -> dict[str, Any]:
    """The first failure, and all others: every read ends, each with an error of this kind or done before."""
    seen = time.monotonic()
    ends = [read.exception(_TIMEOUT) for read in reads]
    return {
        "seen": seen,
        "all_seen": time.monotonic(),
        "moved": moved,
        "type": type(error).__name__,
        "builtin": next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"),
        "message": str(error),
        "in_flight": len(ends),
        "ends": sorted({type(end).__name__ if end else "done" for end in ends}),
    }
