"""The contract of every job, and the file that keeps what is known of one that runs."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from .. import config
from ..errors import ConfigError, JobEnded, RdmaError
from .status import JobState, JobStatus

__all__ = ["DEFAULT_JOB_PATH", "JobTrait", "job_load", "job_loads", "load_current_job"]

DEFAULT_JOB_PATH = ".monarch/job_state.json"
PathLike = str | os.PathLike[str]
_FORMAT = 1
_log = logging.getLogger("monarch_rdma.job")
Self = TypeVar("Self", bound="JobTrait")


class JobTrait(ABC):
    """A job: hosts that a scheduler is asked for, in named meshes.

    `spec` is what it was made with, `facts` what is known since `apply`: both are made of what JSON knows, and are all
    that is kept in a file. Subclasses implement `spec`, `can_run`, `_create`, `_state`, `_status` and `_kill`; those
    whose hosts run agents of ours are easier made from `ScheduledJob`.
    """

    def __init__(self) -> None:
        self._facts: dict[str, Any] | None = None  # None: not applied
        self._is_kept = False  # in a file that another program can find it by
        self._delegate: JobTrait | None = None  # the one that runs already, and that we stand for

    # --- for programs

    def apply(self, client_script: str | Sequence[str] | None = None) -> None:
        """Asks the scheduler for the hosts; does nothing where that was done already. Does not wait for them.

        `client_script`: batch mode: this program (a Python file, or a command) is run inside the job, whose hosts it
        gets from `state()`; the job ends with it. Raises ConfigError where the scheduler refuses, in its own words.
        """
        if self._running is None:
            self._is_kept = True
            self._apply(_command(client_script))

    def state(self, cached_path: PathLike | None = DEFAULT_JOB_PATH, timeout: float | None = None) -> JobState:
        """The hosts, as soon as all of them are there; asks the scheduler for them if need be.

        `cached_path`: file that says which job runs. One that can do what this one wants is used again, also by another
        program; one that cannot is ended first. None: nothing is kept, and the job ends with this program. In a program
        that a job has started (batch mode), it is the hosts of that job. `timeout`: seconds, also in the queue.

        Raises ConfigError (the scheduler refuses), JobEnded, TransferTimeout (it still waits in the queue).
        """
        own = str(config.get("job_state"))
        if own and self._running is None:
            self._delegate = job_load(own)
        running = self._running
        if running is None:
            with _locked(cached_path):
                running = self._cached(cached_path)
                if running is None:
                    self._is_kept = cached_path is not None
                    running = self
                    self._apply(())
                    if cached_path is not None:
                        self.dump(cached_path)
                else:
                    self._delegate = running
        return running._state(timeout)

    def status(self) -> JobStatus:
        """What the scheduler says of it now. ConfigError where it was not applied."""
        return self._applied()._status()

    def kill(self) -> None:
        """Ends the job and all that runs in it. Does nothing where it is over already, or never was."""
        running = self._running
        if running is not None:
            running._kill()
            running._facts = None
        self._facts, self._delegate = None, None

    @property
    def active(self) -> bool:
        """Whether it was applied and not killed."""
        return self._running is not None

    @property
    def apply_id(self) -> str | None:
        """What tells this application of the job from others."""
        running = self._running
        return None if running is None or running._facts is None else str(running._facts["apply_id"])

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{type(self).__name__} {self.apply_id or '(not applied)'}"

    def dumps(self) -> bytes:
        """What is known of it, for `job_loads`: JSON, nothing secret."""
        running = self._running or self
        kind = f"{type(running).__module__}:{type(running).__qualname__}"
        return json.dumps(
            {"format": _FORMAT, "class": kind, "spec": running.spec(), "facts": running._facts}, indent=1
        ).encode()

    def dump(self, filename: PathLike) -> None:
        """The same, into a file of mode 0600; its directory is made if need be."""
        path = os.path.realpath(filename)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.{os.getpid()}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(self.dumps())
        os.replace(draft, path)

    # --- for subclasses

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The keyword arguments that make a job like this one."""

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether this one, which was applied, has the hosts that `spec` wants, and runs or waits for them."""

    @abstractmethod
    def _create(self, client: tuple[str, ...]) -> dict[str, Any]:
        """Asks the scheduler; returns the facts that the other methods need. They must have an `apply_id`."""

    @abstractmethod
    def _state(self, timeout: float | None) -> JobState:
        """Waits for the hosts and attaches to them."""

    @abstractmethod
    def _status(self) -> JobStatus:
        """What the scheduler says now."""

    @abstractmethod
    def _kill(self) -> None:
        """Ends it; also one that has ended by itself, and leaves nothing behind."""

    @property
    def facts(self) -> dict[str, Any]:
        """What `_create` returned. ConfigError where it was not applied."""
        if self._facts is None:
            raise ConfigError(f"{type(self).__name__} was not applied; call apply() or state() first")
        return self._facts

    # --- the rest

    @property
    def _running(self) -> JobTrait | None:
        if self._delegate is not None:
            return self._delegate
        return self if self._facts is not None else None

    def _applied(self) -> JobTrait:
        running = self._running
        if running is None:
            raise ConfigError(f"{type(self).__name__} was not applied; call apply() or state() first")
        return running

    def _apply(self, client: tuple[str, ...]) -> None:
        self._facts = self._create(client)

    def _cached(self, path: PathLike | None) -> JobTrait | None:
        """The job of that file, if it can do what this one wants; else it is ended."""
        if path is None or not os.path.exists(path):
            return None
        try:
            cached = job_load(path)
        except ConfigError as error:
            raise ConfigError(f"{error}; remove it, or pass another cached_path") from error
        if cached._facts is None:
            return None
        if cached.can_run(self):
            _log.info("%s runs already, and is used again", cached.name)
            return cached
        _log.info("%s cannot run this one, and is ended", cached.name)
        with contextlib.suppress(JobEnded):
            cached._kill()
        os.unlink(os.path.realpath(path))
        return None


def job_loads(data: bytes) -> JobTrait:
    """The job that `dumps` has described. ConfigError where that is something else."""
    try:
        said = json.loads(data)
        module, _, name = str(said["class"]).partition(":")
        spec, facts = dict(said["spec"]), said["facts"]
        if said["format"] != _FORMAT or not (facts is None or isinstance(facts, dict)):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("this is no description of a job, or one by another version") from error
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"job class {module}.{name} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, JobTrait)):
        raise ConfigError(f"{module}.{name} is no class of jobs")
    job = found(**spec)
    job._facts = facts
    job._is_kept = True
    return job


def job_load(filename: PathLike = DEFAULT_JOB_PATH) -> JobTrait:
    """The job that `dump` has written there. ConfigError where it cannot be read, is not ours alone, or is no job."""
    path = os.fspath(filename)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"job file {path!r} cannot be read: {error.strerror}", sys_errno=error.errno or 0) from error
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise ConfigError(f"job file {path!r} is no regular file that only we can write; others could name any job")
        data = file.read()
    try:
        return job_loads(data)
    except RdmaError as error:
        raise ConfigError(f"job file {path!r}: {error}") from error


def load_current_job(filename: PathLike = DEFAULT_JOB_PATH) -> JobTrait:
    """The job that this program was started by, or else the one of that file."""
    return job_load(str(config.get("job_state")) or filename)


def _command(client_script: str | Sequence[str] | None) -> tuple[str, ...]:
    if client_script is None:
        return ()
    command = (client_script,) if isinstance(client_script, str) else tuple(client_script)
    if not command or not all(isinstance(part, str) and part for part in command):
        raise ConfigError(f"client_script is {client_script!r}, but must be a file, or a command as a list of strings")
    if isinstance(client_script, str) and not os.path.isfile(client_script):
        raise ConfigError(f"client_script {client_script!r} is no file")
    return command


@contextlib.contextmanager
def _locked(path: PathLike | None) -> Iterator[None]:
    """Two programs that want the same job do not both ask for it."""
    if path is None:
        yield
        return
    path = os.path.realpath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
