"""Where the members of a supervised mesh are now: kept by the process that spawned it, followed by who refers to it.

A reference names the mesh's keeper. Each process that uses one asks the keeper where the members are, once, and is told
of every change from then on. An address names one incarnation of a process, so nothing that is meant for an old one can
reach its successor; what an old one still sends is refused as soon as its successor is known.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import config
from ...errors import RdmaError
from ..failure import SupervisionError, decode_failure
from ..future import Future
from . import message
from .message import Frame
from .reply import SingleReply
from .route import PATIENCE, Route

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["GONE", "RESTARTING", "UP", "KeeperId", "Place", "Roster", "Rosters", "ask_keeper", "tell_keeper"]

_MANY = 1024  # rosters; those of meshes that have ended are let go of then
UP, RESTARTING, GONE = "up", "restarting", "gone"


class KeeperId(NamedTuple):
    """Who keeps a roster: the process, and its number there."""

    address: str
    number: int


class Place(NamedTuple):
    """Where one member is, as the keeper says. `change` counts what it said of this rank; `incarnation` counts from 1.

    `address`: of the process; where it is not "up", the one it had last. `number`: of the actor there; 0 where the
    member is the process. `occasion`: what its end shares with those of others, such as a host that was lost.
    """

    rank: int
    change: int
    state: str
    incarnation: int
    address: str
    why: str
    number: int = 0
    occasion: Hashable | None = None


class Roster:
    """The places of one mesh as this process knows them. Any thread may ask."""

    def __init__(self, proc: Proc, keeper: KeeperId, name: str, addresses: Sequence[str], number: int = 0) -> None:
        """`addresses`: those of the first incarnations, by rank. `number`: that of all of these, if they are actors."""
        self.keeper = keeper
        self.generation = 0  # changes with every change of a place
        self._proc = proc
        self._name = name
        self._places = [Place(rank, 0, UP, 1, address, "", number) for rank, address in enumerate(addresses)]
        self._doubted: dict[int, Place] = {}  # lost from here, and the keeper has not said what becomes of it
        self._listeners: list[Callable[[], object]] = []
        self._kind = "actor" if number else "process"
        self.is_closed = False  # nobody is restarted any more
        self._is_lost = False  # ... because its keeper is lost from here
        self._is_current = keeper.address == proc.address
        self._waiting = 0
        self._changed = threading.Condition()
        self._number = 0
        if not self._is_current:
            self._number = proc.register(self)

    def follow(self) -> None:
        """Asks the keeper for all places, and to be told of changes. Its own process asks nobody."""
        if self._number:
            head = message.pack(message.CALL, self.keeper.number, reply=self._number, method=b"follow")
            try:
                self._proc.post(self.keeper.address, head, b"", 0.0)
            except (SupervisionError, RdmaError) as error:
                self.close(f"who keeps it cannot be asked where its members are: {error}")

    # --- for those who call

    @property
    def places(self) -> list[Place]:
        with self._changed:
            return self._places.copy()

    def place(self, rank: int) -> Place:
        return self._places[rank]

    def routes(self, ranks: Sequence[int], number: int, deadline: float) -> tuple[list[Route], bool]:
        """The ways to the actors of that number in these processes, and whether all are up. Waits for those that are
        being restarted as long as `deadline` (of time.monotonic) allows; what is sent to one that is not up then fails
        at once.
        """
        self._await_settled(ranks, deadline)
        with self._changed:
            places = [self._places[rank] for rank in ranks]
            are_up = self._is_settled(ranks) and all(place.state == UP for place in places)
        return [self._route(place, number) for place in places], are_up

    def _route(self, place: Place, number: int) -> Route:
        if place.state == UP:
            return self._proc.route(place.address, place.number or number)
        route = Route(self._proc, place.address, number)  # for nobody else: the process may still end its work
        route.error = SupervisionError(f"{self._kind} {self._name}/{place.rank} is {place.state}: {place.why}")
        return route

    def _await_settled(self, ranks: Sequence[int], deadline: float) -> None:
        with self._changed:
            if self._is_settled(ranks):
                return
            self._waiting += 1
        try:
            if self._number:  # the keeper may be lost meanwhile
                self._proc.expect(self._number, self.keeper.address)
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled(ranks), max(0.0, deadline - time.monotonic()))
        finally:
            with self._changed:
                self._waiting -= 1
                if self._number and not self._waiting:
                    self._proc.fulfil(self._number, self.keeper.address)

    def _is_settled(self, ranks: Sequence[int]) -> bool:
        return self._is_current and not any(
            self._places[rank].state == RESTARTING or rank in self._doubted for rank in ranks
        )

    # --- news

    def update(self, places: Iterable[Place]) -> None:
        """What the keeper says; what is known already changes nothing."""
        replaced = []
        with self._changed:
            self._is_current = True
            for place in places:
                before = self._places[place.rank]
                if place.change <= before.change:
                    continue
                self._places[place.rank] = place
                self._doubted.pop(place.rank, None)
                self.generation += 1
                if place.address != before.address:
                    replaced.append(before.address)
            self._changed.notify_all()
        for address in replaced:
            self._proc.supersede(address)
        self._tell_listeners()

    def listen(self, callback: Callable[[], object]) -> None:
        """Calls it after each piece of news, on any thread, until `unlisten`."""
        with self._changed:
            self._listeners.append(callback)

    def unlisten(self, callback: Callable[[], object]) -> None:
        with self._changed:
            self._listeners.remove(callback)

    def _tell_listeners(self) -> None:
        with self._changed:
            listeners = self._listeners.copy()
        for callback in listeners:
            callback()

    def close(self, why: str) -> None:
        """There is no keeper any more: nobody is restarted."""
        self.is_closed = True
        with self._changed:
            for rank, place in enumerate(self._places):
                if place.state == RESTARTING or rank in self._doubted or not self._is_current:
                    self._places[rank] = place._replace(state=GONE, why=why)
            self._doubted.clear()
            self._is_current = True
            self.generation += 1
            self._changed.notify_all()
        if self._number:
            self._proc.forget(self._number)
        self._tell_listeners()

    def on_keeper_back(self) -> None:
        """It was only lost from here: it is asked again."""
        with self._changed:
            if not self.is_closed or not self._is_lost:
                return
            self.is_closed = self._is_lost = self._is_current = False
            self._number = self._proc.register(self)
            self._places = [place._replace(change=-1) for place in self._places]
        self.follow()

    def on_process_lost(self, address: str) -> None:
        """From here, that is: the keeper will say what becomes of it, or that it sees nothing wrong."""
        self._doubt(lambda place: place.address == address)

    def on_actor_ended(self, address: str, number: int) -> None:
        """It refused a call: the same."""
        self._doubt(lambda place: (place.address, place.number) == (address, number))

    def _doubt(self, concerns: Callable[[Place], bool]) -> None:
        with self._changed:
            lost = [place for place in self._places if place.state == UP and concerns(place)]
            if not lost or not self._is_current or self.is_closed:
                return
            for place in lost:
                self._doubted[place.rank] = place
            self.generation += 1
        self.follow()
        patience = float(config.get("heartbeat_timeout"))
        for place in lost:
            self._proc.timers.at(time.monotonic() + patience, partial(self._stop_doubting, place))

    def _stop_doubting(self, place: Place) -> None:
        """The keeper has nothing to say against it: it lives, but cannot be reached from here."""
        with self._changed:
            if self._doubted.get(place.rank) is place:
                del self._doubted[place.rank]
                self.generation += 1
                self._changed.notify_all()

    def on_frame(self, frame: Frame) -> None:
        if frame.kind != message.SEND:
            return
        if frame.flags & message.FAILED:
            self.close(str(decode_failure(frame.load())))
            return
        places, is_last, why = pickle.loads(frame.body)
        self.update([Place(*place) for place in places])
        if is_last:
            self.close(why)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self._is_lost = not self.is_closed
        self.close(f"who keeps {self._name} is lost, and with it all that it spawned: {error}")


class Rosters:
    """All that a process follows or keeps."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._all: dict[KeeperId, Roster] = {}
        self._sweep_at = _MANY
        self._lock = threading.Lock()

    def of(self, keeper: KeeperId, name: str, addresses: Sequence[str], number: int = 0) -> Roster:
        """Made, and the keeper asked, the first time."""
        roster = self._all.get(keeper)
        if roster is not None:
            return roster
        with self._lock:
            roster = self._all.get(keeper)
            if roster is not None:
                return roster
            if len(self._all) >= self._sweep_at:
                self._all = {keeper: each for keeper, each in self._all.items() if not each.is_closed}
                self._sweep_at = max(_MANY, 2 * len(self._all))
            roster = self._all[keeper] = Roster(self._proc, keeper, name, addresses, number)
        roster.follow()
        return roster

    def on_process_lost(self, address: str) -> None:
        for roster in list(self._all.values()):
            roster.on_process_lost(address)

    def on_back(self, address: str) -> None:
        for roster in list(self._all.values()):
            if roster.keeper.address == address:
                roster.on_keeper_back()

    def on_actor_ended(self, address: str, number: int) -> None:
        for roster in list(self._all.values()):
            roster.on_actor_ended(address, number)


def ask_keeper(proc: Proc, keeper: KeeperId, method: bytes, value: Any, what: str) -> Future[Any]:
    """Has the keeper of a roster do something. `what`: in words, for errors."""
    waiting = SingleReply(proc, proc.route(keeper.address, keeper.number), what)
    try:
        _post(proc, keeper, method, value, waiting.number)
    except (SupervisionError, RdmaError) as error:
        waiting.on_failed(0, error)
    return waiting.future


def tell_keeper(proc: Proc, keeper: KeeperId, method: bytes, value: Any) -> None:
    """The same, without an answer. One that is gone need not know."""
    with contextlib.suppress(SupervisionError, RdmaError):
        _post(proc, keeper, method, value, 0)


def _post(proc: Proc, keeper: KeeperId, method: bytes, value: Any, reply: int) -> None:
    head = message.pack(message.CALL, keeper.number, reply=reply, method=method)
    proc.post(keeper.address, head, pickle.dumps(value), PATIENCE)
