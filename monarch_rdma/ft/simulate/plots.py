"""The pictures of docs/goodput.md, as SVG. They need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .outcome import ACCOUNTS
from .prediction import Prediction, Sensitivity, predict
from .settings import Setting

__all__ = ["draw_accounts", "draw_failure_rates", "draw_sensitivity"]

_COLOURS = dict(
    zip(ACCOUNTS, ("#2a9d5c", "#d1495b", "#3b7ea1", "#e9b44c", "#8d6a9f", "#6b7280", "#d1d5db"), strict=True)
)
_FAILURE_INTERVALS = tuple(3600.0 * hours for hours in (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 16, 32))


def draw_accounts(predictions: Sequence[Prediction], path: Path) -> None:
    """A bar a setting and policy: where the time of its nodes went."""
    bars = [(entry.setting.name, policy, shares) for entry in predictions for policy, shares in entry.accounts.items()]
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(bars) + 1.6))
    places = range(len(bars))
    left = [0.0] * len(bars)
    for account, colour in _COLOURS.items():
        widths = [100 * shares[account] for _, _, shares in bars]
        axes.barh(places, widths, left=left, color=colour, label=account)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [f"{name}, {policy}" for name, policy, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the nodes' time (simulation)")
    axes.legend(ncols=len(_COLOURS), loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8)
    _save(figure, path)


def draw_sensitivity(
    entries: Mapping[str, tuple[Setting, str, float, Sequence[Sensitivity]]], path: Path, most: int = 8
) -> None:
    """A panel a setting: `figure` with each input at the ends of its range; dashed is published, dotted predicted."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(
        len(entries), 1, figsize=(9, 2.6 * len(entries)), squeeze=False, layout="constrained"
    )
    for axes, (setting, name, predicted, found) in zip(panels[:, 0], entries.values(), strict=True):
        shown = [entry for entry in found[:most] if entry.span > 0]
        scale = 100 if "nodes" not in name else 1
        for place, entry in enumerate(shown):
            low, high = scale * entry.at_low, scale * entry.at_high
            axes.plot([low, high], [place, place], color="#3b7ea1", linewidth=6, solid_capstyle="butt")
            axes.plot([low], [place], "o", color="#1d3557", markersize=5)
        axes.axvline(scale * predicted, color="#6b7280", linestyle=":")
        if name in setting.published:
            axes.axvline(scale * setting.published[name].value, color="#d1495b", linestyle="--")
        axes.set_yticks(range(len(shown)), [entry.name for entry in shown], fontsize=8)
        axes.invert_yaxis()
        unit = " (%)" if scale == 100 else ""
        axes.set_title(f"{setting.name}: {name.replace('_', ' ')}{unit}, simulation", fontsize=9, loc="left")
    _save(figure, path)


def draw_failure_rates(
    settings: Sequence[Setting], path: Path, seeds: int, advance: Callable[[int], None] = lambda amount: None
) -> None:
    """Goodput of both policies over the time between failures of the job. `advance` is called once a point."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, len(settings), figsize=(4.2 * len(settings), 3.4), squeeze=False, sharey=True)
    for axes, setting in zip(panels[0], settings, strict=True):
        found = []
        for interval in _FAILURE_INTERVALS:
            changed = setting.values(failure_interval_s=interval, periodic=0.0, horizon_s=max(21600.0, 60 * interval))
            found.append(predict(setting, changed, seeds).figures)
            advance(1)
        hours = [interval / 3600 for interval in _FAILURE_INTERVALS]
        for name, label, colour in (
            ("goodput_healing", "healing", _COLOURS["useful"]),
            ("goodput_checkpointing", "checkpoint and restart", _COLOURS["lost"]),
        ):
            axes.plot(hours, [100 * figures[name].value for figures in found], "o-", color=colour, label=label)
        axes.axvline(setting.inputs["failure_interval_s"].value / 3600, color="#6b7280", linestyle=":")
        axes.set_xscale("log")
        axes.set_ylim(0, 100)
        axes.set_title(setting.name, fontsize=9)
        axes.set_xlabel("hours between failures (Poisson)")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("goodput, % (simulation)")
    panels[0][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # The same picture, byte for byte, from the same figures.
    matplotlib.rcParams.update({"svg.hashsalt": "monarch_rdma", "svg.fonttype": "none"})
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot().close(figure)
