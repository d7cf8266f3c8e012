"""Checksums of a state: made as it is copied, compared as it arrives."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import PeerLost, ProtocolError
from ..rdma import BlockSums, Engine, RDMABuffer
from ..rdma.view import contiguous_strides
from ..sharding.deadline import Deadline
from ..sharding.offer import Offer
from ..sharding.reads import Read, Strided, ends_of, part_of

__all__ = ["BLOCK", "Checksums", "Verification", "copied"]

BLOCK = 1 << 20  # bytes that have a checksum together
_MOST = 16 << 20  # bytes of an owner's part that are read at once to be compared

Checksums = dict[str, list[int]]  # of the local part of each tensor


def copied(
    sources: Mapping[str, Tensor], copies: Mapping[str, Tensor], engine: Engine, *, with_checksums: bool = True
) -> Checksums | None:
    """Copies each tensor's local part into that of the same name, where there is one; returns checksums of all."""
    local = {name: tensor._local_tensor if isinstance(tensor, DTensor) else tensor for name, tensor in sources.items()}
    if with_checksums:
        return {name: _copied(tensor, copies.get(name), engine) for name, tensor in local.items()}
    for name, copy in copies.items():
        copy.copy_(local[name])
    return None


def _copied(source: Tensor, copy: Tensor | None, engine: Engine) -> list[int]:
    if copy is None:
        return _sums(source.cpu().contiguous(), engine)
    if source.is_contiguous() and source.is_cpu and not (source.is_conj() or source.is_neg()):
        return _sums(source, engine, copy)
    copy.copy_(source)
    return _sums(copy, engine)


def _sums(source: Tensor, engine: Engine, target: Tensor | None = None) -> list[int]:
    """Of a tensor that is contiguous, on the CPU, and is copied on the way where there is a target."""
    if not source.nbytes:
        return []
    sums = BlockSums(0, source.nbytes, source.nbytes, BLOCK)
    sums.make(source, target, engine=engine)
    made: list[int] = np.frombuffer(sums.values, np.int64).tolist()
    return made


class _Run(NamedTuple):
    """Bytes of a target that are contiguous at the owner too. `first`, `last`: there; `shift`: to where they are here.
    `sums`: of its blocks, from the one that `first` is in on, made on the way; None where they are still to be made.
    """

    first: int
    last: int
    shift: int
    rank: int
    sums: NDArray[np.int64] | None

    def joined(self, other: _Run) -> _Run:
        """With one that begins where this one ends, or before."""
        last = max(self.last, other.last)
        if self.sums is None or other.sums is None or other.first != self.last:
            return self._replace(last=last, sums=None)
        begin, end = self.first // BLOCK, -(-last // BLOCK)
        sums = np.zeros(end - begin, np.int64)
        sums[: len(self.sums)] = self.sums
        sums[other.first // BLOCK - begin :] += other.sums
        return self._replace(last=last, sums=sums)


class _Part(NamedTuple):
    """Elements that did not come in whole blocks. `there`: in the owner's part, by its order; `here`: in the target."""

    rank: int
    there: Strided
    here: Strided


@dataclass
class _Arriving:
    """A target that is being filled, and what of it has come."""

    missing: int  # bytes
    runs: list[_Run] = field(default_factory=list)
    edges: list[_Part] = field(default_factory=list)  # of runs: of blocks that are not in them in whole
    scattered: list[_Part] = field(default_factory=list)
    is_checked: bool = False


class Verification:
    """Compares what a Reader reads with the owners' checksums: blocks of 1 MiB that come in whole, in one run, tensor
    by tensor as they become complete. What comes otherwise, such as columns, is compared in the end with the same
    elements of whole blocks, which are read for that.
    """

    def __init__(
        self, targets: Mapping[str, Tensor], sources: Mapping[int, tuple[Offer, Checksums]], engine: Engine
    ) -> None:
        """`targets`: local tensors. `sources`: of each rank that is read from, what it offers."""
        self._targets, self._engine = targets, engine
        self._buffers = {rank: _buffers(offer) for rank, (offer, _) in sources.items()}
        self._sums = {rank: sums for rank, (_, sums) in sources.items()}
        self._arriving = {name: _Arriving(target.nbytes) for name, target in targets.items()}
        self._verified: dict[str, int] = {}

    def on_read(self, read: Read) -> None:
        """Its bytes have come."""
        name = read.tensor.target
        arriving = self._arriving[name]
        arriving.missing -= read.nbytes
        arriving.is_checked = False
        if (run := read.run) is not None:
            sums = np.frombuffer(run.sums.values, np.int64) if run.sums is not None and run.sums.are_made else None
            arriving.runs.append(_Run(run.first, run.first + run.nbytes, run.here - run.first, read.rank, sums))
        else:
            strides = contiguous_strides(self._buffers[read.rank][name].shape, 1)
            ends = ends_of(read.copies, strides, self._targets[name].stride())
            arriving.scattered.append(_Part(read.rank, *ends))
        if arriving.missing == 0:
            arriving.is_checked = not self._wrong(name)  # else it may be read again, where a rank was lost

    def finish(self, lost: Collection[int], deadline: Deadline) -> int:
        """When all is read; `lost`: ranks whose part came from others. Returns the bytes that were compared: all.

        ProtocolError where some differ, unless there is a new version by now; what reads raise.
        """
        for name, arriving in self._arriving.items():
            if not arriving.is_checked and (wrong := self._wrong(name)):
                raise ProtocolError(wrong, operation="read")
            for part in (*arriving.edges, *(part for part in arriving.scattered if part.rank not in lost)):
                self._compare(name, part, lost, deadline)
        return sum(self._verified.values())

    def _wrong(self, name: str) -> str:
        """What is wrong with the whole blocks of a target, in words."""
        arriving, target = self._arriving[name], self._targets[name]
        self._verified[name] = 0
        arriving.edges.clear()
        for run in self._joined(name, arriving.runs):
            sums = self._sums[run.rank][name]
            begin = -(-run.first // BLOCK)
            is_end = run.last == self._buffers[run.rank][name].size()
            end = len(sums) if is_end else run.last // BLOCK
            low, high = begin * BLOCK, run.last if is_end else end * BLOCK
            if begin >= end:
                low = high = run.last
            arriving.edges += [
                _edge(run, first, last, target.element_size())
                for first, last in ((run.first, low), (high, run.last))
                if first < last
            ]
            if low == high:
                continue
            if run.sums is None:
                flat = target.view(-1).view(torch.uint8)
                found = _sums(flat[low + run.shift : high + run.shift], self._engine)
            else:
                found = run.sums[begin - run.first // BLOCK :][: end - begin].tolist()
            if wrong := _difference(name, run.rank, found, sums[begin:end], begin):
                return wrong
            self._verified[name] += high - low
        return ""

    def _joined(self, name: str, runs: list[_Run]) -> list[_Run]:
        """Runs that go on in each other, from owners with the same part."""
        if len(runs) == 1:
            return runs
        by_part: dict[tuple[int, tuple[int, ...]], list[_Run]] = {}
        for run in runs:
            by_part.setdefault((run.shift, tuple(self._sums[run.rank][name])), []).append(run)
        joined: list[_Run] = []
        for part in by_part.values():
            part.sort(key=lambda run: run[:2])
            joined.append(part[0])
            for run in part[1:]:
                if run.first > joined[-1].last:
                    joined.append(run)
                else:
                    joined[-1] = joined[-1].joined(run)
        return joined

    def _compare(self, name: str, part: _Part, lost: Collection[int], deadline: Deadline) -> None:
        """With whole blocks of the owner, whose checksums are right."""
        rank = self._one_with(name, part.rank, lost)
        buffer, target = self._buffers[rank][name], self._targets[name]
        size = target.element_size()
        for there, here in _pieces(part.there, part.here, _MOST // size):
            begin, end = there.offset * size // BLOCK, -(-there.end * size // BLOCK)
            first, last = begin * BLOCK // size, min(end * BLOCK, buffer.size()) // size
            blocks = _read(buffer, target.dtype, first, last, deadline)
            sums = self._sums[rank][name][begin:end]
            if wrong := _difference(name, rank, _sums(blocks, self._engine), sums, begin):
                raise ProtocolError(wrong, operation="read")
            offered = part_of(blocks, replace(there, offset=there.offset - first))
            if not torch.equal(_bytes(offered), _bytes(part_of(target, here))):
                raise ProtocolError(f"a part of {name} is not what rank {rank} has offered", operation="read")
            self._verified[name] += math.prod(there.shape) * size

    def _one_with(self, name: str, rank: int, lost: Collection[int]) -> int:
        """This rank, or where it is lost another one with the same part. PeerLost."""
        part = self._sums[rank][name]
        for other in (rank, *self._sums):
            if other not in lost and self._sums[other].get(name) == part:
                return other
        raise PeerLost(f"rank {rank} is lost, and nobody else has its part of {name} to compare with", operation="read")


def _difference(name: str, rank: int, found: list[int], sums: list[int], begin: int) -> str:
    """Between the sums of blocks from `begin` on and those that were offered, in words."""
    if found == sums:
        return ""
    wrong = [begin + i for i, (a, b) in enumerate(zip(found, sums, strict=True)) if a != b]
    where = f"the first one at byte {wrong[0] * BLOCK}"
    return f"{len(wrong)} of {len(sums)} blocks of {name} are not what rank {rank} has offered, {where}"


def _edge(run: _Run, first: int, last: int, size: int) -> _Part:
    """Of a run, elements of `size` bytes between two bytes of the owner's part."""
    count, at = ((last - first) // size,), first // size
    return _Part(run.rank, Strided(count, (1,), at), Strided(count, (1,), at + run.shift // size))


def _pieces(there: Strided, here: Strided, most: int) -> Iterator[tuple[Strided, Strided]]:
    """Cut until each lies within so many elements of the owner's part."""
    dim = next((dim for dim, n in enumerate(there.shape) if n > 1), None)
    if dim is None or there.end - there.offset <= most:
        yield there, here
        return
    n = there.shape[dim]
    for low, count in ((0, n // 2), (n // 2, n - n // 2)):
        yield from _pieces(there.narrowed(dim, low, count), here.narrowed(dim, low, count), most)


def _read(buffer: RDMABuffer, dtype: torch.dtype, first: int, last: int, deadline: Deadline) -> Tensor:
    """These elements of a buffer, by their order in it: in its memory they may lie in another one."""
    if buffer.strides == contiguous_strides(buffer.shape, 1):
        found = torch.empty(last - first, dtype=dtype)
        buffer.as_strided((last - first,), (1,), first).read_into(found, timeout=deadline.left()).get()
        return found
    row = math.prod(buffer.shape[1:])
    low, high = first // row, -(-last // row)
    rows = torch.empty(((high - low), *buffer.shape[1:]), dtype=dtype)
    buffer[low:high].read_into(rows, timeout=deadline.left()).get()
    return rows.view(-1)[first - low * row : last - low * row]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _buffers(offer: Offer) -> dict[str, RDMABuffer]:
    """Of the parts that a rank has."""
    return {name: tensor.buffer for name, tensor in offer.tensors.items() if tensor.buffer is not None}
