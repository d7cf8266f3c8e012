"""What happened in a program: failures, what was decided about them, restarts. Each event is a record with its cause.

`emit` costs next to nothing where nobody listens. With option `event_log` every process of the program appends its
events to that file, a JSON object a line, each line by one write: a process that is killed has written what it emitted.
`subscribe` and `Recording` hear the events of their own process.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .. import config
from ..errors import ConfigError
from .tally import Tally

__all__ = [
    "KINDS",
    "Event",
    "Recording",
    "Subscription",
    "causes",
    "counts",
    "emit",
    "name_process",
    "read",
    "subscribe",
]

_log = logging.getLogger("monarch_rdma.supervision")
_MOST_CHARACTERS = 8192  # of one string in an event
_FACTS: dict[str, Any] = {  # what every event has, by name, with its type in a file
    "id": str,
    "kind": str,
    "time": (int, float),
    "monotonic": (int, float),
    "host": str,
    "pid": int,
    "process": str,
    "cause": (str, type(None)),
}

# What the library itself emits, and what each event's own fields are.
KINDS = {
    "process.started": "a host's agent has started a process: mesh, rank, name, child (its pid), address",
    "process.stopped": "a process has ended as it was asked to: mesh, rank, name, child, returncode",
    "process.failed": "a process has ended by itself: mesh, rank, name, child, returncode, message, lines",
    "peer.lost": "this process has noticed that another one is gone: peer (its name), address, message",
    "peer.back": "one that was lost has given a sign of life: only the connection was lost: peer, address",
    "host.lost": "the agent of a host is lost, and a process with it: mesh, rank, address, message",
    "owner.lost": "who owned processes on this host is lost, so they end: address, message",
    "call.lost": "a call ends because who should answer is lost: endpoint, message",
    "mesh.spawned": "actors were spawned: mesh, actor (their class), ranks (how many)",
    "mesh.stopped": "the owner stops actors or processes: mesh, reason",
    "actor.failed": "an actor has ended with an exception: mesh, rank, message",
    "actor.stuck": "an actor works on a message for longer than its limit: mesh, rank, limit, message",
    "process.stuck": "a process lives, but runs no Python: child, name, address, message",
    "stuck.over": "what was stuck goes on; its cause is the event that said so",
    "actor.stopped": "an actor has ended as it was asked to: mesh, rank",
    "restart.decided": "members are to be started again: mesh, rank (that failed), ranks, attempt, delay, message",
    "restart.done": "a process is back, and its actors take calls, or an actor is: mesh, rank, incarnation, address",
    "restart.failed": "a process or an actor did not come back: mesh, rank, message",
    "restart.escalated": "too many restarts: all of the mesh ended, and the owner is told: mesh, rank, message",
    "state.restored": "an actor goes on with a state, before it takes calls: mesh, rank, source",
    "member.gone": "a process or an actor is not started again, unless it is replaced: mesh, rank, message",
    "job.applied": "a scheduler was asked for hosts: job (what it is called), meshes (how many hosts each)",
    "job.status": "what the scheduler says of a job has changed: job, phase (queued, running, ending, ended), message",
    "job.host_lost": "the agent on a host of a job is lost: job, mesh, rank, address, message",
    "job.warned": "the scheduler will end a job soon: job, message",
    "job.ended": "a job has ended that its client did not end: job, message",
    "replica.decided": "what a training's orchestrator does about a replica: replica, decision, delay (s), reason",
    "epoch.proposed": "members are asked to go into another epoch: epoch (term and number), members",
    "epoch.committed": "an epoch begins: epoch, members, departed (with reasons)",
    "epoch.superseded": "another coordination of the same membership has taken over: term",
    "failure.told": "an owner is told of a failure: mesh, rank, owner, message",
    "failure.handled": "`__supervise__` of an actor took care of a failure: actor, mesh, rank",
    "failure.unhandled": "`__supervise__` of an actor did not, so that the actor ends: actor, mesh, rank",
    "fault.injected": "a fault is put on a process on purpose, or waits for its moment: fault, target, peer, child",
    "fault.struck": "the moment of such a fault has come: moment, fault",
    "fault.failed": "such a fault could not be done: fault, target, peer, message",
    "metrics.listening": "a program serves its metrics: url",
    "fault.unhandled": "nobody took care of a failure, and the client's hook is called: mesh, rank, report",
}


@dataclass(frozen=True)
class Event:
    """`id` is one of a kind in all processes; `cause` is the id of the event that led to this one, or None. `time` is
    time.time(), `monotonic` time.monotonic(), which is the same clock in all processes of a host.
    """

    id: str
    kind: str
    time: float
    monotonic: float
    host: str
    pid: int
    process: str
    cause: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line, without its end. What JSON does not know is written as its repr."""
        record = {name: getattr(self, name) for name in _FACTS} | dict(self.fields)
        return json.dumps(_clipped(record), default=repr, skipkeys=True)

    def has(self, fields: Mapping[str, Any]) -> bool:
        """Whether its own fields have these values."""
        return all(name in self.fields and self.fields[name] == value for name, value in fields.items())

    @classmethod
    def from_json(cls, line: str) -> Event | None:
        """None for what is no event: a line that was cut off."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in _FACTS.items()):
            return None
        facts = {name: record.pop(name, None) for name in _FACTS}
        return cls(**facts, fields=record)


def _clipped(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return f"{value[:_MOST_CHARACTERS]}... ({len(value) - _MOST_CHARACTERS} more characters)"
    if isinstance(value, Mapping):
        return {key: _clipped(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clipped(each) for each in value]
    return value


class Subscription:
    """Ends with `close`, or with its with block."""

    def __init__(self, callback: Callable[[Event], object], kinds: Iterable[str] | None) -> None:
        self._callback = callback
        self._kinds = None if kinds is None else frozenset(kinds)

    def close(self) -> None:
        """Idempotent. An event that is being emitted at this moment may still come."""
        with _changing:
            _log_of_process.subscriptions = [each for each in _log_of_process.subscriptions if each is not self]

    def take(self, event: Event) -> None:
        if self._kinds is None or event.kind in self._kinds:
            self._callback(event)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Recording:
    """The events of this process within a with block, for programs and tests that wait for one."""

    def __init__(self, *kinds: str) -> None:
        """`kinds`: those wanted; none named: all."""
        self._kinds = kinds or None
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._subscription: Subscription | None = None

    @property
    def events(self) -> list[Event]:
        with self._changed:
            return list(self._events)

    def wait(self, kind: str, timeout: float = 10.0, **fields: Any) -> Event:
        """The first event of that kind with these fields, also a past one. TimeoutError after `timeout` seconds."""

        def found() -> Event | None:
            return next((each for each in self._events if each.kind == kind and each.has(fields)), None)

        with self._changed:
            event = self._changed.wait_for(found, timeout)
        if event is None:
            raise TimeoutError(f"no event {kind} {fields} within {timeout} s")
        return event

    def _take(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def __enter__(self) -> Recording:
        self._subscription = subscribe(self._take, self._kinds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._subscription is not None:
            self._subscription.close()


class _LogOfProcess:
    """This process's part: who listens, what its events are called."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []  # replaced, never changed
        self.process = f"{os.uname().nodename}:{os.getpid()}"
        self.prefix = secrets.token_hex(4)
        self.numbers = itertools.count(1)  # next() is atomic
        self.tallies: dict[str, Tally] = {}  # by kind
        self.file = config.Kept("event_log", str)
        self.complained = ""  # the path that a warning was given for


_changing = threading.Lock()
_log_of_process = _LogOfProcess()


def _after_fork_in_child() -> None:
    """A fork has events of its own; who listened in its parent does not hear them."""
    global _changing, _log_of_process
    _changing, _log_of_process = threading.Lock(), _LogOfProcess()


os.register_at_fork(after_in_child=_after_fork_in_child)


def name_process(name: str) -> None:
    """What this process is called in its events; without, host and pid."""
    _log_of_process.process = name


def emit(kind: str, /, *, cause: str | None = None, **fields: Any) -> str:
    """Tells whoever listens that something happened; its id, to be the `cause` of what follows from it.

    Any thread may call it. It never raises and never waits for a listener; what cannot be written is told once, as a
    warning of logger monarch_rdma.supervision. Fields are what JSON knows; anything else is written as its repr. A
    field that is called as one of Event is found with an underscore at its end.
    """
    log = _log_of_process
    number = f"{log.prefix}.{next(log.numbers)}"
    tally = log.tallies.get(kind)
    (tally if tally is not None else log.tallies.setdefault(kind, Tally())).add()
    try:
        path = log.file()
    except ConfigError as error:
        path = ""
        _complain(log, "option event_log", error)
    if log.subscriptions or path:
        host, pid = os.uname().nodename, os.getpid()
        own = {f"{name}_" if name in _FACTS else name: value for name, value in fields.items()}
        event = Event(number, kind, time.time(), time.monotonic(), host, pid, log.process, cause, own)
        _deliver(log, event, path)
    return number


def _deliver(log: _LogOfProcess, event: Event, path: str) -> None:
    for subscription in log.subscriptions:
        try:
            subscription.take(event)
        except Exception:
            _log.exception("who listens to events has failed at %s", event.kind)
    if path:
        try:
            _append(path, event.to_json())
        except Exception as error:  # also of what a field's repr raises
            _complain(log, path, error)


def _append(path: str, line: str) -> None:
    """By one write, so that lines of several processes do not mix. The file is opened each time: events are rare, and
    it may be moved away, and no descriptor is left behind.
    """
    data = f"{line}\n".encode("utf-8", "backslashreplace")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    try:
        if os.write(fd, data) < len(data):  # the file system is full
            os.write(fd, b"\n")
    finally:
        os.close(fd)


def _complain(log: _LogOfProcess, where: str, error: Exception) -> None:
    if log.complained != where:
        log.complained = where
        _log.warning("events cannot be written to %s: %s", where, error)


def subscribe(callback: Callable[[Event], object], kinds: Iterable[str] | None = None) -> Subscription:
    """Calls `callback(event)` for each event of this process, of these `kinds` or of all, on the thread that emits it:
    it must be quick, and take no lock that is held while something is emitted. What it raises is logged.
    """
    subscription = Subscription(callback, kinds)
    with _changing:
        _log_of_process.subscriptions = [*_log_of_process.subscriptions, subscription]
    return subscription


def counts() -> dict[str, int]:
    """How many events of each kind this process has emitted."""
    return {kind: tally.read() for kind, tally in _log_of_process.tallies.copy().items()}


def read(path: str | os.PathLike[str]) -> list[Event]:
    """The events in a file, in the order of their times. Lines that were cut off (a full disk, a machine that went
    down) are left out. OSError where the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        found = [event for line in file if (event := Event.from_json(line)) is not None]
    return sorted(found, key=lambda event: event.time)


def causes(event: Event, among: Iterable[Event]) -> Iterator[Event]:
    """What led to an event, the nearest cause first, as far back as it is among these events."""
    by_id = {each.id: each for each in among}
    seen = {event.id}
    cause = event.cause
    while cause in by_id and cause not in seen:
        seen.add(cause)
        yield by_id[cause]
        cause = by_id[cause].cause
