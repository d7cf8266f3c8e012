"""Fault injection: plans of faults as data, and what carries one out in a process. See docs/chaos.md.

`monarch_rdma.actor.chaos` carries plans out on a running program.
"""

from __future__ import annotations

from .moments import moment
from .plan import FAULTS, Fault, Plan

__all__ = ["FAULTS", "Fault", "Plan", "moment"]
