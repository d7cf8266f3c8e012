"""Large buffers of one message on their way: they stay as they are until every receiver has read them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..future import Future
from . import message
from .message import Frame

if TYPE_CHECKING:
    from ..encoding.codec import Outgoing
    from ..failure import SupervisionError
    from .proc import Proc

__all__ = ["Transmission"]


class Transmission:
    """Ends, in `taken`, when each receiver has read the buffers, has refused them, or is lost."""

    def __init__(self, proc: Proc, outgoing: Outgoing, addresses: Sequence[str]) -> None:
        """`addresses`: the receiving processes, one entry for each message."""
        self.taken: Future[None] = Future.pending()
        self.refusal = ""  # of a receiver that had no room for them
        self._proc = proc
        self._outgoing = outgoing
        self._left = Counter(addresses)
        self._lock = threading.Lock()
        self.number = proc.register(self)
        for address in self._left.copy():
            proc.expect(self.number, address)

    def on_frame(self, frame: Frame) -> None:
        if frame.flags & message.FULL:
            self.refusal = bytes(frame.body).decode("utf-8", "replace")
        self.drop(frame.address, 1)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self.drop(address, self._left[address])

    def drop(self, address: str, count: int) -> None:
        """That many messages to this process need the buffers no more."""
        with self._lock:
            self._left[address] -= count
            if self._left[address] <= 0:
                del self._left[address]
                self._proc.fulfil(self.number, address)
            is_over = not self._left
        if is_over:
            self.abandon()

    def abandon(self) -> None:
        """Ends it: who has not read the buffers will not get them any more."""
        if self._proc.forget(self.number):
            for address in self._left.copy():
                self._proc.fulfil(self.number, address)
            self._outgoing.release()
            self.taken.set_result(None)
