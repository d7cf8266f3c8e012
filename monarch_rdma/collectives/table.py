"""By which figures collectives choose their way, for each size of a group: built in, or measured on the user's hosts.

The file is JSON, as `monarch-rdma bench --collectives` writes it: {"version": 1, "groups": [{"size": 2, ...}, ...]}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ConfigError

__all__ = ["BUILT_IN", "Row", "load", "row_for", "save"]

_VERSION = 1


@dataclass(frozen=True)
class Row:
    """For groups of `size` members and more, up to the next row."""

    size: int
    step_bytes: int  # that a member stages at a time
    two_level_bytes: int  # of all members together: from here on, over several hosts, a collective goes in two levels

    def __post_init__(self) -> None:
        limits = {"size": (1, 1024), "step_bytes": (64, 1 << 30), "two_level_bytes": (0, 1 << 30)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}, but must be an integer from {least} to {most}")


BUILT_IN = (Row(1, 512 << 10, 64 << 10),)


def row_for(size: int) -> Row:
    """The row for groups of this size: of the file of option collective_table, if that is set."""
    path = str(config.get("collective_table"))
    rows = load(path) if path else BUILT_IN
    row = max((row for row in rows if row.size <= size), key=lambda row: row.size, default=rows[0])
    step_bytes = int(config.get("collective_step_bytes"))
    return Row(size, step_bytes or row.step_bytes, row.two_level_bytes)


def load(path: str | Path) -> tuple[Row, ...]:
    """Raises ConfigError where the file is missing or is no such table."""
    try:
        content: Any = json.loads(Path(path).read_text())
        if content["version"] != _VERSION:
            raise ConfigError(f"version is {content['version']!r}, but must be {_VERSION}")
        rows = tuple(Row(**{name: each[name] for name in Row.__annotations__}) for each in content["groups"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"collective_table {str(path)!r} is no table of collectives: {error!r}") from error
    if not rows:
        raise ConfigError(f"collective_table {str(path)!r} has no groups")
    return rows


def save(rows: Sequence[Row], path: str | Path) -> None:
    groups = [asdict(row) for row in sorted(rows, key=lambda row: row.size)]
    Path(path).write_text(json.dumps({"version": _VERSION, "groups": groups}, indent=2) + "\n")
