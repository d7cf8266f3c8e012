"""`monarch-rdma simulate`, also `python -m monarch_rdma.ft.simulate`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from ...progress import track
from . import measured, report
from .job import InputError
from .prediction import Prediction, predict, sensitivity
from .settings import FROZEN, Setting, load

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code: 0 done, 1 failed, 2 wrong arguments."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except InputError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.measured:
        print(report.replay_text(measured.replay(measured.read(arguments.measured))))
        return 0
    settings = _chosen(load(arguments.settings), arguments.setting)
    if arguments.inputs:
        print("\n\n".join(report.inputs_table(setting) for setting in settings))
        return 0
    changed = dict(arguments.set)
    with track("simulating", arguments.seeds * len(settings)) as advance:
        predictions = [predict(setting, setting.values(**changed), arguments.seeds, advance) for setting in settings]
    if arguments.json:
        print(json.dumps([report.as_json(prediction) for prediction in predictions], indent=1))
    else:
        print(report.LABEL)
        for prediction in predictions:
            print(f"\n{report.prediction_text(prediction)}")
            if arguments.sensitivity:
                print(f"\n{_sensitivity_text(prediction, changed)}")
    if arguments.plots:
        _draw(predictions, changed, arguments.plots)
    return 0


def _chosen(settings: dict[str, Setting], names: Sequence[str]) -> list[Setting]:
    for name in names:
        if name not in settings:
            raise InputError(f"setting is {name!r}, but must be one of {', '.join(settings)}")
    return [settings[name] for name in names or settings]


def _main_figure(prediction: Prediction) -> str:
    """What was published for the setting, or its goodput."""
    return next(iter(prediction.setting.published), "goodput_healing")


def _sensitivity_text(prediction: Prediction, changed: dict[str, float]) -> str:
    setting, figure = prediction.setting, _main_figure(prediction)
    with track(f"sensitivity of {setting.name}", len(setting.inputs)) as advance:
        found = sensitivity(setting, setting.values(**changed), figure, advance=advance)
    return report.sensitivity_table(setting, figure, found)


def _draw(predictions: Sequence[Prediction], changed: dict[str, float], folder: Path) -> None:
    try:
        import matplotlib  # noqa: F401

        from . import plots
    except ImportError:
        raise InputError("plots need matplotlib: pip install matplotlib") from None
    inputs = sum(len(prediction.setting.inputs) for prediction in predictions)
    failing = [prediction.setting for prediction in predictions if prediction.setting.has_failures]
    entries = {}
    with track("drawing", inputs + 10 * len(failing)) as advance:
        for prediction in predictions:
            setting, figure = prediction.setting, _main_figure(prediction)
            found = sensitivity(setting, setting.values(**changed), figure, advance=advance)
            entries[setting.name] = setting, figure, prediction.figures[figure].value, found
        plots.draw_sensitivity(entries, folder / "goodput-sensitivity.svg")
        if failing:
            plots.draw_accounts(predictions, folder / "goodput-accounts.svg")
            plots.draw_failure_rates(failing, folder / "goodput-failures.svg", 8, advance)
    print(f"plots: {folder}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="monarch-rdma simulate",
        description="A model of training under failures: goodput with healing and with checkpoints, and scaling. "
        "It is a simulation; docs/goodput.md tells what it is worth.",
    )
    parser.add_argument("setting", nargs="*", help="which settings of the file [all]")
    parser.add_argument("--set", metavar="INPUT=VALUE", type=_change, action="append", default=[], help="another value")
    parser.add_argument("--seeds", metavar="N", type=_count, default=32, help="runs a setting [%(default)s]")
    parser.add_argument("--sensitivity", action="store_true", help="each input at the ends of its range")
    parser.add_argument("--inputs", action="store_true", help="print the inputs and their sources, run nothing")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write the pictures there (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--settings", metavar="FILE", type=Path, default=FROZEN, help="another file of settings")
    parser.add_argument(
        "--measured", metavar="FILE", type=Path, help="hold a real run against the model, and nothing else"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name, = and a number")
    return name, number
