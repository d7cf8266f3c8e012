"""A tensor whose parts are on several ranks, as one value: look at it, slice it, compute with it, place it otherwise.

w = ShardedTensor(layout, part)              # on each rank, with its part
w.redistribute(other_layout)                 # moves only what is missing
w[10:20].full()                              # elements by their place in the whole tensor
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from .dtensor import device_mesh, dtype_name, layout_of, local_tensor, mesh_of, torch_placements
from .gathering import Gathering
from .layout import Box, BoxLayout, Layout, LayoutError, Mesh, Part
from .offer import AnyLayout, Offer
from .plan.drawing import Drawing, Panel, Rectangle, colours_of, draw
from .state_dict import Reader, publish

__all__ = ["ShardedTensor"]

_NAME = "sharded tensor"
_MOST_LINES, _MOST_BOXES = 8, 4  # of a repr
_MOST_DRAWN = 4096  # boxes

Index: TypeAlias = "int | slice | Any"
Function: TypeAlias = Callable[[Any, Any], Any]


def _binary(function: Function, *, swapped: bool = False) -> Any:
    def method(self: ShardedTensor, other: Any) -> Any:
        return self._combined(function, other, swapped)

    return method


class ShardedTensor:
    """Of `shape`, `dtype` and `layout`; `parts` are the local tensors that this process has, by rank.

    A process is one rank of the layout, or none of them: the one it has in torch.distributed. Where that is not in use
    and no `rank` is said, this process is all ranks.

    `full` and `redistribute` are called by all ranks that have a part before or afterwards, in the same order.
    """

    def __init__(
        self,
        layout: AnyLayout,
        parts: torch.Tensor | Mapping[int, torch.Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        store: Any = None,
    ) -> None:
        """`parts`: the local tensor of this rank, or those of several by rank; None where this process has none, and
        then its `dtype` is needed. `store`: through which ranks find each other; torch.distributed's by default.

        ConfigError for parts that are missing, too many, of several dtypes, or not of the shape that the layout says.
        """
        in_use = dist.is_available() and dist.is_initialized()
        self.layout = layout
        self.rank = dist.get_rank() if rank is None and in_use else rank
        self._store = dist.distributed_c10d._get_default_store() if store is None and in_use else store
        here = [rank for rank in layout.ranks.tolist() if self.rank in (None, rank)]
        if isinstance(parts, torch.Tensor):
            if len(here) != 1:
                raise ConfigError(f"parts is one tensor, but this process is {here} of {layout}")
            parts = {here[0]: parts}
        parts = parts or {}
        if sorted(parts) != sorted(here):
            raise ConfigError(f"parts are of the ranks {sorted(parts)}, but this process is {sorted(here)} of {layout}")
        self.parts = {rank: parts[rank] for rank in here}
        for rank, part in self.parts.items():
            if tuple(part.shape) != layout.part(rank).shape:
                raise ConfigError(
                    f"the part of rank {rank} has shape {tuple(part.shape)}, but by its layout "
                    f"{layout.part(rank).shape}"
                )
        dtypes = {part.dtype for part in self.parts.values()} | ({dtype} if dtype is not None else set())
        if len(dtypes) != 1:
            raise ConfigError(f"dtype is {dtype}, but the parts here are {sorted(map(dtype_name, dtypes))}")
        (self.dtype,) = dtypes

    def _like(self, layout: AnyLayout, parts: Mapping[int, torch.Tensor], dtype: torch.dtype) -> ShardedTensor:
        return ShardedTensor(layout, parts, dtype=dtype, rank=self.rank, store=self._store)

    # --- from and to other tensors

    @classmethod
    def distribute(
        cls, whole: torch.Tensor, layout: AnyLayout, *, rank: int | None = None, store: Any = None
    ) -> ShardedTensor:
        """The parts of this process, cut out of a tensor that it has in whole. ConfigError for another shape."""
        if tuple(whole.shape) != layout.shape:
            raise ConfigError(f"whole has shape {tuple(whole.shape)}, but the layout {layout.shape}")
        in_use = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if rank is None and in_use else rank
        here = [one for one in layout.ranks.tolist() if rank in (None, one)]
        parts = {}
        for one in here:
            parts[one] = whole.new_zeros(layout.part(one).shape)
            for box in layout.part(one).boxes:
                parts[one][_slices(box.at, box.size)] = whole[_slices(box.start, box.size)]
        return cls(layout, parts, dtype=whole.dtype, rank=rank, store=store)

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> ShardedTensor:
        """Shares memory with the DTensor. LayoutError for placements that have no counterpart among layouts."""
        layout, rank = layout_of(tensor), dist.get_rank()
        parts = {rank: local_tensor(tensor.detach())} if rank in layout.ranks.tolist() else {}
        return cls(layout, parts, dtype=tensor.dtype, rank=rank)

    def to_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """Shares memory with this. `mesh`: the ranks of the layout; by default all of them make one together.

        LayoutError for what DTensors cannot be, ConfigError for another mesh or where this process has no part.
        """
        if not isinstance(self.layout, Layout):
            raise LayoutError(f"{self.layout} has no counterpart among DTensors: redistribute it to one of placements")
        placements = torch_placements(self.layout)
        part = self._one_part()
        mesh = mesh or device_mesh(self.layout.mesh, part.device.type)
        if mesh_of(mesh) != self.layout.mesh:
            raise ConfigError(f"mesh is {mesh_of(mesh)}, but the layout has {self.layout.mesh}")
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=strides)

    # --- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local(self) -> torch.Tensor:
        """The part of this process. ConfigError where it has none, or several."""
        return self._one_part()

    def _one_part(self) -> torch.Tensor:
        if len(self.parts) != 1:
            raise ConfigError(f"this process has the parts of the ranks {sorted(self.parts)}, but one is needed")
        return next(iter(self.parts.values()))

    def __repr__(self) -> str:
        lines = [f"ShardedTensor({self.shape}, {dtype_name(self.dtype)}, {_placed(self.layout)})"]
        ranks = self.layout.ranks.tolist()
        for rank in ranks[:_MOST_LINES]:
            boxes = self.layout.part(rank).boxes
            has = " ".join(str(box) for box in boxes[:_MOST_BOXES]) or "nothing"
            more = f" and {len(boxes) - _MOST_BOXES} more" if len(boxes) > _MOST_BOXES else ""
            lines.append(f"  rank {rank}: {has}{more}{' (here)' if rank in self.parts else ''}")
        if len(ranks) > _MOST_LINES:
            lines.append(f"  and {len(ranks) - _MOST_LINES} more ranks")
        return "\n".join(lines)

    def show(self, path: str | os.PathLike[str] | None = None, *, most: int = 16) -> Drawing:
        """An SVG image, which notebooks show: the whole tensor with the ranks that have each box, and their parts.

        `path`: a file to write it to, too, .svg or .html. Of more than two dimensions the first slice is drawn, of more
        than `most` ranks the parts of the first ones.
        """
        ranks = self.layout.ranks.tolist()
        colours = colours_of(ranks)
        holders: dict[tuple[Any, Any], list[int]] = {}
        panels: list[Panel] = []
        for rank in ranks:
            boxes = [box for box in self.layout.part(rank).boxes if not any(box.start[:-2])]
            for box in boxes:
                holders.setdefault((box.start, box.size), []).append(rank)
            if len(panels) < most:
                mine = [_rectangle(box.at, box.size, colours[rank], str(box)) for box in boxes[:_MOST_DRAWN]]
                panels.append((f"rank {rank}{' (here)' if rank in self.parts else ''}", mine))
        whole = [
            _rectangle(start, size, colours[held[0]], f"rank {', '.join(map(str, held))}", _listed(held))
            for (start, size), held in list(holders.items())[:_MOST_DRAWN]
        ]
        drawing = draw(dtype_name(self.dtype), self.shape, [("whole", [("", whole)]), ("parts", panels)])
        if path is not None:
            drawing.save(path)
        return drawing

    _repr_svg_ = show

    # --- other layouts

    def full(self, *, timeout: float | None = 60) -> torch.Tensor:
        """The whole tensor, on every rank that has a part. Errors as of `redistribute`."""
        ranks = self.layout.ranks.tolist()
        ranks = ranks[:1] if self.rank is None else ranks
        found = self.redistribute(Layout(self.shape, Mesh({"all": len(ranks)}, ranks)), timeout=timeout)
        return found._one_part()

    def redistribute(self, layout: AnyLayout, *, timeout: float | None = 60) -> ShardedTensor:
        """The same elements in another layout, in new memory; each rank reads what it has not.

        LayoutError for another shape, or where a sum has yet to be reduced; TransferTimeout where a rank does not come
        in time; and what fetching raises.
        """
        if layout.shape != self.shape:
            raise LayoutError(f"layout has shape {layout.shape}, but the tensor {self.shape}")
        _refuse_partial(self.layout, layout)
        ranks = sorted({*self.layout.ranks.tolist(), *layout.ranks.tolist()})
        if self.rank is not None and self.rank not in ranks:
            return self._like(layout, {}, self.dtype)
        count = ranks[-1] + 1
        meeting = None if self.rank is None else Gathering(self._store, ranks, self.rank)
        with contextlib.ExitStack() as published:
            offers = [
                published.enter_context(
                    publish({_NAME: part}, _NAME, layouts={_NAME: self.layout}, rank=rank, ranks=count)
                ).offer
                for rank, part in self.parts.items()
            ]
            if meeting is not None:
                given = meeting.gather("offers", offers[0].to_bytes() if offers else b"", timeout)
                offers = [Offer.from_bytes(data) for data in given if data]
            try:
                return self._like(layout, dict(self._fetched(layout, offers, count, timeout)), self.dtype)
            finally:  # whatever came of it here: others may still be reading
                if meeting is not None:
                    meeting.gather("done", b"", timeout)

    def _fetched(
        self, layout: AnyLayout, offers: list[Offer], count: int, timeout: float | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        device = next((part.device for part in self.parts.values()), torch.device("cpu"))
        for rank in layout.ranks.tolist():
            if self.rank not in (None, rank):
                continue
            part = torch.zeros(layout.part(rank).shape, dtype=self.dtype, device=device)
            options: dict[str, Any] = {"rank": rank, "ranks": count, "same_ranks": True, "timeout": timeout}
            Reader(offers, {_NAME: part}, layouts={_NAME: layout}, **options).fetch(timeout=timeout)
            yield rank, part

    # --- elements by their place in the whole tensor

    def __getitem__(self, key: Index | tuple[Index, ...]) -> ShardedTensor:
        """Slices with steps above 0, numbers, and one `...`. Nothing moves: each rank keeps a copy of what it has of
        it, box after box along dimension 0.

        IndexError for a number outside of the tensor, too many of them, or anything else.
        """
        _refuse_partial(self.layout)
        ranges = _ranges(key, self.shape)
        kept = [d for d, one in enumerate(ranges) if isinstance(one, range)]
        shape = tuple(len(ranges[d]) for d in kept)  # type: ignore[arg-type]
        layouts: dict[int, Part] = {}
        parts: dict[int, torch.Tensor] = {}
        for rank in self.layout.ranks.tolist():
            found = [cut for box in self.layout.part(rank).boxes if (cut := _cut(box, ranges)) is not None]
            layouts[rank] = _packed([Box(start, size, start) for start, size, _ in found], shape)
            if rank in self.parts:
                parts[rank] = self.parts[rank].new_zeros(layouts[rank].shape)
                for box, (_, _, local) in zip(layouts[rank].boxes, found, strict=True):
                    parts[rank][_slices(box.at, box.size)] = self.parts[rank][local]
        return self._like(BoxLayout(shape, layouts), parts, self.dtype)

    # --- arithmetic

    def _combined(self, function: Function, other: Any, swapped: bool) -> Any:
        if isinstance(other, torch.Tensor) and other.ndim == 0 and not isinstance(other, DTensor):
            theirs: Mapping[int, Any] = dict.fromkeys(self.parts, other)
        elif isinstance(other, (bool, int, float, complex)):
            theirs = dict.fromkeys(self.parts, other)
        elif not isinstance(other, ShardedTensor):
            return NotImplemented
        elif other.layout != self.layout:
            raise LayoutError(
                f"{self.layout} and {other.layout} are not equal: redistribute one of them to the other's layout first"
            )
        else:
            theirs = other.parts
        _refuse_partial(self.layout)
        nothing = torch.empty(0, dtype=self.dtype)
        sample = torch.empty(0, dtype=other.dtype) if isinstance(other, ShardedTensor) else other
        pairs = {rank: (part, theirs[rank]) for rank, part in self.parts.items()}
        if swapped:
            nothing, sample = sample, nothing
            pairs = {rank: (b, a) for rank, (a, b) in pairs.items()}
        parts = {rank: function(*pair) for rank, pair in pairs.items()}
        return self._like(self.layout, parts, function(nothing, sample).dtype)

    __add__, __radd__ = _binary(operator.add), _binary(operator.add, swapped=True)
    __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, swapped=True)
    __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, swapped=True)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, swapped=True)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, swapped=True)
    __mod__, __rmod__ = _binary(operator.mod), _binary(operator.mod, swapped=True)
    __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, swapped=True)

    def __neg__(self) -> ShardedTensor:
        return self._like(self.layout, {rank: -part for rank, part in self.parts.items()}, self.dtype)

    def to(self, dtype: torch.dtype) -> ShardedTensor:
        """The same in another dtype."""
        return self._like(self.layout, {rank: part.to(dtype) for rank, part in self.parts.items()}, dtype)


def _refuse_partial(*layouts: AnyLayout) -> None:
    for layout in layouts:
        if layout.is_partial:
            raise LayoutError(f"{layout} has terms of a sum: reduce them first")


def _slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def _ranges(key: Any, shape: tuple[int, ...]) -> list[range | int]:
    """What an index takes of each dimension: a range, or one position and no dimension any more."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, one in enumerate(keys) if one is Ellipsis]
    if len(dots) > 1 or len(keys) - len(dots) > len(shape):
        raise IndexError(f"index {key!r} does not fit a tensor of {len(shape)} dimensions")
    at = dots[0] if dots else len(keys)
    keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + len(dots))
    return [_range(one, n, d) for d, (one, n) in enumerate(zip(keys, shape, strict=True))]


def _range(one: Any, n: int, dim: int) -> range | int:
    if isinstance(one, slice):
        found = range(n)[one]
        if found.step < 1:
            raise IndexError(f"slice {one} of dimension {dim}: the step has to be above 0")
        return found
    try:
        return range(n)[operator.index(one)]
    except (TypeError, IndexError):
        raise IndexError(f"index {one!r} is not within the {n} elements of dimension {dim}") from None


def _cut(box: Box, ranges: list[range | int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]] | None:
    """What the ranges take of a box: start and size in the result, and where that is in the local tensor; or None."""
    start: list[int] = []
    size: list[int] = []
    local: list[int | slice] = []
    for low, n, at, one in zip(box.start, box.size, box.at, ranges, strict=True):
        if isinstance(one, int):
            if not low <= one < low + n:
                return None
            local.append(at + one - low)
            continue
        first = max(0, -((one.start - low) // one.step))  # the first of the range's elements from `low` on
        last = min(len(one), -((one.start - low - n) // one.step))
        if last <= first:
            return None
        begin = at + one[first] - low
        start.append(first)
        size.append(last - first)
        local.append(slice(begin, begin + (last - first - 1) * one.step + 1, one.step))
    return tuple(start), tuple(size), tuple(local)


def _packed(boxes: list[Box], shape: tuple[int, ...]) -> Part:
    """The boxes one after another along dimension 0."""
    if not shape:
        return Part((), tuple(boxes[:1]))
    at, placed = 0, []
    for box in boxes:
        placed.append(Box(box.start, box.size, (at, *[0] * (len(shape) - 1))))
        at += box.size[0]
    rest = (max((box.size[d] for box in boxes), default=0) for d in range(1, len(shape)))
    return Part((at, *rest), tuple(placed))


def _placed(layout: AnyLayout) -> str:
    if isinstance(layout, BoxLayout):
        return f"boxes on {len(layout.ranks)} ranks"
    pairs = zip(layout.mesh.names, layout.mesh.sizes, layout.placements, strict=True)
    return ", ".join(f"{name}={size}: {placement}" for name, size, placement in pairs)


def _rectangle(start: tuple[int, ...], size: tuple[int, ...], colour: str, tip: str, text: str = "") -> Rectangle:
    top, left = (0, 0, *start)[-2:]
    height, width = (1, 1, *size)[-2:]
    return Rectangle(top, left, height, width, colour, tip, text)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:3])) + (", ..." if len(ranks) > 3 else "")
