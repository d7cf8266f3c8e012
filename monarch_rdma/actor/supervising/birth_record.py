"""An actor mesh on supervised processes: enough to make its actors again in a process that was restarted."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import TransferTimeout
from ..encoding.codec import encode
from ..remote_error import ActorError
from ..runtime import message
from ..runtime.cast import cast
from ..runtime.instance import Birth
from ..runtime.reply import SingleReply
from ..runtime.roster import ask_keeper, tell_keeper
from ..runtime.route import PATIENCE, Route

if TYPE_CHECKING:
    from ..future import Future
    from ..runtime.proc import Proc
    from ..runtime.roster import KeeperId

__all__ = ["BirthRecord"]


@dataclass(frozen=True)
class BirthRecord:
    """`ranks`: the processes that it lives in, in the order of the actors' own ranks. `owner`: who is told of failures.
    `snapshot`: class and arguments as they were when it was spawned.
    """

    name: str
    number: int
    ranks: tuple[int, ...]
    extent: bytes
    owner: tuple[str, int]
    snapshot: bytes

    @classmethod
    def of(cls, birth: Birth, number: int, ranks: list[int], extent: bytes) -> BirthRecord:
        """Raises TypeError where the class or its arguments cannot be pickled."""
        from ..encoding.pickling import in_one_stream

        return cls(birth.name, number, tuple(ranks), extent, birth.owner, in_one_stream(birth))

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

    def bear(self, proc: Proc, keeper: KeeperId, rank: int, address: str) -> Future[Any]:
        """Makes the actor of process `rank` anew, at `address`; done when its `__init__` is."""
        birth = replace(pickle.loads(self.snapshot), owner=keeper)
        route = proc.route(address, self.number)
        waiting = SingleReply(proc, route, f"{self.name}.__init__")
        deadline = time.monotonic() + PATIENCE
        cast(
            proc,
            [route],
            encode(birth),
            b"__init__",
            self.extent,
            waiting,
            deadline,
            self.ranks.index(rank),
            flags=message.NEW,
        )
        return waiting.future
