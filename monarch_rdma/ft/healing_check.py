"""Checksums of a state: made as it is copied, compared as it arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ProtocolError
from ..kernels import checksum
from ..sharding.offer import Offer
from ..sharding.reads import Read, Strided, ends_of

__all__ = ["Checksums", "Verification", "copied_with_checksums", "on_one_thread"]

_BLOCK = 1 << 20  # bytes that have a checksum together
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
    sums: list[int] = checksum(tensor, _BLOCK).tolist()
    return sums


@dataclass
class _Arriving:
    """A target that is being filled: what has come, as runs of bytes that are contiguous here and at the owner."""

    missing: int  # bytes
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)  # owner's first and last byte, shift, rank
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
        if run := self._run_of(read):
            arriving.runs.append(run)
        if arriving.missing == 0:
            arriving.is_checked = not self._wrong(name)  # else it may be read again, where a rank was lost

    def finish(self) -> int:
        """When all is read. Returns the bytes that were compared. ProtocolError, as on_read, where some differ."""
        for name, arriving in self._arriving.items():
            if not arriving.is_checked and (wrong := self._wrong(name)):
                raise ProtocolError(wrong, operation="read")
        return sum(self._verified.values())

    def _run_of(self, read: Read) -> tuple[int, int, int, int] | None:
        target, size = self._targets[read.tensor.target], self._targets[read.tensor.target].element_size()
        shape = self._shapes[read.rank][read.tensor.source]
        if read.unpack is not None or not target.is_contiguous():
            return None
        there, here = ends_of(read.copies, torch.empty(shape, device="meta").stride(), target.stride())
        if not (_is_run(there) and _is_run(here)):
            return None
        return there.offset * size, there.offset * size + read.nbytes, (here.offset - there.offset) * size, read.rank

    def _wrong(self, name: str) -> str:
        """What is wrong with a target, in words."""
        arriving, target = self._arriving[name], self._targets[name]
        self._verified[name] = 0
        flat = target.view(-1).view(torch.uint8) if arriving.runs else target
        for first, last, shift, rank in self._joined(name, arriving.runs):
            sums = self._sums[rank][name]
            begin = -(-first // _BLOCK)
            is_end = last == math.prod(self._shapes[rank][name]) * target.element_size()
            end = len(sums) if is_end else last // _BLOCK
            if begin >= end:
                continue
            low, high = begin * _BLOCK, last if is_end else end * _BLOCK
            found = _sums(flat[low + shift : high + shift])
            if found != sums[begin:end]:
                wrong = [begin + i for i, (a, b) in enumerate(zip(found, sums[begin:end], strict=True)) if a != b]
                where = f"the first one at byte {wrong[0] * _BLOCK}"
                return f"{len(wrong)} of {end - begin} blocks of {name} are not what rank {rank} has offered, {where}"
            self._verified[name] += high - low
        return ""

    def _joined(self, name: str, runs: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Runs that go on in each other, from owners with the same part."""
        by_part: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, int, int]]] = {}
        for run in runs:
            by_part.setdefault((run[2], tuple(self._sums[run[3]][name])), []).append(run)
        joined: list[tuple[int, int, int, int]] = []
        for part in by_part.values():
            part.sort()
            low, high, shift, rank = part[0]
            for first, last, _, _ in part[1:]:
                if first > high:
                    joined.append((low, high, shift, rank))
                    low, high = first, last
                high = max(high, last)
            joined.append((low, high, shift, rank))
        return joined


def _shapes(offer: Offer) -> dict[str, tuple[int, ...]]:
    """Of the parts that a rank has."""
    return {name: tensor.buffer.shape for name, tensor in offer.tensors.items() if tensor.buffer is not None}


def _is_run(part: Strided) -> bool:
    expected = 1
    for n, stride in zip(reversed(part.shape), reversed(part.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True
