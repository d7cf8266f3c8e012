"""TorchTitan 0.3.0 where there is no GPU. Call `prepare()` before anything of torchtitan is imported.

TorchTitan takes for granted what only devices have, and some of what a later torch than 2.13 has.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

__all__ = ["prepare"]

_is_prepared = False


def prepare() -> None:
    """Once in a process; does nothing where there is a GPU."""
    global _is_prepared
    if _is_prepared or torch.cuda.is_available():
        return
    _is_prepared = True
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lacking: dict[str, Any] = {  # of a device's module
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(name="cpu", total_memory=memory),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, function in lacking.items():
        setattr(torch.cpu, name, function)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_timeout
    dist.barrier = _barrier
    FSDPModule.set_gradient_divide_factor = _set_divide_factor


def _set_timeout(timeout: timedelta, group: Any = None) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)


_barrier_of_torch = dist.barrier


def _barrier(*arguments: Any, device_ids: Any = None, **options: Any) -> Any:
    """TorchTitan names the device "cpu", for which torch wants a number."""
    return _barrier_of_torch(*arguments, **options)


_set_factor_of_torch = FSDPModule.set_gradient_divide_factor


def _set_divide_factor(module: FSDPModule, factor: float) -> None:
    """Sums alone: what multiplies beforehand is NCCL's."""
    _set_factor_of_torch(module, factor)
    module.set_force_sum_reduction_for_comms(True)
