"""Results that are combined on their way up a tree: each process sends one sum of its own result and those below it.

Only neighbours, in the order of ranks, are merged: a sum stands for the ranks `first` to `last` without a gap. So
results are combined in the order of their ranks, whatever way they come.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import RdmaError
from ..encoding.codec import Outgoing, encode
from ..failure import SupervisionError, encode_failure
from ..future import Future
from . import message
from .collect import Collector
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc
    from .tree import Cast

__all__ = ["Reducer", "Reduction", "Sum"]


class Reduction(NamedTuple):
    """`combine(sum, result)` gives a sum, `merge(sum, sum)` too; `identity` is the sum of nothing."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]

    def dumps(self) -> bytes:
        """Raises what pickling raises."""
        from ..encoding.pickling import in_one_stream

        return in_one_stream(tuple(self))

    @classmethod
    def loads(cls, data: bytes) -> Reduction:
        return cls(*pickle.loads(data))


class Sum(NamedTuple):
    """Of the results of ranks first to last."""

    first: int
    last: int
    value: Any


def merged(sums: Sequence[Sum], merge: Callable[[Any, Any], Any]) -> list[Sum]:
    """In the order of ranks, with those that touch made one."""
    done: list[Sum] = []
    for each in sorted(sums, key=lambda each: each.first):
        if done and done[-1].last + 1 == each.first:
            before = done.pop()
            each = Sum(before.first, each.last, merge(before.value, each.value))
        done.append(each)
    return done


class Reducer(Collector):
    """Stands in a process of the tree for the caller; code of users runs on the actor's thread, or aside."""

    def __init__(self, proc: Proc, cast: Cast, parent: str, up: int, count: int) -> None:
        super().__init__(proc, cast, parent, up, count)
        self._parts: list[Future[Any]] = []  # lists of sums, from below
        self._own: list[Sum] = []
        self._is_complete = True  # else the caller hears of a failure from whoever failed

    def add_value(self, rank: int, value: Any) -> None:
        """The result of the actor here, on its thread."""
        try:
            identity, combine, _ = Reduction.loads(self._cast.reduction)
            self._own.append(Sum(rank, rank, combine(identity, value)))
        except BaseException as error:  # as in an endpoint: the caller is told, and nobody waits
            self._fail_with(error)
        self._add([], 1)

    def on_frame(self, frame: Frame) -> None:
        from .reply import deliver

        if frame.flags & message.FAILED:
            self._is_complete = False
            self._add([], frame.rank)
        elif frame.flags & message.MANY:
            part: Future[Any] = Future.pending()
            self._parts.append(part)
            deliver(self._proc, frame, part)
            part.add_callback(lambda: self._add([], frame.rank))

    def skip(self) -> None:
        self._is_complete = False
        super().skip()

    def _all_here(self) -> None:
        self._proc.errands.run(("reduce", self.number), self._send_up)

    def _send_up(self, timeout: float = 0.0) -> None:
        """A sum, or, so that nobody waits, that there is none."""
        outgoing, flags = Outgoing(b""), message.MANY | message.FAILED
        if self._is_complete:
            try:
                outgoing, flags = encode([tuple(each) for each in self._sums()]), message.MANY
            except BaseException as error:
                self._fail_with(error)
        try:
            self._proc.start_send(self._parent, self._up, self._count, outgoing, flags)
        except (SupervisionError, RdmaError) as error:
            self._fail(f"results are lost: {error}")

    def _sums(self) -> list[Sum]:
        sums = [*self._own, *(Sum(*each) for part in self._parts for each in part.get())]
        return merged(sums, Reduction.loads(self._cast.reduction).merge) if len(sums) > 1 else sums

    def _fail_with(self, error: BaseException) -> None:
        """The caller gets it as it is."""
        self._is_complete = False
        head = message.pack(message.SEND, self._cast.reply, flags=message.FAILED)
        self._proc.post_quietly(self._cast.sender, head, encode_failure(error).body)
