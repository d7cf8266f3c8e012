"""A job on a cluster that SkyPilot launches: on clouds, on Kubernetes, on one's own machines.

`sky` is imported when it is first needed: `pip install 'monarch-rdma[skypilot]'` brings it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ..errors import ConfigError
from .scheduled import Launch, ScheduledJob
from .status import JobStatus

__all__ = ["SkyPilotJob"]

_LAUNCHING = ("PENDING", "WAITING", "RUNNING")  # states of a request to SkyPilot that is not done
_WAITING = ("INIT", "PENDING", "SETTING_UP")  # states of a job on its cluster
_ADVICE = {
    "ResourcesUnavailableError": "ask for another accelerator, region or infra; `sky show-gpus` lists what there is",
    "ResourcesMismatchError": "kill the cluster of that name, or give another cluster_name",
    "NoCloudAccessError": "`sky check` says what is missing",
    "NoClusterLaunchedError": "`sky check` says which infra can be used",
    "ApiServerConnectionError": "start SkyPilot's server: sky api start",
    "ClusterOwnerIdentityMismatchError": "log in as who launched the cluster, or give another cluster_name",
    "ClusterSetUpError": "setup_commands fail; run them by hand on one node",
}


class SkyPilotJob(ScheduledJob):
    """Hosts that SkyPilot launches, one cluster for all meshes.

    The client must reach the nodes' internal addresses: it runs in their network, for example on a node of its own.
    """

    looks_every = 30.0
    settles_within = 10.0

    def __init__(
        self,
        meshes: Mapping[str, int],
        resources: Any = None,
        cluster_name: str | None = None,
        monarch_port: int = 22222,
        idle_minutes_to_autostop: int | None = None,
        down_on_autostop: bool = False,
        python_exe: str = "python",
        setup_commands: str | None = None,
        *,
        workdir: str | None = None,
        envs: Mapping[str, str] | None = None,
        idle_timeout: float = math.inf,
    ) -> None:
        """`meshes`: how many nodes each has; all are of the same `resources`: a sky.Resources, or a mapping as in
        SkyPilot's YAML, such as `{"infra": "kubernetes", "accelerators": "MI300X:8"}`. `cluster_name`: by default made
        up. `monarch_port`: where the agents listen. `setup_commands`: a shell script that installs what the nodes need,
        monarch_rdma too. `workdir`: a directory that is copied there. `idle_minutes_to_autostop`, `down_on_autostop`:
        SkyPilot's. Raises ConfigError.
        """
        super().__init__(meshes, idle_timeout=idle_timeout)
        if isinstance(monarch_port, bool) or not isinstance(monarch_port, int) or not 1 <= monarch_port <= 65535:
            raise ConfigError(f"monarch_port is {monarch_port!r}, but must be 1 to 65535")
        self._resources = _as_config(resources)
        self._cluster_name = cluster_name
        self._port = monarch_port
        self._autostop = idle_minutes_to_autostop
        self._down_on_autostop = down_on_autostop
        self._python = python_exe
        self._setup = setup_commands
        self._workdir = workdir
        self._envs = dict(envs or {})
        self._has_launched = False

    def spec(self) -> dict[str, Any]:
        return {
            "meshes": self._meshes,
            "resources": self._resources,
            "cluster_name": self._cluster_name,
            "monarch_port": self._port,
            "idle_minutes_to_autostop": self._autostop,
            "down_on_autostop": self._down_on_autostop,
            "python_exe": self._python,
            "setup_commands": self._setup,
            "workdir": self._workdir,
            "envs": self._envs,
            "idle_timeout": self._idle_timeout,
        }

    def task(self, launch: Launch) -> Any:
        """The sky.Task that is launched. The secret goes with its files, over SkyPilot's connection to each node."""
        sky = _sky()
        there = f"~/.monarch_rdma/jobs/{launch.folder.path.name}/secret"
        task = sky.Task(
            name=_task_name(launch),
            setup=self._setup,
            run=_run_commands(launch, self._python, self._port, there),
            num_nodes=sum(self._meshes.values()),
            workdir=self._workdir,
            envs=dict(self._envs),
        )
        if self._resources is not None:
            task.set_resources(sky.Resources.from_yaml_config(dict(self._resources)))
        task.set_file_mounts({there: str(launch.folder.secret_file)})
        return task

    # --- the scheduler

    def _submit(self, launch: Launch) -> dict[str, Any]:
        if launch.client:
            raise ConfigError("SkyPilotJob runs no client_script; run the program on a node of the same network")
        sky = _sky()
        cluster = self._cluster_name or f"monarch-{launch.folder.path.name}"
        with _words_of_sky(f"SkyPilot does not launch cluster {cluster!r}"):
            request = sky.launch(
                self.task(launch),
                cluster_name=cluster,
                idle_minutes_to_autostop=self._autostop,
                down=self._down_on_autostop,
            )
        return {"cluster": cluster, "request": str(request), "task": _task_name(launch)}

    def _cancel(self) -> None:
        sky, cluster = _sky(), self.facts["cluster"]
        with _words_of_sky(f"SkyPilot does not end cluster {cluster!r}"):
            if not self._has_launched and _progress_of(sky, self.facts["request"]) is not None:
                sky.get(sky.api_cancel(self.facts["request"], silent=True))
            try:
                sky.get(sky.down(cluster))
            except Exception as error:
                if type(error).__name__ != "ClusterDoesNotExist":
                    raise

    def _status(self) -> JobStatus:
        sky, cluster = _sky(), self.facts["cluster"]
        if not self._has_launched:
            with _words_of_sky("SkyPilot cannot be asked"):
                progress = _progress_of(sky, self.facts["request"])
            if progress is not None:
                return JobStatus("queued", progress or f"cluster {cluster} is being launched")
            try:
                sky.get(self.facts["request"])
            except Exception as error:  # whatever has kept it from launching, in its own words
                return JobStatus("ended", f"{type(error).__name__}: {error}", _advice_for(error))
            self._has_launched = True
        with _words_of_sky("SkyPilot cannot be asked"):
            record = _record_of(sky, cluster)
            if record is None:
                return JobStatus("ended", f"cluster {cluster} is not there any more", "apply() the job again")
            state, hosts = _value(record["status"]), _addresses(record)
            why = record.get("init_status_reason") or f"cluster {cluster} is {state}"
            if state == "INIT":  # a node of it is lost; the others may go on
                return JobStatus("running", why, "`sky status` may tell more", hosts)
            if state != "UP":
                return JobStatus("ended", why, "`sky start` may bring it back; then apply() the job again")
            jobs = [job for job in sky.get(sky.queue(cluster)) if job["job_name"] == self.facts["task"]]
        state = _value(max(jobs, key=_number)["status"]) if jobs else "gone"
        if state in _WAITING:
            return JobStatus("queued", f"on cluster {cluster} the agents are {state}", hosts=hosts)
        if state != "RUNNING":
            advice = f"`sky logs {cluster}` shows what they have printed"
            return JobStatus("ended", f"on cluster {cluster} the agents have ended: {state}", advice)
        return JobStatus("running", hosts=hosts)

    def _logs(self, *, follow: bool) -> NoReturn:
        raise ConfigError(f"the logs of {self.name} are SkyPilot's: `sky logs {self.facts['cluster']}` shows them")

    def _workers(self) -> dict[str, list[str]]:
        sky, cluster = _sky(), self.facts["cluster"]
        with _words_of_sky("SkyPilot cannot be asked"):
            record = _record_of(sky, cluster)
        addresses = iter(() if record is None else _addresses(record))
        found: dict[str, list[str]] = {}
        for name, count in self._meshes.items():
            found[name] = [f"tcp://{ip}:{self._port}" for ip in itertools.islice(addresses, count)]
            if len(found[name]) < count:
                raise ConfigError(f"SkyPilot knows too few addresses of cluster {cluster!r} for mesh {name!r}")
        return found


def _task_name(launch: Launch) -> str:
    return f"monarch-{launch.folder.path.name}"


def _run_commands(launch: Launch, python: str, port: int, secret: str) -> str:
    """What each node runs: an agent that is found at the address that SkyPilot has for the node, started again when it
    fails, so that one lost agent does not end the others.
    """
    agent = shlex.join(launch.agent(python, "--address", f"tcp://*:{port}", secret="-"))
    return "\n".join(
        [
            f"chmod 600 {secret}",
            'ip=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")',
            'export MONARCH_RDMA_ADVERTISE_HOST="$ip"',
            f"until {agent} <{secret}; do sleep 1; done",
        ]
    )


def _sky() -> Any:
    try:
        return importlib.import_module("sky")
    except ImportError as error:
        raise ConfigError("SkyPilot is not installed; run: pip install 'monarch-rdma[skypilot]'") from error


@contextlib.contextmanager
def _words_of_sky(what: str) -> Iterator[None]:
    """Its errors are of many classes; each says in words what is wrong."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        advice = _advice_for(error)
        raise ConfigError(f"{what}: {type(error).__name__}: {error}" + (f"; {advice}" if advice else "")) from error


def _advice_for(error: Exception) -> str:
    return next((_ADVICE[each.__name__] for each in type(error).__mro__ if each.__name__ in _ADVICE), "")


def _progress_of(sky: Any, request: str) -> str | None:
    """What a request to SkyPilot is doing; None where it is done."""
    for each in sky.api_status(request_ids=[request]):
        if each.status in _LAUNCHING:
            return each.status_msg or ""
    return None


def _record_of(sky: Any, cluster: str) -> Any:
    records = sky.get(sky.status(cluster_names=[cluster]))
    return records[0] if records else None


def _addresses(record: Any) -> tuple[str, ...]:
    """Internal ones, in the order of the nodes' ranks."""
    pairs = getattr(record["handle"], "stable_internal_external_ips", None) or ()
    return tuple(internal for internal, _ in pairs)


def _number(job: Any) -> int:
    return int(job["job_id"])


def _value(status: Any) -> str:
    return str(getattr(status, "value", status))


def _as_config(resources: Any) -> dict[str, Any] | None:
    if resources is None or isinstance(resources, Mapping):
        return None if resources is None else dict(resources)
    if not hasattr(resources, "to_yaml_config"):
        raise ConfigError(f"resources is a {type(resources).__name__}, but must be a sky.Resources or a mapping")
    return dict(resources.to_yaml_config())
