"""What a whole cluster moves: bytes and messages of each link between two ranks, and of each rank."""

from __future__ import annotations

import numpy as np

from .geometry import IntArray
from .route import Flows

__all__ = ["Statistics"]


class Statistics:
    """Made by `make_statistics`. Takes 8 bytes for each pair of ranks."""

    def __init__(self) -> None:
        self._bytes: IntArray = np.zeros((0, 0), dtype=np.int64)  # from a rank, to a rank
        self.num_copies = 0  # strided reads of other ranks; of those shared by several replicas one for each
        self.messages = 0  # contiguous pieces that these are made of; to within one for each share of a replica

    def add(self, flows: Flows, itemsize: int, times: int) -> None:
        """Adds what one geometry moves, as often as there are tensors of it."""
        most = max(self._bytes.shape[0], 1 + int(flows.source.max(initial=-1)), 1 + int(flows.target.max(initial=-1)))
        if most > self._bytes.shape[0]:
            self._bytes = np.pad(self._bytes, (0, most - self._bytes.shape[0]))
        np.add.at(self._bytes, (flows.source, flows.target), flows.elements * (itemsize * times))
        away = flows.source != flows.target
        self.num_copies += int(flows.copies[away].sum()) * times
        self.messages += int(flows.messages[away].sum()) * times

    @property
    def bytes_here(self) -> int:
        """Bytes that are where they have to be already."""
        return int(self._bytes.trace())

    @property
    def bytes_moved(self) -> int:
        """Bytes that go from one rank to another."""
        return int(self._bytes.sum()) - self.bytes_here

    def links(self) -> tuple[IntArray, IntArray, IntArray]:
        """Source, target and bytes of each link between two ranks that is used."""
        source, target = np.nonzero(self._bytes)
        away = source != target
        source, target = source[away], target[away]
        return source, target, self._bytes[source, target]

    @property
    def busiest_link(self) -> tuple[int, int, int]:
        """Source, target and bytes of the link that moves the most; (-1, -1, 0) where none moves anything."""
        source, target, moved = self.links()
        if not moved.size:
            return -1, -1, 0
        most = int(moved.argmax())
        return int(source[most]), int(target[most]), int(moved[most])

    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends to others, by rank."""
        return self._of_ranks(0)

    def received(self) -> dict[int, int]:
        """Bytes that each rank gets from others, by rank."""
        return self._of_ranks(1)

    def _of_ranks(self, end: int) -> dict[int, int]:
        totals = self._bytes.sum(axis=1 - end) - self._bytes.diagonal()
        return {rank: int(totals[rank]) for rank in np.flatnonzero(totals).tolist()}

    def table(self) -> str:
        """The figures, one a line."""
        sent, received = self.sent(), self.received()
        source, target, moved = self.busiest_link
        rows = [
            ("bytes moved", f"{self.bytes_moved:,}"),
            ("bytes in place", f"{self.bytes_here:,}"),
            ("copies", f"{self.num_copies:,}"),
            ("messages", f"{self.messages:,}"),
            ("links", f"{self.links()[0].size:,}"),
            ("busiest link", f"{source} -> {target}: {moved:,} bytes"),
            ("sent by a rank", _spread(sent)),
            ("received by a rank", _spread(received)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _spread(of_ranks: dict[int, int]) -> str:
    if not of_ranks:
        return "nothing"
    amounts = list(of_ranks.values())
    mean = sum(amounts) // len(amounts)
    return f"{mean:,} bytes on average, {max(amounts):,} at most (rank {max(of_ranks, key=of_ranks.__getitem__)})"
