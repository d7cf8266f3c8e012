"""What an actor, or the client's code, has spawned: it ends with its owner, who hears of its failures."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...errors import RdmaError
from ..failure import MeshFailure, SupervisionError
from ..future import Future

__all__ = ["Owned"]


class Stoppable(Protocol):
    def stop(self, reason: str) -> Future[None]: ...


class _Kept(NamedTuple):
    mesh: Stoppable
    name: str
    addresses: tuple[str, ...]  # of the processes, by rank
    has_actors: bool


class Owned:
    """The meshes of one owner."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._failed: set[str] = set()  # processes: their end is told once
        self._lock = threading.Lock()  # of both: the client's code may have threads

    def keep(self, mesh: Stoppable, name: str, addresses: Sequence[str], *, has_actors: bool) -> None:
        with self._lock:
            self._kept.append(_Kept(mesh, name, tuple(addresses), has_actors))

    def forget(self, mesh: Stoppable, addresses: Sequence[str] = ()) -> None:
        """The mesh was stopped, and with it all actors that had only these processes. Nothing where it is not ours."""
        gone = set(addresses)
        with self._lock:
            self._kept = [kept for kept in self._kept if kept.mesh is not mesh and not gone.issuperset(kept.addresses)]
            self._failed -= gone

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def stop(self, reason: str) -> None:
        """Ends all that is kept, the last one first."""
        while True:
            with self._lock:
                if not self._kept:
                    return
                mesh = self._kept.pop().mesh
            with contextlib.suppress(SupervisionError, RdmaError):  # it is gone already, or this process ends too
                mesh.stop(reason).wait(None)

    def seen_by_owner(self, failure: MeshFailure) -> list[MeshFailure]:
        """A process's failure as one of each mesh of actors that lost a member with it; none where it is known."""
        address = failure.address
        if address is None:
            return [failure]
        with self._lock:
            if address in self._failed:
                return []
            self._failed.add(address)
            all_kept = list(self._kept)
        return [
            dataclasses.replace(failure, mesh_name=kept.name, rank=kept.addresses.index(address))
            for kept in all_kept
            if kept.has_actors and address in kept.addresses
        ] or [failure]
