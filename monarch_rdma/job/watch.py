"""Follows a job for its client: what its hosts are told by the scheduler, which of them are lost, and why it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..actor import ActorMesh, HostMesh, MeshFailure, ProcMesh, SupervisionError
from ..actor.runtime.message import Frame
from ..actor.runtime.proc import current_proc
from ..actor.shape import Extent
from ..errors import RdmaError
from ..supervision.events import emit
from .notices import ENDING, NOTICES, JobAgent
from .status import JobStatus

if TYPE_CHECKING:
    from .scheduled import ScheduledJob

__all__ = ["JOB", "JobWatch"]

JOB = "job"  # the kind of a MeshFailure: a job has ended, and its hosts with it
_log = logging.getLogger("monarch_rdma.job")
_SUBSCRIBING = 30.0  # seconds
_PAUSE = 0.2  # seconds between two looks while the scheduler may not know yet
_WARNED_TOGETHER = 60.0  # seconds in which the warnings of several hosts are one


class JobWatch:
    """One thread; it also learns of the loss of agents, and tells `owner` when the job has ended."""

    def __init__(
        self, job: ScheduledJob, meshes: Mapping[str, HostMesh], owner: tuple[str, int], told: JobStatus
    ) -> None:
        """`told`: what was last told of the job; what differs from it is news."""
        self.meshes = dict(meshes)
        self._job = job
        self._owner = owner
        self._proc = current_proc()
        self._queue: queue.SimpleQueue[tuple[str, str, Any] | None] = queue.SimpleQueue()
        self._hosts = {
            address: (name, rank) for name, mesh in meshes.items() for rank, address in enumerate(mesh._chosen())
        }
        self._lost: dict[str, str | None] = {}  # the event that told of it, by address
        self._last = told
        self._warned_at = -_WARNED_TOGETHER
        self._is_closed = False
        self._has_told = False
        self._number = self._proc.register(self)
        self._proc.at_close(self.forget)
        for address in self._hosts:
            self._proc.expect(self._number, address)
        self._subscribe()
        self._thread = threading.Thread(target=self._run, name="monarch_rdma-job", daemon=True)
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        """Whether the client is still the one that has attached, and no host was lost."""
        return not self._is_closed and not self._lost

    def close(self, grace: float) -> None:
        """The client ends the job: its agents end in order, and nothing of it is a failure. Waits `grace` seconds."""
        if self._is_closed:
            return
        self.forget()
        for mesh in self.meshes.values():
            self._proc.host_watch.discard_hosts(mesh._chosen())
        endings = [mesh.shutdown("its job was killed") for mesh in self.meshes.values()]
        deadline = time.monotonic() + grace
        for ending in endings:
            with contextlib.suppress(TimeoutError, SupervisionError, RdmaError):  # the scheduler ends what is left
                ending.get(max(0.0, deadline - time.monotonic()))

    def forget(self) -> None:
        """Ends the thread; says nothing any more."""
        self._is_closed = True
        self._proc.forget(self._number)
        for address in self._hosts:
            self._proc.fulfil(self._number, address)
        self._queue.put(None)

    # --- on the receiving thread: only passes on

    def on_frame(self, frame: Frame) -> None:
        self._queue.put(("notice", frame.address, bytes(frame.body)))

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self._queue.put(("lost", address, error))

    # --- on the watch's own thread

    def _subscribe(self) -> None:
        """Hosts that run a plain worker loop have nothing to say."""
        agents = self._agents(list(self._hosts))
        try:
            agents.subscribe.options(timeout=_SUBSCRIBING).call(self._proc.address, self._number).get()
        except (SupervisionError, RdmaError) as error:
            _log.debug("%s: hosts without notices: %s", self._job.name, error)

    def _agents(self, addresses: list[str]) -> ActorMesh[JobAgent]:
        procs = ProcMesh("hosts", addresses, Extent(["hosts"], [len(addresses)]).region)
        return ActorMesh(JobAgent, "job", NOTICES, procs)

    def _run(self) -> None:
        settles_at = 0.0  # until then the scheduler is asked again and again
        while True:
            is_settling = time.monotonic() < settles_at
            try:
                item = self._queue.get(timeout=_PAUSE if is_settling else self._job.looks_every)
            except queue.Empty:
                item = ("look", "", None)
            if item is None or self._is_closed:
                return
            what, address, about = item
            if what == "lost":
                self._on_host_lost(address, about)
                settles_at = time.monotonic() + self._job.settles_within
            elif what == "notice" and self._on_notice(address, about):
                settles_at = time.monotonic() + self._job.settles_within
            if self._look():
                return

    def _on_host_lost(self, address: str, error: SupervisionError) -> None:
        name, rank = self._hosts[address]
        message = f"{self._job.name}: host {rank} of mesh {name} is lost: {error}"
        self._lost[address] = emit(
            "job.host_lost",
            cause=error.event,
            job=self._job.name,
            mesh=name,
            rank=rank,
            address=address,
            message=message,
        )
        _log.warning("%s", message)

    def _on_notice(self, address: str, body: bytes) -> bool:
        """Whether the host ends."""
        try:
            notice = json.loads(body)
            kind, said = str(notice["kind"]), f"host {notice['host']}: {notice['message']}"
        except (ValueError, KeyError, TypeError):
            return False
        if kind != ENDING:
            if time.monotonic() - self._warned_at > _WARNED_TOGETHER:
                self._warned_at = time.monotonic()
                self._warn(said)
            return False
        _log.warning("%s: the scheduler ends %s", self._job.name, said)
        if not self._look() and self._last.phase == "ending" and not self._job.comes_back:
            self._tell_owner(f"{self._last.sentence(self._job.name)} ({said})", None)
        self._agents([address]).heard.broadcast(self._proc.address)
        return True

    def _warn(self, said: str) -> None:
        status = self._ask()
        left = "" if status is None or status.ends_at is None else f", in {max(0, status.ends_at - time.time()):.0f} s"
        message = f"{self._job.name} will be ended by its scheduler soon{left} ({said})"
        emit("job.warned", job=self._job.name, message=message)
        _log.warning("%s", message)

    def _ask(self) -> JobStatus | None:
        try:
            return self._job._status()
        except (RdmaError, OSError) as error:  # it may not answer for a while
            _log.warning("%s: its scheduler cannot be asked: %s", self._job.name, error)
            return None

    def _look(self) -> bool:
        """Asks the scheduler; whether the job is over. Then its owner is told, once."""
        if self._is_closed:
            return True
        status = self._ask()
        if status is None or self._is_closed:
            return False
        before, self._last = self._last, status
        if (before.phase, before.message) != (status.phase, status.message):
            self._job._tell(status)
        if status.is_over:
            self._on_over(status)
        return status.is_over

    def _on_over(self, status: JobStatus) -> None:
        cause = next(iter(self._lost.values()), None)
        sentence = status.sentence(self._job.name)
        event = emit("job.ended", cause=cause, job=self._job.name, message=sentence)
        _log.error("%s", sentence)
        self._tell_owner(sentence, event)
        self.forget()

    def _tell_owner(self, sentence: str, event: str | None) -> None:
        """Once."""
        if self._has_told:
            return
        self._has_told = True
        for name in self.meshes:
            failure = MeshFailure(name, JOB, sentence, event=event)
            self._proc.tell_owner(self._owner, failure.noted(f"noticed by {self._proc.name}, which has the job"))
