"""The first message of an actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..actor import Actor
    from .state import Upkeep

__all__ = ["Birth"]


@dataclass(frozen=True)
class Birth:
    """What to make, for whom."""

    cls: type[Actor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    owner: tuple[str, int]  # process and number of who is told of its failure
    creator: str
    proc_mesh: Any
    upkeep: Upkeep | None = None  # where its class has hooks for its state, and somebody starts it again
    is_supervised: bool = False  # its owner starts it again, and is told of every end
