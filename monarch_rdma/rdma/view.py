"""Which bytes of a piece of memory, in which order: shape, strides and dtype as integers and a name. No memory here.

A `View` describes both ends of a transfer. The core wants it as an `mr_view` (csrc/engine.h): contiguous runs, and
counts and strides in bytes of the dimensions that remain after contiguous ones are merged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import index as to_index
from typing import Any

from .._engine import ffi
from ..errors import ConfigError, OutOfBounds, ProtocolError
from .once import once

__all__ = ["View", "contiguous_strides", "merge"]

_MAX_DIMS = 16  # MR_MAX_DIMS
_MAX_BYTES = 2**63


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    strides = []
    step = itemsize
    for count in reversed(shape):
        strides.append(step)
        step *= max(count, 1)
    return tuple(reversed(strides))


def merge(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, list[int], list[int]]:
    """The bytes of a contiguous run, and counts and strides in bytes of the dimensions around it, outermost first."""
    run = itemsize
    counts: list[int] = []
    steps: list[int] = []
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count == 0:
            return 0, [], []
        if count == 1:
            continue
        if not counts and stride == run:
            run *= count
        elif counts and stride == steps[-1] * counts[-1]:
            counts[-1] *= count
        else:
            counts.append(count)
            steps.append(stride)
    return run, counts[::-1], steps[::-1]


@dataclass(frozen=True)
class View:
    """n-dimensional, strided elements at `offset` bytes from some start. Strides are bytes, never negative."""

    dtype: str  # torch's and numpy's name: "float32", "bfloat16", ...
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @once
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)

    @once
    def merged(self) -> tuple[int, list[int], list[int]]:
        return merge(self.shape, self.strides, self.itemsize)

    @once
    def is_contiguous(self) -> bool:
        return not self.merged[1]

    @once
    def extent(self) -> int:
        """Bytes from `offset` to one past the furthest byte; 0 where there are none."""
        if self.nbytes == 0 or self.is_contiguous:
            return self.nbytes
        return self.itemsize + sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True))

    @once
    def overlaps_itself(self) -> bool:
        """Whether two elements may share a byte. Nested strides are told apart; stranger ones count as overlapping."""
        reach, counts, steps = self.merged
        for stride, count in sorted(zip(steps, counts, strict=True)):
            if stride < reach:
                return True
            reach += (count - 1) * stride
        return False

    @once
    def c_view(self) -> Any:
        """This as an `mr_view *`."""
        run, counts, steps = self.merged
        if len(counts) > _MAX_DIMS:
            raise ConfigError(
                f"a view of shape {self.shape} has {len(counts)} dimensions that cannot be merged; "
                f"{_MAX_DIMS} is the most; make it contiguous"
            )
        return ffi.new("mr_view *", (self.offset, run, len(counts), counts, steps))

    def prefix(self, nbytes: int) -> View:
        """The first bytes of a contiguous view, as uint8."""
        return View("uint8", 1, (nbytes,), (1,), self.offset)

    def __getitem__(self, key: Any) -> View:
        """Basic slicing as in numpy: integers, slices with positive steps, `...` and None. No element is touched."""
        keys = list(key) if isinstance(key, tuple) else [key]
        dims = len(self.shape)
        used = sum(1 for part in keys if part is not None and part is not Ellipsis)
        if keys.count(Ellipsis) > 1 or used > dims:
            raise OutOfBounds(f"index {key!r} has {used} dimensions, but the buffer has {dims}: shape {self.shape}")
        at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
        keys[at : at + 1] = [slice(None)] * (dims - used)
        offset, shape, strides, dim = self.offset, [], [], 0
        for part in keys:
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            count, stride = self.shape[dim], self.strides[dim]
            if isinstance(part, slice):
                start, step, kept = _slice(part, count, key)
                shape.append(kept)
                strides.append(stride * step)
            else:
                start = _position(part, count, dim, key)
            offset += start * stride
            dim += 1
        if 0 in shape:
            offset = self.offset
        return replace(self, offset=offset, shape=tuple(shape), strides=tuple(strides))

    def to_json(self) -> list[Any]:
        return [self.dtype, self.itemsize, list(self.shape), list(self.strides), self.offset]

    @classmethod
    def from_json(cls, data: object) -> View:
        """Checks everything: the data came from another process."""
        fields: Any = data
        try:
            dtype, itemsize, shape, strides, offset = fields
            numbers = [itemsize, *shape, *strides, offset]
            good = isinstance(dtype, str) and len(dtype) <= 64 and len(shape) == len(strides) <= 64
            good = good and all(type(number) is int and 0 <= number < _MAX_BYTES for number in numbers)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a buffer's view is malformed: {data!r:.200}") from error
        view = cls(dtype, itemsize, tuple(shape), tuple(strides), offset) if good else None
        if view is None or itemsize < 1 or view.nbytes >= _MAX_BYTES or view.offset + view.extent >= _MAX_BYTES:
            raise ProtocolError(f"a buffer's view is malformed: {data!r:.200}")
        return view


def _slice(part: slice, count: int, key: Any) -> tuple[int, int, int]:
    """Start, step and number of elements."""
    try:
        start, stop, step = part.indices(count)
    except (TypeError, ValueError) as error:
        raise OutOfBounds(f"index {key!r}: {error}") from error
    if step < 0:
        raise OutOfBounds(f"index {key!r} has the negative step {step}; steps must be positive")
    return start, step, max(0, -(-(stop - start) // step))


def _position(part: Any, count: int, dim: int, key: Any) -> int:
    if isinstance(part, bool):
        raise OutOfBounds(f"index {key!r}: booleans do not index a buffer")
    try:
        position = to_index(part)
    except TypeError as error:
        raise OutOfBounds(
            f"index {key!r}: a {type(part).__name__} does not index a buffer; only integers and slices do"
        ) from error
    if not -count <= position < count:
        raise OutOfBounds(f"index {key!r}: {position} is outside dimension {dim} of {count} elements")
    return position % count
