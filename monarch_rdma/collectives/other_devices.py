"""Tensors on devices that a program has given to another backend: `init_process_group("cpu:monarch_rdma,cuda:nccl")`.

torch takes a process group written in Python for all devices, and makes no other one. So ours makes a plain group of
torch beside itself, with the other backends in it, and calls on those devices go there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

__all__ = ["OtherDevices", "by_device"]

_c10d: Any = dist.distributed_c10d
Method = TypeVar("Method", bound=Callable[..., Any])


class OtherDevices:
    """Of one process group, which torch has registered when the first call comes."""

    def __init__(self, whose: Any, ours: str, store: Any, timeout: timedelta) -> None:
        """`store`: in which the members' other backends find each other; None: there are none."""
        self._whose, self._ours, self._store, self._timeout = whose, ours, store, timeout
        self._names: dict[str, str] | None = None  # of backends, by device
        self._made: Any = None

    def group_of(self, device: str) -> Any:
        """The group that has this device; None where it is ours."""
        if self._names is None:
            self._names = self._named() if self._store is not None else {}
        if device not in self._names:
            return None
        if self._made is None:
            self._made = self._make(self._names)
        return self._made

    def group_of_tensors(self, given: Any) -> Any:
        """Of the first tensor in a call's arguments."""
        if self._names is not None and not self._names:
            return None
        tensor = _first_tensor(given)
        return None if tensor is None or tensor.is_cpu else self.group_of(tensor.device.type)

    def each(self, do: Callable[[Any], object]) -> None:
        """With the group, where there is one already."""
        if self._made is not None:
            do(self._made)

    def _named(self) -> dict[str, str]:
        config = _c10d._world.pg_backend_config.get(self._whose, "")
        pairs = dict(pair.split(":") for pair in str(config).split(",") if pair)
        return {device: name for device, name in pairs.items() if name != self._ours}

    def _make(self, names: dict[str, str]) -> Any:
        rank, size = self._whose.rank(), self._whose.size()
        group: Any = dist.ProcessGroup(self._store, rank, size)
        for device, name in names.items():
            store = _c10d.PrefixStore(f"{device}/{name}", self._store)
            kind, backend = _backend(name, store, rank, size, self._timeout)
            group._register_backend(torch.device(device), kind, backend)
        return group


def _backend(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> tuple[Any, Any]:
    """As torch makes it, with its default options. RuntimeError where it has none, as torch itself raises."""
    kinds: Any = dist.ProcessGroup.BackendType
    if name == "nccl":
        if not dist.is_nccl_available():
            raise RuntimeError(
                "this torch has no NCCL or RCCL: its process groups for GPUs take a torch for CUDA or ROCm"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return kinds.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    if name == "gloo":
        return kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    plugin: Any = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return kinds.CUSTOM, plugin.creator_fn(store, rank, size, timeout)
    given = _c10d._DistributedBackendOptions()
    given.store, given.group_rank, given.group_size, given.timeout = store, rank, size, timeout
    return kinds.CUSTOM, plugin.creator_fn(given, None)


def by_device(method: Method) -> Method:
    """A method of the process group that another backend has as well, under the same name."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        other = self.others.group_of_tensors(given)
        return method(self, *given, **options) if other is None else getattr(other, name)(*given, **options)

    return cast(Method, call)


def _first_tensor(given: Any) -> torch.Tensor | None:
    for each in given:
        if isinstance(each, torch.Tensor):
            return each
        if isinstance(each, list | tuple) and (found := _first_tensor(each)) is not None:
            return found
    return None
