"""Jobs whose hosts run agents of ours: how the secret gets there, how the client attaches, how the end is noticed."""

from __future__ import annotations

import logging
import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..actor import HostMesh, attach_to_workers, context
from ..actor.joining.transport import be_found_by_other_hosts
from ..actor.runtime.proc import Proc, current_proc, existing_proc
from ..errors import AuthenticationError, ConfigError, PeerLost, RdmaError, TransferTimeout
from ..rdma.secret import Secret, configured_secret
from ..supervision.events import emit
from .folder import JobFolder
from .logs import FileLogs, Log
from .status import JobState, JobStatus
from .trait import JobTrait
from .watch import JobWatch

__all__ = ["Launch", "ScheduledJob", "check_mesh_name", "check_meshes"]

_log = logging.getLogger("monarch_rdma.job")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between two looks at a job that waits
_SLICE = 3.0  # seconds of attaching between two looks at the scheduler
_GRACE = 5.0  # seconds for the agents to end in order before the scheduler ends them


@dataclass(frozen=True)
class Launch:
    """What a scheduler has to start. `log_dir`: for files with what is printed. `client`: the command of the program
    that runs inside the job, or (). `idle`, `linger`: how long hosts stay without any client, at first and later, in
    seconds.
    """

    folder: JobFolder
    log_dir: Path
    client: tuple[str, ...]
    idle: float
    linger: float

    def agent(self, python: str, *more: str, secret: str = "") -> list[str]:
        """The command that makes a host one of the job's, to be run there. `more`: further arguments of job.agent, such
        as `--address`. `secret`: where it finds the secret there, by default in the folder; "-" is standard input.
        """
        where = ["--secret", secret or str(self.folder.secret_file), "--job", self.folder.path.name]
        command = [python, "-m", "monarch_rdma.job.agent", *where, *more]
        limits = (("--idle", self.idle), ("--linger", self.linger))
        return command + [text for name, value in limits if value < math.inf for text in (name, f"{value:g}")]

    def client_command(self, python: str, *, ends_job: bool) -> list[str]:
        """The command that runs the client. `ends_job`: the job has to be ended when the client is over."""
        client = [python, *self.client] if len(self.client) == 1 else list(self.client)
        ends = ["--kill"] if ends_job else []
        return [python, "-m", "monarch_rdma.job.batch", *ends, str(self.folder.state_file), *client]


class ScheduledJob(JobTrait):
    """Subclasses say how their scheduler is asked (`_submit`), looked at (`_status`) and told to end it (`_cancel`),
    and where the agents listen, if not where the job's folder says (`_workers`).
    """

    reaches_other_hosts: ClassVar[bool] = True  # whether client and agents may be on several hosts
    looks_every: ClassVar[float] = 15.0  # seconds between two looks at the scheduler while nothing happens
    settles_within: ClassVar[float] = 5.0  # seconds in which the scheduler knows why a host was lost
    on_progress: Callable[[JobStatus], None] | None = None  # called while the job waits, when something has changed

    def __init__(
        self, meshes: Mapping[str, int] | None, *, idle_timeout: float = math.inf, log_dir: str | None = None
    ) -> None:
        """`meshes`: how many hosts each has; None where they are added later. `idle_timeout`: seconds after which hosts
        that no client uses end.
        `log_dir`: where the job's files with what is printed go; by default `.monarch/logs` and the job's own number.
        """
        super().__init__()
        self._meshes = {} if meshes is None else check_meshes(meshes)
        self._log_dir = log_dir
        if not (isinstance(idle_timeout, int | float) and idle_timeout > 0):
            raise ConfigError(f"idle_timeout is {idle_timeout!r}, but must be a positive number of seconds")
        self._idle_timeout = float(idle_timeout)
        self._watch: JobWatch | None = None

    @property
    def comes_back(self) -> bool:
        """Whether the scheduler begins the job anew when it has taken the hosts away."""
        return False

    # --- what a scheduler has to bring

    @abstractmethod
    def _submit(self, launch: Launch) -> dict[str, Any]:
        """Asks for the hosts, each of which is to run `launch.agent(...)`. What has to be known later, as JSON. Raises
        ConfigError with the scheduler's own words where it refuses; nothing may be left then.
        """

    @abstractmethod
    def _cancel(self) -> None:
        """Tells the scheduler to end the job, and waits until it has. Also of a job that is over."""

    def _workers(self) -> dict[str, list[str]]:
        """The addresses of each mesh's agents, in order of rank, as `attach_to_workers` takes them."""
        folder = self.folder
        return {
            name: [folder.agent_address(name, rank, is_shared=self.reaches_other_hosts) for rank in range(count)]
            for name, count in self._meshes.items()
        }

    def _log_tail(self) -> str:
        """The last lines that the agents have printed, where they can be had: for jobs that end before they begin."""
        return ""

    def _logs(self, *, follow: bool) -> Sequence[Log]:
        """Where to read what agents and client have printed; `follow`: what they will print, too. ConfigError where
        that cannot be had from here, with what to try.
        """
        return [FileLogs(Path(self.facts["log_dir"]), self.name)]

    # --- the contract

    @property
    def folder(self) -> JobFolder:
        return JobFolder(Path(self.facts["folder"]))

    def can_run(self, spec: JobTrait) -> bool:
        if type(spec) is not type(self) or spec.spec() != self.spec() or not self.folder.is_ours():
            return False
        return not self._status().is_over

    def _create(self, client: tuple[str, ...]) -> dict[str, Any]:
        apply_id = secrets.token_hex(6)
        folder = JobFolder.create(apply_id, _secret_of_new_job())
        kept = self._idle_timeout
        log_dir = Path(self._log_dir or Path(".monarch", "logs", apply_id)).absolute()
        launch = Launch(folder, log_dir, client, idle=kept, linger=kept if self._is_kept else 0.0)
        facts: dict[str, Any] = {"apply_id": apply_id, "folder": str(folder.path), "log_dir": str(log_dir)}
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            facts |= self._submit(launch)
            self._facts = facts
            self.dump(folder.state_file)
        except BaseException:
            self._facts = None
            folder.remove()
            raise
        emit("job.applied", job=self.name, meshes=self._meshes)
        return facts

    def _state(self, timeout: float | None) -> JobState:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self._watch is not None and self._watch.is_attached:
            status = self._status()
            self._raise_if_over(status)
            if status.phase == "running":
                return JobState(self._watch.meshes)
        if (begun := existing_proc()) is not None:  # it may end while the job waits in the queue
            self._end_with(begun)
        told = self._wait_for_hosts(deadline)
        if self.reaches_other_hosts:
            be_found_by_other_hosts()
        workers = self._workers()
        meshes = {name: self._attach(name, addresses, deadline) for name, addresses in workers.items()}
        owner = context().actor_instance.owner_reference
        self._watch = JobWatch(self, meshes, owner, told)
        self._end_with(current_proc())
        return JobState(meshes)

    def _kill(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(_GRACE)
        self._cancel()
        self.folder.remove()

    def _end_with(self, proc: Proc) -> None:
        if not self._is_kept:
            proc.at_close(self._end_quietly)

    # --- waiting

    def _wait_for_hosts(self, deadline: float) -> JobStatus:
        """Until the scheduler says that it runs: its words."""
        pause, before = _FIRST_PAUSE, None
        while True:
            status = self._status()
            if (status.phase, status.message) != before:
                before = (status.phase, status.message)
                self._tell(status)
            self._raise_if_over(status)
            if status.phase == "running":
                return status
            if time.monotonic() + pause > deadline:
                raise TransferTimeout(
                    f"{status.sentence(self.name)}; the wait for it is over, and it stays in the queue until kill()",
                    peer=self.name,
                    operation="job",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _attach(self, name: str, addresses: list[str], deadline: float) -> HostMesh:
        """Agents may need a while to begin; where the job ends meanwhile, that is what is told."""
        secret = self.folder.secret_file
        while True:
            wait = max(0.1, min(_SLICE, deadline - time.monotonic()))
            try:
                return attach_to_workers(private_key=secret, workers=addresses, name=name, timeout=wait)
            except AuthenticationError:
                raise
            except (PeerLost, TransferTimeout) as error:
                self._raise_if_over(self._status(), error)
                if time.monotonic() > deadline:
                    tail = self._log_tail()
                    raise TransferTimeout(
                        f"{self.name} runs, but not all of its hosts answer: {error}{tail}", peer=self.name
                    ) from error

    def _raise_if_over(self, status: JobStatus, cause: BaseException | None = None) -> None:
        if status.is_over:
            error = status.error(self.name)
            tail = self._log_tail()
            if tail:
                error.args = (f"{error}{tail}",)
            raise error from cause

    def _tell(self, status: JobStatus) -> None:
        emit("job.status", job=self.name, phase=status.phase, message=status.message)
        _log.info("%s", status.sentence(self.name))
        if self.on_progress is not None:
            self.on_progress(status)

    def _end_quietly(self) -> None:
        """The program ends, and nobody else can find this job."""
        if self._facts is None:
            return
        try:
            if self._watch is not None:
                self._watch.forget()
                self._watch = None
            self._cancel()
            self.folder.remove()
        except (RdmaError, OSError) as error:
            _log.warning("%s could not be ended: %s", self.name, error)
        self._facts = None


def check_meshes(meshes: Mapping[str, int]) -> dict[str, int]:
    """A copy. ConfigError unless there are names, and hosts for each."""
    if not isinstance(meshes, Mapping) or not meshes:
        raise ConfigError(f"meshes is {meshes!r}, but must say how many hosts each mesh has, such as {{'trainers': 2}}")
    for name, count in meshes.items():
        check_mesh_name(name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"meshes[{name!r}] is {count!r}, but must be a number of hosts from 1 on")
    return dict(meshes)


def check_mesh_name(name: object) -> str:
    """ConfigError unless it can be an attribute of the state, and part of a file's name."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise ConfigError(f"mesh {name!r} must be named by letters, digits and underscores, such as 'trainers'")
    return name


def _secret_of_new_job() -> Secret:
    """A process has one secret: if it has one already, it is the job's too."""
    proc = existing_proc()
    if proc is not None:
        return proc.engine.secret
    return configured_secret() or Secret.generate()
