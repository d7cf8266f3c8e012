"""Futures of operations: waited for with `get`, awaited in asyncio, queried, explained.

Completion. A read is done when its bytes are in the local destination. A write is done when its bytes are visible to
every later access of the remote memory; its notification is posted only after that. An operation ends exactly once.
Once it is done, for whatever reason, its local memory is not touched any more.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._engine import ffi, lib
from ..errors import ConfigError, RdmaError, class_of_kind
from .engine import seconds

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Finished", "Future", "GroupFuture", "Started", "TransferReport"]

_SLICE = 0.1  # seconds between looks for Ctrl-C while waiting
_REMOTE_STATES = ("not_written", "written", "unknown")
_NULL = ffi.NULL
_op_result = lib.mr_op_result
_new = ffi.new
_CELL = ffi.typeof("mr_op **")


@dataclass(frozen=True)
class TransferReport:
    """What an operation did. Sizes in bytes, times in seconds."""

    operation: str
    peer: str
    # "shm-mapped", "shm-process_vm", "local", "verbs", "tcp"; with memory of a GPU also "ipc", "staged-shm",
    # "staged-tcp", ...; "" where no byte moved
    lane: str
    rails: int  # sockets, threads or cards that moved bytes
    bytes: int
    chunks: int  # pieces it was moved in
    retries: int  # pieces that were moved again
    skipped: str  # why better lanes were not used
    seconds: float  # from submission to completion

    def __str__(self) -> str:
        rate = f" ({self.bytes / self.seconds / 1e9:.2f} GB/s)" if self.bytes and self.seconds else ""
        text = f"{self.operation} of {self.bytes} bytes, peer {self.peer}: {self.lane or 'no lane'}"
        text += f", {self.rails} rails, {self.chunks} chunks, {self.retries} retries, {self.seconds:.6f} s{rate}"
        return f"{text}; better lanes not used: {self.skipped}" if self.skipped else text


class Future:
    """The end of one operation. Made by the library only.

    Letting go of it does not stop the operation: its memory and its handle stay alive until it is done.
    """

    __slots__ = ("__weakref__",)

    _operation: str
    _peer: Any  # its name, or the remote region that tells it
    _size: int  # bytes
    _settled: bool
    _error: RdmaError | None

    # --- for users

    def get(self, timeout: float | None = None) -> None:
        """Waits and returns None; raises the operation's error.

        Where `timeout` seconds pass first, raises the builtin TimeoutError: the operation goes on, and may still write
        to its destination. (TransferTimeout means that the operation itself is over.)
        """
        if not self._settled:
            self._wait(timeout)
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> None:
        """The same as get()."""
        self.get(timeout)

    def exception(self, timeout: float | None = None) -> RdmaError | None:
        """Waits; the operation's error, or None where it succeeded. TimeoutError as in get()."""
        if not self._settled:
            self._wait(timeout)
        return self._error

    def done(self) -> bool:
        """Whether it is over, in success or failure. Never waits."""
        return self._settled or self._poll()

    def cancel(self) -> bool:
        """Asks for an early end; False where it is over already.

        It may still succeed. Wait for it before using its local memory for something else.
        """
        if self.done():
            return False
        self._stop()
        return True

    def explain(self) -> TransferReport:
        """What the operation did. ConfigError before it is done."""
        if not self.done():
            raise ConfigError(f"the {self._operation} is not done yet; there is nothing to explain")
        return self._report()

    def __await__(self) -> Generator[Any, None, None]:
        """Waits in asyncio. May be repeated, in several tasks and loops. Cancelling an awaiting task cancels the
        operation, and the task ends only when its memory is safe.
        """
        cancelled: BaseException | None = None
        while not self.done():
            import asyncio

            try:
                yield from self._waiter(asyncio.get_running_loop())
            except asyncio.CancelledError as error:
                cancelled = error
                self.cancel()
        if cancelled is not None:
            raise cancelled
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "done" if self._error is None else f"failed: {self._error}"
        return f"<Future of {self._operation}: {state}>"

    # --- for the library: what there is to do only while it is not settled

    def _poll(self) -> bool:
        """Whether it is over; settles it then."""
        raise AssertionError("settled")

    def _wait_until(self, deadline: float | None) -> bool:
        """The same, after waiting for it."""
        raise AssertionError("settled")

    def _stop(self) -> None:
        raise AssertionError("settled")

    def _waiter(self, loop: Any) -> Any:
        """An asyncio future of this loop that ends with the operation."""
        raise AssertionError("settled")

    def _report(self) -> TransferReport:
        raise AssertionError("a kind of future that tells nothing")

    def _peer_name(self) -> str:
        return self._peer if isinstance(self._peer, str) else str(self._peer.owner)

    def _wait(self, timeout: float | None) -> None:
        limit = seconds(timeout)
        deadline = time.monotonic() + limit if limit >= 0 else None
        if not self._wait_until(deadline):
            raise TimeoutError(f"the {self._operation} is not done after {timeout} s; it goes on")


class Finished(Future):
    """Of a transfer that had ended in success before there was anything to wait for."""

    __slots__ = ("_moved", "_operation", "_peer", "_size")

    _settled = True
    _error = None

    def __init__(self, operation: str, peer: Any, size: int, moved: int) -> None:
        """`moved`: what mr_move_bytes said; 0 where there was nothing to do."""
        self._operation = operation
        self._peer = peer
        self._size = size
        self._moved = moved

    def _report(self) -> TransferReport:
        took = ffi.new("double *")
        lane = ffi.string(lib.mr_moved(self._moved, took)).decode()
        pieces = 1 if self._moved else 0
        return TransferReport(self._operation, self._peer_name(), lane, pieces, self._size, pieces, 0, "", took[0])


class Started(Future):
    """Of an operation in the core."""

    __slots__ = (
        "_engine",
        "_error",
        "_held",
        "_in_queue",
        "_operation",
        "_peer",
        "_settled",
        "_size",
        "cell",
    )

    def __init__(self, engine: Engine | None, operation: str, peer: Any, size: int, held: Any) -> None:
        """Made before the operation is started into `cell` (an `mr_op **`), so that not even Ctrl-C in between parts it
        from the memory that it moves. `held`: like `peer`, at least until it is done.
        """
        self.cell = _new(_CELL)
        self._engine = engine
        self._operation = operation
        self._peer = peer
        self._size = size
        self._held = held
        self._settled = False
        self._error: RdmaError | None = None
        self._in_queue: Any = None  # (Completions, tag) of the event loop that awaited it first

    def _poll(self) -> bool:
        self._refuse_in_child()
        if not lib.mr_op_done(self.cell[0]):
            return False
        self._settle()
        return True

    def _refuse_in_child(self) -> None:
        if self._engine is not None and self._engine.is_forked:
            self._engine.raise_unusable()

    def _stop(self) -> None:
        lib.mr_op_cancel(self.cell[0])

    def _wait_until(self, deadline: float | None) -> bool:
        """Waits in slices, so that signal handlers of Python run."""
        self._refuse_in_child()
        while True:
            left = _SLICE if deadline is None else deadline - time.monotonic()
            if lib.mr_op_wait(self.cell[0], min(max(left, 0.0), _SLICE)):
                self._settle()
                return True
            if left <= 0:
                return False

    def _settle(self) -> None:
        """Takes over the end of a finished operation; lets go of what it held."""
        kind = _op_result(self.cell[0], _NULL)
        if kind:
            self._error = self._failure()
        self._held = None
        self._settled = True
        if self._size and self._peer.__class__ is not str and not self._peer.is_lane_noted:
            self.note_lane()

    def rearm(self, held: Any) -> None:
        """Its operation is about to be started again: what is known of its last end is forgotten."""
        self._held = held
        self._settled = False
        self._error = None
        self._in_queue = None

    def note_lane(self) -> None:
        """Looks at the lane of a region's first transfer: warns, once an engine, of tcp in place of a better one."""
        self._peer.is_lane_noted = True
        engine, report = self._engine, self._report()
        if engine is None or engine.warned_of_tcp or report.lane != "tcp" or not report.skipped:
            return
        engine.warned_of_tcp = True
        from .backends import RDMAReadTransferWarning, RDMAWriteTransferWarning

        category = RDMAWriteTransferWarning if self._operation == "write" else RDMAReadTransferWarning
        warnings.warn(f"{report} (said once an engine)", category, stacklevel=5)

    def _result(self) -> Any:
        result = ffi.new("mr_result *")
        lib.mr_op_result(self.cell[0], result)
        return result

    def _failure(self) -> RdmaError:
        result = self._result()
        message = ffi.string(result.message).decode("utf-8", "replace")
        _, colon, cause = message.partition(": ")
        return class_of_kind(result.kind)(
            message,
            peer=self._peer_name(),
            operation=self._operation,
            size=self._size,
            cause=cause if colon else message,
            sys_errno=result.sys_errno,
            remote_state=_REMOTE_STATES[result.remote_state] if self._operation == "write" else None,
        )

    def _report(self) -> TransferReport:
        result = self._result()
        return TransferReport(
            self._operation,
            self._peer_name(),
            ffi.string(result.lane).decode(),
            result.rails,
            result.bytes,
            result.chunks,
            result.retries,
            ffi.string(result.skipped).decode("utf-8", "replace"),
            result.seconds,
        )

    def _waiter(self, loop: Any) -> Any:
        from .completions import Completions

        engine: Any = self._engine
        with engine.queues_lock:  # several loops may come first at once, but an operation can be in one queue only
            if self._in_queue is None:
                queue = Completions.of(engine, loop)
                self._in_queue = queue, queue.add(self.cell[0])
        queue, tag = self._in_queue
        if queue.belongs_to(loop):
            return queue.waiter(tag)
        # A second loop: rare enough for a thread, and the first loop may have stopped long ago.
        return loop.run_in_executor(None, self._wait_until, None)

    def __del__(
        self, release: Callable[[Any], None] = lib.mr_op_release, is_done: Callable[[Any], int] = lib.mr_op_done
    ) -> None:
        op = self.cell[0]
        if not op or self._engine.is_forked:  # type: ignore[union-attr]
            return
        self.cell[0] = _NULL
        if self._settled or is_done(op):
            release(op)
        else:
            self._engine.orphans.append((is_done, release, op, (self._held, self._peer)))  # type: ignore[union-attr]


class AtomicFuture(Started):
    """The end of an atomic operation: stores the old value in its destination."""

    __slots__ = ("_store",)

    def __init__(self, *args: Any, store: Callable[[int], None]) -> None:
        super().__init__(*args)
        self._store: Callable[[int], None] | None = store

    def _settle(self) -> None:
        store = self._store
        if store is not None and not _op_result(self.cell[0], _NULL):
            store(self._result().value)
            self._store = None
        super()._settle()


class GroupFuture(Future):
    """The end of several operations: done when all are; fails with the error of the first that failed."""

    __slots__ = ("_error", "_members", "_operation", "_settled", "_size")

    def __init__(self, operation: str, members: list[Future]) -> None:
        self._operation = operation
        self._members = members
        self._size = sum(member._size for member in members)
        self._settled = False
        self._error = None

    def _stop(self) -> None:
        for member in self._members:
            member.cancel()

    def _poll(self) -> bool:
        if all([member.done() for member in self._members]):
            self._settle()
        return self._settled

    def _wait_until(self, deadline: float | None) -> bool:
        done = all(member._settled or member._wait_until(deadline) for member in self._members)
        if done:
            self._settle()
        return done

    def _settle(self) -> None:
        self._error = next((member._error for member in self._members if member._error is not None), None)
        self._settled = True

    def _waiter(self, loop: Any) -> Any:
        import asyncio

        return asyncio.gather(*[member._waiter(loop) for member in self._members if not member.done()])

    def _peer_name(self) -> str:
        return ", ".join(dict.fromkeys(member._peer_name() for member in self._members))

    def _report(self) -> TransferReport:
        reports = [member._report() for member in self._members]
        return TransferReport(
            self._operation,
            self._peer_name(),
            "+".join(dict.fromkeys(report.lane for report in reports if report.lane)),
            max((report.rails for report in reports), default=0),
            sum(report.bytes for report in reports),
            sum(report.chunks for report in reports),
            sum(report.retries for report in reports),
            "; ".join(dict.fromkeys(report.skipped for report in reports if report.skipped)),
            max((report.seconds for report in reports), default=0.0),
        )
