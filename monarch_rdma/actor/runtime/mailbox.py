"""The queue of one actor: frames in the order in which they came, failures of what it owns before them."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ...errors import ResourceExhausted
from ...rdma.messages import Stop
from . import message
from .message import Frame
from .read_ahead import ReadAhead
from .route import PATIENCE

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Mailbox"]

_FETCHED_BY_ACTOR = 4 << 20  # bytes; more would hold its event loop up


class Mailbox:
    """Filled by any thread, emptied by the actor's own.

    Large buffers are fetched while a frame waits; see read_ahead.py.
    """

    def __init__(self, proc: Proc, about: Callable[[], str]) -> None:
        """`about`: whose it is, and what keeps it, for who is turned away."""
        self._proc = proc
        self._about = WeakMethod(about)  # no cycle: an ended actor lets go of its ports at once
        self._stop = Stop()
        self._urgent: deque[Frame] = deque()
        self._queue: deque[Frame] = deque()
        self.at_hand: Frame | None = None  # taken last
        self._sleeper: list[Callable[[], object]] = []  # who wakes the actor's thread, while it sleeps
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._ahead = ReadAhead(proc.fetcher)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, frame: Frame) -> None:
        if frame.flags & message.LARGE:
            is_admitted = self._ahead.admit(frame, self._leaves)
            if not is_admitted and not frame.flags & message.PATIENT:
                self._proc.timers.at(time.monotonic() + PATIENCE, partial(self._turn_away, frame))
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
            self._ahead.release(frame)
        return frame

    def take_rest(self) -> Frame | None:
        """What will not be worked on: after the actor's end, for any thread. Nobody waits for what is urgent."""
        with contextlib.suppress(IndexError):
            return self._queue.popleft()
        return None

    def find(self, address: str, reply: int) -> Frame | None:
        """The waiting call with this answer's number."""
        for frame in self._queue.copy():
            if frame.reply == reply and frame.address == address:
                return frame
        return None

    def _turn_away(self, frame: Frame) -> None:
        """A sender without a timeout of its own has waited for long enough: it may be whom the actor waits for."""
        what = self._ahead.turn_away(frame)
        if what is not None:
            frame.is_cancelled = frame.is_answered = True
            about = self._about()
            whose = "an actor that has ended" if about is None else about()
            error = ResourceExhausted(f"{whose} has no room for {what}", peer=frame.address, operation="call")
            self._proc.fetcher.give_up(frame, error, is_full=True)

    def _leaves(self, size: int) -> bool:
        """To the actor, if it has nothing else to do: this saves a hop."""
        return bool(self._sleeper) and not self._queue and size <= _FETCHED_BY_ACTOR


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
