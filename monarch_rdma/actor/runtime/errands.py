"""What may have to wait for another process: done aside, in order for each of them, and for several at the same time.

So a process that takes nothing, or whose memory is slow to read, holds up nobody but itself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue

__all__ = ["Errands"]

_log = logging.getLogger("monarch_rdma.actor")
_LINGER = 5.0  # seconds that a thread waits for the next process that needs one
Errand = Callable[[], object]


class Errands:
    """Threads come as they are needed, one for each line of errands, and go when they were idle for a while."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[Errand]] = {}  # those with something in them; one thread works on each
        self._ready: SimpleQueue[Hashable | None] = SimpleQueue()  # lines that have no thread yet
        self._idle: list[None] = []  # one for each thread that waits for one of these
        self._lock = threading.RLock()  # destructors of users may come in between, at any point
        self._is_closed = False

    def __contains__(self, line: Hashable) -> bool:
        """Whether something is to be done there, or is at hand."""
        return line in self._lines

    def run(self, line: Hashable, errand: Errand) -> None:
        """Does it after all that was given for this line before. Nothing after close."""
        if self._is_closed:
            return
        fresh: deque[Errand] = deque()
        with self._lock:
            waiting = self._lines.setdefault(line, fresh)
            waiting.append(errand)
        if waiting is not fresh:  # a thread is at it
            return
        self._ready.put(line)
        try:
            self._idle.pop()
        except IndexError:
            threading.Thread(target=self._work, name="monarch_rdma-errands", daemon=True).start()

    def close(self) -> None:
        """What was given before is done."""
        self._is_closed = True
        self._ready.put(None)

    def _work(self) -> None:
        while (line := self._next()) is not None:
            self._do_all(line)
            self._idle.append(None)

    def _next(self) -> Hashable | None:
        """A line that has no thread yet. None: the thread may go."""
        while True:
            try:
                line = self._ready.get(timeout=_LINGER)
            except Empty:
                try:
                    self._idle.pop()
                except IndexError:  # it is counted on
                    continue
                return None
            if line is None:
                self._ready.put(None)  # for the others
            return line

    def _do_all(self, line: Hashable) -> None:
        waiting = self._lines[line]
        while True:
            while waiting:
                self._do(waiting.popleft())
            with self._lock:
                if waiting:
                    continue
                del self._lines[line]
            if not waiting:  # else a destructor has come in between
                return

    def _do(self, errand: Errand) -> None:
        try:
            errand()
        except Exception:  # one must not end the others
            _log.exception("something for another process could not be done")
