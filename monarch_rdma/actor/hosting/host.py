"""One host's agent: starts processes from a warmed template, watches them, ends them.

The agent of a program's own host runs in the program itself; those of other hosts are processes of their own
(`run_worker_loop_forever`). It is an actor like any other, under a number that everyone knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ... import config
from ...errors import ConfigError, RdmaError, TransferTimeout
from ...supervision.events import emit
from ..actor import Actor
from ..debugging.process_facts import facts_of
from ..debugging.registry import announce
from ..endpoint import concurrent_endpoint
from ..failure import STUCK, MeshFailure, SupervisionError
from ..future import Future
from ..joining.introduction import introduce
from ..launch.launcher import ProcessSpec, Started, Template
from ..launch.post_mortem import hint, oom_kills
from ..mesh import HostMesh, ProcMesh
from ..runtime import message
from ..runtime.message import Frame
from ..runtime.proc import AGENT, Proc, current_proc, name_of
from ..shape import Extent
from .log_sink import post_lines
from .owners import Owners
from .pulse import Pulse
from .worker import leave, planted

__all__ = [
    "HOST",
    "STOPPED",
    "BootstrapCommand",
    "HostAgent",
    "Order",
    "default_bootstrap_cmd",
    "start_agent",
    "this_host",
]

T = TypeVar("T")

HOST = 3  # the number of the agent in its process
STOPPED = "stopped"  # the kind of a failure that is none: for who would start the process again
_ORPHANS_TIMEOUT = 1.0  # seconds for processes whose owner is gone, before they are killed
_GRACE = 1.0  # seconds that processes have for their cleanup when this one ends; those that hang are gone within 2


@dataclass(frozen=True)
class BootstrapCommand:
    """How processes are started: the Python to use (None: that of their host's agent, which for this program's own host
    is this program's), and variables that differ from the agent's.
    """

    python: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        return BootstrapCommand(self.python, {**self.env, **env})


def default_bootstrap_cmd() -> BootstrapCommand:
    """What is used where none is given."""
    return BootstrapCommand()


@dataclass(frozen=True)
class Order:
    """One process to start. Its payload is worker.seed()."""

    spec: ProcessSpec
    python: str | None
    preload: tuple[str, ...]
    is_supervised: bool = False  # its owner starts it again, unless it is told that this was not wanted


class Arrivals:
    """Addresses of processes that came up."""

    def __init__(self, proc: Proc, count: int) -> None:
        self._proc = proc
        self._changed = threading.Condition()
        self.addresses: dict[int, str] = {}
        self._count = count
        self._problem = ""
        self.number = proc.register(self)

    def on_frame(self, frame: Frame) -> None:
        with self._changed:
            if frame.flags & message.FAILED:
                self._problem = self._problem or bytes(frame.body).decode("utf-8", "replace")
            else:
                self.addresses[frame.rank] = bytes(frame.body).decode()
            self._changed.notify_all()

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Of processes that are not known yet, the template tells."""

    def on_exit(self, rank: int, started: Started) -> None:
        with self._changed:
            if rank not in self.addresses and not self._problem:
                self._problem = f"process {started.name} ended ({_how(started.returncode)}) before it was ready"
                self._problem += _last_lines(started)
            self._changed.notify_all()

    def wait(self, timeout: float) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: self._problem or len(self.addresses) == self._count, timeout)
            if self._problem:
                raise SupervisionError(self._problem)
            if len(self.addresses) != self._count:
                missing = self._count - len(self.addresses)
                raise TransferTimeout(f"{missing} of {self._count} processes did not come up within {timeout} s")
            return [self.addresses[rank] for rank in range(self._count)]


@dataclass
class _Child:
    """A process that the agent started."""

    started: Started
    rank: int  # in its mesh
    mesh: str
    owner: tuple[str, int]
    client: str
    is_supervised: bool
    oom_kills: int  # that the kernel had counted when it began
    is_wanted: bool = True
    signalled_by: str | None = None  # the event of it

    def signal(self, number: int, event: str | None) -> bool:
        """False where it has ended."""
        self.signalled_by = event
        return self.started.kill(number)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT, None)

    def emit(self, kind: str, address: str, **fields: Any) -> str:
        """An event of this process; its id."""
        process = self.started
        return emit(
            kind, mesh=self.mesh, rank=self.rank, name=process.name, child=process.pid, address=address, **fields
        )


class HostAgent(Actor):
    """Serves `HostMesh` and `ProcMesh`."""

    def __init__(self, ends_at_shutdown: bool = False) -> None:
        self._templates: dict[tuple[str, tuple[str, ...], str], Template] = {}
        self._children: dict[str, _Child] = {}  # by address
        self._ends_at_shutdown = ends_at_shutdown
        self._proc = current_proc()
        self._clients = {self._proc.address}  # that have joined, or have spawned themselves
        self._spawning: Counter[str] = Counter()  # by client
        self._lock = threading.Lock()
        self._proc.at_close(self.close)
        self._owners = Owners(self._proc, self._release)
        self._pulse = Pulse(self._proc, self._on_stuck)

    @concurrent_endpoint
    async def join(self, client: str) -> None:
        """This client will use the host; if it is lost, what it started here ends."""
        self._proc.is_back(client)
        self._know(client)

    def _know(self, client: str) -> None:
        with self._lock:
            self._clients.add(client)
        self._owners.watch(client)

    @concurrent_endpoint
    async def part(self, client: str) -> None:
        """The client is done with this host: what it started here ends."""
        await _aside(self._release, client, "its client has parted")

    @concurrent_endpoint
    async def spawn(
        self, orders: list[Order], mesh: str, first_rank: int, owner: tuple[str, int], client: str, timeout: float
    ) -> list[str]:
        """Starts processes; their addresses, in order. All or none. What they print goes to `client`."""
        return list(await _aside(self._spawn, orders, mesh, first_rank, owner, client, timeout))

    def _spawn(
        self, orders: list[Order], mesh: str, first_rank: int, owner: tuple[str, int], client: str, timeout: float
    ) -> list[str]:
        if client == owner[0]:
            self._know(client)
        self._owners.watch(owner[0])
        with self._lock:
            self._spawning[client] += 1
        arrivals = Arrivals(self._proc, len(orders))
        oom_kills_before = oom_kills()
        started: list[Started] = []
        fd = self._proc.engine.secret.to_fd()
        try:
            for (python, preload), group in itertools.groupby(orders, lambda order: (order.python, order.preload)):
                seeded = [_seeded(order.spec, rank, arrivals) for rank, order in enumerate(group, len(started))]
                started += self._template(python, preload, client).spawn(seeded, [fd], timeout)
            for rank, process in enumerate(started):
                process.on_exit(partial(arrivals.on_exit, rank))
            addresses = arrivals.wait(timeout)
        except BaseException:
            for process in started:
                process.kill()
            raise
        finally:
            os.close(fd)
            self._proc.forget(arrivals.number)
            with self._lock:
                self._spawning[client] -= 1
        with self._lock:
            for rank, (address, process) in enumerate(zip(addresses, started, strict=True)):
                child = self._children[address] = _Child(
                    process, first_rank + rank, mesh, owner, client, orders[rank].is_supervised, oom_kills_before
                )
                child.emit("process.started", address)
        self._owners.watch(owner[0])  # lost meanwhile: it is told again
        for address, process in zip(addresses, started, strict=True):
            self._pulse.watch(address, process)
            process.on_exit(partial(self._on_exit, address))
        return addresses

    @concurrent_endpoint
    async def stop_procs(self, addresses: list[str], reason: str) -> None:
        await _aside(self._stop, addresses, reason)

    @concurrent_endpoint
    async def stop_all(self, reason: str) -> None:
        await _aside(self._stop_all, reason)

    @concurrent_endpoint
    async def shutdown(self, reason: str) -> None:
        await _aside(self._stop_all, reason)
        await _aside(self.close)
        if self._ends_at_shutdown:
            leave(reason)

    @concurrent_endpoint
    async def processes(self) -> list[dict[str, Any]]:
        """Ours, and those that were started here and live, with what the kernel tells of them. `is_host`: of one that
        is nothing but a host's agent.
        """
        with self._lock:
            children = list(self._children.items())
        found = [(self._proc.name, self._proc.address, os.getpid(), self._proc.client is None)]
        found += [(child.started.name, address, child.started.pid, False) for address, child in children]
        return [
            {"process": name, "address": address, "facts": facts_of(pid), "is_host": is_host}
            for name, address, pid, is_host in found
        ]

    @concurrent_endpoint
    async def signal(self, address: str, number: int, seconds: float, event: str) -> None:
        """Sends a signal to a process that was started here, and SIGCONT after `seconds`, if any. `event`: the id of
        the event that says so, the cause of the process's end. ConfigError where there is no such process.
        """
        child = self._children.get(address)
        if child is None or not child.signal(number, event):
            raise ConfigError(f"process {name_of(address)} is none that this host's agent has started and that lives")
        if seconds > 0:
            self._proc.timers.at(time.monotonic() + seconds, child.go_on)

    @concurrent_endpoint
    async def dump(self, pid: int) -> list[dict[str, Any]]:
        """The Python stacks of one of these processes, or of ours, by py-spy; ConfigError where they cannot be had."""
        from ..debugging import py_spy

        with self._lock:
            ours = {os.getpid(), *(child.started.pid for child in self._children.values())}
        if pid not in ours:
            raise ConfigError(f"process {pid} was not started by this host's agent")
        return await _aside(py_spy.dump, pid)

    def __cleanup__(self, error: BaseException | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes, however they are, and prints what they printed last."""
        with self._lock:
            templates, self._templates = list(self._templates.values()), {}
            for child in self._children.values():
                child.is_wanted = False
        for template in templates:  # side by side
            template.begin_close(_GRACE)
        for template in templates:
            template.close(_GRACE)

    def _template(self, python: str | None, preload: tuple[str, ...], client: str) -> Template:
        """Each client has its own: what its processes print goes to it."""
        python = python or sys.executable
        with self._lock:
            found = self._templates.get((python, preload, client))
            if found is None or found.process.returncode is not None:
                found = Template(python=python, preload=preload, on_lines=partial(self._on_lines, client))
                self._templates[python, preload, client] = found
            return found

    def _release(self, owner: str, reason: str) -> None:
        """Ends what a process owned that is lost or has parted."""
        emit("owner.lost", address=owner, message=reason)
        with self._lock:
            self._clients.discard(owner)
            addresses = [address for address, child in self._children.items() if child.owner[0] == owner]
        self._stop(addresses, f"its owner {name_of(owner)} is gone: {reason}", _ORPHANS_TIMEOUT)
        self._owners.unwatch(owner)
        self._close_idle_templates()

    def _close_idle_templates(self) -> None:
        """Those of clients that are gone."""
        with self._lock:
            here = self._clients | {child.client for child in self._children.values()} | set(+self._spawning)
            templates = [self._templates.pop(key) for key in list(self._templates) if key[2] not in here]
        for template in templates:  # side by side
            template.begin_close(_GRACE)
        for template in templates:
            template.close(_GRACE)

    def _stop_all(self, reason: str) -> None:
        """Those who would start them again are told."""
        with self._lock:
            supervised = [(address, child) for address, child in self._children.items() if child.is_supervised]
        for address, child in supervised:
            self._proc.tell_owner(child.owner, MeshFailure(child.mesh, STOPPED, reason, child.rank, address=address))
        self._stop(list(self._children), reason)

    def _stop(self, addresses: Sequence[str], reason: str, timeout: float | None = None) -> None:
        with self._lock:
            children = {address: self._children.pop(address) for address in addresses if address in self._children}
            for child in children.values():
                child.is_wanted = False
        if not children:
            return
        timeout = float(config.get("process_exit_timeout")) if timeout is None else timeout
        deadline = time.monotonic() + timeout
        with contextlib.suppress(SupervisionError, RdmaError):  # some are gone already, or this process ends too
            self._agents(list(children)).leave.broadcast(reason)
        for address, child in children.items():
            if self._proc.is_lost(address):  # stopped, or cut off: it hears nothing
                child.started.kill()
            if child.started.wait(max(0.0, deadline - time.monotonic())) is None:
                child.started.kill()
                child.started.wait(timeout)
            child.emit("process.stopped", address, returncode=child.started.returncode, reason=reason)
        self._unwatch_idle_owners({child.owner[0] for child in children.values()})

    def _unwatch_idle_owners(self, owners: set[str]) -> None:
        with self._lock:
            idle = owners - self._clients - {child.owner[0] for child in self._children.values()}
            for owner in idle:
                self._owners.unwatch(owner)

    def _agents(self, addresses: Sequence[str]) -> Any:
        from ..mesh import ActorMesh
        from .agent import ProcAgent

        living = [address for address in addresses if not self._proc.is_lost(address)]
        region = Extent(["procs"], [len(living)]).region if living else None
        if region is None:
            return _Nobody()
        return ActorMesh(ProcAgent, "agent", AGENT, ProcMesh("agents", living, region))

    def _on_exit(self, address: str, process: Started) -> None:
        with self._lock:
            child = self._children.pop(address, None)
        verdict = self._pulse.verdict(process)
        if child is None:
            return
        if not child.is_wanted:
            child.emit("process.stopped", address, returncode=process.returncode, reason="its host's agent ends")
            return
        self._unwatch_idle_owners({child.owner[0]})
        message = f"process {process.name} (pid {process.pid}) ended: {verdict or _how(process.returncode)}"
        lines = tuple(line for lines in process.tail(20).values() for line in lines)
        event = child.emit(
            "process.failed",
            address,
            cause=child.signalled_by,
            returncode=process.returncode,
            message=message,
            lines=lines,
        )
        failure = MeshFailure(
            child.mesh,
            "process",
            message,
            child.rank,
            process.returncode,
            lines,
            address=address,
            event=event,
            hint=hint(
                process.returncode,
                has_core=process.has_core,
                new_oom_kills=oom_kills() - child.oom_kills,
                was_ours=verdict is not None,
            ),
        )
        self._proc.tell_owner(child.owner, failure.noted(f"noticed by the agent of its host, {self._proc.name}"))

    def _on_stuck(self, address: str, process: Started, seconds: float) -> str:
        why = f"process {process.name} (pid {process.pid}) lives, but has run no Python for {seconds:.3g} s"
        event = emit("process.stuck", child=process.pid, name=process.name, address=address, message=why)
        with self._lock:
            child = self._children.get(address)
        if child is not None and child.is_wanted:
            hint = "something holds its GIL; `monarch-rdma stacks` shows where it is"
            failure = MeshFailure(child.mesh, STUCK, why, child.rank, event=event, hint=hint)
            self._proc.tell_owner(child.owner, failure.noted(f"noticed by the agent of its host, {self._proc.name}"))
        return event

    def _on_lines(self, client: str, process: Started, stream: str, lines: list[str]) -> None:
        post_lines(self._proc, client, process.name, stream, lines)


async def _aside(function: Callable[..., T], *args: Any) -> T:
    """Runs what takes long on a thread that does not hold up the end of the program: other messages go on."""
    loop, future = asyncio.get_running_loop(), Future[T].pending()
    waiter = future.waiter(loop)

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_error(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="host-agent", daemon=True).start()
    await waiter
    return future.get()


class _Nobody:
    """A mesh without members: nothing is sent."""

    def __getattr__(self, name: str) -> _Nobody:
        return self

    def __call__(self, *args: Any) -> None:
        return None


def _seeded(spec: ProcessSpec, rank: int, arrivals: Arrivals) -> ProcessSpec:
    """The spec with the agent's part of the payload put in."""
    return dataclasses.replace(spec, payload=planted(spec.name, rank, arrivals.number, spec.payload))


def _how(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"


def _last_lines(started: Started) -> str:
    lines = [line for kept in started.tail(10).values() for line in kept]
    return "; it printed last:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


_starting = threading.Lock()


def this_host() -> HostMesh:
    """The host that this process runs on, as a mesh of one without dimensions."""
    proc = current_proc()
    if proc.hosts is None:
        with _starting:
            if proc.hosts is None:
                start_agent(proc)
    return proc.hosts  # type: ignore[return-value]


def start_agent(proc: Proc, *, ends_at_shutdown: bool = False) -> None:
    """Makes this process the agent of its host."""
    announce(proc)  # first: an option that cannot be honoured is told each time
    host = HostMesh("host", [proc.address], Extent([], []).region)
    proc.start_local(HOST, HostAgent, "host", ends_at_shutdown)
    proc.hosts = host
    introduce(proc)
