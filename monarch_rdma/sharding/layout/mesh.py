"""Ranks in a grid with named dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np

from .checks import LayoutError, Shape, natural_numbers

__all__ = ["Mesh"]


class Mesh:
    """Ranks in a grid with named dimensions, outermost first.

    Ranks are numbers of processes: two layouts speak of the same process where they use the same number.
    """

    def __init__(self, sizes: Mapping[str, int], ranks: Iterable[int] | None = None) -> None:
        """`sizes`: of the named dimensions. `ranks`: in row-major order; None for 0, 1, 2, ..."""
        self.names: tuple[str, ...] = tuple(sizes)
        self.sizes: Shape = natural_numbers("sizes of the mesh", sizes.values(), least=1)
        count = math.prod(self.sizes)
        flat = np.arange(count) if ranks is None else np.array(natural_numbers("ranks", ranks), dtype=np.int64)
        if flat.size != count:
            raise LayoutError(f"ranks has {flat.size} entries, but a mesh of {dict(sizes)} has {count}")
        if np.unique(flat).size != count:
            twice = sorted({rank for rank in flat.tolist() if np.count_nonzero(flat == rank) > 1})
            raise LayoutError(f"ranks {twice[:8]} are in the mesh more than once")
        self.ranks = flat.reshape(self.sizes)
        self.ranks.setflags(write=False)
        self._key = (self.names, self.sizes, flat.tobytes())
        self._hash = hash(self._key)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks.ravel().tolist())}

    def coordinate(self, rank: int) -> Shape | None:
        """Where in the grid a rank is; None where it is not in the mesh."""
        position = self._positions.get(rank)
        return None if position is None else tuple(int(i) for i in np.unravel_index(position, self.sizes))

    def __len__(self) -> int:
        return self.ranks.size

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        flat = self.ranks.ravel()
        in_order = bool(np.all(np.diff(flat) == 1))
        listed = ", ".join(str(rank) for rank in flat[:8]) + (", ..." if flat.size > 8 else "")
        ranks = f"ranks {flat[0]} to {flat[-1]}" if in_order else f"ranks {listed}"
        return f"Mesh({dict(zip(self.names, self.sizes, strict=True))}, {ranks})"
