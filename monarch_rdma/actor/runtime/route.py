"""The ways from this process to actors elsewhere, and how many of our messages are in their mailboxes."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ... import config
from ...errors import ResourceExhausted
from ...rdma.living import living

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from ..future import Future
    from .proc import Proc

__all__ = ["CREDIT_BATCH", "PATIENCE", "Route", "Routes"]

PATIENCE = 60.0  # seconds a sender without a timeout of its own waits for room
CREDIT_BATCH = 32  # messages that a receiver takes before it says so; below the least mailbox_messages
_FEW = 4096


class Route:
    """Shared by all of this process that talk to the actor: a sender waits while the mailbox is full."""

    __slots__ = (
        "__weakref__",
        "_credited",
        "_gates",
        "_limit",
        "_lock",
        "_place",
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
        self._place = -1  # of the last message
        self._credited = 0
        self._lock = threading.Lock()
        self._gates: list[_thread.LockType] = []

    def enter(self, deadline: float, *, takes_place: bool = True) -> None:
        """Takes a place in the mailbox, waiting for one. ResourceExhausted at `deadline` (of time.monotonic), or
        SupervisionError where the process is lost.
        """
        if self.error is not None:
            raise self.error
        if self.after is not None:
            self._await_cast(deadline)
        if not takes_place:
            return
        place = self._place = next(self._sent)
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
                self.give_back()
                raise ResourceExhausted(
                    f"the mailbox of actor {self.number:x} in {self.address.partition('?')[0]} stays full with "
                    f"{self._limit} messages of this process (option mailbox_messages)",
                    peer=self.address,
                    operation="call",
                )
        raise self.error

    def _await_cast(self, deadline: float) -> None:
        after = self.after
        if after is not None and not after.done() and not after.wait(max(0.0, deadline - time.monotonic())):
            raise ResourceExhausted(
                f"a cast to actor {self.number:x} in {self.address.partition('?')[0]} is still on its way",
                peer=self.address,
                operation="call",
            )

    @property
    def is_idle(self) -> bool:
        """Whether a new one would do as well."""
        is_under_way = self.after is not None and not self.after.done()
        return self.error is not None or not (is_under_way or self._place - self._credited >= CREDIT_BATCH)

    def begin_cast(self, done: Future[None]) -> tuple[Future[None] | None, bool]:
        """What is sent from now on waits for `done`. The cast before this one, and whether the last message went there
        directly and may be on its way still.
        """
        before, self.after = self.after, done
        is_direct, self.last_direct = self.last_direct != 0, 0
        return before, is_direct

    def give_back(self) -> None:
        """The place of a message that was not sent after all."""
        self.on_credit(1)

    def on_credit(self, count: int) -> None:
        with self._lock:
            self._credited += count
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def on_lost(self, error: SupervisionError) -> None:
        self.error = error
        self.on_credit(0)

    def on_back(self) -> None:
        """Over another connection: what was in the mailbox is not known any more."""
        with self._lock:
            self._sent, self._place, self._credited = itertools.count(), -1, 0
            self.after, self.last_direct = None, 0
            self.error = None


class Routes:
    """All of a process. One that is in use goes on although nobody holds it: the next mesh with this actor finds it."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._all: weakref.WeakValueDictionary[tuple[str, int], Route] = weakref.WeakValueDictionary()
        self._kept: dict[tuple[str, int], Route] = {}
        self._sweep_at = _FEW
        self._lock = threading.Lock()

    def to(self, address: str, number: int) -> Route:
        route = self.known(address, number)
        return self._make((address, number)) if route is None else route

    def known(self, address: str, number: int) -> Route | None:
        """None where nothing is on its way."""
        return self._all.get((address, number))

    def on_lost(self, address: str, error: SupervisionError) -> None:
        for route in self._to_process(address):
            route.on_lost(error)

    def on_back(self, address: str) -> None:
        for route in self._to_process(address):
            if route.error is not None:
                route.on_back()

    def _to_process(self, address: str) -> list[Route]:
        return [route for route in living(self._all) if route.address == address]

    def _make(self, key: tuple[str, int]) -> Route:
        with self._lock:
            route = self._all.get(key)
            if route is None:
                if len(self._kept) >= self._sweep_at:
                    self._kept = {key: route for key, route in self._kept.items() if not route.is_idle}
                    self._sweep_at = max(_FEW, 2 * len(self._kept))
                route = self._all[key] = self._kept[key] = Route(self._proc, *key)
        return route
