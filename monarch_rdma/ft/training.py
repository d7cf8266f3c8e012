"""What a TrainerActor drives, and where it stands. A model, its optimiser and its data are in a `Training`; who else
trains, who is lost and how state is healed are not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PRELOAD", "Average", "Place", "Recipe", "Training", "TrainingPlan"]

# What all processes of a training have imported when they are forked.
PRELOAD = ("torch.distributed.tensor", "torch._dynamo", "monarch_rdma.ft.trainer_actor")
Average = Callable[[Sequence["Tensor"]], None]


class Training(Protocol):
    """The part of one trainer. All ranks of a replica call the same in the same order."""

    def step(self) -> float:
        """One step of this replica by itself; returns its loss. Its ranks may use torch.distributed among each other."""
        ...

    def sync(self, average: Average) -> None:
        """Makes all replicas one. `average(tensors)` replaces contiguous tensors by their mean over the replicas, in
        place and on all of them alike. Where it raises, this one has to raise too, and be as before: it is called again.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a new replica needs to go on from here. The same tensors, of the same shapes, at all times."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a trainer is: in which replica of how many that are wanted, and which rank of that replica's trainers."""

    replica: int
    replicas: int
    rank: int
    ranks: int


Recipe = Callable[[Place], Training]


@dataclass(frozen=True)
class TrainingPlan:
    """`recipe`: makes the Training of a place, in the trainer's process, torch.distributed being initialised there.
    `steps`: of all replicas together, after which training ends: who is missing is made up for. `sync_every`: steps of
    a replica from one synchronisation to the next. `backend`: of torch.distributed among a replica's trainers.
    `trainer_env`, `threads`, `gpus_per_proc`: of the trainers' processes. `sync_timeout`: seconds that replicas wait
    for each other in a synchronisation; longer than one may be behind. `quorum_timeout`: that one which comes waits for
    the others to end their round, or for enough of them to be there.
    """

    recipe: Recipe
    steps: int
    replicas: int = 4
    trainers: int = 2
    sync_every: int = 20
    backend: str = "cpu:monarch_rdma"
    sync_timeout: float = 120.0
    quorum_timeout: float = 600.0
    threads: int | None = None
    gpus_per_proc: int | None = None
    trainer_env: Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "replicas", "trainers", "sync_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}, but must be an integer of at least 1")
        if not callable(self.recipe):
            raise ConfigError(f"recipe is {self.recipe!r}, but must make a Training of a Place")
        for name in ("sync_timeout", "quorum_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ConfigError(f"{name} is {value!r}, but must be a number above 0")
