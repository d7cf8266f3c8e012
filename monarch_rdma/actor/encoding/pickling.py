"""Values as pickles whose tensors and arrays stay outside of the stream. Imported when the first such value is sent.

By cloudpickle, so that functions and classes of `__main__` and of notebooks travel. A stream refers to what is outside
by position: pickle takes any object as an out-of-band buffer that is handed to `loads`, so tensors are handed over
finished, and what they share is decided when all of them are known.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

from .classes import ClassPickler
from .content import Content, passengers_noted

if TYPE_CHECKING:
    from .tensors import TensorSet

__all__ = ["in_one_stream", "pickled"]

_PROTOCOL = 5
_WRITABLE = bytearray()  # of a read-only buffer, loads wants a real one in its place
_loaded = sys.modules


def pickled(value: Any, in_band: int) -> Content:
    """The value as a stream and what is outside of it. Buffers below `in_band` bytes are copied into the stream.

    Raises what pickling raises: TypeError or PicklingError for what cannot be pickled.
    """
    out, outside = io.BytesIO(), _Outside(in_band)
    with passengers_noted() as passengers:
        _Pickler(out, outside).dump(value)
    buffers = outside.buffers
    rows: list[list[Any]] = []
    if outside.tensors is not None:
        found, rows = outside.tensors.plan(len(buffers))
        buffers += found
    return Content(out.getvalue(), buffers, rows, outside.slots, passengers)


def in_one_stream(value: Any) -> bytes:
    """A pickle with nothing outside of it."""
    out = io.BytesIO()
    ClassPickler(out, protocol=_PROTOCOL).dump(value)
    return out.getvalue()


class _Outside:
    """What stays outside of a stream. It does not know its pickler: a cycle of the two would leave buffers to the
    garbage collector, and CPython up to 3.11 crashes where that frees a memoryview before a PickleBuffer on it.
    """

    def __init__(self, in_band: int) -> None:
        self.buffers: list[memoryview] = []
        self.slots: list[int] = []  # what the stream takes, in order: buffer i as i, tensor i as ~i
        self.tensors: TensorSet | None = None
        self._in_band = in_band
        self._tokens: list[pickle.PickleBuffer] = []  # by number: what stands for the tensor
        self._numbers: dict[int, int] = {}  # by the id of a token

    def keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's question about each buffer that it comes to; notes those that stay outside."""
        number = self._numbers.get(id(buffer))
        if number is not None:
            self.slots.append(~number)
            return False
        raw = buffer.raw()
        if raw.nbytes < self._in_band or not raw.nbytes:
            return True
        self.slots.append(len(self.buffers))
        self.buffers.append(raw)
        return False

    def token(self, tensor: Any) -> pickle.PickleBuffer:
        """What the stream takes for a plain tensor."""
        return self._token(self._tensor_set().add(tensor))

    def token_of_storage(self, storage: Any) -> pickle.PickleBuffer:
        """What the stream takes for all bytes of a storage, as a tensor."""
        return self._token(self._tensor_set().add_storage(storage))

    def _tensor_set(self) -> TensorSet:
        if self.tensors is None:
            from .tensors import TensorSet

            self.tensors = TensorSet()
        return self.tensors

    def _token(self, number: int) -> pickle.PickleBuffer:
        token = pickle.PickleBuffer(_WRITABLE)
        self._tokens.append(token)
        self._numbers[id(token)] = number
        return token


class _Pickler(ClassPickler):
    def __init__(self, out: io.BytesIO, outside: _Outside) -> None:
        super().__init__(out, protocol=_PROTOCOL, buffer_callback=outside.keep_in_band)
        self._outside = outside
        self._reducers = _reducers()

    def reducer_override(self, obj: Any) -> Any:
        reducer = self._reducers.get(type(obj))
        reduced = reducer(self._outside, obj) if reducer is not None else NotImplemented
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


_FILE_LEFT_OUT = "<dynamic-code>"
Reducer = Callable[[_Outside, Any], Any]
_known: dict[type, Reducer] = {}
_known_of: set[str] = set()


def _reducers() -> dict[type, Reducer]:
    """Our own reducers, by type; those of torch's and numpy's types once the program has imported these."""
    if not _known_of:
        _known[memoryview] = _reduce_memoryview
        _known[types.CodeType] = _reduce_code
        _known_of.add("")
    numpy: Any = _loaded.get("numpy")
    if numpy is not None and "numpy" not in _known_of and hasattr(numpy, "ndarray"):
        _known[numpy.ndarray] = _reduce_array
        _known_of.add("numpy")
    torch: Any = _loaded.get("torch")
    if torch is not None and "torch" not in _known_of and hasattr(torch, "compile"):  # not amidst its import
        _known[torch.Tensor] = _reduce_tensor
        _known[torch.storage.TypedStorage] = _reduce_typed_storage
        _known[torch.UntypedStorage] = _reduce_storage
        _known_of.add("torch")
    return _known


def _reduce_tensor(outside: _Outside, tensor: Any) -> Any:
    from .tensors import is_plain_tensor

    if not is_plain_tensor(tensor):
        return NotImplemented  # torch's own reduction, which comes back to us with its storages
    return (_with_grad if tensor.requires_grad else _same), (outside.token(tensor),)


def _reduce_storage(outside: _Outside, storage: Any) -> Any:
    if storage.device.type != "cpu":
        return NotImplemented
    return _storage_of, (outside.token_of_storage(storage),)


def _reduce_typed_storage(outside: _Outside, storage: Any) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu":
        return NotImplemented
    return _typed_storage_of, (outside.token_of_storage(untyped), storage.dtype)


def _reduce_array(_: _Outside, array: Any) -> Any:
    """numpy's own reduction, where it knows how to keep the bytes out of the stream; else of an array that it does."""
    if array.dtype.hasobject or not array.nbytes:
        return NotImplemented
    numpy = _loaded["numpy"]
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = numpy.ascontiguousarray(array)
    if array.dtype.kind in "mM":  # dates have no buffer protocol
        return _viewed_as, (array.view(numpy.int64), array.dtype)
    return array.__reduce_ex__(_PROTOCOL)


def _reduce_memoryview(_: _Outside, view: memoryview) -> Any:
    if not (view.c_contiguous and view.nbytes and view.ndim and len(view.format) == 1):
        return NotImplemented  # bytes, then
    return _memoryview_of, (pickle.PickleBuffer(view), view.format, view.shape)


def _reduce_code(_: _Outside, code: types.CodeType) -> Any:
    """As cloudpickle does, but with the file: tracebacks and debuggers show the source where the file is."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if each == _FILE_LEFT_OUT else each for each in arguments)


# --- what streams name; they must stay importable here


def _same(tensor: Any) -> Any:
    return tensor


def _with_grad(tensor: Any) -> Any:
    return tensor.requires_grad_()


def _storage_of(tensor: Any) -> Any:
    return tensor.untyped_storage()


def _typed_storage_of(tensor: Any, dtype: Any) -> Any:
    import torch

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=tensor.untyped_storage(), dtype=dtype, _internal=True)


def _viewed_as(array: Any, dtype: Any) -> Any:
    return array.view(dtype)


def _memoryview_of(data: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(data).cast("B")
    return view if format == "B" and len(shape) == 1 else view.cast(format, shape)  # type: ignore[call-overload]
