"""RDMABuffer: a handle on memory of one process that any member of the job may read and write."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ..errors import AccessDenied, ConfigError, OutOfBounds, ProtocolError, RegistrationError
from .block_sums import BlockSums
from .engine import NEVER, Engine, default_engine, seconds
from .future import Future
from .memory import Keep, LastTensor, as_memoryview, as_tensor, bytes_at, memory_of, note_written
from .notification import Notifications
from .region import DeviceMapping, Region, RemoteRegion, checked_access, made_by
from .transfer import BULK, READ, WRITE, match_dst, match_src, move, move_bytes, read_with_sums, transfer_flags
from .view import View, contiguous_strides

__all__ = ["RDMABuffer"]

_BLOB_VERSION = 1
_MAX_BLOB = 64 << 10
_NUMBERS = (int, float)
_loaded = sys.modules


class RDMABuffer:
    """A handle on a tensor's or memoryview's memory. Small and picklable: send it to another process and read there.

    Any shape and strides, any dtype. The memory is pinned until the buffer is dropped; a buffer that never left its
    process is dropped when it is garbage. While it lives, do not resize the tensor's storage nor call share_memory_().
    """

    __slots__ = ("_flat_offset", "_is_tensor", "_knows_dtype", "_last", "_nbytes", "_remote", "_view")

    def __init__(self, data: Any, *, access: str = "rw", engine: Engine | None = None) -> None:
        """`data`: a tensor, memoryview, bytearray, numpy array, or anything with `__cuda_array_interface__`. `access`:
        what peers may do, "rw", "read" or "write". Memory of a GPU is waited for: what is queued on the current stream
        has ended when this returns, so that peers read what it computes.

        Raises ConfigError, RegistrationError or ResourceExhausted.
        """
        rights = checked_access(access)
        memory = memory_of(data, "data", devices=True)
        if rights & WRITE and not memory.writable:
            raise ConfigError(f'data is read-only, but access is {access!r}; pass access="read"')
        engine = engine or default_engine()
        if engine.orphans or engine.reachable:
            engine.sweep_sometimes()
        region = Region(engine, memory, rights)
        region.maker = made_by.get()
        self._set(RemoteRegion(engine, region.descriptor, region), memory.view, memory.tensor is not None)

    def _set(self, remote: RemoteRegion, view: View, is_tensor: bool) -> None:
        self._remote = remote
        self._view = view
        self._is_tensor = is_tensor
        self._nbytes = view.nbytes
        self._flat_offset = view.offset if view.is_contiguous else -1
        self._last = LastTensor(None, 0)  # of those laid out as the buffer is
        self._knows_dtype = False
        self._current_view()

    @classmethod
    def _of(cls, remote: RemoteRegion, view: View, is_tensor: bool) -> RDMABuffer:
        buffer = cls.__new__(cls)
        buffer._set(remote, view, is_tensor)
        return buffer

    # --- what it is

    def size(self) -> int:
        """Bytes."""
        return self._nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return self._view.shape

    @property
    def dtype(self) -> Any:
        """The torch.dtype where it was made from a tensor; else its name ("uint8", "float64", ...)."""
        if not self._is_tensor:
            return self._view.dtype
        import torch

        return getattr(torch, self._view.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one to the next in each dimension."""
        return tuple(stride // self._view.itemsize for stride in self._view.strides)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another, in row-major order."""
        return self._flat_offset >= 0

    @property
    def owner(self) -> str:
        """Name of the process that holds the memory."""
        return self._remote.owner

    @property
    def backend(self) -> str:
        """The lane that transfers take now: "shm", "tcp", "ibverbs", or "local" within one process; of memory on a GPU
        also "ipc" or "staged". Connects if need be.

        `Future.explain().lane` tells the lane that one transfer took, more exactly. Raises PeerLost,
        AuthenticationError.
        """
        lane = self._remote.lane(self._engine().options["connect_timeout"])  # type: ignore[arg-type]
        kind = lane.partition("-")[0]
        return {"verbs": "ibverbs"}.get(kind, kind)

    def __getitem__(self, key: Any) -> RDMABuffer:
        """A handle on a part, by basic slicing with positive steps. Talks to nobody. Dropping it drops the whole."""
        return self._of(self._remote, self._view[key], self._is_tensor)

    def as_strided(self, size: Iterable[int], stride: Iterable[int], offset: int = 0) -> RDMABuffer:
        """A handle on elements of it as torch.as_strided has them; `offset` from its first one. Talks to nobody.

        OutOfBounds where they are not all between its first and last byte, or a number is negative.
        """
        view, whole, strides = self._view, tuple(size), tuple(stride)
        steps = tuple([step * view.itemsize for step in strides])
        if not offset and whole == view.shape and steps == view.strides:
            return self
        part = View(view.dtype, view.itemsize, whole, steps, view.offset + offset * view.itemsize)
        good = len(whole) == len(steps) and min((offset, *whole, *steps), default=0) >= 0
        if not good or (part.nbytes and part.offset + part.extent > view.offset + view.extent):
            raise OutOfBounds(
                f"size {whole}, stride {strides}, offset {offset} reach outside of a buffer of shape {self.shape}"
            )
        return self._of(self._remote, part, self._is_tensor)

    def part_at(self, data: Any) -> RDMABuffer:
        """A handle on `data`, of whatever shape and dtype, which lies within the memory of this buffer of this process.
        Dropping it drops the whole. ConfigError, OutOfBounds.
        """
        whole, memory = self._own_region("part_at").memory, memory_of(data, "data", devices=True)
        part = replace(memory.view, offset=memory.address - whole.address)
        if part.nbytes and not self._view.offset <= part.offset <= self._view.offset + self._view.extent - part.extent:
            raise OutOfBounds(f"data of shape {part.shape} is not within this buffer of shape {self.shape}")
        return self._of(self._remote, part, memory.tensor is not None)

    def __repr__(self) -> str:
        return f"<RDMABuffer of {self._nbytes} bytes: {self._view.dtype} {list(self.shape)}>"

    def _engine(self) -> Engine:
        self._remote.open()
        assert self._remote.engine is not None
        return self._remote.engine

    # --- transfers

    def read_into(
        self,
        dst: Any,
        *,
        timeout: float | None = 60,
        strict: bool = False,
        lanes: str | Iterable[str] | None = None,
        stream: Any = None,
    ) -> Future:
        """Reads all of the buffer into `dst`, in row-major order of the elements of both.

        `dst`: same dtype and number of elements, or bytes (uint8). A one-dimensional contiguous `dst` may be larger:
        its first size() bytes are written. `timeout`: seconds until TransferTimeout, None for no deadline. `strict`:
        fail rather than take another lane than the best. `lanes`: only these, out of "shm", "tcp", "verbs", and for
        memory of GPUs "ipc" and "staged".

        `stream`, a torch.cuda.Stream (of HIP as well): the read begins when what is queued on the stream has ended, and
        what is queued on it later waits until the read has ended, in whatever way: nobody has to wait for the future,
        but it tells whether it went well. Without it a `dst` on a GPU is written after what is queued on its current
        stream, and the future has to be waited for.

        Raises at once, before a byte moves: ConfigError, OutOfBounds. The future raises PeerLost, TransferTimeout,
        Cancelled, AccessDenied, OutOfBounds, ResourceExhausted, AuthenticationError or ProtocolError.
        """
        # Small transfers cost little but the look at their arguments.
        plain = stream is None and not strict and lanes is None
        if plain and timeout.__class__ in _NUMBERS and 0 <= timeout < NEVER and (address := self._last.address_of(dst)):
            note_written(dst)
            return move_bytes(self._remote, READ, address, self._flat_offset, self._nbytes, timeout, 0, dst)
        deadline, flags = seconds(timeout), transfer_flags(strict, lanes)
        return move(self._remote, READ, match_dst(self._current_view(), dst, "dst"), deadline, flags, None, stream)

    def prepare_read(
        self, dst: Any, *, bulk: bool = False, sums: BlockSums | None = None
    ) -> Callable[[float | None], Future]:
        """Checks everything about a read into `dst` now, once. Each call of the result, with a timeout, starts it.

        `bulk`: one of many, of 16 MiB or more together, so that its bytes go past the processor's caches. `sums`: are
        made on the way; both ends have to be contiguous, and in memory of the host.
        Raises as read_into. What `dst` is now counts: do not resize a tensor's storage afterwards.
        """
        parts, flags = match_dst(self._current_view(), dst, "dst"), BULK if bulk else 0
        if sums is not None:
            memory, local, there = parts
            if not (local.is_contiguous and there.is_contiguous) or memory.on_device:
                raise ConfigError("sums are made of contiguous memory of the host: dst or the buffer is not")
            return lambda timeout: read_with_sums(self._remote, parts, seconds(timeout), flags, sums)
        return lambda timeout: move(self._remote, READ, parts, seconds(timeout), flags, None)

    def write_from(
        self,
        src: Any,
        *,
        timeout: float | None = 60,
        strict: bool = False,
        lanes: str | Iterable[str] | None = None,
        notify: int | None = None,
        stream: Any = None,
    ) -> Future:
        """Writes `src` into the buffer, in row-major order of the elements of both.

        `src`: same dtype and number of elements, or bytes (uint8). A smaller one-dimensional `src` writes the first
        bytes of a contiguous buffer. `notify`: a number from 0 to 2**64-1 that the owner gets from `notifications()`
        after all bytes are visible there. Otherwise as `read_into`; an error's `remote_state` tells what is known of
        the remote bytes.
        """
        plain = notify is None and stream is None and not strict and lanes is None
        if plain and timeout.__class__ in _NUMBERS and 0 <= timeout < NEVER and (address := self._last.address_of(src)):
            return move_bytes(self._remote, WRITE, address, self._flat_offset, self._nbytes, timeout, 0, src)
        deadline, flags = seconds(timeout), transfer_flags(strict, lanes)
        if notify is not None and not (type(notify) is int and 0 <= notify < 2**64):
            raise ConfigError(f"notify is {notify!r}, but must be an integer from 0 to 2**64-1")
        return move(self._remote, WRITE, match_src(self._current_view(), src, "src"), deadline, flags, notify, stream)

    def _current_view(self) -> View:
        """The view; on the way, notes the torch.dtype where torch was imported after the buffer was made."""
        if not self._knows_dtype and self._flat_offset >= 0 and "torch" in _loaded:
            dtype = getattr(_loaded["torch"], self._view.dtype, None)
            self._last, self._knows_dtype = LastTensor(dtype, self._nbytes), dtype is not None
        return self._view

    # --- zero-copy

    def map(self, *, timeout: float | None = 60) -> Any:
        """The remote memory itself, as a tensor (or memoryview), without a copy: for memory from `empty`, `zeros`,
        `share` or `share_` of a process on this host. It stays mapped as long as the result lives.

        It shows every change that the owner makes. Where peers may not write (access="read"), writing to the result
        ends this process as for any read-only memory: torch has no read-only tensors.

        Raises RegistrationError or ConfigError where the memory cannot be mapped; PeerLost, AccessDenied.
        """
        ours = self._remote.ours
        if ours is not None and not ours.is_dropped:
            memory = ours.memory
            if memory.on_device:
                raise ConfigError("memory of a GPU cannot be mapped; read_into() copies it")
            data, writable = bytes_at(memory.address, memory.view.extent, Keep(memory)), memory.writable
        else:
            data, writable = self._remote.map(timeout)
        if self._is_tensor:
            return as_tensor(data, self._view)
        view = as_memoryview(data, self._view)
        return view if writable else view.toreadonly()

    def map_on_device(self, device: int = -1, *, timeout: float | None = 60) -> DeviceMapping:
        """Memory of a GPU that another process of this host owns, opened for kernels of `device` (-1: the current one):
        `address` is the buffer's first byte there. It stays open until `close`, which the owner's drop waits for.

        For kernels that order their accesses themselves, as `monarch_rdma.kernels.peer_collective` does. Raises
        ConfigError, which says why it cannot be opened; PeerLost, AccessDenied.
        """
        if self._remote.ours is not None:
            raise ConfigError("map_on_device() is for memory of another process; this one has the tensor itself")
        return self._remote.map_on_device(device, self._view.offset, timeout)

    def read_view(self, *, timeout: float | None = 60) -> Any:
        """What the buffer holds, for reading only: its mapped memory where it can be mapped, else a fresh copy.

        A memoryview is read-only; writing to a tensor is not prevented, and must not be done.
        """
        try:
            view = self.map(timeout=timeout)
            return view if self._is_tensor else view.toreadonly()
        except (RegistrationError, ConfigError):
            self._engine()  # of a closed engine there is nothing to copy either
        fresh = View(
            self._view.dtype, self._view.itemsize, self.shape, contiguous_strides(self.shape, self._view.itemsize)
        )
        data = bytearray(self._nbytes)
        self.read_into(memoryview(data), timeout=timeout).get()
        return as_tensor(data, fresh) if self._is_tensor else as_memoryview(data, fresh).toreadonly()

    # --- notifications and the end

    def notifications(self) -> Notifications:
        """The numbers that writers posted with `notify=`, in order, each once; for loops of both kinds. Owner only."""
        return Notifications(self._own_region("notifications"))

    def next_notification(self, timeout: float | None = None) -> int:
        """Waits for the next one. TimeoutError after `timeout` seconds; AccessDenied once the buffer is dropped."""
        return Notifications(self._own_region("next_notification")).next(timeout)

    def _own_region(self, method: str) -> Region:
        if self._remote.ours is None:
            raise ConfigError(
                f"{method}() is for the process that made the buffer; this one holds a handle on {self.owner}'s"
            )
        return self._remote.ours

    def drop(self, *, timeout: float | None = 60) -> Future:
        """Ends access to the memory, for all and for all parts of the buffer. Done when no access is in flight any
        more.

        Also for a handle on another process's memory: that asks the owner, for at most `timeout` seconds. The owner
        lets go of the tensor when it next makes a buffer or looks at its counters. Dropping again is no error there.
        """
        return self._remote.drop(timeout) if self._remote.ours is None else self._remote.ours.drop()

    # --- the handle

    def to_bytes(self) -> bytes:
        """The handle in a form that is safe to load from anybody: JSON. The memory stays alive until it is dropped."""
        self._let_out()
        descriptor = base64.b64encode(self._remote.descriptor).decode()
        return json.dumps(
            [_BLOB_VERSION, descriptor, self._is_tensor, self._view.to_json()], separators=(",", ":")
        ).encode()

    def _let_out(self) -> None:
        """Its handle goes to another process."""
        ours = self._remote.ours
        if ours is not None:
            ours.handle  # noqa: B018, refuses a closed one
            if ours.is_dropped:
                raise AccessDenied("the buffer was dropped; its handle is of no use to anybody", operation="pickle")
            ours.let_out()

    @classmethod
    def from_bytes(cls, data: bytes, *, engine: Engine | None = None) -> RDMABuffer:
        """The buffer of a handle, reached through `engine` or the default one. ProtocolError where it is malformed."""
        try:
            if len(data) > _MAX_BLOB:
                raise ValueError(f"{len(data)} bytes")
            version, descriptor, is_tensor, view = json.loads(data)
            raw = base64.b64decode(descriptor, validate=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a buffer's handle is malformed: {error}") from error
        if version != _BLOB_VERSION:
            raise ProtocolError(
                f"a buffer's handle of version {version!r:.20}; this library reads version {_BLOB_VERSION}"
            )
        return cls._of(RemoteRegion(engine, raw), View.from_json(view), is_tensor is True)

    @staticmethod
    def many_to_json(buffers: Iterable[RDMABuffer]) -> list[Any]:
        """The handles of many, for a JSON text: each region is in it once."""
        regions: dict[bytes, int] = {}
        rows = []
        for buffer in buffers:
            which = regions.get(buffer._remote.descriptor)
            if which is None:
                buffer._let_out()
                which = regions[buffer._remote.descriptor] = len(regions)
            rows.append([which, buffer._is_tensor, buffer._view.to_json()])
        return [[base64.b64encode(descriptor).decode() for descriptor in regions], rows]

    @classmethod
    def many_from_json(cls, data: Any, *, engine: Engine | None = None) -> list[RDMABuffer]:
        """These buffers; those of one region share it. ProtocolError where it is malformed."""
        try:
            descriptors, rows = data
            regions = [RemoteRegion(engine, base64.b64decode(each, validate=True)) for each in descriptors]
            if not all(type(which) is int and which >= 0 for which, _, _ in rows):
                raise ValueError("a region's number")
            return [cls._of(regions[which], View.from_json(view), is_tensor is True) for which, is_tensor, view in rows]
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"handles of buffers are malformed: {error}") from error

    def __copy__(self) -> RDMABuffer:
        return self  # nothing in it can change

    def __deepcopy__(self, _: Any) -> RDMABuffer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RDMABuffer.from_bytes, (self.to_bytes(),)
