"""Sharded tensors: who has which elements, and how they get from one layout to another, moving only what is missing.

`layout` and `plan` are numbers only; `reshard` carries plans out; `state_dict` publishes and fetches whole models;
`sharded_tensor` has one tensor as a value. The names below are imported from their modules when they are first used:
those of layouts and plans do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .directory import Addresses
    from .layout import (
        BlockCyclic,
        Box,
        BoxLayout,
        GroupedShard,
        Layout,
        LayoutError,
        Mesh,
        Part,
        Partial,
        Replicate,
        Shard,
        StridedShard,
    )
    from .name_server import NameDirectory, NameServer
    from .plan import (
        Plan,
        PlanError,
        Source,
        TensorSpec,
        Topology,
        concatenate,
        make_plan,
        make_statistics,
        picture,
        table,
    )
    from .relay import Relay, RelayReport
    from .reshard import Report, Reshard
    from .sharded_tensor import ShardedTensor
    from .state_dict import Publication, Reader, fetch, publish

_MODULES = {
    "directory": "Addresses",
    "layout": (
        "BlockCyclic Box BoxLayout GroupedShard Layout LayoutError Mesh Part Partial Replicate Shard StridedShard"
    ),
    "plan": "Plan PlanError Source TensorSpec Topology concatenate make_plan make_statistics picture table",
    "name_server": "NameDirectory NameServer",
    "relay": "Relay RelayReport",
    "reshard": "Report Reshard",
    "sharded_tensor": "ShardedTensor",
    "state_dict": "Publication Reader fetch publish",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Addresses",
    "BlockCyclic",
    "Box",
    "BoxLayout",
    "GroupedShard",
    "Layout",
    "LayoutError",
    "Mesh",
    "NameDirectory",
    "NameServer",
    "Part",
    "Partial",
    "Plan",
    "PlanError",
    "Publication",
    "Reader",
    "Relay",
    "RelayReport",
    "Replicate",
    "Report",
    "Reshard",
    "Shard",
    "ShardedTensor",
    "Source",
    "StridedShard",
    "TensorSpec",
    "Topology",
    "concatenate",
    "fetch",
    "make_plan",
    "make_statistics",
    "picture",
    "publish",
    "table",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
