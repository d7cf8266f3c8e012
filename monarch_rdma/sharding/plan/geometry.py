"""What a plan has to know of a layout, as `monarch_rdma.sharding.layout` has it. Integers only; nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Grid", "IntArray", "Layout", "PlanError", "Segments", "Shape", "TensorSpec", "itemsize"]

IntArray: TypeAlias = npt.NDArray[np.int64]
Shape: TypeAlias = "tuple[int, ...]"


class PlanError(ValueError):
    """There is no way from these sources to these targets; the message names the tensor."""


class Segments(Protocol):
    """One dimension's indices, dealt out to parts: row i says where part[i] has size[i] of them from start[i] on."""

    @property
    def part(self) -> IntArray: ...
    @property
    def start(self) -> IntArray: ...
    @property
    def size(self) -> IntArray: ...
    @property
    def at(self) -> IntArray: ...
    @property
    def part_sizes(self) -> IntArray: ...
    @property
    def num_parts(self) -> int: ...
    def __hash__(self) -> int: ...


class Grid(Protocol):
    """A product of dealt dimensions: tiles, numbered row-major by their parts, and the ranks that hold each."""

    @property
    def segments(self) -> Sequence[Segments]: ...
    @property
    def parts(self) -> Shape: ...
    @property
    def holders(self) -> IntArray: ...
    @property
    def origin(self) -> IntArray | None: ...
    @property
    def local_shapes(self) -> IntArray | None: ...


class Layout(Protocol):
    """Which rank has which elements of a tensor. Hashable: plans for equal layouts are equal."""

    @property
    def shape(self) -> Shape: ...
    @property
    def is_partial(self) -> bool: ...
    @property
    def ranks(self) -> IntArray: ...
    def grids(self, low: Sequence[int] | None = None, high: Sequence[int] | None = None) -> Sequence[Grid]: ...
    def tiles(self, rank: int) -> Sequence[tuple[Grid, int, int]]: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's layout and dtype, by torch's name of it: "bfloat16"."""

    layout: Layout
    dtype: str

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        object.__setattr__(self, "_hash", hash((self.layout, self.dtype)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]


@lru_cache(64)
def itemsize(dtype: str) -> int:
    """Bytes of an element of this dtype ("float32", "float8_e4m3fn", "bool", ...). PlanError for any other name."""
    if dtype in ("bool", "float4_e2m1fn_x2"):  # the latter: two numbers in one element
        return 1
    match = re.fullmatch(r"(?:u?int|b?float|complex)(8|16|32|64|128)(?:_\w+)?", dtype)
    if match is None:
        raise PlanError(f"dtype is {dtype!r}, which is no dtype of whole bytes")
    return int(match[1]) // 8
