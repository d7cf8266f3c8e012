"""Standing watches between hosts: heartbeats go once per pair of hosts, between their agents.

A worker is watched by the agent of its host, its guardian, from the kernel and by heartbeats on that host; one that is
stopped is killed, and its connections end. So whoever wants to know of its end, and waits for nothing else of it, needs
only to know that its guardian lives: he watches that one by heartbeats, and the worker by the end of its connection. A
worker leaves the former to the agent of its own host as well, which asks for all.

Until the guardian is known, and where there is none, or it is lost and the worker may live, heartbeats go from here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...rdma.messages import says_cut_off
from . import message

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from .message import Frame
    from .proc import Proc

__all__ = ["GUARDIANS", "Guardians", "is_same_host"]

GUARDIANS = 7  # the number in each process


class Guardians:
    """Of the processes that this one watches; and, where it is an agent, what it watches for others."""

    def __init__(self, proc: Proc, on_known: Callable[[str], None]) -> None:
        """`on_known(address)`: from now on somebody else sends heartbeats to this one."""
        self._proc = proc
        self._on_known = on_known
        self._standing: dict[str, set[int]] = {}  # by process elsewhere: numbers that only want to know of its end
        self._guardians: dict[str, str] = {}  # by process: who tells us if there is no sign of life any more
        self._asked_by: dict[str, set[str]] = {}  # by process: those on this host for whom we watch it
        self._lock = threading.RLock()
        proc.register(self, GUARDIANS)

    def find(self, number: int, address: str) -> None:
        """This number watches a process, and waits for nothing else of it."""
        if is_same_host(address, self._proc.address):
            return
        is_new = address not in self._standing
        self._standing.setdefault(address, set()).add(number)
        if is_new:
            self._tell(address, message.CALL, b"guardian")

    def suffice(self, address: str, waiting: set[int]) -> bool:
        """Whether these need no heartbeats from here."""
        return address in self._guardians and waiting <= self._standing.get(address, set())

    def forget(self, address: str) -> None:
        """It is lost, or nobody watches it any more."""
        with self._lock:
            self._standing.pop(address, None)
            guardian = self._guardians.pop(address, None)
            if guardian == self._proc.agent:
                self._tell(guardian, message.CALL, b"unwatch", address)
            elif guardian is not None:
                self._unwatch_if_idle(guardian)

    # --- frames

    def on_frame(self, frame: Frame) -> None:
        sender, what = frame.address, bytes(frame.body).decode()
        if frame.kind == message.CALL:
            self._on_asked(sender, frame.method, what)
        elif frame.method == b"guardian":
            self._on_named(sender, what)
        elif frame.method == b"watch":
            self._on_guarded(what, sender)
        elif frame.method == b"lost":
            address, _, why = what.partition("\n")
            self._on_guardian_lost(address, why)

    def _on_asked(self, sender: str, method: bytes, address: str) -> None:
        if method == b"guardian":
            self._tell(sender, message.SEND, method, self._proc.agent)
        elif method == b"watch":
            self._asked_by.setdefault(address, set()).add(sender)
            self._tell(sender, message.SEND, method, address)  # first: it may be lost already
            self._proc.expect(GUARDIANS, sender)
            self._proc.expect(GUARDIANS, address)
        elif method == b"unwatch":
            self._unasked(address, sender)

    def _on_named(self, address: str, guardian: str) -> None:
        if guardian != address:
            self._on_guarded(address, guardian)
        elif self._proc.agent != self._proc.address:
            self._tell(self._proc.agent, message.CALL, b"watch", address)

    def _on_guarded(self, address: str, guardian: str) -> None:
        with self._lock:
            if address not in self._standing:
                return
            self._guardians[address] = guardian
            if guardian != self._proc.agent:
                self._proc.expect(GUARDIANS, guardian, standing=True)
        self._on_known(address)

    # --- losses

    def on_lost(self, address: str, error: SupervisionError) -> None:
        for asker in self._asked_by.pop(address, ()):
            self._tell(asker, message.SEND, b"lost", f"{address}\n{error}")
        for watched, askers in list(self._asked_by.items()):
            if address in askers:
                self._unasked(watched, address)
        for guarded, guardian in list(self._guardians.items()):
            if guardian == address:
                self._on_guardian_lost(guarded, str(error))

    def _on_guardian_lost(self, address: str, why: str) -> None:
        """A host that is cut off is so with all that runs there. Else heartbeats go from here again."""
        if self._guardians.pop(address, None) is not None:
            self._proc.on_guardian_lost(address, why, is_cut_off=says_cut_off(why))

    def _unasked(self, address: str, asker: str) -> None:
        askers = self._asked_by.get(address, set())
        askers.discard(asker)
        if not askers:
            self._asked_by.pop(address, None)
            self._unwatch_if_idle(address)
        if not any(asker in others for others in self._asked_by.values()):
            self._proc.fulfil(GUARDIANS, asker)

    def _unwatch_if_idle(self, address: str) -> None:
        with self._lock:
            if address not in self._asked_by and address not in self._guardians.values():
                self._proc.fulfil(GUARDIANS, address)

    def _tell(self, address: str, kind: int, method: bytes, what: str = "") -> None:
        self._proc.post_quietly(address, message.pack(kind, GUARDIANS, method=method), what.encode())


def is_same_host(one: str, other: str) -> bool:
    """Of two complete addresses: whether they name one running system."""
    return _boot_of(one) == _boot_of(other)


def _boot_of(address: str) -> str:
    return next((part for part in address.partition("?")[2].split("&") if part.startswith("boot=")), "")
