"""While a call waits where nobody may know of a lost member: ends it, where the group of all members has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..rdma.group import CoreGroup

__all__ = ["Guard"]

_LOOK = 0.02  # seconds between looks, while a call runs
_NEVER = float("inf")


class Guard:
    """Calls `end` once, from a thread of its own: when `whole` has failed, or a call is not over at its deadline."""

    def __init__(self, whole: CoreGroup, end: Callable[[], None]) -> None:
        self._whole, self._end = whole, end
        self._changed = threading.Condition()
        self._deadline: float | None = None  # of the call that runs
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, deadline: float = _NEVER) -> Iterator[None]:
        """While a call runs, until `deadline` by time.monotonic()."""
        with self._changed:
            self._deadline = deadline
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="monarch_rdma-guard", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            self._deadline = None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _serve(self) -> None:
        while not self._is_closed:
            deadline = self._deadline
            if self._whole.failed_rank is not None or (deadline is not None and time.monotonic() > deadline):
                self._end()
                return
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(_LOOK if self._deadline is not None else None)
