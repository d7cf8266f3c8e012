"""What still lives of the values of a weak dictionary."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakValueDictionary

__all__ = ["living"]

V = TypeVar("V")


def living(values: WeakValueDictionary[Any, V]) -> list[V]:
    """Taken in one step, as other threads add some, and the garbage collector drops some."""
    found = [reference() for reference in values.valuerefs()]
    return [value for value in found if value is not None]
