"""Exports every metric through OpenTelemetry, where that package is installed."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from .registry import Metric, on_register

__all__ = ["export_to_opentelemetry"]

_lock = threading.Lock()
_is_exported = False


def export_to_opentelemetry() -> bool:
    """Makes an instrument of OpenTelemetry of each metric of this process, now and later ones; False where the package
    is not installed. Once is enough, before or after the program sets its MeterProvider. Done by itself where a program
    has imported `opentelemetry.metrics` before its first actor.
    """
    global _is_exported
    try:
        api = importlib.import_module("opentelemetry.metrics")
    except ImportError:
        return False
    with _lock:
        if _is_exported:
            return True
        _is_exported = True
    meter = api.get_meter("monarch_rdma")
    on_register(lambda metric: _make_instrument(api, meter, metric))
    return True


def _make_instrument(api: Any, meter: Any, metric: Metric) -> None:
    make: Callable[..., Any] = (
        meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
    )

    def observe(options: Any) -> list[Any]:
        return [api.Observation(value.number, dict(value.labels)) for value in metric.values()]

    make(metric.name.removesuffix("_total"), callbacks=[observe], description=metric.about)
