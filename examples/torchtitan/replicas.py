"""TorchTitan's trainer as the part of one trainer in a fault-tolerant training.

Within a replica its ranks are TorchTitan's own: FSDP, tensor parallelism and so on over torch.distributed, as its
configuration says. Between replicas DiLoCo averages what each rank holds. Who comes back takes over the optimiser, the
schedule, the position in the data and the count of steps of those that live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monarch_rdma.ft import Cohort, DiLoCo, Place, Training

from . import on_cpu

__all__ = ["recipe"]


def recipe(
    config: Callable[[Path], Any], assets: Path, *, steps: int, every: int = 20
) -> Callable[[Place, Cohort], Training]:
    """For a TrainingPlan. `config`: one of configs.py. `steps`: of the schedule, for one replica."""

    def make(place: Place, cohort: Cohort) -> Training:
        trainer = _built(config, assets, place, steps)
        (model,) = trainer.model_parts  # more of them are pipeline stages, which are more than one model
        return Training(_Steps(trainer), DiLoCo(model, cohort, every=every, heals={"trainer": _State(trainer)}))

    return make


def _built(config: Callable[[Path], Any], assets: Path, place: Place, steps: int) -> Any:
    """A torchtitan.trainer.Trainer. torch.distributed is there already, and is used as it is."""
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.ranks), "LOCAL_RANK": "0"}
    os.environ |= {"HF_HOME": str(assets / "cache" / f"{place.replica}.{place.rank}"), "HF_HUB_OFFLINE": "1"}
    on_cpu.prepare()
    from .data import replicated

    made = config(assets)
    made.training.steps = steps
    made.metrics.log_freq = 1  # the loss is known at each step
    made.dataloader = replicated(made.dataloader, place)
    return made.build()


class _Steps:
    """One step of the trainer, as its own loop makes it; returns the loss."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batches = None
        self._loss = 0.0
        self._log = trainer.metrics_processor.log
        trainer.metrics_processor.log = self._note

    def __call__(self) -> float:
        trainer = self._trainer
        if self._batches is None:  # where it begins may have been taken over
            self._batches = trainer.batch_generator(trainer.dataloader)
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(self._batches)
        return self._loss

    def _note(self, step: int, loss: float, *more: Any, **options: Any) -> None:
        self._loss = float(loss)
        self._log(step, loss, *more, **options)


class _State:
    """What a trainer that comes takes over, besides the parameters."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        data = trainer.dataloader.state_dict()
        return {
            "optimizers": trainer.optimizers.state_dict(),
            "schedule": trainer.lr_schedulers.state_dict(),
            "data": data[trainer.dataloader._rank_id],
            "steps": trainer.step,
            "tokens": trainer.ntokens_seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The data goes on at the same place of this rank's own part of it."""
        trainer = self._trainer
        trainer.optimizers.load_state_dict(state["optimizers"])
        trainer.lr_schedulers.load_state_dict(state["schedule"])
        loader = trainer.dataloader
        loader.load_state_dict({loader._rank_id: state["data"], "world_size": loader.dp_world_size})
        trainer.step, trainer.ntokens_seen = int(state["steps"]), int(state["tokens"])
