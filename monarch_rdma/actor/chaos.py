"""Carries plans of faults out on the processes of a program. The plans are in supervision/chaos; see docs/chaos.md."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..errors import ConfigError, RdmaError
from ..supervision.chaos import moments
from ..supervision.chaos.carry_out import carry_out
from ..supervision.chaos.plan import HOST, Fault, Plan
from ..supervision.events import emit
from .debugging.inspection import known_hosts
from .debugging.survey import Process, agent_of, children_of, host_agent_of
from .failure import SupervisionError
from .remote_error import ActorError
from .runtime.proc import current_proc, name_of

__all__ = ["Injected", "Injector", "inject_here", "targets"]

_TIMEOUT = 5.0  # seconds for an agent to answer
_OWN_END = ("break_link", "cut_link")  # the same from either end
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Injected:
    """What became of a fault. `target`, `peer`: names of the processes that were chosen; "" for none. `problem`: why
    it could not be done, or "". `event`: the id of the event that tells of it.
    """

    fault: Fault
    target: str
    peer: str
    problem: str
    event: str


def targets(hosts: Sequence[str] | None = None) -> list[Process]:
    """The processes that faults can happen to: those that the agents of these hosts have started, and these agents
    where they are processes of their own, named "host:...". `hosts`: None for all that this process knows.
    """
    return _known(hosts, "")[0]


def _known(hosts: Sequence[str] | None, program: str) -> tuple[list[Process], list[Process]]:
    """Those that can be hit, and all others that can be the other end of a link: agents, and the program itself."""
    agents = known_hosts(current_proc()) if hosts is None else list(hosts)
    found = [
        replace(process, name=HOST + process.name) if process.is_host else process
        for process in children_of(agents, _TIMEOUT)
    ]
    can_be_hit = [process.is_host or process.address not in agents for process in found]
    others = [process for process, is_target in zip(found, can_be_hit, strict=True) if not is_target]
    if program and program not in agents:
        others.append(Process(name_of(program), program, "", None))
    return list(itertools.compress(found, can_be_hit)), others


class Injector:
    """Carries out a plan, on processes of this program, or of the program that this process has joined.

    `with Injector(plan) as injector:` does it aside, until the block ends; `run()` does it in this thread. Each fault
    is an event "fault.injected", followed by "fault.failed" where it could not be done; `Plan.of_events` makes a plan
    of them again.
    """

    def __init__(self, plan: Plan, *, hosts: Sequence[str] | None = None, program: str | None = None) -> None:
        """`hosts`: addresses of agents, None for those that this process knows. `program`: address of the program's own
        process, None for this one.
        """
        self._plan = plan
        self._program = current_proc().address if program is None else program
        self._hosts = hosts
        self._stop = threading.Event()
        self._began = 0.0
        self._done: list[Injected] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def injected(self) -> list[Injected]:
        """All so far, also those that could not be done, in the order in which they ended."""
        with self._lock:
            return list(self._done)

    def run(self, told: Callable[[Injected], object] = lambda _: None) -> None:
        """Returns when all is done, or after `stop`. `told` is called after each, on a thread of its own."""
        self._began = time.monotonic()
        at_moments = [fault for fault in self._plan.faults if fault.moment]
        at_times = [fault for fault in self._plan.faults if not fault.moment]
        under_way = []
        for fault in itertools.chain(at_moments, at_times):
            if self._stop.wait(max(0.0, 0.0 if fault.moment else self._began + fault.at - time.monotonic())):
                break
            # One that takes long, as the agent of a process that hangs does not answer, does not delay the others.
            thread = threading.Thread(
                target=self._inject_and_tell, args=(fault, told), name="monarch_rdma-injector", daemon=True
            )
            thread.start()
            under_way.append(thread)
        for thread in under_way:
            thread.join()

    def stop(self) -> None:
        """No further fault. Those that last go on for their time."""
        self._stop.set()

    def _inject_and_tell(self, fault: Fault, told: Callable[[Injected], object]) -> None:
        injected = self.inject(fault)
        with self._lock:
            self._done.append(injected)
        told(injected)

    def inject(self, fault: Fault) -> Injected:
        """Carries out one fault now (or arms it, where it has a moment). What cannot be done is no exception."""
        at = time.monotonic() - self._began if self._began else 0.0
        can_be_hit, others = _known(self._hosts, self._program)
        processes = {process.name: process for process in (*can_be_hit, *others)}
        started = [each.name for each in can_be_hit]
        target = fault.choose_target(started)
        peer = fault.choose_peer(processes, target or "") if fault.has_peer else ""
        missing = ""
        if target is None:
            missing = f"no process matches {fault.target!r}; there are {', '.join(sorted(started)) or 'none'}"
        elif peer is None:
            missing = f"no other process matches {fault.peer!r}; there are {', '.join(sorted(processes))}"
        record: dict[str, Any] = {
            "fault": asdict(replace(fault, at=round(at, 6))),
            "target": target or "",
            "peer": peer or "",
        }
        if target is None or missing:
            return Injected(fault, target or "", peer or "", missing, emit("fault.failed", message=missing, **record))
        facts = processes[target].facts
        event = emit("fault.injected", child=facts.pid if facts is not None else None, **record)
        problem = _tried(fault, processes[target], processes[peer].address if peer else "", event)
        if problem:
            emit("fault.failed", cause=event, message=problem, **record)
        return Injected(fault, target, peer or "", problem, event)

    def __enter__(self) -> Injector:
        self._thread = threading.Thread(target=self.run, name="monarch_rdma-chaos", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()


def _tried(fault: Fault, target: Process, peer_address: str, event: str) -> str:
    """Why it could not be done, or ""."""
    try:
        if fault.kind in _OWN_END and not fault.moment and peer_address == current_proc().address:
            carry_out(fault, target.address)  # of our own connection: no answer would come from the other end
        elif fault.kind in _SIGNALS and not fault.moment and not target.is_host:
            signalled = host_agent_of(target.host).signal.options(timeout=_TIMEOUT)
            signalled.call_one(target.address, int(_SIGNALS[fault.kind]), fault.seconds, event).get()
        else:
            inject = agent_of(target.address).inject.options(timeout=_TIMEOUT)
            inject.call_one(asdict(fault), peer_address, event).get()
    except ActorError as error:
        return str(error.exception)
    except (SupervisionError, RdmaError) as error:
        is_done = fault.kind == "kill" and target.is_host and isinstance(error, SupervisionError)
        return "" if is_done else str(error)  # one that kills itself does not answer
    return ""


def inject_here(fault: dict[str, Any], peer_address: str, event: str) -> None:
    """For this process's agent: carries it out, or arms it for its moment."""
    given = Fault.from_dict(fault)
    if given.moment:
        moments.arm(given, partial(_at_moment, peer_address=peer_address, event=event))
    else:
        carry_out(given, peer_address)


def _at_moment(fault: Fault, peer_address: str, event: str) -> None:
    emit("fault.struck", cause=event, moment=fault.moment, fault=asdict(fault))
    try:
        carry_out(fault, peer_address)
    except (ConfigError, RdmaError) as error:
        emit("fault.failed", cause=event, message=str(error), fault=asdict(fault), target=current_proc().name, peer="")
