"""Messages that are worked on for longer than their endpoint's limit: said once, and again when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import config
from ...supervision.events import emit

if TYPE_CHECKING:
    from .message import Frame
    from .proc import Proc
    from .timers import Timer

__all__ = ["Overdue"]


@dataclass
class _Watched:
    timer: Timer | None = None
    event: str | None = None  # that said so


class Overdue:
    """The limits of one actor. Costs nothing where there are none."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._limits: Mapping[str, float] = {}
        self._default = 0.0

    def declare(self, limits: Mapping[str, float]) -> None:
        """By method, in seconds; the others have that of option message_limit."""
        self._limits, self._default = limits, float(config.get("message_limit"))

    def begin(self, frame: Frame, tell: Callable[[Frame, float], str]) -> _Watched | None:
        """`tell(message, limit)` is called on the receiving thread; the id of the event that it has emitted."""
        if not self._limits and not self._default:
            return None
        limit = self._limits.get(frame.method.decode(), self._default)
        if not limit or not frame.method:
            return None
        watched = _Watched()

        def is_over() -> None:
            watched.event = tell(frame, limit)

        watched.timer = self._proc.timers.at(time.monotonic() + limit, is_over)
        return watched

    def end(self, watched: _Watched | None) -> None:
        if watched is None:
            return
        if watched.timer is not None:
            watched.timer.cancel()
            watched.timer = None  # which holds the message, and the actor
        if watched.event is not None:
            emit("stuck.over", cause=watched.event)
