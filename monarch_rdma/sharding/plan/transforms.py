"""How a target tensor is made of source tensors: another name, a slice, other axes, another dtype, several in a row.

Source("model.wq")                              # another name
Source("model.qkv")[0:4096]                     # the query rows of a fused weight
Source("w").transpose(1, 0).cast()              # axes exchanged, and the dtype may be another
concatenate(Source("gate"), Source("up"))       # fused along dimension 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index as to_index
from typing import Any, TypeAlias

from .geometry import PlanError, Shape

__all__ = ["Concatenation", "Piece", "Source", "Transform", "concatenate"]


@dataclass(frozen=True)
class Piece:
    """A box of a source tensor that is a box of the target: axis d of the target is axis permutation[d] of the source.
    Starts and shape are in the target's axes.
    """

    source: str
    permutation: Shape
    source_start: Shape
    target_start: Shape
    shape: Shape
    may_cast: bool = False


@dataclass(frozen=True)
class Source:
    """A source tensor, by name. Each method and index returns another one."""

    name: str
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    may_cast: bool = False

    def __getitem__(self, key: slice | tuple[slice, ...]) -> Source:
        """A box of it: slices without steps, one a dimension from the first on."""
        keys = key if isinstance(key, tuple) else (key,)
        for part in keys:
            if not isinstance(part, slice) or part.step not in (None, 1):
                raise PlanError(f"{self.name}[{key!r}]: only slices without a step are known here")
        return replace(self, steps=(*self.steps, ("slice", tuple((part.start, part.stop) for part in keys))))

    def transpose(self, *axes: int) -> Source:
        """Axis d of the result is axis axes[d]."""
        return replace(self, steps=(*self.steps, ("transpose", tuple(to_index(axis) for axis in axes))))

    def cast(self) -> Source:
        """The target may have another dtype: values are converted when they have arrived."""
        return replace(self, may_cast=True)

    def pieces(self, shapes: Mapping[str, Shape]) -> tuple[list[Piece], Shape]:
        """The one piece, and the shape of the result. PlanError where there is no such source, or no such box."""
        if self.name not in shapes:
            raise PlanError(f"there is no source {self.name!r}")
        shape = list(shapes[self.name])
        axes, start = list(range(len(shape))), [0] * len(shape)
        for step, values in self.steps:
            if step == "transpose":
                if sorted(values) != list(range(len(shape))):
                    raise PlanError(f"transpose{values} of {self.name!r}: it has {len(shape)} dimensions")
                axes, start, shape = ([column[d] for d in values] for column in (axes, start, shape))
                continue
            if len(values) > len(shape):
                raise PlanError(f"{self.name!r} has {len(shape)} dimensions, but is sliced in {len(values)}")
            for dim, (low, high) in enumerate(values):
                begin, end = low or 0, shape[dim] if high is None else high
                if not 0 <= begin <= end <= shape[dim]:
                    raise PlanError(f"{self.name!r} has {shape[dim]} elements in dimension {dim}, not {begin}:{end}")
                start[dim] += begin
                shape[dim] = end - begin
        piece = Piece(self.name, tuple(axes), tuple(start), (0,) * len(shape), tuple(shape), self.may_cast)
        return [piece], tuple(shape)


@dataclass(frozen=True)
class Concatenation:
    """Several, one after another along a dimension."""

    members: tuple[Transform, ...]
    dim: int

    def cast(self) -> Concatenation:
        """As Source.cast, of all members."""
        return replace(self, members=tuple(member.cast() for member in self.members))

    def pieces(self, shapes: Mapping[str, Shape]) -> tuple[list[Piece], Shape]:
        """As Source.pieces; PlanError where the members do not fit."""
        pieces: list[Piece] = []
        whole: list[int] = []
        for member in self.members:
            found, shape = member.pieces(shapes)
            if not 0 <= self.dim < len(shape):
                raise PlanError(f"concatenation along dimension {self.dim} of tensors of {len(shape)} dimensions")
            whole = whole or [*shape[: self.dim], 0, *shape[self.dim + 1 :]]
            if [*shape[: self.dim], *shape[self.dim + 1 :]] != [*whole[: self.dim], *whole[self.dim + 1 :]]:
                raise PlanError(f"{found[0].source!r} has shape {shape}, which does not fit {tuple(whole)}")
            for piece in found:
                start = list(piece.target_start)
                start[self.dim] += whole[self.dim]
                pieces.append(replace(piece, target_start=tuple(start)))
            whole[self.dim] += shape[self.dim]
        return pieces, tuple(whole)


Transform: TypeAlias = "Source | Concatenation"


def concatenate(*members: Transform, dim: int = 0) -> Concatenation:
    """One tensor after another along dimension `dim`, which has to be said as a number from 0 on."""
    if not members:
        raise PlanError("a concatenation of nothing")
    return Concatenation(members, dim)
