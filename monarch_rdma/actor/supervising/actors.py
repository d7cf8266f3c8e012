"""The supervisor of one mesh of actors: each is started again in its process, under its name and another number.

Where their processes are supervised too, they follow these: one that has come back gets its actor again. Where they are
not, an actor is lost for good with its process.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...supervision.policy import Ended, Incarnation, Remove, StartAsked, Started, StartFailed, StopAsked
from ..encoding.codec import encode
from ..failure import ENDED, STUCK, MeshFailure, SupervisionError
from ..future import Future
from ..remote_error import ActorError
from ..runtime import message
from ..runtime.birth import Birth
from ..runtime.cast import cast
from ..runtime.message import Frame
from ..runtime.reply import SingleReply
from ..runtime.roster import GONE, RESTARTING, UP, Roster
from ..runtime.route import PATIENCE
from .birth_record import BirthRecord, Restore
from .driver import Driver
from .lives import Life
from .places import Places

if TYPE_CHECKING:
    from ..runtime.proc import Proc
    from .restarts import Restarts

__all__ = ["ActorDriver"]


class ActorDriver(Driver):
    kind = "actor"

    def __init__(
        self,
        proc: Proc,
        birth: Birth,
        number: int,
        ranks: Sequence[int],
        extent: bytes,
        processes: Roster | None,
        restarts: Restarts,
    ) -> None:
        """`ranks`: of its processes, whose places `processes` knows where they are supervised. `birth.owner`: who is
        told of what the policy does not settle. Raises TypeError where the birth cannot be pickled.
        """
        self._record = BirthRecord.of(birth, number, ranks, extent)
        super().__init__(proc, birth.name, ranks, restarts, birth.owner)
        self._processes = processes
        self._listener = partial(self._put, self._on_processes_changed)
        self._by_number: dict[tuple[int, int], Life] = {}  # by rank and number
        self._lost: set[int] = set()  # ranks that are gone with their processes

    def begin(self, addresses: Sequence[str]) -> None:
        """They are being made, in the processes at `addresses`, by base rank, under the number of their mesh."""
        self._places = Places(self._proc, self.keeper, self._name, addresses, self._record.number)
        now = time.monotonic()
        self._supervisor.handle(StartAsked(), now)
        for rank in self._ranks:
            life = self._lives[rank] = Life(Incarnation(rank, 1), addresses[rank], self._record.number, is_up=True)
            self._by_number[rank, life.number] = life
            self._supervisor.handle(Started(life.incarnation), now)
        self._thread.start()
        if self._processes is not None:
            self._processes.listen(self._listener)
            return self._listener()
        for address in {addresses[rank] for rank in self._ranks}:
            self._proc.expect(self.number, address, standing=True)

    def first(self, birth: Birth) -> Birth:
        """As it is sent to the first incarnations."""
        return self._record.first(birth, self.keeper)

    # --- processes

    def _on_processes_changed(self) -> None:
        assert self._processes is not None, "it is what has changed"
        for rank in self._ranks:
            place, life = self._processes.place(rank), self._lives[rank]
            if rank in self._lost:
                if place.state == UP:
                    self._lost.discard(rank)
                    self._begin_again(rank, "its process is back")
            elif life.address and place.address == life.address and place.state == UP:
                continue
            elif life.address and not life.is_over:
                self._on_process_lost(life, place.why or "its process has ended")
            elif not life.address and not life.is_over:
                self._begin(life)

    def _on_address_lost(self, address: str, error: SupervisionError) -> None:
        for life in list(self._lives.values()):
            if life.address == address and not life.is_over:
                self._on_process_lost(life, str(error))
        if not self._supervisor.children:
            self._handle(StopAsked("all of its processes are lost"))

    def _on_process_lost(self, life: Life, why: str) -> None:
        if life.is_ending:
            return self._on_ended(life, Ended(life.incarnation, True, why))
        if self._state_of_process(life.rank) == GONE:
            return self._lose(life, why)
        failure = MeshFailure(self._name, "process", why, self._record.ranks.index(life.rank), address=life.address)
        occasion = None if self._processes is None else self._processes.place(life.rank).occasion
        self._on_failed(life, failure, normal=False, occasion=occasion)

    def _state_of_process(self, rank: int) -> str:
        return GONE if self._processes is None else self._processes.place(rank).state

    def _lose(self, life: Life, why: str) -> None:
        """With its process, which does not come back by itself."""
        life.is_ending = life.is_over = True
        self._lost.add(life.rank)
        self._handle(Remove(life.rank, why))
        self._handle(Ended(life.incarnation, False, why))

    # --- lives

    def _start(self, incarnation: Incarnation) -> None:
        self._begin(self._new_life(incarnation))

    def _begin(self, life: Life) -> None:
        """Or later, when its process is back."""
        if self._processes is None:
            address, state = self._places.of(life.rank).address, UP
        else:
            place = self._processes.place(life.rank)
            address, state = place.address, place.state
        if state == GONE or (self._processes is None and self._proc.is_lost(address)):
            return self._put(self._lose, life, "its process is gone")
        if state == RESTARTING or self._proc.is_lost(address):
            return
        life.address, life.number = address, self._proc.random_number()
        self._by_number[life.rank, life.number] = life
        try:
            restore = Restore(self._states.of(self._record.number, self._index(life)), self._peers(life))
            birth = self._record.bear(self._proc, self.keeper, life.rank, address, restore, life.number)
        except Exception as error:  # of users' classes, too
            return self._put(self._on_not_started, life, error)
        birth.add_callback(lambda: self._put(self._on_born, life, birth))

    def _index(self, life: Life) -> int:
        """The actor's own rank."""
        return self._record.ranks.index(life.rank)

    def _peers(self, life: Life) -> list[tuple[str, int]]:
        others = [each for each in self._lives.values() if each is not life and each.is_up and each.can_be_reached]
        return [(each.address, each.number) for each in others]

    def _on_born(self, life: Life, birth: Future[Any]) -> None:
        if life.is_over or life.is_ending:
            return
        error = birth.exception()
        if error is None:
            return self._come_up(life)
        if self._proc.is_lost(life.address) and not isinstance(error, ActorError):
            life.address = ""  # with its process, whose supervisor will say what becomes of it
            return
        self._on_not_started(life, error)

    def _on_not_started(self, life: Life, error: BaseException, occasion: Hashable | None = None) -> None:
        if not life.is_over:
            self._by_number.pop((life.rank, life.number), None)
            super()._on_not_started(life, error, occasion)

    def _stop(self, life: Life, reason: str) -> None:
        if not life.address:
            return self._put(self._on_ended, life, Ended(life.incarnation, True, reason))
        self._end_life(life, Ended(life.incarnation, True, reason), partial(self._ask_to_stop, life, reason))

    def _ask_to_stop(self, life: Life, reason: str) -> Future[Any]:
        route = self._proc.route(life.address, life.number)
        waiting = SingleReply(self._proc, route, f"{self._name}.stop")
        deadline = time.monotonic() + PATIENCE
        cast(
            self._proc,
            [route],
            encode(reason),
            b"stop",
            self._record.extent,
            waiting,
            deadline,
            self._index(life),
            flags=message.STOP,
        )
        return waiting.future

    def _kill(self, life: Life) -> None:
        self._give_up(life, "it did not stop in time")
        self._on_ended(life, Ended(life.incarnation, True, "it did not stop in time"))

    def _give_up(self, life: Life, why: str) -> None:
        """Ends it, whatever it does."""
        self._proc.post_quietly(life.address, message.pack(message.END, life.number), encode(why).body)

    def _on_ended(self, life: Life, event: Any) -> None:
        self._by_number.pop((life.rank, life.number), None)
        super()._on_ended(life, event)

    # --- failures

    def _on_failure(self, frame: Frame) -> None:
        failure: MeshFailure = frame.load()
        index = failure.rank if failure.rank is not None else -1
        rank = self._record.ranks[index] if 0 <= index < len(self._record.ranks) else -1
        life = self._by_number.get((rank, failure.number or 0))
        if life is None or life.is_over:
            return
        if failure.kind == STUCK:
            return self._on_stuck(life, failure)
        if life.is_ending:
            return  # its stop ends, too
        del self._by_number[rank, life.number]
        if failure.at_birth and life.incarnation.number == 1:
            return self._on_stillborn(life, failure)
        if failure.at_birth:
            self._failures.add(life.rank, failure)
            return self._on_not_started(life, SupervisionError(failure.message, event=failure.event))
        self._on_failed(life, failure, normal=failure.kind == ENDED)
        if self._restarts.restart == "never" and not self._supervisor.is_ending and failure.kind != ENDED:
            self._proc.tell_owner(self._owner, failure)

    def _on_stillborn(self, life: Life, failure: MeshFailure) -> None:
        """What cannot be made the first time is not made again."""
        life.is_ending = life.is_over = True
        self._cause = failure.event
        self._handle(Remove(life.rank, failure.message))
        self._handle(StartFailed(life.incarnation, failure.message))
        self._proc.tell_owner(self._owner, failure)

    def _on_stuck(self, life: Life, failure: MeshFailure) -> None:
        if not self._restarts.restart_stuck or life.is_ending:
            return self._proc.tell_owner(self._owner, failure)
        self._failures.add(life.rank, failure)
        self._give_up(life, failure.message)

    def _sends_states(self, frame: Frame, number: int, rank: int, own: int) -> bool:
        if number != self._record.number or not 0 <= rank < len(self._record.ranks):
            return False
        life = self._lives[self._record.ranks[rank]]
        return (life.address, life.number) == (frame.address, own) and not life.is_over

    def _settle(self) -> None:
        is_alone = self._processes is not None and self._processes.is_closed and self._lost
        if is_alone and not self._supervisor.children and not self._supervisor.is_ending:
            self._handle(StopAsked("its processes have ended"))
        super()._settle()

    def _end(self, why: str) -> None:
        for address in {life.address for life in self._lives.values()}:
            self._proc.fulfil(self.number, address)
        if self._processes is not None:
            self._processes.unlisten(self._listener)
        super()._end(why)
