"""Which processes are watched, for whom, and by what: heartbeats, or only the end of the connection.

Whoever waits for something of a process has it asked for a sign of life: its answer comes from there alone, over that
connection alone. Who only wants to know of its end (`standing`) leaves the heartbeats to the agents of the two hosts,
where these watch it; see guardians.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ... import config
from .guardians import Guardians

if TYPE_CHECKING:
    from ...rdma.messages import Inbox
    from .proc import Proc

__all__ = ["Watches"]

_UNWATCH_AFTER = 20  # heartbeats without anything pending


class Watches:
    """Those of one process. Any thread may ask."""

    def __init__(self, proc: Proc, inbox: Inbox) -> None:
        self._proc = proc
        self._inbox = inbox
        self._expecting: dict[str, set[int]] = {}  # by process: numbers that are told of its loss
        self._watched: set[str] = set()
        self._quiet: set[str] = set()  # of the watched ones: without heartbeats from here
        self._guardians = Guardians(proc, self.settle)

    def add(self, number: int, address: str, standing: bool) -> None:
        waiting = self._expecting.get(address)
        if waiting is None:
            waiting = self._expecting.setdefault(address, set())
        waiting.add(number)
        if standing:
            self._guardians.find(number, address)
        if address not in self._watched:
            self._watched.add(address)
            self._inbox.watch(address)
            self._look_later(address)
        elif address in self._quiet and not standing:
            self.ask_again(address)

    def discard(self, number: int, address: str) -> None:
        waiting = self._expecting.get(address)
        if waiting is not None:
            waiting.discard(number)

    def end(self, address: str) -> list[int]:
        """It is lost; who waited for it."""
        self._watched.discard(address)
        self._quiet.discard(address)
        self._guardians.forget(address)
        return list(self._expecting.pop(address, ()))

    def settle(self, address: str) -> None:
        """Ends heartbeats that nobody needs any more from here, and the watch where nobody needs that either."""
        waiting = self._expecting.get(address)
        if address not in self._watched or (address in self._quiet and waiting):
            return
        if not waiting:
            self._watched.discard(address)
            self._quiet.discard(address)
            self._guardians.forget(address)
            self._inbox.unwatch(address)
            if self._expecting.get(address):  # meanwhile
                self._watched.add(address)
                self._inbox.watch(address)
        elif self._guardians.suffice(address, waiting):
            self._quiet.add(address)
            self._inbox.watch(address, heartbeats=False)
            if not self._guardians.suffice(address, waiting):  # meanwhile
                self.ask_again(address)

    def ask_again(self, address: str) -> None:
        """By heartbeats from here."""
        if address in self._watched:
            self._quiet.discard(address)
            self._inbox.watch(address)

    def _look_later(self, address: str) -> None:
        when = time.monotonic() + _UNWATCH_AFTER * float(config.get("heartbeat_interval"))
        self._proc.timers.at(when, lambda: self._look(address))

    def _look(self, address: str) -> None:
        self.settle(address)
        if address in self._watched:
            self._look_later(address)
