"""Means of what members contribute: the same bits for all of them, whatever their ranks and whoever sends to whom.

Each member adds up one piece, in the order of the members' names, and hands it out: twice the bytes of a contribution
travel to and from each, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from ..collectives import Group
from .contribution import Contribution, Wire

__all__ = ["Exchange", "GroupExchange", "ProcessGroupExchange", "mean_of"]


class Exchange(Protocol):
    """Members that swap bytes. `names` are theirs, by rank: all different, and the same on all."""

    names: tuple[Any, ...]
    rank: int

    def all_to_all(self, rows: Tensor) -> Tensor:
        """`rows`: (members, bytes), uint8. Row r goes to rank r; row r of the result came from rank r."""
        ...

    def all_gather(self, row: Tensor) -> Tensor:
        """`row`: (bytes,), uint8. Row r of the result is rank r's."""
        ...


class GroupExchange:
    """Over a Group of ours. `timeout`: seconds for each call, None takes option collective_timeout."""

    def __init__(self, group: Group, names: Sequence[Any] | None = None, *, timeout: float | None = None) -> None:
        self.names: tuple[Any, ...] = tuple(range(group.size)) if names is None else tuple(names)
        self.rank = group.rank
        self._group = group
        self._timeout = timeout

    def all_to_all(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        self._group.all_to_all(list(out), list(rows), timeout=self._timeout)
        return out

    def all_gather(self, row: Tensor) -> Tensor:
        out = row.new_empty(len(self.names), row.numel())
        self._group.all_gather(list(out), row, timeout=self._timeout)
        return out


class ProcessGroupExchange:
    """Over a process group of torch.distributed, or one of TorchFT's, for tensors in host memory."""

    def __init__(self, process_group: Any, names: Sequence[Any] | None = None) -> None:
        size = process_group.size()
        self.names: tuple[Any, ...] = tuple(range(size)) if names is None else tuple(names)
        self.rank: int = process_group.rank()
        self._group = process_group

    def all_to_all(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        options = AllToAllOptions()
        self._group.alltoall_base(out.view(-1), rows.reshape(-1), [], [], options).wait()
        return out

    def all_gather(self, row: Tensor) -> Tensor:
        out = row.new_empty(len(self.names), row.numel())
        self._group.allgather([list(out)], [row], AllgatherOptions()).wait()
        return out


def mean_of(exchange: Exchange, wire: Wire, contribution: Contribution) -> Tensor:
    """The mean of all members' contributions, fp32, flat. All call it with as many numbers and the same wire."""
    names = exchange.names
    pieces = exchange.all_to_all(contribution.cut(len(names)))
    in_order = [pieces[rank] for rank in sorted(range(len(names)), key=names.__getitem__)]
    mean = exchange.all_gather(wire.mean(in_order).view(torch.uint8))
    return mean.view(-1).view(wire.mean_dtype)[: contribution.numel].to(torch.float32)
