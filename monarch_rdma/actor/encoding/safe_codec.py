"""The codec for links where pickles are not wanted: values of a few types, and nothing that runs code when decoded.

None, bool, int of any size, float, str, bytes, list, tuple, dict, numpy arrays of numbers, text or dates, and torch
tensors. Exactly these types: a subclass would come back as something else.

A stream is one item: a letter, and what belongs to it. Counts and lengths are 4 bytes, little-endian.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, ProtocolError
from .content import Content

if TYPE_CHECKING:
    from .tensors import TensorSet

__all__ = ["decode_safe", "encode_safe"]

_MAX_DEPTH = 100
_MAX_COUNT = 2**32
_MAX_DIMS = 64
_INT64 = range(-(2**63), 2**63)
_DTYPE = re.compile(r"[<|][biufcSU][0-9]{1,9}|<[mM]8(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")
_loaded = sys.modules

_count = struct.Struct("<I")
_int = struct.Struct("<q")
_float = struct.Struct("<d")
_array = struct.Struct("<IBBB")  # buffer's slot, order, dimensions, length of the dtype
_tensor = struct.Struct("<IB")  # slot, whether it requires a gradient


def encode_safe(value: Any) -> Content:
    """ConfigError naming the place of what is of another type, too deep, or too long."""
    encoder = _Encoder()
    encoder.add(value, (), 0)
    buffers = encoder.buffers
    rows: list[list[Any]] = []
    if encoder.tensors is not None:
        found, rows = encoder.tensors.plan(len(buffers))
        buffers += found
    return Content(b"".join(encoder.out), buffers, rows, encoder.slots)


class _Encoder:
    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.buffers: list[memoryview] = []
        self.slots: list[int] = []
        self.tensors: TensorSet | None = None

    def add(self, value: Any, path: tuple[str, ...], depth: int) -> None:
        """`path`: how to get from the whole to this value, as text."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value, path, depth)
        elif type(value) is getattr(_loaded.get("torch"), "Tensor", None):
            self._add_tensor(value, path)
        elif type(value) is getattr(_loaded.get("numpy"), "ndarray", None):
            self._add_array(value, path)
        else:
            kind = type(value)
            raise ConfigError(
                f"{_place(path)} is a {kind.__module__}.{kind.__qualname__}, which codec='safe' does not send; it "
                "sends None, bool, int, float, str, bytes, list, tuple, dict, arrays and tensors"
            )

    def add_bytes(self, letter: bytes, data: bytes, path: tuple[str, ...]) -> None:
        self.out += (letter, _length(data, path), data)

    def enter(self, letter: bytes, items: Any, path: tuple[str, ...], depth: int) -> None:
        if depth >= _MAX_DEPTH:
            raise ConfigError(f"{_place(path[:8])}... is nested deeper than {_MAX_DEPTH}, or contains itself")
        self.out += (letter, _length(items, path))

    def _add_tensor(self, tensor: Any, path: tuple[str, ...]) -> None:
        from .tensors import TensorSet, is_plain_tensor

        if not is_plain_tensor(tensor):
            raise ConfigError(
                f"{_place(path)} is a tensor that codec='safe' does not send ({tensor.layout}, {tensor.dtype}, on "
                f"{tensor.device}): only dense ones of the CPU, that are not quantised, lazy or with attributes"
            )
        self.tensors = self.tensors or TensorSet()
        self.out += (b"T", _tensor.pack(len(self.slots), tensor.requires_grad))
        self.slots.append(~self.tensors.add(tensor))

    def _add_array(self, array: Any, path: tuple[str, ...]) -> None:
        numpy = _loaded["numpy"]
        dtype = array.dtype.newbyteorder("<")
        if not _DTYPE.fullmatch(dtype.str):
            raise ConfigError(f"{_place(path)} is an array of {array.dtype}, which codec='safe' does not send")
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = numpy.ascontiguousarray(array.T if fortran else array, dtype).reshape(-1)
        name = dtype.str.encode()
        self.out += (b"A", _array.pack(len(self.slots), fortran, array.ndim, len(name)), name)
        self.out += map(_int.pack, array.shape)
        self.slots.append(len(self.buffers))
        self.buffers.append(memoryview(flat.view(numpy.uint8) if flat.nbytes else b""))


Writer = Callable[[_Encoder, Any, tuple[str, ...], int], None]


def _write_int(encoder: _Encoder, value: int, path: tuple[str, ...], _: int) -> None:
    if value in _INT64:
        encoder.out += (b"i", _int.pack(value))
    else:
        encoder.add_bytes(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), path)


def _write_items(letter: bytes) -> Writer:
    def write(encoder: _Encoder, items: Any, path: tuple[str, ...], depth: int) -> None:
        encoder.enter(letter, items, path, depth)
        for index, item in enumerate(items):
            encoder.add(item, (*path, f"[{index}]"), depth + 1)

    return write


def _write_dict(encoder: _Encoder, items: dict[Any, Any], path: tuple[str, ...], depth: int) -> None:
    encoder.enter(b"d", items, path, depth)
    for key, item in items.items():
        encoder.add(key, (*path, f" key {key!r:.50}"), depth + 1)
        encoder.add(item, (*path, f"[{key!r:.50}]"), depth + 1)


_WRITERS: dict[type, Writer] = {
    type(None): lambda encoder, *_: encoder.out.append(b"N"),
    bool: lambda encoder, value, *_: encoder.out.append(b"t" if value else b"f"),
    int: _write_int,
    float: lambda encoder, value, *_: encoder.out.extend((b"F", _float.pack(value))),
    str: lambda encoder, value, path, _: encoder.add_bytes(b"s", value.encode("utf-8", "surrogatepass"), path),
    bytes: lambda encoder, value, path, _: encoder.add_bytes(b"b", value, path),
    list: _write_items(b"l"),
    tuple: _write_items(b"u"),
    dict: _write_dict,
}


def _length(items: Any, path: tuple[str, ...]) -> bytes:
    if len(items) >= _MAX_COUNT:
        raise ConfigError(f"{_place(path)} has {len(items)} items or bytes, but codec='safe' sends fewer than 2**32")
    return _count.pack(len(items))


def _place(path: tuple[str, ...]) -> str:
    """`args[1]['x']` for the arguments of a call, which are sent as a pair of args and kwargs."""
    if path and path[0] in ("[0]", "[1]") and len(path) > 1:
        return ("args" if path[0] == "[0]" else "kwargs") + "".join(path[1:])
    return "value" + "".join(path)


# --- decoding


def decode_safe(stream: memoryview, taken: list[Any]) -> Any:
    """The value. ProtocolError where the stream is malformed; never more memory than a multiple of its length."""
    decoder = _Decoder(stream, taken)
    value = decoder.item(0)
    if decoder.at != len(stream):
        raise ProtocolError(f"a safe message has {len(stream) - decoder.at} bytes too many")
    return value


class _Decoder:
    def __init__(self, stream: memoryview, taken: list[Any]) -> None:
        self._stream = stream
        self._taken = taken
        self.at = 0

    def item(self, depth: int) -> Any:
        letter = bytes(self.bytes(1))
        read = _READERS.get(letter)
        if read is None:
            raise ProtocolError(f"a safe message has an item of the unknown kind {letter!r}")
        if depth > _MAX_DEPTH:
            raise ProtocolError(f"a safe message is nested deeper than {_MAX_DEPTH}")
        return read(self, depth)

    def bytes(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self._stream):
            raise ProtocolError(f"a safe message ends at byte {len(self._stream)}, within an item")
        data = self._stream[self.at : end]
        self.at = end
        return data

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.bytes(layout.size))

    def count(self, least: int) -> int:
        """A number of items, each of at least so many bytes."""
        (count,) = self.fields(_count)
        if count * least > len(self._stream) - self.at:
            raise ProtocolError(f"a safe message has {count} items announced, which its length cannot hold")
        return int(count)

    def text(self) -> str:
        try:
            return str(self.bytes(self.count(1)), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a safe message has text that is no UTF-8: {error}") from error

    def items(self, depth: int) -> list[Any]:
        return [self.item(depth + 1) for _ in range(self.count(1))]

    def dict(self, depth: int) -> dict[Any, Any]:
        count, found = self.count(2), {}
        for _ in range(count):
            key = self.item(depth + 1)
            try:
                found[key] = self.item(depth + 1)
            except TypeError as error:
                raise ProtocolError(f"a safe message has a {type(key).__name__} as a key") from error
        return found

    def tensor(self) -> Any:
        slot, requires_grad = self.fields(_tensor)
        tensor = self._take(slot)
        if isinstance(tensor, memoryview) or (
            requires_grad and not (tensor.is_floating_point() or tensor.is_complex())
        ):
            raise ProtocolError("a safe message has a tensor that cannot be one")
        return tensor.requires_grad_() if requires_grad else tensor

    def array(self) -> Any:
        slot, fortran, ndim, length = self.fields(_array)
        name = bytes(self.bytes(length)).decode("latin-1")
        if ndim > _MAX_DIMS or not _DTYPE.fullmatch(name):
            raise ProtocolError(f"a safe message has an array of dtype {name!r} and {ndim} dimensions")
        shape = tuple([self.fields(_int)[0] for _ in range(ndim)])
        data = self._take(slot)
        if not isinstance(data, memoryview) or any([count < 0 for count in shape]):
            raise ProtocolError(f"a safe message has an array of shape {shape} without bytes")
        import numpy

        try:
            array = numpy.ndarray(shape[::-1] if fortran else shape, numpy.dtype(name), data)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a safe message has an array that does not fit its bytes: {error}") from error
        if array.nbytes != len(data):
            raise ProtocolError(f"a safe message has an array of {array.nbytes} bytes with {len(data)}")
        return array.T if fortran else array

    def _take(self, slot: int) -> Any:
        if slot >= len(self._taken):
            raise ProtocolError(f"a safe message refers to buffer {slot} of {len(self._taken)}")
        return self._taken[slot]


Reader = Callable[[_Decoder, int], Any]
_READERS: dict[bytes, Reader] = {
    b"N": lambda decoder, _: None,
    b"t": lambda decoder, _: True,
    b"f": lambda decoder, _: False,
    b"i": lambda decoder, _: decoder.fields(_int)[0],
    b"I": lambda decoder, _: int.from_bytes(decoder.bytes(decoder.count(1)), "little", signed=True),
    b"F": lambda decoder, _: decoder.fields(_float)[0],
    b"s": lambda decoder, _: decoder.text(),
    b"b": lambda decoder, _: bytes(decoder.bytes(decoder.count(1))),
    b"l": lambda decoder, depth: decoder.items(depth),
    b"u": lambda decoder, depth: tuple(decoder.items(depth)),
    b"d": lambda decoder, depth: decoder.dict(depth),
    b"T": lambda decoder, _: decoder.tensor(),
    b"A": lambda decoder, _: decoder.array(),
}
