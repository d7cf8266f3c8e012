"""Counts what happens on any thread, without a lock where it happens."""

from __future__ import annotations

import itertools
import threading

__all__ = ["Tally"]


class Tally:
    """`add()` raises it by one: some tens of nanoseconds, atomic."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._reads = 0
        self.add = self._count.__next__

    def read(self) -> int:
        with self._lock:
            value = next(self._count) - self._reads  # a read counts too
            self._reads += 1
        return value
