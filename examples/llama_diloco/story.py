"""Four replicas of two trainers each, a fault every few seconds, no checkpoint: beside the same without failures.

From the repository's root: `python -m examples.llama_diloco.story`, or `make demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from monarch_rdma.actor.chaos import Injector
from monarch_rdma.config import configure
from monarch_rdma.errors import RdmaError
from monarch_rdma.ft import History, RecoveryPolicy, Report, Synchronised, TrainingPlan, train
from monarch_rdma.supervision.chaos import Plan
from monarch_rdma.supervision.policy import Policy

from .chart import draw
from .faults import faults, struck_by
from .goodput import held_against_the_model
from .live import Live
from .llama import LlamaConfig
from .replicas import HELD_OUT, recipe
from .trainer import Trainer, TrainerConfig

MODEL = LlamaConfig(dim=64, layers=2, hidden=160, context=64)
EVERY = 20  # steps between two synchronisations
_PATIENCE = 0.5  # seconds for a fault that is just being done
POLICY = RecoveryPolicy(
    trainers=Policy(max_restarts=3, within=20.0),
    replica=Policy(max_restarts=5, within=60.0),
    allocation=Policy(max_restarts=None),
)


@dataclass(frozen=True)
class Setting:
    """`rounds`: of each run; None for as many as take `seconds`. `fault_every`: seconds."""

    replicas: int = 4
    trainers: int = 2
    rounds: int | None = None
    seconds: float = 75.0
    fault_every: float = 4.0
    seed: int = 0
    output: Path = Path("demo_out")


def play(setting: Setting) -> int:
    """Both runs, the table and the picture; the exit code. RdmaError where a training did not come to its end."""
    setting.output.mkdir(parents=True, exist_ok=True)
    rounds = setting.rounds or affordable_rounds(setting)
    print(
        f"\nA Llama of {parameters():,} parameters in {setting.replicas} replicas of {setting.trainers} trainers, "
        f"DiLoCo every {EVERY} steps, {rounds} rounds of all replicas, twice."
    )
    calm = run(setting, rounds, "without failures", fault_every=None)
    faulted = run(setting, rounds, f"a fault about every {setting.fault_every:g} s", setting.fault_every)
    print(table(calm, faulted, setting))
    run_file = setting.output / "measured.json"
    print(f"\n{held_against_the_model(faulted, run_file, replicas=setting.replicas, every=EVERY)}")
    write(setting.output / "story.json", calm, faulted)
    if draw(setting.output / "story.png", calm, faulted, replicas=setting.replicas):
        print(f"\nPicture: {setting.output / 'story.png'}; all figures: {setting.output / 'story.json'}")
    else:
        print(f"\nNo picture: pip install matplotlib. All figures: {setting.output / 'story.json'}")
    return 0


def parameters() -> int:
    return sum(parameter.numel() for parameter in Trainer(TrainerConfig(model=MODEL)).model.parameters())


def affordable_rounds(setting: Setting) -> int:
    """By how long a step takes here, when every core has one."""
    torch.set_num_threads(1)
    trainer = Trainer(TrainerConfig(model=MODEL))
    trainer.step()
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - begin)
    cores = len(os.sched_getaffinity(0))
    step = statistics.median(times) * max(1.0, setting.replicas * setting.trainers / cores) * 1.4  # and all the rest
    return min(40, max(6, int(setting.seconds / (step * EVERY))))


def run(setting: Setting, rounds: int, title: str, fault_every: float | None) -> History:
    """One training, with faults or without."""
    config = TrainerConfig(model=MODEL, steps=rounds * EVERY)
    plan = TrainingPlan(
        recipe(config, every=EVERY),
        steps=rounds * EVERY * setting.replicas,
        replicas=setting.replicas,
        trainers=setting.trainers,
        threads=1,
        preload=("examples.llama_diloco.replicas", "examples.llama_diloco.text_in_memory"),
    )
    history = History()
    print(f"\n{title[0].upper()}{title[1:]}:", flush=True)
    with Live(title, setting.replicas, plan.steps) as live:
        storm = Storm(setting, plan, fault_every, history, live)

        def watch(report: Report) -> None:
            history.add(report)
            live.show(report)
            storm.see(report)

        try:
            train(plan, policy=POLICY, watch=watch)
        finally:
            storm.end()
    return history


class Storm:
    """Puts faults on a training from the end of its first round until shortly before its end."""

    def __init__(self, setting: Setting, plan: TrainingPlan, every: float | None, history: History, live: Live) -> None:
        self._history, self._live = history, live
        self._last_total = plan.steps - 2 * EVERY * plan.replicas
        self._is_over = threading.Event()
        self._planned = [] if every is None else faults(
            setting.seed, duration=3600, every=every, replicas=plan.replicas, trainers=plan.trainers
        )  # fmt: skip
        self._thread: threading.Thread | None = None

    def see(self, report: Report) -> None:
        if not isinstance(report, Synchronised):
            return
        if self._thread is None and self._planned:
            self._thread = threading.Thread(target=self._blow, name="storm", daemon=True)
            self._thread.start()
        if report.total >= self._last_total:
            self._is_over.set()

    def end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _blow(self) -> None:
        injector, began = Injector(Plan(())), time.monotonic()
        for name, fault in self._planned:
            if self._is_over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            at = time.time()
            struck = struck_by(name, injector.inject(fault), at)
            if struck is not None:  # else its target is just not there
                self._history.struck.append(struck)
                self._live.struck(struck)


# --- what came of it


def table(calm: History, faulted: History, setting: Setting) -> str:
    recoveries = faulted.recoveries()
    kinds = {struck.kind for struck in faulted.struck}
    lines = [f"\n{len(faulted.struck)} faults of {len(kinds)} kinds; no checkpoint was written or read.\n"]
    lines.append(f"{'':34}{'without failures':>18}{'under faults':>18}")
    held_out = [last(history.measured(HELD_OUT)) for history in (calm, faulted)]
    rows = [
        ("loss on held-out text, at the end", *(f"{value:.4f}" for value in held_out)),
        ("seconds", *(f"{history.seconds:.1f}" for history in (calm, faulted))),
        ("steps that count", *(str(history.steps) for history in (calm, faulted))),
        ("steps lost", *(str(history.steps_lost) for history in (calm, faulted))),
        ("rounds", *(str(len(history.rounds())) for history in (calm, faulted))),
        ("steps that count, per second", *(f"{history.rate:.1f}" for history in (calm, faulted))),
        ("goodput", "1", f"{faulted.rate / calm.rate:.2f}" if calm.rate else "?"),
    ]
    lines += [f"{name:34}{left:>18}{right:>18}" for name, left, right in rows]
    if recoveries:
        lines.append(f"\n{'recovered from':26}{'times':>6}{'seconds to the next step':>28}{'steps lost':>12}")
        lines.append(f"{'':26}{'':6}{'median':>18}{'longest':>10}{'mean':>12}")
    for kind in sorted({recovered.kind for recovered in recoveries}):
        those = [recovered for recovered in recoveries if recovered.kind == kind]
        seconds = [recovered.seconds for recovered in those]
        lost = statistics.fmean(recovered.lost for recovered in those)
        lines.append(f"{kind:26}{len(those):>6}{statistics.median(seconds):>18.2f}{max(seconds):>10.2f}{lost:>12.1f}")
    return "\n".join(lines)


def last(values: dict[int, float]) -> float:
    return values[max(values)] if values else float("nan")


def write(path: Path, calm: History, faulted: History) -> None:
    def facts(history: History) -> dict[str, object]:
        return {
            "seconds": history.seconds,
            "steps": history.steps,
            "steps_lost": history.steps_lost,
            "held_out": history.measured(HELD_OUT),
            "losses": history.losses(),
            "members": {each.rounds: each.members for each in history.rounds()},
            "faults": [vars(struck) for struck in history.struck],
            "recoveries": [vars(recovered) | {"seconds": recovered.seconds} for recovered in history.recoveries()],
        }

    path.write_text(json.dumps({"without_failures": facts(calm), "under_faults": facts(faulted)}, indent=1))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # through every `finally`
    parser = argparse.ArgumentParser(prog="python -m examples.llama_diloco.story", description=__doc__)
    parser.add_argument("--small", action="store_true", help="short: about a minute")
    parser.add_argument("--rounds", type=int, help="of each run [as many as take a minute or so]")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--trainers", type=int, default=2, help="of each replica")
    parser.add_argument("--fault-every", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, default=Path("demo_out"), help="where picture and figures go")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (8 if arguments.small else None)
    replicas = min(arguments.replicas, 3) if arguments.small else arguments.replicas
    setting = Setting(
        replicas, arguments.trainers, rounds, 75.0, arguments.fault_every, arguments.seed, arguments.output
    )
    configure(process_exit_timeout=1.0)  # Ctrl-C shall not wait for what is being started
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of each connection that a fault has ended
    try:
        return play(setting)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except RdmaError as error:
        print(f"story: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
