"""What is this object's memory? Tensors, numpy arrays, memoryviews and bytearrays as address and view.

torch is looked at only when the program has imported it: a process that moves memoryviews never loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._engine import ffi
from ..errors import ConfigError
from .view import View, contiguous_strides

__all__ = ["Keep", "Memory", "as_memoryview", "as_tensor", "bytes_at", "memory_of", "note_written"]

_loaded = sys.modules

# Formats of the struct module, by torch's and numpy's names.
_FORMATS = {
    "?": "bool", "c": "uint8", "b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32",
    "q": "int64", "Q": "uint64", "n": "int64", "N": "uint64", "e": "float16", "f": "float32", "d": "float64",
    "Zf": "complex64", "Zd": "complex128", "F": "complex64", "D": "complex128",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes of this process: where they are, what they mean, and the object that keeps them there."""

    address: int
    view: View
    writable: bool
    pin: object
    tensor: Any = None  # where it is one


def memory_of(obj: Any, argument: str) -> Memory:
    """The memory of obj. ConfigError naming `argument` where it has none that this process can reach."""
    torch = _loaded.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _of_tensor(torch, obj, argument)
    numpy = _loaded.get("numpy")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return _of_array(obj, argument)
    return _of_buffer(obj, argument)


def _of_tensor(torch: Any, tensor: Any, argument: str) -> Memory:
    what = f"{argument} is a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ConfigError(f"{what} with layout {tensor.layout}: only dense, strided tensors can be moved")
    if tensor.is_quantized:
        raise ConfigError(f"{what}: a quantised tensor's bytes mean nothing without its scale; pass tensor.int_repr()")
    if tensor.device.type == "meta":
        raise ConfigError(f"{what} on the meta device: it has no memory")
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"{what} on {tensor.device}: this build reaches only the memory of the CPU; pass tensor.cpu()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(f"{what} that is a lazy conjugate or negative; pass tensor.resolve_conj().resolve_neg()")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(
        tensor, "__tensor_flatten__"
    ):
        raise ConfigError(f"{what} of class {type(tensor).__name__}, which wraps other tensors; pass the one it holds")
    try:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{what} of class {type(tensor).__name__}: it has no memory of its own") from error
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    view = View(str(tensor.dtype).removeprefix("torch."), itemsize, tuple(tensor.shape), strides)
    if view.nbytes and (address == 0 or tensor.storage_offset() * itemsize + view.extent > storage.nbytes()):
        raise ConfigError(f"{what}, but its storage has only {storage.nbytes()} bytes (resized, or never allocated)")
    return Memory(address, view, True, storage, tensor)


def _of_array(array: Any, argument: str) -> Memory:
    what = f"{argument} is an array of shape {array.shape} and dtype {array.dtype}"
    if array.dtype.hasobject:
        raise ConfigError(f"{what}: Python objects cannot be moved between processes")
    if not array.dtype.isnative:
        raise ConfigError(f"{what}: its byte order is not this machine's")
    if any(stride < 0 for count, stride in zip(array.shape, array.strides, strict=True) if count > 1):
        raise ConfigError(f"{what} with strides {array.strides}: negative strides cannot be moved; pass array.copy()")
    address, read_only = array.__array_interface__["data"]
    strides = tuple(max(0, stride) for stride in array.strides)
    view = View(array.dtype.name, max(1, array.dtype.itemsize), array.shape, strides)
    return Memory(address, view, not read_only, array)


def _of_buffer(obj: Any, argument: str) -> Memory:
    try:
        memory = memoryview(obj)
    except TypeError as error:
        raise ConfigError(
            f"{argument} is a {type(obj).__name__}, but must be a tensor, a numpy array, a memoryview or a bytearray"
        ) from error
    if not memory.c_contiguous:
        import numpy  # only it tells the address of a strided memoryview

        return _of_array(numpy.asarray(memory), argument)
    letters = memory.format.lstrip("@=<" if sys.byteorder == "little" else "@=>!")
    dtype = _FORMATS.get(letters)
    if letters in ("l", "L"):
        dtype = f"{'u' if letters == 'L' else ''}int{8 * memory.itemsize}"
    if dtype is None and ("O" in letters or "P" in letters):
        raise ConfigError(f"{argument} has the format {memory.format!r}: pointers cannot be moved between processes")
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(memory))) if memory.nbytes else 0
    shape = tuple(memory.shape or ())
    view = View(dtype or f"format {letters}", memory.itemsize, shape, contiguous_strides(shape, memory.itemsize))
    return Memory(address, view, not memory.readonly, memory)


class Keep:
    """Keeps an object alive as long as a buffer of bytes_at lives."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __call__(self, _: object) -> None:
        self._held = None


def bytes_at(address: int, size: int, on_release: Callable[[Any], None]) -> Any:
    """A writable buffer over memory of this process; `on_release` is called when the last view of it is gone."""
    return ffi.buffer(ffi.gc(ffi.cast("char *", address), on_release, size), size)


def as_tensor(data: Any, view: View) -> Any:
    """A tensor over the bytes of a buffer that `view` describes. It keeps the buffer alive."""
    import torch

    dtype = getattr(torch, view.dtype)
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=dtype)
    if any(step % view.itemsize for step in (view.offset, *view.strides)):
        raise ConfigError(
            f"a tensor of {view.dtype} cannot start at offset {view.offset} with strides {view.strides} (bytes)"
        )
    storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    strides = [stride // view.itemsize for stride in view.strides]
    return torch.empty(0, dtype=dtype).set_(storage, view.offset // view.itemsize, view.shape, strides)


def as_memoryview(data: Any, view: View) -> memoryview:
    """A memoryview over the bytes of a buffer that `view` describes; of bytes where its dtype has no struct format."""
    if not view.is_contiguous:
        import numpy

        return memoryview(numpy.ndarray(view.shape, view.dtype, data, view.offset, view.strides))
    flat = memoryview(data).cast("B")[view.offset : view.offset + view.nbytes]
    letter = next((letter for letter, name in _FORMATS.items() if name == view.dtype and len(letter) == 1), "B")
    if view.dtype == "uint8" or letter in "eFDn" or 0 in view.shape:
        letter = "B"
    return flat.cast(letter, view.shape) if view.shape and 0 not in view.shape and letter != "B" else flat


def note_written(tensor: Any) -> None:
    """Tells autograd that the tensor's values change, as an in-place operation would: a stale gradient is an error
    then.
    """
    if not tensor.is_inference():
        _loaded["torch"].autograd.graph.increment_version(tensor)
