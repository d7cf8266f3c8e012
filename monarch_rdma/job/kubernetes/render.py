"""`monarch-rdma k8s render`: prints the manifests of a job, to look at, to keep, or for `kubectl apply`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ...errors import ConfigError
from .manifests import SECRET_KEY, Manifest, manifests, secret_name
from .rbac import rbac_manifests
from .spec import ImageSpec, JobSpec, MeshSpec, check_mesh_name, check_name

__all__ = ["run"]

_GPUS = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}


def run(arguments: argparse.Namespace) -> int:
    """Prints what the arguments of the command ask for. Never the job's secret. Raises ConfigError."""
    check_name("--name", arguments.name)
    job = JobSpec(
        arguments.name,
        arguments.namespace,
        arguments.workload,
        arguments.kueue_queue,
        arguments.volcano_queue,
        tuple(_meshes(arguments)),
    )
    for mesh in job.meshes:
        check_name("--name and --mesh", job.object_name(mesh))
    found = [*(rbac_manifests(job) if arguments.rbac else ()), *manifests(job)]
    if not found:
        raise ConfigError("there is nothing to print: give --image for pods, --rbac for the client's role, or both")
    print(_text(job, found, as_json=arguments.json), end="")
    return 0


def _meshes(arguments: argparse.Namespace) -> list[MeshSpec]:
    resources = dict(_pair("--resource", each) for each in arguments.resource)
    if arguments.gpu:
        kind, count = _pair("--gpu", arguments.gpu)
        if kind not in _GPUS:
            raise ConfigError(f"--gpu {arguments.gpu}: {kind!r} is neither amd nor nvidia; use --resource for others")
        resources = {_GPUS[kind]: count, **resources}
    image = None
    if arguments.image:
        image = ImageSpec(
            arguments.image,
            resources=resources or None,
            shared_memory_size=arguments.shared_memory,
            host_network=arguments.host_network,
            run_as_user=arguments.user,
        )
    meshes = []
    for name, pods in (_pair("--mesh", each) for each in arguments.mesh or ["hosts=1"]):
        check_mesh_name(name)
        if not pods.isdecimal():
            raise ConfigError(f"--mesh {name}={pods}: {pods!r} is no number of pods")
        meshes.append(MeshSpec(name, int(pods), image_spec=image))
    return meshes


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ConfigError(f"{option} is {text!r}, but must be a name, =, and an amount")
    return name, value


def _text(job: JobSpec, found: Sequence[Manifest], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(found)}, indent=2) + "\n"
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "YAML cannot be written without PyYAML; use --json, or run: pip install 'monarch-rdma[kubernetes]'"
        ) from error
    head = ""
    if any(manifest["kind"] != "Role" for manifest in found) and any(mesh.is_made for mesh in job.meshes):
        head = (
            f"# The pods need the job's secret, which is made once and never printed:\n"
            f"#   python -c \"from monarch_rdma.rdma import Secret; Secret.generate().write_file('job.secret')\"\n"
            f"#   kubectl -n {job.namespace} create secret generic {secret_name(job)} "
            f"--from-file={SECRET_KEY}=job.secret\n"
        )
    body: str = yaml.safe_dump_all(found, sort_keys=False, explicit_start=True, default_flow_style=False)
    return head + body
