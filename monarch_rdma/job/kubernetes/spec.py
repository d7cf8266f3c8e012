"""What a job asks of Kubernetes, mesh by mesh: checked values, from which manifests are made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError

__all__ = [
    "MESH_LABEL",
    "POD_INDEX",
    "WORKLOAD_KINDS",
    "ImageSpec",
    "JobSpec",
    "MeshSpec",
    "check_mesh_name",
    "check_name",
]

POD_INDEX = "apps.kubernetes.io/pod-index"  # the label that StatefulSets give their pods, from 1.28 on
JOB_LABEL, MESH_LABEL = "monarch-rdma/job", "monarch-rdma/mesh"
WORKLOAD_KINDS = {"statefulset": "StatefulSet", "indexed_job": "Job", "monarchmesh": "MonarchMesh"}

_LONGEST_NAME = 50  # leaves room for what Kubernetes appends to the names of pods and revisions


@dataclass(frozen=True)
class ImageSpec:
    """A container image for the pods of a mesh, and what each of them gets.

    `resources`: limits, which are the requests too: `{"amd.com/gpu": 8, "rdma/hca": 1, "cpu": 32, "memory": "512Gi"}`.
    `shared_memory_size`: of /dev/shm, such as "64Gi"; without it the container runtime's (64 MiB mostly), which is too
    little for large tensors in shared memory. `host_network`: the node's own network, one pod a node.
    `lock_memory`: the capability IPC_LOCK, which RDMA cards need to pin memory; None: where `resources` has an RDMA
    device. `run_as_user`: user number, instead of the image's. `env`: of the worker and of what it starts.
    `python`: the one of the image that has monarch_rdma.
    """

    image: str
    resources: Mapping[str, str | int] | None = None
    shared_memory_size: str | None = None
    host_network: bool = False
    lock_memory: bool | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    run_as_user: int | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: Sequence[str] = ()
    python: str = "python3"

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not self.image.strip():
            raise ConfigError(f"image is {self.image!r}, but must name a container image")
        for name, amount in (self.resources or {}).items():
            _check_quantity(f"resources[{name!r}]", amount)
        if self.shared_memory_size is not None:
            _check_quantity("shared_memory_size", self.shared_memory_size)
        if self.image_pull_policy not in (None, "Always", "IfNotPresent", "Never"):
            raise ConfigError(
                f"image_pull_policy is {self.image_pull_policy!r}, but must be Always, IfNotPresent or Never"
            )

    @property
    def locks_memory(self) -> bool:
        if self.lock_memory is not None:
            return self.lock_memory
        return any(re.search(r"rdma|hca|infiniband|roce|\bib\b", name) for name in self.resources or {})

    @property
    def gpu_resources(self) -> list[str]:
        return [name for name in self.resources or {} if name.endswith("/gpu")]


@dataclass(frozen=True)
class MeshSpec:
    """One mesh: `image_spec` or `pod_template` makes pods, `label_selector` finds those that are there already."""

    name: str
    num_replicas: int
    image_spec: ImageSpec | None = None
    pod_template: Mapping[str, Any] | None = None
    label_selector: str | None = None
    pod_rank_label: str = POD_INDEX
    port: int = 26600
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.num_replicas, bool) or not isinstance(self.num_replicas, int) or self.num_replicas < 1:
            raise ConfigError(f"num_replicas of mesh {self.name!r} is {self.num_replicas!r}, but must be at least 1")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 1 <= self.port <= 65535:
            raise ConfigError(f"port of mesh {self.name!r} is {self.port!r}, but must be 1 to 65535")
        ways = [name for name in ("image_spec", "pod_template", "label_selector") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ConfigError(f"mesh {self.name!r} has {' and '.join(ways)}; a mesh is either made or found: give one")
        if self.is_made and self.pod_rank_label != POD_INDEX:
            raise ConfigError(f"pod_rank_label of mesh {self.name!r} is for pods that are there already")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> MeshSpec:
        """What `dataclasses.asdict` has made of one. ConfigError where it is something else."""
        image = fields.get("image_spec")
        try:
            return cls(**{**fields, "image_spec": ImageSpec(**image) if isinstance(image, Mapping) else image})
        except TypeError as error:
            raise ConfigError(f"meshes has {fields!r:.200}, which describes no mesh: {error}") from error

    @property
    def is_made(self) -> bool:
        return self.image_spec is not None or self.pod_template is not None


@dataclass(frozen=True)
class JobSpec:
    """All that decides what a job's manifests are."""

    name: str
    namespace: str
    workload: str = "statefulset"
    kueue_queue: str | None = None
    volcano_queue: str | None = None
    meshes: tuple[MeshSpec, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.workload not in WORKLOAD_KINDS:
            raise ConfigError(f"workload is {self.workload!r}, but must be one of {', '.join(WORKLOAD_KINDS)}")
        if self.kueue_queue and self.volcano_queue:
            raise ConfigError("kueue_queue and volcano_queue are both given; one of them queues a job")

    def object_name(self, mesh: MeshSpec) -> str:
        """Of a mesh's workload and its Service. The operator for MonarchMesh knows it by the mesh's name alone."""
        return mesh.name if self.workload == "monarchmesh" else f"{self.name}-{mesh.name}"

    def service_name(self, mesh: MeshSpec) -> str:
        return f"{mesh.name}-svc" if self.workload == "monarchmesh" else self.object_name(mesh)

    def selector(self, mesh: MeshSpec, *, is_attached: bool = False) -> str:
        """Labels by which a mesh's pods are found. `is_attached`: the job of this name was made by somebody else."""
        if mesh.label_selector is not None:
            return mesh.label_selector
        if self.workload == "monarchmesh" or not (mesh.is_made or is_attached):
            return f"app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name={mesh.name}"
        return ",".join(f"{key}={value}" for key, value in self.pod_labels(mesh).items())

    def pod_labels(self, mesh: MeshSpec) -> dict[str, str]:
        """Which a mesh's pods are told from all others by."""
        return {JOB_LABEL: self.name, MESH_LABEL: mesh.name}


def check_name(argument: str, name: str) -> None:
    """Raises ConfigError unless objects can be named so."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(
            f"{argument} is {name!r}, but must be lower-case letters, digits and '-', from a letter on, as Kubernetes "
            "wants it"
        )
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"{argument} {name!r} has {len(name)} characters, but at most {_LONGEST_NAME} are possible")


def check_mesh_name(name: str) -> None:
    check_name("name", name)
    if "-" in name:
        raise ConfigError(f"name is {name!r}, but a mesh's name is an attribute of the job's state: leave '-' out")


def _check_quantity(argument: str, amount: object) -> None:
    is_number = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
    if not is_number and not (isinstance(amount, str) and re.fullmatch(r"\d+(\.\d+)?([KMGTP]i|[mkMGTP])?", amount)):
        raise ConfigError(f"{argument} is {amount!r}, but must be an amount such as 8, '500m' or '64Gi'")
