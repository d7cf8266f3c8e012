"""`monarch-rdma k8s render`: prints the manifests of a job, to look at, to keep, or for `kubectl apply`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from ...errors import ConfigError
from .manifests import SECRET_KEY, Manifest, manifests, secret_name
from .rbac import rbac_manifests
from .spec import ImageSpec, JobSpec, MeshSpec, check_mesh_name, check_name

__all__ = ["add_arguments", "run"]

_GPUS = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}


def add_arguments(parser: Any) -> None:
    parser.add_argument("--name", default="job", help="of the job, from which its objects' names are made [%(default)s]")
    parser.add_argument("--namespace", default="default", help="[%(default)s]")
    parser.add_argument(
        "--mesh", metavar="NAME=PODS", action="append", default=[], help="a mesh; may be given again [hosts=1]"
    )
    parser.add_argument("--image", help="of the pods; without it only what is for the client is printed")
    parser.add_argument("--gpu", metavar="KIND=N", help="GPUs for each pod, such as amd=8 or nvidia=8")
    parser.add_argument(
        "--resource",
        metavar="NAME=AMOUNT",
        action="append",
        default=[],
        help="anything else for each pod, such as rdma/hca=1, cpu=32, memory=512Gi; may be given again",
    )
    parser.add_argument("--shared-memory", metavar="SIZE", help="of /dev/shm, such as 64Gi")
    parser.add_argument("--host-network", action="store_true", help="the pods use their nodes' network")
    parser.add_argument("--user", metavar="NUMBER", type=int, help="that the workers run as, instead of the image's")
    parser.add_argument("--workload", choices=("statefulset", "indexed_job", "monarchmesh"), default="statefulset")
    parser.add_argument("--kueue-queue", metavar="NAME", help="the pods wait in this queue of Kueue")
    parser.add_argument("--volcano-queue", metavar="NAME", help="the pods wait in this queue of Volcano")
    parser.add_argument("--rbac", action="store_true", help="also the role that the job's client needs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of YAML")


def run(arguments: Any, out: TextIO | None = None) -> int:
    """Prints what `arguments` ask for. Never the job's secret. Raises ConfigError."""
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
    print(_text(job, found, as_json=arguments.json), end="", file=out or sys.stdout)
    return 0


def _meshes(arguments: Any) -> list[MeshSpec]:
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
            f"#   kubectl -n {job.namespace} create secret generic {secret_name(job)} --from-file={SECRET_KEY}=job.secret\n"
        )
    body: str = yaml.safe_dump_all(found, sort_keys=False, explicit_start=True, default_flow_style=False)
    return head + body
