"""How long a synchronous step takes on more nodes than it was measured on, and so how well training scales.

What does not change with the number of nodes is the compute that was measured. What does: gathering parameters and
reducing gradients (FSDP, experts apart), of which a part hides behind compute, and the wait for the slowest node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from .job import InputError, check
from .network import Network

__all__ = ["Workload", "slowest_of"]


@dataclass(frozen=True)
class Workload:
    """A model trained by FSDP with a fixed amount of data a GPU (weak scaling). InputError for a value that cannot be.

    Attributes:
        base_step_s: a step as it was measured on `base_nodes` nodes.
        sharded_parameters: sharded over all GPUs, in `layers` equal layers.
        expert_parameters: spread over `expert_parallel` GPUs of a node, and each part sharded over the nodes.
        gathers_per_step: of each parameter, at `gathered_bytes` bytes; its gradient is reduced once at `reduced_bytes`.
        overlap: part of the collectives' time that hides behind compute, 0 to 1.
        step_jitter: standard deviation of a node's step, as a part of the step.
    """

    network: Network
    base_nodes: int
    base_step_s: float
    sharded_parameters: float
    layers: int
    expert_parameters: float = 0.0
    expert_parallel: int = 1
    gathers_per_step: int = 2
    gathered_bytes: float = 2
    reduced_bytes: float = 4
    overlap: float = 0.0
    step_jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_nodes", "layers", "expert_parallel"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        check("base_step_s", self.base_step_s, 0 < self.base_step_s < math.inf, "a finite number above 0")
        check("overlap", self.overlap, 0 <= self.overlap <= 1, "from 0 to 1")
        per_node = self.network.gpus_per_node
        rule = f"a divisor of the {per_node} GPUs of a node"
        check("expert_parallel", self.expert_parallel, per_node % self.expert_parallel == 0, rule)
        for name in ("sharded_parameters", "expert_parameters", "gathers_per_step", "gathered_bytes", "step_jitter"):
            check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "a finite number from 0 on")
        if self.compute_s <= 0:
            raise InputError(
                f"base_step_s is {self.base_step_s!r}, but the collectives that do not overlap take "
                f"{self.exposed_s(self.base_nodes):.3g} s of it"
            )

    @property
    def compute_s(self) -> float:
        """What of the measured step is neither waiting for collectives nor for the slowest node."""
        return (self.base_step_s - self.exposed_s(self.base_nodes)) / self._wait(self.base_nodes)

    def step_s(self, nodes: int) -> float:
        return self.compute_s * self._wait(nodes) + self.exposed_s(nodes)

    def efficiency(self, nodes: int) -> float:
        """Tokens a second and GPU on `nodes` nodes, relative to `base_nodes`."""
        return self.base_step_s / self.step_s(nodes)

    def exposed_s(self, nodes: int) -> float:
        """Collectives of one step that nothing hides."""
        return (1 - self.overlap) * self.collectives_s(nodes)

    def collectives_s(self, nodes: int) -> float:
        """Collectives of one step: layer by layer, dense parameters, then experts."""
        local = self.network.gpus_per_node
        dense = self._sharding_s(self.sharded_parameters / self.layers, nodes, local)
        # The GPUs that hold the same experts: in each node, as many as expert_parallel leaves. Their groups share the
        # rails, so that each has its GPUs' part of them.
        alike = local // self.expert_parallel
        experts = self._sharding_s(self.expert_parameters / self.expert_parallel / self.layers, nodes, alike)
        return self.layers * (dense + experts)

    def _sharding_s(self, parameters: float, nodes: int, local: int) -> float:
        if not parameters:
            return 0.0
        gather = self.network.all_gather(parameters * self.gathered_bytes, nodes, local)
        reduce = self.network.reduce_scatter(parameters * self.reduced_bytes, nodes, local)
        return self.gathers_per_step * gather + reduce

    def _wait(self, nodes: int) -> float:
        return 1 + self.step_jitter * slowest_of(nodes)


def slowest_of(count: int) -> float:
    """Mean of the largest of `count` values, in standard deviations of a normal distribution (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
