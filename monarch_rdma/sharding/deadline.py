"""Waiting for what other processes publish."""

from __future__ import annotations

import time

__all__ = ["Deadline"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds between looks


class Deadline:
    """A time, and pauses that grow until then."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout
        self._pause = _SHORTEST_PAUSE

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def pause(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
