"""The roster of one mesh, where it is kept: what is known of its members, and who is told of changes."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import RdmaError, TransferTimeout
from ..failure import SupervisionError
from ..runtime import message
from ..runtime.roster import UP, KeeperId, Place

if TYPE_CHECKING:
    from ..runtime.proc import Proc
    from .lives import Life

__all__ = ["Places"]


class Places:
    """Changes are gathered, and told together by `publish`."""

    def __init__(self, proc: Proc, keeper: KeeperId, name: str, addresses: Sequence[str], number: int = 0) -> None:
        """`number`: of the actors, in each process; 0 where the members are processes."""
        self._proc = proc
        self._followers: set[tuple[str, int]] = set()
        self._changed: dict[int, Place] = {}  # to be told
        self._roster = proc.rosters.of(keeper, name, addresses, number)

    def of(self, rank: int) -> Place:
        return self._changed.get(rank) or self._roster.place(rank)

    def change(self, rank: Any, state: str, why: str, occasion: Hashable | None = None) -> None:
        before = self.of(rank)
        if (before.state, before.why) != (state, why):
            self._changed[rank] = before._replace(change=before.change + 1, state=state, why=why, occasion=occasion)

    def come_up(self, life: Life) -> Place:
        """Another incarnation is there."""
        before = self.of(life.rank)
        place = self._changed[life.rank] = before._replace(
            change=before.change + 1,
            state=UP,
            incarnation=before.incarnation + 1,
            address=life.address,
            number=life.number,
        )
        return place

    def publish(self, *, is_last: bool = False, why: str = "") -> None:
        if not self._changed and not is_last:
            return
        places = list(self._changed.values())
        self._changed.clear()
        self._roster.update(places)
        for follower in self._followers.copy():
            self._tell(follower, places, is_last, why)
        if is_last:
            self._roster.close(why)

    def add_follower(self, address: str, number: int) -> None:
        self._followers.add((address, number))
        self._tell((address, number), self._roster.places)

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
