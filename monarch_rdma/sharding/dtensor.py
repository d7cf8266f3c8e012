"""Layouts of what torch made, and back: DTensors, modules under FSDP2 and tensor parallelism, checkpoints' metadata.

Of this layer's geometry only this file imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

from ..errors import ConfigError
from .layout import Box, BoxLayout, Layout, LayoutError, Mesh, Partial, Placement, Replicate, Shard, StridedShard

__all__ = [
    "box_layouts",
    "device_mesh",
    "dtype_name",
    "layout_of",
    "local_tensor",
    "mesh_of",
    "named_tensors",
    "storage_metadata",
    "torch_placements",
]

Tensors: TypeAlias = "torch.nn.Module | Mapping[str, Any]"


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The mesh of a DeviceMesh. Its dimensions without names are called dim0, dim1, ..."""
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return Mesh(dict(zip(names, mesh.mesh.shape, strict=True)), mesh.mesh.flatten().tolist())


def device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """A DeviceMesh with the names, sizes and ranks of `mesh`. All of its ranks have to make it together."""
    return DeviceMesh(device_type, torch.from_numpy(mesh.ranks.copy()), mesh_dim_names=mesh.names)


def layout_of(what: DTensor | torch.Tensor | Any, mesh: Mesh | None = None) -> Layout:
    """The layout of a DTensor or DTensorSpec; a plain tensor is the same on all ranks of `mesh`.

    LayoutError for placements that have no counterpart, and for a plain tensor without `mesh`.
    """
    spec = what._spec if isinstance(what, DTensor) else what
    if not isinstance(spec, torch.Tensor):
        placements = [_from_torch(placement) for placement in spec.placements]
        return Layout(tuple(spec.shape), mesh_of(spec.mesh), placements)
    if mesh is None:
        raise LayoutError(f"a plain tensor of shape {tuple(spec.shape)} does not say who else has it: pass mesh")
    return Layout(tuple(spec.shape), mesh)


def _from_torch(placement: Any) -> Placement:
    if isinstance(placement, placement_types._StridedShard):
        return StridedShard(placement.dim, int(placement.split_factor))
    if isinstance(placement, placement_types.Shard):
        return Shard(placement.dim)
    if isinstance(placement, placement_types.Replicate):
        return Replicate()
    if isinstance(placement, placement_types.Partial):
        return Partial(placement.reduce_op)
    raise LayoutError(f"placement {placement!r} has no counterpart among layouts")


def torch_placements(layout: Layout) -> tuple[placement_types.Placement, ...]:
    """The placements of a DTensor with this layout. LayoutError for those that DTensors do not know."""
    return tuple(_to_torch(placement) for placement in layout.placements)


def _to_torch(placement: Placement) -> placement_types.Placement:
    if isinstance(placement, Shard) and placement.sizes is None:
        return placement_types.Shard(placement.dim)
    if isinstance(placement, StridedShard):
        return placement_types._StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Replicate):
        return placement_types.Replicate()
    if isinstance(placement, Partial):
        return placement_types.Partial(placement.op)
    raise LayoutError(f"{placement} has no counterpart among a DTensor's placements")


def named_tensors(what: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of a module (parameters and persistent buffers) or state dict by name; other values are left out.

    ConfigError for anything else, and for names that are no strings.
    """
    items = what.state_dict() if isinstance(what, torch.nn.Module) else what
    if not isinstance(items, Mapping):
        raise ConfigError(f"tensors are expected in a module or a state dict, not in a {type(items).__name__}")
    found = {name: value for name, value in items.items() if isinstance(value, torch.Tensor)}
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ConfigError(f"a tensor is named {wrong[0]!r}, but names must be strings")
    return found


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this process has of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


# --- distributed checkpoints


def box_layouts(metadata: Metadata) -> dict[str, tuple[BoxLayout, str]]:
    """Layout and dtype of the tensors of a distributed checkpoint. What ranks are elsewhere are chunks here: rank i has
    the i-th chunk of a tensor's metadata.
    """
    layouts = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            zero = (0,) * len(entry.size)
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes), zero) for chunk in entry.chunks]
            parts = {rank: [box] for rank, box in enumerate(boxes)}
            layouts[name] = BoxLayout(tuple(entry.size), parts), dtype_name(entry.properties.dtype)
    return layouts


def storage_metadata(layout: Layout | BoxLayout, dtype: torch.dtype) -> TensorStorageMetadata:
    """What a distributed checkpoint of a tensor with this layout says of it: each box as a chunk, once."""
    boxes = [box for rank in layout.ranks.tolist() for box in layout.part(rank).boxes]
    chunks = {(box.start, box.size) for box in boxes} or {((0,) * len(layout.shape), layout.shape)}
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(layout.shape),
        chunks=[_chunk(start, size) for start, size in sorted(chunks)],
    )


def _chunk(start: Iterable[int], size: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size))
