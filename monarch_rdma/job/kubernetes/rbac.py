"""What the client of a job may do in its namespace, and no more: a ServiceAccount, a Role and what binds them."""

from __future__ import annotations

from .cluster import RESOURCES
from .manifests import Manifest, secret_name
from .spec import WORKLOAD_KINDS, JobSpec

__all__ = ["rbac_manifests"]


def rbac_manifests(job: JobSpec, account: str | None = None) -> list[Manifest]:
    """For a client that runs as the ServiceAccount `account` (by default named after the job).

    Attaching needs to see pods, why they do not start, and the job's secret. Only a client that makes the pods may also
    make objects, of the kinds that it uses; it may delete those of this job's name alone.
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
    makes = any(mesh.is_made for mesh in job.meshes)
    rules = [
        _rule("", "pods", ["list"]),
        _rule("", "pods/log", ["get"]),
        _rule("", "events", ["list"]),
        _rule("", "secrets", ["get", "delete"] if makes else ["get"], [secret_name(job)]),
    ]
    if not makes:
        return rules
    names = [job.object_name(mesh) for mesh in job.meshes if mesh.is_made]
    kinds = ["Secret", WORKLOAD_KINDS[job.workload]]
    kinds += ["Service"] if job.workload != "monarchmesh" else []
    kinds += ["PodGroup"] if job.volcano_queue else []
    for resource in (RESOURCES[kind] for kind in kinds):
        rules.append(_rule(resource.group, resource.plural, ["create"]))  # of any name: names are not known to it then
        if resource.plural != "secrets":
            rules.append(_rule(resource.group, resource.plural, ["get", "delete"], names))
    return rules


def _rule(group: str, resource: str, verbs: list[str], names: list[str] | None = None) -> Manifest:
    rule: Manifest = {"apiGroups": [group], "resources": [resource], "verbs": verbs}
    return rule | ({"resourceNames": names} if names else {})
