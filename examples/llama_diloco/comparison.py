"""The same training twice, without failures and under faults: a table, a picture, and all figures in a file."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from monarch_rdma.ft import Allocator, FromJobs, History, OnThisHost, RecoveryPolicy, Report, TrainingPlan, train
from monarch_rdma.supervision.policy import Policy

from .chart import draw
from .goodput import held_against_the_model
from .live import Live
from .llama import LlamaConfig
from .replicas import HELD_OUT, recipe
from .storm import Storm
from .trainer import Trainer, TrainerConfig

MODEL = LlamaConfig(dim=64, layers=2, hidden=160, context=64)
EVERY = 20  # steps between two synchronisations
POLICY = RecoveryPolicy(
    trainers=Policy(max_restarts=3, within=20.0),
    replica=Policy(max_restarts=5, within=60.0),
    allocation=Policy(max_restarts=None),
)


@dataclass(frozen=True)
class Setting:
    """`rounds`: of each run; None for as many as take `seconds`. `fault_every`: seconds. `seed`: of the faults,
    `model_seed`: of model and data. `job`: where replicas run, "local" or "slurm", where `sbatch` are options of each
    replica's job. `coordination`: as in TrainingPlan.
    """

    replicas: int = 4
    trainers: int = 2
    rounds: int | None = None
    seconds: float = 75.0
    fault_every: float = 3.0
    seed: int = 0
    model_seed: int = 0
    output: Path = Path("demo_out")
    job: str = "local"
    sbatch: tuple[str, ...] = ()
    coordination: str = "monarch_rdma"

    @property
    def allocator(self) -> Allocator:
        if self.job == "local":
            return OnThisHost()
        from monarch_rdma.job import SlurmJob

        meshes, logs, options = {"replica": 1}, str(self.output / "logs"), list(self.sbatch)
        return FromJobs(
            lambda replica: SlurmJob(meshes, job_name=f"llama-replica{replica}", log_dir=logs, slurm_args=options)
        )


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
    config = TrainerConfig(model=MODEL, seed=setting.model_seed, steps=rounds * EVERY)
    plan = TrainingPlan(
        recipe(config, every=EVERY),
        steps=rounds * EVERY * setting.replicas,
        replicas=setting.replicas,
        trainers=setting.trainers,
        threads=1,
        preload=("examples.llama_diloco.replicas", "examples.llama_diloco.text_in_memory"),
        coordination=setting.coordination,
    )
    history = History()
    print(f"\n{title[0].upper()}{title[1:]}:", flush=True)
    with Live(title, setting.replicas, plan.steps) as live:
        storm = Storm(setting.seed, plan, fault_every, EVERY, history, live)

        def watch(report: Report) -> None:
            history.add(report)
            live.show(report)
            storm.see(report)

        try:
            train(plan, allocator=setting.allocator, policy=POLICY, watch=watch)
        finally:
            storm.end()
    return history


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
