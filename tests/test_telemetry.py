"""span, traced and get_meter, with OpenTelemetry (a stand-in of its interface) and without."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_rdma.actor import Actor, endpoint, get_meter, shutdown_context, span, this_proc, traced
from monarch_rdma.actor.telemetry import Meter, _opentelemetry


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OpenTelemetry is not installed."""
    for part in ("opentelemetry", "opentelemetry.trace", "opentelemetry.metrics"):
        monkeypatch.setitem(sys.modules, part, None)
    _opentelemetry.cache_clear()
    yield
    _opentelemetry.cache_clear()


class StandInMeter(str):
    """Its text is its name."""

    def create_observable_counter(self, name: str, callbacks: Any = None, **_: Any) -> str:
        return name

    create_observable_gauge = create_observable_counter


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What OpenTelemetry is told: (name, attributes) of each span that begins, "end" for each that ends."""
    told: list[Any] = []

    class Tracer:
        @contextlib.contextmanager
        def start_as_current_span(self, name: str, attributes: dict[str, str]) -> Iterator[str]:
            told.append((name, attributes))
            try:
                yield "the span"
            finally:
                told.append("end")

    package, trace, metrics = (types.ModuleType(f"opentelemetry{part}") for part in ("", ".trace", ".metrics"))
    trace.get_tracer = lambda name: Tracer()  # type: ignore[attr-defined]
    metrics.get_meter = StandInMeter  # type: ignore[attr-defined]
    metrics.Observation = tuple  # type: ignore[attr-defined]
    for module in (package, trace, metrics):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    _opentelemetry.cache_clear()
    yield told
    _opentelemetry.cache_clear()


@traced
def double(x: int) -> int:
    """Twice."""
    return 2 * x


@traced(name="other")
async def double_later(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


@traced
def fail() -> None:
    raise KeyError("gone")


class Traced(Actor):
    @endpoint
    @traced
    def double(self, x: int) -> int:
        return 2 * x


def test_spans_go_to_opentelemetry(spans: list[Any]) -> None:
    with span("outer") as found:
        assert found == "the span"
        assert double(2) == 4
    assert asyncio.run(double_later(3)) == 6
    with pytest.raises(KeyError):
        fail()
    assert spans == [("outer", {}), ("double", {}), "end", "end", ("other", {}), "end", ("fail", {}), "end"]


def test_a_span_in_an_actor_names_it(spans: list[Any]) -> None:
    assert this_proc().spawn("traced", Traced).double.call_one(2).get(20) == 4
    shutdown_context().get(20)
    ((name, attributes), _) = spans
    assert name == "double" and "traced[0]" in attributes["actor"]


def test_the_meter_is_opentelemetrys(spans: list[Any]) -> None:
    assert isinstance(get_meter(), StandInMeter) and get_meter() == "monarch_rdma"


def test_without_it_spans_are_logged(without: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "monarch_rdma.actor.span"):
        with span("outer"):
            assert double(2) == 4
        with pytest.raises(KeyError):
            fail()
    assert [message.split()[0] for message in caplog.messages] == ["double", "outer", "fail"]


def test_without_it_the_meter_takes_everything(without: None) -> None:
    meter = get_meter()
    assert isinstance(meter, Meter)
    meter.create_counter("calls", unit="1", description="how many").add(1, {"actor": "a"})
    meter.create_up_down_counter("open").add(-1)
    meter.create_histogram("time", unit="s").record(0.5)
    meter.create_gauge("depth").set(3)
    assert meter.create_observable_gauge("age", callbacks=[fail]).name == "age"


def test_traced_functions_keep_their_names() -> None:
    assert (double.__name__, double.__doc__, double_later.__name__) == ("double", "Twice.", "double_later")
    assert asyncio.iscoroutinefunction(double_later) and not asyncio.iscoroutinefunction(double)
