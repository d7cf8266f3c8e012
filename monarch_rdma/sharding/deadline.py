"""Waiting for what other processes publish."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from ..rdma.engine import seconds

__all__ = ["Deadline", "store_wait"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds between looks
_LONGEST = 1e6  # seconds that a store is asked to wait where there is no limit


class Deadline:
    """A time, and pauses that grow until then. ConfigError for what are no seconds."""

    def __init__(self, timeout: float | None) -> None:
        seconds(timeout)
        self.timeout = timeout
        self._begin = time.monotonic()
        self._end = None if timeout is None else self._begin + timeout
        self._pause = _SHORTEST_PAUSE

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def spent(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin

    def hurry(self) -> None:
        """What is waited for next may come at once: the next pause is a short one."""
        self._pause = _SHORTEST_PAUSE

    def pause(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def store_wait(store: Any, key: str, limit: float | None) -> bool:
    """Whether the key is set in a torch.distributed Store, now or in so many seconds."""
    try:
        store.wait([key], timedelta(seconds=_LONGEST if limit is None else min(max(0.001, limit), _LONGEST)))
    except RuntimeError:  # torch's DistStoreError
        return False
    return True
