"""Memory that large buffers of messages are read into: mapped in huge pages, and used again while it is warm.

The kernel zeroes new pages when they are first touched, which takes longer than to copy a tensor into them. So blocks
that nobody uses any more are kept for a short time; what is kept is bounded, and goes back when it was idle.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

from ...rdma.memory import bytes_at, memory_of

__all__ = ["BlockPool", "pool"]

_HUGE_PAGE = 2 << 20
_SMALL_UNIT = 128 << 10
_SLACK = 4  # a block may be larger than what is asked for by one part in so many
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: all pages at once, rather than each when the copy comes to it
_STEP = 16 << 20  # bytes of it at once: other Python threads get their turn in between


class _Block:
    def __init__(self, size: int) -> None:
        self.size = size
        self.mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise(mmap.MADV_HUGEPAGE, 0, size)
        for start in range(0, size, _STEP):
            if not self._advise(_POPULATE_WRITE, start, min(_STEP, size - start)):
                break
        self.address = memory_of(memoryview(self.mapping), "block").address
        self.idle_since = 0.0

    def _advise(self, what: int, start: int, length: int) -> bool:
        """Whether the kernel could do it. These are wishes: an older kernel does not know them, and nothing is lost."""
        try:
            self.mapping.madvise(what, start, length)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            return False
        return True


class BlockPool:
    """Blocks of memory of this process. Any thread may use it; blocks come back from destructors, too."""

    def __init__(self, *, idle_bytes: int = 512 << 20, idle_seconds: float = 10.0) -> None:
        """Keeps at most `idle_bytes` that nobody uses, each for at most about twice `idle_seconds`."""
        self._most = idle_bytes
        self._seconds = idle_seconds
        self._idle: deque[_Block] = deque()  # the one freed last is at the end. Its methods are atomic: no lock,
        self._freed: SimpleQueue[None] = SimpleQueue()  # as a destructor may run in the midst of any of ours
        self._collector: threading.Thread | None = None
        self._starting = threading.Lock()

    def take(self, size: int) -> memoryview:
        """`size` > 0 writable bytes at the start of a page, with anything in them. They come back with the last view.

        MemoryError where the system has none.
        """
        self._start()
        block = self._take_idle(size) or _new_block(size)

        def give_back(_: Any) -> None:
            block.idle_since = time.monotonic()
            self._idle.append(block)
            while self.idle_bytes > self._most and self._drop_oldest():
                continue
            if self._freed.empty():
                self._freed.put(None)

        return memoryview(bytes_at(block.address, size, give_back))

    @property
    def idle_bytes(self) -> int:
        """Bytes kept that nobody uses."""
        return sum([block.size for block in list(self._idle)])

    def trim(self, now: float) -> None:
        """Gives back what was idle for `idle_seconds` at the time `now` of time.monotonic."""
        for block in list(self._idle):
            if now - block.idle_since >= self._seconds:
                self._remove(block)

    def _take_idle(self, size: int) -> _Block | None:
        """The smallest idle block that fits; of equal ones that used last, which the caches may still hold."""
        fitting = [
            block for block in reversed(list(self._idle)) if size <= block.size <= _rounded(size + size // _SLACK)
        ]
        for block in sorted(fitting, key=lambda block: block.size):
            if self._remove(block):
                return block
        return None

    def _remove(self, block: _Block) -> bool:
        """Whether it was idle still: another thread may have taken it."""
        try:
            self._idle.remove(block)
        except ValueError:
            return False
        return True

    def _drop_oldest(self) -> bool:
        try:
            self._idle.popleft()
        except IndexError:
            return False
        return True

    def _start(self) -> None:
        with self._starting:
            if self._collector is None:
                self._collector = threading.Thread(target=self._collect, name="monarch-rdma-blocks", daemon=True)
                self._collector.start()

    def _collect(self) -> None:
        """Sleeps as long as nothing is idle."""
        while True:
            self._freed.get()
            while self._idle:
                time.sleep(self._seconds)
                self.trim(time.monotonic())

    def forget(self) -> None:
        """After a fork, in the child: its parent's thread is not here, and what was idle is not needed."""
        self._collector, self._starting = None, threading.Lock()
        self._idle.clear()
        self._freed = SimpleQueue()


def _new_block(size: int) -> _Block:
    try:
        return _Block(_rounded(size))
    except OSError as error:
        raise MemoryError(f"no memory for a message's buffer of {size} bytes: {error.strerror}") from error


def _rounded(size: int) -> int:
    unit = _HUGE_PAGE if size >= 8 * _HUGE_PAGE else _SMALL_UNIT  # wastes at most an eighth
    return -(-size // unit) * unit


pool = BlockPool()
os.register_at_fork(after_in_child=pool.forget)
