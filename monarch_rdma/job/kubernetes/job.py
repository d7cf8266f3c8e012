"""A job whose hosts are pods: made by Kubernetes, or there already."""

from __future__ import annotations

import base64
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ...actor.joining.rendezvous import SharedClaim, read_shared
from ...actor.runtime.proc import current_proc
from ...errors import ConfigError, PeerLost
from ...rdma.secret import Secret, configured_secret
from ..scheduled import Launch, ScheduledJob
from ..status import JobState, JobStatus
from .cluster import Cluster
from .manifests import SECRET_KEY, Manifest, manifests, secret_manifest, secret_name
from .pod_logs import PodLogs
from .pods import Ailment, Pod, address_of, ailment_of, current, event_ailments, history_of, is_ready
from .spec import POD_INDEX, WORKLOAD_KINDS, ImageSpec, JobSpec, MeshSpec, check_mesh_name, check_name

__all__ = ["KubernetesJob"]

_log = logging.getLogger("monarch_rdma.job")
_LEAVING = 30.0  # seconds for pods to go when a job is killed
_PAUSE = 0.2
_TAIL = 10  # lines of a log


class KubernetesJob(ScheduledJob):
    """Hosts of a Kubernetes cluster, one pod each. The client must reach the pods' addresses: it runs in the cluster,
    or in a network that routes to them.

    A pod that is replaced is found again: processes with a restart policy are started in the new one. What cannot be
    had is told in the cluster's own words: ConfigError for what will never run, TransferTimeout for what waits.
    """

    looks_every = 5.0
    settles_within = 10.0

    def __init__(
        self,
        namespace: str | None = None,
        timeout: float | None = None,
        kubeconfig: str | None = None,
        attach_to: str | None = None,
        *,
        name: str | None = None,
        workload: str = "statefulset",
        kueue_queue: str | None = None,
        volcano_queue: str | None = None,
        idle_timeout: float = math.inf,
        meshes: Iterable[MeshSpec | Mapping[str, Any]] = (),
    ) -> None:
        """`namespace`: by default the one that `kubectl` uses. `timeout`: seconds for which `state()` waits, also in a
        queue. `kubeconfig`: path of a file; by default the pod's own account, or what `kubectl` uses. `attach_to`: name
        of a job that another program has made, or that was applied by hand: its pods and its secret are used, and
        `kill()` leaves them.

        `name`: what the objects are called after, by default made up. `workload`: "statefulset"; "indexed_job", whose
        pods are given back when nobody uses them (`idle_timeout`); "monarchmesh", a resource of Monarch's operator.
        `kueue_queue`, `volcano_queue`: where the pods wait, all together. `meshes`: as `add_mesh` makes them.
        """
        super().__init__({"none": 1}, idle_timeout=idle_timeout)
        self._meshes = {}  # add_mesh() says which
        if attach_to is not None:
            check_name("attach_to", attach_to)
        if name is not None:
            check_name("name", name)
        if idle_timeout < math.inf and workload != "indexed_job":
            raise ConfigError(
                f"idle_timeout is {idle_timeout:g}, but a {workload} starts again what has ended; use "
                "workload='indexed_job'"
            )
        self._wait = timeout
        self._kubeconfig = kubeconfig
        self._attach_to = attach_to
        self._job = JobSpec(attach_to or name or "", namespace or "", workload, kueue_queue, volcano_queue)
        self._connection: Cluster | None = None
        self._has_run = False
        for mesh in meshes:
            self._add(mesh if isinstance(mesh, MeshSpec) else MeshSpec.from_json(mesh))

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = POD_INDEX,
        image_spec: ImageSpec | None = None,
        port: int = 26600,
        pod_template: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """A mesh of `num_replicas` pods. `image_spec` or `pod_template` (a PodTemplateSpec with a worker of its own in
        its first container) makes them; without either, pods that are there are found by `label_selector`.

        `pod_rank_label`: the label of found pods that has their rank; without it the number at the end of their name
        counts. `port`: where the workers listen. `labels`, `annotations`: of the pods and of what makes them. Raises
        ConfigError.
        """
        self._add(
            MeshSpec(
                name,
                num_replicas,
                image_spec=image_spec,
                pod_template=pod_template,
                label_selector=label_selector,
                pod_rank_label=pod_rank_label,
                port=port,
                labels=dict(labels or {}),
                annotations=dict(annotations or {}),
            )
        )

    def _add(self, mesh: MeshSpec) -> None:
        check_mesh_name(mesh.name)
        if self.active:
            raise ConfigError(f"mesh {mesh.name!r} comes too late: the job was applied already")
        if mesh.name in self._meshes:
            raise ConfigError(f"the job has a mesh {mesh.name!r} already")
        if self._attach_to is not None and mesh.is_made:
            raise ConfigError(
                f"mesh {mesh.name!r} is to be made, but attach_to uses what is there: leave one of them out"
            )
        if self._job.name:
            check_name("name", self._job.object_name(mesh))
        self._job = replace(self._job, meshes=(*self._job.meshes, mesh))
        self._meshes[mesh.name] = mesh.num_replicas

    def spec(self) -> dict[str, Any]:
        job = self._job
        return {
            "namespace": job.namespace or None,
            "timeout": self._wait,
            "kubeconfig": self._kubeconfig,
            "attach_to": self._attach_to,
            "name": None if self._attach_to else job.name or None,
            "workload": job.workload,
            "kueue_queue": job.kueue_queue,
            "volcano_queue": job.volcano_queue,
            "idle_timeout": self._idle_timeout,
            "meshes": [asdict(mesh) for mesh in job.meshes],
        }

    def manifests(self, name: str | None = None) -> list[Manifest]:
        """What would be created, except the secret, for a job of that name."""
        return manifests(self._named(name or self._job.name or "job", self._job.namespace or "default"))

    # --- the scheduler

    def _submit(self, launch: Launch) -> dict[str, Any]:
        try:
            return self._create_or_find(launch)
        except BaseException:
            self._disconnect()
            raise

    def _create_or_find(self, launch: Launch) -> dict[str, Any]:
        if launch.client:
            raise ConfigError(
                "KubernetesJob runs no client_script; run the program in a pod of its own, with the rights that "
                "`monarch-rdma k8s render --rbac` prints"
            )
        if not self._meshes:
            raise ConfigError("the job has no mesh; add one with add_mesh()")
        cluster = self._cluster
        job = self._named(self._job.name or f"job-{launch.folder.path.name}", self._job.namespace or cluster.namespace)
        if self._makes:
            self._create_objects(job, launch)
        elif self._attach_to is not None:
            self._take_secret(job, launch)
        elif configured_secret() is None:
            raise ConfigError(
                "the job's pods are there already, so their secret has to be given: in option secret_file, or by "
                "attach_to=... the name of the job that has made them"
            )
        return {"name": job.name, "namespace": job.namespace}

    def _create_objects(self, job: JobSpec, launch: Launch) -> None:
        """All or none."""
        made: list[Manifest] = []
        secret = secret_manifest(job, Secret.from_file(launch.folder.secret_file).reveal())
        try:
            owner = self._cluster.create(secret)
            made.append(secret)
            for manifest in manifests(job, owner, idle=launch.idle, linger=launch.linger):
                self._cluster.create(manifest)
                made.append(manifest)
        except BaseException:
            self._delete(made)
            raise

    def _take_secret(self, job: JobSpec, launch: Launch) -> None:
        """That of the job which is attached to, instead of our own."""
        found = self._cluster.get("Secret", job.namespace, secret_name(job))
        data = (found or {}).get("data", {}).get(SECRET_KEY)
        if data is None:
            raise ConfigError(
                f"there is no job {job.name!r} to attach to in namespace {job.namespace!r}: Secret {secret_name(job)} "
                "is not there"
            )
        launch.folder.secret_file.unlink()
        Secret(base64.b64decode(data)).write_file(launch.folder.secret_file)

    def _cancel(self) -> None:
        if not self._makes:
            return
        job = self._applied_job
        secret = {"kind": "Secret", "metadata": {"name": secret_name(job), "namespace": job.namespace}}
        self._delete([secret, *manifests(job)])
        deadline = time.monotonic() + _LEAVING
        while left := [pod["metadata"]["name"] for mesh in job.meshes for pod in self._pods(job, mesh)]:
            if time.monotonic() > deadline:
                _log.warning("%s: pods %s are still being deleted", self.name, ", ".join(left))
                return
            time.sleep(_PAUSE)

    def _delete(self, made: list[Manifest]) -> None:
        for manifest in reversed(made):
            metadata = manifest["metadata"]
            self._cluster.delete(manifest["kind"], metadata["namespace"], metadata["name"])

    def _kill(self) -> None:
        if self._makes:
            super()._kill()
        else:
            self._detach()
        self._disconnect()

    def _detach(self) -> None:
        """The pods are not ours: they stay, without what we have started there."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()
            for mesh in watch.meshes.values():
                current_proc().host_watch.discard_hosts(mesh._chosen())
                mesh._agents().part.options(timeout=_LEAVING).call_living(current_proc().address).wait(_LEAVING)
        self.folder.remove()

    def _state(self, timeout: float | None) -> JobState:
        return super()._state(self._wait if timeout is None else timeout)

    def _status(self) -> JobStatus:
        job = self._applied_job
        pods = {mesh.name: self._pods(job, mesh) for mesh in job.meshes}
        names = tuple(sorted(pod["metadata"]["name"] for found in pods.values() for pod in found))
        over = self._ending(job, any(names))
        if over:
            return JobStatus("ended", over, "apply() the job again", names)
        ailments, count = [], 0
        for mesh in job.meshes:
            ready = self._take_addresses(mesh, pods[mesh.name])
            count += ready
            if ready < mesh.num_replicas:
                ailments += self._ailments(job, mesh, pods[mesh.name])
        if count == sum(self._meshes.values()):
            self._has_run = True
        self._final = next((each for each in ailments if each.is_final), None)
        told = ailments[:1] if self._final is None else [self._final]
        message = [f"{count} of {sum(self._meshes.values())} pods are ready"] if told or not self._has_run else []
        message += [each.words for each in told]
        if self._has_run:
            message += [words for found in pods.values() for pod in found if (words := history_of(pod))]
        return JobStatus(
            "running" if self._has_run else "queued", "; ".join(message), told[0].advice if told else "", names
        )

    def _raise_if_over(self, status: JobStatus, cause: BaseException | None = None) -> None:
        """Also where waiting is in vain; then nothing is left in the cluster."""
        super()._raise_if_over(status, cause)
        if status.phase == "queued" and self._final is not None:
            sentence = f"{self.name} will never run: {status.message}; {status.advice}{self._log_tail()}"
            self.kill()
            raise ConfigError(sentence)

    def _log_tail(self) -> str:
        """Of the first pod that has anything to say; of its container before this one, if there was one."""
        if self._facts is None:
            return ""
        job = self._applied_job
        for mesh in job.meshes:
            for pod in self._pods(job, mesh):
                for previous in (True, False):
                    name = pod["metadata"]["name"]
                    if lines := self._cluster.log(job.namespace, name, lines=_TAIL, previous=previous):
                        return "\n".join([f"; pod {name} has printed last:", *(f"    {line}" for line in lines)])
        return ""

    def _logs(self, *, follow: bool) -> list[PodLogs]:
        job = self._applied_job

        def names() -> list[str]:
            meshes = [current(self._pods(job, mesh), mesh.pod_rank_label, mesh.num_replicas) for mesh in job.meshes]
            return [pods[rank]["metadata"]["name"] for pods in meshes for rank in sorted(pods)]

        return [PodLogs(self._cluster, job.namespace, names)]

    # --- what it is made of

    _final: Ailment | None = None  # why it will never run, as of the last look

    @property
    def _makes(self) -> bool:
        return any(mesh.is_made for mesh in self._job.meshes)

    @property
    def _cluster(self) -> Cluster:
        if self._connection is None:
            self._connection = Cluster(self._kubeconfig)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def _applied_job(self) -> JobSpec:
        return self._named(self.facts["name"], self.facts["namespace"])

    def _named(self, name: str, namespace: str) -> JobSpec:
        job = replace(self._job, name=name, namespace=namespace)
        for mesh in job.meshes:
            check_name("name", job.object_name(mesh))
        return job

    def _pods(self, job: JobSpec, mesh: MeshSpec) -> list[Pod]:
        selector = job.selector(mesh, is_attached=self._attach_to is not None)
        found: list[Pod] = self._cluster.find("Pod", job.namespace, labelSelector=selector)["items"]
        return found

    def _ending(self, job: JobSpec, has_pods: bool) -> str:
        """Why the job is over, in the cluster's words; "" where it is not."""
        if not self._makes:
            return "its pods are gone" if self._has_run and not has_pods else ""
        kind = WORKLOAD_KINDS[job.workload]
        for mesh in job.meshes:
            name = job.object_name(mesh)
            found = self._cluster.get(kind, job.namespace, name) if mesh.is_made else {}
            if found is None or found.get("metadata", {}).get("deletionTimestamp"):
                return f"{kind} {name} was deleted"
            for condition in found.get("status", {}).get("conditions") or ():
                if condition["type"] in ("Failed", "Complete") and condition["status"] == "True":
                    why = condition.get("message") or condition.get("reason") or "no reason was given"
                    return f"{kind} {name}: {condition['type']}: {why}"
        return ""

    def _ailments(self, job: JobSpec, mesh: MeshSpec, pods: list[Pod]) -> list[Ailment]:
        """What keeps pods of a mesh from being there, from what says most."""
        found = [ailment for pod in pods if not is_ready(pod) and (ailment := ailment_of(pod))]
        found.sort(key=lambda ailment: not ailment.is_final)
        if len(pods) < mesh.num_replicas and mesh.is_made:
            about = f"involvedObject.name={job.object_name(mesh)}"
            found += event_ailments(self._cluster.find("Event", job.namespace, fieldSelector=about)["items"])
        if not found and not pods:
            selector = job.selector(mesh, is_attached=self._attach_to is not None)
            queue = job.kueue_queue or job.volcano_queue
            words = f"it waits in queue {queue}" if queue else f"no pod has the labels {selector}"
            found.append(Ailment(words, "`kubectl get events` may tell more"))
        return found

    def _take_addresses(self, mesh: MeshSpec, pods: list[Pod]) -> int:
        """Writes down where the workers of pods that are ready listen, for who attaches, also again; how many."""
        ready = [
            (rank, pod) for rank, pod in current(pods, mesh.pod_rank_label, mesh.num_replicas).items() if is_ready(pod)
        ]
        for rank, pod in ready:
            path = self.folder.agent_address(mesh.name, rank, is_shared=True).removeprefix("file://")
            address = f"mrdma://{address_of(pod, mesh.port)}"
            try:
                told = read_shared(path)
            except PeerLost:
                told = ""
            if told != address:
                SharedClaim(path).tell(address)
        return len(ready)
