"""A property that is computed once: functools.cached_property takes a lock before Python 3.12, and that costs more than
most of what is kept here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["once"]

T = TypeVar("T")


class once(Generic[T]):
    """Of an object that does not change: kept in its __dict__. Threads that come first together compute the same."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, it: Any, _: Any = None) -> T:
        value = it.__dict__[self._name] = self._compute(it)
        return value
