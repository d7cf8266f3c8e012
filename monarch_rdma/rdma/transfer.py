"""One transfer between local memory and a remote region: what fits to what, and the call into the core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._engine import ffi, lib
from ..errors import ConfigError, OutOfBounds
from .block_sums import BlockSums
from .engine import raise_error, scratch
from .future import Finished, Future, Started
from .memory import Memory, memory_of, note_written
from .region import RemoteRegion
from .view import View

__all__ = [
    "BULK",
    "BULK_BYTES",
    "READ",
    "WRITE",
    "match_dst",
    "match_src",
    "move",
    "move_bytes",
    "read_with_sums",
    "transfer_flags",
]

READ, WRITE = lib.MR_READ, lib.MR_WRITE
BULK, BULK_BYTES = lib.MR_BULK, lib.MR_BULK_BYTES
_VERBS = {READ: "read", WRITE: "write"}
_LANES = {
    "shm": lib.MR_LANE_SHM,
    "tcp": lib.MR_LANE_TCP,
    "verbs": lib.MR_LANE_VERBS,
    "ipc": lib.MR_LANE_IPC,
    "staged": lib.MR_LANE_STAGED,
}
_move_bytes = lib.mr_move_bytes


def transfer_flags(strict: bool, lanes: str | Iterable[str] | None) -> int:
    """mr_flags for these arguments."""
    flags: int = lib.MR_STRICT if strict else 0
    if lanes is None:
        return flags
    if not isinstance(lanes, Iterable):
        raise ConfigError(f"lanes is {lanes!r}, but must name lanes out of {', '.join(_LANES)}")
    names = lanes.split(",") if isinstance(lanes, str) else list(lanes)
    for name in names:
        if name not in _LANES:
            raise ConfigError(f"lanes is {lanes!r}, but must name lanes out of {', '.join(_LANES)}")
        flags |= _LANES[name]
    if not names:
        raise ConfigError("lanes is empty, but must name at least one lane, or be None for all")
    return flags


def match_dst(view: View, dst: Any, argument: str) -> tuple[Memory, View, View]:
    """The destination's memory, and the bytes of it and of the buffer `view` that a read copies."""
    memory = memory_of(dst, argument, devices=True)
    local = memory.view
    _match_dtype(view, local, argument)
    if not memory.writable:
        raise ConfigError(f"{argument} is read-only, so nothing can be read into it")
    if local.overlaps_itself:
        raise ConfigError(f"{argument} has overlapping elements (shape {local.shape}, expanded?); pass a copy")
    if local.nbytes < view.nbytes or (local.nbytes > view.nbytes and not _may_be_part(view, local)):
        raise _wrong_size(view, local, argument, "read")
    return memory, local if local.nbytes == view.nbytes else local.prefix(view.nbytes), view


def match_src(view: View, src: Any, argument: str) -> tuple[Memory, View, View]:
    """The source's memory, and the bytes of it and of the buffer `view` that a write copies."""
    memory = memory_of(src, argument, devices=True)
    local = memory.view
    _match_dtype(view, local, argument)
    if view.overlaps_itself:
        raise ConfigError(
            f"the buffer has overlapping elements (shape {view.shape}, expanded?), so it cannot be written"
        )
    if local.nbytes > view.nbytes or (local.nbytes < view.nbytes and not _may_be_part(local, view)):
        raise _wrong_size(view, local, argument, "write")
    return memory, local, view if local.nbytes == view.nbytes else view.prefix(local.nbytes)


def _match_dtype(view: View, local: View, argument: str) -> None:
    if local.dtype != view.dtype and "uint8" not in (local.dtype, view.dtype):
        raise ConfigError(
            f"{argument} has dtype {local.dtype}, but the buffer {view.dtype}; to move bytes, pass a uint8 view of it"
        )


def _may_be_part(part: View, whole: View) -> bool:
    """Whether `part` may fill the first bytes of `whole`: not where both have a shape that means something."""
    return whole.is_contiguous and (len(part.shape) <= 1 or len(whole.shape) <= 1)


def _wrong_size(view: View, local: View, argument: str, operation: str) -> OutOfBounds:
    return OutOfBounds(
        f"{argument} has {local.nbytes} bytes (shape {local.shape}), but the buffer {view.nbytes} (shape {view.shape})",
        operation=operation,
        size=view.nbytes,
    )


def order_of(stream: Any) -> tuple[int, int]:
    """A torch stream, an object with __cuda_stream__, or the runtime's pointer: the pointer, and its device or -1."""
    pointer = getattr(stream, "cuda_stream", stream)
    if hasattr(stream, "__cuda_stream__"):
        pointer = stream.__cuda_stream__()[1]
    if type(pointer) is not int or pointer < 0:
        raise ConfigError(f"stream is {stream!r:.200}, but must be a stream of torch's, or a runtime's pointer to one")
    return pointer, getattr(stream, "device_index", -1)


def move(
    remote: RemoteRegion,
    verb: int,
    parts: tuple[Memory, View, View],
    timeout: float,
    flags: int,
    notify: int | None,
    stream: Any = None,
    *,
    again: bool = False,
) -> Future:
    """Starts moving what match_dst or match_src found: after what is queued on the stream, which then waits for it.
    Without one, where it is memory of a GPU: after what is queued on the stream that is current. `again`: as an
    operation of the core's, which can be started again.
    """
    memory, local, there = parts
    order = None
    if stream is not None or memory.on_device:
        pointer, device = (memory.current_stream(), -1) if stream is None else order_of(stream)
        if device < 0 and not memory.on_device:
            raise ConfigError(f"stream is {stream!r:.200}, whose device is not known, nor is the memory of any device")
        address_of = ffi.cast("void *", pointer)
        order = ffi.new("mr_stream_order *", (address_of, device, stream is not None, memory.on_device))
    handle, engine = remote.open(), remote.engine
    if verb == READ and memory.tensor is not None:
        note_written(memory.tensor)
    if order is None and notify is None and not again and local.is_contiguous and there.is_contiguous:
        return move_bytes(remote, verb, memory.address, there.offset, local.nbytes, timeout, flags, memory.pin)
    if not local.nbytes and (notify is None or order is not None):
        return Finished(_VERBS[verb], remote, 0, 0)
    error, address = scratch.error, ffi.cast("void *", memory.address)
    has_notify, number = (0, 0) if notify is None else (1, notify)
    future = Started(engine, _VERBS[verb], remote, local.nbytes, (memory.pin, remote))
    what = (handle, verb, address, local.c_view, there.c_view, timeout, flags, has_notify, number)
    if order is None:
        kind = lib.mr_transfer(*what, future.cell, error)
    else:
        kind = lib.mr_transfer_ordered(*what, order, future.cell, error)
    if kind:
        raise_error(error, kind, operation=_VERBS[verb], peer=remote.owner, size=local.nbytes)
    return future


def read_with_sums(
    remote: RemoteRegion, parts: tuple[Memory, View, View], timeout: float, flags: int, sums: BlockSums
) -> Future:
    """Starts reading contiguous bytes, with checksums as they pass."""
    memory, local, there = parts
    handle = remote.open()
    if memory.tensor is not None:
        note_written(memory.tensor)
    future, error = Started(remote.engine, "read", remote, local.nbytes, (memory.pin, remote, sums)), scratch.error
    what = (handle, ffi.cast("void *", memory.address), there.offset, local.nbytes, timeout, flags, sums.wanted)
    if kind := lib.mr_read_with_sums(*what, future.cell, error):
        raise_error(error, kind, operation="read", peer=remote.owner, size=local.nbytes)
    return future


class SpareFuture(Started):
    """Of an operation that may be over at once: made before it begins, and not needed then, it serves the next one."""

    __slots__ = ("error",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.error = ffi.new("mr_error *")


_spares: list[SpareFuture] = []


def move_bytes(
    remote: RemoteRegion, verb: int, address: int, offset: int, size: int, timeout: float, flags: int, pin: object
) -> Future:
    """Starts moving contiguous bytes. On the way of every small transfer: few look-ups, one call into the core, and
    nothing but the answer made where it ends at once.
    """
    if not size:
        return Finished(_VERBS[verb], remote, 0, 0)
    handle, engine = remote._handle, remote.engine
    if handle is None or engine is None:
        handle = remote.open()
        engine = remote.engine
    try:
        future = _spares.pop()
    except IndexError:
        future = SpareFuture(None, "", "", 0, None)
    future._engine, future._peer, future._held = engine, remote, pin  # before: see Started.cell
    moved = _move_bytes(handle, verb, address, offset, size, timeout, flags, future.cell, future.error)
    if engine.orphans:  # type: ignore[union-attr]
        engine.sweep_sometimes()  # type: ignore[union-attr]
    if moved > 0:
        future._engine = future._peer = future._held = None
        _spares.append(future)
        return Finished(_VERBS[verb], remote, size, moved)
    if moved < 0:
        remote.open()  # says more of a closed engine
        raise_error(future.error, -moved, operation=_VERBS[verb], peer=remote.owner, size=size)
    future._operation, future._size = _VERBS[verb], size
    future.done()
    return future
