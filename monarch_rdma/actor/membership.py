"""Who is in, among real processes: carries the machines of supervision/membership over messages, clocks and deaths.

One process has the `Coordination`; whoever takes part has a `Membership`, made from the coordination's `id`, which can
be sent anywhere. Nothing here runs users' code, and nothing waits. docs/supervision.md has an example.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError
from ..rdma.messages import says_ended
from ..supervision.events import emit
from ..supervision.membership import (
    Activated,
    Agree,
    Asked,
    Committed,
    Coordinator,
    Died,
    Dropped,
    Epoch,
    GiveUp,
    Leave,
    Left,
    Lost,
    Member,
    MemberId,
    MembershipOptions,
    Notice,
    Proposed,
    Refused,
    Report,
    Resumed,
    Superseded,
    Suspended,
    Tick,
    Withdrawn,
)
from ..supervision.membership.messages import CoordinatorEvent, CoordinatorOutput, MemberEvent, MemberOutput
from .context import context
from .failure import SupervisionError
from .future import Future
from .runtime import message
from .runtime.message import Frame
from .runtime.proc import current_proc

if TYPE_CHECKING:
    from .runtime.proc import Proc
    from .runtime.timers import Timer

__all__ = ["Coordination", "CoordinationId", "Membership"]

_MOST_EVENTS = 1024  # of a member, that nobody has taken


class CoordinationId(NamedTuple):
    """Where a coordination is found. Plain data: it goes to members with their arguments."""

    address: str
    number: int


class _Wakeup:
    """One timer for a machine that says when it wants to be told of the time."""

    def __init__(self, proc: Proc, tick: Any) -> None:
        self._proc = proc
        self._tick = tick
        self._timer: Timer | None = None
        self._at: float | None = None

    def set(self, at: float | None) -> None:
        if at == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = None if at is None else self._proc.timers.at(at, self._ring)

    def _ring(self) -> None:
        self._at = self._timer = None
        self._tick()


def _send(proc: Proc, address: str, number: int, value: Any) -> None:
    """Soon, and not under anybody's lock: within one process it arrives at once."""
    head, body = message.pack(message.SEND, number), pickle.dumps(value)
    proc.later(lambda: proc.post_quietly(address, head, body))


class Coordination:
    """The coordinator of one membership, in this process. See supervision.membership.Coordinator.

    `options`: limits and times. `term`: greater each time that the coordination of a membership is made anew. Its end
    is that of the process, or `close()`: members work on until their lease is over.
    """

    def __init__(self, options: MembershipOptions | None = None, *, term: int = 1) -> None:
        self._proc = current_proc()
        self._machine = Coordinator(options or MembershipOptions(), term=term, now=time.monotonic())
        self._senders: dict[MemberId, tuple[str, int]] = {}  # process and number
        self._lock = threading.RLock()
        self._wakeup = _Wakeup(self._proc, lambda: self._handle(Tick()))
        self._is_closed = False
        self._number = self._proc.register(self)
        self.id = CoordinationId(self._proc.address, self._number)
        self._handle(Tick())

    @property
    def epoch(self) -> Epoch | None:
        """The current one. Some of its members may be lost, until another one follows."""
        return self._machine.epoch

    def explain(self) -> str:
        """In a sentence, for people: what it waits for."""
        with self._lock:
            return self._machine.explain()

    def died(self, member: MemberId, reason: str) -> None:
        """For who has seen the process of a member end: it is not waited for until its lease is over. It is believed.
        Of processes on this host nobody has to say so.
        """
        self._handle(Died(member, reason))

    def close(self) -> None:
        """No epoch follows any more; members that wait for one go on waiting."""
        with self._lock:
            self._is_closed = True
            self._wakeup.set(None)
            for address in {address for address, _ in self._senders.values()}:
                self._proc.fulfil(self._number, address)
            self._proc.forget(self._number)

    # --- for the process

    def on_frame(self, frame: Frame) -> None:
        if frame.kind != message.SEND:
            return
        number, report = pickle.loads(frame.body)
        assert isinstance(report, Report), "members send nothing else"
        with self._lock:
            if report.member not in self._senders:
                self._proc.expect(self._number, frame.address, standing=True)
            self._senders[report.member] = frame.address, number
        self._handle(report)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """A process is gone, or cannot be reached. Only what has ended for sure is not waited for."""
        if address == self._proc.address:
            return self.close()
        with self._lock:
            lost = [member for member, (where, _) in self._senders.items() if where == address]
            if not says_ended(str(error)):
                return
            for member in lost:
                del self._senders[member]
        for member in lost:
            self._handle(Died(member, str(error)))

    def _handle(self, event: CoordinatorEvent) -> None:
        with self._lock:
            if self._is_closed:
                return
            outputs = self._machine.handle(event, time.monotonic())
            for output in outputs:
                self._carry_out(output)
            self._wakeup.set(self._machine.wake_at)

    def _carry_out(self, output: CoordinatorOutput) -> None:
        match output:
            case Notice(to):
                if to in self._senders:
                    _send(self._proc, *self._senders[to], output)
            case Proposed(epoch):
                emit("epoch.proposed", epoch=list(epoch.id), members=list(map(str, epoch.members)))
            case Committed(epoch):
                gone = {str(departure.member): departure.reason for departure in epoch.departed}
                emit("epoch.committed", epoch=list(epoch.id), members=list(map(str, epoch.members)), departed=gone)
                stay = set(epoch.members)
                self._senders = {member: to for member, to in self._senders.items() if self._is_there(member, stay)}
            case Superseded(term):
                emit("epoch.superseded", term=term)
                self.close()

    def _is_there(self, member: MemberId, stay: set[MemberId]) -> bool:
        """Whether its reports may still matter: not of an incarnation that a later one has followed."""
        return member in stay or not any(other.name == member.name and other > member for other in stay)


class Membership:
    """One member. May be used from any thread.

    ```python
    membership = Membership(coordination_id)
    while work_is_left:
        epoch = membership.enter().get().epoch     # agrees to whatever is proposed, and waits until it is in
        while membership.is_in(epoch):             # nobody was lost, and nobody wants in
            work(epoch)                            # its members, ranks and their metadata
    membership.leave("all is done")
    ```
    """

    def __init__(
        self,
        coordination: CoordinationId,
        name: str | None = None,
        *,
        metadata: Any = None,
        incarnation: int | None = None,
        heartbeat: float = 0.5,
    ) -> None:
        """`name`: the same for all incarnations; by default that of the actor, with its rank. `metadata`: plain data
        that the others find in the next epoch. `incarnation`: greater for each life of a name, by default the time.
        Raises ConfigError.
        """
        if name is None:
            instance = context().actor_instance
            name = f"{instance.name}/{instance.rank.rank}"
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name is {name!r}, but must be a string that is not empty")
        if not isinstance(coordination, CoordinationId):
            raise ConfigError(f"coordination is {coordination!r:.200}, but must be the id of a Coordination")
        self.me = MemberId(name, time.time_ns() if incarnation is None else incarnation)
        self._proc = current_proc()
        self._machine = Member(self.me, metadata=metadata, heartbeat=heartbeat, now=time.monotonic())
        self._coordination = coordination
        self._entering: list[Future[Activated]] = []
        self._asked: Epoch | None = None
        self._entered: Activated | None = None
        self._lost: set[MemberId] = set()  # from the epoch that it is in
        self._end = ""  # why it is over
        self._events: deque[MemberOutput] = deque(maxlen=_MOST_EVENTS)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wakeup = _Wakeup(self._proc, lambda: self._handle(Tick()))
        self._number = self._proc.register(self)
        self._handle(Tick())

    # --- for users

    @property
    def epoch(self) -> Epoch | None:
        """The one that this member may work in at this moment, if any."""
        with self._lock:
            return self._machine.epoch(time.monotonic())

    def is_in(self, epoch: Epoch) -> bool:
        """Whether work in it makes sense: it goes on, nobody was lost from it, and no other one was proposed."""
        with self._lock:
            current = self._machine.epoch(time.monotonic())
            return current is not None and current.id == epoch.id and self._asked is None and not self._lost

    def enter(self) -> Future[Activated]:
        """Ends the work in the current epoch where another one is proposed or somebody was lost, and is done when this
        member is in: `epoch`, its `rank`, who `joined` and who was `lost` since the one before.

        Fails with SupervisionError where it is not taken in any more.
        """
        with self._lock:
            entering: Future[Activated] = Future.pending()
            self._entering.append(entering)
            asked = self._asked
            if asked is not None:
                self._asked = None
                self._handle(Agree(asked.id))
            self._settle()
        return entering

    def next_event(self, timeout: float | None = None) -> MemberOutput:
        """What happens to this member, one after the other, in the words of supervision.membership. Of those that
        nobody takes, the last 1024 are kept. Raises TimeoutError after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._events, timeout):
                raise TimeoutError(f"nothing has happened to {self.me} for {timeout} s")
            return self._events.popleft()

    def set_metadata(self, metadata: Any) -> None:
        """For the next epoch."""
        with self._lock:
            self._machine.metadata = metadata

    def give_up(self, reason: str) -> None:
        """The epoch is of no use any more, for nobody: another one follows, of the same members if all are well."""
        self._handle(GiveUp(reason))

    def leave(self, reason: str) -> None:
        """Its work has ended, and it wants in no more."""
        self._handle(Leave(reason))

    def follow(self, coordination: CoordinationId) -> None:
        """The coordination was made anew, with a greater term."""
        with self._lock:
            self._coordination = coordination

    # --- for the process

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.SEND:
            notice = pickle.loads(frame.body)
            assert isinstance(notice, Notice), "the coordinator sends nothing else"
            self._handle(notice)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody else: its lease tells it."""
        if address == self._proc.address:
            self._close("its process ends")

    def _handle(self, event: MemberEvent) -> None:
        with self._lock:
            for output in self._machine.handle(event, time.monotonic()):
                self._on_output(output)
            self._wakeup.set(self._machine.wake_at)
            self._settle()

    def _on_output(self, output: MemberOutput) -> None:
        if isinstance(output, Report):
            return _send(self._proc, *self._coordination, (self._number, output))
        self._events.append(output)
        self._changed.notify_all()
        match output:
            case Asked(proposal):
                self._asked = proposal
            case Withdrawn():
                self._asked = None
            case Activated():
                self._entered, self._asked = output, None
                self._lost = set()
            case Lost(_, departed):
                self._lost |= {departure.member for departure in departed}
            case Dropped():
                self._entered = None
            case Refused(reason):
                self._close(f"it was refused: {reason}")
            case Left():
                self._close("it has left")
            case Suspended() | Resumed():
                pass

    def _settle(self) -> None:
        """Whoever waits to enter."""
        if not self._entering:
            return
        if self._end:
            entering, self._entering = self._entering, []
            for future in entering:
                future.set_error(SupervisionError(f"{self.me} takes part no more: {self._end}"))
        elif self._asked is not None:
            asked, self._asked = self._asked, None
            self._handle(Agree(asked.id))
        elif self._entered is not None and self.is_in(self._entered.epoch):
            entering, self._entering = self._entering, []
            for future in entering:
                future.set_result(self._entered)

    def _close(self, why: str) -> None:
        with self._lock:
            self._end = self._end or why
            self._wakeup.set(None)
            self._proc.forget(self._number)
            self._settle()
