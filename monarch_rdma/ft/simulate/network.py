"""What a collective costs on a network of rails and switches: latency a step and bytes over bandwidth (alpha-beta).

Each node has some rails, cards that each lead to a leaf switch of their own; the rails' leaves meet in spines. Within
a node, GPUs reach each other at `node_gb_s`. A collective runs its part within the nodes and its part between them at
the same time, piece by piece, so the slower one counts, and every step of both pays its latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .job import check

__all__ = ["Network"]


@dataclass(frozen=True)
class Network:
    """InputError for a value that cannot be.

    Attributes:
        gpus_per_node, rails_per_node: GPUs share the rails evenly.
        rail_gbit_s: rate of a rail's line; rail_efficiency: the part of it that large transfers reach.
        node_gb_s: GB/s of each GPU within its node.
        hop_latency_s, node_latency_s: of a step between nodes, and within one.
        nodes_per_leaf: nodes below one leaf switch; spine_latency_s: more for a step that goes above it.
        spine_oversubscription: 1 where spines carry all that leaves can send, 4 where they carry a quarter.
    """

    gpus_per_node: int
    rails_per_node: int
    rail_gbit_s: float
    node_gb_s: float
    rail_efficiency: float = 1.0
    hop_latency_s: float = 0.0
    node_latency_s: float = 0.0
    nodes_per_leaf: int = 1 << 30
    spine_latency_s: float = 0.0
    spine_oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive = not field.name.endswith("latency_s")
            rule = "a finite number above 0" if positive else "a finite number from 0 on"
            check(field.name, value, math.isfinite(value) and (value > 0 if positive else value >= 0), rule)
        check("rail_efficiency", self.rail_efficiency, self.rail_efficiency <= 1, "at most 1")
        check("spine_oversubscription", self.spine_oversubscription, self.spine_oversubscription >= 1, "at least 1")

    def all_gather(self, size: float, nodes: int, local: int) -> float:
        """Seconds until each of `local` GPUs in each of `nodes` nodes has all `size` bytes; each held its part."""
        between = self._ring_between(size, nodes, local)
        within = size * (local - 1) / local / (self.node_gb_s * 1e9)
        return max(between, within) + self._ring_latency(nodes, local)

    def reduce_scatter(self, size: float, nodes: int, local: int) -> float:
        """Seconds to sum `size` bytes of each GPU, each keeping its part of the sum: the same steps backwards."""
        return self.all_gather(size, nodes, local)

    def all_reduce(self, size: float, nodes: int, local: int) -> float:
        """Seconds to sum `size` bytes of each GPU on all: by rings, or by a tree of nodes where that is faster."""
        rings = self.reduce_scatter(size, nodes, local) + self.all_gather(size, nodes, local)
        depth = math.ceil(math.log2(nodes))
        within = size * (local - 1) / local / (self.node_gb_s * 1e9)
        # A tree sends all of it in each direction, a ring (n - 1)/n of it.
        between = size / self._node_rate(local) if nodes > 1 else 0.0
        latency = depth * (self.hop_latency_s + self._spine(nodes)) + (local - 1) * self.node_latency_s
        return min(rings, 2 * (max(within, between) + latency))

    def all_to_all(self, size: float, nodes: int, local: int) -> float:
        """Seconds for each GPU to send `size` bytes, spread evenly over all GPUs, itself included."""
        gpus = nodes * local
        within = size * (local - 1) / gpus / (self.node_gb_s * 1e9)
        between = local * size * (nodes - 1) / nodes / self._node_rate(local)
        beyond_leaf = max(0.0, 1 - self.nodes_per_leaf / nodes)
        spines = local * size * beyond_leaf * self.spine_oversubscription / self._node_rate(local)
        latency = self.hop_latency_s + self._spine(nodes) if nodes > 1 else self.node_latency_s * (local > 1)
        return max(within, between, spines) + latency

    def _node_rate(self, local: int) -> float:
        """Bytes a second between nodes that `local` GPUs of each have together."""
        rails = self.rails_per_node * min(1.0, local / self.gpus_per_node)
        return rails * self.rail_gbit_s / 8 * 1e9 * self.rail_efficiency

    def _ring_between(self, size: float, nodes: int, local: int) -> float:
        # Of a ring's hops one a leaf goes through a spine, which even a much smaller spine carries.
        narrow = max(1.0, self.spine_oversubscription / self.nodes_per_leaf) if nodes > self.nodes_per_leaf else 1.0
        return size * (nodes - 1) / nodes * narrow / self._node_rate(local)

    def _ring_latency(self, nodes: int, local: int) -> float:
        leaves = math.ceil(nodes / self.nodes_per_leaf)
        crossings = leaves * self.spine_latency_s if leaves > 1 else 0.0
        return (nodes - 1) * self.hop_latency_s + crossings + (local - 1) * self.node_latency_s

    def _spine(self, nodes: int) -> float:
        return self.spine_latency_s if nodes > self.nodes_per_leaf else 0.0
