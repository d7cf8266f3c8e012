"""Which large buffers of messages that wait are read already: as many as a budget allows, in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ... import config
from ..future import Future
from .message import Frame

if TYPE_CHECKING:
    from .fetcher import Fetcher

__all__ = ["ReadAhead"]


class ReadAhead:
    """Of one mailbox or port. What is beyond the option mailbox_bytes stays with its sender, who waits."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._budget = int(config.get("mailbox_bytes"))
        self._held = 0  # bytes fetched, or being fetched, of frames that wait
        self._deferred: deque[Frame] = deque()
        self._left: list[Frame] = []  # to who takes them
        self._lock = threading.RLock()  # a destructor of a future that waits at a port may come in between

    def admit(self, frame: Frame, leave: Callable[[int], bool] = lambda size: False) -> bool:
        """A LARGE frame arrived: frame.fetched ends when its buffers are here. False where they stay with their sender
        for now. `leave`: whether to leave the fetching of so many bytes to who takes the frame.
        """
        if frame.fetched is None:
            frame.fetched = Future.pending()
        try:
            size = frame.incoming.large_bytes
        except Exception as error:  # malformed, or nothing is left to look at it with
            self._fetcher.give_up(frame, error)
            return True
        with self._lock:
            if self._deferred or (self._held and self._held + size > self._budget):
                self._deferred.append(frame)
                return False
            self._held += size
            frame.held = size
            if leave(size):
                self._left.append(frame)
                return True
        self._fetcher.fetch(frame)
        return True

    def turn_away(self, frame: Frame) -> str | None:
        """If it still waits for room, it does not any more: what there is no room for, in words; else None."""
        with self._lock:
            if frame not in self._deferred:
                return None
            self._deferred.remove(frame)
            start: list[Frame] = []
            self._admit_deferred(start)
            held = self._held
        for waiting in start:
            self._fetcher.fetch(waiting)
        return f"{frame.incoming.large_bytes} bytes: {held} wait there already (option mailbox_bytes)"

    def release(self, frame: Frame) -> None:
        """It waits no more: somebody takes it. Fetches what was left to this thread."""
        start: list[Frame] = []
        with self._lock:
            is_left = frame in self._left
            if is_left:
                self._left.remove(frame)
            if frame in self._deferred:  # it is its turn, whatever it needs
                self._deferred.remove(frame)
                start.append(frame)
            self._held -= frame.held
            frame.held = 0
            self._admit_deferred(start)
        for waiting in start:
            self._fetcher.fetch(waiting)
        if is_left:
            self._fetcher.fetch_now(frame)

    def _admit_deferred(self, start: list[Frame]) -> None:
        while self._deferred:
            following = self._deferred[0]
            size = following.incoming.large_bytes
            if self._held and self._held + size > self._budget:
                return
            self._held += size
            following.held = size
            start.append(self._deferred.popleft())

    def close(self, error: Exception) -> None:
        """Nobody takes anything any more: those who wait to be read are told."""
        with self._lock:
            rest, self._deferred = list(self._deferred), deque()
        for frame in rest:
            self._fetcher.give_up(frame, error)
