"""The process group that TorchFT's Manager takes: made anew for each quorum, of whoever is in it.

    from monarch_rdma.collectives.torchft import ReconfigurableProcessGroup
    manager = torchft.Manager(pg=ReconfigurableProcessGroup(timeout=timedelta(seconds=30)), ...)

A member that is lost ends what is pending on the others with PeerLost, at once where the kernel tells; the Manager
then asks for a new quorum, and `configure` makes a group of it, in the same processes. Needs torchft (extra `ft`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from .process_group import BACKEND, ProcessGroup, meet_in_store

__all__ = ["ReconfigurableProcessGroup"]


class ReconfigurableProcessGroup(ProcessGroupWrapper):  # type: ignore[misc]
    """For tensors in host memory. `timeout`: of forming a group, and of each call where it does not say."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._error: Exception | None = None  # why the last group was aborted

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        self._error = None
        return meet_in_store(store, rank, world_size, self._timeout)

    def rank(self) -> int:
        """In the group of this quorum: that of its replica. torch's own answer would be 0 for all."""
        return 0 if self._pg is None else int(self._pg.rank())

    def errored(self) -> Exception | None:
        """What every call raises now, where the group of this quorum has failed, or was aborted."""
        return self._error if self._pg is None else self._pg.group.core.failure

    def abort(self, errored: bool = True) -> None:
        """Ends what is pending, on all members; `configure` makes a new group."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            self._error = group.group.core.failure if errored else None
            group.shutdown()

    def shutdown(self) -> None:
        group: Any = self._pg
        self._pg: Any = None
        if group is not None:
            group.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def getBackendName(self) -> str:
        return BACKEND
