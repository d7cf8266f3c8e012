"""The queue of one actor: frames in the order in which they came, failures of what it owns before them."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ... import config
from ...rdma.messages import Stop
from ..future import Future
from . import message
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Mailbox"]

_FETCHED_BY_ACTOR = 4 << 20  # bytes; more would hold its event loop up


class Mailbox:
    """Filled by any thread, emptied by the actor's own.

    Large buffers are fetched while a frame waits, within a budget (option mailbox_bytes): beyond it they stay with
    their sender, who waits.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._fetcher = proc.fetcher
        self._stop = Stop()
        self._urgent: deque[Frame] = deque()
        self._queue: deque[Frame] = deque()
        self.at_hand: Frame | None = None  # taken last
        self._sleeper: list[Callable[[], object]] = []  # who wakes the actor's thread, while it sleeps
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._budget = int(config.get("mailbox_bytes"))
        self._held = 0  # fetched bytes
        self._deferred: deque[Frame] = deque()
        self._left_to_actor: list[Frame] = []
        self._lock = threading.Lock()  # of the three above

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, frame: Frame) -> None:
        if frame.flags & message.LARGE:
            self._admit(frame)
        (self._urgent if frame.kind == message.FAILURE else self._queue).append(frame)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(IndexError):  # it is awake
            self._sleeper.pop()()

    def next(self) -> Frame:
        """Waits for the next frame. For sync actors."""
        while True:
            frame = self.poll()
            if frame is not None:
                return frame
            self._sleep()

    def _sleep(self) -> None:
        """Until there is a frame. Receives for the process meanwhile, where no other thread does."""
        self._stop.clear()
        self._sleeper.append(self._stop.set)
        if not (self._urgent or self._queue) and self._proc.receive_until(self._stop):
            return
        with contextlib.suppress(ValueError):
            self._sleeper.remove(self._stop.set)
        self._sleeper.append(self._gate.release)
        if self._urgent or self._queue:  # came meanwhile: nobody need wake us, unless somebody does already
            with contextlib.suppress(ValueError):
                self._sleeper.remove(self._gate.release)
                return
        self._gate.acquire()

    async def next_async(self) -> Frame:
        """The same on an event loop."""
        loop = asyncio.get_running_loop()
        while True:
            frame = self.poll()
            if frame is not None:
                return frame
            waiter = loop.create_future()

            def wake(waiter: asyncio.Future[None] = waiter) -> None:
                loop.call_soon_threadsafe(_end, waiter)

            self._sleeper.append(wake)
            if self._urgent or self._queue:
                with contextlib.suppress(ValueError):
                    self._sleeper.remove(wake)
                    continue
            await waiter

    def poll(self) -> Frame | None:
        """The next frame, or None. Only the actor's thread."""
        queue = self._urgent or self._queue
        if not queue:
            return None
        frame = self.at_hand = queue[0]  # first this: a cancellation that looks for it finds it in one of the two
        queue.popleft()
        if frame.flags & message.LARGE:
            self._release(frame)
        return frame

    def take_rest(self) -> Frame | None:
        """What will not be worked on: after the actor's end, for any thread."""
        for queue in (self._urgent, self._queue):
            with contextlib.suppress(IndexError):
                return queue.popleft()
        return None

    def find(self, address: str, reply: int) -> Frame | None:
        """The waiting call with this answer's number."""
        for frame in self._queue.copy():
            if frame.reply == reply and frame.address == address:
                return frame
        return None

    def _admit(self, frame: Frame) -> None:
        frame.fetched = Future.pending()
        try:
            size = frame.incoming.large_bytes
        except Exception as error:  # malformed, or nothing is left to look at it with
            return self._fetcher.give_up(frame, error)
        with self._lock:
            if self._deferred or (self._held and self._held + size > self._budget):
                self._deferred.append(frame)
                return
            self._held += size
            frame.held = size
            if self._sleeper and not self._queue and size <= _FETCHED_BY_ACTOR:
                self._left_to_actor.append(frame)  # it has nothing else to do, and this saves a hop
                return
        self._fetcher.fetch(frame)

    def _release(self, frame: Frame) -> None:
        start = []
        with self._lock:
            is_left = frame in self._left_to_actor
            if is_left:
                self._left_to_actor.remove(frame)
            if frame in self._deferred:  # it is its turn, whatever it needs
                self._deferred.remove(frame)
                start.append(frame)
            self._held -= frame.held
            while self._deferred:
                following = self._deferred[0]
                size = following.incoming.large_bytes
                if self._held and self._held + size > self._budget:
                    break
                self._held += size
                following.held = size
                start.append(self._deferred.popleft())
        for waiting in start:
            self._fetcher.fetch(waiting)
        if is_left:
            self._fetcher.fetch_now(frame)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
