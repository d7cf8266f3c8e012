"""Controllers: actors of which a job has one by each name. They live in the client's process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import ConfigError
from ..actor import Actor
from ..context import ROOT
from ..endpoint import concurrent_endpoint
from ..failure import MeshFailure
from ..future import Future
from ..mesh import ActorMesh, ProcMesh, check_class, this_proc
from ..runtime.on_demand import offer
from ..runtime.proc import Proc, current_proc
from ..shape import Extent

__all__ = ["get_or_spawn_controller", "offer_controllers"]

T = TypeVar("T", bound=Actor)

CONTROLLERS = 4  # the number of the actor that has them


def get_or_spawn_controller(name: str, Class: type[T], *args: Any, **kwargs: Any) -> Future[ActorMesh[T]]:
    """The job's one actor of this name, from any of its processes; made, in the client's process, for who asks first.

    Arguments of later calls, Class included, are ignored. The future fails where `__init__` does; the next call tries
    again. Raises ConfigError where Class cannot be spawned.
    """
    check_class(name, Class)
    proc = current_proc()
    if proc.client is None:
        raise ConfigError("a worker loop has no controllers of its own: ask from a client, or from what one started")
    offer_controllers(proc)
    where = ProcMesh("client", [proc.client], Extent([], []).region)
    controllers = ActorMesh(Controllers, "controllers", CONTROLLERS, where)
    future: Future[ActorMesh[T]] = controllers.get_or_spawn.call_one(name, Class, args, kwargs)
    return future


def offer_controllers(proc: Proc) -> None:
    """Lets other processes ask this one, where it is the job's client. Idempotent."""
    if proc.client == proc.address:
        offer(proc, CONTROLLERS, Controllers, "controllers")


@dataclass
class _Controller:
    mesh: ActorMesh[Any]
    has_begun: bool = False  # its __init__ has returned
    has_failed: bool = False
    is_known_to_fail: bool = False  # the failure of its __init__ has come already


class Controllers(Actor):
    """Owns the controllers of the job."""

    def __init__(self) -> None:
        self._controllers: dict[str, _Controller] = {}
        self._stillborn: Counter[str] = Counter()  # those whose failure has yet to come

    @concurrent_endpoint
    async def get_or_spawn(self, name: str, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._controllers.get(name)
        if found is None or found.has_failed:
            found = self._controllers[name] = _Controller(this_proc().spawn(name, cls, *args, **kwargs))
        try:
            await found.mesh.initialized
        except Exception:
            if not found.has_failed:
                found.has_failed = True
                self._stillborn[name] += not found.is_known_to_fail
            raise
        found.has_begun = True
        return found.mesh

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Of one controller the others and we live on; the client's code is told, as of what it spawned itself."""
        name = failure.mesh_name
        found = self._controllers[name]
        if self._stillborn[name]:  # those who asked for it were told
            self._stillborn[name] -= 1
        elif not found.has_begun:
            found.is_known_to_fail = True
        else:
            found.has_failed = True
            proc = current_proc()
            proc.tell_owner((proc.address, ROOT), failure)
        return True
