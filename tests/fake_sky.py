"""A module `sky` whose cluster is this host: nodes are processes that run a task's commands, at addresses of their own.

It answers what jobs ask: launch, get, api_status, api_cancel, status, queue and down, in SkyPilot's ways: a request has
a number, and its result or error comes from `get`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_nodes = itertools.count(2)


class ClusterDoesNotExist(ValueError):
    pass


class Resources:
    @classmethod
    def from_yaml_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        return config


@dataclass
class Task:
    name: str
    setup: str | None
    run: str
    num_nodes: int
    workdir: str | None
    envs: dict[str, str]
    file_mounts: dict[str, str] = field(default_factory=dict)
    resources: Any = None

    def set_resources(self, resources: Any) -> None:
        self.resources = resources

    def set_file_mounts(self, mounts: dict[str, str]) -> None:
        self.file_mounts = mounts


class FakeSky:
    """Stands in `sys.modules["sky"]`. `launching`: what the launch says that it does, as long as it is not None;
    `problem`: why it fails.
    """

    Task, Resources = Task, Resources

    def __init__(self, home: Path) -> None:
        self.home = home
        self.launching: str | None = None
        self.problem: Exception | None = None
        self.clusters: dict[str, SimpleNamespace] = {}
        self.results: dict[str, Any] = {}
        self.launched: Task | None = None
        self._requests = itertools.count(1)

    def launch(self, task: Task, *, cluster_name: str, idle_minutes_to_autostop: int | None, down: bool) -> str:
        self.launched = task
        if self.problem is None:
            self.clusters[cluster_name] = self._cluster(task)
        return self._request(self.problem or (1, None))

    def get(self, request: str) -> Any:
        result = self.results[request]
        if isinstance(result, Exception):
            raise result
        return result

    def api_status(self, request_ids: list[str]) -> list[SimpleNamespace]:
        status = "SUCCEEDED" if self.launching is None else "RUNNING"
        return [SimpleNamespace(request_id=each, status=status, status_msg=self.launching) for each in request_ids]

    def api_cancel(self, request: str, silent: bool) -> str:
        self.launching = None
        return self._request([request])

    def status(self, cluster_names: list[str]) -> str:
        found = [self.clusters[name].record for name in cluster_names if name in self.clusters]
        return self._request(found)

    def queue(self, cluster: str) -> str:
        return self._request([self.clusters[cluster].job])

    def down(self, cluster: str) -> str:
        if cluster not in self.clusters:
            return self._request(ClusterDoesNotExist(f"Cluster {cluster!r} does not exist."))
        for process in self.clusters.pop(cluster).processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        return self._request(None)

    def close(self) -> None:
        for cluster in list(self.clusters):
            self.down(cluster)

    def _request(self, result: Any) -> str:
        number = f"request-{next(self._requests)}"
        self.results[number] = result
        return number

    def _cluster(self, task: Task) -> SimpleNamespace:
        for there, here in task.file_mounts.items():
            path = Path(there.replace("~", str(self.home)))
            path.parent.mkdir(parents=True)
            shutil.copyfile(here, path)
        ips = [f"127.0.2.{next(_nodes)}" for _ in range(task.num_nodes)]
        handle = SimpleNamespace(stable_internal_external_ips=[(ip, f"203.0.113.{ip[-1]}") for ip in ips])
        processes = []
        for rank, ip in enumerate(ips):
            environment = {
                "HOME": str(self.home),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "SKYPILOT_NODE_IPS": "\n".join(ips),
                "SKYPILOT_NODE_RANK": str(rank),
                **task.envs,
            }
            commands = task.run.replace("tcp://*", f"tcp://{ip}")
            with open(self.home / f"node{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        ["bash", "-c", commands],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        job = {"job_id": 1, "job_name": task.name, "status": SimpleNamespace(value="RUNNING")}
        record = {"status": SimpleNamespace(value="UP"), "handle": handle}
        return SimpleNamespace(record=record, job=job, processes=processes)
