"""What an actor, or the client's code, has spawned: to say which of its meshes a failed process was part of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from .failure import MeshFailure
from .future import Future

__all__ = ["Owned"]


class Stoppable(Protocol):
    def stop(self, reason: str) -> Future[None]: ...


class Owned:
    """The meshes of one owner."""

    def __init__(self) -> None:
        self._actors: dict[str, list[tuple[str, int]]] = {}  # by process: name of the mesh and rank in it
        self._meshes: list[Stoppable] = []
        self._failed: set[str] = set()  # processes: their end is told once

    def add(self, name: str, addresses: Sequence[str]) -> None:
        """Actors of this name, one in each of these processes."""
        for rank, address in enumerate(addresses):
            self._actors.setdefault(address, []).append((name, rank))

    def keep(self, mesh: Stoppable) -> None:
        """Ends with the owner."""
        self._meshes.append(mesh)

    def forget(self, mesh: Stoppable) -> None:
        """It was stopped. Nothing where it is not ours."""
        self._meshes = [kept for kept in self._meshes if kept is not mesh]

    def stop(self, reason: str) -> None:
        """Ends all that is kept, the last one first."""
        while self._meshes:
            self._meshes.pop().stop(reason).wait(None)

    def seen_by_owner(self, failure: MeshFailure) -> list[MeshFailure]:
        """A process's failure as one of each mesh of actors that lost a member with it; none where it is known."""
        if failure.address is not None:
            if failure.address in self._failed:
                return []
            self._failed.add(failure.address)
        lost = self._actors.pop(failure.address, ()) if failure.address is not None else ()
        return [dataclasses.replace(failure, mesh_name=name, rank=rank) for name, rank in lost] or [failure]
