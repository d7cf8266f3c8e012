"""How much of the loss is chance? Trainings of several seeds without failures, then one of them again under faults.

From the repository's root: `python -m examples.llama_diloco.seeds`; about ten minutes. The last one's loss, on text
that is not trained on, may differ from the mean of the others by 2 of their standard deviations. That is written to a
file before it begins. Ends with 1 where it differs by more, or where there were fewer than 20 faults of 5 kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from monarch_rdma.ft import History

from .comparison import EVERY, Setting, last, run
from .replicas import HELD_OUT

LEAST_FAULTS, LEAST_KINDS = 20, 5


def compare(setting: Setting, rounds: int, seeds: int) -> int:
    """The exit code. RdmaError where a training did not come to its end."""
    setting.output.mkdir(parents=True, exist_ok=True)
    losses = []
    for seed in range(seeds):
        history = run(replace(setting, model_seed=seed), rounds, f"seed {seed}, without failures", None)
        losses.append(final_loss(history))
        print(f"  loss on held-out text after {history.steps} steps: {losses[-1]:.4f}", flush=True)
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    low, high = mean - 2 * deviation, mean + 2 * deviation
    write(setting.output / "tolerance.json", losses=losses, low=low, high=high, steps=rounds * EVERY * setting.replicas)
    print(f"\nTolerance, from here on fixed: {low:.4f} to {high:.4f}", flush=True)

    title = f"seed {setting.model_seed}, a fault about every {setting.fault_every:g} s"
    faulted = run(setting, rounds, title, setting.fault_every)
    loss, kinds = final_loss(faulted), sorted({struck.kind for struck in faulted.struck})
    write(setting.output / "faulted.json", loss=loss, steps=faulted.steps, faults=len(faulted.struck), kinds=kinds)
    is_within = low <= loss <= high
    print(
        f"\n{len(faulted.struck)} faults of {len(kinds)} kinds: loss {loss:.4f} after {faulted.steps} steps, "
        f"{(loss - mean) / deviation:+.1f} standard deviations: {'within' if is_within else 'NOT within'} tolerance."
    )
    return 0 if is_within and len(faulted.struck) >= LEAST_FAULTS and len(kinds) >= LEAST_KINDS else 1


def final_loss(history: History) -> float:
    return last(history.measured(HELD_OUT))


def write(path: Path, **figures: object) -> None:
    path.write_text(json.dumps(figures, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.llama_diloco.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="from 2 on")
    parser.add_argument("--rounds", type=int, default=24, help="of each training")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--trainers", type=int, default=1, help="of each replica")
    parser.add_argument("--fault-every", type=float, default=2.5, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=Path("demo_out"), help="where figures go")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of each connection that a fault has ended
    setting = Setting(
        replicas=arguments.replicas,
        trainers=arguments.trainers,
        fault_every=arguments.fault_every,
        output=arguments.output,
    )
    return compare(setting, arguments.rounds, max(2, arguments.seeds))


if __name__ == "__main__":
    sys.exit(main())
