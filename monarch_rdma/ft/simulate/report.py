"""What a prediction says, as text and as JSON. Every page says that it is a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .measured import Replay
from .outcome import ACCOUNTS
from .prediction import Mean, Prediction, Sensitivity
from .settings import Setting

__all__ = ["LABEL", "as_json", "inputs_table", "prediction_text", "replay_text", "sensitivity_table"]

LABEL = "Simulation: nothing here was measured on the hardware it speaks of."

_FIGURES = {
    "scaling_efficiency": "scaling efficiency",
    "active_nodes_low": "nodes that train, 1 % of the time at most",
    "active_nodes_high": "nodes that train, 99 % of the time at most",
    "active_nodes_mean": "nodes that train, mean",
    "goodput_healing": "goodput, healing",
    "goodput_checkpointing": "goodput, checkpoint and restart",
    "goodput_without_failures": "goodput without any failure",
    "failures": "failures in the run",
}


def prediction_text(prediction: Prediction) -> str:
    setting = prediction.setting
    rows = [("", "predicted", "published", "ratio")]
    for name, label in _FIGURES.items():
        if name in prediction.figures:
            mean, published = prediction.figures[name], setting.published.get(name)
            known = _number(name, Mean(published.value)) if published else ""
            ratio = f"{mean.value / published.value:.3f}" if published else ""
            rows.append((label, _number(name, mean), known, ratio))
    text = f"{setting.name}: {setting.title}\n{_table(rows)}"
    if not prediction.accounts:
        return text
    accounts = [("where the time went", *prediction.accounts)]
    for account, about in ACCOUNTS.items():
        shares = [f"{100 * shares[account]:.1f} %" for shares in prediction.accounts.values()]
        accounts.append((about, *shares))
    return f"{text}\n\n{_table(accounts)}"


def sensitivity_table(setting: Setting, figure: str, entries: Sequence[Sensitivity]) -> str:
    """The inputs that change `figure` as it is printed, and how many do not."""
    rows: list[tuple[str, ...]] = [("input", "low", "high", f"{_FIGURES[figure]} at low", "at high", "kind")]
    for entry in entries:
        of = setting.inputs[entry.name]
        ends = [_number(figure, Mean(value)) for value in (entry.at_low, entry.at_high)]
        if ends[0] != ends[1]:
            rows.append((entry.name, f"{of.low:g}", f"{of.high:g}", *ends, of.kind))
    return f"{_table(rows)}\n{len(entries) + 1 - len(rows)} more have a range that does not change it"


def inputs_table(setting: Setting) -> str:
    rows = [("input", "value", "low", "high", "kind", "source", "unit")]
    for name, of in setting.inputs.items():
        rows.append((name, f"{of.value:g}", f"{of.low:g}", f"{of.high:g}", of.kind, of.source, of.unit))
    return f"{setting.name}: {setting.title}\n{_table(rows)}"


def replay_text(replay: Replay) -> str:
    measured = replay.measured
    goodput = f"{100 * replay.outcome.goodput:.1f} %", f"{100 * measured.goodput:.1f} %"
    rows = [
        ("", "predicted", "measured", "ratio"),
        ("rounds of groups", f"{replay.outcome.group_rounds:g}", f"{measured.group_rounds:g}", f"{replay.ratio:.3f}"),
        ("goodput", *goodput, f"{replay.outcome.goodput / measured.goodput:.3f}"),
    ]
    return f"{measured.title}: {len(measured.failures)} failures in {measured.duration_s:g} s\n{_table(rows)}"


def as_json(prediction: Prediction) -> dict[str, Any]:
    setting = prediction.setting
    return {
        "setting": setting.name,
        "simulation": True,
        "figures": {
            name: {"value": mean.value, "error": mean.error}
            | ({"published": setting.published[name].value} if name in setting.published else {})
            for name, mean in prediction.figures.items()
        },
        "accounts": {policy: dict(shares) for policy, shares in prediction.accounts.items()},
        "active_nodes": {str(count): part for count, part in sorted(prediction.active.items())},
    }


def _number(figure: str, mean: Mean) -> str:
    if "goodput" in figure or "efficiency" in figure:
        error = f" +- {100 * mean.error:.2f}" if mean.error else ""
        return f"{100 * mean.value:.2f}{error} %"
    error = f" +- {mean.error:.1f}" if mean.error >= 0.05 else ""
    return f"{mean.value:.1f}{error}"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
