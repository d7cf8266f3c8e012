"""From one layout to another: the copies of one rank, and who sends how much to whom in all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .copies import Copies
from .geometry import Grid, IntArray, Layout
from .overlaps import Overlaps, overlaps
from .replicas import Shares, Topology, share_out
from .transforms import Piece

__all__ = ["Flows", "Route", "route"]

_WHOLE_BELOW = 64 << 10  # bytes: what is smaller comes from one replica, as splitting it costs more than it saves


@dataclass(frozen=True, eq=False)
class Flows:
    """Row i: target[i] gets elements[i] from source[i], in copies[i] copies, messages[i] contiguous pieces."""

    source: IntArray
    target: IntArray
    elements: IntArray
    copies: IntArray
    messages: IntArray


class Route:
    """How a piece of a tensor gets from the ranks of one layout to those of another."""

    def __init__(self, source: Layout, target: Layout, piece: Piece, itemsize: int, topology: Topology | None) -> None:
        self._piece = piece
        self._topology = topology
        self._whole_below = max(1, _WHOLE_BELOW // itemsize)
        dims = range(len(piece.shape))
        axis_of = {axis: d for d, axis in enumerate(piece.permutation)}
        low = [piece.source_start[axis_of[axis]] for axis in dims]
        high = [low[axis] + piece.shape[axis_of[axis]] for axis in dims]
        self._sources = list(source.grids(low, high))
        ends = [start + size for start, size in zip(piece.target_start, piece.shape, strict=True)]
        self._targets = list(target.grids(piece.target_start, ends))
        self._layout = target
        self._shares: dict[tuple[int, int], Shares] = {}
        self._last: tuple[int, Copies] | None = None

    def _overlaps(self, source: Grid, target: Grid) -> list[Overlaps]:
        """In each dimension of the target."""
        piece = self._piece
        found = []
        for d, axis in enumerate(piece.permutation):
            low, shift = piece.target_start[d], piece.target_start[d] - piece.source_start[d]
            found.append(overlaps(source.segments[axis], target.segments[d], shift, low, low + piece.shape[d]))
        return found

    # --- one rank

    def copies(self, rank: int) -> Copies:
        """What this rank has to copy. The last rank's are kept: a model has many tensors of one geometry."""
        last = self._last  # other threads plan, too
        if last is None or last[0] != rank:
            last = self._last = rank, self._copies(rank)
        return last[1]

    def _copies(self, rank: int) -> Copies:
        parts = []
        for target, tile, replica in self._layout.tiles(rank):
            for idx, source in enumerate(self._sources):
                copies, tiles = self._meeting(source, target, tile, replica)
                if len(copies):
                    reader = (rank, target, tile, replica)
                    parts += list(self._from_replicas(idx, source, copies, tiles, reader))
        return Copies.joined(parts, self._piece.permutation)

    def _meeting(self, source: Grid, target: Grid, tile: int, replica: int) -> tuple[Copies, IntArray]:
        """The copies into one tile of the target, and the tiles of the source that they come from: the product of what
        meets in each dimension. Which rank has them is yet to be filled in.
        """
        found = self._overlaps(source, target)
        parts = _unravelled(tile, target.parts)
        ranges = [np.arange(o.first[part], o.first[part + 1]) for o, part in zip(found, parts, strict=True)]
        count = math.prod(r.size for r in ranges)
        picked = [grid.ravel() for grid in np.meshgrid(*ranges, indexing="ij")] if ranges else []

        def column(name: str) -> IntArray:
            table = np.empty((count, len(found)), dtype=np.int64)
            for d, (o, rows) in enumerate(zip(found, picked, strict=True)):
                table[:, d] = getattr(o, name)[rows]
            return table

        tiles = np.zeros(count, dtype=np.int64)
        of_parts = column("source")
        sizes = np.empty_like(of_parts)
        for d, axis in enumerate(self._piece.permutation):
            tiles += of_parts[:, d] * math.prod(source.parts[axis + 1 :])
            sizes[:, d] = found[d].source_sizes[of_parts[:, d]]
        names = ("source_at", "target_at", "size", "count", "source_step", "target_step")
        columns = {name: column(name) for name in names}
        target_shape = [o.target_sizes[part] for o, part in zip(found, parts, strict=True)]
        if target.origin is not None and target.local_shapes is not None:
            columns["target_at"] += target.origin[replica]
            target_shape = target.local_shapes[replica].tolist()
        if source.local_shapes is not None:
            sizes[:] = source.local_shapes[0][list(self._piece.permutation)]
        run = self._contiguous(columns["size"], columns["count"], sizes, np.array(target_shape, dtype=np.int64))
        return Copies(self._piece.permutation, np.zeros(count, dtype=np.int64), run=run, **columns), tiles

    def _contiguous(self, size: IntArray, count: IntArray, source: IntArray, target: IntArray) -> IntArray:
        """Elements in a row on both ends: the last dimension's, and the ones before it as long as all is copied."""
        run = np.ones(size.shape[0], dtype=np.int64)
        going_on = np.ones(size.shape[0], dtype=bool)
        for d in reversed(range(size.shape[1])):
            if self._piece.permutation[d] != d:
                break
            run *= np.where(going_on, size[:, d], 1)
            going_on &= (count[:, d] == 1) & (size[:, d] == source[:, d]) & (size[:, d] == target[d])
        return run

    def _from_replicas(
        self, idx: int, source: Grid, copies: Copies, tiles: IntArray, reader: tuple[int, Grid, int, int]
    ) -> Iterator[Copies]:
        """The copies with their source ranks: itself, the only one that has a tile, or its shares of several."""
        holders = source.holders[tiles]
        mine = holders == reader[0]
        chosen = np.where(mine.any(axis=1), mine.argmax(axis=1), 0)
        if source.holders.shape[1] > 1:
            shared = ~mine.any(axis=1)
            for tile in np.unique(tiles[shared]).tolist():
                rows = np.flatnonzero(shared & (tiles == tile))
                place = self._reader(*reader[1:])
                shares = self._shares_of(idx, tile).of_reader(place)
                if len(shares) == 1:
                    chosen[rows] = shares[0][0]
                    continue
                for replica, part in _cut(copies.rows(rows), shares):
                    yield _placed(part, source, np.full(len(part), tile), np.full(len(part), replica))
                chosen[rows] = -1
        whole = np.flatnonzero(chosen >= 0)
        if whole.size == len(copies):
            yield _placed(copies, source, tiles, chosen)
        elif whole.size:
            yield _placed(copies.rows(whole), source, tiles[whole], chosen[whole])

    # --- all ranks

    def _reader(self, target: Grid, tile: int, replica: int) -> int:
        """A number for each rank's each tile."""
        before: int = 0
        for grid in self._targets:
            if grid is target:
                break
            before += int(grid.holders.size)
        return before + tile * int(target.holders.shape[1]) + replica

    def _shares_of(self, idx: int, tile: int) -> Shares:
        """How the replicas of one tile of a source grid are shared by all that read it."""
        if (idx, tile) not in self._shares:
            source = self._sources[idx]
            needed = np.concatenate([self._needed(source, target, tile) for target in self._targets])
            readers = np.concatenate([target.holders.ravel() for target in self._targets])
            holders = source.holders[tile]
            which = np.flatnonzero((needed > 0) & ~np.isin(readers, holders))
            shares = share_out(holders, readers[which], needed[which], self._topology, self._whole_below)
            self._shares[idx, tile] = Shares(which[shares.reader], shares.replica, shares.amount)
        return self._shares[idx, tile]

    def _needed(self, source: Grid, target: Grid, tile: int) -> IntArray:
        """Elements that each replica of each tile of the target has in common with this tile of the source."""
        parts = _unravelled(tile, source.parts)
        needed = np.ones(1, dtype=np.int64)
        for d, found in enumerate(self._overlaps(source, target)):
            of_part = found.pairs.of_source(parts[self._piece.permutation[d]], target.parts[d])
            needed = np.multiply.outer(needed, of_part).ravel()
        return np.repeat(needed, target.holders.shape[1])

    def flows(self) -> Flows:
        """Who sends how much to whom; what a rank has already goes from itself to itself."""
        columns = [
            rows for idx in range(len(self._sources)) for target in self._targets for rows in self._flows(idx, target)
        ]
        if not columns:
            return Flows(*[np.zeros(0, dtype=np.int64)] * 5)
        return Flows(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    def _flows(self, idx: int, target: Grid) -> Iterator[tuple[IntArray, ...]]:
        """Source rank, target rank, elements, copies and messages."""
        source = self._sources[idx]
        source_tile, target_tile, elements, copies, messages = self._tile_pairs(source, target)
        replicas = target.holders.shape[1]
        readers = target.holders[target_tile].ravel()
        tiles, elements, copies, messages = (
            np.repeat(column, replicas) for column in (source_tile, elements, copies, messages)
        )
        mine = source.holders[tiles] == readers[:, None]
        here = mine.any(axis=1)
        yield readers[here], readers[here], elements[here], copies[here], messages[here]
        away = np.flatnonzero(~here & (elements > 0))
        if source.holders.shape[1] == 1:
            yield source.holders[tiles[away], 0], readers[away], elements[away], copies[away], messages[away]
            return
        numbers = self._reader(target, 0, 0) + (target_tile[:, None] * replicas + np.arange(replicas)).ravel()
        for tile in np.unique(tiles[away]).tolist():
            rows = away[tiles[away] == tile]
            rows = rows[np.argsort(numbers[rows])]
            shares = self._shares_of(idx, tile)
            taken = np.flatnonzero(np.isin(shares.reader, numbers[rows]))
            row = rows[np.searchsorted(numbers[rows], shares.reader[taken])]
            amount = shares.amount[taken]
            pieces = np.maximum(1, messages[row] * amount // elements[row])
            from_ranks = source.holders[tile][shares.replica[taken]]
            yield from_ranks, readers[row], amount, np.minimum(copies[row], pieces), pieces

    def _tile_pairs(self, source: Grid, target: Grid) -> tuple[IntArray, ...]:
        """Tiles of source and target that meet, and elements, copies and messages between them: products over the
        dimensions of what meets there.
        """
        one = np.ones(1, dtype=np.int64)
        source_tile, target_tile, elements, copies = one - 1, one - 1, one, one
        messages, going_on = one, one.astype(bool)
        target_step = 1
        for d in reversed(range(len(target.parts))):
            axis = self._piece.permutation[d]
            found = self._overlaps(source, target)[d].pairs
            step = math.prod(source.parts[axis + 1 :])
            source_tile = np.add.outer(found.source * step, source_tile).ravel()
            target_tile = np.add.outer(found.target * target_step, target_tile).ravel()
            target_step *= target.parts[d]
            if axis != d:
                going_on = np.zeros_like(going_on)
            one_dim = np.broadcast_to(going_on, (found.source.size, going_on.size)).ravel()
            messages = np.where(
                one_dim,
                np.repeat(found.segments, going_on.size),
                np.multiply.outer(found.elements, messages).ravel(),
            )
            going_on = one_dim & np.repeat(found.full.astype(bool), going_on.size)
            elements = np.multiply.outer(found.elements, elements).ravel()
            copies = np.multiply.outer(found.rows, copies).ravel()
        return source_tile, target_tile, elements, copies, messages


def _unravelled(tile: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(tile, parts)) if parts else ()


def _placed(copies: Copies, source: Grid, tiles: IntArray, replicas: IntArray) -> Copies:
    """The copies, taken from these replicas of these tiles."""
    at = copies.source_at
    if source.origin is not None:
        at = at + source.origin[replicas][:, list(copies.permutation)]
    columns = (at, copies.target_at, copies.size, copies.count, copies.source_step, copies.target_step)
    return Copies(copies.permutation, source.holders[tiles, replicas], *columns, copies.run)


def _cut(copies: Copies, shares: list[tuple[int, int]]) -> Iterator[tuple[int, Copies]]:
    """Copies from one tile, cut so that each replica gives about its share."""
    given = np.cumsum([0, *(amount for _, amount in shares)])
    before = 0
    for row in range(len(copies)):
        one, elements = copies.rows(slice(row, row + 1)), int(copies.elements[row])
        edges = np.clip(given - before, 0, elements) * one.units // elements
        for (replica, _), low, high in zip(shares, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if high > low:
                yield replica, one.narrowed(low, high)
        before += elements


@lru_cache(maxsize=4096)
def route(source: Layout, target: Layout, piece: Piece, itemsize: int, topology: Topology | None) -> Route:
    """The route, kept: many tensors of a model have the same geometry."""
    return Route(source, target, piece, itemsize, topology)
