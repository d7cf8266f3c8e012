"""Fault-tolerant training: semi-synchronous replicas that come and go, and heal from each other without checkpoints.

```python
from monarch_rdma.ft import TrainingPlan, train

def recipe(place, cohort):                        # in each trainer's process
    trainer = Trainer(config, shard=place.replica)
    return Training(trainer.step, DiLoCo(trainer.model, cohort, every=20, heals={"trainer": trainer}))

train(TrainingPlan(recipe, steps=8000, replicas=4, trainers=2), watch=print)
```

docs/fault-tolerance.md tells how it works and what is lost when.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .history import History, Recovered, Struck
from .recovery import GiveUp, Recover, Recovery, RecoveryPolicy, Rung
from .reports import Decided, Healed, Measured, Report, Stepped, Synchronised, TrainersStarted
from .training import Averaging, Place, Recipe, Training, TrainingPlan

if TYPE_CHECKING:
    from .allocation import Allocator, FromJobs, OnThisHost
    from .cohort import Cohort, FixedCohort, GroupCohort
    from .diloco import DiLoCo, nesterov
    from .exchange import Exchange, GroupExchange, ProcessGroupExchange
    from .healing import FetchedState, OfferedState, StateOffer, fetch_state
    from .lighthouse import Lighthouse
    from .local_sgd import LocalSGD
    from .orchestrator import Ended, Orchestrator, Replica, train
    from .replica_actor import ReplicaActor, ReplicaFailed
    from .replica_cohort import ReplicaCohort
    from .semi_synchronous import Round, Stateful
    from .torchft_lighthouse import TorchFTLighthouse
    from .trainer_actor import TrainerActor

__all__ = [
    "Allocator",
    "Averaging",
    "Cohort",
    "Decided",
    "DiLoCo",
    "Ended",
    "Exchange",
    "FetchedState",
    "FixedCohort",
    "FromJobs",
    "GiveUp",
    "GroupCohort",
    "GroupExchange",
    "Healed",
    "History",
    "Lighthouse",
    "LocalSGD",
    "Measured",
    "OfferedState",
    "OnThisHost",
    "Orchestrator",
    "Place",
    "ProcessGroupExchange",
    "Recipe",
    "Recover",
    "Recovered",
    "Recovery",
    "RecoveryPolicy",
    "Replica",
    "ReplicaActor",
    "ReplicaCohort",
    "ReplicaFailed",
    "Report",
    "Round",
    "Rung",
    "StateOffer",
    "Stateful",
    "Stepped",
    "Struck",
    "Synchronised",
    "TorchFTLighthouse",
    "TrainerActor",
    "TrainersStarted",
    "Training",
    "TrainingPlan",
    "fetch_state",
    "nesterov",
    "train",
]

# What needs torch is imported when it is used.
_WITH_TORCH = {
    "allocation": ("Allocator", "FromJobs", "OnThisHost"),
    "cohort": ("Cohort", "FixedCohort", "GroupCohort"),
    "diloco": ("DiLoCo", "nesterov"),
    "exchange": ("Exchange", "GroupExchange", "ProcessGroupExchange"),
    "healing": ("FetchedState", "OfferedState", "StateOffer", "fetch_state"),
    "lighthouse": ("Lighthouse",),
    "local_sgd": ("LocalSGD",),
    "orchestrator": ("Ended", "Orchestrator", "Replica", "train"),
    "replica_actor": ("ReplicaActor", "ReplicaFailed"),
    "replica_cohort": ("ReplicaCohort",),
    "semi_synchronous": ("Round", "Stateful"),
    "torchft_lighthouse": ("TorchFTLighthouse",),
    "trainer_actor": ("TrainerActor",),
}
_MODULE_OF = {name: module for module, names in _WITH_TORCH.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
