"""A job that SLURM runs: one allocation, with an agent on each of its nodes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, TransferTimeout
from ..scheduled import Launch, ScheduledJob, check_mesh_name
from ..status import JobState, JobStatus
from . import queue
from .commands import NoAnswer, refused, run
from .script import Request, batch_script, step

__all__ = ["SlurmJob"]

_PARTS = ("partition", "gpus_per_node", "ntasks_per_node", "cpus_per_task", "mem", "exclusive", "slurm_args")
_ENDING = 40.0  # seconds for SLURM to end a job: KillWait is 30 by default
_PAUSE = 0.2  # seconds between two looks meanwhile
_TAIL = 2048  # bytes of the log that an error shows


class SlurmJob(ScheduledJob):
    """Nodes of SLURM. The directory of option `job_dir`, `log_dir` and the Python environment must be on storage that
    the nodes share with this host.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str | None = None,
        slurm_args: Sequence[str] = (),
        monarch_port: int | None = None,
        job_name: str = "monarch_rdma",
        ntasks_per_node: int = 1,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        *,
        mesh_options: Mapping[str, Mapping[str, Any]] | None = None,
        attach_to: int | None = None,
        requeue: bool = False,
        warn_before: int = 300,
        idle_timeout: float = math.inf,
    ) -> None:
        """`meshes`: how many nodes each has. `python_exe`: on the nodes; by default this program's. `slurm_args`:
        further options of sbatch. `monarch_port`: first of 100 TCP ports that agents may take; by default any.
        `ntasks_per_node`, `cpus_per_task`, `gpus_per_node`, `mem`: what each node has to have; one agent runs on each,
        and starts the processes that the program spawns. `job_start_timeout`: seconds in the queue, where `state` is
        told nothing. `mesh_options`: what differs for a mesh, such as `{"loaders": {"partition": "cpu",
        "gpus_per_node": 0}}`: then the job is a heterogeneous one. `attach_to`: the number of an allocation that runs
        already; its nodes are used, and it stays when the job is killed. `requeue`: whether SLURM begins the job anew
        when it has lost a node; otherwise the job goes on with the nodes that are left. `warn_before`: seconds before
        the time limit at which `job.warned` comes. `idle_timeout`: seconds after which nodes that no client uses are
        given back. Raises ConfigError.
        """
        super().__init__(meshes, idle_timeout=idle_timeout, log_dir=log_dir)
        self._given: dict[str, Any] = {
            "python_exe": python_exe,
            "slurm_args": list(slurm_args),
            "monarch_port": monarch_port,
            "job_name": job_name,
            "ntasks_per_node": ntasks_per_node,
            "time_limit": time_limit,
            "partition": partition,
            "exclusive": exclusive,
            "gpus_per_node": gpus_per_node,
            "cpus_per_task": cpus_per_task,
            "mem": mem,
            "job_start_timeout": job_start_timeout,
            "account": account,
            "qos": qos,
            "mesh_options": {name: dict(options) for name, options in (mesh_options or {}).items()},
            "attach_to": attach_to,
            "requeue": requeue,
            "warn_before": warn_before,
        }
        self._check()

    # --- the contract

    def spec(self) -> dict[str, Any]:
        return {"meshes": self._meshes, "log_dir": self._log_dir, "idle_timeout": self._idle_timeout, **self._given}

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """One more mesh, before the job is applied."""
        if self.active:
            raise ConfigError(f"{self.name} was applied already; mesh {name!r} cannot be added")
        check_mesh_name(name)
        self._meshes[name] = num_nodes
        self._check()

    @property
    def comes_back(self) -> bool:
        return bool(self._given["requeue"])

    @property
    def name(self) -> str:
        return f"SLURM job {self._facts['job']}" if self._facts and "job" in self._facts else super().name

    def _create(self, client: tuple[str, ...]) -> dict[str, Any]:
        if client and self._given["attach_to"] is not None:
            raise ConfigError("client_script and attach_to exclude each other: run the program inside the allocation")
        return super()._create(client)

    def _submit(self, launch: Launch) -> dict[str, Any]:
        attach_to = self._given["attach_to"]
        if attach_to is not None:
            return self._start_steps(launch, attach_to)
        script = batch_script(launch, self._job_options(launch), self._requests(), self._python, self._agent_options)
        done = run("sbatch", "--parsable", stdin=script)
        if done.returncode:
            raise refused(["sbatch"], done)
        number = done.stdout.strip().partition(";")[0]
        if not number.isdecimal():
            raise ConfigError(f"sbatch has answered {done.stdout!r}, which is no job's number")
        return {"job": int(number)}

    def _status(self) -> JobStatus:
        status = queue.status_of(queue.look(self.facts["job"]), time.time())
        if status.phase == "running" and "steps" in self.facts and not self._steps():
            return JobStatus("ended", "its steps have ended; the allocation goes on", "its log says why")
        advice = status.advice.replace("JOB", str(self.facts["job"]))
        return JobStatus(status.phase, status.message, advice, status.hosts, status.ends_at)

    def _state(self, timeout: float | None) -> JobState:
        try:
            return super()._state(self._given["job_start_timeout"] if timeout is None else timeout)
        except TransferTimeout:
            if timeout is None:  # as Monarch's: who sets job_start_timeout does not want the job later
                self.kill()
            raise

    def _cancel(self) -> None:
        if "steps" in self.facts:
            steps = self._steps()
            if steps:
                run("scancel", *steps)
            self._wait_until(lambda: not self._steps(), "its steps")
            return
        done = run("scancel", str(self.facts["job"]))
        if done.returncode and "invalid job id" not in (done.stdout + done.stderr).lower():
            raise NoAnswer(f"{self.name} cannot be cancelled: {(done.stderr or done.stdout).strip()}", operation="job")
        self._wait_until(self._is_gone, "it")

    def _log_tail(self) -> str:
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                text = file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f"\nThe end of its log, {self._log}:\n{text}" if text else ""

    # --- what is asked for

    @property
    def _python(self) -> str:
        return self._given["python_exe"] or sys.executable

    @property
    def _log(self) -> Path:
        return Path(self.facts["log_dir"]) / "job.log"

    @property
    def _agent_options(self) -> list[str]:
        port = self._given["monarch_port"]
        return [] if port is None else ["--port", str(port)]

    def _job_options(self, launch: Launch) -> dict[str, str]:
        given = self._given
        log = str(launch.log_dir / "job.log")
        options = {"job-name": given["job_name"], "output": log, "error": log, "open-mode": "append"}
        options |= {"time": given["time_limit"]} if given["time_limit"] else {}
        options |= {name: given[name] for name in ("account", "qos") if given[name]}
        options |= {"requeue": ""} if given["requeue"] else {"no-requeue": "", "no-kill": ""}
        options |= {"signal": f"USR1@{given['warn_before']}"} if given["warn_before"] else {}
        return options

    def _requests(self) -> list[Request]:
        """One for all meshes without options of their own, and one for each other mesh."""
        own = self._given["mesh_options"]
        plain = {name: count for name, count in self._meshes.items() if name not in own}
        requests = [self._request(plain, {})] if plain else []
        return requests + [
            self._request({name: count}, own[name]) for name, count in self._meshes.items() if name in own
        ]

    def _request(self, meshes: Mapping[str, int], own: Mapping[str, Any]) -> Request:
        part = {name: own.get(name, self._given[name]) for name in _PARTS}
        options = {"nodes": str(sum(meshes.values())), "ntasks-per-node": str(part["ntasks_per_node"])}
        for name in ("partition", "gpus_per_node", "cpus_per_task", "mem"):
            if part[name]:
                options[name.replace("_", "-")] = str(part[name])
        if part["exclusive"]:
            options["exclusive"] = ""
        return Request(dict(meshes), options, part["slurm_args"])

    def _check(self) -> None:
        given = self._given
        for name in ("ntasks_per_node", "gpus_per_node", "cpus_per_task", "warn_before", "monarch_port", "attach_to"):
            least = 0 if name in ("warn_before", "gpus_per_node") else 1
            value = given[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} is {value!r}, but must be an integer from {least} on")
        for name in ("python_exe", "job_name", "time_limit", "partition", "mem", "account", "qos"):
            value = given[name]
            if value is not None and (not isinstance(value, str) or not value or set(value) & set("\n\0 ")):
                raise ConfigError(f"{name} is {value!r}, but must be a string without blanks")
        for argument in given["slurm_args"]:
            if not isinstance(argument, str) or not argument.startswith("-") or set(argument) & set("\n\0"):
                raise ConfigError(
                    f"slurm_args has {argument!r}, but an option of sbatch begins with a dash: '--nice=5'"
                )
        for mesh, options in given["mesh_options"].items():
            if mesh not in self._meshes:
                raise ConfigError(f"mesh_options names {mesh!r}, but meshes are {', '.join(map(repr, self._meshes))}")
            unknown = set(options) - set(_PARTS)
            if unknown:
                raise ConfigError(f"mesh_options[{mesh!r}] has {unknown.pop()!r}; it may have {', '.join(_PARTS)}")

    # --- inside an allocation that runs already

    def _start_steps(self, launch: Launch, job: int) -> dict[str, Any]:
        records = queue.look(job)
        status = queue.status_of(records, time.time())
        if status.phase != "running":
            raise ConfigError(f"attach_to is {job}, but that job does not run: {status.message}", cause=status.message)
        wanted = sum(self._meshes.values())
        if wanted > len(status.hosts):
            raise ConfigError(f"meshes want {wanted} nodes, but job {job} has {len(status.hosts)}")
        name = f"monarch-{launch.folder.path.name}"
        first = 0
        with open(launch.log_dir / "job.log", "ab") as log:
            for mesh, count in self._meshes.items():
                where = [f"--jobid={job}", "--overlap", f"--job-name={name}", f"--relative={first}"]
                command = step(launch, mesh, count, self._python, where, self._agent_options)
                subprocess.run(
                    ["setsid", "--fork", "bash", "-c", f"exec {command}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=True,
                )
                first += count
        deadline = time.monotonic() + _ENDING
        self._facts = {"job": job, "steps": name, "log_dir": str(launch.log_dir), "folder": str(launch.folder.path)}
        while not self._steps():
            if time.monotonic() > deadline:
                raise ConfigError(f"no step has begun in job {job} within {_ENDING:g} s{self._log_tail()}")
            time.sleep(_PAUSE)
        return {"job": job, "steps": name}

    def _steps(self) -> list[str]:
        """Those of ours that run."""
        done = run("squeue", "-h", "-s", "-j", str(self.facts["job"]), "-o", "%i %j")
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        return [parts[0] for parts in lines if len(parts) == 2 and parts[1].strip() == self.facts["steps"]]

    # --- the end

    def _is_gone(self) -> bool:
        """Also its last process."""
        records = queue.look(self.facts["job"])
        is_over = queue.status_of(records, time.time()).is_over
        return is_over and not any("COMPLETING" in each.states for each in records)

    def _wait_until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + _ENDING
        while not holds():
            if time.monotonic() > deadline:
                raise NoAnswer(f"{self.name} was cancelled, but {what} has not ended within {_ENDING:g} s")
            time.sleep(_PAUSE)
