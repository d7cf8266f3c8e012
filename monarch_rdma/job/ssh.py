"""A job on hosts that can be reached by ssh, without a scheduler."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..actor.joining.introduction import ask
from ..errors import ConfigError, RdmaError
from ..rdma.secret import Secret
from .detached import DetachedJob, detached
from .logs import CommandLog
from .scheduled import Launch, check_mesh_name, check_meshes

__all__ = ["SSHJob"]

_log = logging.getLogger("monarch_rdma.job")
_ANSWERING = 5.0  # seconds for an agent to show that it lives
_ENDING = 30.0  # seconds for ssh to end one
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-T")
# What ssh or the shell there says, and what to try. The first that fits counts.
_ADVICE = (
    ("permission denied", "`ssh {host}` has to work without a password: ssh-copy-id {host}"),
    ("host key verification failed", "its key is not known, or has changed: run `ssh {host}` once by hand"),
    ("could not resolve", "there is no host of this name: look for it in ~/.ssh/config and in the DNS"),
    ("connection refused", "no ssh server listens there; its port is said by ssh_args=['-p', '2222']"),
    ("timed out", "the host is down, or a firewall is between"),
    ("no route to host", "the host is down, or a firewall is between"),
    ("no module named", "install monarch-rdma there, or pass python_exe of an environment that has it"),
    ("no such file or directory", "pass python_exe, the path of Python on that host"),
    ("setsid: failed to execute", "pass python_exe, the path of Python on that host"),
    ("not found", "pass python_exe, the path of Python on that host"),
)
_END = """is_it() { tr '\\0' ' ' < /proc/%(pid)d/cmdline 2> /dev/null | grep -qF -e %(mark)s; }
is_it || exit 0
kill %(pid)d
for i in $(seq 30); do is_it || exit 0; sleep 0.1; done
kill -9 %(pid)d
"""
_SHOW = "cat -- %(log)s"
# Until the agent ends, or nobody reads on: then what sshd passes on from here comes to its end.
_FOLLOW = """exec 3<&0
tail -n +1 -F --pid=%(pid)d -- %(log)s < /dev/null 2> /dev/null & tail=$!
{ cat <&3; kill $tail; } > /dev/null 2>&1 &
wait $tail
"""


class SSHJob(DetachedJob):
    """Hosts by name. They need not share storage: the secret travels over the standard input of ssh."""

    def __init__(
        self,
        python_exe: str | None = None,
        ssh_args: Sequence[str] = (),
        monarch_port: int | None = None,
        *,
        meshes: Mapping[str, Sequence[str]] | None = None,
        idle_timeout: float = 600.0,
        log_dir: str | None = None,
        remote_log_dir: str = ".monarch_rdma/logs",
    ) -> None:
        """`python_exe`: on the hosts; by default this program's path. `ssh_args`: further ones, as `["-p", "2222"]`.
        `monarch_port`: the first of 100 TCP ports that agents may take; by default any. `meshes`: the hosts of each, as
        ssh takes them (`user@host`); more by `add_mesh`. `idle_timeout`: seconds after which a host that no client uses
        is left alone. `remote_log_dir`: for what agents print, there; from the user's home on. Raises ConfigError.
        """
        if isinstance(ssh_args, str):
            raise ConfigError(f"ssh_args is {ssh_args!r}, but must be a list, such as ['-p', '2222']")
        self._hosts_of: dict[str, list[str]] = {}
        super().__init__(None, idle_timeout=idle_timeout, log_dir=log_dir)
        self._python_exe = python_exe
        self._ssh_args = list(ssh_args)
        self._port = monarch_port
        self._remote_log_dir = remote_log_dir
        for name, hosts in (meshes or {}).items():
            self.add_mesh(name, hosts)

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """One more mesh, before the job is applied."""
        if self.active:
            raise ConfigError(f"{self.name} was applied already; mesh {name!r} cannot be added")
        check_mesh_name(name)
        if isinstance(hosts, str) or not hosts:
            raise ConfigError(f"hosts of mesh {name!r} are {hosts!r}, but must be a list of names")
        for host in hosts:
            if not isinstance(host, str) or not host or host.startswith("-") or set(host) & set(" \n\0'\""):
                raise ConfigError(f"host {host!r} of mesh {name!r} is no name that ssh takes")
        self._hosts_of[name] = list(hosts)
        self._meshes[name] = len(hosts)

    def spec(self) -> dict[str, Any]:
        return {
            "python_exe": self._python_exe,
            "ssh_args": self._ssh_args,
            "monarch_port": self._port,
            "meshes": self._hosts_of,
            "idle_timeout": self._idle_timeout,
            "log_dir": self._log_dir,
            "remote_log_dir": self._remote_log_dir,
        }

    def _hosts(self) -> dict[str, list[str]]:
        return self._hosts_of

    def _submit(self, launch: Launch) -> dict[str, Any]:
        check_meshes(self._meshes)
        return super()._submit(launch)

    def _agent_command(self, launch: Launch, mesh: str, rank: int, host: str) -> list[str]:
        log = self._log_of(launch.folder.path.name, mesh, rank)
        port = [] if self._port is None else ["--port", str(self._port)]
        return self._ssh(host, shlex.join(detached(launch, self._python_exe or sys.executable, log, *port)))

    def _log_of(self, job: str, mesh: str, rank: int) -> str:
        """The file, on the host, that an agent prints to."""
        return f"{self._remote_log_dir}/{job}/{mesh}.{rank}.log"

    def _logs(self, *, follow: bool) -> list[CommandLog]:
        """They are on the hosts."""
        logs = []
        for mesh, agents in self.facts["agents"].items():
            for rank, agent in enumerate(agents):
                place = {"log": shlex.quote(self._log_of(agent["job"], mesh, rank)), "pid": int(agent["pid"])}
                command = self._ssh(agent["host"], (_FOLLOW if follow else _SHOW) % place)
                logs.append(CommandLog(f"{mesh}.{rank}", command))
        return logs

    def _advice(self, words: str, host: str) -> str:
        text = words.lower()
        return next((advice.format(host=host) for sign, advice in _ADVICE if sign in text), "")

    def _lost(self, agent: Mapping[str, Any]) -> str:
        try:
            ask([agent["address"]], Secret.from_file(self.folder.secret_file), _ANSWERING)
        except RdmaError:
            return f"({agent['host']}) does not answer"
        return ""

    def _end(self, agent: Mapping[str, Any]) -> None:
        mark = shlex.quote(f" --job {agent['job']} ")
        command = self._ssh(agent["host"], _END % {"pid": int(agent["pid"]), "mark": mark})
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ENDING, check=False)
            problem = done.stderr.decode("utf-8", "replace").strip() if done.returncode == 255 else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            _log.warning(
                "the agent on %s could not be ended: %s; it ends by itself %g s after its last client",
                agent["host"],
                problem,
                self._idle_timeout,
            )

    def _ssh(self, host: str, command: str) -> list[str]:
        return ["ssh", *_OPTIONS, *self._ssh_args, host, command]
