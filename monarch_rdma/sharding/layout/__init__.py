"""Which rank has which elements of a tensor: a mesh of ranks and a placement for each of its dimensions. Integers only.

mesh = Mesh({"dp": 4, "tp": 2})
layout = Layout((4096, 4096), mesh, [Shard(0), Shard(1)])   # Shard as torch's DTensor means it
layout.part(3)                                              # shape and boxes of rank 3's local tensor

Each dimension of a tensor is dealt out to parts by itself; a rank's local tensor is the product of its parts of all
dimensions (a tile of a `Grid`). What is no such product is said with explicit boxes: `BoxLayout`.
"""

from __future__ import annotations

from .boxes import BoxLayout
from .checks import LayoutError
from .encoding import from_json, to_json
from .mesh import Mesh
from .part import Box, Grid, Part
from .placed import Layout
from .placements import BlockCyclic, GroupedShard, Partial, Placement, Replicate, Shard, StridedShard
from .segments import Segments

__all__ = [
    "BlockCyclic",
    "Box",
    "BoxLayout",
    "Grid",
    "GroupedShard",
    "Layout",
    "LayoutError",
    "Mesh",
    "Part",
    "Partial",
    "Placement",
    "Replicate",
    "Segments",
    "Shard",
    "StridedShard",
    "from_json",
    "to_json",
]
