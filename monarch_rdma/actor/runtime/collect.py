"""Answers on their way up a tree: each process sends those from below on together.

Only what is small, and only where the caller waits for all answers: a failure, or an answer with large buffers,
goes to the caller directly. Nothing is repeated here: a process that is lost takes answers with it, but then the caller
is told that a member is lost, and has no result anyway.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..failure import SupervisionError
from . import message
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc
    from .tree import Cast

__all__ = ["Collector", "pieces_of"]

_PIECE = struct.Struct("<II")  # rank, length


class Collector:
    """Stands in a process of the tree for the caller, and waits for the answers of its own actor and all below."""

    def __init__(self, proc: Proc, cast: Cast, parent: str, up: int, count: int) -> None:
        """`parent`, `up`: the process and number that get what is collected. `count`: answers to come."""
        self._proc = proc
        self._cast = cast
        self._parent = parent
        self._up = up
        self._left = count
        self._pieces: list[bytes] = []
        self._lock = threading.Lock()
        self.number = proc.register(self)

    def on_frame(self, frame: Frame) -> None:
        if frame.kind != message.SEND:
            return
        if frame.flags & message.MANY:
            self._add([bytes(frame.body)], sum(1 for _ in pieces_of(frame)))
        elif frame.flags & (message.FAILED | message.LARGE):
            head = message.pack(message.SEND, self._cast.reply, flags=frame.flags, rank=frame.rank, origin=frame.origin)
            self._proc.post_quietly(self._cast.sender, head, bytes(frame.body))
            self._add([], 1)
        else:
            self._add([_PIECE.pack(frame.rank, len(frame.body)), bytes(frame.body)], 1)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self._proc.forget(self.number)  # the caller hears of it by itself

    def _add(self, pieces: list[bytes], count: int) -> None:
        with self._lock:
            self._pieces += pieces
            self._left -= count
            is_last = self._left == 0
        if is_last and self._proc.forget(self.number):
            head = message.pack(message.SEND, self._up, flags=message.MANY)
            self._proc.post_quietly(self._parent, head, b"".join(self._pieces))


def pieces_of(frame: Frame) -> Iterator[Frame]:
    """The answers in a frame that was collected."""
    body, at = frame.body, 0
    while at < len(body):
        rank, length = _PIECE.unpack_from(body, at)
        at += _PIECE.size
        piece = body[at : at + length]
        at += length
        yield Frame(message.SEND, 0, rank, frame.target, 0, 0, b"", b"", piece, frame.address)
