"""What asyncio waits for, of the core: ends of operations, and notifications.

One queue per engine and event loop, woken by its file descriptor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._engine import ffi, lib
from .engine import raise_error

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from asyncio import Future as LoopFuture

    from .engine import Engine
    from .region import Region

_BATCH = 256


class Completions:
    """Turns finished operations and notifications into asyncio futures of one loop, without a thread."""

    def __init__(self, engine: Engine, loop: AbstractEventLoop) -> None:
        self._queue: Any = None
        self._engine = engine
        out, error = ffi.new("mr_completions **"), ffi.new("mr_error *")
        if kind := lib.mr_completions_create(engine.handle, out, error):
            raise_error(error, kind, operation="await")
        self._queue = out[0]
        self._loop = weakref.ref(loop)  # the loop holds us, through its reader
        self._fd = lib.mr_completions_fd(self._queue)
        self._tags = ffi.new("uint64_t[]", _BATCH)
        self._next_tag = 0
        self._waiting: dict[int, list[LoopFuture[None]]] = {}
        self._notified: weakref.WeakKeyDictionary[Region, int] = weakref.WeakKeyDictionary()  # the last tag of each
        loop.add_reader(self._fd, self._on_readable)

    @classmethod
    def of(cls, engine: Engine, loop: AbstractEventLoop) -> Completions:
        queue = engine.queues.get(loop)
        if queue is None:
            queue = engine.queues[loop] = cls(engine, loop)
        return queue

    def belongs_to(self, loop: AbstractEventLoop) -> bool:
        return self._loop() is loop

    def add(self, op: Any) -> int:
        """Has the queue told when op ends; its tag. An operation can be in one queue only."""
        tag = self._new_tag()
        lib.mr_completions_add(self._queue, op, tag)
        return tag

    def notified(self, region: Region) -> LoopFuture[None]:
        """Ends when the region has a notification, or is dropped. All who wait at a time are woken by one tag."""
        tag = self._notified.get(region)
        if tag is None or tag not in self._waiting:
            tag = self._notified[region] = self._new_tag()
            lib.mr_region_notified(region.handle, self._queue, tag)
        return self.waiter(tag)

    def _new_tag(self) -> int:
        tag = self._next_tag = self._next_tag + 1
        self._waiting[tag] = []
        return tag

    def waiter(self, tag: int) -> LoopFuture[None]:
        """An asyncio future that ends with what this tag was given for."""
        loop = self._loop()
        assert loop is not None, "only its own loop waits"
        waiter: LoopFuture[None] = loop.create_future()
        if tag in self._waiting:
            self._waiting[tag] = [other for other in self._waiting[tag] if not other.done()] + [waiter]
        else:
            waiter.set_result(None)
        return waiter

    def _on_readable(self) -> None:
        while count := lib.mr_completions_take(self._queue, self._tags, _BATCH):
            for tag in self._tags[0:count]:
                for waiter in self._waiting.pop(tag, ()):
                    if not waiter.done():
                        waiter.set_result(None)

    def __del__(self, close: Callable[[Any], None] = lib.mr_completions_close) -> None:
        if self._queue is not None and not self._engine.is_forked:
            close(self._queue)
