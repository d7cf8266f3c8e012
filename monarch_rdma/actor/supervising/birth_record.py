"""An actor mesh that is started again: enough to make its actors once more."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import TransferTimeout
from ..encoding.codec import encode
from ..remote_error import ActorError
from ..runtime import message
from ..runtime.birth import Birth
from ..runtime.cast import cast
from ..runtime.reply import SingleReply
from ..runtime.roster import ask_keeper, tell_keeper
from ..runtime.route import PATIENCE, Route
from ..runtime.state import Upkeep, has_hooks

if TYPE_CHECKING:
    from ..future import Future
    from ..runtime.proc import Proc
    from ..runtime.roster import KeeperId

__all__ = ["BirthRecord", "Restore"]


@dataclass(frozen=True)
class Restore:
    """What a new incarnation gets of the old ones: the last snapshot, a pickle, and who of its mesh lives."""

    state: bytes | None
    peers: Sequence[tuple[str, int]]


class _Rebirth:
    """A birth as it was pickled, for another owner: unpickled where the actor is made, and nowhere else."""

    def __init__(self, pickled: bytes, owner: tuple[str, int], upkeep: Upkeep | None) -> None:
        self._pickled = pickled
        self._changes = {"owner": owner, "upkeep": upkeep}

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (pickle.PickleBuffer(self._pickled), self._changes)


def _unpickled(birth: Any, changes: dict[str, Any]) -> Birth:
    born: Birth = replace(pickle.loads(birth), **changes)
    return born


@dataclass(frozen=True)
class BirthRecord:
    """`ranks`: the processes that it lives in, in the order of the actors' own ranks. `owner`: who is told of failures.
    `pickled`: class and arguments as they were when it was spawned. `has_state`: whether the class has the hooks.
    """

    name: str
    number: int
    ranks: tuple[int, ...]
    extent: bytes
    owner: tuple[str, int]
    pickled: bytes
    has_state: bool

    @classmethod
    def of(cls, birth: Birth, number: int, ranks: Sequence[int], extent: bytes) -> BirthRecord:
        """Raises TypeError where the class or its arguments cannot be pickled."""
        from ..encoding.pickling import in_one_stream

        pickled = in_one_stream(birth)
        return cls(birth.name, number, tuple(ranks), extent, birth.owner, pickled, has_hooks(birth.cls))

    def first(self, birth: Birth, keeper: KeeperId) -> Birth:
        """What the first incarnations are told, all of them the same."""
        return replace(birth, owner=keeper, upkeep=Upkeep(keeper, self.number) if self.has_state else None)

    def adopted(self, proc: Proc, keeper: KeeperId) -> list[Route]:
        """Has the keeper make it again in processes that are restarted from now on. The ways to its actors as they
        are now. Waits for processes that are being restarted. Raises SupervisionError where all have ended for good,
        TransferTimeout where they do not come back.
        """
        adopted = ask_keeper(proc, keeper, b"adopt", (self,), f"{self.name}.__init__")
        if not adopted.wait(PATIENCE):
            adopted.cancel()
            raise TransferTimeout(f"{self.name} was not spawned: its processes do not come back within {PATIENCE:g} s")
        return [proc.route(address, self.number) for address in adopted.wait_get()]

    def forget_if_stillborn(self, proc: Proc, keeper: KeeperId, initialized: Future[Any]) -> None:
        """An actor that cannot be made the first time is not made again."""

        def look() -> None:
            if isinstance(initialized.exception(), ActorError):
                tell_keeper(proc, keeper, b"forget", (self.number,))

        initialized.add_callback(lambda: proc.errands.run(self.number, look))  # the exception is loaded, by users' code

    def bear(
        self, proc: Proc, keeper: KeeperId, rank: int, address: str, restore: Restore, number: int = 0
    ) -> Future[Any]:
        """Makes the actor of process `rank` anew, at `address`, under `number` (0: the one that it always had); done
        when its `__init__` is, and its state is restored.
        """
        index = self.ranks.index(rank)
        upkeep = None
        if self.has_state:
            upkeep = Upkeep(keeper, self.number, restore.state, tuple(restore.peers), is_first=False)
        birth = _Rebirth(self.pickled, keeper, upkeep)
        route = proc.route(address, number or self.number)
        waiting = SingleReply(proc, route, f"{self.name}.__init__")
        deadline = time.monotonic() + PATIENCE
        cast(proc, [route], encode(birth), b"__init__", self.extent, waiting, deadline, index, flags=message.NEW)
        return waiting.future
