"""Regions: memory of this process that others may reach, and memory of theirs that we may."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

from .._engine import ffi, lib
from ..errors import ConfigError
from .engine import Engine, raise_error, scratch, seconds
from .future import Future, Started
from .living import living
from .memory import Memory, bytes_at

__all__ = ["ACCESS", "DeviceMapping", "Region", "RemoteRegion", "drop_made_by", "made_by"]

ACCESS = {"read": lib.MR_READ, "write": lib.MR_WRITE, "rw": lib.MR_READ | lib.MR_WRITE}
_opening = threading.Lock()
made_by: ContextVar[int | None] = ContextVar("monarch_rdma-made-by", default=None)  # whose buffers these are


class Region:
    """Ours: pins its memory until access to it has ended.

    A region whose handle never left this process is dropped when the last buffer of it is garbage; else when it is
    dropped by name, here or by a peer.
    """

    def __init__(self, engine: Engine, memory: Memory, access: int) -> None:
        self.engine = engine
        self.memory = memory
        self.maker: int | None = None  # of buffers: who has made them, see made_by
        self._drop_begun = False
        self._cell = ffi.new("mr_region **")  # filled by the core: see Future.cell
        error, address = scratch.error, ffi.cast("void *", memory.address)
        create = lib.mr_region_create
        if memory.on_device:
            stream = ffi.cast("void *", memory.current_stream())
            if kind := lib.mr_gpu_synchronize(-1, stream, error):
                raise_error(error, kind, operation="register", size=memory.view.nbytes)
            create = lib.mr_region_create_on_device
        if kind := create(engine.handle, address, memory.view.extent, access, self._cell, error):
            raise_error(error, kind, operation="register", size=memory.view.nbytes)
        self.id = int(lib.mr_region_id(self._cell[0]))
        self.descriptor = _descriptor(self._cell[0])
        engine.regions[self.id] = self

    def let_out(self) -> None:
        """The handle goes to another process: the region now lives until it is dropped."""
        self.engine.reachable[self.id] = self

    def drop(self) -> Future:
        """Ends remote access now. Done when no access is in flight any more; again is no error."""
        handle = self.handle
        future, error = Started(self.engine, "drop", self.engine.name, 0, self), scratch.error
        if kind := lib.mr_region_drop(handle, future.cell, error):
            raise_error(error, kind, operation="drop", peer=self.engine.name)
        self._drop_begun = True
        self.engine.reachable.pop(self.id, None)
        return future

    @property
    def is_dropped(self) -> bool:
        """Whether remote access has ended: by drop(), or by a peer that dropped it."""
        return self._drop_begun or self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is in the memory any more: some time after a drop."""
        return not self.engine.is_open or bool(lib.mr_region_dropped(self._cell[0]))

    @property
    def handle(self) -> Any:
        """The core's. ConfigError where the engine is closed."""
        self.engine.handle  # noqa: B018
        return self._cell[0]

    def take_notification(self, timeout: float) -> int | None:
        """The next number that a writer posted; None where none came in time. AccessDenied once it is dropped."""
        value, error = ffi.new("uint64_t *"), scratch.error
        got = lib.mr_region_notification(self.handle, timeout, value, error)
        if got < 0:
            raise_error(error, -got, operation="notification", peer=self.engine.name)
        return int(value[0]) if got else None

    def __del__(self) -> None:
        handle, engine = self._cell[0], self.engine
        if not handle or engine.is_forked:
            return
        self._cell[0] = ffi.NULL
        if not engine.is_open or lib.mr_region_dropped(handle):
            lib.mr_region_close(handle)
            return
        op = ffi.new("mr_op **")
        if not self._drop_begun and lib.mr_region_drop(handle, op, ffi.NULL) == 0:
            lib.mr_op_release(op[0])
        # A peer may still be in the memory: it stays until the core says that nobody is.
        engine.orphans.append((lib.mr_region_dropped, lib.mr_region_close, handle, self.memory))


def drop_made_by(engine: Engine, maker: int) -> None:
    """Ends the remote access to all buffers that were made where `made_by` was that; does not wait."""
    for region in living(engine.regions) if engine.is_open else ():
        if region.maker == maker and not region.is_dropped:
            region.drop()


def _descriptor(handle: Any) -> bytes:
    length = lib.mr_region_descriptor(handle, ffi.NULL, 0)
    out = ffi.new("uint8_t[]", length)
    lib.mr_region_descriptor(handle, out, length)
    return bytes(ffi.buffer(out))


class RemoteRegion:
    """Theirs: what a handle from another process names. Opened when it is first used; that talks to nobody."""

    __slots__ = ("_handle", "_num_maps", "_unused", "descriptor", "engine", "is_lane_noted", "ours")

    def __init__(self, engine: Engine | None, descriptor: bytes, ours: Region | None = None) -> None:
        self.engine = engine  # None: the default one, when it is first needed
        self.ours = ours  # where it is in fact a region of this process, made here
        self.descriptor = descriptor
        self._handle: Any = None
        self._num_maps = 0
        self._unused = False
        self.is_lane_noted = False  # see Future.note_lane

    def open(self) -> Any:
        """The core's handle. ProtocolError for a malformed descriptor; ConfigError where the engine is closed."""
        if self.engine is None:
            from .engine import default_engine

            self.engine = default_engine()
        if not self.engine.is_open:
            self.engine.raise_unusable()
        if self._handle is None:
            with _opening:
                self._handle = self._handle or self._opened(self.engine)
        return self._handle

    def _opened(self, engine: Engine) -> Any:
        out, error = ffi.new("mr_remote **"), scratch.error
        if kind := lib.mr_remote_open(engine.handle, self.descriptor, len(self.descriptor), out, error):
            raise_error(error, kind, operation="open")
        return out[0]

    def _known(self) -> Any:
        """The handle, opened at some time: what it says of itself holds when the engine is closed, too."""
        return self._handle or self.open()

    @property
    def owner(self) -> str:
        """Name of the owning process."""
        return str(ffi.string(lib.mr_remote_owner(self._known())).decode())

    @property
    def incarnation(self) -> int:
        return int(lib.mr_remote_incarnation(self._known()))

    @property
    def size(self) -> int:
        return int(lib.mr_remote_size(self._known()))

    def lane(self, timeout: float | None) -> str:
        """The lane that a transfer would take now. Connects if need be."""
        error = scratch.error
        error.kind = 0
        lane = ffi.string(lib.mr_remote_lane(self.open(), seconds(timeout), error)).decode()
        if not lane:
            raise_error(error, error.kind, operation="connect", peer=self.owner)
        return str(lane)

    def map(self, timeout: float | None) -> tuple[Any, bool]:
        """Maps the region; a buffer over all of it, and whether it may be written.

        It stays mapped as long as the buffer lives, even where the engine is closed.
        """
        handle, error = self.open(), scratch.error
        address, writable = ffi.new("void **"), ffi.new("uint32_t *")
        if kind := lib.mr_remote_map(handle, seconds(timeout), address, writable, error):
            raise_error(error, kind, operation="map", peer=self.owner, size=self.size)

        self._num_maps += 1
        return bytes_at(int(ffi.cast("uintptr_t", address[0])), self.size, self._unmap), bool(writable[0])

    def map_on_device(self, device: int, offset: int, timeout: float | None) -> DeviceMapping:
        """Opens memory of a device for another one of this process; -1: this thread's current one."""
        handle, error, address = self.open(), scratch.error, ffi.new("void **")
        if kind := lib.mr_remote_map_on_device(handle, device, seconds(timeout), address, error):
            raise_error(error, kind, operation="map", peer=self.owner, size=self.size)
        self._num_maps += 1
        return DeviceMapping(self, address[0], offset)

    def _unmap(self, mapped: Any) -> None:
        if self.engine is not None and not self.engine.is_forked:
            lib.mr_remote_unmap(self._handle, mapped, ffi.NULL)
            self._num_maps -= 1
            self._close_if_unused()

    def drop(self, timeout: float | None) -> Future:
        """Asks the owner to drop it."""
        handle, error = self.open(), scratch.error
        future = Started(self.engine, "drop", self, 0, self)
        if kind := lib.mr_remote_drop(handle, seconds(timeout), future.cell, error):
            raise_error(error, kind, operation="drop", peer=self.owner)
        return future

    def __del__(self) -> None:
        self._unused = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """In a cycle of garbage we may be finalized before what is mapped through us."""
        if self._unused and not self._num_maps and self._handle is not None:
            handle, self._handle = self._handle, None
            if self.engine is not None and not self.engine.is_forked:
                lib.mr_remote_close(handle)


class DeviceMapping:
    """Memory of another process's device, open here until `close`: the owner's drop waits for it."""

    def __init__(self, remote: RemoteRegion, pointer: Any, offset: int) -> None:
        self._remote, self._pointer = remote, pointer
        self.address = int(ffi.cast("uintptr_t", pointer)) + offset  # for kernels; a processor that touches it crashes

    def close(self) -> None:
        """When no kernel uses it any more. Again is no error."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._remote._unmap(pointer)

    def __del__(self) -> None:
        self.close()


def checked_access(access: object) -> int:
    """The rights as the core's bits; ConfigError for anything but "rw", "read" and "write"."""
    if not isinstance(access, str) or access not in ACCESS:
        raise ConfigError(f'access is {access!r}, but must be "rw", "read" or "write"')
    return int(ACCESS[access])
