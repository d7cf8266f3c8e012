"""By which figures collectives choose their way, for each size of a group: built in, or measured on the user's hosts.

The file is JSON, as `monarch-rdma bench --collectives` writes it: {"version": 2, "groups": [{"size": 2, ...}, ...]}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ConfigError, demand_whole
from ..rdma import group as core

__all__ = ["BUILT_IN", "KINDS", "Row", "load", "row_for", "save"]

_VERSION = 2
KINDS = {
    "barrier": core.BARRIER, "broadcast": core.BROADCAST, "all_reduce": core.ALL_REDUCE, "reduce": core.REDUCE,
    "reduce_scatter": core.REDUCE_SCATTER, "all_gather": core.ALL_GATHER, "gather": core.GATHER,
    "scatter": core.SCATTER,
}  # fmt: skip
Steps = tuple[tuple[int, str], ...]  # from so many bytes on: this algorithm


@dataclass(frozen=True)
class Row:
    """For groups of `size` members and more, up to the next row."""

    size: int
    step_bytes: int  # that a member stages at a time
    two_level_bytes: int  # of all members together: from here on, over several hosts, a collective goes in two levels
    across: Mapping[str, Steps] = field(default_factory=dict)  # of groups over several hosts; what is not here: direct

    def __post_init__(self) -> None:
        limits = {"size": (1, 1024), "step_bytes": (64, 1 << 30), "two_level_bytes": (0, 1 << 30)}
        for name, (least, most) in limits.items():
            demand_whole(name, getattr(self, name), least, most)
        for kind, steps in self.across.items():
            if kind not in KINDS:
                raise ConfigError(f"across has {kind!r}, but must have of {', '.join(KINDS)}")
            for least, algorithm in steps:
                demand_whole(f"across[{kind!r}]", least, 0, 1 << 62)
                number = core.ALGORITHMS.get(algorithm)
                if number is None or not core.has_algorithm(KINDS[kind], number):
                    raise ConfigError(f"across[{kind!r}] has {algorithm!r}, which is no algorithm of it")
            if list(steps) != sorted(steps):
                raise ConfigError(f"across[{kind!r}] is not in the order of bytes")


# For networks whose messages take tens of us, as within a data centre. Far apart, rounds cost more than messages.
_FEW: dict[str, Steps] = {"broadcast": ((512 << 10, "ring"),)}
_MANY: dict[str, Steps] = {
    **_FEW,
    "barrier": ((0, "doubling"),),
    "all_reduce": ((0, "doubling"), (64 << 10, "halving"), (8 << 20, "ring")),
    "reduce_scatter": ((0, "halving"), (64 << 10, "direct")),
    "all_gather": ((0, "doubling"), (256 << 10, "direct")),
}
BUILT_IN = (Row(1, 512 << 10, 64 << 10), Row(3, 512 << 10, 64 << 10, _FEW), Row(8, 512 << 10, 64 << 10, _MANY))


def row_for(size: int) -> Row:
    """The row for groups of this size: of the file of option collective_table, if that is set."""
    path = str(config.get("collective_table"))
    rows = load(path) if path else BUILT_IN
    row = max((row for row in rows if row.size <= size), key=lambda row: row.size, default=rows[0])
    step_bytes = int(config.get("collective_step_bytes"))
    return replace(row, size=size, step_bytes=step_bytes or row.step_bytes)


def load(path: str | Path) -> tuple[Row, ...]:
    """Raises ConfigError where the file is missing or is no such table."""
    try:
        content: Any = json.loads(Path(path).read_text())
        if content["version"] != _VERSION:
            raise ConfigError(f"version is {content['version']!r}, but must be {_VERSION}")
        rows = tuple(_row(each) for each in content["groups"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"collective_table {str(path)!r} is no table of collectives: {error!r}") from error
    if not rows:
        raise ConfigError(f"collective_table {str(path)!r} has no groups")
    return rows


def _row(content: dict[str, Any]) -> Row:
    across = {kind: tuple((least, name) for least, name in steps) for kind, steps in content["across"].items()}
    return Row(content["size"], content["step_bytes"], content["two_level_bytes"], across)


def save(rows: Sequence[Row], path: str | Path) -> None:
    groups = [asdict(row) for row in sorted(rows, key=lambda row: row.size)]
    Path(path).write_text(json.dumps({"version": _VERSION, "groups": groups}, indent=2) + "\n")
