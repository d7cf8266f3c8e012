"""The other end of breakpoints: finds the sessions of a job, and talks to pdb in one of them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, RdmaError
from ..failure import SupervisionError
from ..port import Channel
from ..remote_error import ActorError
from .breakpoints import END, PROMPT
from .survey import agent_of, survey

__all__ = ["Attachment", "Waiting", "find_waiting"]

_TIMEOUT = 2.0  # seconds that a process has to answer


@dataclass(frozen=True)
class Waiting:
    """A session. `facts`: what `breakpoints.waiting` tells of it, and its process."""

    address: str
    facts: dict[str, Any]

    @property
    def actor(self) -> str:
        return str(self.facts["actor"])

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    @property
    def coords(self) -> dict[str, int]:
        return dict(self.facts["coords"])

    @property
    def process(self) -> str:
        return str(self.facts["process"])

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])


def find_waiting(address: str) -> list[Waiting]:
    """In all processes of the job of the one at `address`, by actor and rank. Raises ConfigError where that one does
    not answer.
    """
    processes = survey(address, _TIMEOUT)
    if processes[0].status is None:
        raise ConfigError(f"the program does not answer: {processes[0].problem}")
    found = [
        Waiting(process.address, {**facts, "process": process.name, "pid": process.status["pid"]})
        for process in processes
        if process.status is not None
        for facts in process.status["breakpoints"]
    ]
    return sorted(found, key=lambda waiting: (waiting.actor, waiting.rank, waiting.pid))


class Attachment:
    """Attached to a session, until the block ends. `text`: what pdb printed last; `waits`: for a line."""

    def __init__(self, waiting: Waiting) -> None:
        """Raises ConfigError where it is over, or somebody else is attached."""
        self.waiting = waiting
        self.is_over = False
        self._session = waiting.facts["session"]
        self._agent = agent_of(waiting.address)
        port, self._receiver = Channel[tuple[str, str]].open()
        who = f"process {os.getpid()}"
        found = self._ask("debugger_attach", self._session, port, who)
        self.text: str = found["text"]
        self.waits: bool = found["waits"]

    def enter(self, line: str) -> None:
        """A line for pdb. Raises ConfigError where it does not wait for one any more."""
        self._ask("debugger_enter", self._session, line)
        self.waits = False

    def next_text(self, timeout: float | None) -> str:
        """What pdb prints until it waits again, or the session is over. TimeoutError after `timeout` seconds."""
        try:
            kind, text = self._receiver.recv().get(timeout)
        except SupervisionError as error:
            kind, text = END, f"{error}\n"
        self.waits, self.is_over = kind == PROMPT, kind == END
        return text

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_over:
            with contextlib.suppress(ConfigError):  # it is over meanwhile
                self._ask("debugger_detach", self._session)

    def _ask(self, endpoint: str, *args: Any) -> Any:
        try:
            return getattr(self._agent, endpoint).options(timeout=_TIMEOUT).call_one(*args).get()
        except ActorError as error:
            raise ConfigError(str(error.exception)) from error
        except (SupervisionError, RdmaError) as error:
            raise ConfigError(f"process {self.waiting.process} does not answer: {error}") from error
