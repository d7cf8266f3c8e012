"""Answers on their way up a tree: each process sends those from below on together.

Only what is small, and only where the caller waits for all answers and has no result without one of them: a failure,
or an answer with large buffers, goes to the caller directly. Answers of neighbours that are the same bytes go up once:
where there is nothing to answer, the caller gets one small frame from each branch. Nothing is repeated here: a process
that is lost takes answers with it, and then the call fails.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RdmaError, TransferTimeout
from ..failure import SupervisionError, encode_failure
from . import message
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc
    from .tree import Cast

__all__ = ["Collector", "pieces_of"]

_PIECE = struct.Struct("<III")  # of ranks first to last, each: length
_PATIENCE = 60.0  # seconds that the parent may take no frames


class Collector:
    """Stands in a process of the tree for the caller, and waits for the answers of its own actor and all below."""

    def __init__(self, proc: Proc, cast: Cast, parent: str, up: int, count: int) -> None:
        """`parent`, `up`: the process and number that get what is collected. `count`: answers to come."""
        self._proc = proc
        self._cast = cast
        self._parent = parent
        self._up = up
        self._count = count
        self._left = count
        self._pieces: list[_Piece] = []
        self._children: set[str] = set()
        self._lock = threading.Lock()
        self.number = proc.register(self)

    def add(self, rank: int, body: bytes) -> None:
        """The answer of the actor here."""
        self._add([_Piece(rank, rank, body)], 1)

    def skip(self) -> None:
        """That answer goes another way, or never comes."""
        self._add([], 1)

    def wait_for(self, address: str) -> None:
        """Answers come from that process."""
        self._children.add(address)
        self._proc.expect(self.number, address)

    def give_up(self, why: str) -> None:
        """Some answers from below will never come here: the caller is told, and all others are dropped."""
        if self._finish():
            self._fail(why)

    def on_frame(self, frame: Frame) -> None:
        if frame.flags & message.MANY:
            self._add(_pieces(frame.body), frame.rank)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self.give_up(str(error))

    def _finish(self) -> bool:
        for address in self._children.copy():
            self._proc.fulfil(self.number, address)
        return self._proc.forget(self.number)

    def _add(self, pieces: list[_Piece], count: int) -> None:
        with self._lock:
            self._pieces += pieces
            self._left -= count
            is_last = self._left == 0
        if is_last and self._finish():
            self._all_here()

    def _all_here(self) -> None:
        self._send_up(0.0)

    def _send_up(self, timeout: float) -> None:
        head = message.pack(message.SEND, self._up, flags=message.MANY, rank=self._count)
        try:
            self._proc.post(self._parent, head, _packed(self._pieces), timeout)
        except TransferTimeout as error:
            if timeout:
                self._fail(f"answers are lost: {error}")
            else:
                self._proc.errands.run(self._parent, lambda: self._send_up(_PATIENCE))
        except (SupervisionError, RdmaError) as error:
            self._fail(f"answers are lost: {error}")

    def _fail(self, why: str) -> None:
        head = message.pack(message.SEND, self._cast.reply, flags=message.FAILED)
        error = SupervisionError(why, self._cast.method.decode())
        self._proc.post_quietly(self._cast.sender, head, encode_failure(error).body)


class _Piece(NamedTuple):
    """The same answer of ranks first to last."""

    first: int
    last: int
    body: bytes


def _packed(pieces: list[_Piece]) -> bytes:
    parts: list[bytes] = []
    at = 0
    pieces.sort()
    while at < len(pieces):
        first, last, body = pieces[at]
        at += 1
        while at < len(pieces) and pieces[at].first == last + 1 and pieces[at].body == body:
            last = pieces[at].last
            at += 1
        parts += (_PIECE.pack(first, last, len(body)), body)
    return b"".join(parts)


def _pieces(packed: memoryview) -> list[_Piece]:
    pieces, at = [], 0
    while at < len(packed):
        first, last, length = _PIECE.unpack_from(packed, at)
        at += _PIECE.size
        pieces.append(_Piece(first, last, bytes(packed[at : at + length])))
        at += length
    return pieces


def pieces_of(frame: Frame) -> Iterator[Frame]:
    """The answers in a frame that was collected. Its rank: how many it stands for, skipped ones too."""
    for first, last, body in _pieces(frame.body):
        for rank in range(first, last + 1):
            yield Frame(message.SEND, 0, rank, frame.target, 0, 0, b"", b"", memoryview(body), frame.address)
