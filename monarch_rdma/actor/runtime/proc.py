"""One process's end of the actor layer: what arrives is handed to whom it is for, what is sent finds its process.

Everything that can be sent to has a number in its process: actors (their mailboxes), ports, calls that wait for an
answer, transmissions that wait to be taken. One thread receives and hands over; it never runs users' code.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from ... import config
from ...errors import ConfigError, PeerLost, RdmaError, TransferTimeout
from ...rdma.engine import Engine, default_engine
from ...rdma.messages import Inbox, Incoming, Stop, may_come_back, send
from ...supervision import events
from ...supervision.tally import Tally
from ..context import ROOT, Context, Root
from ..encoding.codec import Outgoing, encode
from ..failure import STUCK, MeshFailure, SupervisionError, encode_failure, unhandled
from ..future import Future
from ..hosting.host_watch import HostWatch
from ..hosting.log_sink import LOGS, LogSink
from . import holders, message
from .errands import Errands
from .fetcher import Fetcher
from .message import Frame
from .owned import Owned
from .roster import Rosters
from .route import Route, Routes
from .timers import Timers
from .transmission import Transmission
from .tree import on_cast
from .unborn import FIRST_ACTOR, Unborn
from .watches import Watches

if TYPE_CHECKING:
    from ..mesh import HostMesh
    from .reduce import Reducer

__all__ = ["Proc", "close_current", "current_proc", "existing_proc", "name_of"]

_log = logging.getLogger("monarch_rdma.actor")

AGENT = 1  # the number of each process's agent
_SUPERSEDED = "another incarnation has taken its place"
_NOBODY = 15  # a number that nothing has: whoever lives refuses what comes there
_MOST_PROBES = 8  # of a process that was lost and may live, at intervals that double
_LONGEST_PAUSE = 60.0  # seconds between two of them
_numbers = itertools.count(16)  # also across a close: a late answer must not meet another call
_MOST_LOST = 4096  # lost processes that are remembered; of others the engine says so again
_MOST_BURIED = 4096  # tombstones; of older ones it is only known that there is no such actor
_REPLY_TIMEOUT = 60.0  # seconds that the receiver of an answer may take no frames


class Receiver(Protocol):
    """What a number stands for. Called by the receiving thread, or by the sender's within one process: never waits."""

    def on_frame(self, frame: Frame) -> None: ...

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """A process that this receiver waits for is gone; called once for each (see Proc.expect)."""


class Proc:
    """This process among the others. `current_proc()` makes and finds it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        events.name_process(name)
        self.address = engine.address
        self.pid = os.getpid()
        self.hosts: HostMesh | None = None  # where processes can be started from here
        self.agent = engine.address  # who watches this process, where it was started by an agent; else itself
        self.client: str | None = engine.address  # the process where the job's controllers live
        self.receivers: dict[int, Receiver] = {}
        self._lost: dict[str, SupervisionError] = {}
        self._superseded: dict[str, None] = {}  # old incarnations
        self._routes = Routes(self)
        self.rosters = Rosters(self)
        self._inbox = Inbox(engine)
        self._wake = Stop()
        self._helping = threading.Lock()
        self.timers = Timers(self._wake.set)
        self.errands = Errands()
        self._watches = Watches(self, self._inbox)
        self.fetcher = Fetcher(self)
        self._late: SimpleQueue[Callable[[], object]] = SimpleQueue()  # see later
        self._is_ending = False
        self._closing = False
        self._buried: deque[int] = deque()
        self.calls = Tally()  # those that wait for an answer
        self.counting = threading.Lock()  # so that the messages of an actor that ends count once
        self.handled_by_ended: Counter[str] = Counter()  # messages, by class, of actors that have ended
        self._casts: dict[tuple[str, int], int] = {}  # see on_cast
        self._at_close: list[Callable[[], None]] = []
        root = Root(self)
        self.root_context = Context(root)
        self.register(RootReceiver(self, root.owned), ROOT)
        logs = LogSink()
        self.register(logs, LOGS)
        self._logs = logs
        self.host_watch = HostWatch(self)
        self._thread = threading.Thread(target=self._receive, name="monarch_rdma-receiver", daemon=True)
        self._thread.start()

    # --- numbers

    def register(self, receiver: Receiver, number: int | None = None) -> int:
        """Makes `receiver` reachable; its number."""
        if number is None:
            number = next(_numbers)
        self.receivers[number] = receiver
        return number

    def bury(self, number: int, tombstone: Receiver) -> None:
        """An actor has ended: the tombstone answers in its place, for as long as one of so many."""
        self.receivers[number] = tombstone
        self._buried.append(number)
        while len(self._buried) > _MOST_BURIED:
            self.receivers.pop(self._buried.popleft(), None)

    def forget(self, number: int) -> bool:
        """Whether it was still there: one of several who would settle it gets True."""
        return self.receivers.pop(number, None) is not None

    # --- sending

    def route(self, address: str, number: int) -> Route:
        """The way to an actor, shared by all in this process who talk to it: it counts what is in its mailbox."""
        return self._routes.to(address, number)

    def post(self, address: str, head: bytes, body: bytes = b"", timeout: float | None = None) -> None:
        """Sends one frame. SupervisionError where the process is gone; TransferTimeout where it takes nothing."""
        if address == self.address:
            self.on_frame(message.unpack(memoryview(head + body), address))
            return
        try:
            send(self.engine, address, head, timeout, body=body)
        except PeerLost as error:
            raise self.lost_error(address, str(error)) from error

    def post_quietly(self, address: str, head: bytes, body: bytes = b"") -> None:
        """Sends what matters only to a process that lives, in order. Never waits: the receiving thread uses it too."""
        if address in self.errands:
            return self._post_behind(address, head, body)
        try:
            self.post(address, head, body, 0.0)
        except TransferTimeout:
            self._post_behind(address, head, body)
        except (SupervisionError, RdmaError):
            return

    def _post_behind(self, address: str, head: bytes, body: bytes) -> None:
        """After what waits to be sent there."""
        self.errands.run(address, lambda: self._post_late(address, head, body))

    def _post_late(self, address: str, head: bytes, body: bytes) -> None:
        with contextlib.suppress(SupervisionError, RdmaError):
            self.post(address, head, body, _REPLY_TIMEOUT)

    def lost_error(self, address: str, why: str) -> SupervisionError:
        return self._lost.get(address) or SupervisionError(f"process {name_of(address)} is lost: {why}")

    def random_number(self) -> int:
        """For actors: the spawner chooses it, and it must be new in every process of the mesh."""
        return secrets.randbits(62) | FIRST_ACTOR

    # --- waiting for a process

    def expect(self, number: int, address: str, *, standing: bool = False) -> None:
        """`on_lost` of that receiver will be called if the process at `address` is lost before `fulfil`. `standing`: it
        waits for nothing else of that process; see watches.py.
        """
        if address == self.address:
            return
        self._watches.add(number, address, standing)
        if address in self._lost:
            self._tell_lost(number, address)

    def fulfil(self, number: int, address: str) -> None:
        self._watches.discard(number, address)

    def on_guardian_lost(self, address: str, why: str, is_cut_off: bool) -> None:
        """Who sent heartbeats to that process in our stead is lost."""
        if not is_cut_off:
            return self._watches.ask_again(address)
        self._inbox.unwatch(address)
        self._on_lost(address, f"its host's agent is lost, and it with it: {why}")

    def _tell_lost(self, number: int, address: str) -> None:
        receiver = self.receivers.get(number)
        if receiver is None:
            return
        try:
            receiver.on_lost(address, self._lost[address])
        except Exception:  # the others have to know too
            _log.exception("the loss of %s could not be dealt with", address)

    def supersede(self, address: str) -> None:
        """Another incarnation has taken its place: nothing that it sends is heard any more, and nobody waits for it."""
        while len(self._superseded) >= _MOST_LOST:
            del self._superseded[next(iter(self._superseded))]
        self._superseded[address] = None
        if address not in self._lost:
            self._remember_lost(address, _SUPERSEDED)
        self._end_waits(address)

    def _remember_lost(self, address: str, why: str) -> None:
        while len(self._lost) >= _MOST_LOST:
            self._lost.pop(next(iter(self._lost)), None)
        event = events.emit("peer.lost", peer=name_of(address), address=address, message=why)
        self._lost[address] = SupervisionError(f"process {name_of(address)} is lost: {why}", event=event)
        if may_come_back(why) and why != _SUPERSEDED:
            self._probe_at(address, 0.0, _MOST_PROBES)

    def _probe_at(self, address: str, pause: float, left: int) -> None:
        self.timers.at(time.monotonic() + pause, partial(self._probe, address, pause, left))

    def _probe(self, address: str, pause: float, left: int) -> None:
        """Asks one that was lost, but may live, for a sign of life: the two may only have lost their connection."""
        if left and address in self._lost and address not in self._superseded and not self._closing:
            self.post_quietly(address, message.pack(message.CALL, _NOBODY, reply=_NOBODY))
            pause = max(pause * 2, float(config.get("heartbeat_timeout")))
            self._probe_at(address, min(pause, _LONGEST_PAUSE), left - 1)

    def _on_lost(self, address: str, sentence: str) -> None:
        self._remember_lost(address, sentence)
        self._end_waits(address)

    def _end_waits(self, address: str) -> None:
        waiting = self._watches.end(address)
        self.rosters.on_process_lost(address)  # first: who calls again because a call failed finds it restarting
        for number in waiting:
            self._tell_lost(number, address)
        self._routes.on_lost(address, self._lost[address])

    # --- receiving

    def _receive(self) -> None:
        while not self._closing:
            timeout = self._run_timers()
            try:
                batch = self._inbox.take(timeout, self._wake, background=True)
            except ConfigError:
                return  # the engine was closed
            self._wake.clear()
            self._hand_out(batch)
            self._do_late()

    def later(self, action: Callable[[], object]) -> None:
        """Has the receiving thread do something that does not wait. For destructors, which may come at any point; also
        when this is garbage itself, and what wakes that thread may be gone.
        """
        if self is _current:
            self._late.put(action)
            self._wake.set()

    def _do_late(self) -> None:
        while not self._late.empty():
            try:
                self._late.get()()
            except Exception:  # as in _run_timers
                _log.exception("something that was let go of could not be dealt with")

    def _run_timers(self) -> float | None:
        """Seconds until the next one."""
        while True:
            try:
                return self.timers.run_due()
            except Exception:  # one deadline must not end the others, nor this thread
                _log.exception("a deadline could not be dealt with")

    def receive_until(self, stop: Stop) -> bool:
        """For a thread of ours that has nothing else to do: receives in the receiving thread's stead until `stop` is
        set, which saves a message for this thread a hop. False where another thread does so already, and after
        messages that were all for others: then whoever is idle next had better do it.
        """
        if not self._helping.acquire(False):
            return False
        try:
            self._hand_out(self._inbox.take(None, stop))
            return stop.is_set()
        except ConfigError:  # the engine was closed
            return False
        finally:
            self._inbox.done()
            self._helping.release()

    def _hand_out(self, batch: list[Incoming]) -> None:
        for kind, sender, data in batch:
            frame = None
            try:
                if kind:
                    self._on_lost(sender, bytes(data).decode("utf-8", "replace"))
                    continue
                frame = message.unpack(memoryview(data), sender)
                if sender in self._lost and sender not in self._superseded:
                    self.is_back(sender)
                if sender in self._superseded:
                    self.refuse(frame, f"process {name_of(sender)} is an old incarnation: another one took its place")
                else:
                    self.on_frame(frame)
            except Exception as error:  # one bad frame of a member must not end the others' messages
                _log.exception("a frame from %s could not be handled", sender)
                if frame is not None:
                    why = f"process {self.name} could not handle the message: {type(error).__name__}: {error}"
                    self.errands.run(sender, partial(self.refuse, frame, why))

    def on_frame(self, frame: Frame) -> None:
        if frame.flags & message.PORTS and frame.ports is None:
            frame.ports, frame.body = holders.split(self, frame.body)
        if frame.kind == message.CAST:
            return on_cast(self, frame, self._casts)
        if frame.kind == message.CREDIT:  # for our way to an actor elsewhere; one of ours may have the same number
            return self._on_credit(frame)
        receiver = self.receivers.get(frame.target)
        if frame.flags & message.NEW and not self._is_ending:
            return self._on_birth(frame, receiver)
        if receiver is None:
            if self._is_ending or not (frame.target >= FIRST_ACTOR and frame.kind in (message.CALL, message.CANCEL)):
                return self._on_stray(frame)
            receiver = self.receivers.setdefault(frame.target, Unborn(self, frame.target))
        receiver.on_frame(frame)

    def _on_birth(self, first: Frame, present: Receiver | None) -> None:
        if present is not None and not isinstance(present, Unborn):
            return present.on_frame(first)
        actor = self.new_actor(first.target)
        actor.on_frame(first)  # before others can reach it
        present = self.receivers.setdefault(first.target, actor)
        if isinstance(present, Unborn):
            present.give_way(actor)

    def new_actor(self, number: int) -> Receiver:
        from .instance import Instance

        return Instance(self, number)

    def start_local(self, number: int, cls: type, name: str, *args: Any) -> None:
        """Makes an actor of the library in this process, under a number that everyone knows."""
        from .birth import Birth

        birth = Birth(cls, args, {}, name, (self.address, ROOT), "<root>", None)
        head = message.pack(message.CALL, number, flags=message.NEW)
        actor = self.new_actor(number)
        actor.on_frame(message.unpack(memoryview(head + encode(birth).body), self.address))
        self.receivers[number] = actor  # from now on others' messages get there

    @property
    def is_ending(self) -> bool:
        """Then failures of what it spawned are only logged."""
        return self._is_ending

    def at_close(self, action: Callable[[], None]) -> None:
        """Once, however often that is said."""
        if action not in self._at_close:
            self._at_close.append(action)

    def is_lost(self, address: str) -> bool:
        return address in self._lost

    def is_back(self, address: str) -> None:
        """A process that was lost from here has come again. What was under way has ended with the loss; what begins now
        goes over another connection.
        """
        if self._lost.pop(address, None) is not None:
            events.emit("peer.back", peer=name_of(address), address=address)
        self._routes.on_back(address)
        self.rosters.on_back(address)

    def _on_credit(self, frame: Frame) -> None:
        route = self._routes.known(frame.address, frame.target)
        if route is not None:
            route.on_credit(frame.reply)

    def _on_stray(self, frame: Frame) -> None:
        """For something that is over, or never was."""
        self.refuse(frame, f"there is no actor {frame.target:x} in process {self.name}: it has ended")

    def refuse(self, frame: Frame, why: str, flags: int = 0) -> None:
        """Answers a frame that nobody will handle, so that nobody waits. `flags`: of the answer, besides FAILED."""
        if frame.flags & message.LARGE:
            self.fetcher.tell_sender(frame, message.FAILED)
        if frame.kind in (message.CALL, message.SEND):
            self.credit(frame.address, frame.target, 1)
        if frame.kind == message.CALL and frame.reply and not frame.is_answered:
            frame.is_answered = True
            failure = encode_failure(SupervisionError(why, frame.method.decode()), codec=frame.codec)
            self.leave_uncollected(frame)
            head = message.pack(message.SEND, frame.reply, flags=message.FAILED | flags, rank=frame.rank)
            self.post_quietly(frame.address, head, failure.body)

    def start_answer(self, call: Frame, outgoing: Outgoing, flags: int = 0) -> Future[None] | None:
        """Answers a call, once; small values together with those of others where they are collected. As start_reply."""
        if call.is_answered:
            return None
        if call.collector is None or flags or outgoing.num_large or outgoing.passengers:
            taken = self.start_reply(call.address, call.reply, call.rank, outgoing, flags)
            self.leave_uncollected(call)
        else:
            taken = None
            call.collector.add(call.rank, outgoing.body)
        call.is_answered = True
        return taken

    def add_to_sum(self, call: Frame, reducer: Reducer, value: Any) -> None:
        """Answers a call, once, whose results are combined on their way."""
        if not call.is_answered:
            call.is_answered = True
            reducer.add_value(call.rank, value)

    def leave_uncollected(self, call: Frame) -> None:
        """Its answer goes another way, or nobody waits for it: then those who collect answers do not either."""
        collector, call.collector = call.collector, None
        if collector is not None:
            collector.skip()

    def reply(self, address: str, number: int, rank: int, outgoing: Outgoing, flags: int = 0) -> None:
        """Sends a value to a port; waits until large parts of it are taken."""
        taken = self.start_reply(address, number, rank, outgoing, flags)
        if taken is not None:
            taken.get()

    def start_reply(
        self, address: str, number: int, rank: int, outgoing: Outgoing, flags: int = 0
    ) -> Future[None] | None:
        """The same without waiting: None, or the future of its being taken. Nothing where nobody is left to hear it."""
        try:
            return self.start_send(address, number, rank, outgoing, flags)
        except SupervisionError:
            return None

    def start_send(
        self, address: str, number: int, rank: int, outgoing: Outgoing, flags: int = 0
    ) -> Future[None] | None:
        """The same; SupervisionError where the process is lost."""
        transmission = Transmission(self, outgoing, [address]) if outgoing.num_large else None
        origin = 0 if transmission is None else transmission.number
        flags |= message.LARGE if origin else 0
        body = outgoing.body
        if outgoing.passengers:
            flags |= message.PORTS
            body = holders.pack(outgoing.passengers) + body
        head = message.pack(message.SEND, number, flags=flags, rank=rank, origin=origin)
        try:
            self.post(address, head, body, _REPLY_TIMEOUT)
        except BaseException:
            if transmission is not None:
                transmission.drop(address, 1)
            raise
        if outgoing.passengers:
            holders.give(self, outgoing.passengers, [address])
        return None if transmission is None else transmission.taken

    def tell_owner(self, owner: tuple[str, int], failure: MeshFailure) -> None:
        address, number = owner
        events.emit(
            "failure.told",
            cause=failure.event,
            mesh=failure.mesh_name,
            rank=failure.rank,
            owner=name_of(address),
            message=failure.message,
        )
        told = failure.noted(f"told to its owner, in {name_of(address)}")
        self.post_quietly(address, message.pack(message.FAILURE, number), encode(told).body)

    def answer_later(self, address: str, number: int, rank: int, error: SupervisionError) -> None:
        """A failure for a port, without waiting: also from where the interpreter collects garbage."""
        head = message.pack(message.SEND, number, flags=message.FAILED, rank=rank)
        self.later(lambda: self.post_quietly(address, head, encode_failure(error).body))

    def credit(self, address: str, number: int, count: int) -> None:
        """`count` messages from there were taken out of the mailbox of our actor `number`."""
        if address == self.address:
            route = self._routes.known(address, number)
            if route is not None:
                route.on_credit(count)
        else:
            self.post_quietly(address, message.pack(message.CREDIT, number, reply=count))

    def end_actors(self) -> None:
        """Stops the actors of this process, `__cleanup__` included, those that were made last first."""
        from ..debugging import breakpoints
        from .instance import Instance

        self._is_ending = True
        breakpoints.close_all(self)
        actors = [receiver for receiver in list(self.receivers.values()) if isinstance(receiver, Instance)]
        deadline = time.monotonic() + float(config.get("cleanup_timeout"))
        for actor in reversed(actors):
            actor.stop("its process ends")
            actor.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stops receiving. Whoever still waits is told that this process ends."""
        for action in self._at_close:
            action()
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.errands.close()
        error = SupervisionError(f"this process ({self.name}) has shut down its actors")
        for receiver in list(self.receivers.values()):
            receiver.on_lost(self.address, error)
        self._logs.close()


class RootReceiver:
    """The client's code, as the owner of what it spawned: failures that come here were handled by nobody."""

    def __init__(self, proc: Proc, owned: Owned) -> None:
        self._proc = proc
        self._owned = owned

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.FAILURE:
            failure = frame.load()
            if failure.kind == STUCK:
                return _log.warning("%s", failure.report())
            failures = self._owned.seen_by_owner(failure)
            if self._proc.is_ending:
                for failure in failures:
                    _log.error("while this program ends: %s", failure.report())
                return
            threading.Thread(target=unhandled, args=(failures,), name="monarch_rdma-fault", daemon=True).start()

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody by itself."""


def name_of(address: str) -> str:
    """The readable part of a process's address."""
    return unquote(address.partition("?")[0].rpartition("/")[2]) or address


_current: Proc | None = None
_making = threading.Lock()


def current_proc() -> Proc:
    """This process's; made, with the default engine, when it is first needed, and again after a fork."""
    proc = _current
    return proc if proc is not None else _make_current()


def _make_current() -> Proc:
    global _current
    if sys.is_finalizing():  # a thread that is started now never runs
        raise ConfigError("the interpreter is shutting down; no actor can be reached any more")
    with _making:
        if _current is None:
            engine = default_engine()
            _current = Proc(engine, engine.name)
        return _current


def existing_proc() -> Proc | None:
    """This process's, if it takes part already."""
    return _current


def close_current() -> None:
    """Ends this process's part in the actor layer, its actors first; does nothing where it has none."""
    global _current
    if _current is not None:
        _current.end_actors()
    with _making:
        proc, _current = _current, None
    if proc is not None:
        proc.close()


def _close_at_exit() -> None:
    """Ctrl-C, where the program ends already, has it wait for nobody: what it started ends when it is gone."""
    with contextlib.suppress(KeyboardInterrupt):
        close_current()


def _after_fork_in_child() -> None:
    global _current, _making
    _current, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_at_exit)
