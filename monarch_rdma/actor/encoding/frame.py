"""How a value's bytes travel: in the message itself, or by one-sided reads of the receiver.

A body begins with a byte that tells what it is. 0x80 begins a pickle (protocol 5), 0x02 a safe stream with nothing
outside of it. A frame is: a byte for its codec, the length of the header (4 bytes, big-endian), the header (JSON), and
the payload, unless that is read too. The payload is the stream, and then all buffers that are inline, end to end.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ...errors import ConfigError, ProtocolError, RdmaError
from ...rdma.buffer import RDMABuffer
from ...rdma.engine import Engine
from ...rdma.future import Future
from .blocks import pool
from .content import Content

__all__ = ["FRAMED_PICKLE", "FRAMED_SAFE", "MAX_PAYLOAD", "Frame", "write_frame"]

FRAMED_PICKLE, FRAMED_SAFE = 1, 3
MAX_PAYLOAD = 1 << 20  # bytes that may be in the message itself
_POOLED = 1 << 20  # from this size on, blocks come from the pool
_PROBED = 64 << 20  # from this size on, see whether a region is as large as is said before taking the memory for it
_LENGTH = 4
_SAME = True  # in place of a handle: the one before it
_MAX_BYTES = 2**63
_TEXT, _TEXT_OR_FLAG = (str, NoneType), (str, bool, NoneType)
_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass
class _Buffer:
    size: int  # bytes
    handle: str | None  # of a large one: where to read it
    view: str | bool | None  # ... and where to map it, if that was wished for
    block: memoryview | None = None  # its bytes, once they are here
    mapped: bool = False  # they are the sender's own, mapped


def write_frame(
    tag: int, content: Content, inline: int, view: bool, engine: Engine | None
) -> tuple[bytes, list[RDMABuffer]]:
    """The body, and the regions that its handles name. Buffers below `inline` bytes are copied into the payload."""
    held: list[RDMABuffer] = []
    try:
        table: list[list[Any]] = []
        pieces: list[Any] = [content.stream]
        for buffer in content.buffers:
            if buffer.nbytes < inline or not buffer.nbytes:
                table.append([buffer.nbytes, None, None])
                pieces.append(buffer)
            else:
                table.append([buffer.nbytes, _offer(buffer, held, engine), _SAME if view else None])
        payload = b"".join(pieces) if len(pieces) > 1 else content.stream
        handle = _offer(memoryview(payload), held, engine) if len(payload) > MAX_PAYLOAD else None
        header = [len(content.stream), len(payload), handle, table, content.rows, content.slots]
        return _joined(tag, header, b"" if handle else payload), held
    except BaseException:
        for region in held:
            region.drop()
        raise


def _offer(data: memoryview, held: list[RDMABuffer], engine: Engine | None) -> str:
    held.append(RDMABuffer(data, access="read", engine=engine))
    return held[-1].to_bytes().decode()


def _joined(tag: int, header: list[Any], payload: bytes | memoryview) -> bytes:
    text = _to_json(header).encode()
    return b"".join((bytes((tag,)), len(text).to_bytes(_LENGTH, "big"), text, payload))


class Frame:
    """A body of several parts at the receiver: parsed and checked, then fetched, then taken apart by a codec."""

    def __init__(self, body: memoryview, engine: Engine | None) -> None:
        """ProtocolError where it is malformed."""
        self._engine = engine
        self.tag: int = body[0]
        begin = 1 + _LENGTH
        end = begin + int.from_bytes(body[1:begin], "big")
        if not begin <= end <= len(body):
            raise ProtocolError(f"a message's header ends at byte {end} of {len(body)}")
        try:
            header: Any = json.loads(bytes(body[begin:end]))
            self.stream_size, size, handle, table, self.rows, self.slots = header
            self.buffers = [_Buffer(*_three(entry)) for entry in table]
            self.payload = _Buffer(size, handle, None, body[end:] if handle is None else None)
            self._check()
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message's header is malformed: {error}") from error

    def _check(self) -> None:
        inline = 0
        for buffer in (*self.buffers, self.payload):
            good = type(buffer.size) is int and 0 <= buffer.size < _MAX_BYTES
            good = good and isinstance(buffer.handle, _TEXT) and isinstance(buffer.view, _TEXT_OR_FLAG)
            if not good or (buffer.view and not buffer.handle):
                raise ValueError("a buffer's entry")
            inline += buffer.size if buffer.handle is None and buffer is not self.payload else 0
        if type(self.stream_size) is not int or not self.stream_size >= 0:
            raise ValueError("the stream's size")
        if self.stream_size + inline != self.payload.size:
            raise ValueError(f"a payload of {self.payload.size} bytes for {self.stream_size + inline}")
        if self.payload.block is not None and len(self.payload.block) != self.payload.size:
            raise ValueError(f"a payload of {self.payload.size} bytes, but {len(self.payload.block)} came")
        lowest, highest = -len(self.rows), len(self.buffers)
        if not all([type(slot) is int and lowest <= slot < highest for slot in self.slots]):
            raise ValueError("a slot that is no buffer nor tensor")
        if self.rows:
            from .tensors import check_rows

            check_rows(self.rows, [buffer.size for buffer in self.buffers])

    @property
    def large_bytes(self) -> int:
        """Bytes that are still to be fetched."""
        return sum([buffer.size for buffer in self._large() if buffer.block is None])

    def _large(self) -> list[_Buffer]:
        return [buffer for buffer in (*self.buffers, self.payload) if buffer.handle is not None]

    def fetch(self, timeout: float | None) -> None:
        """Maps or reads all that is large; all reads are in flight at once. Where one fails, the error of the first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        reads: list[tuple[_Buffer, memoryview, Future]] = []
        failed: BaseException | None = None
        try:
            for buffer in self._large():
                if buffer.block is None and not (buffer.view and self._map(buffer, deadline)):
                    remote = self._remote(buffer, buffer.handle)
                    if buffer.size >= _PROBED:
                        remote[-1:].read_into(bytearray(1), timeout=_left(deadline)).get()
                    block = _new_block(buffer.size)
                    reads.append((buffer, block, remote.read_into(block, timeout=_left(deadline))))
            for buffer, block, read in reads:
                error = read.exception()
                if error is None:
                    buffer.block = block
                failed = failed or error
        except BaseException:
            for _, _, read in reads:
                read.cancel()  # each keeps its block until it is over
            raise
        if failed is not None:
            raise failed

    def _remote(self, buffer: _Buffer, handle: str | None) -> RDMABuffer:
        remote = RDMABuffer.from_bytes((handle or "").encode(), engine=self._engine)
        if remote.shape != (buffer.size,) or remote.size() != buffer.size:
            raise ProtocolError(f"a message's buffer of {buffer.size} bytes has a handle on {remote!r}")
        return remote

    def _map(self, buffer: _Buffer, deadline: float | None) -> bool:
        """Whether the sender's memory could be mapped. What cannot be mapped is read, and that tells what is wrong."""
        handle = buffer.handle if buffer.view is _SAME else str(buffer.view)
        try:
            mapped = self._remote(buffer, handle).map(timeout=_left(deadline))
        except RdmaError:
            return False
        if not isinstance(mapped, memoryview) or not mapped.c_contiguous or mapped.nbytes != buffer.size:
            raise ProtocolError(f"a message's buffer of {buffer.size} bytes has a handle on something else")
        buffer.block, buffer.mapped = mapped.cast("B").toreadonly(), True
        return True

    def relay(self) -> tuple[bytes, list[RDMABuffer]]:
        """A body with handles on what was fetched here, and the regions that these name. ConfigError before fetch."""
        held: list[RDMABuffer] = []
        try:
            table: list[list[Any]] = []
            for buffer in self.buffers:
                handle = _offer(self._block(buffer), held, self._engine) if buffer.handle else None
                view = buffer.handle if buffer.view is _SAME else buffer.view
                table.append([buffer.size, handle, view if buffer.mapped else None])
            payload, handle = self._block(self.payload), None
            if self.payload.handle:
                handle = _offer(payload, held, self._engine)
            header = [self.stream_size, self.payload.size, handle, table, self.rows, self.slots]
            return _joined(self.tag, header, b"" if handle else payload), held
        except BaseException:
            for region in held:
                region.drop()
            raise

    def _block(self, buffer: _Buffer) -> memoryview:
        if buffer.block is None:
            raise ConfigError(f"the message has {self.large_bytes} bytes that are still to be fetched")
        return buffer.block

    def take(self, *, copy: bool) -> tuple[memoryview, list[Any]]:
        """The stream, and what it takes in order: buffers and tensors. `copy`: large ones in memory of their own."""
        payload = self._block(self.payload)
        blocks: list[memoryview] = []
        at = self.stream_size
        for buffer in self.buffers:
            if buffer.handle is None:
                blocks.append(memoryview(bytearray(payload[at : at + buffer.size])))
                at += buffer.size
            else:
                block = self._block(buffer)
                blocks.append(_copied(block) if copy and not buffer.mapped else block)
        tensors: list[Any] = []
        if self.rows:
            from .tensors import tensors_over

            tensors = tensors_over(self.rows, blocks)
        return payload[: self.stream_size], [tensors[~slot] if slot < 0 else blocks[slot] for slot in self.slots]


def _three(entry: Any) -> Any:
    """The fields of a buffer that come from the other side."""
    size, handle, view = entry
    return size, handle, view


def _new_block(size: int) -> memoryview:
    """Writable bytes with anything in them. MemoryError where there is no memory."""
    return pool.take(size) if size >= _POOLED else memoryview(bytearray(size))


def _copied(block: memoryview) -> memoryview:
    copy = _new_block(len(block))
    copy[:] = block
    return copy


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
