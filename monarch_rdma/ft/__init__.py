"""Fault-tolerant training: semi-synchronous replicas that come and go, and heal from each other without checkpoints.

docs/fault-tolerance.md tells how.
"""

from .cohort import Cohort, FixedCohort, GroupCohort
from .diloco import DiLoCo, nesterov
from .exchange import Exchange, GroupExchange, ProcessGroupExchange
from .local_sgd import LocalSGD
from .semi_synchronous import Round, Stateful

__all__ = [
    "Cohort",
    "DiLoCo",
    "Exchange",
    "FixedCohort",
    "GroupCohort",
    "GroupExchange",
    "LocalSGD",
    "ProcessGroupExchange",
    "Round",
    "Stateful",
    "nesterov",
]
