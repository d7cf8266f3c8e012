"""A training of one number: each step adds one, so that what a replica has done and what is shared can be seen."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monarch_rdma.actor.chaos import Injector
from monarch_rdma.ft import Cohort, DiLoCo, Place, Report, Stepped, Training, TrainingPlan
from monarch_rdma.supervision.chaos import Fault, Plan

__all__ = ["Do", "Toy", "Watch", "agreed", "inject", "plan", "toy"]

Do = Callable[[], object]


class Toy:
    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(5000))])
        self.steps = 0

    def step(self) -> float:
        time.sleep(self.seconds)
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        assert ranks.item() == self.place.ranks
        with torch.no_grad():
            self.model[0] += 1
        self.steps += 1
        return self.model[0][0].item()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Noted(DiLoCo):
    """Writes down what is shared after each round."""

    def __init__(self, toy: Toy, cohort: Cohort, every: int, folder: Path) -> None:
        super().__init__(toy.model, cohort, every=every, outer=plain, heals={"toy": toy})
        self.file = folder / f"{toy.place.replica}.{toy.place.rank}.{os.getpid()}"

    def step(self) -> Any:
        completed = super().step()
        if completed is not None:
            with open(self.file, "a") as file:
                file.write(f"{completed.number} {self._fragments[0].shared[0].double().sum().item()!r}\n")
        return completed


def plain(parameters: Any) -> torch.optim.Optimizer:
    """The mean of all replicas' parameters."""
    return torch.optim.SGD(parameters, lr=1.0)


def toy(folder: Path, *, every: int = 10, seconds: float = 0.02) -> Callable[[Place, Cohort], Training]:
    """A recipe. What is shared after each round is written to files in the folder, one for each process."""

    def recipe(place: Place, cohort: Cohort) -> Training:
        trained = Toy(place, seconds)
        return Training(trained.step, Noted(trained, cohort, every, folder))

    return recipe


def agreed(folder: Path) -> dict[int, float]:
    """What was shared after each round; all trainers that took part must have had the same, bit by bit."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            number, value = line.split()
            found[int(number)].add(value)
    assert all(len(values) == 1 for values in found.values()), found
    return {number: float(min(values)) for number, values in sorted(found.items())}


def inject(kind: str, target: str, **arguments: Any) -> Do:
    def do() -> None:
        injected = Injector(Plan(())).inject(Fault(kind, target=target, **arguments))
        assert not injected.problem, injected

    return do


class Watch:
    """Keeps what is reported, and does things when the training is so far: `at[rounds]`, once."""

    def __init__(self, at: dict[int, Do] | None = None) -> None:
        self.reports: list[Report] = []
        self._at = dict(at or {})

    def __call__(self, report: Report) -> None:
        self.reports.append(report)
        if isinstance(report, Stepped) and report.step == 2 and report.rounds in self._at:
            self._at.pop(report.rounds)()

    def of(self, kind: type[Report]) -> list[Any]:
        assert not self._at, f"not done: {self._at}"
        return [report for report in self.reports if isinstance(report, kind)]


def plan(folder: Path, rounds: int, **arguments: Any) -> TrainingPlan:
    shape = {"replicas": 3, "trainers": 2, "threads": 1, **arguments}
    return TrainingPlan(toy(folder), steps=rounds * shape["replicas"] * 10, **shape)
