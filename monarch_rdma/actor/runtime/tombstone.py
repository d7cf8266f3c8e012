"""Stands for an actor that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from .message import Frame
    from .proc import Proc

__all__ = ["Tombstone"]


class Tombstone:
    """Answers in its place."""

    def __init__(self, proc: Proc, name: str, why: str, flags: int = 0) -> None:
        """`flags`: of its answers."""
        self._proc = proc
        self._why = f"actor {name}: {why}"
        self._flags = flags

    def on_frame(self, frame: Frame) -> None:
        self._proc.refuse(frame, self._why, self._flags)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody."""
