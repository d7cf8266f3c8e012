"""`breakpoint()` in actors: the thread waits in pdb until somebody attaches with `monarch-rdma debug`.

What pdb prints and reads travels in messages of the job. Nobody need ever attach: then the thread waits until its
process ends. If the caller gives the call up meanwhile, the wait ends with the call.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ... import config
from ...errors import ConfigError, RdmaError
from ..context import running
from ..failure import SupervisionError

if TYPE_CHECKING:
    from ..port import Port
    from ..runtime.message import Frame
    from ..runtime.proc import Proc
    from .pdb_session import PdbSession

__all__ = ["END", "PROMPT", "Session", "close_all", "install", "on_cancelled", "session", "waiting"]

_log = logging.getLogger("monarch_rdma.actor")
_MOST_TEXT = 256 << 10  # characters of pdb's output that are kept for who attaches later

# What an attached debugger's port gets: kind and text.
PROMPT = "prompt"  # pdb printed this and waits for a line
END = "end"  # the session is over


class Session:
    """One thread of an actor under pdb, and who is attached to it. It is pdb's stdin and stdout."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._facts: dict[str, Any] = {}
        self._call: Frame | None = None
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._unsent: list[str] = []  # printed since the last message to who is attached
        self._since_input = ""  # for who attaches later
        self._port: Port[tuple[str, str]] | None = None
        self._attached_to: str | None = None
        self._is_waiting = False
        self._is_closed = False
        self.is_over = False
        self.number = proc.register(self)
        _sessions[self.number] = self

    @property
    def is_of_interest(self) -> bool:
        return self._is_waiting or self._port is not None

    def describe(self) -> dict[str, Any]:
        is_cancelled = self._call is not None and self._call.is_cancelled
        return {
            **self._facts,
            "session": self.number,
            "waits": self._is_waiting,
            "attached": self._attached_to,
            "cancelled": is_cancelled,
        }

    # --- for pdb, on the thread that it holds

    def stop_at(self, frame: FrameType) -> None:
        """Who stops, and where."""
        owner, thread = running.get(None), threading.current_thread()
        self._call = owner.response if owner is not None else None
        self._facts = {
            "actor": owner.actor_instance.name if owner is not None else thread.name,
            "rank": owner.actor_instance.rank.rank if owner is not None else 0,
            "coords": dict(owner.actor_instance.rank) if owner is not None else {},
            "endpoint": self._call.method.decode() if self._call is not None else None,
            "thread": thread.native_id,
            "hostname": socket.gethostname(),
            "function": frame.f_code.co_name,
            "file": frame.f_code.co_filename,
            "line": frame.f_lineno,
        }

    def write(self, text: str) -> int:
        self._unsent.append(text)
        return len(text)

    def flush(self) -> None:
        """What was printed goes out when pdb asks for a line."""

    def readline(self) -> str:
        """The next line that somebody enters; "" where nobody will any more."""
        self._tell(PROMPT)
        line = self._lines.get()
        with self._lock:
            self._is_waiting = False
            self._since_input = ""
        return line

    def end(self, why: str = "") -> None:
        """pdb is done with this thread. Idempotent."""
        if self._proc.forget(self.number):
            self.is_over = True
            _sessions.pop(self.number, None)
            self._tell(END, why)
            self.detach()

    # --- for who debugs, on any thread

    def attach(self, port: Port[tuple[str, str]], who: str) -> dict[str, Any]:
        """From now on the port gets what pdb prints. `text`: what it printed since the last input; `waits`: for a line,
        now. Raises ConfigError where somebody is attached already.
        """
        with self._lock:
            if self._port is not None:
                raise ConfigError(f"{self._name} is being debugged by {self._attached_to}")
            self._port, self._attached_to = port, who
            found = {"text": self._since_input, "waits": self._is_waiting}
        self._proc.expect(self.number, port.address)
        return found

    def enter(self, line: str) -> None:
        """A line for pdb. Raises ConfigError where pdb does not wait for one."""
        with self._lock:
            if not self._is_waiting:
                raise ConfigError(f"{self._name} runs: it takes no input now")
            self._is_waiting = False
        self._lines.put(line.rstrip("\n") + "\n")

    def detach(self) -> None:
        """It goes on waiting, for somebody else; unless its caller has given the call up. Idempotent."""
        with self._lock:
            port, self._port, self._attached_to = self._port, None, None
        if port is not None:
            self._proc.fulfil(self.number, port.address)
            if self._call is not None and self._call.is_cancelled:
                self.close()

    def close(self) -> None:
        """Nobody will enter anything any more: pdb quits, and the endpoint ends with bdb.BdbQuit."""
        self._is_closed = True
        self._lines.put("")

    def on_cancelled(self, call: Frame) -> None:
        if call is self._call and self._port is None:
            self.close()

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Who was attached is gone, or this process's actors end."""
        if address == self._proc.address:
            self.close()
        else:
            self.detach()

    @property
    def _name(self) -> str:
        return f"{self._facts.get('actor')} {self._facts.get('rank')}"

    def _tell(self, kind: str, text: str = "") -> None:
        text = "".join(self._unsent) + text
        self._unsent.clear()
        with self._lock:
            self._since_input = (self._since_input + text)[-_MOST_TEXT:]
            self._is_waiting = kind == PROMPT
            port = self._port
        if port is None:
            return
        try:
            port.send((kind, text))
        except (SupervisionError, RdmaError) as error:
            _log.debug("who was attached does not listen any more: %s", error)
            self.detach()


_sessions: dict[int, Session] = {}
_of_thread = threading.local()
_owner: Proc | None = None  # whose actors have the hook
_others_hook: Callable[..., Any] = sys.__breakpointhook__


def install(proc: Proc) -> None:
    """From now on `breakpoint()` in an actor of this process waits for somebody to attach; until `close_all`."""
    global _others_hook, _owner
    if sys.breakpointhook is not _hook:
        _others_hook, sys.breakpointhook = sys.breakpointhook, _hook
    _owner = proc


def close_all(proc: Proc) -> None:
    """The process's actors end: nobody waits in them any longer."""
    global _owner
    if proc is not _owner:
        return
    _owner = None
    if sys.breakpointhook is _hook:
        sys.breakpointhook = _others_hook
    for session in list(_sessions.values()):
        session.close()


def waiting() -> list[dict[str, Any]]:
    """The sessions that wait for input or are attached: actor, rank, place in the source."""
    return [session.describe() for session in list(_sessions.values()) if session.is_of_interest]


def session(number: int) -> Session:
    """Raises ConfigError where it is over."""
    found = _sessions.get(number)
    if found is None:
        raise ConfigError("it does not wait at a breakpoint any more")
    return found


def on_cancelled(call: Frame) -> None:
    """Its caller has given it up."""
    for each in list(_sessions.values()):
        each.on_cancelled(call)


def _hook(*args: Any, **kwargs: Any) -> Any:
    """What `breakpoint()` calls."""
    frame, proc, found = sys._getframe(1), _owner, running.get(None)
    if config.python_breakpoint():
        return sys.__breakpointhook__(*args, **kwargs)
    if proc is None or proc.pid != os.getpid() or (found is None and proc.client == proc.address):
        return _others_hook(*args, **kwargs)  # the client's own code has a terminal
    if found is not None and found.is_cancelled:
        return None
    debugger = _debugger_of_thread(proc)
    debugger.announce(frame)
    return debugger.set_trace(frame)


def _debugger_of_thread(proc: Proc) -> PdbSession:
    """The one that still holds this thread, or a new one."""
    from .pdb_session import PdbSession

    found: PdbSession | None = getattr(_of_thread, "debugger", None)
    if found is not None and not found.session.is_over:
        return found
    new = Session(proc)
    _of_thread.debugger = PdbSession(new)
    _of_thread.life = _Life()
    weakref.finalize(_of_thread.life, new.end, "its thread has ended")
    return _of_thread.debugger  # type: ignore[no-any-return]


class _Life:
    """Goes with the thread that has it."""
