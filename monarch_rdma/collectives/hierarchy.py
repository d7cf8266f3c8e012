"""Collectives of members on several hosts, in two levels: what crosses the network crosses it once for each host.

The members on one host form a group in its memory ("local"). The first of each host form a group across hosts, so do
the second of each, and so on ("across"): the members of a host share its work on the network. An all_reduce is a
reduce_scatter on each host, an all_reduce of each part across hosts, and an all_gather on each host.

Where hosts have different numbers of members, as many on each as the smallest has carry what crosses: the member in
place p is served by the carrier in place p modulo their number. So each group across hosts has a member on all of them.

Whoever meets a failure in one of its groups makes all of them fail, that of all members first, and so on through the
grid: all end with what the group of all members says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

from .. import config
from ..errors import PeerLost, RdmaError
from ..rdma import group as core
from ..rdma.engine import Engine
from ..rdma.memory import memory_of
from .algorithms import chooser
from .guard import Guard
from .meeting import meet
from .table import row_for

__all__ = ["Hierarchy", "hierarchy_of", "hosts_of"]

# Bytes of an element, by its number in enum mr_dtype.
_ITEM = (1, 1, 2, 4, 8, 4, 8, 2, 2, 1, 1, 1, 1, 1)
_NOTICED = 2.0  # seconds after which a loss that one group has noticed must have been noticed by the other one
_WORD = 8  # bytes
_NOTHING: core.Block = (0, 0)
_SUM, _AVG = core.REDUCTIONS["sum"], core.REDUCTIONS["avg"]
Blocks = Sequence[core.Block]


def hierarchy_of(
    engine: Engine, whole: core.CoreGroup, members: Sequence[str], name: str, timeout: float
) -> Hierarchy | None:
    """All members call it when `whole` has met, which then chooses its algorithms. None: on one host, or one on each.

    Raises as `meet`; where a member is lost meanwhile `whole` fails because of it.
    """
    deadline = time.monotonic() + timeout
    hosts, least, has_levels = hosts_of(whole, timeout)
    whole.choose = chooser(whole.size, is_spread=len(hosts) > 1)
    if not has_levels or len(hosts) == 1 or all(len(host) == 1 for host in hosts):
        return None
    ours = next(host for host in hosts if whole.rank in host)
    place = ours.index(whole.rank)
    met: list[core.CoreGroup] = []
    try:
        for level, ranks in (("local", ours), ("across", [host[place] for host in hosts if place < len(host)])):
            if level == "across" and place >= min(map(len, hosts)):
                continue
            left = deadline - time.monotonic()
            met.append(meet(engine, [members[rank] for rank in ranks], f"{name}/{level}", left))
    except BaseException:
        for group in met:
            group.close()
        raise
    for across in met[1:]:
        across.choose = chooser(across.size, is_spread=True)
    return Hierarchy(whole, hosts, *met, least=least)


def hosts_of(whole: core.CoreGroup, timeout: float) -> tuple[list[list[int]], int, bool]:
    """The ranks on each host, in order, from how many bytes on two levels are worth it, and whether all members want
    them: the same on all members.
    """
    size, rank = whole.size, whole.rank
    mine = bytearray(each == rank or whole.is_on_this_host(each, timeout) for each in range(size))
    word = row_for(size).two_level_bytes.to_bytes(_WORD, "little") + bytes([bool(config.get("collective_hierarchy"))])
    given, rows = mine + word, [bytearray(size + len(word)) for _ in range(size)]
    whole.run(core.ALL_GATHER, [_block(given)], [_block(row) for row in rows], timeout=timeout)
    least = max(int.from_bytes(row[size:-1], "little") for row in rows)
    has_levels = all(row[-1] for row in rows)
    rows = [row[:size] for row in rows]
    hosts = [[each for each in range(size) if row[each]] for rank, row in enumerate(rows) if row.find(1) == rank]
    agreed = sorted(chain.from_iterable(hosts)) == list(range(size)) and all(
        rows[rank] == rows[host[0]] for host in hosts for rank in host
    )
    return hosts if agreed else [[each] for each in range(size)], least, has_levels


class Hierarchy:
    """Runs what is large enough in two levels, all else in the group of all members. Called as that is."""

    def __init__(
        self,
        whole: core.CoreGroup,
        hosts: list[list[int]],
        local: core.CoreGroup,
        across: core.CoreGroup | None = None,
        *,
        least: int,
    ) -> None:
        """`least`: bytes of all members together from which on two levels are worth it."""
        self.whole, self.hosts = whole, hosts
        self._local, self._across = local, across
        self._host = next(host for host in hosts if whole.rank in host)
        self._width = min(map(len, hosts))  # carriers on each host
        self._turns = range(0, max(map(len, hosts)), self._width)
        self._levels = (local,) if across is None else (local, across)
        self._ranks = {local: self._host}
        if across is not None:
            self._ranks[across] = [host[local.rank] for host in hosts]
        self._least = least
        self._guard = Guard(whole, self._end_levels)
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
        algorithm: int | None = None,
        timeout: float = -1.0,
    ) -> None:
        """As CoreGroup.run; in two levels `algorithm` is for what crosses."""
        options = {"root": root, "dtype": dtype, "reduction": reduction}
        way = self._ways.get(kind)
        if way is None or self._bytes(kind, inputs, outputs) < self._least:
            self.whole.run(kind, inputs, outputs, algorithm=algorithm, timeout=timeout, **options)
            return
        if (failure := self.whole.failure) is not None:
            raise failure
        deadline = time.monotonic() + timeout if timeout >= 0 else None

        def step(group: core.CoreGroup, kind: int, inputs: Blocks, outputs: Blocks, root: int = 0) -> None:
            left = max(0.0, deadline - time.monotonic()) if deadline is not None else -1.0
            # An average is divided by the number of all members at once, on the first level.
            op = _SUM if reduction == _AVG and group is self._across else reduction
            options = {"root": root, "dtype": dtype, "reduction": op, "divisor": self.whole.size}
            crossing = algorithm if group is self._across else None
            try:
                group.run(kind, inputs, outputs, algorithm=crossing, timeout=left, **options)
            except RdmaError as error:
                raise self._failed(group, error) from error
            except BaseException:
                self.abort("a call was interrupted")
                raise

        with self._guard.watching():
            way(step, inputs, outputs, root=root, item=_ITEM[dtype] if dtype < len(_ITEM) else 1)

    def abort(self, reason: str) -> None:
        for group in (self.whole, *self._levels):
            group.abort(reason)

    def _end_levels(self) -> None:
        for group in self._levels:
            group.abort("the group of all members has failed")

    def close(self) -> None:
        self._guard.close()
        for group in self._levels:
            group.close()

    # --- the ways; all members choose the same, by sizes that all know

    def _bytes(self, kind: int, inputs: Blocks, outputs: Blocks) -> int:
        if kind == core.REDUCE_SCATTER:
            return sum(size for _, size in inputs)
        return self.whole.size * max(size for _, size in [*inputs, *outputs])

    def _all_reduce(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        given = self._padded(_parts(inputs[0], self._width, item))
        to = self._padded(_parts(outputs[0], self._width, item))
        mine = to[self._local.rank]
        step(self._local, core.REDUCE_SCATTER, given, [mine])
        if self._across is not None:
            step(self._across, core.ALL_REDUCE, [mine], [mine])
        step(self._local, core.ALL_GATHER, [mine], to)

    def _reduce_scatter(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        kept: list[bytearray] = []
        partial: dict[int, core.Block] = {}  # of ranks that this member carries for, on all hosts
        for turn in self._turns:
            for host in self.hosts:
                carried = host[turn : turn + self._width]
                mine = _at(carried, self._local.rank)
                if mine is not None:
                    kept.append(bytearray(inputs[mine][1]))
                    partial[mine] = _block(kept[-1])
                given = self._padded([inputs[rank] for rank in carried])
                step(self._local, core.REDUCE_SCATTER, given, [_NOTHING if mine is None else partial[mine]])
        results: dict[int, core.Block] = {}  # of ranks on this host, by their place
        if self._across is not None:
            for turn in self._turns:
                column = [_at(host, turn + self._local.rank) for host in self.hosts]
                place = turn + self._local.rank
                mine = _at(self._host, place)
                if turn == 0:
                    results[place] = outputs[0]
                elif mine is not None:
                    kept.append(bytearray(inputs[mine][1]))
                    results[place] = _block(kept[-1])
                given = [_NOTHING if rank is None else partial[rank] for rank in column]
                step(self._across, core.REDUCE_SCATTER, given, [results.get(place, _NOTHING)])
        self._hand_over(step, {place: block for place, block in results.items() if place >= self._width}, outputs[0])

    def _hand_over(self, step: Any, results: dict[int, core.Block], output: core.Block) -> None:
        """From those who carry to those on this host for whom they do, by place."""
        size, place = self._local.size, self._local.rank
        if size == self._width:
            return
        to = [_NOTHING] * size
        if place >= self._width:
            to[place % self._width] = output
        step(self._local, core.ALL_TO_ALL, [results.get(each, _NOTHING) for each in range(size)], to)

    def _all_gather(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        size, place = self._local.size, self._local.rank
        if size > self._width:  # what others carry for us
            given, to = [_NOTHING] * size, [_NOTHING] * size
            if place >= self._width:
                given[place % self._width] = inputs[0]
            else:
                for each in range(place + self._width, size, self._width):
                    to[each] = outputs[self._host[each]]
            step(self._local, core.ALL_TO_ALL, given, to)
        if self._across is not None:
            for turn in self._turns:
                column = [_at(host, turn + place) for host in self.hosts]
                mine = _at(self._host, turn + place)
                block = inputs[0] if turn == 0 else _NOTHING if mine is None else outputs[mine]
                to = [_NOTHING if rank is None else outputs[rank] for rank in column]
                step(self._across, core.ALL_GATHER, [block], to)
        for turn in self._turns:
            for host in self.hosts:
                to = self._padded([outputs[rank] for rank in host[turn : turn + self._width]])
                step(self._local, core.ALL_GATHER, [to[place]], to)

    def _broadcast(self, step: Any, inputs: Blocks, outputs: Blocks, *, root: int, item: int) -> None:
        memory = (inputs or outputs)[0]
        height = next(i for i, host in enumerate(self.hosts) if root in host)
        is_source = root in self._host
        if is_source:
            _from_one(step, self._local, memory, self._host.index(root))
        parts = self._padded(_parts(memory, self._width, item))
        mine = parts[self._local.rank]
        if self._across is not None:
            _from_one(step, self._across, mine, height)
        if not is_source:
            step(self._local, core.ALL_GATHER, [mine], parts)

    def _padded(self, blocks: Blocks) -> list[core.Block]:
        """One for each member on this host: those beyond the carriers have none."""
        return [*blocks, *[_NOTHING] * (self._local.size - len(blocks))]

    def _failed(self, group: core.CoreGroup, error: RdmaError) -> Exception:
        """What has failed in one group is told in all: first in that of all members, which the others ask."""
        rank = group.failed_rank
        if rank is None:
            return error  # a bad argument: nothing has begun
        whose = self._ranks[group][rank]
        if isinstance(error, PeerLost):
            # The group of all members is about to notice by itself; but one that has left does not make it fail.
            deadline = time.monotonic() + _NOTICED
            while self.whole.failed_rank is None and time.monotonic() < deadline:
                if self.whole.is_lost(whose):
                    self.whole.lack(whose)
                else:
                    time.sleep(0.001)
        is_first = self.whole.failed_rank is None
        for each in (self.whole, *self._levels) if is_first else self._levels:
            each.abort(f"{type(error).__name__} because of rank {whose}")
        peer = self.whole.names[whose]
        told = type(error)(f"rank {whose} ({peer}): {error}", peer=peer, operation=error.operation)
        return told if is_first else self.whole.failure or told


def _from_one(step: Any, group: core.CoreGroup, memory: core.Block, root: int) -> None:
    blocks = ([memory], []) if group.rank == root else ([], [memory])
    step(group, core.BROADCAST, *blocks, root=root)


def _at(ranks: Sequence[int], place: int) -> int | None:
    return ranks[place] if place < len(ranks) else None


def _block(memory: bytearray) -> core.Block:
    if not memory:
        return _NOTHING
    described = memory_of(memory, "memory")
    return described.address, described.view.nbytes


def _parts(memory: core.Block, count: int, item: int) -> list[core.Block]:
    """As many as equal as can be, of whole elements."""
    address, size = memory
    elements = size // item
    ends = [elements * i // count * item for i in range(count + 1)]
    return [(address + begin, end - begin) for begin, end in pairwise(ends)]
