"""A replica is killed: from SIGKILL to its first step after healing, and where that time goes.

python benchmarks/bench_recovery.py [--mib 1024] [--kills 5] [--replicas 3] [--trainers 1]

Replicas train on this host; each has a state of `--mib` MiB besides a small model. One after the other is killed, with
all of its processes. Seconds, as medians with the longest:

- noticed: until the orchestrator has decided what to do
- started: until its ReplicaActor and trainers are there, with torch imported
- met: until the trainer looks for a state to read: its recipe has made its model, torch.distributed is there
- healed: until it has the state of its peers; "read" is the transfer alone
- stepped: until its first step is made

The ratios are to a new Python that imports the same modules, and does no more, which takes turns with the kills; and of
the transfer to a copy of as many bytes in memory. Goals on a quiet machine: 5 s in all, 2 s to read 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from monarch_rdma.actor.chaos import Injector
from monarch_rdma.ft import (
    Cohort,
    Decided,
    DiLoCo,
    Healed,
    Measured,
    Place,
    RecoveryPolicy,
    Report,
    Stepped,
    TrainersStarted,
    Training,
    TrainingPlan,
    train,
)
from monarch_rdma.supervision.chaos import Fault, Plan
from monarch_rdma.supervision.policy import Policy

TENSOR = 8 << 20  # bytes
STEP = 0.05  # seconds
EVERY = 80  # steps of a round: longer than a state takes to be read
PARTS = ("noticed", "started", "met", "healed", "stepped", "in all")


class Ballast:
    """A state that is as large as that of a real trainer."""

    def __init__(self, mib: int, fill: float) -> None:
        count = max(1, (mib << 20) // TENSOR)
        self.tensors = [torch.full((TENSOR // 4,), fill) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]


def recipe(mib: int) -> Callable[[Place, Cohort], Training]:
    def make(place: Place, cohort: Any) -> Training:
        ballast = Ballast(mib, float(place.replica))
        model = torch.nn.Linear(64, 64)

        def step() -> float:
            time.sleep(STEP)
            return 0.0

        diloco = DiLoCo(model, cohort, every=EVERY, heals={"ballast": ballast})
        cohort.tell_measured("met", time.time())
        return Training(step, diloco)

    return make


class Enough(Exception):
    """As many were killed as were wanted."""


class Killer:
    """Kills a replica, waits for it to be back and for a round of all, and kills the next one."""

    def __init__(self, kills: int, replicas: int) -> None:
        self._kills, self._replicas = kills, replicas
        self._back = dict.fromkeys(range(replicas), 0)  # steps since it began, or came back
        self._victim: int | None = None
        self._killed_at = 0.0
        self._seen: dict[str, float] = {}
        self.recoveries: list[dict[str, float]] = []
        self.imports: list[float] = []

    def __call__(self, report: Report) -> None:
        if self._victim is not None and report.replica == self._victim:
            self._follow(report)
        elif isinstance(report, Stepped):
            self._back[report.replica] += 1
        if self._victim is None and min(self._back.values()) >= 30:
            if len(self.recoveries) == self._kills:
                raise Enough
            self.imports.append(seconds_to_import())
            self._victim = len(self.recoveries) % self._replicas
            self._seen, self._back = {}, dict.fromkeys(self._back, 0)
            self._killed_at = time.time()
            Injector(Plan(())).inject(Fault("kill", target=f"replica{self._victim}/0"))

    def _follow(self, report: Report) -> None:
        seen = self._seen
        match report:
            case Decided():
                seen.setdefault("noticed", report.at)
            case TrainersStarted() if seen:
                seen["started"] = report.at
            case Measured(name="met") if "started" in seen:
                seen["met"] = report.value
            case Healed() if "met" in seen:
                seen["healed"], seen["read"], seen["bytes"] = report.at, report.seconds, report.bytes
            case Stepped() if "healed" in seen:
                self._note(report.at)

    def _note(self, stepped: float) -> None:
        times = [self._killed_at, *(self._seen[name] for name in PARTS[:4]), stepped]
        parts = [later - earlier for earlier, later in pairwise(times)]
        found = dict(zip(PARTS, [*parts, stepped - self._killed_at], strict=True))
        self.recoveries.append(found | {"read": self._seen["read"], "bytes": self._seen["bytes"]})
        self._victim = None


def seconds_to_import() -> float:
    """What a process that is started anew, and not forked from one that has it all, would take before anything else."""
    modules = TrainingPlan(recipe(1), steps=1).imported
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import torch, {', '.join(modules)}"], check=True)
    return time.monotonic() - begin


def seconds_to_copy(count: int) -> float:
    source, target = torch.ones(count // 4), torch.zeros(count // 4)
    begin = time.monotonic()
    target.copy_(source)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of each trainer's state")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=1, help="of each replica")
    parser.add_argument("--json", action="store_true", help="all figures")
    arguments = parser.parse_args()
    plan = TrainingPlan(
        recipe(arguments.mib), steps=10**9, replicas=arguments.replicas, trainers=arguments.trainers, threads=1
    )
    killer = Killer(arguments.kills, arguments.replicas)
    try:
        train(plan, policy=RecoveryPolicy(replica=Policy(max_restarts=None)), watch=killer)
    except Enough:
        tell(killer, arguments.json)


def tell(killer: Killer, as_json: bool) -> None:
    recoveries, imports = killer.recoveries, statistics.median(killer.imports)
    if as_json:
        print(json.dumps({"recoveries": recoveries, "imports": killer.imports}, indent=1))
        return
    print(f"{len(recoveries)} replicas killed\n{'':12}{'median':>8}{'longest':>9}")
    for name in (*PARTS, "read"):
        values = [each[name] for each in recoveries]
        print(f"{name:12}{statistics.median(values):8.2f}{max(values):9.2f} s")
    in_all = statistics.median(each["in all"] for each in recoveries)
    count = int(recoveries[0]["bytes"])
    copies = statistics.median(seconds_to_copy(count) for _ in range(3))
    read = statistics.median(each["read"] for each in recoveries)
    print(f"\na new Python that imports the same: {imports:.2f} s; in all {in_all / imports:.2f} of it")
    speed = copies / read
    print(f"{count / 2**30:.2f} GiB read in {read:.2f} s: {speed:.2f} of the speed of a copy in memory")


if __name__ == "__main__":
    main()
