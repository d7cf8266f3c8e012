"""The API of a cluster: the official client knows where it is and who we are; requests and answers are plain JSON.

The client is imported when a cluster is first talked to: `pip install 'monarch-rdma[kubernetes]'` brings it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from ...errors import ConfigError

__all__ = ["RESOURCES", "ApiError", "Cluster"]

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"  # in every pod that has an account
_TIMEOUT = 30.0  # seconds for one answer
_PASSING = (429, 500, 502, 503, 504)  # after which a request that changes nothing is made again
_INSTALL = "the Kubernetes client is not installed; run: pip install 'monarch-rdma[kubernetes]'"


@dataclass(frozen=True)
class Resource:
    """How a kind of object is spelled in the API."""

    group: str  # "" for the core
    version: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        root = f"/apis/{self.group}" if self.group else "/api"
        return f"{root}/{self.version}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


RESOURCES = {
    "Pod": Resource("", "v1", "pods"),
    "Secret": Resource("", "v1", "secrets"),
    "Service": Resource("", "v1", "services"),
    "Event": Resource("", "v1", "events"),
    "StatefulSet": Resource("apps", "v1", "statefulsets"),
    "Job": Resource("batch", "v1", "jobs"),
    "PodGroup": Resource("scheduling.volcano.sh", "v1beta1", "podgroups"),
    "MonarchMesh": Resource("monarch.pytorch.org", "v1alpha1", "monarchmeshes"),
}
_COMES_WITH = {"PodGroup": "Volcano", "MonarchMesh": "the Monarch operator"}


class ApiError(ConfigError):
    """The API server refused a request, or could not be asked. `status`: of HTTP; 0 where there was no answer."""

    def __init__(self, message: str, *, status: int = 0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.status = status


class Cluster:
    """A connection to one API server."""

    def __init__(self, kubeconfig: str | None = None) -> None:
        """`kubeconfig`: path of a file; None: the pod's own account where this is a pod, else what `kubectl` uses.

        Raises ConfigError (no client, no configuration).
        """
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise ConfigError(_INSTALL) from error
        self._configuration: Any = client.Configuration()
        self.namespace = "default"
        try:
            if kubeconfig is None:
                self._load_default(config)
            else:
                self._load_file(config, kubeconfig)
        except config.ConfigException as error:
            raise ConfigError(
                f"there is no access to a Kubernetes cluster: {error}; run where `kubectl get pods` works, set "
                "KUBECONFIG or kubeconfig=..., or run the client as a pod with a service account"
            ) from error
        self._pool = client.ApiClient(self._configuration).rest_client.pool_manager

    def _load_default(self, config: Any) -> None:
        try:
            config.load_incluster_config(client_configuration=self._configuration)
        except config.ConfigException:
            self._load_file(config, None)
        else:
            with open(_NAMESPACE_FILE, encoding="utf-8") as file:
                self.namespace = file.read().strip()

    def _load_file(self, config: Any, path: str | None) -> None:
        config.load_kube_config(config_file=path, client_configuration=self._configuration)
        _, active = config.list_kube_config_contexts(config_file=path)
        self.namespace = active.get("context", {}).get("namespace") or "default"

    def close(self) -> None:
        """Its connections. It can be used again."""
        for key in list(self._pool.pools.keys()):
            self._pool.pools[key].close()
        self._pool.clear()

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        metadata = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(metadata["namespace"])
        return self._json("POST", path, f"create {manifest['kind']} {metadata['name']}", body=manifest)

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """None where there is none."""
        try:
            return self._json("GET", RESOURCES[kind].path(namespace, name), f"read {kind} {name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def find(self, kind: str, namespace: str, **query: str) -> dict[str, Any]:
        """`query`: labelSelector, fieldSelector."""
        return self._json("GET", RESOURCES[kind].path(namespace), f"list {kind}s", query=query)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """With all that it owns. Where there is none, nothing is done."""
        query = {"propagationPolicy": "Background"}
        try:
            self._json("DELETE", RESOURCES[kind].path(namespace, name), f"delete {kind} {name}", query=query)
        except ApiError as error:
            if error.status != 404:
                raise

    def log(self, namespace: str, pod: str, *, lines: int | None = None, previous: bool = False) -> list[str]:
        """The last lines that a pod has printed, or all; none where it has no log."""
        query = {"previous": str(previous).lower()} | ({} if lines is None else {"tailLines": str(lines)})
        path = f"{RESOURCES['Pod'].path(namespace, pod)}/log"
        try:
            response = self._request("GET", path, f"read the log of pod {pod}", query=query)
        except ApiError as error:
            if error.status in (400, 403, 404):
                return []
            raise
        with response:
            return [*response.data.decode("utf-8", "replace").splitlines()]

    def _json(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        with self._request(method, path, what, query=query, body=body) as response:
            found: dict[str, Any] = json.loads(response.data or b"{}")
            return found

    def _request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        """The response, with its body unread. Raises ApiError for anything but success."""
        import urllib3

        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        try:
            response = self._pool.request(
                method,
                url,
                headers=self._headers(),
                body=None if body is None else json.dumps(body),
                timeout=urllib3.Timeout(connect=10.0, read=_TIMEOUT),
                retries=urllib3.Retry(
                    total=4, connect=2, backoff_factor=0.5, status_forcelist=_PASSING, raise_on_status=False
                ),
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(
                f"cannot {what}: the API server {self.server} does not answer ({_reason(error)}); "
                "does `kubectl get pods` work here?"
            ) from error
        if not 200 <= response.status < 300:
            with response:
                raise _refused(what, response.status, response.data)
        return response

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        for way in self._configuration.auth_settings().values():  # renews a token where need be
            if way["in"] == "header" and way["value"]:
                headers[way["key"]] = way["value"]
        return headers


def _reason(error: BaseException) -> str:
    """urllib3 wraps its errors: the innermost says what happened."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            return str(error).rpartition(">: ")[2] or type(error).__name__
        error = inner


def _refused(what: str, status: int, body: bytes) -> ApiError:
    """In the API server's own words, and with what to try."""
    try:
        message = str(json.loads(body).get("message") or "")
    except (ValueError, AttributeError):
        message = body.decode("utf-8", "replace").strip()[:500]
    kind = next((kind for kind in _COMES_WITH if kind in what), None)
    advice = ""
    if status == 401:
        advice = "; the credentials are no longer valid: log in to the cluster again"
    elif status == 403 and "quota" in message:
        advice = "; ask for less, free something of the namespace's quota, or have it raised"
    elif status == 403:
        advice = "; `monarch-rdma k8s render --rbac` prints the role that a client needs"
    elif status == 409:
        advice = "; kill the job that has it, or give this one another name=..."
    elif status == 404 and kind:
        advice = f"; is {_COMES_WITH[kind]} installed in this cluster?"
    elif status == 404 and "namespaces" in message:
        advice = "; create the namespace first, or give another one as namespace=..."
    return ApiError(f"cannot {what}: {message or 'no reason was given'} (HTTP {status}){advice}", status=status)
