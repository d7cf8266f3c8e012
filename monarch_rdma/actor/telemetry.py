"""Spans and meters: OpenTelemetry's where it is installed, else objects of the same form that do nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

from .context import running

__all__ = ["Meter", "get_meter", "span", "traced"]

F = TypeVar("F", bound=Callable[..., Any])

_NAME = "monarch_rdma"
_log = logging.getLogger("monarch_rdma.actor.span")


def span(name: str) -> AbstractContextManager[Any]:
    """A with block under this name in the trace, with the actor that runs as attribute `actor`. Without OpenTelemetry:
    a line of how long it took, at level DEBUG of logger monarch_rdma.actor.span.
    """
    trace = _opentelemetry("trace")
    if trace is None:
        return _logged(name)
    actor = _actor()
    attributes = {} if actor is None else {"actor": actor}
    found: AbstractContextManager[Any] = trace.get_tracer(_NAME).start_as_current_span(name, attributes=attributes)
    return found


@overload
def traced(fn: F) -> F: ...


@overload
def traced(*, name: str) -> Callable[[F], F]: ...


def traced(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Decorates a function, sync or async: each call is a span of its name, or of `name`."""
    if fn is None:
        return functools.partial(traced, name=name)
    title = name or fn.__name__
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def traced_async(*args: Any, **kwargs: Any) -> Any:
            with span(title):
                return await fn(*args, **kwargs)

        return traced_async

    @functools.wraps(fn)
    def traced_sync(*args: Any, **kwargs: Any) -> Any:
        with span(title):
            return fn(*args, **kwargs)

    return traced_sync


def get_meter() -> Any:
    """OpenTelemetry's meter of this library; without it, a Meter."""
    metrics = _opentelemetry("metrics")
    return Meter() if metrics is None else metrics.get_meter(_NAME)


class Instrument:
    """Takes measurements and forgets them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Of counters."""

    def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Of histograms."""

    def set(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Of gauges."""


class Meter:
    """As OpenTelemetry's, but nothing is measured."""

    name = _NAME

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Instrument:
        return Instrument(name)

    create_up_down_counter = create_gauge = create_counter

    def create_histogram(self, name: str, unit: str = "", description: str = "", **_: Any) -> Instrument:
        return Instrument(name)

    def create_observable_counter(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Instrument:
        """The callbacks are never called."""
        return Instrument(name)

    create_observable_up_down_counter = create_observable_gauge = create_observable_counter


@functools.cache
def _opentelemetry(part: str) -> Any:
    """`opentelemetry.trace` or `.metrics`; None where it is not installed."""
    import importlib

    try:
        return importlib.import_module(f"opentelemetry.{part}")
    except ImportError:
        return None


def _actor() -> str | None:
    found = running.get(None)
    return str(found.actor_instance.actor_id) if found is not None else None


@contextlib.contextmanager
def _logged(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        _log.debug("%s took %.6f s in %s", name, time.perf_counter() - begin, _actor() or "the client")
