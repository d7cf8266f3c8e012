"""A cluster in this process: kmock keeps the objects, and what is here plays its controllers and its one node.

The controllers make pods of StatefulSets and Indexed Jobs, and make new ones where pods are gone. The node runs each
pod's command as a process of this host, with an address of its own in 127.0.0.0/8 as the pod's, and reports how it is.
Unlike kmock alone, label selectors are honoured, objects have uids, and what an object owns goes with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock
import yaml

KINDS = {
    "Pod": "v1/pods",
    "Secret": "v1/secrets",
    "Service": "v1/services",
    "Event": "v1/events",
    "StatefulSet": "apps/v1/statefulsets",
    "Job": "batch/v1/jobs",
    "PodGroup": "scheduling.volcano.sh/v1beta1/podgroups",
    "MonarchMesh": "monarch.pytorch.org/v1alpha1/monarchmeshes",
}
_VERBS = {"get", "list", "watch", "create", "patch", "delete"}
BY = "By"  # a header of the cluster's own requests
TOKEN = "Bearer let me in"
_uids = itertools.count(1)


def _is_chosen(manifest: dict[str, Any], params: Any) -> bool:
    labels = manifest.get("metadata", {}).get("labels") or {}
    wanted = [term.split("=", 1) for term in params.get("labelSelector", "").split(",") if term]
    about = manifest.get("involvedObject", {}).get("name")
    field = params.get("fieldSelector", "")
    return all(labels.get(key) == value for key, value in wanted) and (
        not field.startswith("involvedObject.name=") or about == field.partition("=")[2]
    )


def _secret_of(pod: dict[str, Any]) -> str:
    """The name of the one that it mounts; a pod waits for it."""
    (name,) = (volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume)
    return str(name)


class _Server(kmock.KubernetesEmulator):
    """With what kmock leaves out: selectors, uids, logs (by pod), and refusals, as (status, reason, message) by method
    and plural. `hiccups`: how many requests, by the same, are refused for the moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusals: dict[tuple[str, str], tuple[int, str, str]] = {}
        self.hiccups: Counter[tuple[str, str]] = Counter()
        self.logs: dict[str, str] = {}

    async def _serve_list(self, request: Any) -> Any:
        found = await super()._serve_list(request)
        return {**found, "items": [each for each in found["items"] if _is_chosen(each, request.params)]}

    async def _serve_watch(self, request: Any) -> AsyncIterator[Any]:
        async for event in super()._serve_watch(request):
            if not event or _is_chosen(event["object"], request.params):
                yield event

    async def _handle(self, request: Any) -> Any:
        if request.headers.get("Authorization") != TOKEN:
            raise kmock.KubernetesError(401, "Unauthorized", "Unauthorized")
        if request.resource is not None:
            about = request.method.value.upper(), request.resource.plural
            if self.hiccups[about] > 0 and BY not in request.headers:
                self.hiccups[about] -= 1
                raise kmock.KubernetesError(503, "ServiceUnavailable", "the API server is starting")
            refusal = self.refusals.get(about)
            if refusal is not None:
                raise kmock.KubernetesError(*refusal)
        if request.subresource == "log":
            return aiohttp.web.Response(text=self.logs.get(request.name, ""))
        if request.action == kmock.action.CREATE and isinstance(request.data, dict):
            request.data["metadata"].setdefault("uid", f"uid-{next(_uids)}")
        return await super()._handle(request)


class FakeCluster:
    """`pods`: the processes that play them, by name. `on_schedule`: may give a status to a pod that then never runs.
    `labels_index`: whether a StatefulSet's pods have the label with their index, as from 1.28 on.
    """

    def __init__(self, url: str, server: _Server, directory: Path) -> None:
        self.url, self.server, self.directory = url, server, directory
        self.pods: dict[str, subprocess.Popen[bytes]] = {}
        self.on_schedule: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda pod: None
        self.labels_index = True
        self._wake, self._closing = threading.Condition(), False
        self._hosts = itertools.count(2)
        self._network = (
            f"127.0.{1 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])}"  # the port is always the same
        )
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._control, name="fake-cluster", daemon=True)
        self._thread.start()

    def kubeconfig(self) -> str:
        return self.write_kubeconfig(self.directory, self.url)

    @staticmethod
    def write_kubeconfig(directory: Path, url: str) -> str:
        path = directory / "kubeconfig"
        context = {"cluster": "fake", "user": "me", "namespace": "team"}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {"token": TOKEN.removeprefix("Bearer ")}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(yaml.safe_dump(kubeconfig))
        return str(path)

    def request(self, method: str, kind: str, name: str = "", body: Any = None, namespace: str = "team") -> Any:
        root = "/api" if KINDS[kind].startswith("v1/") else "/apis"
        version, plural = KINDS[kind].rsplit("/", 1)
        url = f"{self.url}{root}/{version}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json"}
        headers |= {"Authorization": TOKEN, BY: "the cluster"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=10) as answer:
            return json.loads(answer.read() or b"{}")

    def objects(self, kind: str) -> dict[str, dict[str, Any]]:
        return {each["metadata"]["name"]: each for each in self.request("GET", kind)["items"]}

    def evict(self, pod: str) -> None:
        """Its process is killed and the pod deleted, so that it is replaced by another one elsewhere."""
        process = self.pods.pop(pod)  # before the controller may have put another one in its place
        self.delete("Pod", pod)
        process.kill()
        process.wait()

    def delete(self, kind: str, name: str) -> None:
        """As by somebody with kubectl."""
        self.request("DELETE", kind, name)

    def warn(self, name: str, reason: str, message: str) -> None:
        """An event about an object."""
        event = {"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason, "message": message}
        metadata = {"name": f"{name}.{next(_uids)}", "namespace": "team"}
        self.request("POST", "Event", body={**event, "metadata": metadata, "involvedObject": {"name": name}})

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        for name in list(self.pods):
            self._end(name)
        if self.problem:
            raise self.problem

    def _control(self) -> None:
        """Ends with the cluster. A round a tenth of a second, as there is no watch that joins all kinds."""
        try:
            while True:
                with self._wake:
                    self._wake.wait(0.1)
                    if self._closing:
                        return
                self._round()
        except BaseException as error:
            self.problem = error

    def _round(self) -> None:
        workloads = {
            (kind, name): each
            for kind in ("StatefulSet", "Job", "MonarchMesh")
            for name, each in self.objects(kind).items()
        }
        secrets, pods = self.objects("Secret"), self.objects("Pod")
        for (kind, name), workload in workloads.items():
            for owner in workload["metadata"].get("ownerReferences", ()):
                if owner["name"] not in secrets:
                    self._delete(kind, name)
        wanted = {
            pod["metadata"]["name"]: pod for (kind, _), each in workloads.items() for pod in self._pods_of(kind, each)
        }
        for name in pods.keys() - wanted.keys():
            if pods[name]["metadata"].get("labels", {}).get("by") == "controller":
                self._end(name)
                self._delete("Pod", name)
        for name in wanted.keys() - pods.keys():
            if _secret_of(wanted[name]) in secrets:
                self._start(wanted[name], secrets)
        for name, process in list(self.pods.items()):
            if process.poll() is not None and name in pods and name in wanted and _secret_of(wanted[name]) in secrets:
                self._restart(name, wanted[name], process.returncode, secrets, pods[name])

    def _pods_of(self, kind: str, workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        metadata, spec = workload["metadata"], workload["spec"]
        if spec.get("suspend"):
            return
        count = spec.get("replicas") or spec.get("parallelism") or 0
        for index in range(count):
            template = json.loads(json.dumps(spec.get("template") or spec["podTemplate"]))
            name = f"{metadata['name']}-{index}"
            template["spec"] |= {"hostname": name}
            labels = {**template["metadata"].get("labels", {}), "by": "controller"}
            if kind == "StatefulSet" and self.labels_index:
                labels["apps.kubernetes.io/pod-index"] = str(index)
            annotations = {"batch.kubernetes.io/job-completion-index": str(index)} if kind == "Job" else {}
            if kind == "MonarchMesh":
                labels |= {
                    "app.kubernetes.io/name": "monarch-worker",
                    "monarch.pytorch.org/mesh-name": metadata["name"],
                }
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "team", "labels": labels, "annotations": annotations},
                "spec": template["spec"],
            }

    def _start(self, pod: dict[str, Any], secrets: dict[str, dict[str, Any]]) -> None:
        if ("POST", "pods") in self.server.refusals:
            return
        self.request("POST", "Pod", body=pod)
        name = pod["metadata"]["name"]
        status = self.on_schedule(pod)
        if status is not None:
            self._tell(name, status)
            return
        self._run(name, pod, secrets, ip=f"{self._network}.{next(self._hosts)}", restarts=0)

    def _restart(self, name: str, pod: Any, code: int, secrets: Any, known: Any) -> None:
        """The container's, in its pod."""
        count = known["status"]["containerStatuses"][0]["restartCount"] + 1
        ip, exit_code = known["status"]["podIP"], code if code >= 0 else 128 - code
        self._run(
            name, pod, secrets, ip=ip, restarts=count, last={"terminated": {"exitCode": exit_code, "reason": "Error"}}
        )

    def _run(self, name: str, pod: Any, secrets: Any, *, ip: str, restarts: int, last: Any = None) -> None:
        container = pod["spec"]["containers"][0]
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self.directory)}
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert source in (None, "status.podIP")
            environment[variable["name"]] = ip if source else variable["value"]
        path = self.directory / _secret_of(pod)
        if not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(base64.b64decode(secrets[_secret_of(pod)]["data"]["secret"]))
        command = [
            word.replace("/var/run/monarch-rdma/secret", str(path)).replace("tcp://*", f"tcp://{ip}")
            for word in container["command"]
        ]
        with open(self.directory / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pods[name] = process
        status = {"name": "worker", "restartCount": restarts, "ready": True, "state": {"running": {}}}
        self._tell(
            name,
            {
                "phase": "Running",
                "podIP": ip,
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{**status, "lastState": last or {}}],
            },
        )

    def _tell(self, name: str, status: dict[str, Any]) -> None:
        try:
            self.request("PATCH", "Pod", name, {"status": status})
        except urllib.error.HTTPError as error:
            if error.code != 404:  # somebody has deleted it meanwhile
                raise

    def _delete(self, kind: str, name: str) -> None:
        with contextlib.suppress(urllib.error.HTTPError):  # somebody else was quicker
            self.request("DELETE", kind, name)

    def _end(self, name: str) -> None:
        process = self.pods.pop(name, None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def fake_cluster(directory: Path) -> Iterator[FakeCluster]:
    started: list[Any] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        server = _Server()
        for path, kind in ((path, kind) for kind, path in KINDS.items()):
            server.resources[path] = {"namespaced": True, "kind": kind, "verbs": _VERBS}
        async with server, kmock.Server(server) as listening:
            started.extend([str(listening.url).rstrip("/"), server])
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="kmock", daemon=True)
    thread.start()
    assert ready.wait(30)
    cluster = FakeCluster(*started, directory)
    try:
        yield cluster
    finally:
        try:
            cluster.close()
        finally:
            stop.set()
            thread.join(30)
