"""A model of training under failures: how much of a cluster's time becomes part of the model, and how it scales.

It is a simulation, on a CPU, of jobs nobody ran here. docs/goodput.md tells what it takes in, what it is held against,
and what it says.
"""

from .checkpointing import simulate_checkpointing
from .failures import Failure, Failures
from .healing import simulate_healing
from .job import InputError, Job
from .network import Network
from .outcome import Outcome
from .prediction import predict, sensitivity
from .scaling import Workload
from .settings import Setting, load

__all__ = [
    "Failure",
    "Failures",
    "InputError",
    "Job",
    "Network",
    "Outcome",
    "Setting",
    "Workload",
    "load",
    "predict",
    "sensitivity",
    "simulate_checkpointing",
    "simulate_healing",
]
