"""The way from this process to one actor elsewhere, and how many of our messages are in its mailbox."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from typing import TYPE_CHECKING

from ... import config
from ...errors import ResourceExhausted

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from ..future import Future
    from .proc import Proc

__all__ = ["CREDIT_BATCH", "PATIENCE", "Route"]

PATIENCE = 60.0  # seconds a sender without a timeout of its own waits for room
CREDIT_BATCH = 32  # messages that a receiver takes before it says so; below the least mailbox_messages


class Route:
    """Shared by all of this process that talk to the actor: a sender waits while the mailbox is full."""

    __slots__ = (
        "__weakref__",
        "_credited",
        "_gates",
        "_limit",
        "_lock",
        "_sent",
        "address",
        "after",
        "error",
        "last_direct",
        "number",
    )

    def __init__(self, proc: Proc, address: str, number: int) -> None:
        self.address = address
        self.number = number
        self.error: SupervisionError | None = None  # the process is lost
        self.after: Future[None] | None = None  # a cast on its way over a tree: what is sent next must not overtake it
        self.last_direct = 0  # the last message that went there directly, and is not known to have arrived
        self._limit = int(config.get("mailbox_messages"))
        self._sent = itertools.count()  # next() is atomic
        self._credited = 0
        self._lock = threading.Lock()
        self._gates: list[_thread.LockType] = []

    def enter(self, deadline: float) -> None:
        """Takes a place in the mailbox, waiting for one. ResourceExhausted at `deadline` (of time.monotonic), or
        SupervisionError where the process is lost.
        """
        if self.after is not None:
            self._await_cast(deadline)
        place = next(self._sent)
        if place - self._credited < self._limit:
            return
        while self.error is None:
            gate = _thread.allocate_lock()
            gate.acquire()
            with self._lock:
                if place - self._credited < self._limit:
                    return
                self._gates.append(gate)
            if not gate.acquire(True, max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                self.on_credit(1)  # the place is given back
                raise ResourceExhausted(
                    f"the mailbox of actor {self.number:x} in {self.address.partition('?')[0]} stays full with "
                    f"{self._limit} messages of this process (option mailbox_messages)",
                    peer=self.address,
                    operation="call",
                )
        raise self.error

    def _await_cast(self, deadline: float) -> None:
        after = self.after
        if after is not None and not after.wait(max(0.0, deadline - time.monotonic())):
            raise ResourceExhausted(
                f"a cast to actor {self.number:x} in {self.address.partition('?')[0]} is still on its way",
                peer=self.address,
                operation="call",
            )
        self.after = None

    def on_credit(self, count: int) -> None:
        with self._lock:
            self._credited += count
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def on_lost(self, error: SupervisionError) -> None:
        self.error = error
        self.on_credit(0)
