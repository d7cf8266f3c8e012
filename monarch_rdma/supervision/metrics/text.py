"""Readings as text in the format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .registry import Reading, Value

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(readings: Iterable[Reading]) -> str:
    """Readings of one name (of several processes) come out together, as the format wants it."""
    by_name: dict[str, tuple[Reading, list[Value]]] = {}
    for reading in readings:
        _, values = by_name.setdefault(reading.name, (reading, []))
        values += reading.values
    lines = []
    for name, (reading, values) in by_name.items():
        lines.append(f"# HELP {name} {_escaped(reading.about)}")
        lines.append(f"# TYPE {name} {reading.kind}")
        lines += [f"{name}{_labels(value.labels)} {_number(value.number)}" for value in values]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    parts = (f'{name}="{_escaped(str(value), quoted=True)}"' for name, value in labels.items())
    return "{" + ",".join(parts) + "}" if labels else ""


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
