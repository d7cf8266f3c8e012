"""Finds processes that live and give no sign of it: stopped, or held in the kernel. They are ended.

Heartbeats are answered by a process's native thread, so one that computes, or holds the GIL, is not meant. Nobody talks
to a process again that was silent for heartbeat_timeout; ended, it is like any other that has ended, and its owner is
told.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from ..launch.started import Started, dumps_core, is_stopped

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from ..runtime.message import Frame
    from ..runtime.proc import Proc

__all__ = ["Pulse"]

_LEAVING = 5.0  # seconds from the end of its connection to that of a process that ends by itself


class Pulse:
    """Watches the processes that a host's agent has started."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._processes: dict[str, Started] = {}  # by address
        self._silent: dict[Started, str] = {}
        self._number = proc.register(self)

    def watch(self, address: str, process: Started) -> None:
        self._processes[address] = process
        self._proc.expect(self._number, address)
        process.on_exit(partial(self._unwatch, address))

    def verdict(self, process: Started) -> str | None:
        """Why it was ended from here, in words."""
        return self._silent.pop(process, None)

    def _unwatch(self, address: str, process: Started) -> None:
        self._processes.pop(address, None)
        self._proc.fulfil(self._number, address)

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, address: str, error: SupervisionError) -> None:
        process = self._processes.get(address)
        if process is None:
            return
        if is_stopped(process.pid):
            self._end(process, error)
        else:
            self._end_later(process, error)

    def _end_later(self, process: Started, error: SupervisionError) -> None:
        self._proc.timers.at(time.monotonic() + _LEAVING, partial(self._end, process, error))

    def _end(self, process: Started, error: SupervisionError) -> None:
        if process.returncode is not None:
            return
        if dumps_core(process.pid):  # it ends by itself, and says more than if it was killed
            return self._end_later(process, error)
        self._silent[process] = f"it was killed, as it could not be reached any more ({error})"
        if not process.kill():
            self._silent.pop(process, None)
