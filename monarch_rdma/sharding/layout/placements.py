"""Placements: how one dimension of a tensor is dealt out over one dimension of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .checks import IntArray, LayoutError, natural_numbers

__all__ = [
    "SHARDING",
    "BlockCyclic",
    "GroupedShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "StridedShard",
]


@dataclass(frozen=True)
class Replicate:
    """All along this mesh dimension have the same."""


@dataclass(frozen=True)
class Partial:
    """All along this mesh dimension have a term of the same elements, yet to be reduced by `op`. Nothing can be copied
    from or to such a layout: reduce first.
    """

    op: str = "sum"


@dataclass(frozen=True)
class Shard:
    """Contiguous pieces of dimension `dim`, in the order of ranks: of ceil(n / ranks) elements, the last ones shorter
    or empty, as torch.chunk has it; or of `sizes` elements.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def deal(self, n: int, parts: int) -> tuple[IntArray, IntArray, IntArray]:
        """Part, begin and end of the pieces that n elements are cut into; ordered by part, then as the part has them.

        Together the pieces are 0 to n, each element once. LayoutError where they cannot be.
        """
        if self.sizes is None:
            begin, end = _chunks(np.array([0]), np.array([n]), parts)
            return np.arange(parts), begin.ravel(), end.ravel()
        sizes = natural_numbers(f"sizes of {self}", self.sizes)
        if len(sizes) != parts:
            raise LayoutError(f"{self} has {len(sizes)} sizes, but the mesh dimension {parts} ranks")
        ends = np.cumsum(np.array(sizes, dtype=np.int64))
        if ends[-1] != n:
            wrong = f"{n - ends[-1]} are on no rank" if ends[-1] < n else f"{ends[-1] - n} do not exist"
            raise LayoutError(f"sizes of {self} add up to {ends[-1]} of {n} elements of dimension {self.dim}: {wrong}")
        return np.arange(parts), ends - sizes, ends


@dataclass(frozen=True)
class StridedShard:
    """The dimension is cut into `split_factor` pieces, each of them is sharded, and a rank has its shard of each piece.

    What torch calls _StridedShard: in FSDP over tensor parallelism, mesh (dp, tp), the placements are
    (StridedShard(0, split_factor=tp), Shard(0)), since the tensor was sharded over tp first.
    """

    dim: int
    split_factor: int

    def deal(self, n: int, parts: int) -> tuple[IntArray, IntArray, IntArray]:
        """As Shard.deal."""
        natural_numbers(f"split_factor of {self}", [self.split_factor], least=1)
        begin, end = _chunks(np.array([0]), np.array([n]), self.split_factor)
        return _deal_each(begin.ravel(), end.ravel(), parts)


@dataclass(frozen=True)
class GroupedShard:
    """The dimension is a concatenation of groups of these sizes, and a rank has its shard of each: fused weights under
    tensor parallelism, `GroupedShard(0, (q, k, v))` or `GroupedShard(0, (gate, up))`.
    """

    dim: int
    groups: tuple[int, ...]

    def deal(self, n: int, parts: int) -> tuple[IntArray, IntArray, IntArray]:
        """As Shard.deal."""
        groups = np.array(natural_numbers(f"groups of {self}", self.groups), dtype=np.int64)
        if groups.sum() != n:
            raise LayoutError(f"groups of {self} add up to {groups.sum()}, but dimension {self.dim} has {n} elements")
        ends = np.cumsum(groups)
        return _deal_each(ends - groups, ends, parts)


@dataclass(frozen=True)
class BlockCyclic:
    """Blocks of `block` elements go round the ranks in turn, as ScaLAPACK and interleaved weights have it."""

    dim: int
    block: int

    def deal(self, n: int, parts: int) -> tuple[IntArray, IntArray, IntArray]:
        """As Shard.deal."""
        natural_numbers(f"block of {self}", [self.block], least=1)
        begin = np.arange(0, n, self.block, dtype=np.int64)
        part = np.arange(begin.size) % parts
        order = np.argsort(part, kind="stable")
        return part[order], begin[order], np.minimum(begin + self.block, n)[order]


Sharding: TypeAlias = "Shard | StridedShard | GroupedShard | BlockCyclic"
Placement: TypeAlias = "Sharding | Replicate | Partial"
SHARDING = (Shard, StridedShard, GroupedShard, BlockCyclic)


def _chunks(begin: IntArray, end: IntArray, parts: int) -> tuple[IntArray, IntArray]:
    """Each range cut as torch.chunk cuts it: begins and ends, (ranges, parts)."""
    sizes = (end - begin)[:, None]
    edges = np.minimum(np.arange(parts + 1) * -(-sizes // parts), sizes) + begin[:, None]
    return edges[:, :-1], edges[:, 1:]


def _deal_each(begin: IntArray, end: IntArray, parts: int) -> tuple[IntArray, IntArray, IntArray]:
    """Each range is sharded; a part has its shards one after another."""
    low, high = _chunks(begin, end, parts)
    return np.repeat(np.arange(parts), begin.size), low.T.ravel(), high.T.ravel()
