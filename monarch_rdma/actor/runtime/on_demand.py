"""Actors of the library that most programs do without: made, with their threads, when the first message comes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from .message import Frame
    from .proc import Proc

__all__ = ["offer"]


def offer(proc: Proc, number: int, cls: type, name: str) -> bool:
    """Makes an actor reachable under a number that everyone knows. False where there is one already."""
    stand_in = _OnDemand(proc, number, cls, name)
    return proc.receivers.setdefault(number, stand_in) is stand_in


class _OnDemand:
    """Stands for the actor until it is needed."""

    def __init__(self, proc: Proc, number: int, cls: type, name: str) -> None:
        self._proc = proc
        self._number = number
        self._cls = cls
        self._name = name
        self._lock = threading.Lock()

    def on_frame(self, frame: Frame) -> None:
        if self._proc.is_ending:  # nobody would end it any more
            return self._proc.refuse(frame, f"process {self._proc.name} ends")
        with self._lock:
            if self._proc.receivers.get(self._number) is self:
                self._proc.start_local(self._number, self._cls, self._name)
        self._proc.receivers[self._number].on_frame(frame)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody."""
