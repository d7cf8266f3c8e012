"""What the client of a job may do in its namespace, and no more: a ServiceAccount, a Role and what binds them."""

from __future__ import annotations

from .cluster import RESOURCES
from .manifests import Manifest, secret_name
from .spec import WORKLOAD_KINDS, JobSpec

__all__ = ["rbac_manifests"]


def rbac_manifests(job: JobSpec, account: str | None = None) -> list[Manifest]:
    """For a client that runs as the ServiceAccount `account` (by default named after the job).

    Attaching needs to see pods, and why they do not start. Only a job that makes pods may also make and delete objects,
    of the kinds that it uses; names cannot be restricted where objects are created.
    """
    name = account or f"{job.name}-client"
    metadata = {"name": name, "namespace": job.namespace}
    role = {"kind": "Role", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": job.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(metadata)},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": dict(metadata),
            "rules": _rules(job),
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "subjects": [subject],
            "roleRef": role,
        },
    ]


def _rules(job: JobSpec) -> list[Manifest]:
    rules = [
        _rule(["pods"], "", ["list"]),
        _rule(["pods/log"], "", ["get"]),
        _rule(["events"], "", ["list"]),
    ]
    if not any(mesh.is_made for mesh in job.meshes):
        return rules
    workload = RESOURCES[WORKLOAD_KINDS[job.workload]]
    rules.append(_rule([workload.plural], workload.group, ["create", "get", "delete"]))
    rules.append(_rule(["secrets"], "", ["create"]))
    rules.append(_rule(["secrets"], "", ["get", "delete"]) | {"resourceNames": [secret_name(job)]})
    if job.workload != "monarchmesh":
        rules.append(_rule(["services"], "", ["create", "delete"]))
    if job.volcano_queue:
        group = RESOURCES["PodGroup"]
        rules.append(_rule([group.plural], group.group, ["create", "delete"]))
    return rules


def _rule(resources: list[str], group: str, verbs: list[str]) -> Manifest:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}
