"""RDMAAction: several operations started together, with one future for all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from .._engine import ffi, lib
from ..errors import ConfigError
from .buffer import RDMABuffer
from .engine import raise_error, scratch, seconds
from .future import AtomicFuture, Future, GroupFuture, Started
from .memory import Memory, memory_of, note_written
from .overlap import Target, Targets
from .region import RemoteRegion
from .transfer import BULK, BULK_BYTES, READ, WRITE, match_dst, match_src, move
from .view import View

if TYPE_CHECKING:
    import torch

    from .engine import Engine

__all__ = ["RDMAAction"]

_WORD = 8  # bytes of an atomic
_restart = lib.mr_restart
_BUSY = -lib.MR_RESOURCE_EXHAUSTED


class RDMAAction:
    """A batch of reads, writes and atomics. Methods that add one return the action; `submit` starts all.

    The order in which they are carried out is not defined, so what they write may not overlap. May be submitted again,
    which costs less than describing each transfer anew: reads and writes are kept as the core knows them.
    Local memory is taken as it is when the operation is added: do not resize the tensor's storage afterwards.
    """

    def __init__(self) -> None:
        self._starts: list[Callable[[float, int], Future]] = []  # by timeout and flags
        self._nbytes = 0
        self._written: list[Any] = []  # tensors that reads fill
        self._targets = Targets()
        self._in_flight: Submission | None = None
        # The last ones, to start again what nobody else has any more; two, for a loop that keeps the last.
        self._submissions: list[Submission] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._starts)

    def read_remote(self, dst: torch.Tensor | memoryview | Any, src: RDMABuffer) -> RDMAAction:
        """Adds a read of the buffer `src` into `dst`; see RDMABuffer.read_into.

        Raises ConfigError or OutOfBounds, also where `dst` overlaps what another operation of this action writes, or
        where the action is in flight.
        """
        parts = match_dst(_checked(src, "src")._view, dst, "dst")
        memory, local, _ = parts
        target = Target(memory.address, local, False, "dst of a read")
        start = partial(_start, src._remote, READ, parts)
        return self._add([(None, target)], start, local.nbytes, memory.tensor)

    def write_remote(self, dst: RDMABuffer, src: torch.Tensor | memoryview | Any) -> RDMAAction:
        """Adds a write of `src` into the buffer `dst`; see RDMABuffer.write_from. Errors as in read_remote."""
        parts = match_src(_checked(dst, "dst")._view, src, "src")
        target = Target(0, parts[2], False, "dst of a write")
        place = dst._remote.descriptor
        return self._add([(place, target)], partial(_start, dst._remote, WRITE, parts), parts[1].nbytes)

    def fetch_add(self, src: RDMABuffer, dst: torch.Tensor | memoryview | Any, add: int) -> RDMAAction:
        """Adds an atomic addition to the 8 bytes of the buffer `src`, which wraps around; `dst` gets the old value.

        `src` and `dst`: one int64 or uint64 (or 8 bytes); `src` aligned to 8 bytes in its owner's memory. `dst` is
        written when the future is waited for, awaited, or found done. Errors as in read_remote.
        """
        return self._add_atomic("fetch_add", src, dst, lib.mr_fetch_add, _word(add, "add"))

    def compare_and_swap(
        self, src: RDMABuffer, dst: torch.Tensor | memoryview | Any, compare: int, swap: int
    ) -> RDMAAction:
        """Adds an atomic exchange: the buffer `src` becomes `swap` if it is `compare`; `dst` gets the old value either
        way.

        Otherwise as fetch_add.
        """
        words = _word(compare, "compare"), _word(swap, "swap")
        return self._add_atomic("compare_and_swap", src, dst, lib.mr_compare_and_swap, *words)

    def submit(self, *, timeout: float | None = 60) -> GroupFuture:
        """Starts all operations; one future for their ends. It fails with the error of the first that failed, in the
        order they were added; the others are carried out all the same.

        `timeout`: seconds until TransferTimeout, None for no deadline. Where an earlier submit is still in flight,
        waits for it first.
        """
        limit = seconds(timeout)
        with self._lock:
            if self._in_flight is not None and not self._in_flight._settled:
                self._in_flight.exception()
            self._in_flight = self._started_again(limit) or self._started(limit)
            return self._in_flight

    def _started_again(self, limit: float) -> Submission | None:
        """One of the last submissions, started again as it is: in a loop a submit makes nothing new."""
        submissions = self._submissions
        self._in_flight = None
        for each in submissions:  # counted: the list, the loop, the argument
            if getrefcount(each) == 3 and each.restart(limit):
                return each
        return None

    def _started(self, limit: float) -> Submission:
        members: list[Future] = []
        flags = BULK if self._nbytes >= BULK_BYTES else 0
        try:
            for start in self._starts:
                members.append(start(limit, flags))
        except BaseException:
            self._in_flight = Submission(members, self._starts, self._written)
            self._in_flight.cancel()
            raise
        submission = Submission(members, self._starts, self._written)
        self._submissions = [submission, *self._submissions[:1]]
        return submission

    def _add_atomic(self, name: str, src: RDMABuffer, dst: Any, call: Callable[..., int], *operands: int) -> RDMAAction:
        view, memory = _checked(src, "src")._view, memory_of(dst, "dst")
        for argument, part in (("src", view), ("dst", memory.view)):
            if part.nbytes != _WORD or not part.is_contiguous or part.dtype not in ("int64", "uint64", "uint8"):
                raise ConfigError(
                    f"{argument} has dtype {part.dtype} and shape {part.shape}, but {name} needs one int64 or uint64"
                )
        if not memory.writable:
            raise ConfigError("dst is read-only, so the old value cannot be stored")
        remote = src._remote

        def start(timeout: float, _flags: int) -> Future:
            if memory.tensor is not None:
                note_written(memory.tensor)
            handle, error, held = remote.open(), scratch.error, (memory, remote)
            future = AtomicFuture(remote.engine, name, remote, _WORD, held, store=lambda old: _store(memory, old))
            if kind := call(handle, view.offset, *operands, timeout, future.cell, error):
                raise_error(error, kind, operation=name, peer=remote.owner, size=_WORD)
            return future

        old = Target(memory.address, memory.view, False, f"dst of a {name}")
        word = Target(0, view, True, f"src of a {name}")
        return self._add([(None, old), (remote.descriptor, word)], start, _WORD)

    def _add(
        self, targets: list[tuple[Any, Target]], start: Callable[[float, int], Future], nbytes: int, written: Any = None
    ) -> RDMAAction:
        with self._lock:
            if self._in_flight is not None and not self._in_flight.done():
                raise ConfigError("the action is in flight; wait for it before adding operations")
            for place, target in targets:
                self._targets.check(place, target)
            for place, target in targets:
                self._targets.add(place, target)
            self._starts.append(start)
            self._nbytes += nbytes
            self._submissions = []
            self._in_flight = None
            if written is not None:
                self._written.append(written)
        return self


class Submission(GroupFuture):
    """The operations of one submit. Can be started again in place where nobody else has it."""

    __slots__ = ("_ahead", "_count", "_engine", "_ops", "_reason", "_starts", "_written")

    def __init__(self, members: list[Future], starts: list[Any], written: list[Any]) -> None:
        """`starts`: what holds the memory of each member. `written`: tensors that they fill."""
        super().__init__("action", members)
        self._starts = starts
        self._written = written
        self._ops: Any = None
        self._ahead = False  # of its members, which don't know that they were started again

    def restart(self, limit: float) -> bool:
        """Starts all of it again; False where that is not possible, and nothing is started."""
        if self._ops is None and not self._describe():
            return False
        engine = self._engine
        if not engine.is_open:
            engine.raise_unusable()
        if self._written:
            note_written(self._written)
        self._ahead, self._settled, self._error = True, False, None  # before: see Started.cell
        unfinished = _restart(engine._handle, self._ops, self._count, limit, self._reason)
        if not unfinished:
            # What the members know of their last end is as true of this one, or nobody asks for it.
            self._ahead, self._settled = False, True
            return True
        self._catch_up()
        if unfinished < 0:
            self.done()  # as they were
            if unfinished != _BUSY:
                raise_error(self._reason, -unfinished, operation="submit")
        return bool(unfinished > 0)

    def _describe(self) -> bool:
        """Notes the core's operations. False where these are not all reads and writes of one engine."""
        members: list[Any] = self._members
        if not members or any(type(each) is not Started or each._engine is not members[0]._engine for each in members):
            return False
        self._engine: Engine = members[0]._engine
        self._count = len(members)
        self._reason = ffi.new("mr_error *")
        self._ops = ffi.new("mr_op *[]", [each.cell[0] for each in members])
        return True

    def _catch_up(self) -> None:
        """Tells the members that they were started again, and what to hold until they are done."""
        if self._ahead:
            members: list[Any] = self._members
            for member, start in zip(members, self._starts, strict=False):  # some may have been added since
                member.rearm(start)
            self._ahead = False

    def __del__(self) -> None:
        self._catch_up()  # interrupted right after the start


def _start(remote: RemoteRegion, verb: int, parts: tuple[Memory, View, View], timeout: float, flags: int) -> Future:
    return move(remote, verb, parts, timeout, flags, None, again=True)


def _checked(buffer: object, argument: str) -> RDMABuffer:
    if not isinstance(buffer, RDMABuffer):
        raise ConfigError(f"{argument} is a {type(buffer).__name__}, but must be an RDMABuffer")
    return buffer


def _word(value: object, argument: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise ConfigError(f"{argument} is {value!r}, but must be an integer of 64 bits")
    return value % 2**64


def _store(memory: Memory, value: int) -> None:
    ffi.buffer(ffi.cast("char *", memory.address), _WORD)[:] = value.to_bytes(_WORD, sys.byteorder)
