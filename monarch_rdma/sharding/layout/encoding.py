"""Layouts as plain values, to send: safe to load from anybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from .boxes import BoxLayout
from .checks import LayoutError
from .mesh import Mesh
from .part import Box, Part
from .placed import Layout
from .placements import BlockCyclic, GroupedShard, Partial, Placement, Replicate, Shard, StridedShard

__all__ = ["from_json", "to_json"]

_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    kind.__name__: kind for kind in (BlockCyclic, GroupedShard, Partial, Replicate, Shard, StridedShard)
}


def to_json(layout: Layout | BoxLayout) -> dict[str, Any]:
    """Lists, strings and numbers that `from_json` makes the layout from again."""
    if isinstance(layout, BoxLayout):
        parts = {rank: layout.part(rank) for rank in layout.ranks.tolist()}
        boxes = {rank: [[box.start, box.size, box.at] for box in part.boxes] for rank, part in parts.items()}
        return {"shape": layout.shape, "parts": [[rank, parts[rank].shape, boxes[rank]] for rank in parts]}
    placements = [
        [type(placement).__name__, *(getattr(placement, field.name) for field in fields(placement))]
        for placement in layout.placements
    ]
    mesh = layout.mesh
    return {
        "shape": layout.shape,
        "mesh": [list(zip(mesh.names, mesh.sizes, strict=True)), mesh.ranks.ravel().tolist()],
        "placements": placements,
    }


def from_json(data: Any) -> Layout | BoxLayout:
    """The layout. LayoutError where it is malformed, or makes no sense."""
    try:
        if "parts" in data:
            parts = {
                rank: Part(tuple(shape), tuple(Box(*(tuple(numbers) for numbers in box)) for box in boxes))
                for rank, shape, boxes in data["parts"]
            }
            return BoxLayout(data["shape"], parts)
        sizes, ranks = data["mesh"]
        placements = [
            _PLACEMENTS[kind](*(tuple(value) if isinstance(value, list) else value for value in values))
            for kind, *values in data["placements"]
        ]
        return Layout(data["shape"], Mesh(dict(sizes), ranks), placements)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise LayoutError(f"malformed layout: {error}") from error
