"""Two layouts of the same tensors -> a list of copies. Pure: numbers in, numbers out.

plan = make_plan({"w": TensorSpec(fsdp, "bfloat16")}, {"w": TensorSpec(tp, "bfloat16")}, rank=0)
print(table(plan))

Each element of the target is in the plan exactly once: from this rank's own source tensors where these have it, else
from one of the ranks that do. Regular runs are one row of arrays, however long they are.
"""

from .copies import Copies, Plan, TensorCopies
from .geometry import PlanError, TensorSpec, itemsize
from .planner import make_plan, make_statistics
from .replicas import Topology
from .statistics import Statistics
from .table import picture, table
from .transforms import Concatenation, Source, Transform, concatenate

__all__ = [
    "Concatenation",
    "Copies",
    "Plan",
    "PlanError",
    "Source",
    "Statistics",
    "TensorCopies",
    "TensorSpec",
    "Topology",
    "Transform",
    "concatenate",
    "itemsize",
    "make_plan",
    "make_statistics",
    "picture",
    "table",
]
