"""Tells owners of processes that these are lost together with their host: no agent is left to do it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...supervision.events import emit
from ..failure import MeshFailure

if TYPE_CHECKING:
    from ..failure import SupervisionError
    from ..runtime.message import Frame
    from ..runtime.proc import Proc

__all__ = ["HostWatch"]


@dataclass(frozen=True)
class _Spawned:
    agent: str
    mesh: str
    rank: int
    owner: tuple[str, int]


class HostWatch:
    """The processes that code of this process has spawned on other hosts, until it stops them."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._spawned: dict[str, _Spawned] = {}  # by address
        self._lock = threading.Lock()
        self._number = proc.register(self)

    def add(self, agent: str, mesh: str, first_rank: int, addresses: Sequence[str], owner: tuple[str, int]) -> None:
        if agent == self._proc.address:
            return
        with self._lock:
            for rank, address in enumerate(addresses, first_rank):
                self._spawned[address] = _Spawned(agent, mesh, rank, owner)
        self._proc.expect(self._number, agent, standing=True)

    @property
    def agents(self) -> set[str]:
        """Those of the hosts where they run."""
        with self._lock:
            return {spawned.agent for spawned in self._spawned.values()}

    def discard(self, addresses: Sequence[str]) -> None:
        """They are being stopped."""
        with self._lock:
            agents = {found.agent for address in addresses if (found := self._spawned.pop(address, None))}
            idle = agents - {each.agent for each in self._spawned.values()}
        for agent in idle:
            self._proc.fulfil(self._number, agent)

    def discard_hosts(self, agents: Sequence[str]) -> None:
        """All of these hosts' processes are being stopped."""
        with self._lock:
            addresses = [address for address, spawned in self._spawned.items() if spawned.agent in agents]
        self.discard(addresses)

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, agent: str, error: SupervisionError) -> None:
        if agent == self._proc.address:
            return
        with self._lock:
            lost = {address: spawned for address, spawned in self._spawned.items() if spawned.agent == agent}
            for address in lost:
                del self._spawned[address]
        for address, spawned in lost.items():
            why = f"its host's agent is lost, and its processes with it: {error}"
            event = emit(
                "host.lost", cause=error.event, mesh=spawned.mesh, rank=spawned.rank, address=address, message=why
            )
            failure = MeshFailure(spawned.mesh, "process", why, spawned.rank, address=address, event=event, host=agent)
            self._proc.tell_owner(spawned.owner, failure.noted(f"noticed by {self._proc.name}, which spawned it"))
