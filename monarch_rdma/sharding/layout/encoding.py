"""Layouts as plain values, to send: safe to load from anybody."""

from __future__ import annotations

import math
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

_MOST_RANKS = 1 << 24  # more are taken for damage


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
    mesh, ranks = layout.mesh, layout.ranks.tolist()
    in_order = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return {
        "shape": layout.shape,
        "mesh": [list(zip(mesh.names, mesh.sizes, strict=True)), ranks[0] if in_order else ranks],
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
        if isinstance(ranks, int):  # the first one; the others follow it
            count = math.prod(size for _, size in sizes)
            if count > _MOST_RANKS:
                raise ValueError(f"a mesh of {count} ranks")
            ranks = range(ranks, ranks + count)
        placements = [
            _PLACEMENTS[kind](*(tuple(value) if isinstance(value, list) else value for value in values))
            for kind, *values in data["placements"]
        ]
        return Layout(data["shape"], Mesh(dict(sizes), ranks), placements)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise LayoutError(f"malformed layout: {error}") from error
