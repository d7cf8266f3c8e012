"""How far something is that takes longer than a moment: a bar on a terminal with rich, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["track"]

Advance = Callable[[int], None]

_FIRST_LINE = 2.0  # seconds of silence before the first plain line
_NEXT_LINE = 5.0


@contextlib.contextmanager
def track(label: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Gives a function to call with the amount done since the last call; `total` is the amount that makes 100 %."""
    bar = _rich_bar() if sys.stdout.isatty() else None
    if bar is None:
        yield _PlainLines(label, total, clock).advance
        return
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)


def _rich_bar() -> Any:
    try:
        from rich import progress
    except ImportError:
        return None
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
    )
    return progress.Progress(*columns, transient=True)


class _PlainLines:
    """Says nothing about what is done within two seconds, then how far it is, every few seconds."""

    def __init__(self, label: str, total: int, clock: Callable[[], float]) -> None:
        self._label = label
        self._total = max(total, 1)
        self._done = 0
        self._clock = clock
        self._due = clock() + _FIRST_LINE

    def advance(self, amount: int) -> None:
        self._done += amount
        if self._clock() < self._due:
            return
        self._due = self._clock() + _NEXT_LINE
        print(f"{self._label}: {min(100, 100 * self._done // self._total)} %", flush=True)
