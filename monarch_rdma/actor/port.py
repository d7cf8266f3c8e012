"""Ports: where values can be sent from anywhere, and the end that receives them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ..errors import ConfigError
from .encoding.content import note_passenger
from .failure import SupervisionError, encode_failure
from .future import Future
from .runtime import message
from .runtime.holders import PortKey, arrived_now, holder_in, release
from .runtime.message import Frame
from .runtime.read_ahead import ReadAhead
from .runtime.reply import deliver
from .runtime.route import CREDIT_BATCH, PATIENCE

if TYPE_CHECKING:
    from .runtime.proc import Proc
    from .runtime.route import Route

__all__ = ["Channel", "Port", "PortReceiver", "RankedPortReceiver"]

R = TypeVar("R")


class Port(Generic[R]):
    """Sends values to its PortReceiver, from any process. Can be pickled."""

    __slots__ = ("_address", "_is_once", "_is_used", "_number", "_rank", "_route")

    def __init__(self, address: str, number: int, *, rank: int = 0, is_once: bool = False) -> None:
        self._address = address
        self._number = number
        self._rank = rank
        self._is_once = is_once
        self._is_used = False
        self._route: tuple[Proc, Route] | None = None  # counts what is on its way; a fork has another process

    def send(self, value: R) -> None:
        """Returns when the receiver has what is large in it.

        Raises SupervisionError where the receiving process is lost, ResourceExhausted where it reads nothing, and
        ConfigError (a RuntimeError) where the port is for one value and had it.
        """
        from .encoding.codec import encode

        self._send(encode(value), 0)

    def exception(self, error: Exception) -> None:
        """Sends a failure: `recv` raises it. Raises as send()."""
        if not isinstance(error, BaseException):
            raise ConfigError(f"error is {error!r}, but must be an exception")
        self._send(encode_failure(error), message.FAILED)

    @property
    def number(self) -> int:
        return self._number

    @property
    def address(self) -> str:
        """Of the process that receives."""
        return self._address

    def expect_from(self, proc: Proc, routes: Sequence[Route]) -> None:
        """The actors at these routes will be told to answer here; their processes may die."""
        if self._address != proc.address:
            raise ConfigError(f"port is {self!r}, but answers can only go to a port opened in this process")
        queue = proc.receivers.get(self._number)
        if isinstance(queue, _Queue):
            for route in routes:
                queue.expect(route.address)

    @property
    def return_undeliverable(self) -> bool:
        """Of Monarch's programs, which may set it: a value that cannot be delivered always raises here."""
        return True

    @return_undeliverable.setter
    def return_undeliverable(self, value: bool) -> None:
        """Changes nothing."""

    def _send(self, outgoing: Any, flags: int) -> None:
        from .runtime.proc import current_proc

        if self._is_used and self._is_once:
            raise ConfigError("this port is for one value, and has been used")
        self._is_used = True
        proc = current_proc()
        if not self._is_once:
            if self._route is None or self._route[0] is not proc:
                self._route = proc, proc.route(self._address, self._number)
            self._route[1].enter(time.monotonic() + PATIENCE)
        try:
            taken = self._start(proc, outgoing, flags)
        except BaseException:
            if self._route is not None:
                self._route[1].give_back()
            raise
        if taken is not None:
            taken.wait(None)

    def _start(self, proc: Proc, outgoing: Any, flags: int) -> Future[None] | None:
        return proc.start_send(self._address, self._number, self._rank, outgoing, flags)

    @property
    def key(self) -> PortKey:
        return PortKey(self._address, self._number, self._rank, False)

    def given(self) -> None:
        """It may be used here all the same."""

    def __reduce__(self) -> tuple[Any, ...]:
        note_passenger(self)
        return _unpickle_port, (self._address, self._number, self._rank, self._is_once)

    def __repr__(self) -> str:
        return f"<Port {self._number} of {self._address.partition('?')[0]}>"


def _unpickle_port(address: str, number: int, rank: int, is_once: bool) -> Port[Any]:
    return Port(address, number, rank=rank, is_once=is_once)


class ResponsePort(Port[R]):
    """Of a call whose endpoint answers through its port. When nobody has it any more, in whatever process, and it was
    not used, the caller is told, who would wait.
    """

    __slots__ = ("_is_first", "_is_given", "_proc")

    def __init__(self, proc: Proc | None, address: str, number: int, rank: int, *, is_first: bool) -> None:
        """`is_first`: made for the call; else it came in a message. Without `proc` it came another way."""
        super().__init__(address, number, rank=rank, is_once=True)
        self._proc = proc
        self._is_first = is_first
        self._is_given = False

    def _send(self, outgoing: Any, flags: int) -> None:
        if self._is_given:
            raise ConfigError("this response port was sent to somebody else, who answers")
        super()._send(outgoing, flags)

    def _start(self, proc: Proc, outgoing: Any, flags: int) -> Future[None] | None:
        """A caller that is lost is no concern of the actor that answers."""
        return proc.start_reply(self._address, self._number, self._rank, outgoing, flags)

    @property
    def key(self) -> PortKey:
        return PortKey(self._address, self._number, self._rank, True)

    def given(self) -> None:
        self._is_given = True

    def __reduce__(self) -> tuple[Any, ...]:
        if not note_passenger(self):
            self._is_given, self._proc = True, None  # to nobody knows whom
        return _unpickle_response_port, self.key[:3]

    def __del__(self) -> None:
        proc = self._proc
        if proc is None or self._is_used or not self._number:
            return
        if self._is_given or not self._is_first:
            return release(proc, self.key)
        error = SupervisionError("the endpoint let go of its response port without an answer")
        proc.answer_later(self._address, self._number, self._rank, error)


def _unpickle_response_port(address: str, number: int, rank: int) -> ResponsePort[Any]:
    proc = arrived_now(PortKey(address, number, rank, True))
    return ResponsePort(proc, address, number, rank, is_first=False)


class _Item(NamedTuple):
    """One thing that came: a value on its way through `part`, or the loss of a holder."""

    rank: int
    address: str
    part: Future[Any]
    is_counted: bool  # in the sender's places
    large: Frame | None = None  # whose buffers count in what is read ahead


class _Received(Future[Any]):
    """What `recv` gives: one in the line of those that wait for values.

    Let go of without having been asked for its value, it takes none. Nor does it after a wait that timed out or was
    cancelled, until it is waited for again.
    """

    __slots__ = ("_item", "_queue", "_ranked", "_waits")

    _item: _Item | None  # given, and not asked for yet
    _queue: _Queue
    _ranked: bool
    _waits: int  # at the moment

    @classmethod
    def of(cls, queue: _Queue, ranked: bool) -> _Received:
        future = cls.pending()
        assert isinstance(future, _Received)
        future._item, future._queue, future._ranked, future._waits = None, queue, ranked, 0
        return future

    def arrived(self, part: Future[Any]) -> None:
        """What was given to it is here. The queue's lock is held."""
        item, ranked = self._item, self._ranked
        if item is None or item.part is not part:
            return  # taken back meanwhile
        rank = item.rank
        if not self.set_loader(lambda: (rank, part.wait_get()) if ranked else part.wait_get()):
            self.give_back()  # cancelled meanwhile

    def give_back(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            self._queue.put(item, first=True)

    def wait(self, seconds: float | None) -> bool:
        self._queue.begin_wait(self)
        try:
            return super().wait(seconds)
        finally:
            self._queue.end_wait(self)

    def __await__(self) -> Generator[Any, None, Any]:
        self._queue.begin_wait(self)
        try:
            return (yield from super().__await__())
        finally:
            self._queue.end_wait(self)

    def _outcome(self) -> Any:
        self._item = None
        return super()._outcome()

    def __del__(self) -> None:
        self.give_back()


class _Queue:
    """What a port's number stands for: what came, or who waits for what comes."""

    def __init__(self, proc: Proc, *, is_once: bool) -> None:
        self._proc = proc
        self._is_once = is_once
        self._is_asked = False
        self._lock = threading.RLock()  # a collected future puts its value back from anywhere
        self._arrived: deque[_Item] = deque()
        self._ahead = ReadAhead(proc.fetcher)
        self._waiting: deque[weakref.ref[_Received]] = deque()
        self._taken: Counter[str] = Counter()  # values by process, since the last credit
        self._holders: set[str] = set()  # processes that may send here
        self.number = proc.register(self)

    def next(self, ranked: bool) -> Future[Any]:
        if self._is_once and self._is_asked:
            raise ConfigError("this port is for one value, which was asked for already")
        self._is_asked = True
        future = _Received.of(self, ranked)
        self._line_up(future)
        return future

    def _line_up(self, future: _Received) -> None:
        with self._lock:
            if not self._arrived:
                self._waiting.append(weakref.ref(future))
                return
            item = self._arrived.popleft()
            future._item = item._replace(is_counted=False, large=None)
        self._hand_over(item, future)

    def begin_wait(self, future: _Received) -> None:
        with self._lock:
            future._waits += 1
            if future.done() or future._item or any(waiting() is future for waiting in self._waiting):
                return
        self._line_up(future)

    def end_wait(self, future: _Received) -> None:
        with self._lock:
            future._waits -= 1
            if future._waits or future.done():
                return
            self._waiting = deque(waiting for waiting in self._waiting if waiting() is not future)
            future.give_back()

    def put(self, item: _Item, *, first: bool = False) -> None:
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft()()
                if future is not None and not future.done():
                    future._item = item._replace(is_counted=False, large=None)
                    break
            else:
                self._arrived.appendleft(item) if first else self._arrived.append(item)
                return
        self._hand_over(item, future)

    def _hand_over(self, item: _Item, future: _Received) -> None:
        if item.is_counted:
            self._count(item.address)
        if item.large is not None:
            self._ahead.release(item.large)
        item.part.add_callback(lambda: self._on_part(item.part, future))

    def _count(self, address: str) -> None:
        """A value from there was taken."""
        with self._lock:
            self._taken[address] += 1
            count = self._taken.pop(address) if self._taken[address] >= CREDIT_BATCH else 0
        if count:
            self._proc.later(lambda: self._proc.credit(address, self.number, count))  # a destructor may have called

    def close(self) -> None:
        """What waits here is dropped, as is all that comes from now on: senders do not wait for room any more."""
        if not self._proc.forget(self.number):
            return
        for holder in self._holders.copy():
            self._proc.fulfil(self.number, holder)
        if self._arrived or self._taken:
            self._proc.later(self._credit_rest)

    def expect(self, holder: str) -> None:
        """That process may send here: `recv` tells of its loss."""
        self._holders.add(holder)
        self._proc.expect(self.number, holder)

    def _credit_rest(self) -> None:
        with self._lock:
            self._taken.update(item.address for item in self._arrived if item.is_counted)
            self._arrived.clear()
            taken, self._taken = self._taken, Counter()
        self._ahead.close(ConfigError("the port was closed"))
        for address, count in taken.items():
            self._proc.credit(address, self.number, count)

    def _on_part(self, part: Future[Any], future: _Received) -> None:
        with self._lock:
            future.arrived(part)

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.HOLD:
            self.expect(holder_in(frame))
        elif frame.kind == message.SEND:
            part: Future[Any] = Future.pending()
            deliver(self._proc, frame, part, fetch=self._ahead.admit)
            large = frame if frame.flags & message.LARGE else None
            self.put(_Item(frame.rank, frame.address, part, not self._is_once, large))

    def on_lost(self, address: str, error: SupervisionError) -> None:
        part: Future[Any] = Future.pending()
        part.set_error(error)
        self.put(_Item(0, address, part, False))


class PortReceiver(Generic[R]):
    """The receiving end, in the process that opened it. Letting go of it closes the port."""

    def __init__(self, proc: Proc, queue: _Queue) -> None:
        self._proc = proc
        self._queue = queue

    def recv(self) -> Future[R]:
        """The next value. Raises what the sender sent with `exception`, and a SupervisionError, once for each, where a
        process that has the port is lost. ConfigError where the port is for one value, at the second call.
        """
        return self._next(ranked=False)

    def ranked(self) -> RankedPortReceiver[R]:
        """The same port, with `recv` giving (rank of the sender in the mesh that was called, value)."""
        return RankedPortReceiver(self)

    def _next(self, ranked: bool) -> Future[Any]:
        future = self._queue.next(ranked)
        future.add_callback(lambda: self)  # the port stays open while somebody waits
        return future

    def __reduce__(self) -> str:
        raise ConfigError("a PortReceiver cannot be sent; send its Port")

    def __del__(self) -> None:
        self._queue.close()


class RankedPortReceiver(Generic[R]):
    """The same end, telling who sent."""

    def __init__(self, receiver: PortReceiver[R]) -> None:
        self._receiver = receiver

    def recv(self) -> Future[tuple[int, R]]:
        """The next (rank of the sender in the mesh that was called, value). Raises as PortReceiver.recv."""
        return self._receiver._next(ranked=True)


class Channel(Generic[R]):
    """Makes ports. `Channel[int].open()` for type checkers."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """A port and its receiving end. `once`: for one value."""
        from .runtime.proc import current_proc

        proc = current_proc()
        queue = _Queue(proc, is_once=once)
        return Port(proc.address, queue.number, is_once=once), PortReceiver(proc, queue)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[R], RankedPortReceiver[R]]:
        """The same, with `recv` giving (rank, value)."""
        opened: tuple[Port[R], PortReceiver[R]] = Channel.open(once)
        return opened[0], opened[1].ranked()
