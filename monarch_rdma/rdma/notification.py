"""Numbers that writers post to a region when their bytes are visible there."""

from __future__ import annotations

import time

from ..errors import AccessDenied
from .completions import Completions
from .engine import seconds
from .region import Region

__all__ = ["Notifications"]

_SLICE = 0.05  # seconds that one wait in the core lasts: the most that Ctrl-C, cancel and drop have to wait


class Notifications:
    """Iterates over a region's notifications, with `for` or `async for`, until it is dropped. Each comes once."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def next(self, timeout: float | None = None) -> int:
        """Waits for the next one. The builtin TimeoutError after `timeout` seconds; AccessDenied once it is dropped."""
        limit = seconds(timeout)
        deadline = time.monotonic() + limit if limit >= 0 else None
        while True:
            left = _SLICE if deadline is None else deadline - time.monotonic()
            value = self._region.take_notification(min(max(left, 0.0), _SLICE))
            if value is not None:
                return value
            if left <= 0:
                raise TimeoutError(f"no notification came within {timeout} s")

    def __iter__(self) -> Notifications:
        return self

    def __next__(self) -> int:
        try:
            return self.next()
        except AccessDenied:
            raise StopIteration from None

    def __aiter__(self) -> Notifications:
        return self

    async def __anext__(self) -> int:
        import asyncio

        loop = asyncio.get_running_loop()
        try:
            while (value := self._region.take_notification(0)) is None:
                await Completions.of(self._region.engine, loop).notified(self._region)
        except AccessDenied:
            raise StopAsyncIteration from None
        return value
