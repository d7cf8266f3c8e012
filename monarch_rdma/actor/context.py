"""Who runs: the actor and the message at hand, for the code that the message runs."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .runtime import message
from .runtime.owned import Owned
from .shape import Extent, Point

if TYPE_CHECKING:
    from .runtime.message import Frame
    from .runtime.proc import Proc

__all__ = ["Context", "context", "current_actor_name", "current_rank", "current_size"]


class Context:
    """The actor that runs, and the message that it works on.

    Outside of actors (in the client's own code) `actor_instance` is the root, and `message_rank` has no dimensions.
    """

    __slots__ = ("_frame", "_rank", "actor_instance")

    def __init__(self, actor_instance: Any, frame: Frame | None = None) -> None:
        self.actor_instance = actor_instance
        self._frame = frame
        self._rank: Point | None = None

    @property
    def message_rank(self) -> Point:
        """Where this actor stands in the mesh, or the slice of it, that the message was sent to."""
        if self._rank is None:
            self._rank = Extent([], []).point(0) if self._frame is None else message.point_of(self._frame)
        return self._rank

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has given this message up: for sync handlers that take long."""
        return self._frame is not None and self._frame.is_cancelled

    @property
    def response(self) -> Frame | None:
        return self._frame


class Root:
    """What stands for the code outside of actors, in `context().actor_instance`."""

    name = "root"
    class_name = "root"
    creator = None
    rank = Extent([], []).point(0)

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self.owned = Owned()

    @property
    def actor_id(self) -> str:
        return f"{self._proc.name},client"

    @property
    def proc_id(self) -> str:
        return self._proc.name

    @property
    def owner_reference(self) -> tuple[str, int]:
        """Who is told of failures of what this code spawns."""
        return self._proc.address, ROOT

    def __repr__(self) -> str:
        return "<root>"


ROOT = 2  # the number of the client's code in its process

running: ContextVar[Context] = ContextVar("monarch_rdma-context")


def context() -> Context:
    """The context of the code that calls."""
    found = running.get(None)
    if found is None:
        from .runtime.proc import current_proc

        found = current_proc().root_context
    return found


def current_rank() -> Point:
    """The position of this actor in the mesh that the message at hand was sent to."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The sizes of that mesh's dimensions, by label."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    return str(context().actor_instance.actor_id)
