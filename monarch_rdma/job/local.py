"""Jobs on the host of the program itself: its own process as the host, or processes that play several hosts."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..actor import this_host
from ..actor.launch.placement import environment
from ..errors import ConfigError
from .detached import DetachedJob, detached
from .scheduled import Launch, check_mesh_name
from .status import JobState, JobStatus
from .trait import JobTrait

__all__ = ["LocalJob", "ProcessJob"]

_PATIENCE = 3.0  # seconds for an agent to end in order
_KILLED = 5.0  # seconds for the kernel to end one


class LocalJob(JobTrait):
    """This program's own host, under each of the names: the same program without a scheduler."""

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        if isinstance(hosts, str) or not hosts:
            raise ConfigError(f"hosts is {hosts!r}, but must be a list of names")
        self._names = [check_mesh_name(name) for name in hosts]
        self._client: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The client that `apply(client_script)` has started here. ConfigError without one."""
        if self._client is None:
            raise ConfigError("LocalJob has no client: it was not applied with client_script")
        return self._client

    def spec(self) -> dict[str, Any]:
        return {"hosts": self._names}

    def can_run(self, spec: JobTrait) -> bool:
        return False  # each program has its own host

    def _create(self, client: tuple[str, ...]) -> dict[str, Any]:
        facts: dict[str, Any] = {"apply_id": secrets.token_hex(6)}
        if client:
            log_dir = Path(".monarch", "logs", facts["apply_id"]).absolute()
            log_dir.mkdir(parents=True)
            command = [sys.executable, *client] if len(client) == 1 else list(client)
            with open(log_dir / "client.log", "wb") as log:
                self._client = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            facts["log_dir"] = str(log_dir)
        return facts

    def _state(self, timeout: float | None) -> JobState:
        return JobState({name: this_host() for name in self._names})

    def _status(self) -> JobStatus:
        if self._client is not None and self._client.poll() is not None:
            return JobStatus("ended", f"the client has ended with exit code {self._client.returncode}")
        return JobStatus("running", hosts=(os.uname().nodename,))

    def _kill(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.terminate()
            try:
                client.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()


class ProcessJob(DetachedJob):
    """Processes on this host, each of which plays a host: for trying out what will run on several."""

    reaches_other_hosts = False
    runs_clients = True

    def __init__(
        self,
        meshes: Mapping[str, int],
        env: Mapping[str, str | None] | None = None,
        *,
        idle_timeout: float = 600.0,
        log_dir: str | None = None,
    ) -> None:
        """`meshes`: how many hosts each mesh has. `env`: variables that differ from this program's; None removes one.
        `idle_timeout`: seconds after which a host that no client uses ends. Raises ConfigError.
        """
        super().__init__(meshes, idle_timeout=idle_timeout, log_dir=log_dir)
        self._env = dict(env or {})
        environment(self._env)

    def spec(self) -> dict[str, Any]:
        return {
            "meshes": self._meshes,
            "env": self._env,
            "idle_timeout": self._idle_timeout,
            "log_dir": self._log_dir,
        }

    def _hosts(self) -> dict[str, list[str]]:
        return {mesh: [os.uname().nodename] * count for mesh, count in self._meshes.items()}

    def _environment(self) -> dict[str, str]:
        return environment(self._env)

    def _agent_command(self, launch: Launch, mesh: str, rank: int, host: str) -> list[str]:
        return detached(launch, sys.executable, str(launch.log_dir / f"{mesh}.{rank}.log"), "--local")

    def _start_client(self, launch: Launch) -> dict[str, Any]:
        if not launch.client:
            return {}
        with open(launch.log_dir / "client.log", "wb") as log:
            subprocess.Popen(
                ["setsid", "--fork", *launch.client_command(sys.executable, ends_job=True)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
            ).wait()
        return {}

    def _lost(self, agent: Mapping[str, Any]) -> str:
        return "" if _lives(agent) else "has ended"

    def _end(self, agent: Mapping[str, Any]) -> None:
        for number, patience in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, _KILLED)):
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(agent["pid"])
                try:
                    if not _lives(agent):
                        return
                    signal.pidfd_send_signal(fd, number)
                    if select.select([fd], [], [], patience)[0]:
                        return
                finally:
                    os.close(fd)


def _lives(agent: Mapping[str, Any]) -> bool:
    """Whether its process does, and is not another one under the same number."""
    pid = agent["pid"]
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and agent["job"].encode() in command
