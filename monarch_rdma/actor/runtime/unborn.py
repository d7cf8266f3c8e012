"""Stands for an actor whose first message has not come yet, although others' messages have.

Meshes can be sent on at once, and messages of several senders have no order: those that come too early wait here.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .message import Frame

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from .proc import Proc, Receiver

__all__ = ["FIRST_ACTOR", "Unborn"]

_PATIENCE = 60.0  # seconds for the first message to come
FIRST_ACTOR = 1 << 62  # from here on numbers are random, and of actors that were spawned


class Unborn:
    def __init__(self, proc: Proc, number: int) -> None:
        self._proc = proc
        self._number = number
        self._early: list[Frame] = []
        self._lock = threading.Lock()
        self._successor: Receiver | None = None
        self._timer = proc.timers.at(time.monotonic() + _PATIENCE, self._give_up)

    def on_frame(self, frame: Frame) -> None:
        with self._lock:
            if self._successor is None:
                return self._early.append(frame)
        self._successor.on_frame(frame)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Only at the end of this process."""
        self._refuse_all(str(error))

    def give_way(self, actor: Receiver) -> None:
        """To the actor, which has got its first message."""
        self._timer.cancel()
        with self._lock:
            for frame in self._early:
                actor.on_frame(frame)
            self._early.clear()
            self._successor = self._proc.receivers[self._number] = actor

    def _give_up(self) -> None:
        with self._lock:
            if self._successor is None:
                self._proc.forget(self._number)
        self._refuse_all(f"there is no actor {self._number:x} in process {self._proc.name}")

    def _refuse_all(self, why: str) -> None:
        with self._lock:
            early, self._early = self._early, []
        for frame in early:
            self._proc.refuse(frame, why)
