"""Failures of actors and processes, as their callers and owners see them."""

from __future__ import annotations

import logging
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError
from ..supervision.events import emit
from .encoding.codec import Outgoing, encode
from .remote_error import RemoteError

if TYPE_CHECKING:
    from .runtime.message import Frame

__all__ = [
    "ENDED",
    "STUCK",
    "MeshFailure",
    "StateError",
    "SupervisionError",
    "decode_failure",
    "encode_failure",
    "unhandled",
    "unhandled_fault_hook",
]

_log = logging.getLogger("monarch_rdma.actor")


class SupervisionError(RuntimeError):
    """The actor or the process that was asked has failed or ended; the call will never be answered.

    `endpoint` names the method that was called, or is None. `event`: the id of what the event log says of it, or None.
    """

    def __init__(self, message: str, endpoint: str | None = None, event: str | None = None) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.event = event

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.endpoint, self.event)


class StateError(RuntimeError):
    """The state of an actor could not be taken, kept, or given to its next incarnation; the message says why."""


@dataclass(frozen=True)
class MeshFailure:
    """What an owner is told when something it spawned has failed.

    `kind`: "actor" (an exception in a message that nobody waits for, in `__init__` or in `__cleanup__`), "process" (it
    ended, was killed or was cut off), or "stuck", which is none, but a warning for `__stuck__`. `rank`: in the mesh of
    that name, or None. `exit_code`: of a process, negative for a signal. `lines`: the last ones that the process
    printed. `hint`: what else is known of the end of a process. `timeline`: when (time.time() of whoever says so) it
    was noticed, what was decided, who was told. `at_birth`: an actor's `__init__` failed, or `__restore__`.
    `host`: the agent that was lost, and the process with it.
    """

    mesh_name: str
    kind: str
    message: str
    rank: int | None = None
    exit_code: int | None = None
    lines: tuple[str, ...] = ()
    causes: tuple[MeshFailure, ...] = field(default=())
    address: str | None = None  # of the process that failed
    event: str | None = None  # the id of what the event log says of it
    number: int | None = None  # of the actor that failed, in its process
    hint: str = ""
    timeline: tuple[tuple[float, str], ...] = ()
    at_birth: bool = False
    host: str | None = None

    @property
    def mesh(self) -> str:
        return self.mesh_name

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended the process."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    def noted(self, what: str) -> MeshFailure:
        """The same failure with one more line in its time line."""
        return replace(self, timeline=(*self.timeline, (time.time(), what)))

    def in_mesh(self, name: str, rank: int) -> MeshFailure:
        """The same failure, of a member of that mesh."""
        return replace(self, mesh_name=name, rank=rank, address=None)

    def report(self) -> str:
        """Everything that is known, for people."""
        where = f"{self.kind} failure in mesh {self.mesh_name!r}"
        if self.rank is not None:
            where += f", rank {self.rank}"
        parts = [f"{where}: {self.message}"]
        if self.hint:
            parts.append(f"hint: {self.hint}")
        if self.lines:
            parts.append("last lines it printed:\n" + _indented("\n".join(self.lines)))
        if self.timeline:
            parts.append("time line:\n" + _indented("\n".join(self._times())))
        parts += ["because of:\n" + _indented(cause.report()) for cause in self.causes]
        return "\n".join(parts)

    def _times(self) -> Iterator[str]:
        """The first by the clock of the day, those after it in seconds from there."""
        first = self.timeline[0][0]
        for index, (when, what) in enumerate(self.timeline):
            clock = time.strftime("%H:%M:%S", time.localtime(first)) + f"{first % 1:.3f}"[1:]
            yield f"{f'{when - first:+.3f} s' if index else clock:>12}  {what}"

    def __str__(self) -> str:
        return self.report()


STUCK = "stuck"  # the kind of a failure that is none: an actor or a process works for too long on something
ENDED = "ended"  # another one: an actor has ended as it wanted to; for who would start it again


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def encode_failure(
    error: BaseException, actor: str = "", frame: Frame | None = None, codec: str = "pickle"
) -> Outgoing:
    """What goes back in place of a value. `actor` and `frame`: whose exception it is; without, it is the library's."""
    if not actor and isinstance(error, SupervisionError):
        return encode(("supervision", str(error), error.endpoint), codec=codec)
    if not actor:  # sent on purpose, through a port: it is raised as it is
        return encode(("sent", *RemoteError.pack(error, actor="").to_tuple()))
    rank = frame.rank if frame is not None and frame.extent else None
    endpoint = frame.method.decode() if frame is not None else None
    packed = RemoteError.pack(error, actor=actor, rank=rank, endpoint=endpoint, as_text=codec == "safe")
    return encode(("actor", *packed.to_tuple()), codec=codec)


def decode_failure(value: Any, accept: str = "pickle") -> BaseException:
    """The exception to raise where the value was wanted. `accept`: "safe" takes its text alone."""
    if isinstance(value, tuple) and value[:1] == ("actor",):
        return RemoteError.from_tuple(value[1:]).unpack(as_text=accept == "safe")
    if isinstance(value, tuple) and value[:1] == ("sent",):
        return RemoteError.from_tuple(value[1:]).unpack(as_text=accept == "safe").exception
    if isinstance(value, tuple) and len(value) == 3 and value[0] == "supervision":
        return SupervisionError(str(value[1]), value[2])
    raise ProtocolError(f"a failure is malformed: {value!r:.200}")


def _end_program(failure: MeshFailure) -> None:
    print(f"monarch_rdma: nothing handles this failure, so the program ends.\n{failure.report()}", file=sys.stderr)
    sys.exit(1)


# Called in the client for a failure that no `__supervise__` handled; programs replace it in monarch_rdma.actor.
unhandled_fault_hook: Callable[[MeshFailure], None] = _end_program


def unhandled(failures: Sequence[MeshFailure]) -> None:
    """Runs the hook for each. Where it raises (SystemExit by default), the main thread ends, from wherever it is."""
    from .. import actor

    hook = getattr(actor, "unhandled_fault_hook", unhandled_fault_hook)
    try:
        for failure in failures:
            emit(
                "fault.unhandled",
                cause=failure.event,
                mesh=failure.mesh_name,
                rank=failure.rank,
                report=failure.report(),
            )
            hook(failure)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            _log.exception("unhandled_fault_hook failed")
        if threading.current_thread() is threading.main_thread():
            raise
        _end_quietly()
        # It wakes the main thread from any wait. Shells start jobs in the background with SIGINT ignored.
        number = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _end_quietly() -> None:
    """The report is out: where the main thread happened to be does not matter."""
    before = sys.excepthook

    def after_the_report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)

    sys.excepthook = after_the_report
