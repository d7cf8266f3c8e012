"""Manifests: from what a job asks for to the objects that are created. Pure; nothing here talks to a cluster."""

from __future__ import annotations

import base64
import copy
import math
import shlex
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .spec import ImageSpec, JobSpec, MeshSpec

__all__ = ["SECRET_KEY", "Manifest", "manifests", "secret_manifest", "secret_name"]

Manifest = dict[str, Any]

SECRET_KEY = "secret"
_SECRET_DIRECTORY = "/var/run/monarch-rdma"
_SECRET_PATH = f"{_SECRET_DIRECTORY}/{SECRET_KEY}"
_NAME, _MANAGED_BY = "app.kubernetes.io/name", "app.kubernetes.io/managed-by"
_OURS = {_NAME: "monarch-rdma-worker", _MANAGED_BY: "monarch-rdma"}


def secret_name(job: JobSpec) -> str:
    return f"{job.name}-secret"


def secret_manifest(job: JobSpec, secret: bytes) -> Manifest:
    """The job secret. All other objects are owned by it, so that they go with it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(job), "namespace": job.namespace, "labels": _job_labels(job)},
        "type": "Opaque",
        "immutable": True,
        "data": {SECRET_KEY: base64.b64encode(secret).decode()},
    }


def manifests(
    job: JobSpec, owner: Mapping[str, Any] | None = None, *, idle: float = math.inf, linger: float = math.inf
) -> list[Manifest]:
    """All objects of a job but its secret, in the order in which they are created.

    `owner`: the secret as it was created, with its uid; None for manifests that are applied by hand. `idle`, `linger`:
    seconds without any client, at first and later, after which pods end; of an Indexed Job, which does not start them
    again.
    """
    limits = {"--idle": idle, "--linger": linger} if job.workload == "indexed_job" else {}
    more = [text for name, value in limits.items() if value < math.inf for text in (name, f"{value:g}")]
    made = [manifest for mesh in job.meshes if mesh.is_made for manifest in _of_mesh(job, mesh, more)]
    if owner is not None:
        reference = {
            "apiVersion": "v1",
            "kind": "Secret",
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        for manifest in made:
            manifest["metadata"]["ownerReferences"] = [reference]
    return made


def _of_mesh(job: JobSpec, mesh: MeshSpec, more: list[str]) -> list[Manifest]:
    template = _pod_template(job, mesh, more)
    if job.workload == "monarchmesh":  # its operator makes the Service
        return [_monarch_mesh(job, mesh, template)]
    workload = _stateful_set(job, mesh, template) if job.workload == "statefulset" else _job(job, mesh, template)
    group = [_pod_group(job, mesh)] if job.volcano_queue else []
    return [_service(job, mesh), *group, workload]


def _job_labels(job: JobSpec) -> dict[str, str]:
    return {**_OURS, "monarch-rdma/job": job.name}


def _metadata(job: JobSpec, mesh: MeshSpec, name: str) -> Manifest:
    queue = {"kueue.x-k8s.io/queue-name": job.kueue_queue} if job.kueue_queue else {}
    labels = {**_OURS, **job.pod_labels(mesh), **queue, **mesh.labels}
    annotations = {"annotations": dict(mesh.annotations)} if mesh.annotations else {}
    return {"name": name, "namespace": job.namespace, "labels": labels, **annotations}


def _service(job: JobSpec, mesh: MeshSpec) -> Manifest:
    """Headless: gives each pod a name of its own, which it keeps when it is replaced."""
    name = job.service_name(mesh)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": job.namespace, "labels": {**_OURS, **job.pod_labels(mesh)}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": job.pod_labels(mesh),
            "ports": [{"name": "monarch", "port": mesh.port, "targetPort": mesh.port, "protocol": "TCP"}],
        },
    }


def _stateful_set(job: JobSpec, mesh: MeshSpec, template: Manifest) -> Manifest:
    name = job.object_name(mesh)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(job, mesh, name),
        "spec": {
            "replicas": mesh.num_replicas,
            "serviceName": job.service_name(mesh),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": job.pod_labels(mesh)},
            "template": template,
        },
    }


def _job(job: JobSpec, mesh: MeshSpec, template: Manifest) -> Manifest:
    template["spec"]["restartPolicy"] = "Never"  # a pod that has ended is replaced by a new one, with its index
    template["spec"]["subdomain"] = job.service_name(mesh)
    queue = {"suspend": True} if job.kueue_queue else {}  # until it is admitted
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, mesh, job.object_name(mesh)),
        "spec": {
            "completionMode": "Indexed",
            "completions": mesh.num_replicas,
            "parallelism": mesh.num_replicas,
            "backoffLimit": 1000 * mesh.num_replicas,  # the actors' restart policies say when it is enough
            **queue,
            "template": template,
        },
    }


def _monarch_mesh(job: JobSpec, mesh: MeshSpec, template: Manifest) -> Manifest:
    return {
        "apiVersion": "monarch.pytorch.org/v1alpha1",
        "kind": "MonarchMesh",
        "metadata": _metadata(job, mesh, mesh.name),
        "spec": {"replicas": mesh.num_replicas, "port": mesh.port, "podTemplate": template},
    }


def _pod_group(job: JobSpec, mesh: MeshSpec) -> Manifest:
    """All pods of a mesh start together, or none does."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": _metadata(job, mesh, job.object_name(mesh)),
        "spec": {"minMember": mesh.num_replicas, "queue": job.volcano_queue},
    }


def _pod_template(job: JobSpec, mesh: MeshSpec, more: list[str]) -> Manifest:
    image = mesh.image_spec
    template = _template_of_image(image, mesh, more) if image else _template_as_given(mesh)
    metadata, spec = template["metadata"], template["spec"]
    labels = {**mesh.labels, **metadata.get("labels", {})}
    if job.workload != "monarchmesh":  # its operator has labels of its own
        labels |= {**_OURS, **job.pod_labels(mesh)}
    annotations = {**mesh.annotations, **metadata.get("annotations", {})}
    if job.volcano_queue:
        spec["schedulerName"] = "volcano"
        annotations["scheduling.k8s.io/group-name"] = job.object_name(mesh)
        annotations["scheduling.volcano.sh/queue-name"] = job.volcano_queue
    if labels:
        metadata["labels"] = labels
    if annotations:
        metadata["annotations"] = annotations
    worker = _give_secret(job, spec)
    if not image:
        worker.setdefault("env", []).insert(0, {"name": "MONARCH_RDMA_SECRET_FILE", "value": _SECRET_PATH})
    return template


def _template_of_image(image: ImageSpec, mesh: MeshSpec, more: list[str]) -> Manifest:
    container: Manifest = {
        "name": "worker",
        "image": image.image,
        "command": ["sh", "-c", _worker_command(image, mesh.port, more)],
        "env": [
            {"name": "MONARCH_RDMA_ADVERTISE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": str(value)} for name, value in image.env.items()),
        ],
        "ports": [{"name": "monarch", "containerPort": mesh.port, "protocol": "TCP"}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    spec: Manifest = {
        "automountServiceAccountToken": False,  # workers ask nothing of the cluster
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
        "containers": [container],
    }
    if image.image_pull_policy:
        container["imagePullPolicy"] = image.image_pull_policy
    if image.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in image.image_pull_secrets]
    if image.resources:
        amounts = {name: str(amount) for name, amount in image.resources.items()}
        container["resources"] = {"limits": amounts, "requests": dict(amounts)}
    if image.locks_memory:
        container["securityContext"]["capabilities"] = {"add": ["IPC_LOCK"]}
    if image.run_as_user is not None:
        user = image.run_as_user
        spec["securityContext"] = {"runAsUser": user, "runAsGroup": user, "fsGroup": user, "runAsNonRoot": user != 0}
    if image.shared_memory_size:
        memory = {"medium": "Memory", "sizeLimit": str(image.shared_memory_size)}
        spec["volumes"] = [{"name": "shared-memory", "emptyDir": memory}]
        container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if image.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if image.node_selector:
        spec["nodeSelector"] = dict(image.node_selector)
    gpu_nodes = [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in image.gpu_resources]
    if tolerations := [*gpu_nodes, *(dict(each) for each in image.tolerations)]:
        spec["tolerations"] = tolerations
    return {"metadata": {}, "spec": spec}


def _worker_command(image: ImageSpec, port: int, more: list[str]) -> str:
    """The secret comes on standard input: its file belongs to root, also where the worker runs as somebody else.

    The limit of locked memory is raised as far as it goes: a container inherits what its runtime was started with.
    """
    limit = 'ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)"'
    agent = [image.python, "-m", "monarch_rdma.job.agent", "--secret", "-", "--address", f"tcp://*:{port}", *more]
    return f"{limit}; exec {shlex.join(agent)} <{_SECRET_PATH}"


def _template_as_given(mesh: MeshSpec) -> Manifest:
    template = copy.deepcopy(dict(mesh.pod_template or {}))
    if "containers" in template:  # a PodSpec, which older programs give
        template = {"spec": template}
    containers = template.get("spec", {}).get("containers")
    if not containers:
        raise ConfigError(f"pod_template of mesh {mesh.name!r} has no containers")
    template.setdefault("metadata", {})
    return template


def _give_secret(job: JobSpec, spec: Manifest) -> Manifest:
    """Mounts it into the worker: the container of that name, or the first one. The container."""
    worker: Manifest = next(
        (each for each in spec["containers"] if each.get("name") == "worker"), spec["containers"][0]
    )
    mode = 0o440 if spec.get("securityContext", {}).get("fsGroup") else 0o400
    secret = {"secretName": secret_name(job), "defaultMode": mode, "items": [{"key": SECRET_KEY, "path": SECRET_KEY}]}
    spec.setdefault("volumes", []).append({"name": "job-secret", "secret": secret})
    mount = {"name": "job-secret", "mountPath": _SECRET_DIRECTORY, "readOnly": True}
    worker.setdefault("volumeMounts", []).append(mount)
    return worker
