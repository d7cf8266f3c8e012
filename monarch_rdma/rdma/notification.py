"""Numbers that writers post to a region when their bytes are visible there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import AccessDenied
from .engine import seconds
from .region import Region

if TYPE_CHECKING:
    import asyncio

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
        """Waits in a thread: the core has no descriptor to watch for notifications."""
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            wait = loop.run_in_executor(None, self._region.take_notification, _SLICE)
            try:
                value = await asyncio.shield(wait)
            except asyncio.CancelledError:
                wait.add_done_callback(self._give_back)
                raise
            except AccessDenied:
                raise StopAsyncIteration from None
            if value is not None:
                return value

    def _give_back(self, wait: asyncio.Future[int | None]) -> None:
        """What a cancelled wait still took is the next one's."""
        if wait.exception() is None and (value := wait.result()) is not None:
            self._region.given_back.append(value)
