"""Metrics of actors, and those of a whole program in one place. What each process counts is in supervision/metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import config
from ..errors import ConfigError
from ..supervision import metrics
from ..supervision.events import emit
from ..supervision.metrics.registry import Reading, Value
from .runtime.proc import Proc, existing_proc

if TYPE_CHECKING:
    from ..supervision.metrics.server import Server
    from .debugging.survey import Process
    from .runtime.instance import Instance

__all__ = ["export_where_used", "of_process", "of_program", "start_export", "url"]

_TIMEOUT = 2.0  # seconds that a process has to answer
_UP = "monarch_rdma_up"
_ABOUT_UP = "Whether the process answered when it was asked for its metrics."


def of_process() -> dict[str, Any]:
    """This process's metrics, as its agent tells them; `hosts`: agents that are known here."""
    from .debugging.inspection import known_hosts
    from .runtime.proc import current_proc

    readings = [
        (*reading[:3], [(dict(labels), number) for labels, number in reading.values]) for reading in metrics.collect()
    ]
    return {"hosts": known_hosts(current_proc()), "readings": readings}


def of_program(proc: Proc) -> list[Reading]:
    """The metrics of all processes of this program, each with labels `process` and `pid`. One that does not answer in
    time has `monarch_rdma_up` 0, and what the kernel says of it.
    """
    from .debugging.survey import survey

    return [reading for process in survey(proc.address, _TIMEOUT, "metrics") for reading in _readings(process)]


def _readings(process: Process) -> Iterator[Reading]:
    labels = {"process": process.name}
    if process.facts is not None:
        labels["pid"] = str(process.facts.pid)
    answer = process.status
    yield Reading(_UP, "gauge", _ABOUT_UP, [Value(labels, float(answer is not None))])
    if answer is not None:
        for name, kind, about, values in answer["readings"]:
            yield Reading(name, kind, about, [Value({**labels, **own}, number) for own, number in values])


def export_where_used() -> None:
    """To OpenTelemetry, where this process has imported it."""
    if "opentelemetry.metrics" in sys.modules:
        metrics.export_to_opentelemetry()


def start_export(proc: Proc) -> None:
    """Once in each program: to OpenTelemetry where the program uses it, to Prometheus where option metrics_listen says
    so. ConfigError where it cannot be listened there.
    """
    global _server
    export_where_used()
    listen = str(config.get("metrics_listen"))
    if listen and proc.client in (None, proc.address):
        from ..supervision.metrics.server import Server

        _server = Server(listen, lambda: of_program(proc))
        proc.at_close(_close)
        emit("metrics.listening", url=_server.url)


_server: Server | None = None


def _close() -> None:
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def url() -> str:
    """Where this program serves its metrics. ConfigError where it does not: option `metrics_listen` is not set, or the
    program has no actors yet.
    """
    if _server is None:
        raise ConfigError("this program serves no metrics: set option metrics_listen before its first actor")
    return _server.url


# --- what is measured


def _actors() -> list[Instance]:
    from .runtime.instance import Instance

    proc = existing_proc()
    receivers = [] if proc is None else list(proc.receivers.values())
    return [receiver for receiver in receivers if isinstance(receiver, Instance)]


def _calls() -> float:
    proc = existing_proc()
    return 0 if proc is None else proc.calls.read()


def _handled() -> Iterator[Value]:
    proc = existing_proc()
    if proc is None:
        return
    with proc.counting:
        living, handled = _actors(), proc.handled_by_ended.copy()
    for actor in living:
        handled[actor.class_name] += actor.num_handled
    for name, number in sorted(handled.items()):
        yield Value({"class": name}, number)


def _by_name(key: str, combine: Callable[[list[float]], float]) -> Iterator[Value]:
    """Of the actors with one name and rank: a process may have several."""
    now, found = time.monotonic(), dict[tuple[str, int], list[float]]()
    for actor in _actors():
        told = actor.describe(now)
        found.setdefault((told["name"], told["rank"]), []).append(float(told[key] or 0))
    for (name, rank), numbers in found.items():
        yield Value({"actor": name, "rank": str(rank)}, combine(numbers))


metrics.counter("monarch_rdma_calls_total", "Calls of actors that wait, or waited, for answers.", _calls)
metrics.counter("monarch_rdma_handled_total", "Messages that actors have worked on, by class.", _handled)
metrics.gauge("monarch_rdma_actors", "Actors of the process.", lambda: len(_actors()))
metrics.gauge("monarch_rdma_mailbox_depth", "Messages that wait.", lambda: _by_name("mailbox", sum))
metrics.gauge("monarch_rdma_message_age_seconds", "Age of the message at hand.", lambda: _by_name("age", max))
