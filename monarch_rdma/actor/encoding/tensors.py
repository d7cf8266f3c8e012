"""Tensors as bytes: which bytes of which storages a set of tensors needs, and the same tensors over received bytes.

Tensors of one set that overlap in a storage overlap again over the received bytes. Imported only where torch is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...errors import ConfigError, ProtocolError
from ...rdma.memory import Keep, bytes_at, memory_of

__all__ = ["Row", "TensorSet", "check_rows", "is_plain_tensor", "tensors_over"]

Row = list[Any]  # one tensor in a table: [buffer or -1 for no bytes, offset in it, dtype's name, shape, strides]

_ALIGNMENT = 64  # of a buffer's start relative to its storage's, so that elements stay aligned
_GAP = 4096  # bytes that nobody asked for, which are sent rather than make two buffers of one
_SPARSE = 2  # a span is sent as it is unless it is more than so many times what its tensors hold
_MAX_DIMS = 64
_MAX_BYTES = 2**63


def is_plain_tensor(tensor: Any) -> bool:
    """Whether its bytes, dtype, shape and strides say all of it (besides requires_grad)."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and not tensor._backward_hooks
    )


def _span(shape: Any, strides: Any, itemsize: int) -> int:
    """Bytes from the first element to the end of the furthest one."""
    if 0 in shape:
        return 0
    return int(itemsize * (1 + sum([(count - 1) * stride for count, stride in zip(shape, strides, strict=True)])))


class TensorSet:
    """The tensors of one message, by number. Which bytes go is decided when all are known."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def add(self, tensor: Any) -> int:
        """The tensor's number. It is plain; see is_plain_tensor. ConfigError where its storage does not hold it."""
        piece = _Piece(tensor)
        if piece.end > piece.storage.nbytes():
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} reaches to byte {piece.end} of its storage, which has only "
                f"{piece.storage.nbytes()} (it was resized)"
            )
        self._pieces.append(piece)
        return len(self._pieces) - 1

    def add_storage(self, storage: Any) -> int:
        """All bytes of a storage of the CPU, as a uint8 tensor that begins where its new storage does."""
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        return self.add(whole)

    def plan(self, first: int) -> tuple[list[memoryview], list[Row]]:
        """The bytes to send, as buffers numbered from `first` on, and one row per tensor."""
        of_storages: dict[int, list[_Piece]] = {}
        for piece in self._pieces:
            if piece.end > piece.start:
                of_storages.setdefault(piece.storage.data_ptr(), []).append(piece)
        buffers: list[memoryview] = []
        for pieces in of_storages.values():
            for span in _spans(pieces):
                _place(span, first, buffers)
        return buffers, [piece.row() for piece in self._pieces]


class _Piece:
    """Where a tensor's bytes lie: from `start` to `end` in its storage, and, once placed, at `offset` of a buffer."""

    __slots__ = ("buffer", "end", "nbytes", "offset", "start", "storage", "strides", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.strides = tensor.stride()
        self.nbytes = tensor.nbytes
        itemsize = tensor.element_size()
        self.start = tensor.storage_offset() * itemsize
        self.end = self.start + (self.nbytes if tensor.is_contiguous() else _span(tensor.shape, self.strides, itemsize))
        self.buffer, self.offset = -1, 0

    def row(self) -> Row:
        return [self.buffer, self.offset, _name(self.tensor.dtype), self.tensor.shape, self.strides]


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spans(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Groups that are sent as one buffer each: they overlap, or are close together."""
    if len(pieces) == 1:
        return [pieces]
    spans: list[list[_Piece]] = []
    end = -_GAP - 1
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > end + _GAP:
            spans.append([])
        spans[-1].append(piece)
        end = max(end, piece.end)
    return spans


def _place(span: list[_Piece], first: int, buffers: list[memoryview]) -> None:
    """Adds the buffer of a span; of each of its tensors, packed, where most bytes between them are not theirs."""
    start = span[0].start // _ALIGNMENT * _ALIGNMENT
    end = max([piece.end for piece in span])
    if end - start > _SPARSE * sum([piece.nbytes for piece in span]) + _ALIGNMENT:
        for piece in span:
            packed = piece.tensor.detach().clone(memory_format=torch.contiguous_format)
            piece.buffer, piece.strides = first + len(buffers), packed.stride()
            buffers.append(_bytes_of(packed.untyped_storage(), 0, piece.nbytes))
        return
    for piece in span:
        piece.buffer, piece.offset = first + len(buffers), piece.start - start
    buffers.append(_bytes_of(span[0].storage, start, end))


def _bytes_of(storage: Any, start: int, end: int) -> memoryview:
    return memoryview(bytes_at(storage.data_ptr() + start, end - start, Keep(storage)))


def check_rows(rows: Any, sizes: list[int]) -> None:
    """ProtocolError unless the rows describe tensors inside of buffers of these sizes."""
    for row in rows:
        try:
            buffer, offset, name, shape, strides = row
            numbers = [offset, *shape, *strides]
            good = type(buffer) is int and -1 <= buffer < len(sizes) and isinstance(name, str)
            good = good and len(shape) == len(strides) <= _MAX_DIMS and all([type(n) is int for n in numbers])
            good = good and all([0 <= n < _MAX_BYTES for n in numbers])
            dtype = getattr(torch, name, None) if good else None
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a message's tensor is malformed: {row!r:.200}") from error
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError(f"a message's tensor is malformed, or of a dtype unknown to torch here: {row!r:.200}")
        size = 0 if buffer < 0 else sizes[buffer]
        if offset % dtype.itemsize or offset + _span(shape, strides, dtype.itemsize) > size:
            raise ProtocolError(f"a message's tensor leaves its buffer of {size} bytes: {row!r:.200}")
        if math.prod(shape) * dtype.itemsize >= _MAX_BYTES:
            raise ProtocolError(f"a message's tensor is too large: {row!r:.200}")


def tensors_over(rows: list[Row], blocks: list[memoryview]) -> list[torch.Tensor]:
    """The tensors of checked rows. `blocks`: the buffers' bytes, by number."""
    storages = {buffer: _storage_over(blocks[buffer]) for buffer in {row[0] for row in rows} if buffer >= 0}
    try:
        return [_tensor_over(row, storages) for row in rows]
    except RuntimeError as error:
        raise ProtocolError(f"a message's tensor is one that torch refuses: {error}") from error


def _tensor_over(row: Row, storages: dict[int, Any]) -> torch.Tensor:
    buffer, offset, name, shape, strides = row
    dtype = getattr(torch, name)
    if buffer < 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(storages[buffer], offset // dtype.itemsize, shape, strides)


def _storage_over(block: memoryview) -> Any:
    # torch warns of read-only memory, in words that say less than our own documentation of views.
    data = bytes_at(memory_of(block, "block").address, block.nbytes, Keep(block)) if block.readonly else block
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
