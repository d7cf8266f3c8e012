"""What a rank that is gone was to send, taken from others that have the same."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .copies import Copies
from .geometry import IntArray, Layout

__all__ = ["replaced"]


def replaced(copies: Copies, source: Layout, gone: Collection[int], reader: int) -> tuple[Copies, IntArray]:
    """The copies that come from ranks in `gone`, now from ranks that are not, spread over all that have the elements;
    and the rows of those that nobody else has.

    `source`: the layout that the copies were planned from. `reader`: the rank whose plan it is.
    """
    axes = list(copies.permutation)
    found: list[Copies] = []
    left = np.isin(copies.source, list(gone))
    for rank in np.unique(copies.source[left]).tolist():
        for grid, tile, replica in source.tiles(rank):
            holders = grid.holders[tile]
            alive = np.flatnonzero(~np.isin(holders, list(gone)))
            rows = np.flatnonzero(left & (copies.source == rank))
            if grid.origin is not None:
                low = grid.origin[replica][axes]
                high = low + np.array([segments.part_sizes[0] for segments in grid.segments], dtype=np.int64)[axes]
                at = copies.source_at[rows]
                rows = rows[np.all((at >= low) & (at < high), axis=1)]
            if not alive.size or not rows.size:
                continue
            left[rows] = False
            chosen = alive[(reader + np.arange(rows.size)) % alive.size]
            taken = copies.rows(rows)
            source_at = taken.source_at
            if grid.origin is not None:
                source_at = source_at + (grid.origin[chosen] - grid.origin[replica])[:, axes]
            columns = {name: getattr(taken, name) for name in ("target_at", "size", "count", "source_step")}
            found.append(
                Copies(
                    copies.permutation,
                    holders[chosen],
                    source_at,
                    target_step=taken.target_step,
                    run=taken.run,
                    **columns,
                )
            )
    return Copies.joined(found, copies.permutation), np.flatnonzero(left)
