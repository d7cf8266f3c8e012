"""Deadlines of calls, looked after by the receiving thread."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Timer", "Timers"]

_FEW = 1024


@dataclass(order=True)
class Timer:
    when: float  # of time.monotonic()
    order: int
    action: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """It holds nothing any more."""
        self.action = None


class Timers:
    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: has run_due called again, as there is an earlier timer."""
        self._heap: list[Timer] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._wake = wake
        self._sweep_at = _FEW

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        with self._lock:
            timer = Timer(when, next(self._order), action)
            if len(self._heap) >= self._sweep_at:
                self._sweep()
            heapq.heappush(self._heap, timer)
            is_first = self._heap[0] is timer
        if is_first:
            self._wake()
        return timer

    def _sweep(self) -> None:
        """Takes out what was cancelled, so that many calls with far deadlines do not pile up."""
        self._heap = [timer for timer in self._heap if timer.action is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(_FEW, 2 * len(self._heap))

    def run_due(self) -> float | None:
        """Seconds until the next one; None where there is none."""
        while True:
            with self._lock:
                while self._heap and self._heap[0].action is None:
                    heapq.heappop(self._heap)
                if not self._heap:
                    return None
                left = self._heap[0].when - time.monotonic()
                if left > 0:
                    return left
                action = heapq.heappop(self._heap).action
            if action is not None:
                action()
