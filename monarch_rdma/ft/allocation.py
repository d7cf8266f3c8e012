"""Where replicas run: on this host, or on hosts of jobs, one for each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..actor import HostMesh, this_host
from ..errors import ConfigError

__all__ = ["Allocator", "FromJobs", "Job", "OnThisHost"]


class Allocator(Protocol):
    """Gives each replica some hosts, and others when it is asked again."""

    def allocate(self, replica: int) -> HostMesh:
        """Hosts for a replica. It may take minutes: it is called on a thread of its own. Raises where it has none."""
        ...

    def release(self, replica: int, hosts: HostMesh | None) -> None:
        """They are of no use for this replica any more. None: it still waits for them, and need not any longer."""
        ...


class OnThisHost:
    """All replicas on the host that this program runs on."""

    def allocate(self, replica: int) -> HostMesh:
        return this_host()

    def release(self, replica: int, hosts: HostMesh | None) -> None:
        """It stays."""


class Job(Protocol):
    """As the jobs of monarch_rdma.job are."""

    def state(self, cached_path: None = ..., timeout: float | None = ...) -> Any: ...

    def kill(self) -> None: ...


class FromJobs:
    """A job for each replica, so that what one loses is its own: `make(replica)` makes it, with one mesh.

    A replica that is in need of other hosts gets another job, after its last one was ended: the scheduler's queue
    decides when, and which hosts. All jobs end with the program.
    """

    def __init__(self, make: Callable[[int], Job], *, timeout: float | None = None) -> None:
        """`timeout`: seconds in the queue, after which a job is given up; None waits for ever."""
        if not callable(make):
            raise ConfigError(f"make is {make!r:.200}, but must make the job of a replica's number")
        if timeout is not None and (not isinstance(timeout, int | float) or not timeout > 0):
            raise ConfigError(f"timeout is {timeout!r:.200}, but must be a number of seconds above 0, or None")
        self._make, self._timeout = make, timeout
        self._jobs: dict[int, Job] = {}

    def allocate(self, replica: int) -> HostMesh:
        """As Allocator.allocate. Raises what the job does: ConfigError, JobEnded, TransferTimeout."""
        job = self._jobs[replica] = self._make(replica)
        try:
            state = job.state(cached_path=None, timeout=self._timeout)
            (name,) = state
            hosts: HostMesh = state[name]
        except BaseException:
            job.kill()
            raise
        return hosts

    def release(self, replica: int, hosts: HostMesh | None) -> None:
        """As Allocator.release. A job that waits in the queue is cancelled."""
        job = self._jobs.pop(replica, None)
        if job is not None:
            job.kill()
