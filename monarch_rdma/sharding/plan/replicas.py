"""Which replica is read from: of the same host first, then of the same rail, and none more than its share."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from .geometry import IntArray

__all__ = ["Shares", "Topology", "share_out"]

_OVER = 0.1  # how much more than its fair share a replica may send to those that are near


@dataclass(frozen=True)
class Topology:
    """The host and the rail of each rank; ranks that are not named are near to nobody."""

    hosts: tuple[tuple[int, Hashable], ...] = ()
    rails: tuple[tuple[int, Hashable], ...] = ()

    @classmethod
    def of(cls, hosts: Mapping[int, Hashable], rails: Mapping[int, Hashable] | None = None) -> Topology:
        """`hosts`: a name for each rank's host. `rails`: for each rank the rail that is nearest to it."""
        return cls(tuple(sorted(hosts.items())), tuple(sorted((rails or {}).items())))

    @classmethod
    def regular(cls, ranks: int, per_host: int) -> Topology:
        """Hosts of `per_host` ranks in order, each with a rail of its own."""
        return cls.of({r: r // per_host for r in range(ranks)}, {r: r % per_host for r in range(ranks)})

    def tiers(self, ranks: IntArray) -> list[IntArray]:
        """For hosts, then rails: a number for each rank; equal ones are near, -1 is near to none."""
        return [_numbered(dict(labels), ranks) for labels in (self.hosts, self.rails) if labels]


def _numbered(labels: Mapping[int, Hashable], ranks: IntArray) -> IntArray:
    numbers: dict[Hashable, int] = {}
    for rank in ranks.tolist():
        if rank in labels:
            numbers.setdefault(labels[rank], len(numbers))
    return np.array([numbers[labels[rank]] if rank in labels else -1 for rank in ranks.tolist()], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Shares:
    """Row i: reader[i] gets the next amount[i] of what it needs from replica[i]. In the order of readers."""

    reader: IntArray
    replica: IntArray
    amount: IntArray

    def of_reader(self, reader: int) -> list[tuple[int, int]]:
        mine = slice(*np.searchsorted(self.reader, [reader, reader + 1]).tolist())
        return list(zip(self.replica[mine].tolist(), self.amount[mine].tolist(), strict=True))


class _Pouring:
    """Replicas that have poured out so much, and readers that still need so much."""

    def __init__(self, needed: IntArray, replicas: int, whole_below: int) -> None:
        self.needed = needed.copy()
        self.small = needed < whole_below
        self.poured = np.zeros(replicas, dtype=np.int64)
        self.rows: list[tuple[IntArray, IntArray, IntArray]] = []

    def pour(self, readers: IntArray, replicas: IntArray, most: int) -> None:
        """From these to those, level, until they have what they need or each replica has poured `most`.

        Readers' needs lie on a line one after another, what replicas give on another: where one of both ends, the next
        begins. The end of a replica's part is moved to a seam of the readers' where it would cut a small need in two.
        """
        needs = np.concatenate([[0], np.cumsum(self.needed[readers])])
        gives = np.cumsum(_levelled(self.poured[replicas], int(needs[-1]), most))
        inside = np.minimum(np.searchsorted(needs, gives, side="right") - 1, readers.size - 1)
        low, high = needs[inside], needs[inside + 1]
        nearest = np.where(gives - low < high - gives, low, high)
        gives = np.maximum.accumulate(np.where(self.small[readers[inside]], nearest, gives))
        gives = np.concatenate([[0], gives])
        cuts = np.union1d(needs[needs < gives[-1]], gives)
        begin, amount = cuts[:-1], np.diff(cuts)
        reader = readers[np.searchsorted(needs, begin, side="right") - 1]
        replica = replicas[np.searchsorted(gives, begin, side="right") - 1]
        np.subtract.at(self.needed, reader, amount)
        np.add.at(self.poured, replica, amount)
        self.rows.append((reader, replica, amount))


def share_out(
    holders: IntArray, readers: IntArray, needed: IntArray, topology: Topology | None, whole_below: int
) -> Shares:
    """Who reads how much from which of the ranks `holders`, all of which have the same.

    `readers`: ranks; `needed`: what each of them needs; needs below `whole_below` come from one replica. No replica
    sends more than a tenth above its fair share, and one need below `whole_below`.
    """
    pouring = _Pouring(needed, holders.size, whole_below)
    most = math.ceil((1 + _OVER) * int(needed.sum()) / holders.size)
    for numbers in topology.tiers(np.concatenate([holders, readers])) if topology else []:
        of_holders, of_readers = numbers[: holders.size], numbers[holders.size :]
        for number in np.intersect1d(of_holders, of_readers).tolist():
            near = np.flatnonzero((of_readers == number) & (pouring.needed > 0))
            if number >= 0 and near.size:
                pouring.pour(near, np.flatnonzero(of_holders == number), most)
    left = np.flatnonzero(pouring.needed > 0)
    if left.size:
        pouring.pour(left, np.arange(holders.size), int(needed.sum()))
    rows = [np.concatenate(column) for column in zip(*pouring.rows, strict=True)] or [np.zeros(0, dtype=np.int64)] * 3
    order = np.argsort(rows[0], kind="stable")
    return Shares(*(column[order] for column in rows))


def _levelled(loads: IntArray, total: int, most: int) -> IntArray:
    """What each gives so that all come to one level, `total` together; none beyond `most`."""
    order = np.argsort(loads, kind="stable")
    ascending = loads[order]
    below = np.cumsum(ascending)
    filled = ascending * np.arange(1, loads.size + 1) - below  # what it takes to raise all before to this one's load
    last = int(np.searchsorted(filled, total, side="right")) - 1
    level, over = divmod(total + int(below[last]), last + 1)
    gives = np.zeros_like(loads)
    gives[order[: last + 1]] = level - ascending[: last + 1]
    gives[order[:over]] += 1
    return np.minimum(gives, np.maximum(0, most - loads))
