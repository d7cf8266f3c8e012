"""Tensors in memory that peers on this host can map: read at the speed of memcpy, or viewed without a copy.

The memory is given back when the last tensor on it is gone. It is never under a name in /dev/shm.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as to_index
from typing import TYPE_CHECKING, Any, TypeVar

from .._engine import ffi, lib
from ..errors import ConfigError, RegistrationError
from .engine import Engine, default_engine, raise_error, scratch
from .memory import as_tensor, bytes_at, memory_of
from .view import View, contiguous_strides

if TYPE_CHECKING:
    import torch

    Shareable = TypeVar("Shareable", torch.Tensor, torch.nn.Module)

__all__ = ["empty", "share", "share_", "shared_memory", "zeros"]

_SWAP = "_swap_data_ptr_"  # torch's exchange of two storages' memory, under all their tensors
_ALIGNMENT = 64  # of each storage: a cache line, as torch's own allocator has it


def shared_memory(size: int, *, engine: Engine | None = None) -> memoryview:
    """`size` zeroed bytes that peers on this host can map. RegistrationError where there is no memory."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ConfigError(f"size is {size!r}, but must be a number of bytes")
    return memoryview(_allocate(size, engine or default_engine()) if size else bytearray()).cast("B")


def zeros(
    *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False, engine: Engine | None = None
) -> torch.Tensor:
    """Like torch.zeros on the CPU, in memory that peers on this host can map. RegistrationError where there is none."""
    import torch

    dims = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
    try:
        shape = tuple(to_index(dim) for dim in dims)
    except TypeError as error:
        raise ConfigError(f"size is {size!r}, but must be made of integers") from error
    if any(dim < 0 for dim in shape):
        raise ConfigError(f"size is {shape}, but dimensions cannot be negative")
    tensor: torch.Tensor = _tensor(shape, dtype or torch.get_default_dtype(), engine or default_engine())
    return tensor.requires_grad_(requires_grad)


def empty(
    *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False, engine: Engine | None = None
) -> torch.Tensor:
    """Like torch.empty on the CPU, in memory that peers on this host can map. (New memory is zeroed by the kernel
    anyway.)
    """
    return zeros(*size, dtype=dtype, requires_grad=requires_grad, engine=engine)


def share(tensor: torch.Tensor, *, engine: Engine | None = None) -> torch.Tensor:
    """A contiguous copy of the tensor in memory that peers on this host can map."""
    import torch

    memory = memory_of(tensor, "tensor")
    if memory.tensor is None:
        raise ConfigError(f"tensor is a {type(tensor).__name__}, but must be a torch.Tensor")
    with torch.no_grad():
        copy: torch.Tensor = _tensor(memory.view.shape, tensor.dtype, engine or default_engine()).copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


def share_(what: Shareable, *, engine: Engine | None = None) -> Shareable:
    """Moves a tensor's storage, or those of all parameters and buffers of a module, into such memory; returns `what`.

    In place: every tensor on these storages moves along (tied weights, views, optimizers' references), and parameters
    stay what they are. All of a module goes into one piece of memory. What is there already stays.

    Raises ConfigError, before anything is changed, for tensors that cannot be moved, and for storages that an
    RDMABuffer holds: drop it first.
    """
    import torch

    engine = engine or default_engine()
    if isinstance(what, torch.nn.Module):
        named = [*what.named_parameters(remove_duplicate=False), *what.named_buffers(remove_duplicate=False)]
    else:
        named = [("tensor", what)]
    tensors: dict[int, list[Any]] = {}  # by the address of their storage
    for name, tensor in named:
        storage = memory_of(tensor, name).pin
        if not isinstance(tensor, torch.Tensor) or not isinstance(storage, torch.UntypedStorage):
            raise ConfigError(f"{name} is a {type(tensor).__name__}, but must be a torch.Tensor or a torch.nn.Module")
        if storage.nbytes() == 0 or _is_shared(storage, engine):
            continue
        if (region := engine.region_within(storage.data_ptr(), storage.nbytes())) is not None:
            raise ConfigError(f"{name} is held by an RDMABuffer (region {region.id}); drop it before share_")
        tensors.setdefault(storage.data_ptr(), []).append(tensor)
    _move(list(tensors.values()), engine)
    return what


def _move(groups: list[list[Any]], engine: Engine) -> None:
    """Moves storages, each given by the tensors known to be on it."""
    import torch

    storages = [group[0].untyped_storage() for group in groups]
    starts, total = [], 0
    for storage in storages:
        starts.append(total)
        total += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    if not total:
        return
    data = _allocate(total, engine)
    for group, storage, start in zip(groups, storages, starts, strict=True):
        new = torch.frombuffer(data, dtype=torch.uint8, count=storage.nbytes(), offset=start).untyped_storage()
        new.copy_(storage)
        swap = getattr(storage, _SWAP, None)
        if swap is not None:
            swap(new)  # `new` now has the old memory, and frees it
            continue
        for tensor in group:  # an older torch: only the tensors that we know can move
            moved = torch.empty(0, dtype=tensor.dtype).set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = moved


def _tensor(shape: tuple[int, ...], dtype: Any, engine: Engine) -> Any:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}, but must be a torch.dtype")
    view = View(str(dtype).removeprefix("torch."), dtype.itemsize, shape, contiguous_strides(shape, dtype.itemsize))
    return as_tensor(_allocate(view.nbytes, engine), view) if view.nbytes else torch.empty(shape, dtype=dtype)


def _is_shared(storage: Any, engine: Engine) -> bool:
    start = storage.data_ptr()
    blocks = engine.shared_blocks.copy()  # in one step: a block may be freed at any time, by the garbage collector too
    return any(address <= start < address + size for address, size in blocks.items())


def _allocate(size: int, engine: Engine) -> Any:
    """A buffer over new shared memory, which is freed with the buffer."""
    error = scratch.error
    if size >= 2**63:
        raise RegistrationError(f"{size} bytes of shared memory are more than a process can have", operation="allocate")
    memory = lib.mr_shared_alloc(engine.handle, size, error)
    if memory == ffi.NULL:
        raise_error(error, error.kind, operation="allocate", size=size)
    address = int(ffi.cast("uintptr_t", memory))
    engine.shared_blocks[address] = size
    return bytes_at(address, size, _Release(engine, address))


class _Release:
    """Frees a piece of shared memory. Where its engine is closed already, the core frees it with the last anchor."""

    def __init__(self, engine: Engine, address: int) -> None:
        self._engine = engine
        self._address = address
        self._anchor = engine.anchor = engine.anchor or _Anchor(engine)

    def __call__(self, memory: Any) -> None:
        engine = self._engine
        engine.shared_blocks.pop(self._address, None)
        if engine.is_open and not self._free(memory):
            # Someone exchanged the memory under a region's tensor (share_memory_() does). It goes when the region does.
            engine.orphans.append((self._free, self._forget, memory, None))

    def _free(self, memory: Any) -> int:
        return int(lib.mr_shared_free(self._engine.handle, memory, ffi.NULL) == 0)

    def _forget(self, _: Any) -> None:
        self._anchor = None


class _Anchor:
    """Keeps the core's side of an engine, and with it all its memory, beyond the engine's close: a handle does that."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        region, op, error = ffi.new("mr_region **"), ffi.new("mr_op **"), scratch.error
        if kind := lib.mr_region_create(engine.handle, ffi.NULL, 0, lib.MR_READ, region, error):
            raise_error(error, kind, operation="allocate")
        self._handle = region[0]
        if kind := lib.mr_region_drop(self._handle, op, error):
            raise_error(error, kind, operation="allocate")
        lib.mr_op_release(op[0])

    def __del__(self) -> None:
        if not self._engine.is_forked:
            lib.mr_region_close(self._handle)
