"""The command's part of jobs: `monarch-rdma run`, `apply`, `exec`, `status`, `kill`, `logs`."""

from __future__ import annotations

import contextlib
import importlib
import json
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .. import config
from ..actor import Actor, HostMesh, endpoint, shutdown_context
from ..actor.launch.placement import environment
from ..errors import ConfigError
from .scheduled import ScheduledJob
from .status import JobState, JobStatus
from .trait import JobTrait, job_load

__all__ = ["apply", "execute", "kill", "logs", "run", "status"]

_LOOK = 0.2  # seconds between two looks at files that are followed
_ASK = 3.0  # seconds between two questions to the scheduler meanwhile
_KILLED = 5.0  # seconds for a program that is asked to end


def run(job: ScheduledJob, command: Sequence[str]) -> int:
    """Runs a program here with the hosts of a job of its own, which ends with it; the program's exit code."""
    with _progress(job):
        job.apply()
    try:
        with _progress(job):
            job._wait_for_hosts(float("inf"))
        script = [sys.executable, *command] if command[0].endswith(".py") else list(command)
        variables = environment({config.OPTIONS["job_state"].env: str(job.folder.state_file)})
        with _ignored(signal.SIGINT), subprocess.Popen(script, env=variables) as program:
            try:
                code = program.wait()
            except BaseException:
                program.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(_KILLED)
                program.kill()
                raise
        return code if code >= 0 else 128 - code
    except FileNotFoundError as error:
        raise ConfigError(f"the program cannot be run: {error}") from error
    finally:
        job.kill()


def apply(spec: str, state: str, client: Sequence[str], wait: bool) -> int:
    """Asks for the job that a file or module has under a name, and keeps it in the file `state`."""
    job = _job_of(spec)
    if Path(state).exists() and (old := job_load(state)).active:
        if old.can_run(job):
            print(old.status().sentence(old.name))
            return 0
        raise ConfigError(f"{state} has another job, {old.name}; end it first: monarch-rdma kill --state {state}")
    job.apply(list(client) or None)
    job.dump(state)
    print(f"{job.name} was applied", flush=True)
    if wait and isinstance(job, ScheduledJob):
        with _progress(job):
            job._wait_for_hosts(float("inf"))
    return 0


def status(state: str, as_json: bool) -> int:
    """What the scheduler says; exit code 1 where the job is over."""
    job = job_load(state)
    said = job.status()
    if as_json:
        facts = {"job": job.name, "phase": said.phase, "message": said.message, "advice": said.advice}
        print(json.dumps({**facts, "hosts": said.hosts, "ends_at": said.ends_at}))
    else:
        print(said.sentence(job.name))
    return 1 if said.is_over else 0


def kill(state: str) -> int:
    """Ends the job, and removes the file."""
    job = job_load(state)
    name = job.name
    job.kill()
    Path(state).unlink()
    print(f"{name} was ended")
    return 0


def logs(state: str, follow: bool) -> int:
    """What agents and client have printed, each line with its log's name; exit code 1 where some cannot be read."""
    job = job_load(state)
    if not isinstance(job, ScheduledJob):
        raise ConfigError(f"{job.name} has no logs: what it prints is this program's")
    found = list(job._logs(follow=follow))
    is_over, code, asked = not follow, 0, time.monotonic()
    try:
        while found:
            for log in found.copy():
                for line in log.read(to_its_end=is_over):
                    print(line, flush=True)
                if log.problem:
                    print(f"{job.name}: a log cannot be read: {log.problem}", file=sys.stderr, flush=True)
                    code = 1
                    found.remove(log)
                    log.close()
            if is_over:
                break
            time.sleep(_LOOK)
            if time.monotonic() - asked > _ASK:
                asked = time.monotonic()
                is_over = job.status().is_over
    finally:
        for log in found:
            log.close()
    return code


def execute(
    state: str, command: Sequence[str], mesh: str | None, point: Mapping[str, int], per_host: int, everywhere: bool
) -> int:
    """Runs a command on hosts of the job, what it prints being shown here; the largest exit code.

    `mesh`: which; needed where there are several, unless `everywhere`. `point`: a host, such as {"hosts": 1}.
    """
    job = job_load(state)
    with _progress(job):
        hosts = _chosen(job.state(), mesh, everywhere)
    try:
        codes: list[int] = []
        running = []
        for each in hosts:
            procs = (each.slice(**point) if point else each).spawn_procs({"procs": per_host} if per_host > 1 else None)
            running.append(procs.spawn("command", _Command).run.call(list(command), str(Path.cwd())))
        for call in running:
            codes += call.get().values()
        return max(codes)
    finally:
        shutdown_context().get()


class _Command(Actor):
    @endpoint
    def run(self, command: list[str], directory: str) -> int:
        """What it prints is this process's, which the client shows. `directory`: where to run it, if it is there."""
        here = directory if Path(directory).is_dir() else None
        try:
            code = subprocess.run(command, cwd=here, stdin=subprocess.DEVNULL, check=False).returncode
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            return 127
        return code if code >= 0 else 128 - code


def _chosen(state: JobState, mesh: str | None, everywhere: bool) -> list[HostMesh]:
    if everywhere:
        return [state[name] for name in state]
    if mesh is None and len(state) > 1:
        raise ConfigError(f"the job has several meshes: name one of {', '.join(state)} by --mesh, or use --all")
    try:
        return [state[next(iter(state)) if mesh is None else mesh]]
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None


def _job_of(spec: str) -> JobTrait:
    """`path/job.py`, `path/job.py:name` or `module:name`; the name is `job` unless it is given."""
    where, _, name = spec.partition(":")
    name = name or "job"
    try:
        if where.endswith(".py"):
            found: Any = runpy.run_path(where).get(name)
        else:
            sys.path.insert(0, str(Path.cwd()))
            found = getattr(importlib.import_module(where), name, None)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error}") from error
    if not isinstance(found, JobTrait):
        raise ConfigError(f"{where} has no job called {name!r}; name it as in {where}:my_job")
    return found


@contextlib.contextmanager
def _ignored(number: int) -> Iterator[None]:
    """Ctrl-C is the program's, which gets it too."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _progress(job: JobTrait, to: TextIO | None = None) -> Iterator[None]:
    """Shows what the scheduler says while the job waits: on a terminal one line with the seconds that have passed."""
    stream = to or sys.stderr
    if not isinstance(job, ScheduledJob):
        yield
        return
    began, said, over = time.monotonic(), [""], threading.Event()

    def on_progress(status: JobStatus) -> None:
        said[0] = status.sentence(job.name)
        if not stream.isatty():
            print(said[0], file=stream, flush=True)

    def show() -> None:
        while not over.wait(1.0):
            if said[0]:
                print(f"\r\033[K{said[0]} ({time.monotonic() - began:.0f} s)", end="", file=stream, flush=True)

    job.on_progress = on_progress
    shower = threading.Thread(target=show, daemon=True)
    if stream.isatty():
        shower.start()
    try:
        yield
    finally:
        over.set()
        job.on_progress = None
        if stream.isatty():
            shower.join()
            print("\r\033[K", end="", file=stream, flush=True)
