"""Calls that wait for their answers. Each stands under a number of its own until it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import PeerLost, TransferTimeout
from ...supervision.events import emit
from ..failure import SupervisionError, decode_failure
from ..future import Future
from ..shape import Region
from ..value_mesh import ValueMesh
from . import message
from .collect import pieces_of
from .holders import Holders, holder_in
from .message import Frame
from .reduce import Reduction
from .timers import Timer

if TYPE_CHECKING:
    from .proc import Proc
    from .route import Route

__all__ = ["GatherReply", "ReduceReply", "SingleReply", "StreamReply", "Waiting", "deliver"]


def deliver(
    proc: Proc,
    frame: Frame,
    future: Future[Any],
    accept: str = "pickle",
    fetch: Callable[[Frame], object] | None = None,
) -> None:
    """Ends `future` with the value or the failure in `frame`, once its large buffers are here. `fetch`: begins to read
    these, at some time; the default does it now.
    """
    frame.accept = accept
    if not frame.flags & message.LARGE:
        future.set_loader(partial(_load, frame))
        return
    frame.fetched = Future.pending()
    fetched = frame.fetched
    fetched.add_callback(lambda: future.set_loader(partial(_load_fetched, frame, fetched)))
    (fetch or proc.fetcher.fetch)(frame)


def _load(frame: Frame) -> Any:
    if frame.flags & message.FAILED:
        raise decode_failure(frame.load(), frame.accept)
    return frame.load()


def _load_fetched(frame: Frame, fetched: Future[None]) -> Any:
    try:
        fetched.get()
    except PeerLost as error:  # it ended after its answer left, and before the large part was read
        raise SupervisionError(f"an answer is lost with its sender: {error}") from error
    return _load(frame)


class Waiting:
    """What all calls that wait have in common. `what`: the call, in words."""

    wants_all = False  # the answers may come together
    reduction = b""  # ... and combined
    _or_lost = False  # whether the loss of a receiver is no failure

    def __init__(self, proc: Proc, routes: Sequence[Route], what: str) -> None:
        self.proc = proc
        self.routes = routes
        self.what = what
        self.timeout: float | None = None
        self._timer: Timer | None = None
        self.accept = "pickle"  # or "safe"
        self._holders: Holders | None = None  # of response ports that were sent on, if any
        proc.calls.add()
        self.number = proc.register(self)
        for route in routes:
            if route.error is None:  # else whoever sends finds it, and says so
                proc.expect(self.number, route.address)

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.HOLD:
            self._on_held(frame)
        elif frame.kind == message.SEND:
            if frame.flags & message.ENDED and frame.rank < len(self.routes):  # first: who calls again waits for news
                route = self.routes[frame.rank if len(self.routes) > 1 else 0]
                self.proc.rosters.on_actor_ended(route.address, route.number)
            self.on_answer(frame)

    def on_answer(self, frame: Frame) -> None:
        raise NotImplementedError

    def _on_held(self, frame: Frame) -> None:
        """An endpoint gave its response port to another process, which may be lost before it answers; or one that had
        it let go of it.
        """
        rank = frame.rank if frame.rank < len(self.routes) else 0
        if not frame.flags & message.FAILED:
            self.proc.expect(self.number, holder_in(frame))
        if self._holders is None:
            self._holders = Holders()
        if self._holders.on_frame(rank, self.routes[rank].address, frame):
            why = "whoever had its response port let go of it without an answer"
            self.on_failed(rank, SupervisionError(f"{self.what}: {why}", self.what))

    def on_lost(self, address: str, error: SupervisionError) -> None:
        error = self._named(error)
        is_ours = address == self.proc.address
        ranks = [rank for rank, route in enumerate(self.routes) if is_ours or route.address == address]
        for rank in (*ranks, *(self._holders.ranks_of(address) if self._holders else ())):
            self.on_failed(rank, error)

    def on_unsent(self, rank: int, error: SupervisionError) -> None:
        """The process of this one turned out to be lost."""
        self.on_failed(rank, self._named(error))

    def _named(self, error: SupervisionError) -> SupervisionError:
        if self._or_lost:
            return SupervisionError(f"{self.what}: {error}", self.what, error.event)
        event = emit("call.lost", cause=error.event, endpoint=self.what, message=str(error))
        return SupervisionError(f"{self.what}: {error}", self.what, event)

    def on_failed(self, rank: int, error: BaseException) -> None:
        """There will be no answer from this one."""
        raise NotImplementedError

    def expire_at(self, deadline: float, timeout: float) -> None:
        self.timeout = timeout
        self._timer = self.proc.timers.at(deadline, lambda: self._expire(timeout))

    def _expire(self, timeout: float) -> None:
        if self.number in self.proc.receivers:
            error = TransferTimeout(f"{self.what}: no answer within {timeout} s", operation="call")
            self.cancel()
            for rank in range(len(self.routes)):
                self.on_failed(rank, error)

    def cancel(self) -> None:
        """Tells the handlers that nobody waits any more."""
        self.finish()
        for route in self.routes:
            head = message.pack(message.CANCEL, route.number, reply=self.number)
            tell = partial(self.proc.post_quietly, route.address, head)
            if route.after is None:
                tell()
            else:  # the call may be on its way over a tree
                route.after.add_callback(tell)

    def note_arrival(self, route: Route) -> None:
        """Its answer says that all that was sent there before has arrived."""
        if route.last_direct == self.number:
            route.last_direct = 0

    def finish(self) -> bool:
        """Takes the number back; False where that was done already."""
        if not self.proc.forget(self.number):
            return False
        if self._timer is not None:
            self._timer.cancel()
        for route in self.routes:
            self.proc.fulfil(self.number, route.address)
        for holder in self._holders.addresses if self._holders else ():
            self.proc.fulfil(self.number, holder)
        return True


class SingleReply(Waiting):
    """Of one actor."""

    def __init__(self, proc: Proc, route: Route, what: str) -> None:
        self.future: Future[Any] = Future.pending(self.cancel)
        super().__init__(proc, (route,), what)

    def on_answer(self, frame: Frame) -> None:
        if self.finish():
            self.note_arrival(self.routes[0])
            deliver(self.proc, frame, self.future, self.accept)
        else:
            self.proc.refuse(frame, self.what)

    def on_failed(self, rank: int, error: BaseException) -> None:
        self.finish()
        self.future.set_error(error)


class StreamReply(Waiting):
    """Of many, each by itself, in the order in which they come."""

    def __init__(self, proc: Proc, routes: Sequence[Route], what: str) -> None:
        self._futures: list[Future[Any]] = [Future.pending() for _ in routes]
        self._open = set(range(len(routes)))
        self._lock = threading.Lock()
        super().__init__(proc, routes, what)

    def __iter__(self) -> Iterator[Future[Any]]:
        return iter(self._futures)

    def on_answer(self, frame: Frame) -> None:
        self._end(frame.rank, lambda future: deliver(self.proc, frame, future, self.accept), frame)

    def on_failed(self, rank: int, error: BaseException) -> None:
        self._end(rank, lambda future: future.set_error(error), None)

    def _end(self, rank: int, settle: Callable[[Future[Any]], object], frame: Frame | None) -> None:
        with self._lock:
            is_new = rank in self._open
            if is_new:
                future = self._futures[len(self._futures) - len(self._open)]
                self._open.discard(rank)
                if not self._open:
                    self.finish()
        if is_new:
            settle(future)
        elif frame is not None:
            self.proc.refuse(frame, self.what)


class GatherReply(Waiting):
    """Of many, together: a ValueMesh, or the first failure."""

    def __init__(
        self, proc: Proc, routes: Sequence[Route], what: str, region: Region, *, or_lost: bool = False
    ) -> None:
        """`or_lost`: a receiver that is lost, or has ended, counts as one that answered None."""
        self._or_lost = or_lost
        self.future: Future[Any] = Future.pending(self.cancel)
        self._parts: list[Future[Any]] = [Future.pending() for _ in routes]
        self._left = len(routes)
        self._lock = threading.Lock()
        self._region = region
        self._open = set(range(len(routes)))  # ranks that have not answered
        self.wants_all = not or_lost
        super().__init__(proc, routes, what)

    def on_answer(self, frame: Frame) -> None:
        if frame.flags & message.MANY:
            for piece in pieces_of(frame):
                self.on_frame(piece)
        elif self.number not in self.proc.receivers:
            self.proc.refuse(frame, self.what)
        elif frame.flags & message.FAILED and not self._or_lost:
            self.finish()
            deliver(self.proc, frame, self.future, self.accept)
        elif self._is_first(frame.rank):
            self.note_arrival(self.routes[frame.rank])
            part = self._parts[frame.rank]
            part.add_callback(self._arrived)
            deliver(self.proc, frame, part, self.accept)
        else:
            self.proc.refuse(frame, self.what)

    def on_failed(self, rank: int, error: BaseException) -> None:
        if not self._or_lost or not isinstance(error, SupervisionError):
            if not self._parts[rank].done():
                self.finish()
                self.future.set_error(error)
        elif self._is_first(rank):
            self._parts[rank].set_result(None)
            self._arrived()

    def _is_first(self, rank: int) -> bool:
        """Each counts once: a response port that was copied may be answered twice."""
        with self._lock:
            is_first = rank in self._open
            self._open.discard(rank)
        return is_first

    def _arrived(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self.finish()
            self.future.set_loader(self._load)

    def _load(self) -> ValueMesh[Any]:
        return ValueMesh(self._region.extent, [self._value(part) for part in self._parts])

    def _value(self, part: Future[Any]) -> Any:
        try:
            return part.get()
        except SupervisionError:
            if not self._or_lost:
                raise
            return None


class ReduceReply(Waiting):
    """Of many, combined: what comes is results of single ranks, and sums of some that
    others combined on the way.
    """

    def __init__(self, proc: Proc, routes: Sequence[Route], what: str, reduction: Reduction, packed: bytes) -> None:
        """`packed`: the same for processes on the way; b"" where all results shall come here."""
        self.future: Future[Any] = Future.pending(self.cancel)
        self.wants_all = bool(packed)
        self.reduction = packed
        self._how = reduction
        self._open = set(range(len(routes)))  # ranks that have not answered by themselves
        self._left = len(routes)
        self._results: list[tuple[int, Future[Any]]] = []
        self._sums: list[Future[Any]] = []  # each of a list
        self._lock = threading.Lock()
        super().__init__(proc, routes, what)

    def on_answer(self, frame: Frame) -> None:
        if self.number not in self.proc.receivers:
            self.proc.refuse(frame, self.what)
        elif frame.flags & message.FAILED and frame.flags & message.MANY:
            return  # something failed below; whatever it was comes by itself
        elif frame.flags & message.FAILED:
            self.finish()
            deliver(self.proc, frame, self.future, self.accept)
        elif frame.flags & message.MANY:
            part: Future[Any] = Future.pending()
            self._sums.append(part)
            self._await(frame, part, frame.rank)
        elif self._is_first(frame.rank):
            self.note_arrival(self.routes[frame.rank])
            part = Future.pending()
            self._results.append((frame.rank, part))
            self._await(frame, part, 1)
        else:
            self.proc.refuse(frame, self.what)

    def on_failed(self, rank: int, error: BaseException) -> None:
        self.finish()
        self.future.set_error(error)

    def _is_first(self, rank: int) -> bool:
        with self._lock:
            is_first = rank in self._open
            self._open.discard(rank)
        return is_first

    def _await(self, frame: Frame, part: Future[Any], count: int) -> None:
        part.add_callback(lambda: self._arrived(count))
        deliver(self.proc, frame, part, self.accept)

    def _arrived(self, count: int) -> None:
        with self._lock:
            self._left -= count
            is_last = self._left == 0
        if is_last:
            self.finish()
            self.future.set_loader(self._load)

    def _load(self) -> Any:
        """In the order of ranks; the code of users runs where the future is asked."""
        total, combine, merge = self._how
        steps = [(rank, combine, part.get()) for rank, part in self._results]
        steps += [(first, merge, value) for part in self._sums for first, _, value in part.get()]
        steps.sort(key=lambda step: step[0])
        if steps[0][1] is merge:  # has its identity in it
            total = steps.pop(0)[2]
        for _, step, value in steps:
            total = step(total, value)
        return total
