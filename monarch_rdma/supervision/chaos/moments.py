"""Faults that wait for a named moment of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .plan import Fault

__all__ = ["arm", "disarm", "moment"]

_armed: dict[str, list[tuple[Fault, Callable[[Fault], object]]]] = {}
_lock = threading.Lock()


def moment(name: str) -> None:
    """Says that this process is at a point that has this name. Where a plan has a fault for it, that happens now, once;
    else nothing does, in some tens of nanoseconds.
    """
    if not _armed:
        return
    with _lock:
        waiting = _armed.pop(name, [])
    for fault, carry_out in waiting:
        carry_out(fault)


def arm(fault: Fault, carry_out: Callable[[Fault], object]) -> None:
    """`carry_out` is called with the fault at its moment."""
    with _lock:
        _armed.setdefault(fault.moment, []).append((fault, carry_out))


def disarm() -> None:
    """Forgets all that wait."""
    with _lock:
        _armed.clear()
