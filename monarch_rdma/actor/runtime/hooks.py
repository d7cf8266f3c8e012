"""An actor's hooks for what it owns: `__supervise__` is asked about failures, `__stuck__` is told of what is stuck."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ...supervision.events import emit
from ..failure import STUCK, MeshFailure, SupervisionError

if TYPE_CHECKING:
    from .owned import Owned

__all__ = ["Unhandled", "tell_of_failure"]

_log = logging.getLogger("monarch_rdma.actor")


class Unhandled(SupervisionError):
    """A failure below that `__supervise__` did not handle: the owner fails with it."""

    def __init__(self, failure: MeshFailure, event: str) -> None:
        super().__init__(f"a failure of what it owns was not handled: {failure.message}", event=event)
        self.causes = (failure,)


def tell_of_failure(actor: Any, name: str, failure: MeshFailure, owned: Owned) -> Any:
    """Calls the hook of `actor`, or warns; returns its coroutine where it is one. Raises Unhandled."""
    if failure.kind != STUCK:
        return _supervise(actor, name, owned.seen_by_owner(failure))
    hook = getattr(actor, "__stuck__", None)
    if hook is not None:
        return hook(failure)
    _log.warning("%s", failure.report())
    return None


def _supervise(actor: Any, name: str, failures: list[MeshFailure]) -> Coroutine[Any, Any, None] | None:
    """Asks the actor about each."""
    hook = getattr(actor, "__supervise__", None)
    if inspect.iscoroutinefunction(hook):
        return _supervise_async(hook, name, failures)
    for failure in failures:
        _decided(name, failure, hook is not None and hook(failure))
    return None


async def _supervise_async(hook: Any, name: str, failures: list[MeshFailure]) -> None:
    for failure in failures:
        _decided(name, failure, await hook(failure))


def _decided(name: str, failure: MeshFailure, is_handled: object) -> None:
    event = emit(
        "failure.handled" if is_handled else "failure.unhandled",
        cause=failure.event,
        actor=name,
        mesh=failure.mesh_name,
        rank=failure.rank,
    )
    if not is_handled:
        raise Unhandled(failure, event)
