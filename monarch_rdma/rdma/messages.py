"""Messages between engines: bytes, in order, with back-pressure. The layer that actors are built on.

A message waits in its receiver's inbox until it is taken there. What a peer's messages may take up unread is bounded by
the receiver's option message_window_bytes; a sender waits while its window is full.

Of the threads that take, one at a time has the turn, so that messages are dealt with in the order in which they came,
whichever thread it is that deals with them. A thread that waits for messages handles the engine's events itself: a
message reaches it without a hop from thread to thread.
"""

from __future__ import annotations

import os
import re
import threading
import time
from struct import Struct
from typing import Any

from .._engine import ffi, lib
from ..errors import ConfigError
from .engine import Engine, raise_error, seconds

__all__ = ["Inbox", "Incoming", "Stop", "may_come_back", "says_cut_off", "says_ended", "send"]

# What was received: kind, sender's address, data. Kind 0 is a message. Any other is the notice that a watched peer is
# lost: an enum mr_kind, as class_of_kind takes it; data is the sentence that says why, in UTF-8.
Incoming = tuple[int, str, "bytes | memoryview"]

_ENDED = re.compile(r"its process \(pid \d+\) has ended")
_CUT_OFF = re.compile(r"no sign of life|timed out|No route to host")
_CLOSED = re.compile(r"the engine (is|was) closed")
_SLICE = 0.1  # seconds between looks for Ctrl-C while waiting
_SMALL = 4096  # bytes up to which data is a copy of its own, that does not keep its batch
_MAX_CACHED = 4096
_read_head = Struct("=iIQ").unpack_from  # mr_incoming
_TIMEOUT = int(lib.MR_TRANSFER_TIMEOUT)
_NULL = ffi.NULL
_get_ident = threading.get_ident
_unpack = ffi.unpack
_take = lib.mr_inbox_take
_send = lib.mr_peer_send


def _know_main_thread() -> None:
    """Only there signals are handled."""
    global _main_thread
    _main_thread = threading.main_thread().ident


_main_thread: int | None
_know_main_thread()
os.register_at_fork(after_in_child=_know_main_thread)  # it may have been another thread in the parent


class _Cells(threading.local):
    """Where the core puts what it returns, for each thread."""

    def __init__(self) -> None:
        self.error = ffi.new("mr_error *")
        self.taken = ffi.new("char **"), ffi.new("uint64_t *"), self.error


_cells = _Cells()


class Stop:
    """Ends takes early, from any thread. Once set it stays so until it is cleared."""

    __slots__ = ("cell",)

    def __init__(self) -> None:
        self.cell = ffi.gc(lib.mr_stop_create(), lib.mr_stop_free)

    def set(self) -> None:
        lib.mr_stop_set(self.cell)

    def clear(self) -> None:
        lib.mr_stop_clear(self.cell)

    def is_set(self) -> bool:
        return bool(lib.mr_stop_is_set(self.cell))


class Inbox:
    """An engine's inbox. All that are made of one engine are the same inbox."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        cell, error = ffi.new("mr_inbox **"), _cells.error
        if kind := lib.mr_inbox_open(engine.handle, cell, error):
            raise_error(error, kind, operation="receive")
        self._handle = ffi.gc(cell[0], lib.mr_inbox_close)
        self._names: dict[bytes, str] = {}  # senders

    def take(self, timeout: float | None, stop: Stop | None = None, *, background: bool = False) -> list[Incoming]:
        """Takes what has arrived, in order; waits for the first.

        Up to 256 messages at a time; an empty list after `timeout` seconds (0: never waits, None: no limit), or when
        `stop` is set. The messages are this thread's turn: until it calls take or done, nobody else gets any. Only
        then is the room that they took in their senders' windows free again.

        `background`: for a thread whose task is to receive when no other does. It leaves the waiting to any other.

        Raises ConfigError where the engine is or was closed, or belongs to the parent of this process.
        """
        data, length, error = _cells.taken
        limit = -1.0 if timeout is None else seconds(timeout)
        wait = _SLICE if _get_ident() == _main_thread and not 0 <= limit <= _SLICE else limit
        cell = _NULL if stop is None else stop.cell
        length[0] = 0
        try:
            count = _take(self._handle, wait, cell, background, data, length, error)
            if not count and wait != limit:
                count = self._take_slices(limit - wait if limit > 0 else limit, cell, background)
            if count > 0:
                return self._entries(_unpack(data[0], length[0]), count)
            if count:
                raise_error(error, -count, operation="receive")
            return []
        except BaseException:  # Ctrl-C
            if length[0]:  # nobody has seen these messages
                lib.mr_inbox_done(self._handle, True)
            raise

    def _take_slices(self, limit: float, cell: Any, background: bool) -> int:
        """Waits on, in the main thread: Ctrl-C is handled between the slices."""
        deadline = None if limit < 0 else time.monotonic() + limit
        count, wait = 0, _SLICE
        while not count and wait > 0 and not (cell and lib.mr_stop_is_set(cell)):
            if deadline is not None:
                wait = min(_SLICE, max(0.0, deadline - time.monotonic()))
            count = _take(self._handle, wait, cell, background, *_cells.taken)
        return count

    def done(self, *, put_back: bool = False) -> None:
        """Gives the turn back without taking again. Nothing where this thread does not have it.

        `put_back`: the next one takes the same messages, all of them.
        """
        lib.mr_inbox_done(self._handle, put_back)

    def watch(self, address: str, *, heartbeats: bool = True) -> None:
        """From now on the loss of this peer becomes a notice here, after all that it sent; one, which ends the watch.

        Heartbeats tell it; without them only the end of the process or its connection does, so that of one that is
        stopped or cut off nothing may be told. Of several calls the last one counts. Connects if need be; where that
        fails, the peer is lost. ConfigError for a malformed address; ResourceExhausted.
        """
        error = _cells.error
        if kind := lib.mr_peer_watch(_peer_at(self.engine, address), heartbeats, error):
            raise_error(error, kind, operation="watch", peer=address)

    def unwatch(self, address: str) -> None:
        """Ends a watch. A notice that is already in the inbox stays. Idempotent."""
        error = _cells.error
        if kind := lib.mr_peer_unwatch(_peer_at(self.engine, address), error):
            raise_error(error, kind, operation="unwatch", peer=address)

    def _entries(self, batch: bytes, count: int) -> list[Incoming]:
        entries: list[Incoming] = []
        view = None
        names, at = self._names, 0
        for _ in range(count):
            kind, sender_length, length = _read_head(batch, at)
            middle = at + 16 + sender_length
            sender = batch[at + 16 : middle]
            name = names.get(sender) or self._name(sender)
            at = middle + length
            if length <= _SMALL:
                entries.append((kind, name, batch[middle:at]))
            else:
                view = view or memoryview(batch)
                entries.append((kind, name, view[middle:at]))
            if kind:
                self.engine.peers.pop(name, None)
        return entries

    def _name(self, sender: bytes) -> str:
        if len(self._names) >= _MAX_CACHED:
            self._names.clear()
        name = self._names[sender] = sender.decode()
        return name


def send(
    engine: Engine,
    address: str | bytes,
    data: Any,
    timeout: float | None = None,
    *,
    body: Any = b"",
) -> None:
    """Sends `data`, followed by `body`, as one message to the engine at `address`; ourselves included.

    Both are bytes, or C-contiguous buffers that are not copied before they are sent. Connects if need be, and waits
    while the peer has a full window of unread messages: both within `timeout` seconds (None: no limit, 0: never waits).
    Messages of one thread to one peer arrive in their order, once, or not at all where the connection is lost: watch
    the peer to know. Returning says that the message is on its way, not that it arrived: if this process is killed
    before its kernel has taken the bytes, or the peer before it has read them, the message is lost. Engine.close()
    waits, for up to a second, until they are out.

    A thread that has an inbox's turn had better not wait here (call done first, or pass 0): while two such threads wait
    for each other's inbox, nobody takes.

    Raises PeerLost, TransferTimeout (nothing was sent), ResourceExhausted (over the peer's max_frame_bytes, or over
    half of its message_window_bytes), AuthenticationError, ProtocolError (another version) or ConfigError (malformed
    address, closed engine, engine of a parent process).
    """
    peer = engine.peers.get(address)
    if peer is None:
        peer = _peer_at(engine, address)
    error = _cells.error
    if type(data) is not bytes:
        data = _buffer(data, "data")
    if type(body) is not bytes:
        body = _buffer(body, "body")
    data_length, body_length = len(data), len(body)
    if not (kind := _send(peer, data, data_length, body, body_length, 0.0, error)):
        return
    if kind == _TIMEOUT and timeout != 0:
        kind = _send_waiting(peer, data, data_length, body, body_length, seconds(timeout), error)
    if kind:
        raise_error(
            error,
            kind,
            operation="send",
            peer=address if isinstance(address, str) else address.decode(),
            size=data_length + body_length,
        )


def says_ended(loss: str) -> bool:
    """Whether the core's word on a lost process is that it has ended for sure, as the kernel of this host says; else it
    may live, and cannot be reached.
    """
    return _ENDED.search(loss) is not None


def says_cut_off(loss: str) -> bool:
    """Whether nothing at all was heard of the lost process for the whole heartbeat timeout."""
    return _CUT_OFF.search(loss) is not None


def may_come_back(loss: str) -> bool:
    """Whether a lost process may be there again over another connection: it has neither ended nor closed its engine."""
    return not says_ended(loss) and _CLOSED.search(loss) is None


def _buffer(value: Any, argument: str) -> Any:
    try:
        return ffi.from_buffer(value)
    except (TypeError, ValueError, BufferError) as error:
        raise ConfigError(
            f"{argument} is a {type(value).__name__}, but must be bytes or a contiguous buffer"
        ) from error


def _send_waiting(peer: Any, data: Any, data_length: int, body: Any, body_length: int, limit: float, error: Any) -> int:
    """In slices, so that Ctrl-C has its chance; whole where it has none."""
    deadline = time.monotonic() + limit if limit >= 0 else None
    sliced = _get_ident() == _main_thread
    while True:
        left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        last = not sliced or 0 <= left <= _SLICE
        kind = int(_send(peer, data, data_length, body, body_length, left if last else _SLICE, error))
        if last or kind != _TIMEOUT:
            return kind


def _peer_at(engine: Engine, address: str | bytes) -> Any:
    """The core's handle of a peer. Cached: to read an address and look its peer up takes longer than to send."""
    if not isinstance(address, str | bytes):
        raise ConfigError(f"address is a {type(address).__name__}, but must be a string")
    handle = engine.handle
    peer = engine.peers.get(address)
    if peer is None:
        cell, error = ffi.new("mr_peer **"), _cells.error
        text = address.encode() if isinstance(address, str) else address
        if kind := lib.mr_peer_open(handle, text, cell, error):
            raise_error(error, kind, operation="connect", peer=text.decode("utf-8", "replace"))
        if len(engine.peers) >= _MAX_CACHED:
            engine.peers.clear()
        peer = engine.peers[address] = ffi.gc(cell[0], lib.mr_peer_close)
    return peer
