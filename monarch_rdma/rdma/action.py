"""RDMAAction: several operations started together, with one future for all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._engine import ffi, lib
from ..errors import ConfigError
from .buffer import RDMABuffer
from .engine import raise_error, scratch, seconds
from .future import AtomicFuture, Future, GroupFuture
from .memory import Memory, memory_of, note_written
from .overlap import Target, Targets
from .transfer import READ, WRITE, match_dst, match_src, move

if TYPE_CHECKING:
    import torch

__all__ = ["RDMAAction"]

_WORD = 8  # bytes of an atomic


class RDMAAction:
    """A batch of reads, writes and atomics. Methods that add one return the action; `submit` starts all.

    The order in which they are carried out is not defined, so what they write may not overlap. May be submitted again.
    Local memory is taken as it is when the operation is added: do not resize the tensor's storage afterwards.
    """

    def __init__(self) -> None:
        self._starts: list[Callable[[float], Future]] = []
        self._targets = Targets()
        self._in_flight: GroupFuture | None = None
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
        return self._add([(None, target)], lambda timeout: move(src._remote, READ, parts, timeout, 0, None))

    def write_remote(self, dst: RDMABuffer, src: torch.Tensor | memoryview | Any) -> RDMAAction:
        """Adds a write of `src` into the buffer `dst`; see RDMABuffer.write_from. Errors as in read_remote."""
        parts = match_src(_checked(dst, "dst")._view, src, "src")
        target = Target(0, parts[2], False, "dst of a write")
        place = dst._remote.descriptor
        return self._add([(place, target)], lambda timeout: move(dst._remote, WRITE, parts, timeout, 0, None))

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
            if self._in_flight is not None:
                self._in_flight.exception()
            members: list[Future] = []
            try:
                for start in self._starts:
                    members.append(start(limit))
            except BaseException:
                GroupFuture("action", members).cancel()
                raise
            finally:
                self._in_flight = GroupFuture("action", members)
            return self._in_flight

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

        def start(timeout: float) -> Future:
            if memory.tensor is not None:
                note_written(memory.tensor)
            handle, error, held = remote.open(), scratch.error, (memory, remote)
            future = AtomicFuture(remote.engine, name, remote, _WORD, held, store=lambda old: _store(memory, old))
            if kind := call(handle, view.offset, *operands, timeout, future.cell, error):
                raise_error(error, kind, operation=name, peer=remote.owner, size=_WORD)
            return future

        old = Target(memory.address, memory.view, False, f"dst of a {name}")
        word = Target(0, view, True, f"src of a {name}")
        return self._add([(None, old), (remote.descriptor, word)], start)

    def _add(self, targets: list[tuple[Any, Target]], start: Callable[[float], Future]) -> RDMAAction:
        with self._lock:
            if self._in_flight is not None and not self._in_flight.done():
                raise ConfigError("the action is in flight; wait for it before adding operations")
            for place, target in targets:
                self._targets.check(place, target)
            for place, target in targets:
                self._targets.add(place, target)
            self._starts.append(start)
        return self


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
