"""In the agent of a job's host: tells the job's clients what the scheduler lets the host know, and ends with them."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..actor import Actor, SupervisionError
from ..actor.endpoint import concurrent_endpoint
from ..actor.runtime import message
from ..actor.runtime.message import Frame
from ..actor.runtime.proc import Proc, current_proc

__all__ = ["ENDING", "NOTICES", "TOLD", "WARNED", "JobAgent", "Subscribers", "offer_notices"]

NOTICES = 7  # the number of the actor in its process
TOLD = "monarch-rdma agent at "  # begins the line in which an agent says where it listens, and its pid
ENDING, WARNED = "ending", "warned"  # kinds of notices: the host ends now, or soon


class Subscribers:
    """The clients of this host. `idle`: seconds without any, from the start, after which `on_deserted(why)` is called;
    `linger`: seconds after the last one was lost. math.inf: never.
    """

    def __init__(self, proc: Proc, idle: float, linger: float, on_deserted: Callable[[str], None]) -> None:
        self._proc = proc
        self._linger = linger
        self._on_deserted = on_deserted
        self._numbers: dict[str, int] = {}  # where each client hears, by its address
        self._unheard: set[str] = set()
        self._changed = threading.Condition()
        self._turns = 0  # of being without clients
        self._number = proc.register(self)
        self._leave_after(idle, f"no client has come within {idle:g} s")

    def add(self, client: str, number: int) -> None:
        with self._changed:
            self._numbers[client] = number
            self._turns += 1
        self._proc.expect(self._number, client)

    def discard(self, client: str) -> None:
        self._proc.fulfil(self._number, client)
        with self._changed:
            self._unheard.discard(client)
            is_last = self._numbers.pop(client, None) is not None and not self._numbers
            self._changed.notify_all()
        if is_last:
            self._leave_after(self._linger, f"its last client has been gone for {self._linger:g} s")

    def heard(self, client: str) -> None:
        with self._changed:
            self._unheard.discard(client)
            self._changed.notify_all()

    def tell(self, kind: str, what: str, patience: float) -> None:
        """Every client; waits for `patience` seconds at most until they have dealt with it."""
        body = json.dumps({"kind": kind, "message": what, "host": socket.gethostname()}).encode()
        with self._changed:
            numbers = dict(self._numbers)
            self._unheard = set(numbers)
        for client, number in numbers.items():
            self._proc.post_quietly(client, message.pack(message.SEND, number), body)
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard, patience)

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self.discard(address)

    def _leave_after(self, seconds: float, why: str) -> None:
        with self._changed:
            self._turns += 1
            turn = self._turns
        if seconds < math.inf:
            self._proc.timers.at(time.monotonic() + seconds, partial(self._leave, turn, why))

    def _leave(self, turn: int, why: str) -> None:
        if turn == self._turns:  # nobody has come since
            self._on_deserted(why)


_subscribers: dict[Proc, Subscribers] = {}


def offer_notices(proc: Proc, idle: float, linger: float, on_deserted: Callable[[str], None]) -> Subscribers:
    """Lets clients subscribe at this process, the agent of a job's host."""
    subscribers = _subscribers[proc] = Subscribers(proc, idle, linger, on_deserted)
    proc.at_close(partial(_subscribers.__delitem__, proc))
    proc.start_local(NOTICES, JobAgent, "job")
    return subscribers


class JobAgent(Actor):
    """What a job's clients ask of each of its hosts."""

    def __init__(self) -> None:
        self._subscribers = _subscribers[current_proc()]

    @concurrent_endpoint
    async def subscribe(self, client: str, number: int) -> dict[str, Any]:
        """Notices go to `number` of `client` from now on, as JSON. What there is to know of this host."""
        self._subscribers.add(client, number)
        return {"host": socket.gethostname(), "pid": os.getpid()}

    @concurrent_endpoint
    async def unsubscribe(self, client: str) -> None:
        self._subscribers.discard(client)

    @concurrent_endpoint
    async def heard(self, client: str) -> None:
        """The client has dealt with the last notice."""
        self._subscribers.heard(client)
