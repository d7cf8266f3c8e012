"""Rows of the report: what was measured, against what, and what was to be reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Row", "Table", "at_least", "faster_than", "limit", "rate_of", "size_text", "time_of"]

_LARGE = 1 << 20  # bytes from which a transfer is told by its rate


@dataclass(frozen=True)
class Row:
    """One comparison. `measured` and `against` are in `unit`; `reached` is None where nothing was set as a goal."""

    what: str
    measured: float
    unit: str  # "s", "B/s", "B", "cores" or "/s"
    against: float | None = None
    against_name: str = ""
    reach: str = ""
    reached: bool | None = None

    @property
    def ratio(self) -> float | None:
        return self.measured / self.against if self.against else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def rate_of(what: str, size: int, seconds: float, name: str, their_seconds: float, least: float | None = None) -> Row:
    """Bytes per second against theirs; goal: at least `least` times as fast."""
    ratio = their_seconds / seconds
    goal = f">= {least:.3g} x" if least else ""
    return Row(what, size / seconds, "B/s", size / their_seconds, name, goal, ratio >= least if least else None)


def time_of(what: str, seconds: float, name: str, their_seconds: float, most: float | None = None) -> Row:
    """Seconds against theirs; goal: at most `most` times as long."""
    goal = f"<= {most:.3g} x" if most else ""
    return Row(what, seconds, "s", their_seconds, name, goal, seconds / their_seconds <= most if most else None)


def faster_than(what: str, size: int, seconds: float, name: str, their_seconds: float, least: float = 1.0) -> Row:
    """By rate where large, by time where small."""
    if size >= _LARGE:
        return rate_of(what, size, seconds, name, their_seconds, least)
    return time_of(what, seconds, name, their_seconds, 1 / least)


def limit(what: str, measured: float, unit: str, most: float) -> Row:
    """A figure that should be at most `most`."""
    return Row(what, measured, unit, reach=f"<= {_text(most, unit)}", reached=measured <= most)


def at_least(what: str, measured: float, unit: str, least: float) -> Row:
    """A figure that should be at least `least`."""
    return Row(what, measured, unit, reach=f">= {_text(least, unit)}", reached=measured >= least)


def size_text(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def _text(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "B":
        return f"{value / 2**20:.1f} MiB"
    if unit == "s":
        return f"{value * 1e6:.2f} us" if value < 1e-3 else f"{value * 1e3:.2f} ms"
    if unit == "/s" and value >= 1000:
        return f"{value:,.0f} /s"
    if unit == "cores":
        return f"{100 * value:.2f} % of a core"
    return f"{value:.2f} {unit}"


class Table:
    """Prints rows as they come."""

    _FORMAT = "{:54} {:>18}  {:38} {:>7}  {:12} {}"

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._say = say
        say(self._FORMAT.format("what", "measured", "against", "ratio", "reach", ""))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        against = f"{row.against_name} {_text(row.against, row.unit)}" if row.against else ""
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        verdict = {True: "yes", False: "NO", None: ""}[row.reached]
        self._say(self._FORMAT.format(row.what, _text(row.measured, row.unit), against, ratio, row.reach, verdict))

    def note(self, text: str) -> None:
        """Something that was not measured, and why."""
        self._say(f"-- {text}")

    def fail(self, text: str) -> None:
        """Something that should have been measured and could not be."""
        self.failures.append(text)
        self._say(f"!! {text}")
