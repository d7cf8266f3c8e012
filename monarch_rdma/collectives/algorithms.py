"""Which algorithm a collective goes by: what its caller or an option says, else what was measured. See table.py.

All members choose alike, by what all of them know: the kind, how many bytes it is about, the size of the group and
whether it is on several hosts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from .. import config
from ..errors import ConfigError
from ..rdma import group as core
from .table import KINDS, Row, row_for

__all__ = ["chooser", "digest_of_choices", "number_of"]

_DIRECT = core.ALGORITHMS["direct"]
# Sums of two at a time are rounded each time: too often for what has two or three bits of mantissa.
_FP8 = frozenset(number for name, number in core.DTYPES.items() if name.startswith("float8"))
_REDUCING = (core.ALL_REDUCE, core.REDUCE, core.REDUCE_SCATTER)


def number_of(kind: int, algorithm: str | None) -> int | None:
    """None: whatever is best. ConfigError where the collective has no such algorithm."""
    if algorithm is None:
        return None
    has = [name for name, number in core.ALGORITHMS.items() if core.has_algorithm(kind, number)]
    if algorithm not in has:
        raise ConfigError(f"algorithm is {algorithm!r}, but must be one of {', '.join(has)}")
    return int(core.ALGORITHMS[algorithm])


def chooser(size: int, *, is_spread: bool) -> Callable[[int, int, int], int] | None:
    """By kind, bytes and dtype, for a group of `size` members; `is_spread`: on several hosts. None: always direct."""
    forced = str(config.get("collective_algorithm"))
    if forced != "auto":
        number = int(core.ALGORITHMS[forced])
        return lambda kind, _, __: number if core.has_algorithm(kind, number) else _DIRECT
    if not is_spread:
        return None
    ways = {KINDS[name]: steps for name, steps in row_for(size).across.items()}

    def choose(kind: int, nbytes: int, dtype: int) -> int:
        name = "direct"
        if dtype not in _FP8 or kind not in _REDUCING:
            for least, algorithm in ways.get(kind, ()):
                name = algorithm if nbytes >= least else name
        return int(core.ALGORITHMS[name])

    return choose


def digest_of_choices(row: Row) -> int:
    return zlib.crc32(repr((config.get("collective_algorithm"), sorted(row.across.items()))).encode())
