"""What pods have printed, from the API server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .cluster import Cluster

__all__ = ["PodLogs"]

_PAUSE = 2.0  # seconds between two questions


class PodLogs:
    """A job.logs.Log of some pods; also of those that take the place of others under the same names."""

    problem = ""

    def __init__(self, cluster: Cluster, namespace: str, pods: Callable[[], Iterable[str]]) -> None:
        """`pods`: their names, as they are now."""
        self._cluster = cluster
        self._namespace = namespace
        self._pods = pods
        self._told: dict[str, int] = {}  # lines
        self._next = 0.0

    def read(self, *, to_its_end: bool) -> list[str]:
        """See Log. Raises ApiError."""
        if not to_its_end and time.monotonic() < self._next:
            return []
        lines = [line for pod in self._pods() for line in self._lines_of(pod)]
        self._next = time.monotonic() + _PAUSE
        return lines

    def _lines_of(self, pod: str) -> list[str]:
        lines = self._cluster.log(self._namespace, pod)
        told = self._told.get(pod, 0)
        self._told[pod] = len(lines)
        return [f"[{pod}] {line}" for line in lines[told if told <= len(lines) else 0 :]]

    def close(self) -> None:
        """Nothing follows it."""
