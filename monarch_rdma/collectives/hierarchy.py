"""Collectives of members on several hosts, in two levels: what crosses the network crosses it once for each host.

The members on one host form a group in its memory ("local"). The first of each host form a group across hosts, so do
the second of each, and so on ("across"): the members of a host share its work on the network. An all_reduce is a
reduce_scatter on each host, an all_reduce of each part across hosts, and an all_gather on each host.

Whoever meets a failure in one of its groups makes all of them fail, that of all members first, and so on through the
grid: all end with what the group of all members says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

from .. import config
from ..errors import PeerLost, RdmaError
from ..rdma import group as core
from ..rdma.engine import Engine
from ..rdma.memory import memory_of
from .meeting import meet
from .table import row_for

__all__ = ["Hierarchy", "hierarchy_of", "hosts_of"]

# Bytes of an element, by its number in enum mr_dtype.
_ITEM = (1, 1, 2, 4, 8, 4, 8, 2, 2, 1, 1, 1, 1, 1)
_NOTICED = 2.0  # seconds after which a loss that one group has noticed must have been noticed by the other one
_LOOK = 0.02  # seconds between looks of the guard, while a call runs
_WORD = 8  # bytes
Blocks = Sequence[core.Block]


def hierarchy_of(
    engine: Engine, whole: core.CoreGroup, members: Sequence[str], name: str, timeout: float
) -> Hierarchy | None:
    """All members call it when `whole` has met. None: on one host, or not as many on each, or one on each.

    Raises as `meet`; where a member is lost meanwhile `whole` fails because of it.
    """
    deadline = time.monotonic() + timeout
    hosts, least = hosts_of(whole, timeout)
    height, width = len(hosts), len(hosts[0])
    if height == 1 or width == 1 or any(len(host) != width for host in hosts):
        return None
    ours = next(host for host in hosts if whole.rank in host)
    column = [host[ours.index(whole.rank)] for host in hosts]
    met: list[core.CoreGroup] = []
    try:
        for level, ranks in (("local", ours), ("across", column)):
            left = deadline - time.monotonic()
            met.append(meet(engine, [members[rank] for rank in ranks], f"{name}/{level}", left))
    except BaseException:
        for group in met:
            group.close()
        raise
    return Hierarchy(whole, hosts, *met, least=least)


def hosts_of(whole: core.CoreGroup, timeout: float) -> tuple[list[list[int]], int]:
    """The ranks on each host, in order, and from how many bytes on two levels are worth it: the same on all members.

    Each rank on its own where one of them wants it so.
    """
    size, rank = whole.size, whole.rank
    mine, word = bytearray(size), row_for(size).two_level_bytes.to_bytes(_WORD, "little")
    if config.get("collective_hierarchy"):
        mine[:] = (each == rank or whole.is_on_this_host(each, timeout) for each in range(size))
    given, rows = mine + word, [bytearray(size + _WORD) for _ in range(size)]
    whole.run(core.ALL_GATHER, [_block(given)], [_block(row) for row in rows], timeout=timeout)
    least = max(int.from_bytes(row[size:], "little") for row in rows)
    rows = [row[:size] for row in rows]
    hosts = [[each for each in range(size) if row[each]] for rank, row in enumerate(rows) if row.find(1) == rank]
    agreed = sorted(chain.from_iterable(hosts)) == list(range(size)) and all(
        rows[rank] == rows[host[0]] for host in hosts for rank in host
    )
    return hosts if agreed else [[each] for each in range(size)], least


class Hierarchy:
    """Runs what is large enough in two levels, all else in the group of all members. Called as that is."""

    def __init__(
        self,
        whole: core.CoreGroup,
        hosts: list[list[int]],
        local: core.CoreGroup,
        across: core.CoreGroup,
        *,
        least: int,
    ) -> None:
        """`least`: bytes of all members together from which on two levels are worth it."""
        self.whole, self.hosts = whole, hosts
        self._local, self._across = local, across
        self._ranks = {
            local: next(host for host in hosts if whole.rank in host),
            across: [host[local.rank] for host in hosts],
        }
        self._least = least
        self._guard = _Guard(whole, (local, across))
        self._ways: dict[int, Callable[..., None]] = {
            core.ALL_REDUCE: self._all_reduce,
            core.REDUCE_SCATTER: self._reduce_scatter,
            core.ALL_GATHER: self._all_gather,
            core.BROADCAST: self._broadcast,
        }

    def run(
        self,
        kind: int,
        inputs: Blocks = (),
        outputs: Blocks = (),
        *,
        root: int = 0,
        dtype: int = 0,
        reduction: int = 0,
        timeout: float = -1.0,
    ) -> None:
        """As CoreGroup.run."""
        options = {"root": root, "dtype": dtype, "reduction": reduction}
        way = self._ways.get(kind)
        if way is None or self._bytes(kind, inputs, outputs) < self._least:
            self.whole.run(kind, inputs, outputs, timeout=timeout, **options)
            return
        if (failure := self.whole.failure) is not None:
            raise failure
        deadline = time.monotonic() + timeout if timeout >= 0 else None

        def step(group: core.CoreGroup, kind: int, inputs: Blocks, outputs: Blocks, root: int = 0) -> None:
            left = max(0.0, deadline - time.monotonic()) if deadline is not None else -1.0
            try:
                group.run(kind, inputs, outputs, root=root, dtype=dtype, reduction=reduction, timeout=left)
            except RdmaError as error:
                raise self._failed(group, error) from error
            except BaseException:
                self.abort("a call was interrupted")
                raise

        with self._guard:
            way(step, inputs, outputs, root=root, item=_ITEM[dtype] if dtype < len(_ITEM) else 1)

    def abort(self, reason: str) -> None:
        for group in (self.whole, self._local, self._across):
            group.abort(reason)

    def close(self) -> None:
        self._guard.close()
        for group in (self._local, self._across):
            group.close()

    # --- the ways; all members choose the same, by sizes that all know

    def _bytes(self, kind: int, inputs: Blocks, outputs: Blocks) -> int:
        if kind == core.REDUCE_SCATTER:
            return sum(size for _, size in inputs)
        return self.whole.size * max(size for _, size in [*inputs, *outputs])

    def _all_reduce(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        given, to = _parts(inputs[0], self._local.size, item), _parts(outputs[0], self._local.size, item)
        mine = to[self._local.rank]
        step(self._local, core.REDUCE_SCATTER, given, [mine])
        step(self._across, core.ALL_REDUCE, [mine], [mine])
        step(self._local, core.ALL_GATHER, [mine], to)

    def _reduce_scatter(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        column = self._ranks[self._across]
        kept = [bytearray(inputs[rank][1]) for rank in column]
        partial = [_block(each) for each in kept]
        for host, mine in zip(self.hosts, partial, strict=True):
            step(self._local, core.REDUCE_SCATTER, [inputs[rank] for rank in host], [mine])
        step(self._across, core.REDUCE_SCATTER, partial, outputs)

    def _all_gather(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        column = self._ranks[self._across]
        step(self._across, core.ALL_GATHER, inputs, [outputs[rank] for rank in column])
        for host, rank in zip(self.hosts, column, strict=True):
            step(self._local, core.ALL_GATHER, [outputs[rank]], [outputs[each] for each in host])

    def _broadcast(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        height, place = next((i, host.index(root)) for i, host in enumerate(self.hosts) if root in host)
        if self._local.rank == place:
            step(self._across, core.BROADCAST, inputs, outputs, root=height)
            step(self._local, core.BROADCAST, inputs or outputs, [], root=place)
        else:
            step(self._local, core.BROADCAST, [], outputs, root=place)

    def _failed(self, group: core.CoreGroup, error: RdmaError) -> Exception:
        """What has failed in one group is told in all: first in that of all members, which the others ask."""
        rank = group.failed_rank
        if rank is None:
            return error  # a bad argument: nothing has begun
        whose = self._ranks[group][rank]
        if isinstance(error, PeerLost):  # the group of all members is about to notice by itself
            deadline = time.monotonic() + _NOTICED
            while self.whole.failed_rank is None and time.monotonic() < deadline:
                time.sleep(0.001)
        is_first = self.whole.failed_rank is None
        self.abort(f"{type(error).__name__} because of rank {whose}")
        peer = self.whole.names[whose]
        told = type(error)(f"rank {whose} ({peer}): {error}", peer=peer, operation=error.operation)
        return told if is_first else self.whole.failure or told


class _Guard:
    """While a call runs in a level: ends it where the group of all members fails. Nobody who waits there may know."""

    def __init__(self, whole: core.CoreGroup, levels: Sequence[core.CoreGroup]) -> None:
        self._whole, self._levels = whole, levels
        self._changed = threading.Condition()
        self._is_running = self._is_closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._changed:
            self._is_running = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="monarch_rdma-hierarchy", daemon=True)
                self._thread.start()
            self._changed.notify()

    def __exit__(self, *_: object) -> None:
        self._is_running = False

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _serve(self) -> None:
        while not self._is_closed:
            if self._whole.failed_rank is not None:
                for group in self._levels:
                    group.abort("the group of all members has failed")
                return
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(_LOOK if self._is_running else None)


def _block(memory: bytearray) -> core.Block:
    described = memory_of(memory, "memory")
    return described.address, described.view.nbytes


def _parts(memory: core.Block, count: int, item: int) -> list[core.Block]:
    """As many as equal as can be, of whole elements."""
    address, size = memory
    elements = size // item
    ends = [elements * i // count * item for i in range(count + 1)]
    return [(address + begin, end - begin) for begin, end in pairwise(ends)]
