"""What is this object's memory? Tensors, numpy arrays, memoryviews and bytearrays as address and view.

torch is looked at only when the program has imported it: a process that moves memoryviews never loads it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._engine import ffi
from ..errors import ConfigError, OutOfBounds, ProtocolError
from .view import View, contiguous_strides

__all__ = ["Keep", "LastTensor", "Memory", "as_memoryview", "as_tensor", "bytes_at", "memory_of", "note_written"]

_loaded = sys.modules

# Letters of the struct module that memoryview.cast knows, by torch's and numpy's names of the types.
_LETTERS = {
    "bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "uint64": "Q", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip
_FORMATS = {letter: name for name, letter in _LETTERS.items()} | {
    "c": "uint8", "n": "int64", "N": "uint64", "e": "float16", "Zf": "complex64", "Zd": "complex128",
    "F": "complex64", "D": "complex128",
}  # fmt: skip
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True)
class Memory:
    """Bytes of this process: where they are, what they mean, and the object that keeps them there."""

    address: int
    view: View
    writable: bool
    pin: object
    tensor: Any = None  # where it is one
    on_device: bool = False  # memory of a GPU, which only the GPU's runtime may touch
    stream: int = 0  # on which it is ready, where the object says so

    def current_stream(self) -> int:
        """The stream that work on it is queued on now, as the runtime's pointer."""
        if self.tensor is None:
            return self.stream
        return int(_loaded["torch"].cuda.current_stream(self.tensor.device).cuda_stream)

    def part(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Memory:
        """These elements of it, which are in it, as torch.as_strided has them."""
        view = self.view
        steps = tuple([stride * view.itemsize for stride in strides])
        if not offset and shape == view.shape and steps == view.strides:
            return self
        part, address = View(view.dtype, view.itemsize, shape, steps), self.address + offset * view.itemsize
        return Memory(address, part, self.writable, self.pin, self.tensor, self.on_device, self.stream)


def memory_of(obj: Any, argument: str, *, devices: bool = False) -> Memory:
    """The memory of obj, which may be one. ConfigError naming `argument` where it has none that this process can reach,
    or is memory of a GPU where `devices` does not say that this will do.
    """
    if isinstance(obj, Memory):
        return obj
    torch: Any = _loaded.get("torch")
    if isinstance(obj, getattr(torch, "Tensor", ())):  # another thread may be just importing it
        return _of_tensor(torch, obj, argument, devices)
    if isinstance(obj, getattr(_loaded.get("numpy"), "ndarray", ())):
        return _of_array(obj, argument)
    if devices and isinstance(getattr(obj, "__cuda_array_interface__", None), dict):
        return _of_cuda_array(obj, argument)
    return _of_buffer(obj, argument)


class LastTensor:
    """Where the memory of a plain tensor begins: contiguous, on the CPU, of a given dtype and size (not 0 bytes). Looks
    only briefly at one that it has just seen.
    """

    __slots__ = ("_address", "_dtype", "_nbytes", "_ref")

    def __init__(self, dtype: Any, nbytes: int) -> None:
        """`dtype`: torch's; None makes everything need a closer look."""
        self._dtype = dtype
        self._nbytes = nbytes
        self._ref: Callable[[], Any] = _nobody
        self._address = 0

    def address_of(self, obj: Any) -> int:
        """0 for whatever needs a closer look: see memory_of."""
        if (
            obj is self._ref() is not None
            and obj.data_ptr() == self._address
            and obj.is_contiguous()
            and obj.dtype is self._dtype
            and obj.nbytes == self._nbytes
        ):
            return self._address
        return self._look(obj)

    def _look(self, obj: Any) -> int:
        torch: Any = _loaded.get("torch")
        if (
            self._dtype is None
            or type(obj) is not getattr(torch, "Tensor", None)
            or obj.dtype is not self._dtype
            or obj.layout is not torch.strided
            or not obj.is_cpu
            or obj.is_nested
            or not obj.nbytes == self._nbytes > 0
            or not obj.is_contiguous()
            or obj.is_conj()
            or obj.is_neg()
            or obj.untyped_storage().nbytes() < self._nbytes + obj.storage_offset() * obj.element_size()
        ):
            return 0
        address = int(obj.data_ptr())
        self._ref, self._address = weakref.ref(obj), address
        return address


def _nobody() -> None:
    return None


def _of_tensor(torch: Any, tensor: Any, argument: str, devices: bool) -> Memory:
    if tensor.is_nested:
        raise ConfigError(f"{argument} is a nested tensor: only dense, strided tensors can be moved")
    if why := _why_unreachable(torch, tensor, devices):
        raise ConfigError(f"{argument} is a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}{why}")
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != ("cuda" if tensor.is_cuda else "cpu"):
            raise RuntimeError(f"its memory is on {storage.device}")  # a fake tensor
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{argument} is a {type(tensor).__name__} that has no memory of its own") from error
    itemsize = tensor.element_size()
    strides = tuple([stride * itemsize for stride in tensor.stride()])
    view = View(str(tensor.dtype)[6:], itemsize, tuple(tensor.shape), strides)  # without "torch."
    if view.nbytes and (address == 0 or tensor.storage_offset() * itemsize + view.extent > storage.nbytes()):
        raise ConfigError(
            f"{argument} is a tensor of {view.nbytes} bytes, but its storage has only {storage.nbytes()} "
            "(it was resized, or never allocated)"
        )
    return Memory(address, view, True, storage, tensor, on_device=bool(tensor.is_cuda and view.nbytes))


def _why_unreachable(torch: Any, tensor: Any, devices: bool) -> str:
    """Why the tensor's values are not simply in memory of this process; "" where they are."""
    if tensor.layout is not torch.strided:
        return f" with layout {tensor.layout}: only dense, strided tensors can be moved"
    if tensor.is_quantized:
        return ": a quantised tensor's bytes mean nothing without its scale; pass tensor.int_repr()"
    if tensor.is_meta:
        return " on the meta device: it has no memory"
    if not tensor.is_cpu and not (tensor.is_cuda and devices):
        return f" on {tensor.device}: here only memory of the CPU will do; pass tensor.cpu()"
    if tensor.is_conj() or tensor.is_neg():
        return " that is a lazy conjugate or negative; pass tensor.resolve_conj().resolve_neg()"
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        return f" of class {type(tensor).__name__}, which wraps other tensors; pass the one it holds"
    return ""


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


def _of_cuda_array(obj: Any, argument: str) -> Memory:
    """By the CUDA array interface, which arrays on AMD's GPUs have under the same name."""
    interface = obj.__cuda_array_interface__
    try:
        (address, read_only), shape = interface["data"], tuple(interface["shape"])
        order, kind, itemsize = interface["typestr"][0], interface["typestr"][1], int(interface["typestr"][2:])
        strides = tuple(interface.get("strides") or contiguous_strides(shape, itemsize))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{argument} has a malformed __cuda_array_interface__: {interface!r:.200}") from error
    if kind not in _KINDS or order == (">" if sys.byteorder == "little" else "<"):
        raise ConfigError(f"{argument} has elements of type {interface['typestr']!r}, which cannot be moved")
    if any(stride < 0 for count, stride in zip(shape, strides, strict=True) if count > 1):
        raise ConfigError(f"{argument} has strides {strides}: negative strides cannot be moved; pass a copy")
    if interface.get("mask") is not None:
        raise ConfigError(f"{argument} has a mask, which cannot be moved")
    dtype = "bool" if kind == "b" else f"{_KINDS[kind]}{8 * itemsize}"
    view = View(dtype, itemsize, shape, tuple(max(0, stride) for stride in strides))
    stream = interface.get("stream") or 0
    return Memory(
        int(address), view, not read_only, obj, on_device=bool(view.nbytes), stream=0 if stream == 1 else int(stream)
    )


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

    dtype = getattr(torch, view.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != view.itemsize:
        raise ProtocolError(f"{view.dtype!r} of {view.itemsize} bytes is no dtype of torch {torch.__version__}")
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=dtype)
    _check_inside(data, view)
    if any(step % view.itemsize for step in (view.offset, *view.strides)):
        raise ConfigError(
            f"a {view.dtype} tensor cannot start at byte {view.offset} with strides of {view.strides} bytes"
        )
    storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    strides = [stride // view.itemsize for stride in view.strides]
    return torch.empty(0, dtype=dtype).set_(storage, view.offset // view.itemsize, view.shape, strides)


def as_memoryview(data: Any, view: View) -> memoryview:
    """A memoryview over the bytes of a buffer that `view` describes; of flat bytes where its dtype has no letter."""
    _check_inside(data, view)
    if not view.is_contiguous:
        import numpy

        try:
            return memoryview(numpy.ndarray(view.shape, view.dtype, data, view.offset, view.strides))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a strided memoryview of {view.dtype} cannot be made: {error}") from error
    flat = memoryview(data).cast("B")[view.offset : view.offset + view.nbytes]
    letter = _LETTERS.get(view.dtype)
    if letter is None or 0 in view.shape:
        return flat
    return flat.cast(letter, view.shape)  # type: ignore[call-overload,no-any-return]


def _check_inside(data: Any, view: View) -> None:
    if view.offset + view.extent > memoryview(data).nbytes:
        raise OutOfBounds(f"a view up to byte {view.offset + view.extent} of memory of {memoryview(data).nbytes} bytes")


def note_written(what: Any) -> None:
    """Tells autograd that the values of a tensor, or of a list of them, change, as an in-place operation would: a stale
    gradient is an error then. Inference tensors are left alone.
    """
    (_increment_version or _find_increment_version())((what,) if what.__class__ is not list else what)


_increment_version: Callable[[Any], None] | None = None


def _find_increment_version() -> Callable[[Any], None]:
    """The public function looks at what it is given, which takes as long as the rest."""
    global _increment_version
    torch: Any = _loaded["torch"]
    public = torch.autograd.graph.increment_version
    found: Callable[[Any], None] = getattr(torch._C, "_increment_version", public)
    _increment_version = found
    return found
