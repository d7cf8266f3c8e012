"""What is wrong with a layout, and the check that all of them need."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as to_index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "LayoutError", "Shape", "natural_numbers"]

IntArray: TypeAlias = npt.NDArray[np.int64]
Shape: TypeAlias = "tuple[int, ...]"


class LayoutError(ValueError):
    """A layout that makes no sense: the message names the argument, the value, and what is missing or there twice."""


def natural_numbers(what: str, values: Iterable[Any], least: int = 0) -> tuple[int, ...]:
    values = tuple(values)
    try:
        numbers = tuple(to_index(value) for value in values)
    except TypeError as error:
        raise LayoutError(f"{what}: {values!r} are not all integers") from error
    if any(number < least or isinstance(value, bool) for number, value in zip(numbers, values, strict=True)):
        raise LayoutError(f"{what}: {values!r}, but none may be below {least}")
    return numbers
