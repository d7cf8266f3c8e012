"""Jobs that start each agent by a command of their own, without a scheduler: it goes on by itself when it listens."""

from __future__ import annotations

import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import ConfigError
from .notices import TOLD
from .scheduled import Launch, ScheduledJob
from .status import JobStatus
from .trait import JobTrait

__all__ = ["DetachedJob", "detached"]

_STARTING = 60.0  # seconds for an agent to listen
_MOST_LINES = 8  # of what a command that failed has printed


class DetachedJob(ScheduledJob):
    """Facts: `agents`, by mesh a list of `{"address": ..., "pid": ..., "host": ..., "job": ...}`; the last is an
    argument of each, by which it is told from another process under the same number.
    """

    runs_clients: ClassVar[bool] = False  # batch mode

    @abstractmethod
    def _hosts(self) -> dict[str, list[str]]:
        """What the hosts of each mesh are called, in order of rank."""

    @abstractmethod
    def _agent_command(self, launch: Launch, mesh: str, rank: int, host: str) -> list[str]:
        """The command that starts an agent there: `detached(launch, log)`, or what runs that on another host."""

    @abstractmethod
    def _lost(self, agent: Mapping[str, Any]) -> str:
        """Why an agent is gone, or "" where it lives."""

    @abstractmethod
    def _end(self, agent: Mapping[str, Any]) -> None:
        """Ends an agent, however it is; returns when it has ended."""

    def _advice(self, words: str, host: str) -> str:
        """What to try about a command that has failed with these words, or ""."""
        return ""

    def _with_advice(self, start: _Start) -> str:
        advice = self._advice(start.problem, start.host)
        return f"{start.problem}; {advice}" if advice else start.problem

    def _environment(self) -> dict[str, str] | None:
        """Of the commands; None: that of this program."""
        return None

    def _submit(self, launch: Launch) -> dict[str, Any]:
        if launch.client and not self.runs_clients:
            raise ConfigError(f"{type(self).__name__} cannot run client_script: run the program itself, on any host")
        starts = [
            _Start(mesh, rank, host, self._agent_command(launch, mesh, rank, host), self._environment())
            for mesh, hosts in self._hosts().items()
            for rank, host in enumerate(hosts)
        ]
        secret = launch.folder.secret_file.read_bytes()
        deadline = time.monotonic() + _STARTING
        readers = [threading.Thread(target=start.finish, args=(secret, deadline), daemon=True) for start in starts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        agents: dict[str, list[dict[str, Any]]] = {mesh: [] for mesh in self._meshes}
        for start in starts:
            if start.agent:
                agents[start.mesh].append(start.agent)
            start.agent.update({"job": launch.folder.path.name} if start.agent else {})
        problems = [self._with_advice(start) for start in starts if not start.agent]
        if problems:
            for each in agents.values():
                for agent in each:
                    self._end(agent)
            raise ConfigError(problems[0])
        return {"agents": agents} | self._start_client(launch)

    def _start_client(self, launch: Launch) -> dict[str, Any]:
        """Batch mode, where it `runs_clients`."""
        return {}

    def _workers(self) -> dict[str, list[str]]:
        return {mesh: [agent["address"] for agent in agents] for mesh, agents in self.facts["agents"].items()}

    def _status(self) -> JobStatus:
        agents = [(mesh, rank, agent) for mesh, each in self.facts["agents"].items() for rank, agent in enumerate(each)]
        whys = [(mesh, rank, why) for mesh, rank, agent in agents if (why := self._lost(agent))]
        message = "; ".join(f"host {rank} of mesh {mesh} {why}" for mesh, rank, why in whys)
        hosts = tuple(dict.fromkeys(agent["host"] for _, _, agent in agents))
        return JobStatus("ended" if len(whys) == len(agents) else "running", message, hosts=hosts)

    def can_run(self, spec: JobTrait) -> bool:
        return super().can_run(spec) and not self._status().message

    def _cancel(self) -> None:
        enders = [
            threading.Thread(target=self._end, args=(agent,), daemon=True)
            for agents in self.facts["agents"].values()
            for agent in agents
        ]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()


def detached(launch: Launch, python: str, log: str, *more: str) -> list[str]:
    """The command of an agent that goes on by itself: it lets go of its pipes once it has told where it listens."""
    return ["setsid", "--fork", *launch.agent(python, "--tell", "--log", log, *more, secret="-")]


class _Start:
    """One command on its way."""

    def __init__(self, mesh: str, rank: int, host: str, command: list[str], env: dict[str, str] | None) -> None:
        self.mesh = mesh
        self.agent: dict[str, Any] = {}
        self.problem = ""
        self._where = f"the agent of host {rank} of mesh {mesh} ({host})"
        self.host = host
        self._command = command
        self._env = env

    def finish(self, secret: bytes, deadline: float) -> None:
        """Reads what it says until it has ended."""
        try:
            done = subprocess.run(
                self._command,
                input=secret,
                capture_output=True,
                env=self._env,
                timeout=max(0.1, deadline - time.monotonic()),
                check=False,
            )
        except OSError as error:
            self.problem = f"{self._where} cannot be started: {error}"
            return
        except subprocess.TimeoutExpired as error:
            self.problem = f"{self._where} has said nothing within {_STARTING:g} s{_shown(error.stderr)}"
            return
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            if line.startswith(TOLD):
                address, _, pid = line.removeprefix(TOLD).partition(" ")
                self.agent = {"address": address, "pid": int(pid), "host": self.host}
                return
        code = f" (exit code {done.returncode})" if done.returncode else ""
        self.problem = f"{self._where} did not start{code}{_shown(done.stderr)}"


def _shown(errors: bytes | None) -> str:
    lines = (errors or b"").decode("utf-8", "replace").strip().splitlines()[-_MOST_LINES:]
    return "; it said:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""
