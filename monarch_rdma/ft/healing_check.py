"""Checksums of a state: made as it is copied, compared as it arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ProtocolError
from ..kernels import checksum
from ..sharding.offer import Offer
from ..sharding.reads import Read

__all__ = ["BLOCK", "Checksums", "Verification", "copied_with_checksums", "on_one_thread"]

BLOCK = 1 << 20  # bytes that have a checksum together
_STEP = 1 << 20  # bytes that are copied before their checksums are made: they are still in the cache

Checksums = dict[str, list[int]]  # of the local part of each tensor


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Checksums keep up with reads on this thread alone; others would take the processors that reads are made on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copied_with_checksums(sources: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> Checksums:
    """Copies each tensor's local part into that of the same name, where there is one; returns checksums of all."""
    with on_one_thread():
        return {name: _copied(tensor, copies.get(name)) for name, tensor in sources.items()}


def _copied(tensor: Tensor, copy: Tensor | None) -> list[int]:
    source = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if copy is None:
        return _sums(source.cpu().contiguous())
    if not source.is_contiguous() or source.dtype != copy.dtype:
        copy.copy_(source)
        return _sums(copy)
    sums: list[int] = []
    step = _STEP // source.element_size()
    parts, places = torch.split(source.view(-1), step), torch.split(copy.view(-1), step)
    for part, place in zip(parts, places, strict=True):
        place.copy_(part)
        sums += _sums(place)
    return sums


def _sums(tensor: Tensor) -> list[int]:
    sums: list[int] = checksum(tensor, BLOCK).tolist()
    return sums


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


@dataclass
class _Arriving:
    """A target that is being filled, and what of it has come."""

    missing: int  # bytes
    runs: list[_Run] = field(default_factory=list)
    is_checked: bool = False


class Verification:
    """Compares what a Reader reads with the owners' checksums, tensor by tensor as they become complete. Of an owner's
    part, blocks of 1 MiB are compared that come in whole, in one run: all of it where parts are read as they are, or
    rows of them; nothing where columns are.
    """

    def __init__(self, targets: Mapping[str, Tensor], sources: Mapping[int, tuple[Offer, Checksums]]) -> None:
        """`targets`: local tensors. `sources`: of each rank that is read from, what it offers."""
        self._targets = targets
        self._shapes = {rank: _shapes(offer) for rank, (offer, _) in sources.items()}
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
        if arriving.missing == 0:
            arriving.is_checked = not self._wrong(name)  # else it may be read again, where a rank was lost

    def finish(self) -> int:
        """When all is read. Returns the bytes that were compared. ProtocolError, as on_read, where some differ."""
        for name, arriving in self._arriving.items():
            if not arriving.is_checked and (wrong := self._wrong(name)):
                raise ProtocolError(wrong, operation="read")
        return sum(self._verified.values())

    def _wrong(self, name: str) -> str:
        """What is wrong with a target, in words."""
        arriving, target = self._arriving[name], self._targets[name]
        self._verified[name] = 0
        flat = target.view(-1).view(torch.uint8) if arriving.runs else target
        for first, last, shift, rank, made in self._joined(name, arriving.runs):
            sums = self._sums[rank][name]
            begin = -(-first // BLOCK)
            is_end = last == math.prod(self._shapes[rank][name]) * target.element_size()
            end = len(sums) if is_end else last // BLOCK
            if begin >= end:
                continue
            low, high = begin * BLOCK, last if is_end else end * BLOCK
            if made is None:
                found = _sums(flat[low + shift : high + shift])
            else:
                found = made[begin - first // BLOCK :][: end - begin].tolist()
            if found != sums[begin:end]:
                wrong = [begin + i for i, (a, b) in enumerate(zip(found, sums[begin:end], strict=True)) if a != b]
                where = f"the first one at byte {wrong[0] * BLOCK}"
                return f"{len(wrong)} of {end - begin} blocks of {name} are not what rank {rank} has offered, {where}"
            self._verified[name] += high - low
        return ""

    def _joined(self, name: str, runs: list[_Run]) -> list[_Run]:
        """Runs that go on in each other, from owners with the same part."""
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


def _shapes(offer: Offer) -> dict[str, tuple[int, ...]]:
    """Of the parts that a rank has."""
    return {name: tensor.buffer.shape for name, tensor in offer.tensors.items() if tensor.buffer is not None}
