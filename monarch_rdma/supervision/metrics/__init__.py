"""Counters and gauges: one registry a process, read when somebody asks. See docs/events-and-metrics.md.

`server` is imported by who needs it.
"""

from __future__ import annotations

from . import process  # registers what every process has
from .opentelemetry import export_to_opentelemetry
from .registry import Metric, Reading, collect, counter, gauge, unregister
from .text import render

__all__ = [
    "Metric",
    "Reading",
    "collect",
    "counter",
    "export_to_opentelemetry",
    "gauge",
    "process",
    "render",
    "unregister",
]
