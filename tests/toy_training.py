"""A training of one number: each step adds one, so that what a replica has done and what is shared can be seen."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monarch_rdma.actor.chaos import Injector
from monarch_rdma.ft import Cohort, Decided, DiLoCo, Place, Report, Synchronised, Training, TrainingPlan
from monarch_rdma.supervision.chaos import Fault, Plan

__all__ = ["Deed", "Toy", "Watch", "agreed", "inject", "plan", "toy"]

HURRY = "hurry"


class Toy:
    def __init__(self, place: Place, seconds: float, hurry: Path, fragments: int = 1, pace: float = 1) -> None:
        """A step adds `pace` to all parameters, and takes so many seconds, until file `hurry` is there."""
        self.place, self.seconds, self.hurry, self.pace = place, seconds, hurry, pace
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(5000)) for _ in range(fragments)])
        self.steps = 0

    def step(self) -> float:
        if not self.hurry.exists():
            time.sleep(self.seconds)
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        assert ranks.item() == self.place.ranks
        with torch.no_grad():
            for parameter in self.model:
                parameter += self.pace
        self.steps += 1
        return self.model[0][0].item()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Noted(DiLoCo):
    """Writes down what is shared after each round."""

    def __init__(self, toy: Toy, cohort: Any, every: int, folder: Path, **options: Any) -> None:
        super().__init__(
            [[each] for each in toy.model], cohort, every=every, outer=plain, heals={"toy": toy}, **options
        )
        self.file = folder / f"{toy.place.replica}.{toy.place.rank}.{os.getpid()}"
        self._toy, self._all = toy, cohort

    def join(self) -> bool:
        has_healed = super().join()
        self._all.tell_measured("steps", self._toy.steps)
        return has_healed

    def step(self) -> Any:
        completed = super().step()
        if completed is not None:
            with open(self.file, "a") as file:
                total = sum(fragment.shared[0].double().sum().item() for fragment in self._fragments)
                file.write(f"{completed.number} {total!r}\n")
        return completed


def plain(parameters: Any) -> torch.optim.Optimizer:
    """The mean of all replicas' parameters."""
    return torch.optim.SGD(parameters, lr=1.0)


def toy(
    folder: Path, *, every: int = 10, seconds: float = 0.02, fragments: int = 1, in_step: bool = True, **options: Any
) -> Callable[[Place, Cohort], Training]:
    """A recipe. What is shared after each round is written to files in the folder, one for each process. `in_step`: the
    steps of all replicas are alike; else those of a later one are larger. `options`: of DiLoCo.
    """

    def recipe(place: Place, cohort: Cohort) -> Training:
        trained = Toy(place, seconds, folder / HURRY, fragments, 1 if in_step else 1 + place.replica)
        return Training(trained.step, Noted(trained, cohort, every, folder, **options))

    return recipe


def agreed(folder: Path) -> dict[int, float]:
    """What was shared after each round; all trainers that took part must have had the same, bit by bit."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in folder.glob("*.*.*"):
        for line in path.read_text().splitlines():
            number, value = line.split()
            found[int(number)].add(value)
    assert all(len(values) == 1 for values in found.values()), found
    return {number: float(min(values)) for number, values in sorted(found.items())}


@dataclass(frozen=True)
class Deed:
    """A fault. `ends`: the replica whose trainers or process it ends, if any."""

    fault: Fault
    ends: int | None

    def do(self) -> None:
        injected = Injector(Plan(())).inject(self.fault)
        assert not injected.problem, injected


def inject(kind: str, target: str, **arguments: Any) -> Deed:
    """Of processes called trainers<replica>/<rank> and replica<replica>/0."""
    ends = int(target.partition("/")[0][-1]) if kind in ("kill", "abort_group") else None
    return Deed(Fault(kind, target=target, **arguments), ends)


class Watch:
    """Keeps what is reported, and does things one after the other: `at[rounds]` after so many rounds at the earliest,
    and when all replicas take part that were not given up, those that have come back among them. When that is so after
    the last one, file HURRY is made in `folder`.
    """

    def __init__(self, at: dict[int, Deed] | None = None, *, replicas: int = 3, folder: Path | None = None) -> None:
        self.reports: list[Report] = []
        self._left, self._folder = sorted((at or {}).items()), folder
        self._lives = dict.fromkeys(range(replicas), 0)  # in which each has taken part
        self._ended = dict(self._lives)

    def __call__(self, report: Report) -> None:
        self.reports.append(report)
        if isinstance(report, Decided) and report.what == "given up":
            del self._lives[report.replica]
        if not isinstance(report, Synchronised) or report.replica not in self._lives:
            return
        self._lives[report.replica] = report.life
        if any(life <= self._ended[replica] for replica, life in self._lives.items()):
            return
        if self._left and report.rounds >= self._left[0][0]:
            _, deed = self._left.pop(0)
            if deed.ends is not None:
                self._ended[deed.ends] = self._lives[deed.ends]
            deed.do()
        elif not self._left and self._folder is not None:
            (self._folder / HURRY).touch()

    def of(self, kind: type[Report]) -> list[Any]:
        assert not self._left, f"not done: {self._left}"
        return [report for report in self.reports if isinstance(report, kind)]


def plan(folder: Path, rounds: int, **arguments: Any) -> TrainingPlan:
    shape = {"replicas": 3, "trainers": 2, "threads": 1, **arguments}
    return TrainingPlan(toy(folder), steps=rounds * shape["replicas"] * 10, **shape)
