"""The supervisor of one mesh of processes: hears of ends (from the hosts' agents, or that an agent is lost), has them
started and stopped, and makes the actors of a restarted one again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from ...errors import RdmaError
from ...supervision.policy import Ended, Event, Incarnation, Remove, StartAsked, Started, StartFailed
from ..failure import STUCK, MeshFailure, SupervisionError
from ..future import Future
from ..hosting.host import STOPPED
from ..remote_error import ActorError
from ..runtime.message import Frame
from ..runtime.roster import GONE
from .birth_record import BirthRecord, Restore
from .driver import Driver
from .lives import Life
from .places import Places

if TYPE_CHECKING:
    from ..hosting.spawning import Spawning
    from ..runtime.proc import Proc
    from .restarts import Restarts

__all__ = ["ProcessDriver"]


class ProcessDriver(Driver):
    kind = "process"

    def __init__(self, proc: Proc, spawning: Spawning, restarts: Restarts, owner: tuple[str, int]) -> None:
        super().__init__(proc, spawning.name, range(spawning.count), restarts, owner)
        self._spawning = spawning
        self._by_address: dict[str, Life] = {}
        self._early: dict[str, MeshFailure] = {}  # of processes whose address is still to be told
        self._records: dict[int, BirthRecord] = {}  # by number, in the order in which they were spawned
        self._owners: dict[int, tuple[str, int]] = {}  # of these, and of those that were stopped

    def begin(self, addresses: Sequence[str]) -> None:
        """The processes are up."""
        self._places = Places(self._proc, self.keeper, self._name, addresses)
        now = time.monotonic()
        self._supervisor.handle(StartAsked(), now)
        for rank, address in enumerate(addresses):
            life = self._lives[rank] = Life(Incarnation(rank, 1), address, is_up=True)
            self._by_address[address] = life
            self._supervisor.handle(Started(life.incarnation), now)
        self._thread.start()

    # --- lives

    def _start(self, incarnation: Incarnation) -> None:
        life = self._new_life(incarnation)
        try:
            future = self._spawning.start(life.rank, self.keeper)
        except (SupervisionError, RdmaError) as error:
            return self._put(self._on_not_spawned, life, error)
        future.add_callback(lambda: self._put(self._on_spawned, life, future))
        deadline = time.monotonic() + self._spawning.timeout
        self._proc.timers.at(deadline, lambda: self._put(self._on_start_timeout, life))

    def _on_spawned(self, life: Life, future: Future[list[str]]) -> None:
        try:
            (life.address,) = future.get()
        except Exception as error:
            return self._on_not_spawned(life, error)
        self._by_address[life.address] = life
        self._spawning.watch(life.rank, life.address, self.keeper)
        failure = self._early.pop(life.address, None)
        if failure is not None:
            self._on_process_failure(failure)
        elif life.stop_reason is not None:
            self._end_process(life, life.stop_reason, Ended(life.incarnation, True, life.stop_reason))
        else:
            self._bear(life)

    def _on_not_spawned(self, life: Life, error: Exception) -> None:
        """All that wait for a host that is lost try as often as each other: each time counts once."""
        host = self._spawning.lost_host_of(life.rank)
        occasion = None if host is None else (host, life.incarnation.number)
        self._on_not_started(life, error.exception if isinstance(error, ActorError) else error, occasion)

    def _bear(self, life: Life) -> None:
        """Makes the actors that live in this process."""
        try:
            life.births = [
                record.bear(self._proc, self.keeper, life.rank, life.address, self._restore(record, life.rank))
                for record in self._records.values()
                if life.rank in record.ranks
            ]
        except Exception as error:  # of users' classes, too
            return self._fail_start(life, f"its actors could not be made again: {type(error).__name__}: {error}")
        for birth in life.births:
            birth.add_callback(lambda: self._put(self._on_born, life))
        self._on_born(life)

    def _restore(self, record: BirthRecord, rank: int) -> Restore:
        living = {each.rank: each for each in self._lives.values() if each.is_up and each.can_be_reached}
        peers = [(living[other].address, record.number) for other in record.ranks if other != rank and other in living]
        return Restore(self._states.of(record.number, record.ranks.index(rank)), peers)

    def _on_born(self, life: Life) -> None:
        if life.is_up or not life.can_be_reached or not all([birth.done() for birth in life.births]):
            return
        failed = [error for error in [birth.exception() for birth in life.births] if error is not None]
        if failed:
            return self._fail_start(life, str(failed[0]))
        self._come_up(life)

    def _on_start_timeout(self, life: Life) -> None:
        if life.can_be_reached and not life.is_up:
            self._fail_start(life, f"it was not ready within {self._spawning.timeout:g} s")

    def _fail_start(self, life: Life, why: str) -> None:
        self._note_failed_start(life, why)
        self._end_process(life, why, StartFailed(life.incarnation, why))

    def _stop(self, life: Life, reason: str) -> None:
        if life.address:
            self._end_process(life, reason, Ended(life.incarnation, True, reason))
        else:
            life.stop_reason = reason

    def _kill(self, life: Life) -> None:
        """Never decided: the agent, which stops it, sees to its end."""
        self._stop(life, "it did not stop in time")

    def _end_process(self, life: Life, reason: str, event: Event) -> None:
        """By its agent."""
        self._end_life(life, event, lambda: self._spawning.stop(life.rank, life.address, reason))

    def _on_ended(self, life: Life, event: Event) -> None:
        self._by_address.pop(life.address, None)
        super()._on_ended(life, event)

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
        self._proc.host_watch.discard([failure.address])
        self._on_failed(life, failure, normal=failure.exit_code == 0, occasion=failure.host)
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

    def _on_address_lost(self, address: str, error: SupervisionError) -> None:
        """A spawner: its actors have lost their owner, and are not made again."""
        for number in [number for number, record in self._records.items() if record.owner[0] == address]:
            self._forget(number)

    # --- the actors that live there

    def _sends_states(self, frame: Frame, number: int, rank: int, own: int) -> bool:
        record = self._records.get(number)
        if record is None or not 0 <= rank < len(record.ranks):
            return False
        life = self._lives[record.ranks[rank]]
        return life.address == frame.address and not life.is_over

    def _on_adopt_asked(self, frame: Frame, record: BirthRecord) -> None:
        """Another mesh of actors. The answer: addresses of the processes; from then on it is made again in those that
        are restarted.
        """

        def adopt() -> list[str]:
            self._records[record.number] = record
            self._owners[record.number] = record.owner
            self._proc.expect(self.number, record.owner[0], standing=True)
            return [self._lives[rank].address or self._places.of(rank).address for rank in record.ranks]

        self._answer_when(frame, record.ranks, self._can_be_reached, adopt)

    def _can_be_reached(self, ranks: tuple[int, ...]) -> bool:
        """Or never will be."""
        lives = [self._lives[rank] for rank in ranks if self._places.of(rank).state != GONE]
        return all(life.can_be_reached and not self._proc.is_lost(life.address) for life in lives)

    def _on_forget_asked(self, frame: Frame, number: int) -> None:
        """That mesh of actors was stopped."""
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._records.pop(number, None)
        self._states.forget(number)

    _ASKED: ClassVar[dict[bytes, Callable[..., None]]] = {b"adopt": _on_adopt_asked, b"forget": _on_forget_asked}
