"""The metrics of this process: what each is called, and the function that reads it.

Nothing is counted here: a metric reads, when it is asked, what is counted anyway. Paths that move data pay nothing.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ConfigError

__all__ = ["Metric", "Reading", "Value", "Values", "collect", "counter", "gauge", "on_register", "unregister"]

_log = logging.getLogger("monarch_rdma.supervision")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Value(NamedTuple):
    """One number. `labels`: what tells it from the metric's others."""

    labels: Mapping[str, str]
    number: float


Values = float | Iterable[Value]


@dataclass(frozen=True)
class Metric:
    """`kind`: "counter" (only rises while the process lives) or "gauge". `read`: a number, or several with labels."""

    name: str
    kind: str
    about: str
    read: Callable[[], Values]

    def values(self) -> list[Value]:
        found = self.read()
        return [Value({}, found)] if isinstance(found, int | float) else list(found)


class Reading(NamedTuple):
    """What a metric said. Plain values: it can be sent."""

    name: str
    kind: str
    about: str
    values: list[Value]


_metrics: dict[str, Metric] = {}  # by name, in the order of their making
_listeners: list[Callable[[Metric], None]] = []
_lock = threading.Lock()


def counter(name: str, about: str, read: Callable[[], Values]) -> Metric:
    """Registers a counter; its name ends in `_total`. ConfigError where the name cannot be one, or is taken."""
    if not name.endswith("_total"):
        raise ConfigError(f"name is {name!r}, but the name of a counter must end in _total")
    return _register(Metric(name, "counter", about, read))


def gauge(name: str, about: str, read: Callable[[], Values]) -> Metric:
    """Registers a gauge: what can also fall. ConfigError where the name cannot be one, or is taken."""
    return _register(Metric(name, "gauge", about, read))


def _register(metric: Metric) -> Metric:
    if not _NAME.fullmatch(metric.name):
        raise ConfigError(f"name is {metric.name!r}, but must be letters, digits and underscores")
    if not callable(metric.read):
        raise ConfigError(f"read is {metric.read!r}, but must be a function that gives a number, or Values")
    with _lock:
        if metric.name in _metrics:
            raise ConfigError(f"name is {metric.name!r}, but there is a metric of that name")
        _metrics[metric.name] = metric
        listeners = list(_listeners)
    for listener in listeners:
        listener(metric)
    return metric


def unregister(metric: Metric) -> None:
    """Idempotent."""
    with _lock:
        if _metrics.get(metric.name) is metric:
            del _metrics[metric.name]


def on_register(listener: Callable[[Metric], None]) -> None:
    """Calls `listener` with every metric, those that are there already included."""
    with _lock:
        _listeners.append(listener)
        known = list(_metrics.values())
    for metric in known:
        listener(metric)


def collect() -> list[Reading]:
    """All of this process's metrics now. One that cannot be read is left out, and a warning says why."""
    with _lock:
        known = list(_metrics.values())
    readings = []
    for metric in known:
        try:
            readings.append(Reading(metric.name, metric.kind, metric.about, metric.values()))
        except Exception:
            _log.warning("metric %s cannot be read", metric.name, exc_info=True)
    return readings
