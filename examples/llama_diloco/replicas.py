"""The plain trainer in replicas: each averages its gradients at each step, and DiLoCo makes the replicas one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monarch_rdma.ft import Cohort, DiLoCo, Place, Training

from .trainer import Trainer, TrainerConfig

__all__ = ["HELD_OUT", "recipe"]

HELD_OUT = "held out"  # the name under which the loss on text that is not trained on is reported


def recipe(config: TrainerConfig, *, every: int = 20) -> Callable[[Place, Cohort], Training]:
    """For a TrainingPlan: DiLoCo every `every` steps. Each trainer reads passages of its own."""

    def make(place: Place, cohort: Cohort) -> Training:
        trainer = Trainer(config, shard=place.replica * place.ranks + place.rank)
        return Training(lambda: trainer.step(average), Evaluated(trainer, cohort, place, every))

    return make


def average(gradients: Sequence[Tensor]) -> None:
    """Over the trainers of this replica, in place, by one all_reduce."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


class Evaluated(DiLoCo):
    """After each round one of the replicas looks how well the model does on text that is not trained on."""

    def __init__(self, trainer: Trainer, cohort: Any, place: Place, every: int) -> None:
        super().__init__(trainer.model, cohort, every=every, heals={"trainer": trainer})
        self._trainer, self._all, self._place = trainer, cohort, place

    def step(self) -> Any:
        completed = super().step()
        if completed is not None and self._place.rank == 0 and min(completed.members) == self._place.replica:
            self._all.tell_measured(HELD_OUT, self._trainer.evaluate(2))
        return completed
