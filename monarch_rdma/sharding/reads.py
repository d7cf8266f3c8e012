"""Copies of a plan as reads: which bytes of a remote buffer go where in a local tensor, prepared once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from ..errors import ConfigError
from ..rdma import BlockSums, Future, RDMABuffer
from ..rdma.memory import memory_of
from ..rdma.view import contiguous_strides
from .plan import Copies, TensorCopies

__all__ = ["Read", "Run", "Staging", "Strided", "Target", "ends_of", "part_of", "reads_of", "rows_of"]


@dataclass(frozen=True)
class Strided:
    """Elements of a tensor as as_strided has them: shape, strides and offset in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def narrowed(self, dim: int, low: int, n: int) -> Strided:
        """Of one dimension n elements from `low` on."""
        shape = (*self.shape[:dim], n, *self.shape[dim + 1 :])
        return Strided(shape, self.strides, self.offset + low * self.strides[dim])

    @property
    def end(self) -> int:
        """One more than the last of them."""
        return self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True

    def permuted(self, order: Sequence[int]) -> Strided:
        return Strided(tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.offset)


class Target:
    """A tensor that is read into, and where its memory is."""

    def __init__(self, tensor: torch.Tensor, argument: str) -> None:
        """ConfigError naming `argument` where it has no memory that can be reached."""
        self.tensor = tensor
        self.memory = memory_of(tensor, argument, devices=True)
        self.strides = tensor.stride()
        self.is_contiguous = tensor.is_contiguous()


@dataclass(frozen=True)
class Run:
    """Bytes that are contiguous here and at the owner: `first` of its tensor and those that follow, at `here` in ours.
    `sums`: their checksums, where these can be made on the way.
    """

    first: int
    nbytes: int
    here: int
    sums: BlockSums | None


@dataclass(eq=False)
class Read:
    """One read from one peer: straight into the target, or into staging memory that is unpacked afterwards."""

    rank: int
    tensor: TensorCopies
    copies: Copies  # the one row
    nbytes: int
    start: Callable[[float | None], Future]
    unpack: Callable[[], Any] | None = None
    slot: int = -1  # of the staging memory
    run: Run | None = None  # where it is one


def strided(strides: Sequence[int], at: Any, step: Any, size: Any, count: Any) -> Strided:
    """One row of copies in a tensor of these strides: two dimensions for each that has several pieces."""
    shape: list[int] = []
    steps: list[int] = []
    for stride, piece, n, pieces in zip(strides, step.tolist(), size.tolist(), count.tolist(), strict=True):
        if pieces > 1:
            shape.append(pieces)
            steps.append(piece * stride)
        shape.append(n)
        steps.append(stride)
    return Strided(tuple(shape), tuple(steps), sum(a * s for a, s in zip(at.tolist(), strides, strict=True)))


def ends_of(one: Copies, source_strides: Sequence[int], target_strides: Sequence[int]) -> tuple[Strided, Strided]:
    """One row of copies in the source's and in the target's local tensor, both in the source's order of axes."""
    row = one.size[0], one.count[0]
    strides = [source_strides[axis] for axis in one.permutation]
    there = strided(strides, one.source_at[0], one.source_step[0], *row)
    here = strided(target_strides, one.target_at[0], one.target_step[0], *row)
    order = _pair_order(one)
    return there.permuted(order), here.permuted(order)


def part_of(tensor: torch.Tensor, part: Strided) -> torch.Tensor:
    """These elements of a tensor, as a view."""
    return tensor.as_strided(part.shape, part.strides, tensor.storage_offset() + part.offset)


class Staging:
    """Slots of memory for reads that have to be unpacked: those of another dtype or order of axes."""

    def __init__(self, nbytes: int, slots: int) -> None:
        self._nbytes = nbytes
        self._num_slots = slots
        self._memory: list[torch.Tensor] | None = None
        self.slot_bytes = nbytes // slots
        self._next = 0

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, torch.Tensor]:
        """The next slot in turn, and a tensor in it."""
        if self._memory is None:
            self._memory = [torch.empty(self.slot_bytes, dtype=torch.uint8) for _ in range(self._num_slots)]
        slot, self._next = self._next, (self._next + 1) % self._num_slots
        size = math.prod(shape) * dtype.itemsize
        return slot, self._memory[slot][:size].view(dtype).view(tuple(shape))


def reads_of(
    tensor: TensorCopies,
    copies: Copies,
    buffers: Mapping[int, Mapping[str, RDMABuffer]],
    target: Target,
    staging: Staging,
    most_bytes: int | None = None,
    *,
    bulk: bool = False,
    sums_of: int | None = None,
) -> Iterator[Read]:
    """The reads that carry out these copies, of at most so many bytes where it is said. `bulk`: see prepare_read.
    `sums_of`: reads of one run each have checksums made, of blocks of so many bytes of the owner's tensor.
    ConfigError where a rank's buffer is missing or not what was planned.
    """
    is_staged = tensor.is_cast or not copies.is_in_order
    dtype: torch.dtype = getattr(torch, tensor.source_dtype)
    checked = {rank: _buffer(buffers, rank, tensor, copies) for rank in copies.ranks}
    limits = [limit for limit in (most_bytes, staging.slot_bytes if is_staged else None) if limit is not None]
    laid_out = tuple((rank, buffer.shape, buffer.strides) for rank, buffer in checked.items())
    for cut in _cuts(copies, min(limits) // dtype.itemsize if limits else None, laid_out, target.strides):
        buffer, there, here = checked[cut.rank], cut.there, cut.here
        nbytes = cut.elements * dtype.itemsize
        source = buffer.as_strided(there.shape, there.strides, there.offset)
        if not is_staged:
            run = None if sums_of is None else _run(cut, buffer, target, sums_of)
            memory = target.memory.part(here.shape, here.strides, here.offset)
            start = source.prepare_read(memory, bulk=bulk, sums=run.sums if run else None)
            yield Read(cut.rank, tensor, cut.one, nbytes, start, run=run)
            continue
        slot, slot_memory = staging.take(dtype, there.shape)
        unpack = partial(part_of(target.tensor, here).copy_, slot_memory)
        yield Read(cut.rank, tensor, cut.one, nbytes, source.prepare_read(slot_memory), unpack, slot)


@dataclass(frozen=True)
class _Cut:
    """One row of copies, by its ends. `run`: where it is one by the order of the owner's elements, the first one there,
    how many there are, and the first one here.
    """

    one: Copies
    rank: int
    there: Strided
    here: Strided
    elements: int
    run: tuple[int, int, int] | None


@lru_cache(256)  # many tensors of a model are alike, and have the same copies
def _cuts(
    copies: Copies,
    most: int | None,
    laid_out: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...],
    target_strides: tuple[int, ...],
) -> tuple[_Cut, ...]:
    """Rows of at most so many elements. `laid_out`: shape and strides of what each rank has."""
    ranks = {rank: (strides, contiguous_strides(shape, 1)) for rank, shape, strides in laid_out}
    cuts = []
    for one in rows_of(copies, most):
        rank = int(one.source[0])
        strides, in_order = ranks[rank]
        ends = ends_of(one, strides, target_strides)
        there, here = ends if strides == in_order else ends_of(one, in_order, target_strides)
        is_run = there.is_run and here.is_run
        elements = math.prod(there.shape)
        run = (there.offset, elements, here.offset) if is_run else None
        cuts.append(_Cut(one, rank, *ends, elements, run))
    return tuple(cuts)


def _run(cut: _Cut, buffer: RDMABuffer, target: Target, block_bytes: int) -> Run | None:
    """A cut's run: in the owner's memory its elements may lie in another order."""
    if cut.run is None or not target.is_contiguous:
        return None
    first, nbytes, here = (n * target.memory.view.itemsize for n in cut.run)
    is_plain = not target.memory.on_device and buffer.is_contiguous
    is_summed = is_plain and BlockSums.fits(first, nbytes, buffer.size())
    return Run(first, nbytes, here, BlockSums(first, nbytes, buffer.size(), block_bytes) if is_summed else None)


def _buffer(
    buffers: Mapping[int, Mapping[str, RDMABuffer]], rank: int, tensor: TensorCopies, copies: Copies
) -> RDMABuffer:
    try:
        buffer = buffers[rank][tensor.source]
    except KeyError:
        raise ConfigError(f"rank {rank} has published no {tensor.source!r}, but the plan reads it there") from None
    needed = _extent(copies, rank)
    if len(buffer.shape) != len(needed) or any(n > have for n, have in zip(needed, buffer.shape, strict=True)):
        raise ConfigError(f"{tensor.source!r} of rank {rank} has shape {buffer.shape}, but the plan reads {needed}")
    if (name := str(buffer.dtype).removeprefix("torch.")) != tensor.source_dtype:
        raise ConfigError(f"{tensor.source!r} of rank {rank} is {name}, but the plan has {tensor.source_dtype}")
    return buffer


@lru_cache(256)
def _extent(copies: Copies, rank: int) -> tuple[int, ...]:
    return copies.source_extent(rank)


def _pair_order(one: Copies) -> list[int]:
    """The source's axes, in order, among the dimensions that `strided` makes."""
    places: list[list[int]] = []
    for pieces in one.count[0].tolist():
        before = sum(map(len, places))
        places.append([before, before + 1] if pieces > 1 else [before])
    return [place for axis in range(len(places)) for place in places[one.permutation.index(axis)]]


def rows_of(copies: Copies, most: int | None) -> Iterator[Copies]:
    """Each row by itself, cut into rows of at most `most` elements."""
    for row in range(len(copies)):
        waiting = [copies.rows(slice(row, row + 1))]
        while waiting:
            one = waiting.pop()
            if most is None or int(one.elements[0]) <= max(1, most):
                yield one
            else:
                waiting += reversed(one.halves())
