"""The settings that were frozen before the first run: inputs with a range and a source each, and what was published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .closed_form import best_interval
from .failures import Failures
from .job import InputError, Job, check
from .network import Network
from .scaling import Workload, slowest_of

__all__ = ["FROZEN", "Input", "Published", "Setting", "Values", "failures_of", "job_of", "load", "workload_of"]

FROZEN = Path(__file__).with_name("settings.json")

Values = Mapping[str, float]


@dataclass(frozen=True)
class Input:
    """A number, the range that is plausible, its unit, and whether it was published, derived or assumed."""

    value: float
    low: float
    high: float
    unit: str
    source: str
    kind: str


@dataclass(frozen=True)
class Published:
    value: float
    source: str


@dataclass(frozen=True)
class Setting:
    name: str
    title: str
    inputs: Mapping[str, Input]
    published: Mapping[str, Published]

    def values(self, **changed: float) -> dict[str, float]:
        """The inputs' values, with some changed. InputError for a name that is not an input of this setting."""
        for name in changed:
            if name not in self.inputs:
                raise InputError(f"{name} is not an input of {self.name}, which has {', '.join(sorted(self.inputs))}")
        return {name: entry.value for name, entry in self.inputs.items()} | changed

    @property
    def has_scaling(self) -> bool:
        return "base_nodes" in self.inputs

    @property
    def has_failures(self) -> bool:
        return "failure_interval_s" in self.inputs


def load(path: Path = FROZEN) -> dict[str, Setting]:
    """The settings of a file by name. InputError where it is not as it must be."""
    try:
        document = json.loads(path.read_text())
        sources = document["sources"]
        settings = [_setting(entry, sources) for entry in document["settings"]]
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} is not a file of settings: {type(error).__name__}: {error}") from error
    return {setting.name: setting for setting in settings}


def _setting(entry: Mapping[str, Any], sources: Mapping[str, str]) -> Setting:
    inputs = {name: Input(**fields) for name, fields in entry["inputs"].items()}
    for name, of in inputs.items():
        check(name, of.value, of.low <= of.value <= of.high, f"from {of.low} to {of.high}")
        check(f"source of {name}", of.source, of.source in sources, "one of the file's sources")
    published = {name: Published(**fields) for name, fields in entry["published"].items()}
    return Setting(entry["name"], entry["title"], inputs, published)


def network_of(values: Values) -> Network:
    return Network(
        gpus_per_node=int(values["gpus_per_node"]),
        rails_per_node=int(values["rails_per_node"]),
        rail_gbit_s=values["rail_gbit_s"],
        node_gb_s=values["node_gb_s"],
        rail_efficiency=values["rail_efficiency"],
        hop_latency_s=values["hop_latency_s"],
        node_latency_s=values["node_latency_s"],
        nodes_per_leaf=int(values["nodes_per_leaf"]),
        spine_latency_s=values["spine_latency_s"],
        spine_oversubscription=values["spine_oversubscription"],
    )


def workload_of(values: Values) -> Workload:
    return Workload(
        network=network_of(values),
        base_nodes=int(values["base_nodes"]),
        base_step_s=values["tokens_per_gpu_step"] / values["tokens_per_gpu_second"],
        sharded_parameters=values["sharded_parameters"],
        layers=int(values["layers"]),
        expert_parameters=values["expert_parameters"],
        expert_parallel=int(values["expert_parallel"]),
        gathers_per_step=int(values["gathers_per_step"]),
        gathered_bytes=values["gathered_bytes"],
        reduced_bytes=values["reduced_bytes"],
        overlap=values["overlap"],
        step_jitter=values["step_jitter"],
    )


def failures_of(values: Values) -> Failures:
    return Failures(
        interval_s=values["failure_interval_s"],
        periodic=values["periodic"] >= 0.5,
        restart_s=values["restart_s"],
        replace_s=values["replace_s"],
        machine_share=values["machine_share"],
    )


def job_of(values: Values) -> Job:
    """The replica groups of a setting; checkpoints are taken as often as is best for its failures."""
    nodes_per_group = int(values["nodes_per_group"])
    groups = int(values["nodes"]) // nodes_per_group
    step = _group_step(values, nodes_per_group)
    steps = int(values["steps_per_round"])
    # A synchronisation also waits for the slowest group, whose steps differ as independent ones do.
    wait = step * values["step_jitter"] * math.sqrt(steps) * slowest_of(groups)
    return Job(
        groups=groups,
        nodes_per_group=nodes_per_group,
        step_s=step,
        steps_per_round=steps,
        sync_s=_sync(values, groups, nodes_per_group) + wait,
        min_groups=min(int(values["min_groups"]), groups),
        detect_s=values["detect_s"],
        reconfigure_s=values["reconfigure_s"],
        heal_s=values["synced_parameters"] * values["state_bytes_per_parameter"] / (values["heal_gb_s"] * 1e9),
        job_restart_s=values["job_restart_s"],
        checkpoint_stall_s=values["checkpoint_stall_s"],
        checkpoint_interval_s=best_interval(values["failure_interval_s"], values["checkpoint_stall_s"]),
    )


def _group_step(values: Values, nodes: int) -> float:
    if "base_nodes" in values:
        return workload_of(values).step_s(nodes)
    flops = values["tokens_per_gpu_step"] * values["flops_per_token"]
    return flops / (values["utilisation"] * values["peak_flops"]) * (1 + values["step_jitter"] * slowest_of(nodes))


def _sync(values: Values, groups: int, nodes_per_group: int) -> float:
    """All groups sum what their GPUs hold a shard of, each GPU with its likes, all rails at once."""
    if groups == 1:
        return 0.0
    shard = values["synced_parameters"] / (nodes_per_group * values["gpus_per_node"])
    return network_of(values).all_reduce(shard * values["bytes_per_synced_parameter"], groups, 1)
