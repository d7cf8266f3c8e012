"""Where what workers print comes together: in the client's process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import config
from ..encoding.codec import encode
from ..failure import SupervisionError
from ..launch.logs import LogPrinter, Terminal
from ..runtime import message
from ..runtime.message import Frame

if TYPE_CHECKING:
    from ..runtime.proc import Proc

__all__ = ["LOGS", "LogSink", "post_lines", "post_option"]

LOGS = 5  # the number of the sink in its process


class LogSink:
    """Prints lines of processes on any host, as they come or folded; see LogPrinter."""

    def __init__(self) -> None:
        self._terminal = Terminal()
        self._printer = self._new_printer(float(config.get("log_window")))
        self._hidden: set[str] = set()  # names of processes whose lines are not shown
        self._lock = threading.Lock()

    def on_frame(self, frame: Frame) -> None:
        if frame.kind != message.SEND:
            return
        kind, *what = frame.load()
        if kind == "lines":
            name, stream, lines = what
            if name not in self._hidden and config.get("log_forwarding"):
                self._printer.add(name, stream, lines)
        else:
            self._set_option(*what)

    def on_lost(self, address: str, error: SupervisionError) -> None:
        """Waits for nobody."""

    def _new_printer(self, window: float | None) -> LogPrinter:
        return LogPrinter(self._terminal.write, window, bool(config.get("log_prefix")))

    def close(self) -> None:
        """Waits until all is printed."""
        self._printer.flush()
        self._terminal.close()

    def _set_option(self, names: Sequence[str], shown: bool, window: float | None) -> None:
        with self._lock:
            self._hidden = self._hidden.difference(names) if shown else self._hidden.union(names)
            self._printer.flush()
            self._printer = self._new_printer(window)


def post_lines(proc: Proc, client: str, name: str, stream: str, lines: Sequence[str]) -> None:
    """Hands lines of the process `name` to the client's sink. Never waits."""
    proc.post_quietly(client, message.pack(message.SEND, LOGS), encode(("lines", name, stream, list(lines))).body)


def post_option(proc: Proc, client: str, names: Sequence[str], shown: bool, window: float | None) -> None:
    """Whether the client shows the lines of these processes, and for how many seconds it gathers similar ones."""
    proc.post(client, message.pack(message.SEND, LOGS), encode(("option", list(names), shown, window)).body, 60.0)
