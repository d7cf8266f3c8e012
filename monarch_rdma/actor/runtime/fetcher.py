"""Reads the large buffers of messages that arrived, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from . import message
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Fetcher"]

_log = logging.getLogger("monarch_rdma.actor")


class Fetcher:
    """One per process. Frames are fetched in the order in which they come; each read uses several threads below."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._queue: SimpleQueue[Frame | Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    def fetch(self, frame: Frame) -> None:
        """Ends frame.fetched, and tells the sender."""
        self._add(frame)

    def do(self, action: Callable[[], object]) -> None:
        """Runs something that may wait a moment."""
        self._add(action)

    def _add(self, item: Frame | Callable[[], object]) -> None:
        """Also destructors call it: at any point, and when the interpreter ends, where no thread can be started."""
        if self._is_closed:
            return
        self._queue.put(item)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="monarch_rdma-fetcher", daemon=True)
            with self._starting:  # nothing in here makes objects that could be what starts a collection
                is_first = self._thread is None
                if is_first:
                    self._thread = thread
            if is_first:
                thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, Frame):
                    self.fetch_now(item)
                else:
                    item()
            except Exception:  # one message must not end the others
                _log.exception("a large message could not be dealt with")

    def fetch_now(self, frame: Frame) -> None:
        """The same in this thread."""
        assert frame.fetched is not None, "made by who queued it"
        try:
            frame.incoming.fetch(timeout=None)
        except Exception as error:  # whatever it is: the actor and the sender wait for the end of this
            return self.give_up(frame, error)
        frame.fetched.set_result(None)
        self._proc.post_quietly(frame.address, message.pack(message.TAKEN, frame.origin))

    def give_up(self, frame: Frame, error: Exception) -> None:
        """The buffers will not be read: ends frame.fetched with that, and tells the sender."""
        assert frame.fetched is not None, "made by who queued it"
        frame.fetched.set_error(error)
        self._proc.post_quietly(frame.address, message.pack(message.TAKEN, frame.origin, flags=message.FAILED))

    def close(self) -> None:
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
