"""The supervisor of one mesh, in the process of its owner: policy.py decides, this carries it out.

One thread does all of it, one action after the other, and never waits for a member: what takes time ends with another
action in its queue. What differs between processes and actors is in processes.py and actors.py.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from ... import config
from ...errors import ConfigError, RdmaError
from ...supervision.events import emit
from ...supervision.policy import (
    Add,
    Decision,
    Ended,
    Escalate,
    Event,
    Finish,
    Forget,
    Incarnation,
    Kill,
    Remove,
    Restarting,
    Start,
    Started,
    StartFailed,
    Stop,
    StopAsked,
    Supervisor,
    Tick,
)
from ..encoding.codec import encode
from ..failure import MeshFailure, SupervisionError, encode_failure
from ..future import Future
from ..runtime import message
from ..runtime.message import Frame
from ..runtime.roster import GONE, RESTARTING, UP, KeeperId
from ..runtime.tombstone import Tombstone
from .kept_states import KeptStates
from .lives import FailureLog, Life, rank_of
from .places import Places

if TYPE_CHECKING:
    from ..runtime.proc import Proc
    from .restarts import Restarts

__all__ = ["Driver"]

_log = logging.getLogger("monarch_rdma.actor")
_SHORT = 0.01  # seconds


@dataclass
class _Request:
    """What somebody asked for and is answered later. `is_ready`: looked at after each action."""

    frame: Frame
    ranks: tuple[int, ...]
    is_ready: Callable[[tuple[int, ...]], bool]
    answer: Callable[[], Any] = lambda: None


class Driver(ABC):
    """Receives what concerns its members under a number that they and all references know."""

    kind: ClassVar[str]  # of its members' failures

    def __init__(self, proc: Proc, name: str, ranks: Sequence[int], restarts: Restarts, owner: tuple[str, int]) -> None:
        """`ranks`: the children. `owner`: the process and number that is told of what the policy does not settle."""
        self._proc = proc
        self._name = name
        self._ranks = ranks
        self._restarts = restarts
        self._owner = owner
        self._supervisor = Supervisor(restarts.policy, restarts.children(ranks), rng=Random())
        self._lives: dict[int, Life] = {}
        self._requests: list[_Request] = []
        self._failures = FailureLog(name, self.kind)
        self._armed: float | None = None
        self._cause: str | None = None  # the event that led to what is decided now
        self._causes: dict[int, str] = {}  # by rank: the event that led to its restart
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.number = proc.register(self)
        self.keeper = KeeperId(proc.address, self.number)
        self._states = KeptStates(proc, self.number, self._put, self._sends_states)
        self._places: Places
        self._thread = threading.Thread(target=self._run, name=f"supervisor of {name}", daemon=True)

    def abandon(self) -> None:
        """They could not be started."""
        self._proc.forget(self.number)

    # --- what differs

    @abstractmethod
    def _start(self, incarnation: Incarnation) -> None:
        """Makes it; ends with `_come_up` or `_on_not_started`."""

    @abstractmethod
    def _stop(self, life: Life, reason: str) -> None:
        """Has it end; ends with `_on_ended`."""

    @abstractmethod
    def _kill(self, life: Life) -> None:
        """The same, of one that did not stop in time."""

    @abstractmethod
    def _on_failure(self, frame: Frame) -> None:
        """Somebody tells of the end of a member, or of what lives in it."""

    @abstractmethod
    def _on_address_lost(self, address: str, error: SupervisionError) -> None:
        """A process that this expects."""

    @abstractmethod
    def _sends_states(self, frame: Frame, number: int, rank: int, own: int) -> bool:
        """Whether number `own` in the process that sent the frame is who lives now as actor `rank` of mesh `number`."""

    _ASKED: ClassVar[dict[bytes, Callable[..., None]]] = {}

    # --- on any thread

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.FAILURE:
            self._put(self._on_failure, frame)
        elif frame.kind == message.CALL and frame.method == KeptStates.METHOD:
            self._states.on_frame(frame)
        elif frame.kind == message.CALL:
            self._put(self._on_request, frame)
        elif frame.kind == message.CANCEL:
            self._put(self._on_cancel, frame)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        if address == self._proc.address:
            self._queue.put(None)
        else:
            self._put(self._on_address_lost, address, error)

    def _put(self, action: Callable[..., None], *args: Any) -> None:
        self._queue.put(partial(action, *args))

    # --- on our thread

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            self._cause = None
            try:
                action()
                self._settle()
            except Exception:  # one end that cannot be dealt with must not leave the others alone
                _log.exception("the supervisor of %s could not do something", self._name)
            if self._supervisor.is_over:
                return

    def _settle(self) -> None:
        self._places.publish()
        if self._supervisor.is_over:
            return
        ready = [request for request in self._requests if request.is_ready(request.ranks)]
        self._requests = [request for request in self._requests if request not in ready]
        for request in ready:
            self._answer(request)
        wake_at = self._supervisor.wake_at
        if wake_at is not None and wake_at != self._armed:
            self._armed = wake_at
            self._proc.timers.at(wake_at, lambda: self._put(self._handle, Tick()))

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        decisions: list[Decision] = []
        if self._proc.is_ending and not self._supervisor.is_ending:
            decisions = self._supervisor.handle(StopAsked("the process of its owner ends"), now)
        for decision in decisions + self._supervisor.handle(event, now):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Start(incarnations):
                for incarnation in incarnations:
                    self._start(incarnation)
            case Stop(incarnations, reason):
                for incarnation in incarnations:
                    self._stop(self._lives[rank_of(incarnation)], reason)
            case Kill(incarnations):
                for incarnation in incarnations:
                    self._kill(self._lives[rank_of(incarnation)])
            case Restarting():
                self._announce_restart(decision)
            case Forget(rank, reason):
                emit("member.gone", cause=self._cause, mesh=self._name, rank=rank, message=reason)
                self._places.change(rank, GONE, reason)
            case Escalate():
                self._escalate(decision)
            case Finish(reason):
                self._end(reason)

    def _announce_restart(self, decision: Restarting) -> None:
        failure, children, attempt, delay = decision.failure, decision.children, decision.attempt, decision.delay
        self._failures.note(failure.child, f"restart {attempt} of it was decided, in {delay:.3g} s")
        _log.warning(
            "%s: rank %s has ended (%s); restart %d of it%s%s",
            self._name,
            failure.child,
            _in_a_line(failure.reason),
            attempt,
            f" in {delay:.3g} s" if delay else "",
            f", together with {len(children) - 1} others" if len(children) > 1 else "",
        )
        self._cause = emit(
            "restart.decided",
            cause=self._cause,
            mesh=self._name,
            rank=failure.child,
            ranks=list(children),
            attempt=attempt,
            delay=delay,
            message=failure.reason,
        )
        for rank in children:
            self._causes[int(str(rank))] = self._cause
            self._places.change(rank, RESTARTING, f"it is being restarted: {failure.reason}", failure.occasion)

    # --- lives

    def _new_life(self, incarnation: Incarnation) -> Life:
        life = self._lives[rank_of(incarnation)] = Life(incarnation)
        life.cause = self._causes.get(life.rank)
        return life

    def _come_up(self, life: Life) -> None:
        """It is there and takes calls."""
        life.is_up = True
        self._failures.note(life.rank, "it was up again")
        place = self._places.come_up(life)
        emit(
            "restart.done",
            cause=life.cause,
            mesh=self._name,
            rank=life.rank,
            incarnation=place.incarnation,
            address=life.address,
        )
        self._handle(Started(life.incarnation))

    def _note_failed_start(self, life: Life, why: str) -> None:
        self._cause = life.cause = emit(
            "restart.failed", cause=life.cause, mesh=self._name, rank=life.rank, message=why
        )

    def _on_not_started(self, life: Life, error: BaseException, occasion: Hashable | None = None) -> None:
        life.is_over = True
        self._note_failed_start(life, str(error))
        self._handle(StartFailed(life.incarnation, str(error), occasion))

    def _end_life(self, life: Life, event: Event, begin: Callable[[], Future[Any]]) -> None:
        """`begin` has it end; `event` follows."""
        if life.is_ending:
            return
        life.is_ending = True
        try:
            stopped = begin()
        except (SupervisionError, RdmaError) as error:
            _log.warning("%s: rank %d cannot be stopped: %s", self._name, life.rank, error)
            return self._put(self._on_ended, life, event)
        stopped.add_callback(lambda: self._put(self._on_ended, life, event))

    def _on_ended(self, life: Life, event: Event) -> None:
        if life.is_over:
            return
        life.is_over = True
        self._cause = life.cause
        if self._lives.get(life.rank) is life:
            self._handle(event)

    def _on_failed(self, life: Life, failure: MeshFailure, *, normal: bool, occasion: Hashable | None = None) -> None:
        """It has ended by itself. `occasion`: all that ended because of that count once."""
        life.is_over = True
        self._failures.add(life.rank, failure)
        self._cause = failure.event
        self._handle(Ended(life.incarnation, normal, failure.message, occasion))
        if self._places.of(life.rank).state == UP:  # nobody restarts it
            self._places.change(life.rank, GONE, failure.message)

    def _escalate(self, decision: Escalate) -> None:
        causes = self._failures.causes_of(decision)
        last, why = causes[-1], f"it is given up: {decision.reason}"
        event = emit("restart.escalated", cause=self._cause, mesh=self._name, rank=last.rank, message=decision.reason)
        failure = MeshFailure(self._name, self.kind, why, last.rank, last.exit_code, causes=causes, event=event)
        self._end(failure.message)
        self._proc.tell_owner(self._owner, failure.noted(f"given up by its supervisor, in {self._proc.name}"))

    def _end(self, why: str) -> None:
        """All have ended, for good."""
        for rank in self._ranks:
            self._places.change(rank, GONE, why)
        self._proc.bury(self.number, Tombstone(self._proc, self._name, why))
        self._places.publish(is_last=True, why=why)
        for request in self._requests:
            has_ended = request.is_ready(request.ranks)
            self._answer(request, None if has_ended else SupervisionError(f"{self._name}: {why}"))
        self._requests.clear()

    # --- requests

    def _on_request(self, frame: Frame) -> None:
        asked = {**_ASKED, **self._ASKED}.get(frame.method)
        if asked is None:
            return self._proc.refuse(frame, f"the supervisor of {self._name} has no method {frame.method.decode()!r}")
        self._do_as_asked(asked, frame, *(pickle.loads(frame.body) if frame.body else ()))

    def _do_as_asked(self, asked: Callable[..., None], frame: Frame, *args: Any) -> None:
        try:
            asked(self, frame, *args)
        except ConfigError as error:
            self._answer(_Request(frame, (), lambda _: True), error)

    def _answer_when(
        self,
        frame: Frame,
        ranks: tuple[int, ...],
        is_ready: Callable[[tuple[int, ...]], bool],
        answer: Callable[[], Any] = lambda: None,
    ) -> None:
        self._requests.append(_Request(frame, ranks, is_ready, answer))

    def _answer(self, request: _Request, error: BaseException | None = None) -> None:
        frame = request.frame
        try:
            if error is not None:
                raise error
            outgoing, flags = encode(request.answer()), 0
        except (ConfigError, SupervisionError) as refused:
            outgoing, flags = encode_failure(refused), message.FAILED
        self._proc.reply(frame.address, frame.reply, 0, outgoing, flags)

    def _on_cancel(self, cancel: Frame) -> None:
        """Whoever asked does not wait any more."""
        self._requests = [
            request
            for request in self._requests
            if (request.frame.address, request.frame.reply) != (cancel.address, cancel.reply)
        ]

    def _on_follow_asked(self, frame: Frame) -> None:
        self._places.add_follower(frame.address, frame.reply)

    def _on_stop_asked(self, frame: Frame, ranks: tuple[int, ...], reason: str) -> None:
        self._answer_when(frame, ranks, self._have_ended)
        if self._supervisor.children.keys() <= set(ranks):
            self._handle(StopAsked(reason))
        else:
            for rank in ranks:
                self._handle(Remove(rank, reason))

    def _have_ended(self, ranks: tuple[int, ...]) -> bool:
        return self._supervisor.is_over or not self._supervisor.children.keys() & set(ranks)

    def _on_replace_asked(self, frame: Frame, rank: int, until: float = 0.0) -> None:
        """Starts a member that is gone. `until`: when we stop waiting for the agent to say so of one that is lost."""
        place, now = self._places.of(rank), time.monotonic()
        if place.state == UP and self._proc.is_lost(place.address):
            until = until or now + float(config.get("heartbeat_timeout"))
            if now < until:
                again = partial(self._put, self._do_as_asked, Driver._on_replace_asked, frame, rank, until)
                self._proc.timers.at(now + _SHORT, again)
                return
        if place.state != GONE:
            raise ConfigError(f"rank is {rank}, but that process is {place.state}: only one that is gone is replaced")
        self._begin_again(rank, "it is being replaced")

        def result() -> None:
            if self._places.of(rank).state == GONE:
                raise SupervisionError(
                    f"rank {rank} of {self._name} could not be replaced: {self._places.of(rank).why}"
                )

        self._answer_when(frame, (rank,), lambda _: self._places.of(rank).state != RESTARTING, result)

    def _begin_again(self, rank: int, why: str) -> None:
        """Of one that was forgotten."""
        self._handle(Remove(rank, "it is replaced"))
        self._places.change(rank, RESTARTING, why)
        for child in self._restarts.children([rank]):
            self._handle(Add(child))


def _in_a_line(reason: str) -> str:
    """Its first, and of a traceback its last."""
    lines = reason.splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


_ASKED: dict[bytes, Callable[..., None]] = {
    b"follow": Driver._on_follow_asked,
    b"stop": Driver._on_stop_asked,
    b"replace": Driver._on_replace_asked,
}
