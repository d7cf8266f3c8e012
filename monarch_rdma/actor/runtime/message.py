"""Frames of the actor layer: a fixed header, names and numbers, then the body that codec.py made.

Every frame goes from process to process; `target` is the number of what it is for in the receiving process: an actor's
mailbox, a port, or a transmission that waits to be taken.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ProtocolError
from ..encoding.codec import Incoming, is_pickled
from ..future import Future
from ..shape import Extent, Point

if TYPE_CHECKING:
    from .collect import Collector
    from .holders import Travelling

__all__ = [
    "CALL",
    "CANCEL",
    "CAST",
    "CREDIT",
    "DELIVERED",
    "END",
    "ENDED",
    "FAILED",
    "FAILURE",
    "FULL",
    "HOLD",
    "LARGE",
    "MANY",
    "NEW",
    "PATIENT",
    "PORT",
    "PORTS",
    "SAFE",
    "SEND",
    "STOP",
    "TAKEN",
    "Frame",
]

# Kinds.
CALL = 1  # a method of an actor; `reply` is the port that waits for the answer, 0 = nobody waits
SEND = 2  # a value for a port
CANCEL = 3  # the call from this sender with this `reply` number is not wanted any more
CREDIT = 4  # `reply` messages of ours to actor `target` were taken from its mailbox
TAKEN = 5  # the large buffers of transmission `target` have been read
HOLD = 6  # the process `body` holds port `target` now; with FAILED: the sender does not any more
CAST = 8  # a call that goes over a tree; see tree.py
DELIVERED = 9  # everyone below the sender has the cast of the branches `target`
END = 10  # actor `target` ends now, whatever it works on; the body says why
FAILURE = 7  # a MeshFailure, for the actor `target` that owns what failed

# Flags.
FAILED = 1  # SEND: the value is an exception. TAKEN: the buffers could not be read
LARGE = 2  # the body names memory of the sender; it waits for TAKEN of transmission `origin`
STOP = 4  # CALL: the last one; the actor ends after it
NEW = 8  # CALL: the first one; makes the actor
ENDED = 16  # SEND with FAILED: who was asked has ended, and its supervisor will say what becomes of it
MANY = 64  # SEND: answers of many actors together; see collect.py
SAFE = 32  # CALL: the answer must not be a pickle
PORT = 16  # CALL: the method answers through its first argument, a port
PORTS = 128  # CALL, SEND: ports stand before the body; see holders.py
FULL = 256  # TAKEN with FAILED: there was no room for them in time, as the body says, and the call will not be run
PATIENT = 512  # CALL with LARGE: its sender waits for room however long that takes

_HEADER = struct.Struct("<BxHHHIQQQ")  # kind, flags, length of method and of extent, rank, target, reply, origin


def pack(
    kind: int,
    target: int,
    *,
    flags: int = 0,
    rank: int = 0,
    reply: int = 0,
    origin: int = 0,
    method: bytes = b"",
    extent: bytes = b"",
) -> bytes:
    """The header of a frame; the body follows it."""
    head = _HEADER.pack(kind, flags, len(method), len(extent), rank, target, reply, origin)
    return head + method + extent if method or extent else head


@dataclass(slots=True, eq=False)
class Frame:
    """A frame that arrived; `address` is the sending process."""

    kind: int
    flags: int
    rank: int
    target: int
    reply: int
    origin: int
    method: bytes
    extent: bytes
    body: memoryview
    address: str
    collector: Collector | None = None  # of a call over a tree: where small answers are gathered
    is_answered: bool = False
    is_cancelled: bool = False
    accept: str = "pickle"  # or "safe": the body must not be a pickle
    fetched: Future[None] | None = None  # of a LARGE frame: when its buffers are here
    is_taken: bool = False  # ... and whether its sender was told
    held: int = 0  # bytes of these that count in its mailbox's budget
    ports: Travelling | None = None  # in the body
    _incoming: Incoming | None = None

    @property
    def codec(self) -> str:
        """How to encode the answer to this call."""
        return "safe" if self.flags & SAFE else "pickle"

    @property
    def incoming(self) -> Incoming:
        """The body, not decoded yet. Raises ProtocolError."""
        incoming = self._incoming
        if incoming is None:
            incoming = self._incoming = Incoming(self.body)
        return incoming

    def load(self) -> Any:
        """The value in the body; of a LARGE frame, once it is fetched. Runs users' code.

        Raises ProtocolError for a pickle that is not accepted, and what unpickling raises.
        """
        if self.accept == "safe" and is_pickled(self.body):
            raise ProtocolError(f"a pickle came from {self.address}, but only codec='safe' is accepted here")
        if self.ports is None:
            return self.incoming.load()
        ports, self.ports = self.ports, None
        with ports:
            return self.incoming.load()


def unpack(data: memoryview, address: str) -> Frame:
    """Raises ProtocolError where the frame is cut short."""
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(data)} bytes from {address} is shorter than a header", peer=address)
    kind, flags, method_size, extent_size, rank, target, reply, origin = _HEADER.unpack_from(data)
    method_end = _HEADER.size + method_size
    body = method_end + extent_size
    if body > len(data):
        raise ProtocolError(f"the names in a frame from {address} go past its end of {len(data)} bytes", peer=address)
    method = bytes(data[_HEADER.size : method_end]) if method_size else b""
    extent = bytes(data[method_end:body]) if extent_size else b""
    return Frame(kind, flags, rank, target, reply, origin, method, extent, data[body:], address)


_extents: dict[bytes, Extent] = {}  # as they were received: casts over one mesh come again and again
_MOST_EXTENTS = 1024


def pack_extent(extent: Extent) -> bytes:
    return json.dumps([extent.labels, extent.sizes]).encode()


def point_of(frame: Frame) -> Point:
    """Where in the mesh that was called the receiver stands. Raises ProtocolError."""
    extent = _extents.get(frame.extent)
    if extent is None:
        try:
            extent = Extent(*json.loads(frame.extent)) if frame.extent else Extent([], [])
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"the extent in a frame from {frame.address} is malformed: {error}") from error
        if len(_extents) >= _MOST_EXTENTS:
            _extents.clear()
        _extents[frame.extent] = extent
    return extent.point(frame.rank)
