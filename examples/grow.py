"""A job grows from four ranks to six: each takes its new part of the weights from whoever has it, without a checkpoint.

python examples/grow.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from monarch_rdma.actor import Actor, current_rank, endpoint, this_host
from monarch_rdma.sharding import Layout, Mesh, Reader, Shard, publish
from monarch_rdma.sharding.offer import Offer

SHAPE = (1200, 1000)


def layout(ranks: int) -> Layout:
    return Layout(SHAPE, Mesh({"dp": ranks}), [Shard(0)])


class Worker(Actor):
    """One rank of the job; the first of its mesh is rank `first`."""

    def __init__(self, first: int) -> None:
        self.rank = first + current_rank().rank
        self.part = torch.zeros(0)

    @endpoint
    def begin(self, ranks: int) -> Offer:
        """Makes this rank's rows and offers them."""
        rows = layout(ranks).part(self.rank).boxes[0]
        self.part = torch.arange(rows.start[0], rows.start[0] + rows.size[0]).float()[:, None].expand(rows.size).clone()
        self.weights = publish({"w": self.part}, "w", layouts={"w": layout(ranks)}, rank=self.rank, ranks=ranks)
        return self.weights.offer

    @endpoint
    def become(self, ranks: int, offers: Sequence[Offer]) -> int:
        """Takes this rank's part of the wider layout; returns the bytes that came from other ranks."""
        wider = layout(ranks)
        fresh = torch.zeros(wider.part(self.rank).shape)
        options = {"layouts": {"w": wider}, "rank": self.rank, "ranks": ranks, "same_ranks": True}
        reader = Reader(offers, {"w": fresh}, **options)  # type: ignore[arg-type]
        reader.fetch()
        self.part = fresh
        return reader.plan.bytes_moved

    @endpoint
    def is_right(self, ranks: int) -> bool:
        first = layout(ranks).part(self.rank).boxes[0].start[0]
        return bool((self.part[:, 0] == first + torch.arange(len(self.part))).all())


def main() -> int:
    host = this_host()
    with host.spawn_procs({"dp": 4}, threads=1) as four, host.spawn_procs({"dp": 2}, threads=1) as two:
        old, new = four.spawn("old", Worker, 0), two.spawn("new", Worker, 4)
        offers = old.begin.call(4).get().values()
        calls = [mesh.become.call(6, offers) for mesh in (old, new)]
        moved = [count for call in calls for count in call.get().values()]
        right = all(one for mesh in (old, new) for one in mesh.is_right.call(6).get().values())
    print(f"bytes that each rank read from others: {moved}")
    print(f"{sum(moved)} of {4 * SHAPE[0] * SHAPE[1]} bytes moved; every rank has its part: {right}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
