"""What every process has: its engines' counters, its events, and what the kernel says of it."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator

from ...errors import ConfigError
from ...rdma.engine import open_engines
from .. import events
from .registry import Value, counter, gauge

__all__: list[str] = []

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TRANSFER = re.compile(r"(?P<lane>[a-z]+)_(?P<direction>read|write)(?P<what>s|_bytes)")
_GAUGES = {"regions", "ops_in_flight", "streams_up", "peers_known"}
_OF_THEIR_OWN = {"ops_failed", "sent_messages", "sent_message_bytes", "received_messages", "received_message_bytes"}


def _engine_counts() -> Counter[str]:
    """Of all engines of this process together."""
    total: Counter[str] = Counter()
    for engine in open_engines():
        try:
            total.update(engine.counters())
        except ConfigError:  # it was closed at this moment
            continue
    return total


def _transfers(what: str) -> Iterator[Value]:
    for name, number in sorted(_engine_counts().items()):
        match = _TRANSFER.fullmatch(name)
        if match is not None and match["what"] == what:
            yield Value({"lane": match["lane"], "direction": match["direction"]}, number)


def _messages(what: str) -> Iterator[Value]:
    counts = _engine_counts()
    for direction in ("sent", "received"):
        yield Value({"direction": direction}, counts[f"{direction}_message{what}"])


def _other_counts() -> Iterator[Value]:
    """What the lanes count for themselves: connections lost, pieces sent again, wake-ups."""
    for name, number in sorted(_engine_counts().items()):
        if not _TRANSFER.fullmatch(name) and name not in _GAUGES | _OF_THEIR_OWN:
            yield Value({"what": name}, number)


def _events() -> Iterator[Value]:
    for kind, number in sorted(events.counts().items()):
        yield Value({"kind": kind}, number)


def _failures() -> Iterator[Value]:
    counts = events.counts()
    for kind in ("process.failed", "actor.failed", "host.lost", "peer.lost"):
        yield Value({"kind": kind}, counts.get(kind, 0))


def _resident_bytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _threads() -> float:
    return len(os.listdir("/proc/self/task"))


def _descriptors() -> float:
    return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists


counter("monarch_rdma_transfers_total", "One-sided reads and writes that succeeded.", lambda: _transfers("s"))
counter("monarch_rdma_transfer_bytes_total", "Bytes that they moved.", lambda: _transfers("_bytes"))
counter(
    "monarch_rdma_operations_failed_total",
    "Transfers, connections, drops, look-ups and watches that ended with an error.",
    lambda: _engine_counts()["ops_failed"],
)
gauge(
    "monarch_rdma_operations_in_flight",
    "Operations at work, and other processes that are watched.",
    lambda: _engine_counts()["ops_in_flight"],
)
counter("monarch_rdma_messages_total", "Messages between processes.", lambda: _messages("s"))
counter("monarch_rdma_message_bytes_total", "Bytes of messages between processes.", lambda: _messages("_bytes"))
gauge("monarch_rdma_regions", "Regions that others may reach.", lambda: _engine_counts()["regions"])
gauge("monarch_rdma_peers", "Processes with a connection to this one.", lambda: _engine_counts()["streams_up"])
counter("monarch_rdma_engine_total", "What engines and lanes count for themselves.", _other_counts)
counter("monarch_rdma_events_total", "Events, by kind.", _events)
counter("monarch_rdma_failures_total", "Failures that this process has noticed.", _failures)
counter(
    "monarch_rdma_restarts_total",
    "Processes and actors that this process had started again.",
    lambda: events.counts().get("restart.done", 0),
)
counter("monarch_rdma_process_cpu_seconds_total", "Processor time used.", time.process_time)
gauge("monarch_rdma_process_resident_bytes", "Memory that the process has in RAM.", _resident_bytes)
gauge("monarch_rdma_process_threads", "Threads of the process.", _threads)
gauge("monarch_rdma_process_descriptors", "Open descriptors of the process.", _descriptors)
