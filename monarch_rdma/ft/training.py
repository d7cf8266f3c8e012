"""What a TrainerActor drives, and where it stands. Who else trains, who is lost and how state is healed is a matter of
the cohort, not of the model, its optimiser and its data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError, demand_whole

if TYPE_CHECKING:
    from .cohort import Cohort

__all__ = ["PRELOAD", "Averaging", "Place", "Recipe", "Training", "TrainingPlan"]

# What takes long to import for any training.
PRELOAD = ("torch.distributed.tensor", "torch._dynamo", "monarch_rdma.ft.trainer_actor")
_ENVIRONMENT_OF: dict[str, dict[str, str]] = {"monarch_rdma": {}, "torchft": {"RUST_LOG": "warn"}}


class Averaging(Protocol):
    """What makes replicas one, such as DiLoCo or LocalSGD on the cohort that the recipe was given."""

    def join(self) -> bool: ...

    def step(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Training:
    """The part of one trainer. `step`: one step of this replica by itself, inner optimiser included; returns its loss.
    All ranks of a replica call it alike, and may use torch.distributed among each other. `averaging`: is told of each.
    """

    step: Callable[[], float]
    averaging: Averaging


@dataclass(frozen=True)
class Place:
    """Where a trainer is: in which replica of how many that are wanted, and which rank of that replica's trainers."""

    replica: int
    replicas: int
    rank: int
    ranks: int


Recipe = Callable[[Place, "Cohort"], Training]


@dataclass(frozen=True)
class TrainingPlan:
    """`recipe`: makes the Training of a place on a cohort, in the trainer's process, where torch.distributed is
    initialised with the ranks of the replica. `steps`: of all replicas together, after which training ends: so who is
    missing for a while is made up for. `backend`: of torch.distributed among a replica's trainers.
    `trainer_env`, `threads`, `gpus_per_proc`: of the trainers' processes. `preload`: modules that take long to import,
    which processes shall have when they are forked. `coordination`: who says which replicas are in, "monarch_rdma" or
    "torchft": its lighthouse and Manager, with extra `ft`; `lighthouse`: address of one of TorchFT's that runs already,
    http://host:port. `sync_timeout`: seconds that replicas wait
    for each other in a synchronisation; longer than one may be behind. `quorum_timeout`: that one which comes waits for
    the others to end their round, or for enough of them to be there.
    """

    recipe: Recipe
    steps: int
    replicas: int = 4
    trainers: int = 2
    backend: str = "cpu:monarch_rdma"
    sync_timeout: float = 120.0
    quorum_timeout: float = 600.0
    threads: int | None = None
    gpus_per_proc: int | None = None
    trainer_env: Mapping[str, str | None] | None = None
    preload: tuple[str, ...] = ()
    coordination: str = "monarch_rdma"
    lighthouse: str | None = None

    @property
    def environment(self) -> dict[str, str | None]:
        """Of the trainers' processes. TorchFT, which looks when it is imported, would tell of each request."""
        return {**_ENVIRONMENT_OF[self.coordination], **(self.trainer_env or {})}

    @property
    def imported(self) -> tuple[str, ...]:
        """What all processes of this training have imported when they are forked, so that one template serves all."""
        return (*PRELOAD, *self.preload)

    def __post_init__(self) -> None:
        for name in ("steps", "replicas", "trainers"):
            demand_whole(name, getattr(self, name), 1)
        for name, least in (("threads", 1), ("gpus_per_proc", 0)):
            if getattr(self, name) is not None:
                demand_whole(name, getattr(self, name), least)
        for name, kind, what in (
            ("backend", str, "the name of a backend"),
            ("trainer_env", Mapping | None, "a mapping of names to values"),
            ("preload", tuple | list, "a tuple of modules' names"),
            ("coordination", str, "a name"),
            ("lighthouse", str | None, "an address, http://host:port"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r:.200}, but must be {what}")
        if not callable(self.recipe):
            raise ConfigError(f"recipe is {self.recipe!r}, but must make a Training of a place and a cohort")
        if self.coordination not in _ENVIRONMENT_OF:
            raise ConfigError(f"coordination is {self.coordination!r}, but must be one of {', '.join(_ENVIRONMENT_OF)}")
        if self.coordination == "torchft" and find_spec("torchft") is None:
            raise ConfigError('coordination is "torchft", which needs its package: pip install "monarch-rdma[ft]"')
        if self.lighthouse is not None and self.coordination != "torchft":
            raise ConfigError(f'lighthouse is {self.lighthouse!r}, which only coordination="torchft" uses')
        for name in ("sync_timeout", "quorum_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
                raise ConfigError(f"{name} is {value!r}, but must be a number above 0")
