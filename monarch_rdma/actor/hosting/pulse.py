"""Finds processes that live and give no sign of it. Those that are stopped, or held in the kernel, are ended; those in
which only Python does not run are reported as stuck.

Heartbeats are answered by a process's native thread: without them nobody talks to a process again, so it is ended, and
is like any other that has ended. Questions, which are rare, are answered by its receiving thread, which needs the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ... import config
from ...supervision.events import emit
from ..launch.started import Started, dumps_core, is_stopped
from ..runtime import message

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from ..runtime.message import Frame
    from ..runtime.proc import Proc

__all__ = ["PULSE", "Pulse", "Pulsing"]

PULSE = 6  # the number in each process that answers

_LEAVING = 5.0  # seconds from the end of its connection to that of a process that ends by itself


class Pulse:
    """Watches the processes that a host's agent has started."""

    def __init__(self, proc: Proc, on_stuck: Callable[[str, Started, float], str]) -> None:
        """`on_stuck(address, process, seconds)` is called on the receiving thread; the id of an event."""
        self._proc = proc
        self._processes: dict[str, Started] = {}  # by address
        self._silent: dict[Started, str] = {}
        self._on_stuck = on_stuck
        self._asked: dict[str, float] = {}  # by address: since when an answer is waited for
        self._stuck: dict[str, str] = {}  # by address: the event that said so
        self._next = 0.0  # when to ask again
        self._number = proc.register(self)

    def watch(self, address: str, process: Started) -> None:
        self._processes[address] = process
        self._ask_by(float(config.get("stuck_timeout")))
        self._proc.expect(self._number, address)
        process.on_exit(partial(self._unwatch, address))

    def verdict(self, process: Started) -> str | None:
        """Why it was ended from here, in words."""
        return self._silent.pop(process, None)

    def _unwatch(self, address: str, process: Started) -> None:
        self._processes.pop(address, None)
        self._asked.pop(address, None)
        self._stuck.pop(address, None)
        self._proc.fulfil(self._number, address)

    def _ask_by(self, timeout: float) -> None:
        """Asks all within half of that, unless they are asked sooner."""
        when = time.monotonic() + timeout / 2
        if timeout and not (self._next and self._next <= when):
            self._next = when
            self._proc.timers.at(when, partial(self._ask, when, timeout))

    def _ask(self, when: float, timeout: float) -> None:
        now, late = time.monotonic(), time.monotonic() - when
        if when != self._next:  # another one comes sooner
            return
        self._next = 0.0
        if not self._processes:
            return
        for address, process in self._processes.copy().items():
            if address not in self._asked or late > timeout / 4:  # we did not run ourselves: answers may wait here
                self._asked[address] = now
                self._proc.post_quietly(address, message.pack(message.CALL, PULSE, reply=self._number))
            elif now - self._asked[address] >= timeout * 0.9 and address not in self._stuck:
                self._stuck[address] = self._on_stuck(address, process, now - self._asked[address])
        self._ask_by(float(config.get("stuck_timeout")))

    def on_frame(self, frame: Frame) -> None:
        """It runs Python."""
        self._asked.pop(frame.address, None)
        event = self._stuck.pop(frame.address, None)
        if event is not None:
            emit("stuck.over", cause=event)

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


class Pulsing:
    """The end of a process that is asked."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        proc.register(self, PULSE)

    def on_frame(self, frame: Frame) -> None:
        self._proc.post_quietly(frame.address, message.pack(message.SEND, frame.reply))

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody."""
