"""The supervisor of one mesh of processes, in the process of their owner: policy.py decides, this carries it out.

It hears of ends (from the hosts' agents, or that an agent is lost), has processes started and stopped, makes the actors
of a restarted process again, and keeps the roster by which references follow. One thread does all of it, one action
after the other, and never waits for a process: what takes time ends with another action in its queue.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Any

from ... import config
from ...errors import ConfigError, RdmaError, TransferTimeout
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
    StartAsked,
    Started,
    StartFailed,
    Stop,
    StopAsked,
    Supervisor,
    Tick,
)
from ..encoding.codec import encode
from ..failure import STUCK, MeshFailure, SupervisionError, encode_failure
from ..future import Future
from ..hosting.host import STOPPED
from ..remote_error import ActorError
from ..runtime import message
from ..runtime.instance import Tombstone
from ..runtime.message import Frame
from ..runtime.roster import GONE, RESTARTING, UP, KeeperId, Place
from .birth_record import BirthRecord

if TYPE_CHECKING:
    from ..hosting.spawning import Spawning
    from ..runtime.proc import Proc
    from .restarts import Restarts

__all__ = ["Driver"]

_log = logging.getLogger("monarch_rdma.actor")


@dataclass(eq=False)
class _Life:
    """One incarnation of a process. `address`: once it is known."""

    incarnation: Incarnation
    address: str = ""
    births: Sequence[Future[Any]] = ()
    cause: str | None = None  # the event that led to it
    stop_reason: str | None = None  # it shall end as soon as it can be told
    is_up: bool = False
    is_ending: bool = False
    is_over: bool = False

    @property
    def rank(self) -> int:
        rank = self.incarnation.child
        assert isinstance(rank, int)
        return rank

    @property
    def can_be_reached(self) -> bool:
        return bool(self.address) and not self.is_ending and not self.is_over


@dataclass
class _Request:
    """What somebody asked for and is answered later. `is_ready`: looked at after each action."""

    frame: Frame
    ranks: tuple[int, ...]
    is_ready: Callable[[tuple[int, ...]], bool]
    answer: Callable[[], Any] = lambda: None


class Driver:
    """Receives what concerns its processes under a number that their agents and all references know."""

    def __init__(self, proc: Proc, spawning: Spawning, restarts: Restarts, owner: tuple[str, int]) -> None:
        """`owner`: the process and number that is told of what the policy does not settle."""
        self._proc = proc
        self._spawning = spawning
        self._restarts = restarts
        self._owner = owner
        self._name = spawning.name
        self._supervisor = Supervisor(restarts.policy, restarts.children(range(spawning.count)), rng=Random())
        self._lives: dict[int, _Life] = {}
        self._by_address: dict[str, _Life] = {}
        self._early: dict[str, MeshFailure] = {}  # of processes whose address is still to be told
        self._records: dict[int, BirthRecord] = {}  # by number, in the order in which they were spawned
        self._owners: dict[int, tuple[str, int]] = {}  # of these, and of those that were stopped
        self._followers: set[tuple[str, int]] = set()
        self._requests: list[_Request] = []
        self._changed: dict[int, Place] = {}  # to be told
        self._failures: list[MeshFailure] = []
        self._armed: float | None = None
        self._cause: str | None = None  # the event that led to what is decided now
        self._causes: dict[int, str] = {}  # by rank: the event that led to its restart
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.number = proc.register(self)
        self.keeper = KeeperId(proc.address, self.number)
        self._thread = threading.Thread(target=self._run, name=f"supervisor of {self._name}", daemon=True)

    def begin(self, addresses: Sequence[str]) -> None:
        """The processes are up."""
        self._roster = self._proc.rosters.of(self.keeper, self._name, addresses)
        now = time.monotonic()
        self._supervisor.handle(StartAsked(), now)
        for rank, address in enumerate(addresses):
            life = self._lives[rank] = _Life(Incarnation(rank, 1), address, is_up=True)
            self._by_address[address] = life
            self._supervisor.handle(Started(life.incarnation), now)
        self._thread.start()

    def abandon(self) -> None:
        """They could not be started."""
        self._proc.forget(self.number)

    # --- on any thread

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.FAILURE:
            self._queue.put(partial(self._on_failure, frame))
        elif frame.kind == message.CALL:
            self._queue.put(partial(self._on_request, frame))
        elif frame.kind == message.CANCEL:
            self._queue.put(partial(self._on_cancel, frame))

    def on_lost(self, address: str, error: SupervisionError) -> None:
        if address == self._proc.address:
            self._queue.put(None)
        else:
            self._queue.put(partial(self._on_spawner_lost, address))

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
        self._publish()
        if self._supervisor.is_over:
            return
        ready = [request for request in self._requests if request.is_ready(request.ranks)]
        self._requests = [request for request in self._requests if request not in ready]
        for request in ready:
            self._answer(request)
        wake_at = self._supervisor.wake_at
        if wake_at is not None and wake_at != self._armed:
            self._armed = wake_at
            self._proc.timers.at(wake_at, lambda: self._queue.put(partial(self._handle, Tick())))

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
                    self._stop(self._lives[_rank(incarnation)], reason)
            case Kill(incarnations):
                for incarnation in incarnations:
                    self._stop(self._lives[_rank(incarnation)], "it did not stop in time")
            case Restarting(failure, children, attempt, delay):
                self._note(failure.child, f"restart {attempt} of it was decided, in {delay:.3g} s")
                _log.warning(
                    "%s: rank %s has ended (%s); restart %d of it%s%s",
                    self._name,
                    failure.child,
                    failure.reason.partition("\n")[0],
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
                    self._causes[_number(rank)] = self._cause
                    self._change(rank, RESTARTING, f"it is being restarted: {failure.reason}")
            case Forget(rank, reason):
                emit("member.gone", cause=self._cause, mesh=self._name, rank=rank, message=reason)
                self._change(rank, GONE, reason)
            case Escalate():
                self._escalate(decision)
            case Finish(reason):
                self._end(reason)

    # --- lives

    def _start(self, incarnation: Incarnation) -> None:
        life = self._lives[_rank(incarnation)] = _Life(incarnation)
        life.cause = self._causes.get(life.rank)
        try:
            future = self._spawning.start(life.rank, self.keeper)
        except (SupervisionError, RdmaError) as error:
            return self._put(self._on_not_spawned, life, error)
        future.add_callback(lambda: self._put(self._on_spawned, life, future))
        deadline = time.monotonic() + self._spawning.timeout
        self._proc.timers.at(deadline, lambda: self._put(self._on_start_timeout, life))

    def _put(self, action: Callable[..., None], *args: Any) -> None:
        self._queue.put(partial(action, *args))

    def _on_not_spawned(self, life: _Life, error: BaseException) -> None:
        life.is_over = True
        self._on_start_failed(life, str(error))
        self._handle(StartFailed(life.incarnation, str(error)))

    def _on_start_failed(self, life: _Life, why: str) -> None:
        self._cause = life.cause = emit(
            "restart.failed", cause=life.cause, mesh=self._name, rank=life.rank, message=why
        )

    def _on_spawned(self, life: _Life, future: Future[list[str]]) -> None:
        try:
            (life.address,) = future.get()
        except ActorError as error:
            return self._on_not_spawned(life, error.exception)
        except Exception as error:
            return self._on_not_spawned(life, error)
        self._by_address[life.address] = life
        self._spawning.watch(life.rank, life.address, self.keeper)
        failure = self._early.pop(life.address, None)
        if failure is not None:
            self._on_process_failure(failure)
        elif life.stop_reason is not None:
            self._end_life(life, life.stop_reason, Ended(life.incarnation, True, life.stop_reason))
        else:
            self._bear(life)

    def _bear(self, life: _Life) -> None:
        """Makes the actors that live in this process."""
        try:
            life.births = [
                record.bear(self._proc, self.keeper, life.rank, life.address)
                for record in self._records.values()
                if life.rank in record.ranks
            ]
        except Exception as error:  # of users' classes, too
            return self._fail_start(life, f"its actors could not be made again: {type(error).__name__}: {error}")
        for birth in life.births:
            birth.add_callback(lambda: self._put(self._on_born, life))
        self._on_born(life)

    def _on_born(self, life: _Life) -> None:
        if life.is_up or not life.can_be_reached or not all([birth.done() for birth in life.births]):
            return
        failed = [error for error in [birth.exception() for birth in life.births] if error is not None]
        if failed:
            return self._fail_start(life, str(failed[0]))
        life.is_up = True
        self._note(life.rank, "it was up again")
        before = self._place(life.rank)
        self._changed[life.rank] = Place(
            life.rank, before.change + 1, UP, before.incarnation + 1, life.address, before.why
        )
        emit(
            "restart.done",
            cause=life.cause,
            mesh=self._name,
            rank=life.rank,
            incarnation=before.incarnation + 1,
            address=life.address,
        )
        self._handle(Started(life.incarnation))

    def _on_start_timeout(self, life: _Life) -> None:
        if life.can_be_reached and not life.is_up:
            self._fail_start(life, f"it was not ready within {self._spawning.timeout:g} s")

    def _fail_start(self, life: _Life, why: str) -> None:
        self._on_start_failed(life, why)
        self._end_life(life, why, StartFailed(life.incarnation, why))

    def _stop(self, life: _Life, reason: str) -> None:
        if life.address:
            self._end_life(life, reason, Ended(life.incarnation, True, reason))
        else:
            life.stop_reason = reason

    def _end_life(self, life: _Life, reason: str, event: Event) -> None:
        """The agent ends the process; `event` follows."""
        if life.is_ending:
            return
        life.is_ending = True
        try:
            stopped = self._spawning.stop(life.rank, life.address, reason)
        except (SupervisionError, RdmaError) as error:
            _log.warning("%s: rank %d cannot be stopped: %s", self._name, life.rank, error)
            return self._put(self._on_ended, life, event)
        stopped.add_callback(lambda: self._put(self._on_ended, life, event))

    def _on_ended(self, life: _Life, event: Event) -> None:
        self._by_address.pop(life.address, None)
        life.is_over = True
        self._cause = life.cause
        if self._lives.get(life.rank) is life:
            self._handle(event)

    # --- failures

    def _on_failure(self, frame: Frame) -> None:
        failure: MeshFailure = frame.load()
        if failure.number is not None:
            self._on_actor_failure(failure)
        elif failure.kind == STUCK:
            self._proc.tell_owner(self._owner, failure)
        elif failure.kind == STOPPED:
            life = self._by_address.get(failure.address or "")
            if life is not None:
                self._handle(Remove(life.rank, failure.message))
        else:
            self._on_process_failure(failure)

    def _on_actor_failure(self, failure: MeshFailure) -> None:
        """For the owner of the actor, unless it is one that is being made again: then its process does not start."""
        record, owner = self._records.get(failure.number or 0), self._owners.get(failure.number or 0)
        if record is not None and failure.rank is not None:
            life = self._lives[record.ranks[failure.rank]]
            if not life.is_up:
                return
        if owner is not None:
            self._proc.tell_owner(owner, failure)

    def _on_process_failure(self, failure: MeshFailure) -> None:
        assert failure.address is not None, "agents say which process it was"
        life = self._by_address.pop(failure.address, None)
        if life is None:
            if any(not each.address and not each.is_over for each in self._lives.values()):
                self._early[failure.address] = failure
            return
        life.is_over = True
        self._proc.host_watch.discard([failure.address])
        self._failures.append(failure)
        del self._failures[:-_MOST_FAILURES]
        self._cause = failure.event
        self._handle(Ended(life.incarnation, failure.exit_code == 0, failure.message))
        if self._place(life.rank).state == UP:  # nobody restarts it
            self._change(life.rank, GONE, failure.message)
        if self._restarts.restart == "never" and not self._supervisor.is_ending:
            for told in self._as_of_actors(failure, life.rank):
                self._proc.tell_owner(self._owner, told)

    def _as_of_actors(self, failure: MeshFailure, rank: int) -> list[MeshFailure]:
        """One of each mesh of actors that lost a member."""
        return [
            failure.in_mesh(record.name, record.ranks.index(rank))
            for record in self._records.values()
            if rank in record.ranks
        ] or [failure.in_mesh(self._name, rank)]

    def _note(self, rank: Any, what: str) -> None:
        """In the time line of the last failure of that process."""
        for index in range(len(self._failures) - 1, -1, -1):
            if self._failures[index].rank == rank:
                self._failures[index] = self._failures[index].noted(what)
                return

    def _escalate(self, decision: Escalate) -> None:
        causes = []
        for failed in decision.failures:
            known = [each for each in self._failures if (each.rank, each.message) == (failed.child, failed.reason)]
            causes.append(
                known[-1] if known else MeshFailure(self._name, "process", failed.reason, _number(failed.child))
            )
        last, why = causes[-1], f"it is given up: {decision.reason}"
        event = emit("restart.escalated", cause=self._cause, mesh=self._name, rank=last.rank, message=decision.reason)
        failure = MeshFailure(self._name, "process", why, last.rank, last.exit_code, causes=tuple(causes), event=event)
        self._end(failure.message)
        self._proc.tell_owner(self._owner, failure.noted(f"given up by its supervisor, in {self._proc.name}"))

    def _end(self, why: str) -> None:
        """All processes have ended, for good."""
        for rank in range(self._spawning.count):
            self._change(rank, GONE, why)
        self._proc.bury(self.number, Tombstone(self._proc, self._name, why))
        self._publish(is_last=True, why=why)
        self._roster.close(why)
        for request in self._requests:
            has_ended = request.is_ready(request.ranks)
            self._answer(request, None if has_ended else SupervisionError(f"{self._name}: {why}"))
        self._requests.clear()

    # --- the roster

    def _place(self, rank: int) -> Place:
        return self._changed.get(rank) or self._roster.place(rank)

    def _change(self, rank: Any, state: str, why: str) -> None:
        before = self._place(rank)
        if (before.state, before.why) != (state, why):
            self._changed[rank] = before._replace(change=before.change + 1, state=state, why=why)

    def _publish(self, *, is_last: bool = False, why: str = "") -> None:
        if not self._changed and not is_last:
            return
        places = list(self._changed.values())
        self._changed.clear()
        self._roster.update(places)
        for follower in self._followers.copy():
            self._tell(follower, places, is_last, why)

    def _tell(self, follower: tuple[str, int], places: Sequence[Place], is_last: bool = False, why: str = "") -> None:
        address, number = follower
        body = pickle.dumps(([tuple(place) for place in places], is_last, why))
        head = message.pack(message.SEND, number)
        try:
            self._proc.post(address, head, body, 0.0)
        except TransferTimeout:
            self._proc.post_quietly(address, head, body)  # when it has room again
        except (SupervisionError, RdmaError):
            self._followers.discard(follower)

    # --- requests

    def _on_request(self, frame: Frame) -> None:
        if frame.method == b"follow":
            self._followers.add((frame.address, frame.reply))
            return self._tell((frame.address, frame.reply), self._roster.places)
        asked = _REQUESTS.get(frame.method)
        if asked is None:
            return self._proc.refuse(frame, f"the supervisor of {self._name} has no method {frame.method.decode()!r}")
        self._do_as_asked(asked, frame, *pickle.loads(frame.body))

    def _do_as_asked(self, asked: Callable[..., None], frame: Frame, *args: Any) -> None:
        try:
            asked(self, frame, *args)
        except ConfigError as error:
            self._answer(_Request(frame, (), lambda _: True), error)

    def _on_adopt_asked(self, frame: Frame, record: BirthRecord) -> None:
        """Another mesh of actors. The answer: addresses of the processes; from then on it is made again in those that
        are restarted.
        """

        def adopt() -> list[str]:
            self._records[record.number] = record
            self._owners[record.number] = record.owner
            self._proc.expect(self.number, record.owner[0])
            return [self._lives[rank].address or self._place(rank).address for rank in record.ranks]

        self._requests.append(_Request(frame, record.ranks, self._can_be_reached, adopt))

    def _can_be_reached(self, ranks: tuple[int, ...]) -> bool:
        """Or never will be."""
        lives = [self._lives[rank] for rank in ranks if self._place(rank).state != GONE]
        return all(life.can_be_reached and not self._proc.is_lost(life.address) for life in lives)

    def _on_cancel(self, cancel: Frame) -> None:
        """Whoever asked does not wait any more."""
        self._requests = [
            request
            for request in self._requests
            if (request.frame.address, request.frame.reply) != (cancel.address, cancel.reply)
        ]

    def _on_forget_asked(self, frame: Frame, number: int) -> None:
        """That mesh of actors was stopped."""
        self._records.pop(number, None)

    def _on_stop_asked(self, frame: Frame, ranks: tuple[int, ...], reason: str) -> None:
        self._requests.append(_Request(frame, ranks, self._have_ended))
        if self._supervisor.children.keys() <= set(ranks):
            self._handle(StopAsked(reason))
        else:
            for rank in ranks:
                self._handle(Remove(rank, reason))

    def _have_ended(self, ranks: tuple[int, ...]) -> bool:
        return self._supervisor.is_over or not self._supervisor.children.keys() & set(ranks)

    def _on_replace_asked(self, frame: Frame, rank: int, until: float = 0.0) -> None:
        """Starts a member that is gone. `until`: when we stop waiting for the agent to say so of one that is lost."""
        place, now = self._place(rank), time.monotonic()
        if place.state == UP and self._proc.is_lost(place.address):
            until = until or now + float(config.get("heartbeat_timeout"))
            if now < until:
                again = partial(self._put, self._do_as_asked, Driver._on_replace_asked, frame, rank, until)
                self._proc.timers.at(now + _SHORT, again)
                return
        if place.state != GONE:
            raise ConfigError(f"rank is {rank}, but that process is {place.state}: only one that is gone is replaced")
        self._handle(Remove(rank, "it is replaced"))
        self._change(rank, RESTARTING, "it is being replaced")
        for child in self._restarts.children([rank]):
            self._handle(Add(child))

        def result() -> None:
            if self._place(rank).state == GONE:
                raise SupervisionError(f"rank {rank} of {self._name} could not be replaced: {self._place(rank).why}")

        self._requests.append(_Request(frame, (rank,), lambda _: self._place(rank).state != RESTARTING, result))

    def _answer(self, request: _Request, error: BaseException | None = None) -> None:
        frame = request.frame
        try:
            if error is not None:
                raise error
            outgoing, flags = encode(request.answer()), 0
        except (ConfigError, SupervisionError) as refused:
            outgoing, flags = encode_failure(refused), message.FAILED
        self._proc.reply(frame.address, frame.reply, 0, outgoing, flags)

    def _on_spawner_lost(self, address: str) -> None:
        """Its actors have lost their owner, and are not made again."""
        self._records = {number: record for number, record in self._records.items() if record.owner[0] != address}


_REQUESTS: dict[bytes, Callable[..., None]] = {
    b"adopt": Driver._on_adopt_asked,
    b"forget": Driver._on_forget_asked,
    b"stop": Driver._on_stop_asked,
    b"replace": Driver._on_replace_asked,
}
_SHORT = 0.01  # seconds
_MOST_FAILURES = 256  # that are kept for reports


def _rank(incarnation: Incarnation) -> int:
    return _number(incarnation.child)


def _number(child: Any) -> int:
    return int(child)
