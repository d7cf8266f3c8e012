"""A plan: for one rank, which elements of which rank's local tensors go where in its own. Arrays, one row a copy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .geometry import IntArray, PlanError, Shape, itemsize

__all__ = ["Copies", "Plan", "TensorCopies"]

_MAGIC = b"monarch_rdma plan 1\n"
_COLUMNS = ("source_at", "target_at", "size", "count", "source_step", "target_step")  # (copies, dims)


@dataclass(frozen=True, eq=False)
class Copies:
    """Row i is one strided copy from the local tensor of rank source[i]. In dimension d it takes count[i, d] times
    size[i, d] elements: the first ones at source_at[i, d], each next ones source_step[i, d] further; in the target's
    local tensor at target_at[i, d] and target_step[i, d].

    Dimensions are those of the target; dimension d of the target is dimension permutation[d] of the source.
    """

    permutation: Shape
    source: IntArray
    source_at: IntArray
    target_at: IntArray
    size: IntArray
    count: IntArray
    source_step: IntArray
    target_step: IntArray
    run: IntArray  # elements that are contiguous in both local tensors (where these are contiguous themselves)

    def __len__(self) -> int:
        return self.source.size

    @cached_property
    def elements(self) -> IntArray:
        """Of each copy."""
        elements: IntArray = np.prod(self.size * self.count, axis=1, dtype=np.int64)
        return elements

    @cached_property
    def messages(self) -> IntArray:
        """Contiguous pieces that each copy is made of."""
        return self.elements // self.run

    def rows(self, which: IntArray | slice) -> Copies:
        """These copies alone."""
        columns = {name: getattr(self, name)[which] for name in ("source", *_COLUMNS, "run")}
        return Copies(self.permutation, **columns)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """That are read from."""
        return tuple(sorted(set(self.source.tolist())))

    @cached_property
    def is_in_order(self) -> bool:
        """Whether source and target have the same order of axes."""
        return list(self.permutation) == sorted(self.permutation)

    @cached_property
    def target_extent(self) -> Shape:
        """The shape that the target's local tensor has to have at least."""
        return _extent(self.target_at, self.target_step, self.size, self.count)

    def source_extent(self, rank: int) -> Shape:
        """The shape that the local tensor of a source rank has to have at least, in the source's order of axes."""
        rows = self.source == rank
        columns = (self.source_at, self.source_step, self.size, self.count)
        extent = _extent(*(column[rows] for column in columns))
        return tuple(extent[self.permutation.index(axis)] for axis in range(len(extent)))

    # --- one copy, cut in the first dimension in which it has more than one piece, or element of its one piece

    def _cut_dim(self) -> tuple[int, bool, int]:
        """The dimension, whether pieces are parted there or elements, and how many; (-1, False, 1) for one element."""
        for dim, (size, count) in enumerate(zip(self.size[0].tolist(), self.count[0].tolist(), strict=True)):
            if count > 1 or size > 1:
                return dim, count > 1, count if count > 1 else size
        return -1, False, 1

    @property
    def units(self) -> int:
        """Into how many parts the one copy can be cut."""
        return self._cut_dim()[2]

    def narrowed(self, low: int, high: int) -> Copies:
        """Of the one copy the units from `low` to `high`."""
        dim, pieces, units = self._cut_dim()
        if high - low == units:
            return self
        columns = {name: getattr(self, name).copy() for name in ("source_at", "target_at", "size", "count")}
        columns["source_at"][0, dim] += low * (self.source_step[0, dim] if pieces else 1)
        columns["target_at"][0, dim] += low * (self.target_step[0, dim] if pieces else 1)
        columns["count" if pieces else "size"][0, dim] = high - low
        elements = np.prod(columns["size"] * columns["count"], axis=1)
        run = np.where(self.run == self.elements, elements, self.run)  # all dimensions before this one have one element
        steps = {"source_step": self.source_step, "target_step": self.target_step}
        return Copies(self.permutation, self.source, run=run, **columns, **steps)

    def halves(self) -> tuple[Copies, Copies]:
        """The one copy as two."""
        middle = self.units // 2
        return self.narrowed(0, middle), self.narrowed(middle, self.units)

    @classmethod
    def joined(cls, parts: Sequence[Copies], permutation: Shape) -> Copies:
        """One after another."""
        if not parts:
            none = np.zeros((0, len(permutation)), dtype=np.int64)
            flat = np.zeros(0, dtype=np.int64)
            return cls(permutation, flat, run=flat, **dict.fromkeys(_COLUMNS, none))
        if len(parts) == 1:
            return parts[0]
        names = ("source", *_COLUMNS, "run")
        return cls(permutation, **{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


def _extent(at: IntArray, step: IntArray, size: IntArray, count: IntArray) -> Shape:
    return tuple((at + step * (count - 1) + size).max(axis=0, initial=0).tolist())


@dataclass(frozen=True, eq=False)
class TensorCopies:
    """The copies from one source tensor into one target tensor."""

    target: str
    source: str
    target_dtype: str
    source_dtype: str
    copies: Copies

    @property
    def is_cast(self) -> bool:
        """Whether the values have to be converted when they have arrived."""
        return self.target_dtype != self.source_dtype


class Plan:
    """What one rank has to copy. Made by `make_plan`; the same for the same layouts, so it can be kept and reused."""

    def __init__(self, rank: int, tensors: Sequence[TensorCopies]) -> None:
        self.rank = rank
        self.tensors = tuple(tensors)

    @cached_property
    def _totals(self) -> dict[int, IntArray]:
        """For each rank that is read from: bytes, messages, copies."""
        totals: dict[int, IntArray] = {}
        for tensor in self.tensors:
            copies = tensor.copies
            sources, where = np.unique(copies.source, return_inverse=True)
            rows = np.zeros((sources.size, 3), dtype=np.int64)
            np.add.at(rows[:, 0], where, copies.elements * itemsize(tensor.source_dtype))
            np.add.at(rows[:, 1], where, copies.messages)
            np.add.at(rows[:, 2], where, 1)
            for source, row in zip(sources.tolist(), rows, strict=True):
                totals[source] = totals.get(source, 0) + row
        return totals

    def _sum(self, column: int, here: bool) -> int:
        return sum(int(row[column]) for source, row in self._totals.items() if (source == self.rank) == here)

    @property
    def bytes_moved(self) -> int:
        """Bytes that come from other ranks."""
        return self._sum(0, here=False)

    @property
    def bytes_here(self) -> int:
        """Bytes that this rank has already, in its own source tensors."""
        return self._sum(0, here=True)

    @property
    def messages(self) -> int:
        """Contiguous pieces that come from other ranks."""
        return self._sum(1, here=False)

    @property
    def num_copies(self) -> int:
        """Strided reads of other ranks: what is submitted."""
        return self._sum(2, here=False)

    @cached_property
    def bytes_from(self) -> dict[int, int]:
        """Bytes that come from each other rank, the most first."""
        moved = {source: int(row[0]) for source, row in self._totals.items() if source != self.rank}
        return dict(sorted(moved.items(), key=lambda item: (-item[1], item[0])))

    def __repr__(self) -> str:
        return (
            f"<Plan of rank {self.rank}: {len({t.target for t in self.tensors})} tensors, {self.bytes_moved} bytes "
            f"from {len(self.bytes_from)} ranks in {self.num_copies} copies, {self.bytes_here} bytes are here>"
        )

    # --- to keep and to send

    def to_bytes(self) -> bytes:
        """In a form that is safe to load from anybody. Tensors of the same geometry are in it once."""
        unique: dict[int, int] = {}
        kept: list[Copies] = []
        rows = []
        for tensor in self.tensors:
            if id(tensor.copies) not in unique:
                unique[id(tensor.copies)] = len(kept)
                kept.append(tensor.copies)
            names = [tensor.target, tensor.source, tensor.target_dtype, tensor.source_dtype]
            rows.append([*names, unique[id(tensor.copies)]])
        header = {"rank": self.rank, "tensors": rows, "copies": [[len(c), list(c.permutation)] for c in kept]}
        data = [
            np.ascontiguousarray(getattr(copies, name), dtype="<i8").tobytes()
            for copies in kept
            for name in ("source", "run", *_COLUMNS)
        ]
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join([_MAGIC, len(text).to_bytes(8, "little"), text, *data])

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The plan that `to_bytes` wrote. PlanError where it is malformed."""
        try:
            return cls._parsed(data)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            raise PlanError(f"these {len(data)} bytes are no plan: {error}") from error

    @classmethod
    def _parsed(cls, data: bytes) -> Plan:
        if not data.startswith(_MAGIC):
            raise ValueError("they do not begin as one")
        begin = len(_MAGIC) + 8
        end = begin + int.from_bytes(data[len(_MAGIC) : begin], "little")
        header: dict[str, Any] = json.loads(data[begin:end])
        kept = []
        for count, permutation in header["copies"]:
            dims = len(permutation)
            if not isinstance(count, int) or count < 0 or sorted(permutation) != list(range(dims)):
                raise ValueError(f"{count!r} copies with axes {permutation!r}")
            words = count * (2 + len(_COLUMNS) * dims)
            flat = np.frombuffer(data, dtype="<i8", count=words, offset=end).astype(np.int64)
            end += 8 * words
            source, run, table = flat[:count], flat[count : 2 * count], flat[2 * count :]
            columns = dict(zip(_COLUMNS, table.reshape(len(_COLUMNS), count, dims), strict=True))
            if flat.size and (flat.min() < 0 or (count and run.min() < 1)):
                raise ValueError("numbers below 0")
            kept.append(Copies(tuple(permutation), source, run=run, **columns))
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes too many")
        tensors = []
        for target, source_name, target_dtype, source_dtype, which in header["tensors"]:
            itemsize(target_dtype), itemsize(source_dtype)
            if not isinstance(target, str) or not isinstance(source_name, str) or not 0 <= which < len(kept):
                raise ValueError(f"tensor {target!r:.80} from {source_name!r:.80}")
            tensors.append(TensorCopies(target, source_name, target_dtype, source_dtype, kept[which]))
        if not isinstance(header["rank"], int):
            raise ValueError("no rank")
        return cls(header["rank"], tensors)
