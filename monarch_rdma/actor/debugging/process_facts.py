"""What the kernel tells of a process on this host: also of one that does not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ProcessFacts", "descendants", "facts_of"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
    "I": "idle",
}


@dataclass(frozen=True)
class ProcessFacts:
    """`cpu_seconds`: user and system time since the start, of all threads. `rss`: bytes of memory that it has in RAM.
    `age`: seconds since its start.
    """

    pid: int
    state: str
    cpu_seconds: float
    rss: int
    age: float

    @property
    def command(self) -> str:
        """Its name, as the kernel knows it."""
        return _read(f"/proc/{self.pid}/comm").strip()


def facts_of(pid: int) -> ProcessFacts | None:
    """None where there is no such process."""
    fields = _stat(pid)
    if fields is None:
        return None
    user, system, start = int(fields[11]), int(fields[12]), int(fields[19])
    return ProcessFacts(
        pid=pid,
        state=_STATES.get(fields[0], fields[0]),
        cpu_seconds=(user + system) / _TICKS,
        rss=int(fields[21]) * _PAGE,
        age=time.clock_gettime(time.CLOCK_BOOTTIME) - start / _TICKS,
    )


def descendants(pid: int) -> Iterator[int]:
    """The processes below this one, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdecimal() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
    below = list(children.get(pid, ()))
    while below:
        child = below.pop(0)
        yield child
        below += children.get(child, ())


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() if text else None  # the name before may hold anything


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # it has ended
